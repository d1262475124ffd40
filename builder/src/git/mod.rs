//! Refreshes the indexes of git repositories to what the mounted layer will show.
//!
//! Git takes a file for unchanged when `stat` shows what its index keeps; else it reads the file. In a
//! layer the inode numbers and change times are others than where the source lay, so the first
//! `git status` would read, and load, the whole work tree. A layer's numbers and times are fixed, so the
//! builder writes them into the index.
//!
//! INVARIANT: git never takes a changed file for unchanged. Only an entry whose file has the very content
//! that the index names, by the digest of the bytes that this build stores, gets what the file will
//! show. An entry that `stat` could match by chance although its content is another is marked as git
//! itself marks such entries. So what a build does depends on the tree alone, not on where it lay.
//!
//! The steps stand between those of a build: [`Refresh::find`] before the contents are read, what they
//! are called by git while they are read ([`Refresh::wishes`]), [`Refresh::judge`] after it,
//! [`Refresh::date`] before the inodes have their numbers, [`Refresh::write`] after that.

pub(crate) mod blob;
mod index_file;
mod repositories;

use crate::content::Content;
use crate::digest::{Facts, Identity};
use crate::index::{Index, NodeIx, NodeKind};
use crate::path;
use crate::progress::Progress;
use blob::Algorithm;
use index_file::{Entry, IndexFile, Shown, Tracked, cut_size};
use layer::Result;
use layer::tree::{Inode, InodeIx, Kind, Timestamp, Tree};
use repositories::Repository;
use std::collections::HashMap;

/// Indexes are held in memory while their layer is built: at most so many bytes of them. 64 MiB know
/// half a million files.
const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Longer files are not compared, as no 32 bits hold their length.
const MAX_TRACKED_BYTES: u64 = u32::MAX as u64;

/// What was refreshed in a layer.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GitRefresh {
    /// Indexes that were understood.
    pub indexes: u64,
    /// Files and symbolic links that they know.
    pub entries: u64,
    /// Of these, those that git will find unchanged without reading them.
    pub refreshed: u64,
}

/// What git calls the contents that were asked for, by the number of the file.
pub(crate) type Blobs = HashMap<usize, Vec<u8>>;

/// The refresh of one layer's indexes.
#[derive(Debug, Default)]
pub(crate) struct Refresh {
    indexes: Vec<KnownIndex>,
    wishes: HashMap<usize, Algorithm>,
}

#[derive(Debug)]
struct KnownIndex {
    path: Vec<u8>,
    node: NodeIx,
    /// Its number among the regular files.
    file: usize,
    index: IndexFile,
    /// What each entry stands for in the tree.
    found: Vec<Option<NodeIx>>,
    verdicts: Vec<Verdict>,
}

/// What becomes of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Verdict {
    /// Its file has the content that it names.
    Same,
    /// It has not, and `stat` might say otherwise.
    Distrust,
    /// It stays as it is: git will read the file, or does not care for it.
    Leave,
}

impl Refresh {
    /// Finds and reads the indexes. `nodes` are the regular files in path order.
    pub(crate) fn find(index: &Index, nodes: &[NodeIx], progress: &dyn Progress) -> Result<Self> {
        let mut refresh = Self::default();
        let repositories = repositories::find(index)?;
        if repositories.is_empty() {
            return Ok(refresh);
        }
        let numbers: HashMap<NodeIx, usize> =
            nodes.iter().enumerate().map(|(number, ix)| (*ix, number)).collect();
        let mut room = MAX_INDEX_BYTES;
        for repository in repositories {
            let NodeKind::Regular(content) = &index.node(repository.index_file).kind else {
                continue;
            };
            let leave = |why: &str| {
                progress.notice(&format!(
                    "{}: {why}; it is left as it is, and the first `git status` will read the work tree",
                    path::show(&repository.path)
                ));
            };
            let Some(left) = room.checked_sub(content.size) else {
                leave("the indexes of this layer are too large to be refreshed");
                continue;
            };
            let Some(bytes) = repositories::read(content, &index.origins)? else { continue };
            let Some(parsed) = IndexFile::parse(bytes) else {
                leave("a git index of an unknown form");
                continue;
            };
            let Some(file) = numbers.get(&repository.index_file).copied() else { continue };
            room = left;
            let found = look_up(index, repository.work_tree, &parsed.entries);
            refresh.wish(index, &numbers, &parsed, &found);
            let verdicts = Vec::new();
            let Repository { path, index_file: node, .. } = repository;
            refresh.indexes.push(KnownIndex { path, node, file, index: parsed, found, verdicts });
        }
        Ok(refresh)
    }

    fn wish(
        &mut self,
        index: &Index,
        numbers: &HashMap<NodeIx, usize>,
        parsed: &IndexFile,
        found: &[Option<NodeIx>],
    ) {
        for (entry, ix) in parsed.entries.iter().zip(found) {
            let Some(ix) = ix else { continue };
            let NodeKind::Regular(content) = &index.node(*ix).kind else { continue };
            let known = content.size <= MAX_TRACKED_BYTES
                && entry.tracked == Tracked::File
                && (entry.size == 0 || entry.size == cut_size(content.size));
            if known && let Some(number) = numbers.get(ix) {
                self.wishes.entry(*number).or_insert(parsed.algorithm);
            }
        }
    }

    /// Files of which it has to be known what git calls their content.
    pub(crate) fn wishes(&self) -> &HashMap<usize, Algorithm> {
        &self.wishes
    }

