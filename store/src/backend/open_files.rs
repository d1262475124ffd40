//! Files kept open for reading, the least recently used one closed first.
//!
//! INVARIANT: a name is never given to other content, so a file that is open cannot be stale.

use crate::key::Key;
use std::collections::HashMap;
use std::sync::Arc;

/// How many files are kept open.
pub(super) const OPEN_FILES: usize = 64;

/// Open files by the names of their objects; `F` is what an open file is.
#[derive(Debug)]
pub(super) struct OpenFiles<F> {
    clock: u64,
    files: HashMap<Key, (Arc<F>, u64)>,
}

impl<F> Default for OpenFiles<F> {
    fn default() -> Self {
        Self { clock: 0, files: HashMap::new() }
    }
}

impl<F> OpenFiles<F> {
    pub(super) fn get(&mut self, key: &Key) -> Option<Arc<F>> {
        self.clock += 1;
        let clock = self.clock;
        let (file, used) = self.files.get_mut(key)?;
        *used = clock;
        Some(file.clone())
    }

    pub(super) fn put(&mut self, key: &Key, file: &Arc<F>) {
        if self.files.len() >= OPEN_FILES {
            let oldest = self.files.iter().min_by_key(|(_, (_, used))| *used);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                self.files.remove(&oldest);
            }
        }
        self.clock += 1;
        self.files.insert(key.clone(), (file.clone(), self.clock));
    }

    pub(super) fn forget(&mut self, key: &Key) {
        self.files.remove(key);
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.files.len()
    }

    pub(super) fn forget_all(&mut self) {
        self.files.clear();
    }
}
