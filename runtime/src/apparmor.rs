//! AppArmor profiles of sandboxes, one for each named profile: generated as text, and loaded when a node starts
//! where the kernel has AppArmor.
//!
//! A second wall: it repeats what mounts, capabilities and the filter hold, so that a mistake in one of them is
//! not the end. Where it cannot be loaded the node starts without it and says so.

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};
use sys::profile::Profile;

/// Where the kernel says that AppArmor decides.
const ENABLED: &str = "/sys/module/apparmor/parameters/enabled";
/// Of the package `apparmor`.
const PARSER: &str = "apparmor_parser";

/// Files of the kernel that nobody in a sandbox reads or writes.
const KERNEL_FILES: [&str; 8] = [
    "kallsyms",
    "kcore",
    "keys",
    "kpagecgroup",
    "kpagecount",
    "kpageflags",
    "sysrq-trigger",
    "timer_list",
];

/// The names of capabilities that AppArmor has, by their numbers.
const CAPABILITIES: [&str; 41] = [
    "chown",
    "dac_override",
    "dac_read_search",
    "fowner",
    "fsetid",
    "kill",
    "setgid",
    "setuid",
    "setpcap",
    "linux_immutable",
    "net_bind_service",
    "net_broadcast",
    "net_admin",
    "net_raw",
    "ipc_lock",
    "ipc_owner",
    "sys_module",
    "sys_rawio",
    "sys_chroot",
    "sys_ptrace",
    "sys_pacct",
    "sys_admin",
    "sys_boot",
    "sys_nice",
    "sys_resource",
    "sys_time",
    "sys_tty_config",
    "mknod",
    "lease",
    "audit_write",
    "audit_control",
    "setfcap",
    "mac_override",
    "mac_admin",
    "syslog",
    "wake_alarm",
    "block_suspend",
    "audit_read",
    "perfmon",
    "bpf",
    "checkpoint_restore",
];

/// Loads the profiles of all sandboxes, if there is AppArmor. Whether commands can be put under them.
pub fn load() -> bool {
    let enabled = std::fs::read_to_string(ENABLED).unwrap_or_default();
    if enabled.trim() != "Y" {
        return false;
    }
    let loaded = Profile::ALL.into_iter().try_for_each(|profile| parse(profile, &["--replace"]));
    if let Err(error) = &loaded {
        tracing::warn!(%error, "sandboxes run without their AppArmor profiles");
    }
    loaded.is_ok()
}

fn parse(profile: Profile, how: &[&str]) -> std::io::Result<()> {
    let mut parser = Command::new(PARSER)
        .args(["--skip-cache", "--quiet"])
        .args(how)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()?;
    if let Some(mut input) = parser.stdin.take() {
        input.write_all(text(profile).as_bytes())?;
    }
    let ended = parser.wait_with_output()?;
    if ended.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&ended.stderr);
    Err(std::io::Error::other(format!("{PARSER}: {}", said.trim())))
}

/// The text of a profile. Each line is a rule; what no rule allows is denied.
fn text(profile: Profile) -> String {
    let name = profile.security_label();
    let mut text = format!("profile \"{name}\" flags=(attach_disconnected,mediate_deleted) {{\n");
    let mut rule = |rule: &str| {
        // Writing to a string cannot fail.
        let _written = writeln!(text, "  {rule},");
    };
    rule("file");
    let families: &[&str] = match profile {
        Profile::StrictOffline => &["unix"],
        Profile::Strict => &["unix", "inet", "inet6"],
        Profile::Default | Profile::Build => &["unix", "inet", "inet6", "netlink"],
    };
    for family in families {
        rule(&format!("network {family}"));
    }
    rule("unix");
    let kept = profile.capabilities().bits();
    for (number, capability) in CAPABILITIES.iter().enumerate() {
        if kept & 1 << number != 0 {
            rule(&format!("capability {capability}"));
        }
    }
    rule(&format!("signal (send, receive) peer=\"{name}\""));
    rule("signal (receive) peer=unconfined");
    if !profile.separates_commands() {
        rule(&format!("ptrace peer=\"{name}\""));
    }
    for refused in ["mount", "remount", "umount", "pivot_root"] {
        rule(&format!("deny {refused}"));
    }
    for file in KERNEL_FILES {
        rule(&format!("deny /proc/{file} rwklx"));
    }
    for tree in ["/proc/sys/**", "/sys/**"] {
        rule(&format!("deny {tree} wl"));
    }
    text.push_str("}\n");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_has_a_line_for_each_right_and_no_more() {
        let (strict, default) = (text(Profile::StrictOffline), text(Profile::Default));
        assert!(!strict.contains("capability") && !strict.contains("inet"), "{strict}");
        assert!(!strict.contains("\n  ptrace"), "{strict}");
        let rights = Profile::Default.capabilities().bits().count_ones();
        assert_eq!(default.matches("  capability").count(), rights as usize, "{default}");
        assert!(default.contains("  capability chown,\n") && default.contains("  ptrace peer="));
        for profile in Profile::ALL {
            let text = text(profile);
            assert!(text.contains("  deny mount,\n") && !text.contains("sys_admin"), "{text}");
        }
    }

    #[test]
    fn the_parser_of_apparmor_takes_every_profile() {
        for profile in Profile::ALL {
            // Compiles, and asks nothing of the kernel.
            parse(profile, &["--skip-kernel-load"]).unwrap();
        }
    }
}
