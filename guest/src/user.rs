//! Names of users and groups, looked up in the sandbox's own /etc/passwd and /etc/group.
//!
//! Those files belong to whoever runs inside: reads are bounded, anything but a regular file is
//! ignored, and nothing but numbers comes out of it. Runs inside the sandbox's root.

use proto::launch::IDS;
use std::io::{self, Read};
use std::os::unix::fs::OpenOptionsExt;

/// Who a command runs as.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    /// Supplementary groups.
    pub groups: Vec<u32>,
    /// Home directory; empty when unknown.
    pub home: Vec<u8>,
}

impl User {
    /// The same, if a sandbox that has a user namespace (`first_id` is not 0) has its numbers.
    pub fn within(mut self, first_id: u32) -> Result<Self, String> {
        if first_id == 0 {
            return Ok(self);
        }
        if let Some(id) = [self.uid, self.gid].into_iter().find(|id| *id >= IDS) {
            return Err(format!("user or group {id}: a sandbox has the numbers below {IDS}"));
        }
        self.groups.retain(|id| *id < IDS);
        Ok(self)
    }
}

/// Files longer than this are cut.
const MAX_FILE_BYTES: u64 = 4 << 20;

/// Resolves `user[:group]`, names or numbers. Empty is root.
pub fn resolve(text: &str) -> Result<User, String> {
    let passwd = read("/etc/passwd");
    let group = read("/etc/group");
    resolve_in(text, &passwd, &group)
}

fn resolve_in(text: &str, passwd: &[u8], group: &[u8]) -> Result<User, String> {
    let text = if text.is_empty() { "0" } else { text };
    let (user, wanted_group) = match text.split_once(':') {
        Some((user, group)) => (user, Some(group)),
        None => (text, None),
    };
    let user = if user.is_empty() { "0" } else { user };
    let by_number = user.parse::<u32>().ok();
    let entry = fields(passwd).find(|entry| {
        entry.first().is_some_and(|name| *name == user.as_bytes())
            || by_number.is_some() && number(entry.get(2)) == by_number
    });
    let mut found = match (&entry, by_number) {
        (Some(entry), _) => User {
            uid: number(entry.get(2)).ok_or_else(|| format!("user {user} has no number"))?,
            gid: number(entry.get(3)).unwrap_or(0),
            groups: Vec::new(),
            home: entry.get(5).map(|home| home.to_vec()).unwrap_or_default(),
        },
        (None, Some(uid)) => User { uid, ..User::default() },
        (None, None) => return Err(format!("no user {user} in the sandbox's /etc/passwd")),
    };
    if let Some(wanted) = wanted_group {
        found.gid = match wanted.parse::<u32>() {
            Ok(gid) => gid,
            Err(_) => fields(group)
                .find(|entry| entry.first().is_some_and(|name| *name == wanted.as_bytes()))
                .and_then(|entry| number(entry.get(2)))
                .ok_or_else(|| format!("no group {wanted} in the sandbox's /etc/group"))?,
        };
        return Ok(found);
    }
    let name = entry.as_ref().and_then(|entry| entry.first().copied()).unwrap_or_default();
    const MAX_GROUPS: usize = 1024;
    let member = |entry: &Vec<&[u8]>| {
        let members = entry.get(3).copied().unwrap_or_default();
        !name.is_empty() && members.split(|byte| *byte == b',').any(|member| member == name)
    };
    found.groups = fields(group)
        .filter(member)
        .filter_map(|entry| number(entry.get(2)))
        .take(MAX_GROUPS)
        .collect();
    Ok(found)
}

fn fields(file: &[u8]) -> impl Iterator<Item = Vec<&[u8]>> {
    file.split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty() && line[0] != b'#')
        .map(|line| line.split(|byte| *byte == b':').take(8).collect())
}

fn number(field: Option<&&[u8]>) -> Option<u32> {
    std::str::from_utf8(field?).ok()?.parse().ok()
}

fn read(path: &str) -> Vec<u8> {
    let try_read = || -> io::Result<Vec<u8>> {
        // A pipe or a terminal in its place must not hold us.
        const O_NONBLOCK_NOCTTY: i32 = 0o4000 | 0o400;
        let file =
            std::fs::OpenOptions::new().read(true).custom_flags(O_NONBLOCK_NOCTTY).open(path)?;
        let mut bytes = Vec::new();
        if file.metadata()?.is_file() {
            file.take(MAX_FILE_BYTES).read_to_end(&mut bytes)?;
        }
        Ok(bytes)
    };
    try_read().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PASSWD: &[u8] =
        b"root:x:0:0:root:/root:/bin/sh\n# c\nbroken\nann:x:1000:100::/home/ann:/bin/sh\n";
    const GROUP: &[u8] = b"root:x:0:\nusers:x:100:\nwheel:x:10:bob,ann\nx:y\n";

    #[test]
    fn names_and_numbers_resolve_alike() {
        let ann = User { uid: 1000, gid: 100, groups: vec![10], home: b"/home/ann".to_vec() };
        assert_eq!(resolve_in("ann", PASSWD, GROUP).unwrap(), ann);
        assert_eq!(resolve_in("1000", PASSWD, GROUP).unwrap(), ann);
        let named = resolve_in("ann:wheel", PASSWD, GROUP).unwrap();
        assert_eq!((named.uid, named.gid, named.groups.len()), (1000, 10, 0));
        assert_eq!(resolve_in("", PASSWD, GROUP).unwrap().home, b"/root");
        assert_eq!(
            resolve_in("7:8", b"", b"").unwrap(),
            User { uid: 7, gid: 8, ..User::default() }
        );
    }

    #[test]
    fn unknown_names_are_told() {
        assert!(resolve_in("eve", PASSWD, GROUP).unwrap_err().contains("eve"));
        assert!(resolve_in("ann:none", PASSWD, GROUP).unwrap_err().contains("none"));
        assert!(resolve_in("eve", &[0xff; 100], &[b':'; 100]).is_err());
    }
}
