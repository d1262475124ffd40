//! Writable layers with a size of their own: an ext4 in a sparse file of exactly that size, on a loop device.
//!
//! An empty file system of each size is made once and copied; its mount stays with the slot, for the next
//! sandbox that asks for the same. The kernel answers ENOSPC inside when it is full, of bytes or of inodes.
//!
//! Locking: one mutex around the making of a template. CRASH: image and mount point lie in the slot's
//! folder under names of ours, and the image's name tells its size; the loop device goes with the mount.

use layer::{Context, Error, ErrorKind, Result};
use std::fs::File;
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use sys::loop_device::LoopDevice;
use sys::mount::{self, Attributes, Ext4, Unmount};

/// How large a writable layer is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DiskSize {
    /// Bytes, the file system's own tables included.
    pub bytes: u64,
    /// Files, folders and links; 0 is as many as the file system makes of its size.
    pub inodes: u64,
}

/// Below this there is no room for anything but the tables.
pub const MIN_BYTES: u64 = 16 << 20;
/// The largest file that ext4 carries.
pub const MAX_BYTES: u64 = 16 << 40;
/// What a file system takes for itself: reserved inodes and the folders of overlayfs.
const OWN_INODES: u64 = 16;
/// Space that a slot keeps between users without giving it back.
const KEPT_BYTES: u64 = 4 << 20;

/// Name of the mount point in a slot's folder.
const MOUNT_POINT: &str = "disk";

impl DiskSize {
    fn file_name(self) -> String {
        format!("disk-{}-{}.ext4", self.bytes, self.inodes)
    }

    fn of_file_name(name: &str) -> Option<Self> {
        let (bytes, inodes) = name.strip_prefix("disk-")?.strip_suffix(".ext4")?.split_once('-')?;
        Some(Self { bytes: bytes.parse().ok()?, inodes: inodes.parse().ok()? })
    }
}

/// Makes disks.
#[derive(Debug)]
pub struct Disks {
    templates: PathBuf,
    making: Mutex<()>,
}

impl Disks {
    /// `templates`: a folder for one empty file system of each size.
    pub fn new(templates: PathBuf) -> Self {
        Self { templates, making: Mutex::new(()) }
    }

    /// Makes a disk in the folder of a slot; answers where it is mounted. Blocking.
    pub fn make(&self, slot: &Path, size: DiskSize) -> Result<PathBuf> {
        let (image, place) = (slot.join(size.file_name()), slot.join(MOUNT_POINT));
        let made = self.copy_template(size, &image).and_then(|file| {
            std::fs::create_dir_all(&place).context(|| format!("make {}", place.display()))?;
            attach(&file, &place)
        });
        made.context(|| format!("make a disk of {} bytes", size.bytes))?;
        Ok(place)
    }

    fn copy_template(&self, size: DiskSize, image: &Path) -> Result<File> {
        let template = self.template(size)?;
        let copy = || -> std::io::Result<File> {
            let from = File::open(&template)?;
            let to =
                File::options().read(true).write(true).create(true).truncate(true).open(image)?;
            to.set_len(size.bytes)?;
            for data in sys::file::space::data_ranges(from.as_fd()) {
                let data = data?;
                let (from, to, length) = (from.as_fd(), to.as_fd(), data.end - data.start);
                sys::file::space::copy_range(from, data.start, to, data.start, length)?;
            }
            Ok(to)
        };
        copy().context(|| format!("copy {} to {}", template.display(), image.display()))
    }

    fn template(&self, size: DiskSize) -> Result<PathBuf> {
        let path = self.templates.join(size.file_name());
        let _making = self.making.lock().unwrap_or_else(PoisonError::into_inner);
        if path.exists() {
            return Ok(path);
        }
        std::fs::create_dir_all(&self.templates)
            .context(|| format!("make {}", self.templates.display()))?;
        let unfinished = path.with_extension("unfinished");
        let file = File::create(&unfinished).and_then(|file| file.set_len(size.bytes));
        file.context(|| format!("make {}", unfinished.display()))?;
        make_file_system(&unfinished, size)?;
        // CRASH: only what is finished has the name.
        std::fs::rename(&unfinished, &path).context(|| format!("make {}", path.display()))?;
        Ok(path)
    }
}

