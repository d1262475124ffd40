//! Gives every inode a place: slots of 32 bytes, filled densely and near to their directory.
//!
//! An inline tail must not cross a block border, so an inode with one may leave a gap at the end of a
//! block. Gaps are remembered and filled by later, smaller inodes: the best fitting one, and of
//! those the youngest.

use super::plan::{Form, Plan};
use crate::erofs::format::{
    BLOCK, BLOCK_SLOTS, DEVICE_SLOT_BYTES, DEVICE_TABLE_OFFSET, SLOT_BYTES,
};
use crate::error::{Error, Result};

/// Where everything of an image lies.
#[derive(Debug)]
pub(super) struct Places {
    /// By index in the tree, in slots from the start of the image; 0 for inodes without a place.
    pub(super) slots: Vec<u32>,
    /// Where the whole blocks of an inode's content start, by its order in the plan; 0 for none.
    pub(super) blocks: Vec<u32>,
    /// Where the shared xattrs start, in bytes.
    pub(super) xattr_offset: u64,
    /// Blocks of the whole image; the data device follows in the address space.
    pub(super) image_blocks: u32,
}

impl Places {
    pub(super) fn new(plan: &Plan<'_>) -> Result<Self> {
        let too_large = || Error::invalid("the tree needs more metadata than EROFS can address");
        let first = ((DEVICE_TABLE_OFFSET + DEVICE_SLOT_BYTES) / SLOT_BYTES) as u64;
        let mut slots = vec![0; plan.tree.inodes.len()];
        let mut allocator = Allocator::new(first);
        for (inode, form) in plan.order.iter().zip(&plan.forms) {
            let slot = allocator.place(form);
            slots[inode.index()] = u32::try_from(slot).map_err(|_| too_large())?;
        }
        let xattr_offset = allocator.end * SLOT_BYTES as u64;
        let xattr_end = xattr_offset + plan.xattrs.area_bytes();
        let mut next = xattr_end.div_ceil(BLOCK as u64);
        let mut blocks = Vec::with_capacity(plan.forms.len());
        for form in &plan.forms {
            let count = u64::from(form.image_blocks);
            blocks.push(if count == 0 {
                0
            } else {
                u32::try_from(next).map_err(|_| too_large())?
            });
            next += count;
        }
        let image_blocks = u32::try_from(next).map_err(|_| too_large())?;
        // The last address, 2^32-1, means a hole.
        if next + u64::from(plan.data_blocks) > u64::from(u32::MAX) {
            return Err(Error::invalid(format!(
                "{next} blocks of metadata and {} of data are more than EROFS can address",
                plan.data_blocks
            )));
        }
        Ok(Self { slots, blocks, xattr_offset, image_blocks })
    }
}

#[derive(Debug)]
struct Allocator {
    end: u64,
    /// Starts of gaps, by their length in slots; a gap never crosses a block border.
    gaps: Vec<Vec<u64>>,
    /// Bit n is set where there are gaps of n slots.
    lengths: u128,
}

impl Allocator {
    fn new(first: u64) -> Self {
        Self { end: first, gaps: vec![Vec::new(); BLOCK_SLOTS], lengths: 0 }
    }

    fn place(&mut self, form: &Form) -> u64 {
        let slots = form.inode_bytes().div_ceil(SLOT_BYTES as u64);
        if let Some(start) = self.take_gap(slots) {
            return start;
        }
        let left = BLOCK_SLOTS as u64 - self.end % BLOCK_SLOTS as u64;
        // What has to lie within one block: the inode itself, with its xattrs and tail if it has one.
        let uncut = if form.tail_bytes > 0 { slots } else { form.head_slots() };
        if uncut > left {
            self.add_gap(self.end, left);
            self.end += left;
        }
        let start = self.end;
        self.end += slots;
        start
    }

    fn take_gap(&mut self, slots: u64) -> Option<u64> {
        if slots >= BLOCK_SLOTS as u64 {
            return None;
        }
        let fitting = self.lengths >> slots << slots;
        let length = u64::from(fitting.trailing_zeros());
        let gaps = self.gaps.get_mut(length as usize)?;
        let start = gaps.pop()?;
        if gaps.is_empty() {
            self.lengths &= !(1 << length);
        }
        if length > slots {
            self.add_gap(start + slots, length - slots);
        }
        Some(start)
    }

    fn add_gap(&mut self, start: u64, length: u64) {
        // INVARIANT: less than a block, because only what is left of a begun block becomes a gap.
        if let Some(gaps) = self.gaps.get_mut(length as usize) {
            gaps.push(start);
            self.lengths |= 1 << length;
        }
    }
}
