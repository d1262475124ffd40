//! Attempts at mounts and at the scratch file system.

use super::image::{BLOCK_BYTES, tiny_erofs_metadata};
use super::{Attempt, Scratch, failed};
use crate::fanotify::{EVENT_BYTES, Group, Taken};
use crate::file::space::{self, PageCache};
use crate::file::{self, OFlags, publish::Unnamed};
use crate::memory::SharedMapping;
use crate::mount::{
    AttributeChange, Attributes, Erofs, IdMap, IdRange, MountFd, Overlay, OverlayLower,
    OverlayUpper, Recursive, Tmpfs,
};
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::time::Duration;

const BLOCK_BITS: u8 = 2;
const MARK: u8 = 0x5a;

/// Metadata and an empty data device in a scratch folder.
struct Layer {
    scratch: Scratch,
    data: std::fs::File,
}

impl Layer {
    fn new(parent: &Path) -> io::Result<Self> {
        let scratch = Scratch::new(parent)?;
        std::fs::write(scratch.path.join("meta"), tiny_erofs_metadata(BLOCK_BITS))?;
        let data = std::fs::File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(scratch.path.join("data"))?;
        data.set_len((BLOCK_BYTES as u64) << BLOCK_BITS)?;
        Ok(Self { scratch, data })
    }

    fn fill(&self) -> io::Result<()> {
        let bytes = vec![MARK; BLOCK_BYTES << BLOCK_BITS];
        space::write_all_at(self.data.as_fd(), &bytes, 0, PageCache::Keep)
    }

    fn mount(&self) -> io::Result<MountFd> {
        let (metadata, data) = (self.scratch.path.join("meta"), self.scratch.path.join("data"));
        Erofs { metadata: &metadata, device: Some(&data) }.mount_detached(Attributes::LAYER)
    }
}

fn read_first_byte(mount: BorrowedFd<'_>) -> io::Result<u8> {
    let file = file::open_beneath(mount, Path::new("data"), OFlags::RDONLY, 0)?;
    let mut byte = [0];
    space::read_exact_at(file.as_fd(), &mut byte, 0)?;
    Ok(byte[0])
}

fn expect_mark(byte: u8) -> io::Result<()> {
    if byte == MARK { Ok(()) } else { Err(failed("a read gave other bytes than the file has")) }
}

pub(super) fn erofs_file_backed(parent: &Path) -> Attempt {
    let layer = Layer::new(parent)?;
    layer.fill()?;
    let mount = layer.mount()?;
    expect_mark(read_first_byte(mount.as_fd())?)?;
    let kind = space::file_system(layer.data.as_fd())?.kind;
    Ok(format!("a data device on {kind:?} was mounted and read").to_lowercase())
}

pub(super) fn fanotify_pre_content(parent: &Path) -> Attempt {
    const PATIENCE: Duration = Duration::from_secs(10);
    let layer = Layer::new(parent)?;
    let group = Group::new()?;
    group.mark(layer.data.as_fd())?;
    let mount = layer.mount()?;
    let journal = SharedMapping::create("probe", EVENT_BYTES)?;
    let fd = mount.as_fd().try_clone_to_owned()?;
    let reader = std::thread::spawn(move || read_first_byte(fd.as_fd()));
    let asked = group.wait(Some(PATIENCE))?;
    if !asked {
        // Without a holder the kernel lets every reader go.
        drop(group);
        let _ = reader.join();
        return Err(failed("a read through EROFS raised no event"));
    }
    match group.read_into(journal.region(0, EVENT_BYTES)?)? {
        Taken::Event(event) => {
            layer.fill()?;
            event.allow()?;
        }
        Taken::Overflow | Taken::Nothing => return Err(failed("no event could be taken")),
    }
    let byte = reader.join().map_err(|_| failed("the reading thread died"))??;
    expect_mark(byte)?;
    Ok("a read waited, was filled and got the bytes".to_owned())
}

fn tmpfs() -> io::Result<MountFd> {
    let tmpfs = Tmpfs { name: "probe", mode: 0o700, size_bytes: Some(1 << 20), inodes: None };
    tmpfs.mount_detached(Attributes::default())
}