fn make_file_system(image: &Path, size: DiskSize) -> Result<()> {
    // A sandbox does not survive a crash of the machine, so its disk needs no journal.
    let mut command = std::process::Command::new("mkfs.ext4");
    let path = std::env::var("PATH").unwrap_or_default();
    command
        .env("PATH", format!("{path}:/usr/sbin:/sbin"))
        .args(["-q", "-F", "-b", "4096", "-m", "0"]);
    command.args(["-O", "^has_journal,^resize_inode", "-E", "lazy_itable_init=1,nodiscard"]);
    if size.inodes > 0 {
        command.args(["-N", &(size.inodes + OWN_INODES).to_string()]);
    }
    let ran = command.arg(image).stdin(std::process::Stdio::null()).output().map_err(|error| {
        let text = "mkfs.ext4 (package e2fsprogs) makes disks of a size";
        Error::new(ErrorKind::Unsupported, text).with_source(error)
    })?;
    if ran.status.success() {
        return Ok(());
    }
    let text = String::from_utf8_lossy(&ran.stderr);
    Err(Error::invalid(format!("mkfs.ext4 for {} bytes: {}", size.bytes, text.trim())))
}

fn attach(image: &File, place: &Path) -> Result<()> {
    let device = LoopDevice::over(image.as_fd(), "lamella")
        .context(|| "take a loop device (CONFIG_BLK_DEV_LOOP and /dev/loop-control)".into())?;
    let attributes = Attributes { nosuid: true, nodev: true, ..Attributes::default() };
    Ext4 { device: device.path() }
        .mount_detached(attributes)
        .and_then(|mount| mount.attach(place))
        .context(|| format!("mount the disk at {}", place.display()))
}

/// What disk the folder of a slot has: where it is mounted, and its size.
pub fn of_slot(slot: &Path) -> Option<(PathBuf, DiskSize)> {
    let mut entries = std::fs::read_dir(slot).ok()?.flatten();
    let size =
        entries.find_map(|entry| entry.file_name().to_str().and_then(DiskSize::of_file_name))?;
    Some((slot.join(MOUNT_POINT), size))
}

/// Takes the mount of a disk away, if there is one; its loop device goes with the last user. Blocking.
pub fn unmount(slot: &Path) {
    let place = slot.join(MOUNT_POINT);
    if place.exists()
        && let Err(error) = mount::unmount(&place, Unmount::Lazy)
        && error.kind() != std::io::ErrorKind::InvalidInput
    {
        tracing::warn!(place = %place.display(), %error, "a disk stays mounted");
    }
}

/// Bytes that the image of a slot's disk takes now; none without a disk.
pub fn allocated(slot: &Path) -> Option<u64> {
    use std::os::unix::fs::MetadataExt;
    let (_, size) = of_slot(slot)?;
    Some(slot.join(size.file_name()).metadata().ok()?.blocks() * 512)
}

/// Gives back what the files of a slot's disk do not use any more. Blocking.
pub fn trim(slot: &Path) -> Result<()> {
    let Some((place, _)) = of_slot(slot) else { return Ok(()) };
    if allocated(slot).unwrap_or(0) <= KEPT_BYTES {
        return Ok(());
    }
    let trim = || -> std::io::Result<()> {
        let folder = File::open(&place)?;
        // What was deleted is free only once the file system has said so to itself.
        sys::file::space::sync_file_system(folder.as_fd())?;
        sys::loop_device::trim(folder.as_fd())
    };
    trim().context(|| format!("give back what {} does not use", place.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Unmounted(PathBuf);
    impl Drop for Unmounted {
        fn drop(&mut self) {
            unmount(&self.0);
        }
    }

    #[test]
    fn a_disk_is_found_by_its_name_and_full_at_its_size() {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let slot = folder.path().join("s7");
        std::fs::create_dir(&slot).unwrap();
        let disks = Disks::new(folder.path().join("templates"));
        let size = DiskSize { bytes: 32 << 20, inodes: 100 };
        let unmounted = Unmounted(slot.clone());
        let place = disks.make(&slot, size).unwrap();
        assert_eq!(of_slot(&slot), Some((place.clone(), size)));
        assert!(allocated(&slot).unwrap() < 2 << 20);
        let full = std::fs::write(place.join("file"), vec![1; 40 << 20]).unwrap_err();
        assert_eq!(full.kind(), std::io::ErrorKind::StorageFull);
        File::open(&place).unwrap().sync_all().unwrap();
        std::fs::remove_file(place.join("file")).unwrap();
        trim(&slot).unwrap();
        assert!(allocated(&slot).unwrap() < 2 << 20);
        let made = (0..300).take_while(|at| File::create(place.join(at.to_string())).is_ok());
        let made = made.count();
        assert!((90..130).contains(&made), "{made} of about 100 files");
        drop(unmounted);
        assert!(std::fs::read_dir(&place).unwrap().next().is_none());
        assert_eq!(DiskSize::of_file_name("disk-1-2.ext4"), Some(DiskSize { bytes: 1, inodes: 2 }));
        assert_eq!(DiskSize::of_file_name("disk-x-2.ext4"), None);
    }
}
