//! Layers that are loaded whole, behind all demand, because somebody asked for it.
//!
//! ```text
//! (absent) --asked--> under way --complete and durable, or failed-----> (absent)
//!                        |---------last holder gone, where it had one--> (absent)
//!                        `--fsd ends--> in its file --next fsd--> under way
//! ```
//! A layer that nobody holds when it is asked for is loaded for those who will come. One that is held is
//! loaded for its holders, and the load ends with the last of them, unless the layer is pinned.
//!
//! Locking: one mutex around the count of callers a layer, held while its file is made or removed.
// CRASH: the file is there before the first chunk is asked for and goes after the last. One that is torn
// names no order and is removed; the load is then asked for again or left to demand.

use crate::attach::Attachments;
use crate::cache::create_folder;
use layer::{Context, Error, ErrorKind, LayerId, Result};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// What was asked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Order {
    /// Plain bytes a second; 0 is no limit.
    rate: u64,
    /// Only as long as somebody holds the layer.
    while_held: bool,
}

impl Order {
    fn encode(self) -> String {
        format!("{} {}\n", self.rate, u8::from(self.while_held))
    }

    fn decode(text: &str) -> Option<Self> {
        let (rate, while_held) = text.strip_suffix('\n')?.split_once(' ')?;
        Some(Self { rate: rate.parse().ok()?, while_held: while_held == "1" })
    }
}

/// How a load ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Completed {
    /// Plain bytes that came meanwhile.
    pub fetched_bytes: u64,
    /// Whether the last holder went away before all was there.
    pub broken_off: bool,
}

/// Why a load does not go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum End {
    Unheld,
    FsdEnds,
}

/// All loads that are under way.
#[derive(Debug)]
pub struct Completions {
    folder: PathBuf,
    default_rate: u64,
    callers: Mutex<BTreeMap<LayerId, usize>>,
    ending: AtomicBool,
}

impl Completions {
    /// Keeps its files in this folder. `default_rate` is for callers that name none.
    pub fn open(folder: &Path, default_rate: u64) -> Result<Self> {
        create_folder(folder)?;
        let callers = Mutex::default();
        let ending = AtomicBool::new(false);
        Ok(Self { folder: folder.to_owned(), default_rate, callers, ending })
    }

    /// Loads a whole layer, at most so many plain bytes a second (0 is the node's default), and waits until
    /// it is durable. `Unavailable` when fsd ends before: its successor goes on.
    pub fn load(&self, attachments: &Attachments, id: &LayerId, rate: u64) -> Result<Completed> {
        let rate = if rate == 0 { self.default_rate } else { rate };
        let pinned = attachments.parts().cache.pins().contains(id);
        let while_held = attachments.is_held(id) && !pinned;
        self.carry_out(attachments, id, Order { rate, while_held })
    }

    fn carry_out(
        &self,
        attachments: &Attachments,
        id: &LayerId,
        order: Order,
    ) -> Result<Completed> {
        self.begin(id, order)?;
        let end = Cell::new(None);
        let goes_on = || {
            if self.ending.load(Ordering::Acquire) {
                end.set(Some(End::FsdEnds));
            } else if order.while_held && !attachments.is_held(id) {
                end.set(Some(End::Unheld));
            }
            end.get().is_none()
        };
        let loaded = attachments.complete(id, order.rate, &goes_on);
        let broken_off = end.get().filter(|_| !loaded.as_ref().is_ok_and(|(_, whole)| *whole));
        if broken_off == Some(End::FsdEnds) {
            let text = format!("fsd ends; the next one goes on loading layer {id}");
            return Err(Error::new(ErrorKind::Unavailable, text));
        }
        self.end(id)?;
        let (fetched_bytes, _) = loaded?;
        Ok(Completed { fetched_bytes, broken_off: broken_off.is_some() })
    }

    fn begin(&self, id: &LayerId, order: Order) -> Result<()> {
        let path = self.folder.join(id.to_string());
        let mut callers = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
        std::fs::write(&path, order.encode()).context(|| format!("write {}", path.display()))?;
        *callers.entry(*id).or_default() += 1;
        Ok(())
    }

    fn end(&self, id: &LayerId) -> Result<()> {
        let mut callers = self.callers.lock().unwrap_or_else(PoisonError::into_inner);
        let left = callers.get(id).map_or(0, |count| count.saturating_sub(1));
        if left > 0 {
            callers.insert(*id, left);
            return Ok(());
        }
        callers.remove(id);
        self.forget(id)
    }

    fn forget(&self, id: &LayerId) -> Result<()> {
        let path = self.folder.join(id.to_string());
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                Err(Error::io(format!("remove {}", path.display()), error))
            }
            _ => Ok(()),
        }
    }

    /// Lets loads break off soon; their files stay.
    pub fn break_off(&self) {
        self.ending.store(true, Ordering::Release);
    }

    /// Goes on with what a former fsd did not bring to its end, one layer after the other, on a thread of
    /// its own.
    pub fn resume(self: &Arc<Self>, attachments: &Arc<Attachments>) -> Result<()> {
        let left = self.left()?;
        if left.is_empty() {
            return Ok(());
        }
        let (completions, attachments) = (Arc::clone(self), Arc::clone(attachments));
        crate::fetch::spawn("completions", move || {
            for (id, order) in left {
                tracing::info!(layer = %id, rate = order.rate, "goes on loading it");
                match completions.carry_out(&attachments, &id, order) {
                    Ok(done) => tracing::info!(layer = %id, broken_off = done.broken_off, "loaded"),
                    Err(error) => tracing::warn!(layer = %id, error = %error.chain(), "load"),
                }
            }
        })
    }

    fn left(&self) -> Result<Vec<(LayerId, Order)>> {
        let name = || format!("list {}", self.folder.display());
        let mut left = Vec::new();
        for entry in std::fs::read_dir(&self.folder).context(name)? {
            let path = entry.context(name)?.path();
            let id = path.file_name().and_then(|name| name.to_str()?.parse::<LayerId>().ok());
            let order = std::fs::read_to_string(&path).ok().and_then(|text| Order::decode(&text));
            match (id, order) {
                (Some(id), Some(order)) => left.push((id, order)),
                _ => {
                    std::fs::remove_file(&path).context(|| format!("remove {}", path.display()))?;
                }
            }
        }
        Ok(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_under_way_is_known_to_the_next_one_until_the_last_caller_is_answered() {
        let folder = tempfile::tempdir().unwrap();
        let open = || Completions::open(folder.path(), 7).unwrap();
        let (one, two) = (LayerId([1; 32]), LayerId([2; 32]));
        let completions = open();
        let orders = [
            (one, Order { rate: 1 << 20, while_held: true }),
            (two, Order { rate: 0, while_held: false }),
        ];
        for (id, order) in orders {
            completions.begin(&id, order).unwrap();
            completions.begin(&id, order).unwrap();
        }
        completions.end(&one).unwrap();
        std::fs::write(folder.path().join(LayerId([3; 32]).to_string()), "12").unwrap();
        let mut left = open().left().unwrap();
        left.sort_by_key(|(id, _)| *id);
        assert_eq!(left, orders);
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 2, "a torn file goes");
        completions.end(&one).unwrap();
        completions.end(&two).unwrap();
        completions.end(&two).unwrap();
        assert!(open().left().unwrap().is_empty());
    }
}
