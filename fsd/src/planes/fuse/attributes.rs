//! What FUSE is told of an inode.

use fuser::{FileAttr, FileType, INodeNo};
use layer::erofs::reader::InodeRecord;
use layer::tree::{Kind, Rdev, Timestamp};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

const BLOCK: u64 = layer::chunk::BLOCK_BYTES as u64;

/// An inode as `stat` shows it, exactly as the kernel's EROFS would.
pub fn of(record: &InodeRecord) -> FileAttr {
    let inode = &record.inode;
    let time = time_of(inode.mtime);
    FileAttr {
        ino: INodeNo(record.number),
        size: record.size,
        blocks: record.size.div_ceil(BLOCK) * (BLOCK / 512),
        atime: time,
        mtime: time,
        ctime: time,
        crtime: time,
        kind: kind_of(&inode.kind),
        perm: inode.mode,
        nlink: record.links,
        uid: inode.uid,
        gid: inode.gid,
        rdev: match inode.kind {
            Kind::CharDevice(rdev) | Kind::BlockDevice(rdev) => device_number(rdev),
            _ => 0,
        },
        flags: 0,
        blksize: layer::chunk::BLOCK_BYTES,
    }
}

/// What a name without an inode is answered with: the kernel remembers that there is none.
pub fn of_nothing() -> FileAttr {
    FileAttr {
        ino: INodeNo(0),
        size: 0,
        blocks: 0,
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind: FileType::RegularFile,
        perm: 0,
        nlink: 0,
        uid: 0,
        gid: 0,
        rdev: 0,
        flags: 0,
        blksize: 0,
    }
}

fn kind_of(kind: &Kind) -> FileType {
    match kind {
        Kind::Directory(_) => FileType::Directory,
        Kind::Regular(_) => FileType::RegularFile,
        Kind::Symlink(_) => FileType::Symlink,
        Kind::CharDevice(_) => FileType::CharDevice,
        Kind::BlockDevice(_) => FileType::BlockDevice,
        Kind::Fifo => FileType::NamedPipe,
        Kind::Socket => FileType::Socket,
    }
}

/// The kind for a `DT_*` of readdir(3); `None` where a listing does not tell.
pub fn listed_kind(file_type: u8) -> Option<FileType> {
    match file_type {
        1 => Some(FileType::NamedPipe),
        2 => Some(FileType::CharDevice),
        4 => Some(FileType::Directory),
        6 => Some(FileType::BlockDevice),
        8 => Some(FileType::RegularFile),
        10 => Some(FileType::Symlink),
        12 => Some(FileType::Socket),
        _ => None,
    }
}

/// A device number as FUSE carries it: the kernel's 12 bits of major and 20 of minor.
pub fn device_number(rdev: Rdev) -> u32 {
    rdev.minor & 0xff | rdev.major << 8 | (rdev.minor & !0xff) << 12
}

/// A time that this type cannot hold becomes 1970; no image of ours has one.
fn time_of(time: Timestamp) -> SystemTime {
    let seconds = Duration::from_secs(time.secs.unsigned_abs());
    let whole = if time.secs < 0 {
        UNIX_EPOCH.checked_sub(seconds)
    } else {
        UNIX_EPOCH.checked_add(seconds)
    };
    let exact =
        whole.and_then(|whole| whole.checked_add(Duration::from_nanos(u64::from(time.nanos))));
    exact.unwrap_or(UNIX_EPOCH)
}
