//! Upgrade in place: a node becomes the program that is installed now, under the same process id.
//!
//! ```text
//! SIGUSR2 -> the new program is tried -> services end, sandboxes and fsd stay -> exec
//!         -> the new node finds an fsd of another program, ends it without unmounting, starts its own
//!         -> the new fsd takes over from the keepers: who read meanwhile has waited
//!         -> the new fsd has the keepers succeeded, one by one, by ones of its own program
//! ```
//! A program that cannot be run is refused, and the node goes on as it is.
//!
//! CRASH: dying between two steps is like the death of a node or of fsd: the next ones adopt.

use layer::{Context, Error, ErrorKind, Result};
use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What the kernel appends to the name of a program whose file was replaced.
const REPLACED: &[u8] = b" (deleted)";

/// Which file a process runs, or would run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Program {
    device: u64,
    inode: u64,
}

impl Program {
    fn at(path: &Path) -> Result<Self> {
        let found = std::fs::metadata(path).context(|| format!("stat {}", path.display()))?;
        Ok(Self { device: found.dev(), inode: found.ino() })
    }

    /// The program of a process, also when its file has no name any more.
    pub fn of_process(pid: u32) -> Result<Self> {
        Self::at(&PathBuf::from(format!("/proc/{pid}/exe")))
    }

    /// This program.
    pub fn own() -> Result<Self> {
        Self::of_process(std::process::id())
    }

    /// What is installed where the program of a process was started from.
    pub fn installed_for(pid: u32) -> Result<(PathBuf, Self)> {
        let link = PathBuf::from(format!("/proc/{pid}/exe"));
        let target = std::fs::read_link(&link).context(|| format!("read {}", link.display()))?;
        let bytes = target.as_os_str().as_bytes();
        let name = bytes.strip_suffix(REPLACED).unwrap_or(bytes);
        let path = PathBuf::from(OsString::from_vec(name.to_vec()));
        let program = Self::at(&path)?;
        Ok((path, program))
    }
}

/// `Unavailable` for a program that cannot be run.
pub fn try_out(path: &Path) -> Result<()> {
    let name = || format!("try {}", path.display());
    let mut command = Command::new(path);
    command.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let status = command.status().context(name)?;
    if status.success() {
        return Ok(());
    }
    Err(Error::new(ErrorKind::Unavailable, format!("{} ended with {status}", name())))
}

/// The program that this node would become.
pub fn next() -> Result<PathBuf> {
    let (path, _) = Program::installed_for(std::process::id())?;
    try_out(&path)?;
    Ok(path)
}

/// Becomes another program with the same arguments. Returns only when that fails.
pub fn become_program(path: &Path) -> Error {
    let error = Command::new(path).arg0("lamella").args(std::env::args_os().skip(1)).exec();
    Error::io(format!("become {}", path.display()), error)
}
