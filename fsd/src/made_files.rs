//! What `stat` shows of the files that fsd makes up: data and metadata of layers, and the folders they lie in.

use fuser::{FileAttr, FileType, INodeNo};
use std::time::UNIX_EPOCH;

/// Root's alone, and as old as time: it never changes, or the kernel would drop what it has read.
pub fn attributes(number: u64, kind: FileType, size: u64) -> FileAttr {
    FileAttr {
        ino: INodeNo(number),
        size,
        blocks: size.div_ceil(512),
        atime: UNIX_EPOCH,
        mtime: UNIX_EPOCH,
        ctime: UNIX_EPOCH,
        crtime: UNIX_EPOCH,
        kind,
        perm: if kind == FileType::Directory { 0o500 } else { 0o400 },
        nlink: 1,
        uid: 0,
        gid: 0,
        rdev: 0,
        flags: 0,
        blksize: 4096,
    }
}
