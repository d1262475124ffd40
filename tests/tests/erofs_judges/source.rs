//! Source trees on a tmpfs, with everything that a layer may contain.

use crate::random::Random;
use anyhow::{Context, Result};
use rustix::fs::{AtFlags, CWD, FileType, Mode, Timespec, Timestamps, XattrFlags};
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// A tmpfs that is gone when the value is.
pub struct Source {
    folder: tempfile::TempDir,
}

impl Source {
    pub fn new() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let tmpfs = sys::mount::Tmpfs {
            name: "judges",
            mode: 0o755,
            size_bytes: None,
            inodes: Some(1 << 20),
        };
        tmpfs.mount_detached(sys::mount::Attributes::default())?.attach(folder.path())?;
        Ok(Self { folder })
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

impl Drop for Source {
    fn drop(&mut self) {
        if let Err(error) = sys::mount::unmount(self.folder.path(), sys::mount::Unmount::Lazy) {
            eprintln!("{}: {error}", self.folder.path().display());
        }
    }
}

/// What random trees leave out.
#[derive(Debug, Clone, Copy, Default)]
pub struct Without {
    /// Holes: fsck.erofs 1.5 leaves them out of what it extracts, and mkfs.erofs 1.5 makes an entry for
    /// each 4 KiB of a sparse file of terabytes.
    pub holes: bool,
    /// Names of 255 bytes: mkfs.erofs 1.5 fails on them.
    pub longest_names: bool,
}

struct Grower<'r> {
    random: &'r mut Random,
    without: Without,
    folders: Vec<PathBuf>,
    files: Vec<PathBuf>,
    contents: Vec<Vec<u8>>,
    all: Vec<PathBuf>,
}

/// Fills a folder with about `count` random inodes.
pub fn grow(root: &Path, random: &mut Random, count: usize, without: Without) -> Result<()> {
    let mut grower = Grower {
        random,
        without,
        folders: vec![root.to_owned()],
        files: Vec::new(),
        contents: Vec::new(),
        all: vec![root.to_owned()],
    };
    for _ in 0..count {
        grower.add()?;
    }
    grower.dress()
}

