//! `cp`: files and directories into and out of a sandbox; directories travel as tar streams.
//!
//! What comes out of a sandbox is hostile: no entry leaves the destination, devices are left out, and
//! set-user-id bits are dropped. Memory is bounded by the channels, whatever the size.

use super::Scene;
use super::exec::lost_sandbox;
use crate::args::Cp;
use crate::errors::{Failure, Outcome, Remedy};
use crate::node::start::{self, Lifetime};
use crate::output::{Output, name};
use layer::{Context, Error, ErrorKind, Result};
use proto::v1::sandboxes_client::SandboxesClient;
use proto::v1::{
    FileChunk, FileHeader, FileKind, ReadFileRequest, StatFileRequest, WriteFilePart,
    WriteFileStart, file_chunk, write_file_part,
};
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tonic::transport::Channel;

/// Bytes in one message.
const PART_BYTES: usize = 256 << 10;
/// Messages that wait.
const PARTS: usize = 4;
/// Mode bits that an entry of a tar keeps away from the host: set-user-id and set-group-id.
const DROPPED_MODE: u32 = 0o6000;

/// One side of a copy.
#[derive(Debug, PartialEq, Eq)]
enum Side {
    Local(PathBuf),
    Sandbox { id: String, path: String },
}

/// `ID:PATH` is in a sandbox; a path with a slash before its first colon is local.
fn side(text: &str) -> Side {
    match text.split_once(':') {
        Some((id, path)) if !id.is_empty() && !id.contains('/') && !id.starts_with('.') => {
            Side::Sandbox { id: id.to_owned(), path: path.to_owned() }
        }
        _ => Side::Local(text.into()),
    }
}

#[derive(Debug, Serialize)]
struct Copied {
    from: String,
    to: String,
    bytes: u64,
}

/// `cp`
pub async fn copy(scene: &Scene, args: &Cp) -> Outcome {
    let sides = (side(&args.from), side(&args.to));
    if !matches!(
        sides,
        (Side::Sandbox { .. }, Side::Local(_)) | (Side::Local(_), Side::Sandbox { .. })
    ) {
        return Err(Failure::Usage(
            "one side of cp is ID:PATH and the other a path (./a:b for a name with a colon)".into(),
        ));
    }
    let node = start::connect(&scene.settings, Lifetime::WhileUsed, scene.out).await?;
    let client = SandboxesClient::new(node.channel.clone());
    let bytes = match sides {
        (Side::Sandbox { id, path }, Side::Local(to)) => {
            download(client, id, path, &to, scene.out).await?
        }
        (Side::Local(from), Side::Sandbox { id, path }) => upload(client, from, id, path).await?,
        _ => 0,
    };
    let copied = Copied { from: args.from.clone(), to: args.to.clone(), bytes };
    if scene.out.is_json() { scene.out.result(&copied, String::new) } else { Ok(()) }
}

/// The last name of a path; `.` for the root.
fn last_name(path: &Path) -> PathBuf {
    path.file_name().map_or_else(|| PathBuf::from("."), PathBuf::from)
}

async fn read_header(
    client: &mut SandboxesClient<Channel>,
    id: &str,
    path: &str,
) -> Outcome<(FileHeader, Streaming<FileChunk>)> {
    let request =
        ReadFileRequest { id: id.to_owned(), path: path.to_owned(), ..ReadFileRequest::default() };
    let mut stream = client.read_file(request).await.remedy(lost_sandbox)?.into_inner();
    match stream.message().await?.and_then(|chunk| chunk.part) {
        Some(file_chunk::Part::Header(header)) => Ok((header, stream)),
        _ => Err(Error::corrupt(format!("{id}:{path} came without a header")).into()),
    }
}

