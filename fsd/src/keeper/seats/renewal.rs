//! Keepers of another program are replaced by this program's, one by one, while readers wait or read on.
//!
//! fsd only starts the new keeper; that one takes everything from the old one and has it leave (see
//! `succession`), so what happens to fsd meanwhile does not matter: the next one finds the old keeper, the
//! new one, or an empty seat, and each is in order.
//!
//! Locking: a seat is locked while its keeper is replaced, so no file is put or forgotten meanwhile.
// INVARIANT: the second keeper holds everything before the first is replaced.

use super::{KEEPERS, Keepers, RESTART_PAUSE, Seat, lock};
use layer::{Context, Result};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::atomic::Ordering;

/// How often a keeper is tried to be replaced before the old one is left alone.
const ATTEMPTS: usize = 5;

/// Device and inode of a program.
fn program(path: impl AsRef<Path>) -> Result<(u64, u64)> {
    let path = path.as_ref();
    let found = std::fs::metadata(path).context(|| format!("stat {}", path.display()))?;
    Ok((found.dev(), found.ino()))
}

impl Keepers {
    /// The body of a thread: replaces what is of another program.
    pub fn renew(&self) {
        for index in 0..KEEPERS {
            for _ in 0..ATTEMPTS {
                if self.leaving.load(Ordering::Acquire) {
                    return;
                }
                match self.renew_seat(index) {
                    Ok(()) => break,
                    Err(error) => {
                        tracing::warn!(index, error = %error.chain(), "replace a keeper");
                        std::thread::sleep(RESTART_PAUSE);
                    }
                }
            }
        }
    }

    fn is_current(&self, seat: &Seat) -> Result<bool> {
        let Some(command) = self.command.first() else { return Ok(true) };
        Ok(program(format!("/proc/{}/exe", seat.pid))? == program(command)?)
    }

    fn renew_seat(&self, index: usize) -> Result<()> {
        for other in (0..KEEPERS).filter(|other| *other != index) {
            self.seat(other)?;
        }
        let held = lock(&self.held);
        let Some(held) = held.as_ref() else { return Ok(()) };
        let mut seat = lock(&self.seats[index]);
        // An empty seat is its watcher's.
        let Some(old) = seat.as_mut() else { return Ok(()) };
        if self.is_current(old)? {
            return Ok(());
        }
        let fresh = self.start(index, held)?;
        tracing::info!(index, old = old.pid, new = fresh.pid, "a keeper was replaced");
        if let Some(child) = &mut old.child {
            let _ = child.wait();
        }
        *seat = Some(fresh);
        Ok(())
    }
}
