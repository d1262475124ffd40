//! What `stat`, `statfs`, `getxattr` and locks say.

use super::{Shown, View, plant};
use layer::erofs::reader::Reader;
use rustix::fs::{AtFlags, CWD, StatxFlags};
use rustix::io::Errno;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::Path;
use sys::file::{FileKind, Lock, Stat};

/// What has to be the same everywhere. Folders have sizes of their own everywhere.
type Facts = (FileKind, u32, u32, u32, Option<u64>, u32, (i64, u32), (u32, u32));

fn facts(stat: &Stat) -> Facts {
    let size = (stat.kind != FileKind::Directory).then_some(stat.size);
    let (mtime, rdev) = ((stat.mtime.secs, stat.mtime.nanos), (stat.rdev.major, stat.rdev.minor));
    (stat.kind, stat.mode, stat.uid, stat.gid, size, stat.links, mtime, rdev)
}

pub fn attributes(view: &View) {
    view.same("stat of the root", |root| Ok(facts(&sys::file::stat(root)?)));
    for name in view.paths() {
        view.same(format!("lstat of {}", name.display()), |root| {
            Ok(facts(&sys::file::stat(&root.join(&name))?))
        });
    }
    for name in view.files() {
        view.same(format!("fstat of {}", name.display()), |root| {
            let file = File::open(root.join(&name))?;
            Ok((facts(&sys::file::stat_fd(file.as_fd())?), file.metadata()?.blksize()))
        });
        // Never written, so never changed but when it was written; and reading leaves no trace.
        let stat = sys::file::stat(&view.mounted.join(&name)).unwrap();
        assert_eq!((stat.atime, stat.ctime), (stat.mtime, stat.mtime), "{}", name.display());
        assert_eq!(stat.blocks_512, stat.size.div_ceil(4096) * 8, "{}", name.display());
    }
    for flags in [AtFlags::empty(), AtFlags::STATX_FORCE_SYNC, AtFlags::STATX_DONT_SYNC] {
        view.same(format!("statx with {flags:?}"), |root| {
            let path = root.join("links/to-file");
            let stat = rustix::fs::statx(CWD, &path, flags, StatxFlags::BASIC_STATS)?;
            let told = StatxFlags::from_bits_retain(stat.stx_mask) & StatxFlags::BASIC_STATS;
            assert!(told.contains(StatxFlags::ATIME) || view.shown == Shown::ByErofs);
            Ok((told - StatxFlags::ATIME, stat.stx_size, stat.stx_mode, stat.stx_nlink))
        });
    }
    view.same("fstatat of an open folder", |root| {
        let folder = File::open(root.join("sizes"))?;
        Ok(facts(&sys::file::stat_at(folder.as_fd(), b"100")?))
    });
}

pub fn numbers(view: &View) {
    let image = view.store.read_layer(&view.layer).unwrap().metadata;
    let reader = Reader::parse(&image).unwrap();
    let mut seen = 0;
    reader
        .walk(&mut |path, record| {
            let path = view.mounted.join(std::ffi::OsStr::from_bytes(path));
            let stat = sys::file::stat(&path).unwrap();
            assert_eq!(stat.inode, record.number, "{}", path.display());
            seen += 1;
            Ok(())
        })
        .unwrap();
    assert_eq!(seen, view.paths().len() + 1);
    let inode = |name: &str| fs::metadata(view.mounted.join(name)).unwrap().ino();
    let names = ["links/hard-a", "links/hard-b", "links/inner/hard-c"];
    for name in names {
        assert_eq!(inode(name), inode(names[0]));
        assert_eq!(fs::metadata(view.mounted.join(name)).unwrap().nlink(), 3);
    }
}

