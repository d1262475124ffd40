//! The judges: the kernel, fsck.erofs and dump.erofs; and mkfs.erofs, whose image judges the judges.

use anyhow::{Context, Result};
use layer::erofs::writer::Image;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::Command;

/// A metadata image and its data device in files.
pub struct Files {
    folder: tempfile::TempDir,
    pub metadata: PathBuf,
    data: PathBuf,
}

impl Files {
    fn empty() -> Result<Self> {
        let folder = tempfile::tempdir()?;
        let (metadata, data) = (folder.path().join("meta.erofs"), folder.path().join("data"));
        Ok(Self { folder, metadata, data })
    }

    pub fn write(image: &Image, data: &[u8]) -> Result<Self> {
        let files = Self::empty()?;
        std::fs::write(&files.metadata, &image.bytes)?;
        std::fs::write(&files.data, data)?;
        Ok(files)
    }

    /// The image that mkfs.erofs makes of the same folder.
    pub fn mkfs(source: &Path) -> Result<Self> {
        let files = Self::empty()?;
        // mkfs.erofs takes over an existing data file only.
        std::fs::write(&files.data, [])?;
        run(Command::new("mkfs.erofs")
            .arg("--quiet")
            .arg("--chunksize=4096")
            .arg(format!("--blobdev={}", files.data.display()))
            .arg(&files.metadata)
            .arg(source))?;
        Ok(files)
    }

    /// A mount by the kernel, detached: it is gone with the value, whatever happens to the test.
    pub fn mount(&self) -> Result<Mounted> {
        let erofs = sys::mount::Erofs { metadata: &self.metadata, device: Some(&self.data) };
        let mount = erofs.mount_detached(sys::mount::Attributes::default())?;
        let fd = mount.into_fd();
        let path = PathBuf::from(format!("/proc/self/fd/{}/.", fd.as_raw_fd()));
        Ok(Mounted { path, _fd: fd })
    }

    /// Runs fsck.erofs on image and device; it checks structure, not contents.
    pub fn fsck(&self) -> Result<()> {
        run(Command::new("fsck.erofs")
            .arg(format!("--device={}", self.data.display()))
            .arg(&self.metadata))
        .map(drop)
    }

    /// Extracts with fsck.erofs into a folder.
    ///
    /// fsck.erofs 1.5 knows the mapped address of a device but then reads the primary one, so it is
    /// given the same address space in one file: the data behind the metadata, and a device slot that
    /// maps nothing. Chunk indexes go on to name the device.
    pub fn fsck_extract(&self, target: &Path) -> Result<()> {
        let flat = self.folder.path().join("flat.erofs");
        let mut bytes = std::fs::read(&self.metadata)?;
        let slot = usize::from(u16::from_le_bytes([bytes[1024 + 88], bytes[1024 + 89]])) * 128;
        bytes[slot + 68..slot + 72].fill(0);
        bytes[1024 + 8] &= !1;
        bytes.extend_from_slice(&std::fs::read(&self.data)?);
        std::fs::write(&flat, bytes)?;
        run(Command::new("fsck.erofs")
            .arg(format!("--extract={}", target.display()))
            .arg("--preserve")
            .arg(format!("--device={}", self.data.display()))
            .arg(&flat))
        .map(drop)
    }

    /// What dump.erofs tells of one path, or of the superblock.
    pub fn dump(&self, path: Option<&str>) -> Result<String> {
        let mut command = Command::new("dump.erofs");
        command.arg(format!("--device={}", self.data.display()));
        match path {
            Some(path) => command.arg(format!("--path={path}")),
            None => command.arg("-s"),
        };
        run(command.arg(&self.metadata))
    }
}

pub struct Mounted {
    pub path: PathBuf,
    _fd: OwnedFd,
}

fn run(command: &mut Command) -> Result<String> {
    // erofs-utils have been seen to run without end; a judge that does not answer has failed.
    let mut limited = Command::new("timeout");
    limited.arg("60").arg(command.get_program()).args(command.get_args());
    let output = limited.output().with_context(|| format!("start {command:?}"))?;
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    anyhow::ensure!(output.status.success(), "{command:?}: {}\n{text}", output.status);
    Ok(text)
}
