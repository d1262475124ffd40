//! Who may do what: root, and two other users.

use super::View;
use rustix::fs::{Access, AtFlags, CWD};
use std::os::unix::process::CommandExt;
use std::process::Command;

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
