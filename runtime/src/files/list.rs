//! What is in a directory, and below it: streamed, so that a million names take no memory.

use super::{Answers, entry, is_kernel_file, open, refuse_kernel_files, send, stream};
use crate::ids::Ids;
use crate::sandbox::Sandbox;
use layer::{Context, Error, Result};
use proto::v1::{FileEntry, ListFilesRequest, ListFilesResponse};
use std::io;
use std::ops::ControlFlow;
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use sys::file::{FileKind, Folder, OFlags};
use tokio::sync::mpsc;

/// Entries in one message.
const BATCH: usize = 256;
/// Entries of a listing that asks for no bound.
const MAX_ENTRIES: u64 = 1_000_000;
/// Directories below each other; each costs a descriptor while it is listed.
const MAX_DEPTH: u32 = 128;

/// Lists a directory.
pub async fn list(
    sandbox: &Arc<Sandbox>,
    request: ListFilesRequest,
) -> Result<mpsc::Receiver<Result<ListFilesResponse>>> {
    let what = format!("list {:?} in the sandbox", request.path);
    stream(sandbox, what, move |root, ids, answers| list_blocking(root, ids, &request, answers))
        .await
}

fn list_blocking(
    root: BorrowedFd<'_>,
    ids: Ids,
    request: &ListFilesRequest,
    answers: &Answers<ListFilesResponse>,
) -> Result<()> {
    let folder = open(root, Path::new(&request.path), OFlags::RDONLY | OFlags::DIRECTORY)?;
    refuse_kernel_files(folder.as_fd())?;
    let folder = Folder::from_fd(folder).context(|| "open".into())?;
    let left = if request.max_entries == 0 { MAX_ENTRIES } else { request.max_entries };
    let mut listing =
        Listing { answers, ids, batch: Vec::new(), left, truncated: false, failure: None };
    let walked = listing.walk(&folder, &mut Vec::new(), request.depth.max(1));
    match (listing.failure.take(), walked) {
        (Some(failure), _) => return Err(failure),
        (None, walked) => walked.map(drop).context(|| "list".into())?,
    }
    let truncated = listing.truncated;
    send(answers, ListFilesResponse { entries: listing.batch, truncated })
}

struct Listing<'a> {
    answers: &'a Answers<ListFilesResponse>,
    ids: Ids,
    batch: Vec<FileEntry>,
    left: u64,
    truncated: bool,
    /// Why the walk was ended.
    failure: Option<Error>,
}

impl Listing<'_> {
    fn walk(
        &mut self,
        folder: &Folder,
        path: &mut Vec<u8>,
        depth: u32,
    ) -> io::Result<ControlFlow<()>> {
        let mut flow = ControlFlow::Continue(());
        folder.visit_until(&mut |found| {
            let length = path.len();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend(&found.name);
            let visited = self.visit(folder, &found.name, path, depth);
            path.truncate(length);
            flow = visited?;
            Ok(flow)
        })?;
        Ok(flow)
    }

    fn visit(
        &mut self,
        folder: &Folder,
        name: &[u8],
        path: &mut Vec<u8>,
        depth: u32,
    ) -> io::Result<ControlFlow<()>> {
        if self.left == 0 {
            self.truncated = true;
            return Ok(ControlFlow::Break(()));
        }
        let stat = match folder.stat(name) {
            // It went meanwhile.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                return Ok(ControlFlow::Continue(()));
            }
            stat => stat?,
        };
        let target = match stat.kind {
            FileKind::Symlink => folder.read_link(name).unwrap_or_default(),
            _ => Vec::new(),
        };
        self.left -= 1;
        self.batch.push(entry(path.clone(), &stat, target, self.ids));
        if self.batch.len() == BATCH {
            let entries = std::mem::take(&mut self.batch);
            if let Err(error) = send(self.answers, ListFilesResponse { entries, truncated: false })
            {
                self.failure = Some(error);
                return Ok(ControlFlow::Break(()));
            }
        }
        if stat.kind != FileKind::Directory || depth <= 1 {
            return Ok(ControlFlow::Continue(()));
        }
        if path.iter().filter(|byte| **byte == b'/').count() as u32 >= MAX_DEPTH {
            self.truncated = true;
            return Ok(ControlFlow::Continue(()));
        }
        match folder.open_folder(name) {
            Ok(below) if is_kernel_file(below.as_fd()).unwrap_or(true) => {
                Ok(ControlFlow::Continue(()))
            }
            Ok(below) => self.walk(&below, path, depth - 1),
            // It is something else by now.
            Err(_) => Ok(ControlFlow::Continue(())),
        }
    }
}