impl Grower<'_> {
    fn name(&mut self) -> OsString {
        let length = match self.random.below(8) {
            0 if self.without.longest_names => 250,
            0 => 255,
            1 => 1 + self.random.below(250),
            _ => 1 + self.random.below(12),
        };
        let mut name = self.random.bytes(length as usize);
        let text = self.random.one_in(2);
        for byte in &mut name {
            *byte = match *byte {
                _ if text => b"abcdefghij-_.+~0123456789 \n"[usize::from(*byte) % 27],
                0 | b'/' => b'=',
                other => other,
            };
        }
        if matches!(name.as_slice(), b"." | b"..") {
            "...".into()
        } else {
            OsString::from_vec(name)
        }
    }

    fn add(&mut self) -> Result<()> {
        let folder = self.folders[self.random.below(self.folders.len() as u64) as usize].clone();
        let path = folder.join(self.name());
        // A path that is too long or taken is none that matters.
        if path.as_os_str().len() > 3000 || path.symlink_metadata().is_ok() {
            return Ok(());
        }
        match self.random.below(16) {
            0..=2 => {
                std::fs::create_dir(&path)?;
                self.folders.push(path.clone());
            }
            3 => self.special(&path)?,
            4..=5 => {
                let length = self.random.pick(&[1, 5, 60, 1000, 3900, 4000, 4090, 4095]);
                let target: Vec<u8> =
                    self.random.bytes(length).into_iter().map(|byte| byte.max(1)).collect();
                std::os::unix::fs::symlink(OsStr::from_bytes(&target), &path)?;
            }
            6 if !self.files.is_empty() => {
                let old = &self.files[self.random.below(self.files.len() as u64) as usize];
                std::fs::hard_link(old, &path)?;
                return Ok(());
            }
            7 if !self.without.holes => self.sparse(&path)?,
            _ => self.content(&path)?,
        }
        if !path.symlink_metadata()?.is_dir() {
            self.files.push(path.clone());
        }
        self.all.push(path);
        Ok(())
    }

    fn special(&mut self, path: &Path) -> Result<()> {
        let kinds =
            [FileType::Fifo, FileType::Socket, FileType::CharacterDevice, FileType::BlockDevice];
        let numbers = [(1, 3), (0, 0), (4095, 1_048_575), (8, 256), (259, 70_000)];
        let (major, minor) = self.random.pick(&numbers);
        let kind = self.random.pick(&kinds);
        let device = match kind {
            FileType::Fifo | FileType::Socket => 0,
            _ => rustix::fs::makedev(major, minor),
        };
        rustix::fs::mknodat(CWD, path, kind, Mode::from_raw_mode(0o600), device)?;
        Ok(())
    }

    fn content(&mut self, path: &Path) -> Result<()> {
        let again = !self.contents.is_empty() && self.random.one_in(4);
        let content = if again {
            self.contents[self.random.below(self.contents.len() as u64) as usize].clone()
        } else {
            let sizes = [0, 1, 31, 100, 1000, 4000, 4095, 4096, 4097, 8192, 20_000, 150_000];
            let size = self.random.pick(&sizes);
            self.random.bytes(size)
        };
        std::fs::write(path, &content)?;
        self.contents.push(content);
        Ok(())
    }

    fn sparse(&mut self, path: &Path) -> Result<()> {
        let file = File::create(path)?;
        let size = self.random.pick(&[5_000, 65_536, 1 << 20, (1 << 30) + 7, 1 << 38]);
        file.set_len(size)?;
        for _ in 0..self.random.below(4) {
            let at = self.random.below(size - 4000);
            let at = if self.random.one_in(2) { at / 4096 * 4096 } else { at };
            let length = 1 + self.random.below(20_000);
            let length = length.min(size - at) as usize;
            file.write_all_at(&self.random.bytes(length), at)?;
        }
        Ok(())
    }

    /// Owners, modes, xattrs and times, in an order in which none undoes another.
    fn dress(mut self) -> Result<()> {
        // Half of the inodes share one owner and time, as in real trees.
        for path in std::mem::take(&mut self.all).into_iter().rev() {
            let link = path.symlink_metadata()?.is_symlink();
            let ids = [0, 1, 1000, 65_535, 65_536, u32::MAX - 1];
            let (uid, gid) = match self.random.one_in(2) {
                true => (0, 0),
                false => (self.random.pick(&ids), self.random.pick(&ids)),
            };
            std::os::unix::fs::lchown(&path, Some(uid), Some(gid))?;
            if !link {
                let mode = self.random.below(0o10_000) as u32;
                std::fs::set_permissions(
                    &path,
                    std::os::unix::fs::PermissionsExt::from_mode(mode),
                )?;
            }
            if self.random.one_in(3) {
                self.xattrs(&path, link).with_context(|| format!("xattrs of {path:?}"))?;
            }
            let times =
                [(0, 0), (-1, 999_999_999), (-9_000_000_000, 1), (1 << 33, 7), (1_700_000_000, 5)];
            let (secs, nanos) = match self.random.below(4) {
                0 | 1 => (1_600_000_000, 123_456_789),
                2 => self.random.pick(&times),
                _ => (self.random.below(1 << 31) as i64, self.random.below(1_000_000_000) as i64),
            };
            set_mtime(&path, secs, nanos)?;
        }
        Ok(())
    }

    fn xattrs(&mut self, path: &Path, link: bool) -> Result<()> {
        let capability = [1, 0, 0, 2, 0, 4, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0];
        set_xattr(path, b"security.selinux", b"system_u:object_r:usr_t:s0\0")?;
        if self.random.one_in(2) {
            let name = [b"trusted.", self.random.bytes(3).as_slice(), b"x"].concat();
            let name: Vec<u8> = name.into_iter().map(|byte| byte.max(1)).collect();
            let length = self.random.pick(&[0, 1, 100, 3000, 5000]);
            set_xattr(path, &name, &self.random.bytes(length))?;
        }
        if link {
            return Ok(());
        }
        set_xattr(path, b"trusted.shared", &[7; 300])?;
        let kind = path.symlink_metadata()?;
        if kind.is_file() || kind.is_dir() {
            for _ in 0..self.random.below(4) {
                let length = 1 + self.random.below(249) as usize;
                let rest: Vec<u8> =
                    self.random.bytes(length).into_iter().map(|byte| byte.max(1)).collect();
                let length = self.random.pick(&[0, 1, 3, 200, 4096]);
                set_xattr(path, &[b"user.", rest.as_slice()].concat(), &self.random.bytes(length))?;
            }
        }
        if kind.is_file() {
            set_xattr(path, b"security.capability", &capability)?;
        }
        if kind.is_dir() {
            set_xattr(path, b"system.posix_acl_default", &acl())?;
        }
        Ok(())
    }
}

/// `u::rwx,u:1000:r-x,g::r-x,m::r-x,o::---` as the kernel stores it.
pub fn acl() -> Vec<u8> {
    const NOBODY: u32 = u32::MAX;
    let entries: [(u16, u16, u32); 5] =
        [(1, 7, NOBODY), (2, 5, 1000), (4, 5, NOBODY), (16, 5, NOBODY), (32, 0, NOBODY)];
    let mut bytes = 2_u32.to_le_bytes().to_vec();
    for (tag, rights, id) in entries {
        bytes.extend_from_slice(&tag.to_le_bytes());
        bytes.extend_from_slice(&rights.to_le_bytes());
        bytes.extend_from_slice(&id.to_le_bytes());
    }
    bytes
}

pub fn set_xattr(path: &Path, name: &[u8], value: &[u8]) -> Result<()> {
    rustix::fs::lsetxattr(path, OsStr::from_bytes(name), value, XattrFlags::empty()).with_context(
        || format!("set xattr {:?} of {} bytes", OsStr::from_bytes(name), value.len()),
    )
}

pub fn set_mtime(path: &Path, secs: i64, nanos: i64) -> Result<()> {
    let time = Timespec { tv_sec: secs, tv_nsec: nanos };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok(())
}
