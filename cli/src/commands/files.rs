//! `files`: the files of a sandbox, one call each.

use super::Scene;
use super::exec::{lost_sandbox, print};
use crate::args::{Files, FilesCat, FilesChmod, FilesLs, FilesWatch, FilesWrite};
use crate::errors::{Outcome, Remedy};
use crate::node::start::{self, Lifetime, Node};
use crate::output::{Row, name};
use crate::quantity::{show_bytes, show_seconds};
use crate::terminal;
use proto::v1::sandboxes_client::SandboxesClient;
use proto::v1::{
    FileEntry, FileEventKind, FileKind, ListFilesRequest, MakeDirectoryRequest, ReadFileRequest,
    RemoveFileRequest, RenameFileRequest, SetFileAttributesRequest, StatFileRequest,
    WatchFilesRequest, WriteFilePart, WriteFileStart, file_chunk, write_file_part,
};
use serde::Serialize;
use std::io;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::transport::Channel;

#[derive(Debug, Serialize)]
struct Entry {
    path: String,
    kind: String,
    mode: String,
    uid: u32,
    gid: u32,
    size_bytes: u64,
    mtime_unix_s: i64,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
    links: u32,
}

impl Entry {
    fn new(entry: &FileEntry) -> Self {
        let kind = entry.kind().as_str_name();
        let kind = kind.strip_prefix("FILE_KIND_").unwrap_or(kind).to_ascii_lowercase();
        let is_link = entry.kind() == FileKind::Symlink;
        Self {
            path: name(&entry.path),
            kind,
            mode: format!("{:04o}", entry.mode),
            uid: entry.uid,
            gid: entry.gid,
            size_bytes: entry.size_bytes,
            mtime_unix_s: entry.mtime_unix_s,
            target: is_link.then(|| name(&entry.target)),
            links: entry.links,
        }
    }
}

impl Row for Entry {
    const HEADER: &'static [&'static str] = &["KIND", "MODE", "OWNER", "SIZE", "CHANGED", "NAME"];

    fn cells(&self) -> Vec<String> {
        let target = self.target.as_ref().map_or_else(String::new, |to| format!(" -> {to}"));
        vec![
            self.kind.clone(),
            self.mode.clone(),
            format!("{}:{}", self.uid, self.gid),
            show_bytes(self.size_bytes),
            show_seconds(self.mtime_unix_s),
            format!("{}{target}", self.path),
        ]
    }
}

async fn connect(scene: &Scene) -> Outcome<(Node, SandboxesClient<Channel>)> {
    let node = start::connect(&scene.settings, Lifetime::WhileUsed, scene.out).await?;
    let client = SandboxesClient::new(node.channel.clone());
    Ok((node, client))
}

/// `files`
pub async fn files(scene: &Scene, args: Files) -> Outcome {
    let (_node, mut client) = connect(scene).await?;
    let entry = match args {
        Files::Ls(args) => return list(scene, client, args).await,
        Files::Cat(args) => return cat(client, args).await,
        Files::Write(args) => return write(scene, client, args).await,
        Files::Watch(args) => return watch(scene, client, args).await,
        Files::Rm(args) => {
            let (id, path) = args.of.place;
            let (recursive, missing_ok) = (args.recursive, args.force);
            let request = RemoveFileRequest { id, path, recursive, missing_ok };
            client.remove_file(request).await.remedy(lost_sandbox)?;
            return Ok(());
        }
        Files::Stat(of) => {
            let (id, path) = of.place;
            client.stat_file(StatFileRequest { id, path, follow: false }).await
        }
        Files::Mkdir(args) => {
            let ((id, path), (uid, gid)) = (args.of.place, args.owner);
            let (mode, parents) = (args.mode, args.parents);
            let request = MakeDirectoryRequest { id, path, mode, uid, gid, parents };
            client.make_directory(request).await
        }
        Files::Mv(args) => {
            let ((id, from), to) = (args.from.place, args.to);
            let request = RenameFileRequest { id, from, to, no_replace: args.no_clobber };
            client.rename_file(request).await
        }
        Files::Chmod(FilesChmod { of, mode, owner }) => {
            let (id, path) = of.place;
            let (uid, gid) = (owner.map(|owner| owner.0), owner.map(|owner| owner.1));
            let request = SetFileAttributesRequest { id, path, mode, uid, gid, mtime_unix_s: None };
            client.set_file_attributes(request).await
        }
    };
    let entry = Entry::new(&entry.remedy(lost_sandbox)?.into_inner());
    scene.out.result(&entry, || entry.cells().join("  "))
}

