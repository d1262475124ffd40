//! The extended attributes of one inode, shared and inline, sorted by name.

use super::inode::RawInode;
use super::{u16_at, u32_at};
use crate::erofs::format::{
    BLOCK, XATTR_ENTRY_BYTES, XATTR_HEADER_BYTES, xattr_entry_bytes, xattr_prefix,
};
use crate::error::Result;
use crate::tree::Xattr;

impl RawInode<'_, '_> {
    pub(super) fn xattrs(&self) -> Result<Vec<Xattr>> {
        let body = self.xattr_body()?;
        if body.is_empty() {
            return Ok(Vec::new());
        }
        let shared = usize::from(body[4]);
        let Some(ids) = body.get(XATTR_HEADER_BYTES..XATTR_HEADER_BYTES + 4 * shared) else {
            return Err(self.corrupt(format!("{shared} shared xattrs do not fit")));
        };
        let mut xattrs = Vec::with_capacity(shared);
        for id in ids.chunks_exact(4) {
            let area = u64::from(self.reader.superblock.xattr_block) * BLOCK as u64;
            let at = area + u64::from(u32_at(id, 0)) * XATTR_ENTRY_BYTES as u64;
            let head = self.reader.bytes(at, XATTR_ENTRY_BYTES as u64)?;
            let length = usize::from(head[0]) + usize::from(u16_at(head, 2));
            let entry = self.reader.bytes(at, (XATTR_ENTRY_BYTES + length) as u64)?;
            xattrs.push(self.xattr(entry)?);
        }
        let mut rest = &body[XATTR_HEADER_BYTES + 4 * shared..];
        while !rest.is_empty() {
            if rest.len() < XATTR_ENTRY_BYTES {
                return Err(self.corrupt("an xattr is cut"));
            }
            let (name, value) = (usize::from(rest[0]), usize::from(u16_at(rest, 2)));
            let Some(entry) = rest.get(..xattr_entry_bytes(name, value)) else {
                return Err(self.corrupt("an xattr ends behind its inode's"));
            };
            xattrs.push(self.xattr(&entry[..XATTR_ENTRY_BYTES + name + value])?);
            rest = &rest[entry.len()..];
        }
        xattrs.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(xattrs)
    }

    /// One entry, without padding; its length was checked.
    fn xattr(&self, entry: &[u8]) -> Result<Xattr> {
        let Some(prefix) = xattr_prefix(entry[1]) else {
            return Err(self.corrupt(format!("xattr namespace {}", entry[1])));
        };
        let (name, value) = entry[XATTR_ENTRY_BYTES..].split_at(usize::from(entry[0]));
        Ok(Xattr { name: [prefix, name].concat(), value: value.to_vec() })
    }
}
