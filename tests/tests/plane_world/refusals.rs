//! What a read-only file system refuses, and with which number.

use super::View;
use rustix::fs::{AtFlags, CWD, Mode, OFlags, RenameFlags, Timespec, Timestamps, XattrFlags};
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::{OpenOptionsExt, symlink};
use std::path::Path;

type Attempt = (&'static str, fn(&Path) -> io::Result<()>);

fn times() -> Timestamps {
    let time = Timespec { tv_sec: 5, tv_nsec: 0 };
    Timestamps { last_access: time, last_modification: time }
}

fn open(path: &Path, flags: OFlags) -> io::Result<()> {
    rustix::fs::open(path, flags, Mode::from_raw_mode(0o644))?;
    Ok(())
}

const ATTEMPTS: &[Attempt] = &[
    ("open for writing", |root| open(&root.join("sizes/100"), OFlags::WRONLY)),
    ("open for both", |root| open(&root.join("sizes/100"), OFlags::RDWR)),
    ("open and cut", |root| open(&root.join("sizes/100"), OFlags::RDONLY | OFlags::TRUNC)),
    ("open for appending", |root| open(&root.join("sizes/100"), OFlags::WRONLY | OFlags::APPEND)),
    ("open a folder for writing", |root| open(&root.join("sizes"), OFlags::WRONLY)),
    ("open or create what is there", |root| {
        open(&root.join("sizes/100"), OFlags::RDONLY | OFlags::CREATE)
    }),
    ("create what is there", |root| {
        open(&root.join("sizes/100"), OFlags::RDONLY | OFlags::CREATE | OFlags::EXCL)
    }),
    ("create", |root| open(&root.join("sizes/new"), OFlags::WRONLY | OFlags::CREATE)),
    ("create through a link", |root| {
        open(&root.join("links/nowhere"), OFlags::WRONLY | OFlags::CREATE)
    }),
    ("create below a file", |root| {
        open(&root.join("sizes/100/new"), OFlags::WRONLY | OFlags::CREATE)
    }),
    ("create without a name", |root| open(&root.join("sizes"), OFlags::RDWR | OFlags::TMPFILE)),
    ("write to a device", |root| open(&root.join("special/null"), OFlags::WRONLY)),
    ("cut", |root| {
        let size = 5;
        let file = File::open(root.join("sizes/100"))?;
        Ok(rustix::fs::ftruncate(&file, size)?)
    }),
    ("mkdir", |root| fs::create_dir(root.join("new"))),
    ("mkdir what is there", |root| fs::create_dir(root.join("sizes"))),
    ("mkdir with a long name", |root| fs::create_dir(root.join("l".repeat(256)))),
    ("rmdir", |root| fs::remove_dir(root.join("empty"))),
    ("rmdir what is full", |root| fs::remove_dir(root.join("sizes"))),
    ("rmdir what is not there", |root| fs::remove_dir(root.join("absent"))),
    ("rmdir a file", |root| fs::remove_dir(root.join("sizes/100"))),
    ("unlink", |root| fs::remove_file(root.join("sizes/100"))),
    ("unlink what is not there", |root| fs::remove_file(root.join("sizes/absent"))),
    ("unlink a folder", |root| fs::remove_file(root.join("sizes"))),
    ("rename", |root| fs::rename(root.join("sizes/100"), root.join("sizes/new"))),
    ("rename onto another", |root| fs::rename(root.join("sizes/100"), root.join("sizes/5"))),
    ("rename what is not there", |root| fs::rename(root.join("absent"), root.join("new"))),
    ("rename into itself", |root| fs::rename(root.join("deep"), root.join("deep/level-0/new"))),
    ("exchange", |root| {
        let (one, two) = (root.join("sizes/100"), root.join("sizes/5"));
        Ok(rustix::fs::renameat_with(CWD, one, CWD, two, RenameFlags::EXCHANGE)?)
    }),
    ("link", |root| fs::hard_link(root.join("sizes/100"), root.join("sizes/new"))),
    ("link onto another", |root| fs::hard_link(root.join("sizes/100"), root.join("sizes/5"))),
    ("symlink", |root| symlink("target", root.join("sizes/new"))),
    ("symlink what is there", |root| symlink("target", root.join("sizes/100"))),
    ("mknod", |root| {
        use rustix::fs::FileType;
        let path = root.join("sizes/new");
        Ok(rustix::fs::mknodat(CWD, path, FileType::Fifo, Mode::from_raw_mode(0o644), 0)?)
    }),
    ("chmod", |root| Ok(rustix::fs::chmod(root.join("sizes/100"), Mode::from_raw_mode(0o600))?)),
    ("chmod of an open file", |root| {
        let file = File::open(root.join("sizes/100"))?;
        Ok(rustix::fs::fchmod(&file, Mode::from_raw_mode(0o600))?)
    }),
    ("chown", |root| std::os::unix::fs::chown(root.join("sizes/100"), Some(5), Some(5))),
    ("lchown", |root| std::os::unix::fs::lchown(root.join("links/to-file"), Some(5), Some(5))),
    ("utimens", |root| {
        Ok(rustix::fs::utimensat(CWD, root.join("sizes/100"), &times(), AtFlags::empty())?)
    }),
    ("utimens of a link", |root| {
        let path = root.join("links/to-file");
        Ok(rustix::fs::utimensat(CWD, path, &times(), AtFlags::SYMLINK_NOFOLLOW)?)
    }),
    ("setxattr", |root| {
        let path = root.join("xattrs/few");
        Ok(rustix::fs::setxattr(path, "user.new", b"x", XattrFlags::empty())?)
    }),
    ("removexattr", |root| Ok(rustix::fs::removexattr(root.join("xattrs/few"), "user.one")?)),
    ("write through a read-only descriptor", |root| {
        use std::os::unix::fs::FileExt;
        File::open(root.join("sizes/100"))?.write_all_at(b"x", 0)
    }),
    ("fallocate through a read-only descriptor", |root| {
        let file = File::open(root.join("sizes/100"))?;
        Ok(rustix::fs::fallocate(&file, rustix::fs::FallocateFlags::empty(), 0, 4096)?)
    }),
    ("bind a socket", |root| {
        std::os::unix::net::UnixListener::bind(root.join("special/new")).map(|_| ())
    }),
    ("open with O_NOATIME", |root| {
        let flags = OFlags::NOATIME.bits().cast_signed();
        File::options().read(true).custom_flags(flags).open(root.join("sizes/100")).map(|_| ())
    }),
];

pub fn writes(view: &View) {
    let before = view.paths().len();
    for (name, attempt) in ATTEMPTS {
        view.same(*name, attempt);
    }
    // A mount that says it is writable still has a file system below it that is not.
    let at = view.scratch.join("writable");
    fs::create_dir(&at).unwrap();
    let attributes = sys::mount::Attributes::default();
    sys::mount::bind(&view.mounted, &at, attributes, sys::mount::Recursive::No).unwrap();
    let change = sys::mount::AttributeChange {
        clear: sys::mount::Attributes::LAYER,
        ..sys::mount::AttributeChange::default()
    };
    let changed = sys::mount::set_attributes_of(&at, &change);
    let refused = fs::write(at.join("new"), "x");
    let removed = fs::remove_file(at.join("sizes/100"));
    sys::mount::unmount(&at, sys::mount::Unmount::Now).unwrap();
    fs::remove_dir(&at).unwrap();
    changed.unwrap();
    for result in [refused, removed] {
        assert_eq!(result.unwrap_err().raw_os_error(), Some(30), "EROFS");
    }
    assert_eq!(view.paths().len(), before);
}
