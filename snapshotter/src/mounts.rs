//! The mounts that show a snapshot. Pure: numbers and kinds in, mounts out.

use crate::api::Mount;
use crate::folders::Folders;
use crate::record::{Kind, Snapshot};
use layer::{Error, Result};
use std::path::Path;

/// The most snapshots below one; overlayfs takes no more lower directories.
const MAX_BELOW: usize = 500;

/// `below` holds what it stands on, the nearest first; `extra` are options that this kernel wants.
pub fn of(
    snapshot: &Snapshot,
    below: &[Snapshot],
    folders: &Folders,
    extra: &[&str],
) -> Result<Vec<Mount>> {
    if below.len() > MAX_BELOW {
        let text = format!(
            "{} snapshots below {:?}; overlayfs takes {MAX_BELOW}",
            below.len(),
            snapshot.name
        );
        return Err(Error::invalid(text));
    }
    let upper = folders.upper(snapshot.id);
    match (snapshot.kind, below) {
        (Kind::Active, []) => Ok(vec![bind(&upper, "rw")?]),
        (_, []) => Ok(vec![bind(&upper, "ro")?]),
        (Kind::View, [only]) => Ok(vec![bind(&folders.link(only.id), "ro")?]),
        _ => {
            let mut options: Vec<String> = extra.iter().map(|&option| option.to_owned()).collect();
            if snapshot.kind == Kind::Active {
                options.push(format!("workdir={}", text(&folders.work(snapshot.id))?));
                options.push(format!("upperdir={}", text(&upper)?));
            }
            let lowers = below.iter().map(|it| text(&folders.link(it.id)));
            options.push(format!("lowerdir={}", lowers.collect::<Result<Vec<_>>>()?.join(":")));
            Ok(vec![mount("overlay", "overlay", options)])
        }
    }
}

fn text(path: &Path) -> Result<String> {
    let text = path.to_str().map(str::to_owned);
    text.ok_or_else(|| Error::invalid(format!("{} is not UTF-8", path.display())))
}

fn bind(path: &Path, how: &str) -> Result<Mount> {
    // Every program resolves links in a source, but not every one where it looks at the path first.
    let path = std::fs::canonicalize(path)
        .map_err(|error| Error::io(format!("look at {}", path.display()), error))?;
    Ok(mount("bind", &text(&path)?, vec![how.to_owned(), "rbind".to_owned()]))
}

fn mount(kind: &str, source: &str, options: Vec<String>) -> Mount {
    Mount { r#type: kind.to_owned(), source: source.to_owned(), target: String::new(), options }
}

/// What containerd's own overlayfs snapshotter adds where a kernel has it: without an index, a lower directory
/// may serve any number of mounts in any order.
pub fn wanted_options() -> Vec<&'static str> {
    let has_index = Path::new("/sys/module/overlay/parameters/index").exists();
    if has_index { vec!["index=off"] } else { Vec::new() }
}