async fn list(scene: &Scene, mut client: SandboxesClient<Channel>, args: FilesLs) -> Outcome {
    let (id, path) = args.of.place;
    let request = ListFilesRequest { id, path, depth: args.depth, max_entries: args.max };
    let mut answers = client.list_files(request).await.remedy(lost_sandbox)?.into_inner();
    let (mut rows, mut truncated) = (Vec::new(), false);
    while let Some(answer) = answers.message().await? {
        rows.extend(answer.entries.iter().map(Entry::new));
        truncated |= answer.truncated;
    }
    rows.sort_by(|one, other| one.path.cmp(&other.path));
    scene.out.listing(&rows)?;
    if truncated {
        scene.out.notice("there is more; --max and --depth bound the list");
    }
    Ok(())
}

async fn cat(mut client: SandboxesClient<Channel>, args: FilesCat) -> Outcome {
    let (id, path) = args.of.place;
    if args.length == Some(0) {
        return Ok(());
    }
    let length = args.length.unwrap_or(0);
    let request = ReadFileRequest { id, path, offset: args.offset, length };
    let mut chunks = client.read_file(request).await.remedy(lost_sandbox)?.into_inner();
    while let Some(chunk) = chunks.message().await? {
        match chunk.part {
            Some(file_chunk::Part::Data(bytes)) => print(&mut io::stdout().lock(), &bytes)?,
            Some(file_chunk::Part::Header(header)) if header.is_directory => {
                let text = "a directory; `lamella files ls` lists it, `lamella cp` copies it";
                return Err(layer::Error::invalid(text).into());
            }
            _ => {}
        }
    }
    Ok(())
}

/// Parts that wait.
const PARTS: usize = 4;

async fn write(scene: &Scene, mut client: SandboxesClient<Channel>, args: FilesWrite) -> Outcome {
    let ((id, path), (uid, gid)) = (args.of.place, args.owner);
    let start = WriteFileStart {
        id,
        path,
        mode: args.mode,
        uid,
        gid,
        append: args.append,
        make_parents: args.parents,
        ..WriteFileStart::default()
    };
    let (sender, receiver) = mpsc::channel(PARTS);
    let part = |part| WriteFilePart { part: Some(part) };
    // The receiver lives: a fresh channel takes its first message.
    _ = sender.send(part(write_file_part::Part::Start(start))).await;
    let feed = tokio::spawn(async move {
        let mut input = terminal::standard_input();
        while let Some(bytes) = input.recv().await {
            if sender.send(part(write_file_part::Part::Data(bytes))).await.is_err() {
                return;
            }
        }
    });
    let written = client.write_file(ReceiverStream::new(receiver)).await.remedy(lost_sandbox);
    feed.abort();
    #[derive(Serialize)]
    struct Written {
        bytes: u64,
    }
    let written = Written { bytes: written?.into_inner().bytes };
    if scene.out.is_json() { scene.out.result(&written, String::new) } else { Ok(()) }
}

#[derive(Debug, Serialize)]
struct Event {
    event: String,
    path: String,
    is_directory: bool,
    cookie: u32,
}

async fn watch(scene: &Scene, mut client: SandboxesClient<Channel>, args: FilesWatch) -> Outcome {
    let (id, path) = args.of.place;
    let request = WatchFilesRequest { id, path, recursive: args.recursive };
    let mut events = client.watch_files(request).await.remedy(lost_sandbox)?.into_inner();
    while let Some(event) = events.message().await? {
        let kind = event.kind();
        let word = kind.as_str_name();
        let shown = Event {
            event: word.strip_prefix("FILE_EVENT_").unwrap_or(word).to_ascii_lowercase(),
            path: name(&event.path),
            is_directory: event.is_directory,
            cookie: event.cookie,
        };
        scene.out.result(&shown, || format!("{} {}", shown.event, shown.path))?;
        if kind == FileEventKind::FileEventGone {
            break;
        }
    }
    Ok(())
}