    /// Decides about every entry.
    pub(crate) fn judge(&mut self, index: &Index, nodes: &[NodeIx], blobs: &Blobs) {
        let blobs: HashMap<NodeIx, &[u8]> =
            blobs.iter().map(|(number, blob)| (nodes[*number], &blob[..])).collect();
        for known in &mut self.indexes {
            let algorithm = known.index.algorithm;
            let judged = known.index.entries.iter().zip(&known.found).map(|(entry, ix)| {
                let Some(ix) = *ix else { return Verdict::Leave };
                verdict(index, ix, entry, algorithm, blobs.get(&ix).copied())
            });
            known.verdicts = judged.collect();
        }
        self.indexes.retain(|known| known.verdicts.contains(&Verdict::Same));
    }

    /// Makes the indexes' contents differ from all others, as they will: equal ones must not share a
    /// place, and none lies in the metadata. Where bundles end still depends on the tree alone.
    pub(crate) fn set_apart(&self, facts: &mut [Facts]) {
        for known in &self.indexes {
            let mut hasher =
                blake3::Hasher::new_derive_key("lamella git index of one work tree v1");
            match &facts[known.file] {
                Facts::Inline(bytes) => hasher.update(bytes),
                Facts::Digested(identity) => hasher.update(&identity.digest),
                Facts::Referenced => continue,
            };
            hasher.update(&known.path);
            let digest = *hasher.finalize().as_bytes();
            facts[known.file] = Facts::Digested(Identity { digest, zeros: Vec::new() });
        }
    }

    /// Makes every index younger than the files that it knows, as if git had written it now: git reads
    /// what may have changed after its index was written.
    pub(crate) fn date(&self, tree: &mut Tree, numbers: &[Option<InodeIx>]) {
        for known in &self.indexes {
            let same = known.same().filter_map(|(_, ix)| tree.get(numbers[ix.0 as usize]?));
            let Some(newest) = same.map(|inode| inode.mtime.secs).max() else { continue };
            let Some(index_file) = numbers[known.node.0 as usize] else { continue };
            let mtime = &mut tree.inodes[index_file.index()].mtime;
            if mtime.secs <= newest {
                *mtime = Timestamp { secs: newest + 1, nanos: 0 };
            }
        }
    }

    /// The new contents of the indexes, by the number of the file.
    pub(crate) fn write(
        self,
        tree: &Tree,
        numbers: &[Option<InodeIx>],
        inode_numbers: &[u64],
    ) -> (Vec<(usize, Content)>, GitRefresh) {
        let mut done = GitRefresh::default();
        let mut contents = Vec::with_capacity(self.indexes.len());
        for known in self.indexes {
            done.indexes += 1;
            let KnownIndex { file, mut index, found, verdicts, .. } = known;
            for (entry, (ix, verdict)) in found.into_iter().zip(verdicts).enumerate() {
                done.entries += u64::from(index.entries[entry].tracked != Tracked::Other);
                let inode = ix.and_then(|ix| numbers[ix.0 as usize]);
                match (verdict, inode.and_then(|number| Some((number, tree.get(number)?)))) {
                    (Verdict::Same, Some((number, inode))) => {
                        index.refresh(entry, &shown(inode, inode_numbers[number.index()]));
                        done.refreshed += 1;
                    }
                    (Verdict::Distrust, _) => index.distrust(entry),
                    _ => {}
                }
            }
            contents.push((file, Content::bytes(index.into_bytes())));
        }
        (contents, done)
    }
}

impl KnownIndex {
    /// Entries that get what their file shows, with the file.
    fn same(&self) -> impl Iterator<Item = (&Entry, NodeIx)> {
        let judged = self.index.entries.iter().zip(&self.found).zip(&self.verdicts);
        judged.filter_map(|((entry, ix), verdict)| match verdict {
            Verdict::Same => Some((entry, (*ix)?)),
            _ => None,
        })
    }
}

/// What stands in the tree for each entry. Nothing is reached through a symbolic link, as in git.
fn look_up(index: &Index, work_tree: NodeIx, entries: &[Entry]) -> Vec<Option<NodeIx>> {
    let one = |entry: &Entry| {
        let mut names = entry.path.split(|byte| *byte == b'/');
        names.try_fold(work_tree, |at, name| index.child(at, name))
    };
    entries.iter().map(one).collect()
}

fn verdict(
    index: &Index,
    ix: NodeIx,
    entry: &Entry,
    algorithm: Algorithm,
    blob: Option<&[u8]>,
) -> Verdict {
    let node = index.node(ix);
    let (size, same) = match (&node.kind, entry.tracked) {
        (NodeKind::Regular(content), Tracked::File) => {
            (content.size, blob.is_some_and(|blob| blob == entry.object))
        }
        (NodeKind::Symlink(target), Tracked::Symlink) => {
            (target.len() as u64, algorithm.blob(target) == entry.object)
        }
        _ => return Verdict::Leave,
    };
    // Git keeps 32 bits of a time, and compares with those which file is younger.
    let ordinary = (0..i64::from(u32::MAX)).contains(&node.mtime.secs);
    let could_match = entry.size == cut_size(size) && entry.mtime_secs == node.mtime.secs as u32;
    match (same && ordinary, could_match) {
        (true, _) => Verdict::Same,
        (false, true) => Verdict::Distrust,
        (false, false) => Verdict::Leave,
    }
}

fn shown(inode: &Inode, number: u64) -> Shown {
    let size = match &inode.kind {
        Kind::Regular(data) => data.size,
        Kind::Symlink(target) => target.len() as u64,
        _ => 0,
    };
    Shown { mtime: inode.mtime, inode: number, uid: inode.uid, gid: inode.gid, size }
}
