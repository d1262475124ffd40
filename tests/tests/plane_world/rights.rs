//! Who may do what: root, and two other users.

use super::View;
use rustix::fs::{Access, AtFlags, CWD};
use std::os::fd::AsFd;
use std::os::unix::process::CommandExt;
use std::process::Command;
use sys::mount::{AttributeChange, IdMap, IdRange, Recursive};

/// What user 1000, and a stranger, may do with everything below a folder: one line each. Chains of more than
/// nine links are left out: a walk that the kernel begins anew counts its links twice, on ext4 too, so a
/// long chain is refused now and then.
const SURVEY: &str = r#"
cd "$0" || exit 9
for path in rights/* rights/folder-*/inside special/* xattrs/few links/[!c]* links/chain-?; do
    line="$path"
    for right in r w x; do
        test -$right "$path" && line="$line $right"
    done
    true 2>/dev/null <"$path" && line="$line read"
    echo "$line"
done
"#;

pub fn other_users(view: &View) {
    for (user, group) in [(1000, 1000), (2000, 1000), (2000, 2000), (0, 0)] {
        view.same(format!("the rights of user {user}, group {group}"), |root| {
            // Pipes have nobody at their other end.
            let survey = SURVEY.replace("special/*", "special/null");
            let mut command = Command::new("/bin/sh");
            command.arg("-c").arg(survey).arg(root).uid(user).gid(group);
            let output = command.output()?;
            assert!(output.status.success(), "{output:?}");
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        });
    }
    // A set-user-id program is one here too. `id -u` of busybox tells the effective user.
    view.same("the names of attributes that a user sees", |root| {
        let mut command = Command::new("getfattr");
        command.args(["-d", "-m", "-", "few"]).current_dir(root.join("xattrs"));
        let output = command.uid(1000).gid(1000).output();
        Ok(output.map(|output| output.stdout).unwrap_or_default())
    });
}

/// Sandboxes mount layers so that each owner shows as one of the sandbox's users. Not those of the plane
/// `fuse`, which has to know who asks.
pub fn shifted_owners(view: &View) {
    if view.kind == fsd::PlaneKind::Fuse {
        return;
    }
    const FIRST: u32 = 0x1234_0000;
    let range = IdRange { from: 0, to: FIRST, count: 65_536 };
    let map = IdMap { users: vec![range], groups: vec![range] };
    let namespace = map.user_namespace().unwrap();
    view.same("owners through a mount that shifts them", |root| {
        let copy = sys::mount::clone_tree(root, Recursive::No)?;
        let idmap = Some(namespace.as_fd());
        copy.set_attributes(&AttributeChange { idmap, ..AttributeChange::default() })?;
        let mut found = Vec::new();
        for name in ["", "rights/0644-0", "rights/0755-1000", "links/nowhere"] {
            let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH;
            let stat = rustix::fs::statat(&copy, name, flags)?;
            assert!(stat.st_uid >= FIRST, "{name} shows {} of the host", stat.st_uid);
            found.push((name, stat.st_uid - FIRST, stat.st_gid - FIRST));
        }
        Ok(found)
    });
}

pub fn access(view: &View) {
    for name in
        ["rights/0000-0", "rights/0644-0", "rights/0755-1000", "sizes", "links/nowhere", "x"]
    {
        for right in [Access::EXISTS, Access::READ_OK, Access::WRITE_OK, Access::EXEC_OK] {
            view.same(format!("access of {name}, {right:?}"), |root| {
                Ok(rustix::fs::accessat(CWD, root.join(name), right, AtFlags::empty())?)
            });
        }
    }
}
