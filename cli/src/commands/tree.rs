//! `tree`: every file of a layer, or of an environment as a sandbox would see it, from metadata alone.

use super::images::{layer_ids, resolve};
use super::overlay_view::{Node, View};
use super::{Scene, named};
use crate::args::Tree as Args;
use crate::embed;
use crate::errors::Outcome;
use crate::output::{name, output_failure, safe_json};
use crate::quantity::show_seconds;
use layer::erofs::reader::Reader;
use layer::tree::{Inode, Kind, Tree};
use layer::{Context, Error, LayerId, Result};
use proto::v1::resolve_response::Target as Resolved;
use serde::Serialize;
use std::io::{self, BufWriter, Write};

/// One file.
#[derive(Debug, Serialize)]
struct File {
    /// Escaped where the name is no plain text.
    path: String,
    kind: &'static str,
    mode: String,
    uid: u32,
    gid: u32,
    size: u64,
    mtime: String,
    mtime_nanos: u32,
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    xattrs: Vec<String>,
}

impl File {
    fn new(path: &[u8], inode: &Inode) -> Self {
        let (kind, size, target, device) = match &inode.kind {
            Kind::Directory(_) => ("directory", 0, None, None),
            Kind::Regular(data) => ("file", data.size, None, None),
            Kind::Symlink(target) => ("symlink", target.len() as u64, Some(name(target)), None),
            Kind::CharDevice(_) if inode.is_whiteout() => ("whiteout", 0, None, None),
            Kind::CharDevice(at) => ("char", 0, None, Some(format!("{},{}", at.major, at.minor))),
            Kind::BlockDevice(at) => ("block", 0, None, Some(format!("{},{}", at.major, at.minor))),
            Kind::Fifo => ("fifo", 0, None, None),
            Kind::Socket => ("socket", 0, None, None),
        };
        Self {
            path: name(path),
            kind,
            mode: format!("{:04o}", inode.mode),
            uid: inode.uid,
            gid: inode.gid,
            size,
            mtime: show_seconds(inode.mtime.secs),
            mtime_nanos: inode.mtime.nanos,
            target,
            device,
            xattrs: inode.xattrs.iter().map(|xattr| name(&xattr.name)).collect(),
        }
    }

    fn line(&self, mode: u16) -> String {
        let letter = match self.kind {
            "directory" => 'd',
            "symlink" => 'l',
            "char" => 'c',
            "whiteout" => 'w',
            "block" => 'b',
            "fifo" => 'p',
            "socket" => 's',
            _ => '-',
        };
        let size = self.device.clone().unwrap_or_else(|| self.size.to_string());
        let arrow = self.target.as_ref().map_or_else(String::new, |to| format!(" -> {to}"));
        format!(
            "{letter}{} {:>5} {:>5} {size:>11} {} {}{arrow}\n",
            permissions(mode),
            self.uid,
            self.gid,
            self.mtime,
            self.path
        )
    }
}

/// `rwsr-xr-t`, as ls(1) writes it.
fn permissions(mode: u16) -> String {
    let mut text = String::with_capacity(9);
    for (shift, special, letter) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let bits = mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (bits & 1 != 0, mode & special != 0) {
            (true, true) => letter,
            (false, true) => letter.to_ascii_uppercase(),
            (true, false) => 'x',
            (false, false) => '-',
        });
    }
    text
}

/// `tree`
pub async fn tree(scene: &Scene, args: &Args) -> Outcome {
    let full = named(&args.reference)?;
    let mut images = embed::images(&scene.settings, scene.out).await?;
    let answer = resolve(&mut images, &full).await?;
    let layers = layer_ids(&answer)?;
    let is_layer = matches!(answer.target, Some(Resolved::LayerId(_)));
    let url = images.store_url(&scene.settings)?;
    let (json, path) = (scene.out.is_json(), args.path.clone());
    super::blocking(move || -> Outcome {
        let store = store::Store::open(store::open(&url)?)?;
        let mut trees =
            layers.iter().map(|id| read_tree(&store, id)).collect::<Result<Vec<_>>>()?;
        let view = match trees.pop() {
            Some(only) if is_layer => View::of_layer(only),
            top => {
                trees.extend(top);
                View::of_stack(trees)
            }
        };
        let path = path.trim_matches('/');
        let Some(start) = view.find(path.as_bytes()) else {
            return Err(Error::not_found(format!("{full} has no /{path}")).into());
        };
        let path = if path.is_empty() { String::new() } else { format!("/{path}") };
        print(&view, path.as_bytes(), &start, json)
    })
    .await?
}

fn read_tree(store: &store::Store, id: &LayerId) -> Result<Tree> {
    let name = || format!("read layer {}", id.short());
    let file = store.read_layer(id).context(name)?;
    Reader::parse(&file.metadata).and_then(|reader| reader.to_tree()).context(name)
}

fn print(view: &View, path: &[u8], start: &Node, json: bool) -> Outcome {
    let mut out = BufWriter::new(io::stdout().lock());
    let mut first = true;
    view.walk(path, start, &mut |path, node| -> Outcome {
        let inode = view.inode(node)?;
        let file = File::new(path, inode);
        let line = if json {
            let text = serde_json::to_string(&file)
                .map_err(|error| Error::invalid("write a file as JSON").with_source(error))?;
            format!("{}{}", if first { "[\n" } else { ",\n" }, safe_json(&text))
        } else {
            file.line(inode.mode)
        };
        first = false;
        out.write_all(line.as_bytes()).map_err(output_failure)
    })?;
    if json {
        out.write_all(b"\n]\n").map_err(output_failure)?;
    }
    out.flush().map_err(output_failure)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn permissions_look_like_those_of_ls() {
        assert_eq!(permissions(0o755), "rwxr-xr-x");
        assert_eq!(permissions(0o4755), "rwsr-xr-x");
        assert_eq!(permissions(0o1777), "rwxrwxrwt");
        assert_eq!(permissions(0o6644), "rwSr-Sr--");
        assert_eq!(permissions(0o1000), "--------T");
    }
}
