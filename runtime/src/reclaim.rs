//! The memory of paused sandboxes: given back to the kernel after the freeze, asked for again before the thaw.
//!
//! Where the host has no swap, a node can be told to make some: compressed memory (zram), for the whole host, as
//! all swap is. CRASH: a note in the data directory says which device is ours, so the next runtime goes on with it.

use crate::backends::Instance;
use layer::{Context, Result};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use sys::swap::{self, Zram};

/// Name of the note.
const NOTE: &str = "zram";

/// Gives back what a frozen sandbox holds. That less than all goes is no error.
pub async fn give_back(id: &str, instance: &Arc<dyn Instance>) {
    let instance = Arc::clone(instance);
    match tokio::task::spawn_blocking(move || instance.reclaim()).await {
        Ok(Ok(())) => {}
        Ok(Err(error)) => tracing::debug!(id, error = %error.chain(), "memory stays in use"),
        Err(error) => tracing::error!(id, %error, "giving memory back panicked"),
    }
}

/// Asks for what lies in swap, so that the sandbox does not wait for it page by page.
pub async fn bring_back(id: &str, instance: &Arc<dyn Instance>) {
    let instance = Arc::clone(instance);
    match tokio::task::spawn_blocking(move || instance.bring_back()).await {
        Ok(Ok(())) => {}
        // The pages come when they are touched.
        Ok(Err(error)) => tracing::debug!(id, error = %error.chain(), "memory comes by and by"),
        Err(error) => tracing::error!(id, %error, "asking for memory panicked"),
    }
}

/// Swap that this node made.
#[derive(Debug, Clone)]
pub struct OwnSwap {
    note: PathBuf,
    zram: Option<Zram>,
}

impl OwnSwap {
    /// Goes on with what an earlier runtime of this start of the machine made; makes some if `bytes` are asked
    /// for and the host has none. Blocking.
    pub fn open(folder: &Path, bytes: Option<u64>) -> Result<Self> {
        let boot = sys::clock::boot_id().context(|| "read the boot id".into())?;
        let note = folder.join(NOTE);
        let former = former(&note, &boot);
        if let Some(zram) = former.filter(|zram| zram.is_on()) {
            return Ok(Self { note, zram: Some(zram) });
        }
        if let Some(zram) = former {
            // It was being made; whether it still exists, nobody knows.
            let _gone = zram.stop();
        }
        remove(&note)?;
        let Some(bytes) = bytes.filter(|_| !swap::is_any()) else {
            return Ok(Self { note, zram: None });
        };
        let context = || format!("make swap of {bytes} bytes in compressed memory (CONFIG_ZRAM)");
        let zram = Zram::make().context(context)?;
        let noted = std::fs::write(&note, format!("{} {boot}", zram.number()));
        let started = noted.and_then(|()| zram.start(bytes));
        if let Err(error) = started {
            let _as_it_was = zram.stop();
            remove(&note)?;
            return Err(error).context(context);
        }
        Ok(Self { note, zram: Some(zram) })
    }

    /// Takes it away. Blocking: what lies in it comes back into memory.
    pub fn close(&self) -> Result<()> {
        let Some(zram) = self.zram.filter(|zram| zram.is_on()) else { return Ok(()) };
        zram.stop().context(|| "stop swapping to compressed memory".into())?;
        remove(&self.note)
    }
}

fn former(note: &Path, boot: &str) -> Option<Zram> {
    let text = std::fs::read_to_string(note).ok()?;
    let (number, made_in) = text.split_once(' ')?;
    (made_in == boot).then(|| number.parse().ok().map(Zram::with_number))?
}

fn remove(note: &Path) -> Result<()> {
    match std::fs::remove_file(note) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        removed => removed.context(|| format!("remove {}", note.display())),
    }
}
