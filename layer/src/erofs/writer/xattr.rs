//! Extended attributes: what is stored once and shared, and what stands behind its inode.

use crate::erofs::format::{
    MAX_SHARED_XATTRS, MAX_XATTR_BODY_BYTES, MAX_XATTR_NAME_BYTES, MAX_XATTR_VALUE_BYTES,
    XATTR_ENTRY_BYTES, XATTR_HEADER_BYTES, split_xattr_name, xattr_entry_bytes,
};
use crate::tree::{Xattr, display_path};
use std::collections::HashMap;

/// An xattr as the image holds it: the index of the name's prefix, the rest of the name, the value.
type Entry<'t> = (u8, &'t [u8], &'t [u8]);

fn bytes_of(entry: &Entry<'_>) -> usize {
    xattr_entry_bytes(entry.1.len(), entry.2.len())
}

#[derive(Debug, Default)]
struct Use {
    count: u64,
    /// In 4-byte units from the start of the shared area.
    shared_at: Option<u32>,
}

/// Which xattrs of a tree are shared.
#[derive(Debug, Default)]
pub(super) struct SharedXattrs<'t> {
    uses: HashMap<Entry<'t>, Use>,
    /// In the order of the area.
    area: Vec<Entry<'t>>,
    area_bytes: u64,
}

/// The entries of one inode in the order of the image: those that may be shared, those that are not.
struct Split<'t> {
    shared: Vec<(Entry<'t>, u32)>,
    inline: Vec<Entry<'t>>,
}

impl Split<'_> {
    fn bytes(&self) -> usize {
        let inline: usize = self.inline.iter().map(bytes_of).sum();
        match self.shared.len() + inline {
            0 => 0,
            _ => XATTR_HEADER_BYTES + 4 * self.shared.len() + inline,
        }
    }
}

/// Checks the xattrs of one inode and brings them into the order of the image.
fn entries(xattrs: &[Xattr]) -> Result<Vec<Entry<'_>>, String> {
    let mut sorted: Vec<&Xattr> = xattrs.iter().collect();
    sorted.sort_by(|a, b| a.name.cmp(&b.name));
    let mut entries: Vec<Entry<'_>> = Vec::with_capacity(sorted.len());
    for (index, xattr) in sorted.iter().enumerate() {
        let shown = || format!("xattr {:?}", display_path(&xattr.name).trim_start_matches('/'));
        let Some((prefix, rest)) = split_xattr_name(&xattr.name) else {
            return Err(format!("EROFS has no namespace for {}", shown()));
        };
        if rest.len() > MAX_XATTR_NAME_BYTES || rest.contains(&0) {
            return Err(format!("EROFS cannot hold the name of {}", shown()));
        }
        if xattr.value.len() > MAX_XATTR_VALUE_BYTES {
            return Err(format!(
                "{} has {} bytes; EROFS holds at most {MAX_XATTR_VALUE_BYTES}",
                shown(),
                xattr.value.len()
            ));
        }
        if index > 0 && sorted[index - 1].name == xattr.name {
            return Err(format!("{} is there twice", shown()));
        }
        entries.push((prefix, rest, &xattr.value));
    }
    Ok(entries)
}

impl<'t> SharedXattrs<'t> {
    /// Counts the xattrs of one inode; the error says which cannot be held.
    pub(super) fn count(&mut self, xattrs: &'t [Xattr]) -> Result<(), String> {
        for entry in entries(xattrs)? {
            self.uses.entry(entry).or_default().count += 1;
        }
        Ok(())
    }

