//! Finds the indexes of a tree and the work trees that they are about.
//!
//! A work tree has an entry `.git`: the repository itself, or a file that names it (`gitdir: PATH`), as
//! submodules and further work trees have. Absolute paths are those of the sandbox, so they start at the
//! root of the layer. A wrong guess does no harm: what has another content than an entry says is never
//! taken for it.

use crate::content::{Content, Origin, Place};
use crate::index::{Index, NodeIx, NodeKind};
use crate::path;
use layer::Result;
use std::collections::HashSet;
use std::sync::Arc;

/// A file with the name of a repository is not longer.
const MAX_POINTER_BYTES: u64 = 8192;

/// An index, and where the files are that it knows.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Repository {
    /// How users call the index.
    pub path: Vec<u8>,
    /// The file `index`.
    pub index_file: NodeIx,
    /// The directory that its paths start at.
    pub work_tree: NodeIx,
}

/// All indexes in path order, each with the first work tree that names it.
pub(crate) fn find(index: &Index) -> Result<Vec<Repository>> {
    let mut candidates = Vec::new();
    index.walk(|path, ix| {
        if let Some(git) = index.child(ix, b".git") {
            candidates.push((path.to_vec(), ix, git));
        }
        Ok(())
    })?;
    let (mut found, mut known) = (Vec::new(), HashSet::new());
    for (path, work_tree, git) in candidates {
        let place = match &index.node(git).kind {
            NodeKind::Directory(_) => path::join(&path, b".git"),
            NodeKind::Regular(content) => match pointer(content, &index.origins)? {
                Some(target) if target.starts_with(b"/") => target,
                Some(target) => path::join(&path, &target),
                None => continue,
            },
            _ => continue,
        };
        // A path that goes in circles is no repository.
        let Ok(Some(directory)) = index.find_directory(&place) else { continue };
        let Some(index_file) = index.child(directory, b"index") else { continue };
        let regular = matches!(index.node(index_file).kind, NodeKind::Regular(_));
        if regular && known.insert(index_file) {
            found.push(Repository { path: path::join(&place, b"index"), index_file, work_tree });
        }
    }
    Ok(found)
}

/// The path in a file `.git`.
fn pointer(content: &Content, origins: &[Arc<Origin>]) -> Result<Option<Vec<u8>>> {
    if content.size > MAX_POINTER_BYTES {
        return Ok(None);
    }
    let Some(text) = read(content, origins)? else { return Ok(None) };
    let Some(target) = text.strip_prefix(b"gitdir: ") else { return Ok(None) };
    let end = target.iter().rposition(|byte| !matches!(byte, b'\n' | b'\r')).map_or(0, |at| at + 1);
    Ok(Some(target[..end].to_vec()))
}

/// The bytes of a small file; `None` where they lie in chunks of another layer.
pub(crate) fn read(content: &Content, origins: &[Arc<Origin>]) -> Result<Option<Vec<u8>>> {
    if matches!(content.place, Place::Chunks(_)) {
        return Ok(None);
    }
    let open = content.open(origins)?;
    let mut bytes = vec![0; content.size as usize];
    open.read_at(0, &mut bytes)?;
    open.finish()?;
    Ok(Some(bytes))
}