async fn download(
    mut client: SandboxesClient<Channel>,
    id: String,
    path: String,
    to: &Path,
    out: Output,
) -> Outcome<u64> {
    let (header, mut stream) = read_header(&mut client, &id, &path).await?;
    let target = if to.is_dir() { to.join(last_name(Path::new(&path))) } else { to.to_owned() };
    let (sender, receiver) = mpsc::channel::<io::Result<Vec<u8>>>(PARTS);
    let writer = tokio::task::spawn_blocking(move || {
        let source = Incoming { receiver, rest: io::Cursor::new(Vec::new()) };
        if header.is_directory {
            unpack(source, &target, out)
        } else {
            save(source, &target, &header)
        }
    });
    let mut bytes = 0;
    let received = loop {
        match stream.message().await {
            Ok(Some(FileChunk { part: Some(file_chunk::Part::Data(data)) })) => {
                bytes += data.len() as u64;
                // The writer ends early only with an error, which is told below.
                if sender.send(Ok(data.to_vec())).await.is_err() {
                    break Ok(());
                }
            }
            Ok(Some(_)) => {}
            Ok(None) => break Ok(()),
            Err(status) => {
                _ = sender.send(Err(io::ErrorKind::ConnectionAborted.into())).await;
                break Err(proto::status::from_status(status));
            }
        }
    };
    drop(sender);
    let written = writer.await.map_err(died)?;
    received?;
    written?;
    Ok(bytes)
}

fn died(error: tokio::task::JoinError) -> Error {
    Error::new(ErrorKind::Internal, "a copy died").with_source(error)
}

/// The bytes of a stream, for a thread that may block.
struct Incoming {
    receiver: mpsc::Receiver<io::Result<Vec<u8>>>,
    rest: io::Cursor<Vec<u8>>,
}

impl Read for Incoming {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let count = self.rest.read(into)?;
            if count > 0 || into.is_empty() {
                return Ok(count);
            }
            match self.receiver.blocking_recv() {
                Some(chunk) => self.rest = io::Cursor::new(chunk?),
                None => return Ok(0),
            }
        }
    }
}

fn save(mut source: Incoming, target: &Path, header: &FileHeader) -> Result<()> {
    let context = || format!("write {}", target.display());
    let mut file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(header.mode & 0o777)
        .open(target)
        .context(context)?;
    let count = io::copy(&mut source, &mut file).context(context)?;
    if count != header.size_bytes {
        tracing::debug!(count, expected = header.size_bytes, "the file changed while it was read");
    }
    file.flush().context(context)
}

fn unpack(source: Incoming, target: &Path, out: Output) -> Result<()> {
    let context = || format!("unpack into {}", target.display());
    std::fs::create_dir_all(target).context(context)?;
    let mut archive = tar::Archive::new(BufReader::new(source));
    archive.set_mask(DROPPED_MODE);
    archive.set_preserve_permissions(true);
    for entry in archive.entries().context(context)? {
        let mut entry = entry.context(context)?;
        let kind = entry.header().entry_type();
        let path = name(&entry.path_bytes());
        if !(kind.is_file() || kind.is_dir() || kind.is_symlink() || kind.is_hard_link()) {
            out.notice(&format!("left out {path}: no file, directory or link"));
            continue;
        }
        // `unpack_in` refuses names with `..` and follows no symlink out of the target.
        if !entry.unpack_in(target).context(|| format!("unpack {path}"))? {
            out.notice(&format!("left out {path}: it would leave the destination"));
        }
    }
    Ok(())
}

/// Whether a path of a sandbox leads to a directory; one that leads nowhere does not.
async fn is_directory(client: &mut SandboxesClient<Channel>, id: &str, path: &str) -> bool {
    let request = StatFileRequest { id: id.to_owned(), path: path.to_owned(), follow: true };
    let looked = client.stat_file(request).await;
    looked.is_ok_and(|entry| entry.get_ref().kind() == FileKind::Directory)
}

