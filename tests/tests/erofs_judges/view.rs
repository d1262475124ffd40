//! What anybody can see of a tree, taken from any file system: the one comparison of all judges.

use anyhow::{Context, Result};
use rustix::fs::SeekFrom;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::File;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

/// All that is told of one path.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Facts {
    pub mode: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u64,
    /// 0 for directories, whose size is each file system's own affair.
    pub size: u64,
    pub links: u64,
    pub mtime: (i64, i64),
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub target: Vec<u8>,
    /// Digest of all blocks that are not zero, with their places.
    pub content: Option<layer::Digest>,
    /// The first path of the same inode.
    pub same_as: Vec<u8>,
}

pub type View = BTreeMap<Vec<u8>, Facts>;

/// Looks at everything below a folder, the folder itself included (its path is empty).
pub fn look(root: &Path) -> Result<View> {
    let mut found = BTreeMap::new();
    let mut first = BTreeMap::new();
    let mut pending = vec![(Vec::new(), root.to_owned())];
    while let Some((name, path)) = pending.pop() {
        let facts = facts(&path).with_context(|| format!("look at {path:?}"))?;
        if facts.mode & 0o170_000 == 0o040_000 {
            for entry in std::fs::read_dir(&path).with_context(|| format!("list {path:?}"))? {
                let entry = entry?;
                let below = [&name[..], b"/", entry.file_name().as_bytes()].concat();
                check_type(&entry)?;
                pending.push((below, entry.path()));
            }
        }
        let number = path.symlink_metadata()?.ino();
        let least = first.entry(number).or_insert_with(|| name.clone());
        if name < *least {
            least.clone_from(&name);
        }
        found.insert(name, (facts, number));
    }
    Ok(view_of(found, &first))
}

fn view_of(found: BTreeMap<Vec<u8>, (Facts, u64)>, first: &BTreeMap<u64, Vec<u8>>) -> View {
    found
        .into_iter()
        .map(|(name, (mut facts, number))| {
            facts.same_as.clone_from(&first[&number]);
            (name, facts)
        })
        .collect()
}

/// The kind that the directory tells is the kind that the inode has.
fn check_type(entry: &std::fs::DirEntry) -> Result<()> {
    let told = entry.file_type()?;
    let real = entry.path().symlink_metadata()?.file_type();
    anyhow::ensure!(told == real, "{:?}: {told:?} in its directory, {real:?}", entry.path());
    Ok(())
}

fn facts(path: &Path) -> Result<Facts> {
    let meta = path.symlink_metadata()?;
    let kind = meta.file_type();
    let target = match kind.is_symlink() {
        true => std::fs::read_link(path)?.into_os_string().into_vec(),
        false => Vec::new(),
    };
    Ok(Facts {
        mode: meta.mode(),
        uid: meta.uid(),
        gid: meta.gid(),
        rdev: meta.rdev(),
        size: if kind.is_dir() { 0 } else { meta.size() },
        links: meta.nlink(),
        mtime: (meta.mtime(), meta.mtime_nsec()),
        xattrs: xattrs(path)?,
        target,
        content: if kind.is_file() { Some(content(path, meta.size())?) } else { None },
        same_as: Vec::new(),
    })
}

pub fn xattrs(path: &Path) -> Result<BTreeMap<Vec<u8>, Vec<u8>>> {
    let mut names = vec![0; 1 << 16];
    let length = rustix::fs::llistxattr(path, &mut names[..])?;
    let mut value = vec![0; 1 << 16];
    names[..length]
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
        .map(|name| {
            let length = rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value[..])
                .with_context(|| format!("get xattr {:?}", OsStr::from_bytes(name)))?;
            Ok((name.to_vec(), value[..length].to_vec()))
        })
        .collect()
}

/// The runs of a file that are no holes, as its file system tells.
pub fn data_runs(file: &File, size: u64) -> Result<Vec<(u64, u64)>> {
    let mut runs = Vec::new();
    let mut at = 0;
    while at < size {
        let start = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(start) => start,
            Err(rustix::io::Errno::NXIO) => break,
            Err(error) => return Err(error.into()),
        };
        at = rustix::fs::seek(file, SeekFrom::Hole(start))?;
        runs.push((start, at));
    }
    Ok(runs)
}

fn content(path: &Path, size: u64) -> Result<layer::Digest> {
    let file = File::open(path)?;
    let mut blocks = BTreeMap::new();
    let mut buffer = vec![0; 1 << 16];
    for (start, end) in data_runs(&file, size)? {
        // Blocks as in the file, wherever its file system lets data begin.
        let mut at = start / 4096 * 4096;
        while at < end {
            let wanted = buffer.len().min((size - at) as usize);
            file.read_exact_at(&mut buffer[..wanted], at)
                .with_context(|| format!("read {wanted} bytes at {at}"))?;
            for (block, number) in buffer[..wanted].chunks(4096).zip(at / 4096..) {
                if block.iter().any(|byte| *byte != 0) {
                    blocks.insert(number, layer::Digest::of(block));
                }
            }
            at += wanted as u64;
        }
    }
    let mut told = Vec::with_capacity(blocks.len() * 40);
    for (number, digest) in blocks {
        told.extend_from_slice(&number.to_le_bytes());
        told.extend_from_slice(&digest.0);
    }
    Ok(layer::Digest::of(&told))
}

/// Fails with the first differences, one a line.
pub fn compare(wanted: &View, found: &View) -> Result<()> {
    let mut lines = Vec::new();
    for (path, facts) in wanted {
        match found.get(path) {
            None => lines.push(format!("{:?} is missing", OsStr::from_bytes(path))),
            Some(other) if other != facts => lines.push(format!(
                "{:?}:\n  wanted {facts:?}\n  found  {other:?}",
                OsStr::from_bytes(path)
            )),
            Some(_) => {}
        }
    }
    for path in found.keys().filter(|path| !wanted.contains_key(*path)) {
        lines.push(format!("{:?} is too much", OsStr::from_bytes(path)));
    }
    anyhow::ensure!(lines.is_empty(), "{} differences\n{}", lines.len(), first_lines(&lines));
    Ok(())
}

fn first_lines(lines: &[String]) -> String {
    let shown: Vec<String> =
        lines.iter().take(5).map(|line| line.chars().take(3000).collect()).collect();
    shown.join("\n")
}
