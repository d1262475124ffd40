//! A file, or a part of it, or a directory as a tar.

use super::archive::send_folder;
use super::{PART_BYTES, Part, Parts, open, refuse_kernel_files, reopen, send, stream};
use crate::ids::Ids;
use crate::sandbox::Sandbox;
use layer::{Context, Error, Result};
use proto::v1;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::os::fd::{AsFd, BorrowedFd};
use std::path::Path;
use std::sync::Arc;
use sys::file::{FileKind, Folder, OFlags};
use tokio::sync::mpsc;

/// Reads a file, or a directory as a tar. The first answer is its header.
pub async fn read(
    sandbox: &Arc<Sandbox>,
    request: v1::ReadFileRequest,
) -> Result<mpsc::Receiver<Result<v1::FileChunk>>> {
    let what = format!("read {:?} in the sandbox", request.path);
    stream(sandbox, what, move |root, ids, parts| read_blocking(root, ids, &request, parts)).await
}

fn read_blocking(
    root: BorrowedFd<'_>,
    ids: Ids,
    request: &v1::ReadFileRequest,
    parts: &Parts,
) -> Result<()> {
    let place = open(root, Path::new(&request.path), OFlags::PATH)?;
    refuse_kernel_files(place.as_fd())?;
    let stat = sys::file::stat_fd(place.as_fd()).context(|| "look".into())?;
    let header = v1::FileHeader {
        is_directory: stat.kind == FileKind::Directory,
        mode: stat.mode,
        size_bytes: stat.size,
        mtime_unix_s: stat.mtime.secs,
    };
    let header = v1::FileChunk { part: Some(Part::Header(header)) };
    match stat.kind {
        FileKind::Regular => {
            let mut file = File::from(reopen(&place, OFlags::RDONLY)?);
            if request.offset > 0 {
                let from = io::SeekFrom::Start(request.offset);
                file.seek(from).context(|| format!("go to byte {}", request.offset))?;
            }
            send(parts, header)?;
            let length = if request.length == 0 { u64::MAX } else { request.length };
            copy_out(file.take(length), parts)
        }
        FileKind::Directory if request.offset == 0 && request.length == 0 => {
            let folder = reopen(&place, OFlags::RDONLY | OFlags::DIRECTORY)?;
            let folder = Folder::from_fd(folder).context(|| "open".into())?;
            send(parts, header)?;
            send_folder(&folder, ids, parts)
        }
        FileKind::Directory => Err(Error::invalid("a directory has no part of its bytes")),
        _ => Err(Error::invalid("neither a regular file nor a directory")),
    }
}

fn copy_out(mut file: impl Read, parts: &Parts) -> Result<()> {
    loop {
        let mut buffer = vec![0; PART_BYTES];
        let count = match file.read(&mut buffer) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            count => count.context(|| "read".into())?,
        };
        if count == 0 {
            return Ok(());
        }
        buffer.truncate(count);
        send(parts, v1::FileChunk { part: Some(Part::Data(buffer)) })?;
    }
}