async fn upload(
    mut client: SandboxesClient<Channel>,
    from: PathBuf,
    id: String,
    path: String,
) -> Outcome<u64> {
    let metadata = std::fs::metadata(&from).context(|| format!("read {}", from.display()))?;
    let into_directory = path.ends_with('/') || is_directory(&mut client, &id, &path).await;
    let target = if into_directory {
        let joined = Path::new(&path).join(last_name(&from));
        joined.to_string_lossy().into_owned()
    } else {
        path
    };
    let (sender, receiver) = mpsc::channel(PARTS);
    let start = WriteFileStart {
        id,
        path: target,
        mode: metadata.permissions().mode() & 0o7777,
        uid: 0,
        gid: 0,
        untar: metadata.is_dir(),
        ..WriteFileStart::default()
    };
    let first = WriteFilePart { part: Some(write_file_part::Part::Start(start)) };
    // The receiver lives: a fresh channel takes its first message.
    _ = sender.send(first).await;
    let is_dir = metadata.is_dir();
    let reader = tokio::task::spawn_blocking(move || {
        let into = BufWriter::with_capacity(PART_BYTES, Outgoing { sender });
        if is_dir { pack(&from, into) } else { load(&from, into) }
    });
    let answer = client.write_file(ReceiverStream::new(receiver)).await;
    let sent = reader.await.map_err(died)?;
    let written = answer.remedy(lost_sandbox)?.into_inner();
    sent?;
    Ok(written.bytes)
}

/// Takes bytes on a thread that may block.
struct Outgoing {
    sender: mpsc::Sender<WriteFilePart>,
}

impl Write for Outgoing {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = bytes.len().min(PART_BYTES);
        let part = write_file_part::Part::Data(bytes[..count].to_vec());
        let sent = self.sender.blocking_send(WriteFilePart { part: Some(part) });
        sent.map(|()| count).map_err(|_| io::ErrorKind::BrokenPipe.into())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn load(from: &Path, mut into: BufWriter<Outgoing>) -> Result<()> {
    let context = || format!("send {}", from.display());
    let mut file = File::open(from).context(context)?;
    io::copy(&mut file, &mut into).context(context)?;
    into.flush().context(context)
}

fn pack(from: &Path, into: BufWriter<Outgoing>) -> Result<()> {
    let context = || format!("send {}", from.display());
    let mut archive = tar::Builder::new(into);
    archive.follow_symlinks(false);
    archive.append_dir_all(".", from).context(context)?;
    archive.into_inner().and_then(|mut into| into.flush()).context(context)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_side_with_a_colon_is_a_sandbox_unless_it_looks_like_a_path() {
        let there = |id: &str, path: &str| Side::Sandbox { id: id.into(), path: path.into() };
        assert_eq!(side("abc:/etc/passwd"), there("abc", "/etc/passwd"));
        assert_eq!(side("./a:b"), Side::Local("./a:b".into()));
        assert_eq!(side("/x/a:b"), Side::Local("/x/a:b".into()));
        assert_eq!(side("plain"), Side::Local("plain".into()));
        assert_eq!(side(":x"), Side::Local(":x".into()));
    }

    fn incoming(bytes: Vec<u8>) -> Incoming {
        let (sender, receiver) = mpsc::channel(1);
        std::thread::spawn(move || sender.blocking_send(Ok(bytes)));
        Incoming { receiver, rest: io::Cursor::new(Vec::new()) }
    }

    #[test]
    fn a_hostile_tar_stays_inside_and_makes_no_device() {
        let mut builder = tar::Builder::new(Vec::new());
        let mut add = |path: &str, kind: tar::EntryType, link: &str, mode: u32| {
            let mut header = tar::Header::new_gnu();
            header.as_gnu_mut().unwrap().name[..path.len()].copy_from_slice(path.as_bytes());
            header.set_entry_type(kind);
            header.set_mode(mode);
            header.set_size(0);
            if !link.is_empty() {
                header.set_link_name(link).unwrap();
            }
            header.set_cksum();
            builder.append(&header, io::empty()).unwrap();
        };
        add("../escaped", tar::EntryType::Regular, "", 0o644);
        add("out", tar::EntryType::Symlink, "/tmp", 0o777);
        add("dev", tar::EntryType::Char, "", 0o666);
        add("suid", tar::EntryType::Regular, "", 0o4755);
        let bytes = builder.into_inner().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let target = dir.path().join("t");
        unpack(incoming(bytes), &target, Output::new(true)).unwrap();
        assert!(!dir.path().join("escaped").exists());
        assert!(!target.join("dev").exists());
        let mode = std::fs::metadata(target.join("suid")).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o755);
    }
}
