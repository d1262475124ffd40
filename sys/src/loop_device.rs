//! Block devices over files ("loop"), for file systems of a bounded size in a file.
//!
//! Not for: encryption, offsets, devices that outlive their use. What survives a crash: a device goes away
//! with its last user, which is this descriptor or the mount that was made from it.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

/// A device that goes away with the last descriptor or mount of it.
#[derive(Debug)]
pub struct LoopDevice {
    _open: OwnedFd,
    path: PathBuf,
}

/// linux/loop.h
const CTL_GET_FREE: libc::c_ulong = 0x4c82;
const CONFIGURE: libc::c_ulong = 0x4c0a;
const AUTOCLEAR: u32 = 4;
const DIRECT_IO: u32 = 16;
const BLOCK_BYTES: u32 = 4096;

#[repr(C)]
struct Info {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_size: u32,
    flags: u32,
    file_name: [u8; 64],
    crypt_name: [u8; 64],
    encrypt_key: [u8; 32],
    init: [u64; 2],
}

#[repr(C)]
struct Config {
    fd: u32,
    block_size: u32,
    info: Info,
    reserved: [u64; 8],
}

impl LoopDevice {
    /// A free device over a file that is open for reading and writing. It reads and writes past the page
    /// cache where the file can, so that nothing is cached twice. `name` is what tools show of it.
    pub fn over(file: BorrowedFd<'_>, name: &str) -> io::Result<Self> {
        let control = open(Path::new("/dev/loop-control"))?;
        const ROUNDS: u32 = 64;
        for _ in 0..ROUNDS {
            // SAFETY: the request takes no argument.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), CTL_GET_FREE, 0) };
            if number < 0 {
                return Err(io::Error::last_os_error());
            }
            let path = PathBuf::from(format!("/dev/loop{number}"));
            let device = open(&path)?;
            let configured =
                configure(&device, file, name, AUTOCLEAR | DIRECT_IO).or_else(|error| match error
                    .raw_os_error()
                {
                    Some(libc::EINVAL) => configure(&device, file, name, AUTOCLEAR),
                    _ => Err(error),
                });
            match configured {
                Ok(()) => return Ok(Self { _open: device, path }),
                // Somebody else was faster.
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {}
                Err(error) => return Err(error),
            }
        }
        Err(io::ErrorKind::ResourceBusy.into())
    }

    /// Its name below /dev.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

fn open(path: &Path) -> io::Result<OwnedFd> {
    Ok(std::fs::File::options().read(true).write(true).open(path)?.into())
}

fn configure(device: &OwnedFd, file: BorrowedFd<'_>, name: &str, flags: u32) -> io::Result<()> {
    // SAFETY: a plain C structure, whose all-zero value asks for nothing.
    let mut config: Config = unsafe { std::mem::zeroed() };
    config.fd = file.as_raw_fd() as u32;
    config.block_size = BLOCK_BYTES;
    config.info.flags = flags;
    let length = name.len().min(config.info.file_name.len() - 1);
    config.info.file_name[..length].copy_from_slice(&name.as_bytes()[..length]);
    // SAFETY: the kernel reads the structure of this request, which outlives the call.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), CONFIGURE, &raw const config) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Tells the device under a file system which of its blocks are unused; `fd` is anything on it. Over a file
/// the space goes back to the file system that the file lies on.
pub fn trim(fd: BorrowedFd<'_>) -> io::Result<()> {
    #[repr(C)]
    struct Range {
        start: u64,
        length: u64,
        min_length: u64,
    }
    // _IOWR('X', 121, struct fstrim_range)
    const FITRIM: libc::c_ulong = 0xc018_5879;
    let mut range = Range { start: 0, length: u64::MAX, min_length: 0 };
    // SAFETY: the kernel reads and writes the structure of this request, which outlives the call.
    let result = unsafe { libc::ioctl(fd.as_raw_fd(), FITRIM, &raw mut range) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// The whole disk that holds a file: its major and minor number. Partitions stand for their disk.
pub fn disk_of(fd: BorrowedFd<'_>) -> io::Result<(u32, u32)> {
    let device = rustix::fs::fstat(fd)?.st_dev;
    let (major, minor) = (rustix::fs::major(device), rustix::fs::minor(device));
    let place = PathBuf::from(format!("/sys/dev/block/{major}:{minor}"));
    if !place.join("partition").exists() {
        return match place.exists() {
            true => Ok((major, minor)),
            false => Err(io::ErrorKind::Unsupported.into()),
        };
    }
    let text = std::fs::read_to_string(std::fs::canonicalize(place)?.join("../dev"))?;
    let mut numbers = text.trim().split(':').map(str::parse);
    match (numbers.next(), numbers.next()) {
        (Some(Ok(major)), Some(Ok(minor))) => Ok((major, minor)),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mount::{Attributes, Ext4};
    use std::os::fd::AsFd;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_file_system_in_a_file_ends_where_the_file_does_and_gives_back_what_is_unused() {
        let folder = tempfile::tempdir_in("/var/tmp").unwrap();
        let image = folder.path().join("image");
        let file =
            std::fs::File::options().read(true).write(true).create_new(true).open(&image).unwrap();
        file.set_len(32 << 20).unwrap();
        let made = std::process::Command::new("/usr/sbin/mkfs.ext4")
            .args(["-q", "-F", "-b", "4096", "-O", "^has_journal", "-m", "0"])
            .arg(&image)
            .status()
            .unwrap();
        assert!(made.success());
        let device = LoopDevice::over(file.as_fd(), "test").unwrap();
        let mount = Ext4 { device: device.path() }.mount_detached(Attributes::KERNEL).unwrap();
        let path = device.path().to_owned();
        drop(device);
        let inside = PathBuf::from(format!("/proc/self/fd/{}/file", mount.as_fd().as_raw_fd()));
        let error = std::fs::write(&inside, vec![7; 64 << 20]).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        rustix::fs::syncfs(std::fs::File::open(&inside).unwrap()).unwrap();
        assert!(image.metadata().unwrap().blocks() * 512 > 20 << 20);
        std::fs::remove_file(&inside).unwrap();
        let root = format!("/proc/self/fd/{}", mount.as_fd().as_raw_fd());
        trim(std::fs::File::open(root).unwrap().as_fd()).unwrap();
        assert!(image.metadata().unwrap().blocks() * 512 < 4 << 20);
        drop(mount);
        let name = path.file_name().unwrap().to_str().unwrap();
        let backing = format!("/sys/block/{name}/loop/backing_file");
        for _ in 0..200 {
            let text = std::fs::read_to_string(&backing).unwrap_or_default();
            if !text.contains(image.to_str().unwrap()) {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(10));
        }
        panic!("the device stays");
    }

    #[test]
    fn a_disk_has_a_number() {
        let file = std::fs::File::open("/var/tmp").unwrap();
        let (major, minor) = disk_of(file.as_fd()).unwrap();
        assert!(Path::new(&format!("/sys/dev/block/{major}:{minor}/queue")).exists());
    }
}