    /// Decides for the xattrs of one inode, when all are counted: shared are those that save bytes,
    /// and the largest of what would not fit behind an inode. Inodes come in the order of the image.
    pub(super) fn decide(&mut self, xattrs: &'t [Xattr]) -> Result<(), String> {
        let entries = entries(xattrs)?;
        for entry in entries {
            let bytes = bytes_of(&entry) as u64;
            let count = self.uses.get(&entry).map_or(0, |r#use| r#use.count);
            if count > 1 && bytes * count > bytes + 4 * count {
                self.share(entry)?;
            }
        }
        let split = self.split(xattrs)?;
        let (mut bytes, mut shared) = (split.bytes(), split.shared.len());
        let mut largest = split.inline;
        largest.sort_by_key(|entry| std::cmp::Reverse(bytes_of(entry)));
        for entry in largest {
            if bytes <= MAX_XATTR_BODY_BYTES || shared == MAX_SHARED_XATTRS {
                break;
            }
            bytes -= bytes_of(&entry) - XATTR_ENTRY_BYTES;
            shared += 1;
            self.share(entry)?;
        }
        if bytes > MAX_XATTR_BODY_BYTES { Err(overflow(bytes)) } else { Ok(()) }
    }

    fn share(&mut self, entry: Entry<'t>) -> Result<(), String> {
        let Some(r#use) = self.uses.get_mut(&entry) else { return Ok(()) };
        if r#use.shared_at.is_none() {
            let at = u32::try_from(self.area_bytes / XATTR_ENTRY_BYTES as u64)
                .map_err(|_| "the shared xattrs of the tree take more than 16 GiB")?;
            r#use.shared_at = Some(at);
            self.area_bytes += bytes_of(&entry) as u64;
            self.area.push(entry);
        }
        Ok(())
    }

    fn split(&self, xattrs: &'t [Xattr]) -> Result<Split<'t>, String> {
        let mut split = Split { shared: Vec::new(), inline: Vec::new() };
        for entry in entries(xattrs)? {
            match self.uses.get(&entry).and_then(|r#use| r#use.shared_at) {
                Some(at) if split.shared.len() < MAX_SHARED_XATTRS => {
                    split.shared.push((entry, at));
                }
                _ => split.inline.push(entry),
            }
        }
        Ok(split)
    }

    /// Bytes behind an inode, when everything is decided; 0 for none.
    pub(super) fn body_bytes(&self, xattrs: &'t [Xattr]) -> Result<u32, String> {
        if xattrs.is_empty() {
            return Ok(0);
        }
        // Another inode's overflow may have shared something after this one was decided.
        let bytes = self.split(xattrs)?.bytes();
        if bytes > MAX_XATTR_BODY_BYTES { Err(overflow(bytes)) } else { Ok(bytes as u32) }
    }

    /// Bytes of the shared area.
    pub(super) fn area_bytes(&self) -> u64 {
        self.area_bytes
    }

    /// What stands behind an inode. `area_at` is where the shared area starts, in 4-byte units from
    /// the block that the superblock names.
    pub(super) fn body(&self, xattrs: &'t [Xattr], area_at: u32) -> Result<Vec<u8>, String> {
        let split = self.split(xattrs)?;
        let mut bytes = Vec::with_capacity(split.bytes());
        bytes.extend_from_slice(&[0; XATTR_HEADER_BYTES]);
        // INVARIANT: `split` shares at most 255.
        bytes[4] = split.shared.len() as u8;
        for (_, at) in &split.shared {
            let id = area_at
                .checked_add(*at)
                .ok_or("the shared xattrs of the tree take more than 16 GiB")?;
            bytes.extend_from_slice(&id.to_le_bytes());
        }
        for entry in &split.inline {
            put_entry(&mut bytes, entry);
        }
        Ok(bytes)
    }

    /// The shared area.
    pub(super) fn area(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.area_bytes as usize);
        for entry in &self.area {
            put_entry(&mut bytes, entry);
        }
        bytes
    }
}

fn overflow(bytes: usize) -> String {
    format!("its xattrs take {bytes} bytes; EROFS holds {MAX_XATTR_BODY_BYTES}")
}

fn put_entry(bytes: &mut Vec<u8>, (prefix, name, value): &Entry<'_>) {
    // INVARIANT: `entries` checked both lengths.
    bytes.extend_from_slice(&[name.len() as u8, *prefix]);
    bytes.extend_from_slice(&(value.len() as u16).to_le_bytes());
    bytes.extend_from_slice(name);
    bytes.extend_from_slice(value);
    bytes.resize(bytes.len().next_multiple_of(XATTR_ENTRY_BYTES), 0);
}
