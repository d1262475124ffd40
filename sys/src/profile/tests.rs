//! Tests of the table: every number under every profile, and where arguments decide.

use super::*;
use crate::seccomp::tests::{call, run};

const ALLOWED: u32 = libc::SECCOMP_RET_ALLOW;
const NO_ARGUMENTS: [u64; 6] = [0; 6];

#[test]
fn every_number_gets_the_verdict_of_the_table_under_every_profile() {
    for profile in Profile::ALL {
        let (filter, table) = (profile.filter(), profile.verdicts());
        for number in 0..1000 {
            let expected = match table.get(number as usize) {
                Some(Verdict::Always(action)) => *action,
                Some(Verdict::First { .. }) => continue,
                None => Action::Errno(libc::ENOSYS as u16),
            };
            let found = call(&filter, number, NO_ARGUMENTS);
            assert_eq!(found, expected.value(), "{profile} {number}");
        }
        assert!(filter.length() < 440, "{profile}: {}", filter.length());
    }
}

/// Numbers under which two profiles have different verdicts.
fn differences(one: Profile, other: Profile) -> Vec<libc::c_long> {
    let (one, other) = (one.verdicts(), other.verdicts());
    let differs = |number: &usize| one[*number] != other[*number];
    (0..one.len()).filter(differs).map(|number| number as libc::c_long).collect()
}

#[test]
fn profiles_differ_in_these_calls_and_in_no_other() {
    let sorted = |lists: &[&[libc::c_long]]| {
        let mut all = lists.concat();
        all.sort_unstable();
        all
    };
    let sockets = &[libc::SYS_socket, libc::SYS_socketpair];
    let nodes = &[libc::SYS_mknod, libc::SYS_mknodat];
    let strict = sorted(&[STRICT_CALLS, sockets, nodes]);
    assert_eq!(differences(Profile::Default, Profile::Strict), strict);
    assert_eq!(differences(Profile::Default, Profile::StrictOffline), strict);
    assert_eq!(differences(Profile::Strict, Profile::StrictOffline), sorted(&[sockets]));
    assert_eq!(differences(Profile::Default, Profile::Build), sorted(&[BUILD_CALLS]));
}

#[test]
fn no_profile_lets_a_call_reach_beyond_a_sandbox() {
    let beyond = DENIED_CALLS.iter().filter(|call| !BUILD_CALLS.contains(call));
    let beyond: Vec<_> = beyond.chain(ABSENT_CALLS).copied().collect();
    for profile in Profile::ALL {
        let filter = profile.filter();
        for number in &beyond {
            assert_ne!(call(&filter, *number, NO_ARGUMENTS), ALLOWED, "{profile} {number}");
        }
    }
}

#[test]
fn arguments_decide_where_they_must() {
    let denied = DENIED.value();
    for profile in Profile::ALL {
        let filter = profile.filter();
        let call = |number, arguments| call(&filter, number, arguments);
        let swap_extents = 0xc0c0_586d;
        assert_eq!(call(libc::SYS_ioctl, [3, swap_extents, 0, 0, 0, 0]), denied);
        assert_eq!(call(libc::SYS_ioctl, [3, 0x5401, 0, 0, 0, 0]), ALLOWED);
        assert_eq!(call(libc::SYS_clone, [0x1000_0011, 0, 0, 0, 0, 0]), denied);
        assert_eq!(call(libc::SYS_clone, [0x11, 0, 0, 0, 0, 0]), ALLOWED);
        // CLONE_PARENT.
        assert_eq!(call(libc::SYS_clone, [0x8011, 0, 0, 0, 0, 0]), denied);
        let known: &[u64] = match profile {
            Profile::Default | Profile::Build => &[1, 2, 10, 16],
            Profile::Strict => &[1, 2, 10],
            Profile::StrictOffline => &[1],
        };
        let no_family = Action::Errno(libc::EAFNOSUPPORT as u16).value();
        for family in 0..64 {
            let expected = if known.contains(&family) { ALLOWED } else { no_family };
            for number in [libc::SYS_socket, libc::SYS_socketpair] {
                assert_eq!(call(number, [family, 1, 0, 0, 0, 0]), expected, "{profile} {family}");
            }
        }
        let odd = call(libc::SYS_personality, [5, 0, 0, 0, 0, 0]);
        assert_eq!(odd == ALLOWED, profile == Profile::Build, "{profile}");
        let node = |kind: u32| call(libc::SYS_mknodat, [3, 1, u64::from(kind | 0o644), 0, 0, 0]);
        assert_eq!(node(libc::S_IFCHR) == denied, profile.separates_commands(), "{profile}");
        assert_eq!(node(libc::S_IFIFO), ALLOWED);
    }
}

#[test]
fn the_limit_of_core_dumps_can_be_read_and_not_changed() {
    let done = PRETENDED.value();
    for profile in Profile::ALL {
        let filter = profile.filter();
        let core = u64::from(libc::RLIMIT_CORE);
        let prlimit = |resource, new| {
            call(&filter, libc::SYS_prlimit64, [0, resource, new, 0x7fff_0000_1000, 0, 0])
        };
        // Also by an address whose lower half is zero, and with rubbish above the number.
        for new in [0x7fff_0000_1000, 1 << 32, 8] {
            assert_eq!(prlimit(core, new), done, "{profile} {new:#x}");
            assert_eq!(prlimit(core | 9 << 32, new), done, "{profile} {new:#x}");
            assert_eq!(prlimit(7, new), ALLOWED, "{profile} {new:#x}");
        }
        assert_eq!(prlimit(core, 0), ALLOWED, "{profile}");
        let setrlimit = |resource| call(&filter, libc::SYS_setrlimit, [resource, 8, 0, 0, 0, 0]);
        assert_eq!((setrlimit(core), setrlimit(7)), (done, ALLOWED), "{profile}");
    }
}

#[test]
fn other_abis_get_no_call_at_all() {
    let absent = Action::Errno(libc::ENOSYS as u16).value();
    for profile in Profile::ALL {
        let filter = profile.filter();
        assert_eq!(run(&filter, 0x4000_0003, 3, NO_ARGUMENTS), absent);
        assert_eq!(call(&filter, 0x4000_0000, NO_ARGUMENTS), absent);
    }
}

#[test]
fn names_and_numbers_come_back() {
    for profile in Profile::ALL {
        assert_eq!(Profile::of_number(profile.number()), Some(profile));
        let named = profile.to_string().parse::<Profile>().unwrap();
        assert_eq!(named.without_network(), profile.without_network());
    }
    assert_eq!(Profile::of_number(4), None);
    assert_eq!("Strict".parse::<Profile>(), Err(UnknownProfile));
}
