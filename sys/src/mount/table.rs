//! The mount table, read from `/proc/PID/mountinfo`.

use std::ffi::OsString;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

/// One line of the mount table. Octal escapes are undone; names are bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MountEntry {
    /// Id of the mount, unique while it exists.
    pub id: u32,
    /// Id of the mount it is attached to.
    pub parent_id: u32,
    /// Device number of the file system, major and minor.
    pub device: (u32, u32),
    /// The folder of the file system that is this mount's root.
    pub root: PathBuf,
    /// Where it is attached, relative to the reading process's root.
    pub mount_point: PathBuf,
    /// Options of this mount: `ro,nosuid,...`.
    pub options: String,
    /// Optional fields: `shared:N`, `master:N`, ...
    pub propagation: Vec<String>,
    /// File system type.
    pub kind: String,
    /// Source; for EROFS the metadata file, for an overlay its name.
    pub source: OsString,
    /// Options of the file system.
    pub super_options: OsString,
}

impl MountEntry {
    /// The value of an option of the file system: `upperdir` of overlayfs, `size` of tmpfs. The kernel
    /// does not show the `device` of EROFS.
    pub fn super_option(&self, key: &str) -> Option<&str> {
        let options = self.super_options.to_str()?;
        options.split(',').find_map(|option| option.strip_prefix(key)?.strip_prefix('='))
    }

    /// Whether nothing can be written through this mount.
    pub fn is_read_only(&self) -> bool {
        self.options.split(',').any(|option| option == "ro")
    }
}

/// Reads the mount table of this process.
pub fn read_mounts() -> io::Result<Vec<MountEntry>> {
    read(Path::new("/proc/self/mountinfo"))
}

/// Reads the mount table of another process, as seen from its root.
pub fn read_mounts_of(pid: i32) -> io::Result<Vec<MountEntry>> {
    read(&Path::new("/proc").join(pid.to_string()).join("mountinfo"))
}

fn read(path: &Path) -> io::Result<Vec<MountEntry>> {
    parse_mounts(&std::fs::read(path)?)
}

/// Parses the text of a mountinfo file. `InvalidData` names the first line that is none.
pub fn parse_mounts(text: &[u8]) -> io::Result<Vec<MountEntry>> {
    text.split(|byte| *byte == b'\n')
        .filter(|line| !line.is_empty())
        .map(|line| {
            parse_line(line).ok_or_else(|| {
                let line = String::from_utf8_lossy(line);
                io::Error::new(io::ErrorKind::InvalidData, format!("mountinfo line {line:?}"))
            })
        })
        .collect()
}

fn parse_line(line: &[u8]) -> Option<MountEntry> {
    let mut fields = line.split(|byte| *byte == b' ');
    let id = number(fields.next()?)?;
    let parent_id = number(fields.next()?)?;
    let device = std::str::from_utf8(fields.next()?).ok()?.split_once(':')?;
    let device = (device.0.parse().ok()?, device.1.parse().ok()?);
    let root = PathBuf::from(unescape(fields.next()?));
    let mount_point = PathBuf::from(unescape(fields.next()?));
    let options = text(fields.next()?);
    let mut propagation = Vec::new();
    loop {
        match fields.next()? {
            b"-" => break,
            field => propagation.push(text(field)),
        }
    }
    let kind = text(fields.next()?);
    let source = unescape(fields.next()?);
    let super_options = unescape(fields.next()?);
    Some(MountEntry {
        id,
        parent_id,
        device,
        root,
        mount_point,
        options,
        propagation,
        kind,
        source,
        super_options,
    })
}

fn number(field: &[u8]) -> Option<u32> {
    std::str::from_utf8(field).ok()?.parse().ok()
}

fn text(field: &[u8]) -> String {
    String::from_utf8_lossy(field).into_owned()
}

/// Undoes the kernel's `\ooo` escapes of space, tab, newline, backslash and `#`.
fn unescape(field: &[u8]) -> OsString {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((first, after)) = rest.split_first() {
        let octal = |byte: u8| (b'0'..=b'7').contains(&byte).then(|| u32::from(byte - b'0'));
        let code = match (first, after) {
            (b'\\', [a, b, c, ..]) => octal(*a)
                .zip(octal(*b))
                .zip(octal(*c))
                .and_then(|((a, b), c)| u8::try_from(a << 6 | b << 3 | c).ok()),
            _ => None,
        };
        match code {
            Some(byte) => {
                bytes.push(byte);
                rest = &after[3..];
            }
            None => {
                bytes.push(*first);
                rest = after;
            }
        }
    }
    OsString::from_vec(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_gives_all_its_fields() {
        let line = b"36 35 98:0 /mnt1 /mnt\\0402\\134x rw,noatime master:1 shared:7 - ext3 \
            /dev/ro\\011ot rw,errors=continue,device=/a\\040b\n";
        let entries = parse_mounts(line).unwrap();
        assert_eq!(entries.len(), 1);
        let entry = &entries[0];
        assert_eq!((entry.id, entry.parent_id, entry.device), (36, 35, (98, 0)));
        assert_eq!(entry.mount_point, Path::new("/mnt 2\\x"));
        assert_eq!(entry.propagation, ["master:1", "shared:7"]);
        assert_eq!(entry.source, "/dev/ro\tot");
        assert_eq!(entry.super_option("errors"), Some("continue"));
        assert_eq!(entry.super_option("device"), Some("/a b"));
        assert_eq!(entry.super_option("dev"), None);
        assert!(!entry.is_read_only());
    }

    #[test]
    fn lines_that_are_none_are_named() {
        for bad in ["1 2 3", "a b c:d / / rw - t s o", "36 35 98:0 / / rw master:1 ext3 x rw"] {
            let error = parse_mounts(bad.as_bytes()).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::InvalidData, "{bad}");
        }
        assert_eq!(parse_mounts(b"").unwrap(), []);
    }

    #[test]
    fn this_process_has_a_root_and_a_proc() {
        let mounts = read_mounts().unwrap();
        assert!(mounts.iter().any(|mount| mount.mount_point == Path::new("/")));
        assert!(mounts.iter().any(|mount| mount.kind == "proc"));
        assert_eq!(read_mounts_of(std::process::id() as i32).unwrap(), mounts);
    }
}