fn make_folder(mount: &MountFd, name: &str) -> io::Result<OwnedFd> {
    file::make_folder_at(mount.as_fd(), name.as_bytes(), 0o755)?;
    mount.open_inside(Path::new(name))
}

pub(super) fn overlay_descriptors() -> Attempt {
    let (lower, scratch) = (tmpfs()?, tmpfs()?);
    file::make_folder_at(lower.as_fd(), b"from-below", 0o755)?;
    let clone = lower.try_clone_tree(Recursive::No)?;
    let (upper, work) = (make_folder(&scratch, "upper")?, make_folder(&scratch, "work")?);
    let overlay = Overlay {
        name: "probe",
        lowers: &[OverlayLower::Fd(clone.as_fd())],
        upper: Some(OverlayUpper { upper: upper.as_fd(), work: work.as_fd() }),
        volatile: false,
    };
    let mount = overlay.mount_detached(Attributes::default())?;
    file::publish::rename(mount.as_fd(), b"from-below", mount.as_fd(), b"moved")?;
    let whiteout = file::stat_at(upper.as_fd(), b"from-below")?.is_whiteout();
    if !whiteout {
        return Err(failed("a renamed folder left no whiteout"));
    }
    Ok("an overlay of detached mounts was written".to_owned())
}

pub(super) fn idmapped_mounts() -> Attempt {
    let mount = tmpfs()?;
    let range = IdRange { from: 0, to: 100_000, count: 1 };
    let namespace = IdMap { users: vec![range], groups: vec![range] }.user_namespace()?;
    let idmap = Some(namespace.as_fd());
    mount.set_attributes(&AttributeChange { idmap, ..AttributeChange::default() })?;
    match file::stat_fd(mount.as_fd())?.uid {
        100_000 => Ok("owner 0 appeared as 100000".to_owned()),
        other => Err(failed(&format!("owner 0 appeared as {other}"))),
    }
}

pub(super) fn reflink(parent: &Path) -> Attempt {
    let layer = Layer::new(parent)?;
    layer.fill()?;
    let target = std::fs::File::create_new(layer.scratch.path.join("clone"))?;
    space::clone_range(layer.data.as_fd(), 0, target.as_fd(), 0, BLOCK_BYTES as u64)?;
    Ok("a block is shared by two files".to_owned())
}

pub(super) fn uncached_writes(parent: &Path) -> Attempt {
    let layer = Layer::new(parent)?;
    space::write_all_at(layer.data.as_fd(), &[MARK; BLOCK_BYTES], 0, PageCache::LetGo)?;
    Ok("RWF_DONTCACHE".to_owned())
}

pub(super) fn unnamed_files(parent: &Path) -> Attempt {
    let scratch = Scratch::new(parent)?;
    let folder = file::Folder::open(&scratch.path)?;
    Unnamed::create(folder.as_fd(), 0o600)?.publish_without_sync(folder.as_fd(), b"named")?;
    Ok("O_TMPFILE and linkat".to_owned())
}

pub(super) fn project_quota(parent: &Path) -> Attempt {
    // linux/quota.h and linux/dqblk_xfs.h: Q_XGETQSTAT for project quotas, answered by ext4 too.
    const PROJECT_STATE: libc::c_uint = (((b'X' as u32) << 8 | 5) << 8) | 2;
    const PROJECT_ENFORCED: u16 = 1 << 5;
    let folder = file::Folder::open(parent)?;
    let mut state = [0u64; 32];
    // SAFETY: the kernel writes one struct fs_quota_stat of 80 bytes; `state` has 256.
    let result = unsafe {
        libc::syscall(
            libc::SYS_quotactl_fd,
            folder.as_fd().as_raw_fd(),
            PROJECT_STATE,
            0,
            state.as_mut_ptr(),
        )
    };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let flags = (state[0].to_le() >> 16) as u16;
    if flags & PROJECT_ENFORCED == 0 {
        return Err(failed("project quotas are not enforced on this file system"));
    }
    Ok("project quotas are enforced".to_owned())
}
