//! The blocks of a directory: entries sorted by the bytes of their names, `.` and `..` among them.
//!
//! Each block is whole by itself: its entries, then their names in the same order. The kernel finds
//! a name by binary search, first among blocks and then in one.

use crate::erofs::format::{BLOCK, DIRENT_BYTES};
use crate::tree::InodeIx;
use std::collections::BTreeMap;
use std::ops::Bound;

/// All entries of a directory in the order of the image.
pub(super) fn entries(
    names: &BTreeMap<Vec<u8>, InodeIx>,
    this: InodeIx,
    parent: InodeIx,
) -> impl Iterator<Item = (&[u8], InodeIx)> {
    let between = |from: Bound<&'static [u8]>, to: Bound<&'static [u8]>| {
        names.range::<[u8], _>((from, to)).map(|(name, inode)| (name.as_slice(), *inode))
    };
    let (dot, dots): (&[u8], &[u8]) = (b".", b"..");
    between(Bound::Unbounded, Bound::Excluded(dot))
        .chain([(dot, this)])
        .chain(between(Bound::Excluded(dot), Bound::Excluded(dots)))
        .chain([(dots, parent)])
        .chain(between(Bound::Excluded(dots), Bound::Unbounded))
}

/// The size of a directory: all its blocks but the last are full.
pub(super) fn size(names: &BTreeMap<Vec<u8>, InodeIx>) -> u64 {
    let (mut full, mut used) = (0_u64, 0);
    for (name, _) in entries(names, InodeIx::ROOT, InodeIx::ROOT) {
        let needed = DIRENT_BYTES + name.len();
        if used + needed > BLOCK {
            full += 1;
            used = 0;
        }
        used += needed;
    }
    full * BLOCK as u64 + used as u64
}

/// Makes the blocks one by one; the last is as long as it has to be.
pub(super) fn for_each_block<'t>(
    entries: impl Iterator<Item = (&'t [u8], u64, u8)>,
    mut block_is_ready: impl FnMut(&[u8]),
) {
    let mut pending: Vec<(&[u8], u64, u8)> = Vec::new();
    let mut used = 0;
    let mut block = Vec::with_capacity(BLOCK);
    let mut flush = |pending: &mut Vec<(&[u8], u64, u8)>, pad: bool| {
        block.clear();
        let mut name_offset = pending.len() * DIRENT_BYTES;
        for (name, number, file_type) in pending.iter() {
            block.extend_from_slice(&number.to_le_bytes());
            // INVARIANT: everything lies within one block of 4096 bytes.
            block.extend_from_slice(&(name_offset as u16).to_le_bytes());
            block.extend_from_slice(&[*file_type, 0]);
            name_offset += name.len();
        }
        for (name, ..) in pending.drain(..) {
            block.extend_from_slice(name);
        }
        if pad {
            block.resize(BLOCK, 0);
        }
        block_is_ready(&block);
    };
    for entry in entries {
        let needed = DIRENT_BYTES + entry.0.len();
        if used + needed > BLOCK {
            flush(&mut pending, true);
            used = 0;
        }
        used += needed;
        pending.push(entry);
    }
    flush(&mut pending, false);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_dots_stand_among_names_that_sort_around_them() {
        let names: BTreeMap<Vec<u8>, InodeIx> =
            ["!", "-", ".\u{1}", ".a", "..a", "0", ".-"].map(|n| (n.into(), InodeIx(7))).into();
        let order: Vec<_> = entries(&names, InodeIx(1), InodeIx(2)).map(|(name, _)| name).collect();
        assert!(order.is_sorted());
        assert_eq!(order.len(), 9);
    }

    #[test]
    fn the_size_is_that_of_the_blocks() {
        let names: BTreeMap<Vec<u8>, InodeIx> =
            (0..2000).map(|n| (format!("{n:x}").repeat(1 + n % 9).into(), InodeIx(7))).collect();
        for count in [0, 1, 2, 100, 1000, 2000] {
            let names: BTreeMap<_, _> = names.clone().into_iter().take(count).collect();
            let mut bytes = 0;
            let typed = entries(&names, InodeIx(1), InodeIx(2)).map(|(name, _)| (name, 5, 1));
            for_each_block(typed, |block| bytes += block.len() as u64);
            assert_eq!(size(&names), bytes, "{count}");
        }
    }
}
