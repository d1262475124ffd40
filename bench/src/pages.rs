//! Pages of a file in an order that no readahead foresees, the same one each time.

use std::fs::File;

/// Bytes of a page.
pub const PAGE_BYTES: usize = 4096;

/// Offsets of pages, without end.
#[derive(Debug)]
pub struct Pages {
    pages: u64,
    state: u64,
}

impl Pages {
    /// Of a whole file.
    pub fn of(file: &File) -> anyhow::Result<Self> {
        let pages = file.metadata()?.len() / PAGE_BYTES as u64;
        anyhow::ensure!(pages > 0, "the file is smaller than a page");
        Ok(Self { pages, state: 0x9e37_79b9_7f4a_7c15 })
    }
}

impl Iterator for Pages {
    type Item = u64;

    fn next(&mut self) -> Option<u64> {
        // A linear congruential generator; its high bits are good enough.
        self.state = self
            .state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        Some((self.state >> 33) % self.pages * PAGE_BYTES as u64)
    }
}
