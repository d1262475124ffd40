//! The probe leaves nothing behind and says what this kind of machine can do.

use super::*;

#[test]
fn names_are_unique_and_in_kebab_case() {
    let mut names: Vec<&str> = Capability::ALL.iter().map(|capability| capability.name()).collect();
    for name in &names {
        assert!(name.bytes().all(|byte| byte == b'-' || byte.is_ascii_lowercase()), "{name}");
    }
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), Capability::ALL.len());
    assert_eq!(format!("{:<6}|", Capability::Kvm), "kvm   |");
}

#[test]
fn everything_is_tried_and_nothing_is_left() {
    let scratch = tempfile::tempdir().unwrap();
    let found = Capabilities::probe(scratch.path());
    for (capability, finding) in found.iter() {
        println!("{capability:<22} {finding:?}");
    }
    assert_eq!(found.iter().count(), Capability::ALL.len());
    // What the rest of the tests stand on.
    let needed = [
        Capability::ErofsFileBacked,
        Capability::FanotifyPreContent,
        Capability::Fuse,
        Capability::OverlayDescriptors,
        Capability::IdmappedMounts,
        Capability::CloneIntoCgroup,
        Capability::MemfdSeals,
        Capability::Seccomp,
    ];
    assert_eq!(found.first_missing(&needed), None, "{found:?}");
    assert_eq!(std::fs::read_dir(scratch.path()).unwrap().count(), 0);
    let group = format!("lamella-probe-{}-", std::process::id());
    for root in ["/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/memory"] {
        let Ok(entries) = std::fs::read_dir(root) else { continue };
        for entry in entries {
            let name = entry.unwrap().file_name();
            assert!(!name.to_string_lossy().starts_with(&group), "{root}/{name:?}");
        }
    }
}

#[test]
fn what_was_not_asked_for_is_untested() {
    let scratch = tempfile::tempdir().unwrap();
    let found = Capabilities::probe_only(scratch.path(), &[Capability::Pidfd]);
    assert!(found.has(Capability::Pidfd) && !found.has(Capability::MemfdSeals));
    let finding = found.finding(Capability::MemfdSeals).unwrap();
    assert!(matches!(finding, Finding::Untested { .. }));
    assert_eq!(found.first_missing(&[Capability::Pidfd]), None);
    assert!(!skip_test("this_test", scratch.path(), &[Capability::Pidfd]));
}

#[test]
fn a_missing_thing_says_why_and_what_helps() {
    let absent = Path::new("/proc/self/absent");
    let found = Capabilities::probe_only(absent, &[Capability::ErofsFileBacked]);
    match found.finding(Capability::ErofsFileBacked).unwrap() {
        Finding::Missing { errno, reason, remedy } => {
            assert_eq!(*errno, Some(libc::ENOENT));
            assert!(!reason.is_empty() && remedy.contains("6.12"));
        }
        other => panic!("{other:?}"),
    }
}