pub fn xattrs(view: &View) {
    for name in view.paths() {
        if name.starts_with("many") {
            continue;
        }
        view.same(format!("xattrs of {}", name.display()), |root| {
            let path = root.join(&name);
            let names = sys::file::xattr::list(&path)?;
            let values: io::Result<Vec<_>> =
                names.iter().map(|key| sys::file::xattr::get(&path, key)).collect();
            Ok((names.clone(), values?))
        });
    }
    for (name, key) in [
        ("few", "user.one"),
        ("few", "user.empty"),
        ("few", "user.absent"),
        ("few", "trusted.secret"),
        ("few", "trusted.absent"),
        ("few", "security.capability"),
        ("few", "system.posix_acl_access"),
        ("few", "system.nonsense"),
        ("few", "nonsense"),
        ("few", "nonsense.name"),
        ("few", ""),
        ("large", "user.large"),
        ("capable", "security.capability"),
        ("folder", "user.of-a-folder"),
        ("folder", "system.posix_acl_default"),
        ("../rights/listed", "system.posix_acl_access"),
        ("../links/to-file", "user.absent"),
        ("../links/nowhere", "user.absent"),
        ("../special/fifo", "user.absent"),
        ("absent", "user.one"),
    ] {
        for size in [0, 1, 16, 17, 2999, 3000, 60_000] {
            view.same(format!("getxattr of {name}, {key:?}, {size} bytes"), |root| {
                let mut value = vec![0; size];
                let length =
                    rustix::fs::lgetxattr(root.join("xattrs").join(name), key, &mut value[..])?;
                value.truncate(length);
                Ok((length, value))
            });
        }
    }
    let long = format!("user.{}", "k".repeat(251));
    view.same("a key that is too long", |root| {
        Ok(rustix::fs::getxattr(root.join("xattrs/few"), &long, &mut [0_u8; 9][..])?)
    });
    for name in ["none", "few", "large", "folder"] {
        for size in [0, 1, 50, 65_536] {
            view.same(format!("listxattr of {name}, {size} bytes"), |root| {
                let mut names = vec![0; size];
                Ok(rustix::fs::listxattr(root.join("xattrs").join(name), &mut names[..])?)
            });
        }
    }
}

pub fn symlinks(view: &View) {
    for name in view.paths().iter().filter(|name| name.starts_with("links")) {
        view.same(format!("readlink of {}", name.display()), |root| fs::read_link(root.join(name)));
        if name.ends_with("absolute") {
            continue;
        }
        view.same(format!("reading {}", name.display()), |root| fs::read(root.join(name)));
        view.same(format!("opening {} without following", name.display()), |root| {
            let flags = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();
            File::options().read(true).custom_flags(flags).open(root.join(name)).map(|_| ())
        });
    }
    for bytes in [1, 3, 7000] {
        view.same(format!("readlink of {bytes} bytes"), |root| {
            let mut target = vec![0; bytes];
            let path = root.join("links/long");
            Ok(rustix::fs::readlinkat_raw(CWD, &path, &mut target[..])?)
        });
    }
}

pub fn special(view: &View) {
    for name in ["fifo", "null", "char", "block", "socket"] {
        view.same(format!("opening {name}"), |root| {
            let flags = rustix::fs::OFlags::NONBLOCK.bits().cast_signed();
            let path = root.join("special").join(name);
            File::options().read(true).custom_flags(flags).open(path).map(|_| ())
        });
    }
    view.same("connecting to a socket", |root| {
        std::os::unix::net::UnixStream::connect(root.join("special/socket")).map(|_| ())
    });
}

pub fn statistics(view: &View) {
    let stat = rustix::fs::statvfs(&view.mounted).unwrap();
    assert_eq!((stat.f_bsize, stat.f_frsize, stat.f_namemax), (4096, 4096, 255));
    assert_eq!((stat.f_bfree, stat.f_bavail), (0, 0));
    assert!(stat.f_flag.contains(rustix::fs::StatVfsMountFlags::RDONLY));
    let bytes: u64 = plant::SIZES.iter().sum();
    assert!(stat.f_blocks * 4096 > bytes, "{} blocks", stat.f_blocks);
    let file = File::open(view.mounted.join("sizes/100")).unwrap();
    assert_eq!(rustix::fs::fstatvfs(&file).unwrap().f_blocks, stat.f_blocks);
    view.same("syncfs", |root| Ok(rustix::fs::syncfs(File::open(root)?)?));
}

pub fn locks(view: &View) {
    view.same("locks of two openers", |root| {
        let path = root.join("sizes/100");
        let (one, two) = (File::open(&path)?, File::open(&path)?);
        let mut got = vec![sys::file::try_lock(one.as_fd(), Lock::Shared)?];
        got.push(sys::file::try_lock(two.as_fd(), Lock::Shared)?);
        got.push(sys::file::try_lock(two.as_fd(), Lock::Exclusive)?);
        sys::file::unlock(one.as_fd())?;
        got.push(sys::file::try_lock(two.as_fd(), Lock::Exclusive)?);
        got.push(sys::file::try_lock(one.as_fd(), Lock::Shared)?);
        Ok(got)
    });
    view.same("a lock of a range by a reader", |root| {
        let file = File::open(root.join("sizes/100"))?;
        let shared = rustix::fs::FlockOperation::NonBlockingLockShared;
        match rustix::fs::fcntl_lock(&file, shared) {
            Ok(()) => Ok(()),
            Err(Errno::AGAIN) => Ok(()),
            Err(error) => Err(error.into()),
        }
    });
    view.same("an exclusive lock of a range by a reader", |root| {
        let file = File::open(Path::new(root).join("sizes/100"))?;
        let exclusive = rustix::fs::FlockOperation::NonBlockingLockExclusive;
        Ok(rustix::fs::fcntl_lock(&file, exclusive)?)
    });
}
