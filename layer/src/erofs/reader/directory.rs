//! Directories: blocks of sorted entries, searched or listed.

use super::inode::RawInode;
use super::{DirEntry, Reader, u16_at, u64_at};
use crate::erofs::format::{BLOCK, DIRENT_BYTES, MAX_NAME_BYTES, readdir_type};
use crate::error::{Error, Result};
use std::borrow::Cow;
use std::cmp::Ordering;

/// The content of a directory.
pub(super) struct Directory<'a> {
    number: u64,
    content: Cow<'a, [u8]>,
}

/// One block of it.
struct Block<'b> {
    number: u64,
    bytes: &'b [u8],
    entries: usize,
}

struct Entry<'b> {
    name: &'b [u8],
    number: u64,
    file_type: u8,
}

impl<'a> Reader<'a> {
    pub(super) fn directory(&self, number: u64) -> Result<Directory<'a>> {
        self.raw_inode(number)?.directory()
    }
}

impl<'a> RawInode<'_, 'a> {
    pub(super) fn directory(&self) -> Result<Directory<'a>> {
        if !self.is_directory() {
            return Err(Error::invalid(format!("EROFS inode {} is no directory", self.number)));
        }
        Ok(Directory { number: self.number, content: self.image_content()? })
    }
}

impl Directory<'_> {
    fn blocks(&self) -> usize {
        self.content.len().div_ceil(BLOCK)
    }

    fn block(&self, index: usize) -> Result<Block<'_>> {
        let start = index * BLOCK;
        let end = self.content.len().min(start + BLOCK);
        let bytes = self.content.get(start..end).unwrap_or_default();
        let first_name = usize::from(u16_at(bytes, 8));
        let entries = first_name / DIRENT_BYTES;
        if bytes.len() < DIRENT_BYTES
            || entries == 0
            || !first_name.is_multiple_of(DIRENT_BYTES)
            || first_name > bytes.len()
        {
            return Err(Error::corrupt(format!(
                "EROFS directory {}: names of block {index} start at {first_name}",
                self.number
            )));
        }
        Ok(Block { number: self.number, bytes, entries })
    }

    /// Binary search, first for the block and then in it.
    pub(super) fn find(&self, name: &[u8]) -> Result<Option<u64>> {
        let (mut low, mut high) = (0, self.blocks());
        while low < high {
            let middle = low + (high - low) / 2;
            let block = self.block(middle)?;
            match block.entry(0)?.name.cmp(name) {
                Ordering::Equal => return Ok(Some(block.entry(0)?.number)),
                Ordering::Less => low = middle + 1,
                Ordering::Greater => high = middle,
            }
        }
        // `low` counts the blocks that begin before the name; the last of them is the one.
        if low == 0 { Ok(None) } else { self.block(low - 1)?.find(name) }
    }

    /// All entries but `.` and `..`; their order is checked.
    pub(super) fn entries(&self) -> Result<Vec<DirEntry>> {
        let mut entries: Vec<DirEntry> = Vec::new();
        let mut before: Vec<u8> = Vec::new();
        for index in 0..self.blocks() {
            let block = self.block(index)?;
            for position in 0..block.entries {
                let entry = block.entry(position)?;
                if entry.name <= before.as_slice() {
                    return Err(Error::corrupt(format!(
                        "EROFS directory {}: names are not in order",
                        self.number
                    )));
                }
                before.clear();
                before.extend_from_slice(entry.name);
                if !matches!(entry.name, b"." | b"..") {
                    entries.push(DirEntry {
                        name: entry.name.to_vec(),
                        number: entry.number,
                        file_type: readdir_type(entry.file_type),
                    });
                }
            }
        }
        Ok(entries)
    }
}

impl<'b> Block<'b> {
    fn entry(&self, position: usize) -> Result<Entry<'b>> {
        let at = position * DIRENT_BYTES;
        let start = usize::from(u16_at(self.bytes, at + 8));
        let last = position + 1 == self.entries;
        let end = if last {
            self.bytes.len()
        } else {
            usize::from(u16_at(self.bytes, at + DIRENT_BYTES + 8))
        };
        let mut name = self.bytes.get(start..end).unwrap_or_default();
        if last {
            // The last name ends with its block or with the first zero byte.
            let length = name.iter().position(|byte| *byte == 0).unwrap_or(name.len());
            name = &name[..length];
        }
        let fits = (1..=MAX_NAME_BYTES).contains(&name.len());
        if !fits || name.iter().any(|byte| matches!(byte, 0 | b'/')) {
            return Err(Error::corrupt(format!(
                "EROFS directory {}: a name from {start} to {end}",
                self.number
            )));
        }
        Ok(Entry { name, number: u64_at(self.bytes, at), file_type: self.bytes[at + 10] })
    }

    fn find(&self, name: &[u8]) -> Result<Option<u64>> {
        let (mut low, mut high) = (0, self.entries);
        while low < high {
            let middle = low + (high - low) / 2;
            let entry = self.entry(middle)?;
            match entry.name.cmp(name) {
                Ordering::Equal => return Ok(Some(entry.number)),
                Ordering::Less => low = middle + 1,
                Ordering::Greater => high = middle,
            }
        }
        Ok(None)
    }
}
