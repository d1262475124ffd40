//! A layer in the kernel, and everything that system calls tell about a tree.
#![allow(dead_code, missing_docs, unreachable_pub, clippy::unwrap_used)]

use crate::support::MemoryPublisher;
use layer::LayerId;
use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::io::Read;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::process::Command;
use sys::mount::{Attributes, Erofs, Overlay, OverlayLower, OverlayUpper, Unmount};

/// A layer in the kernel; unmounted when dropped.
pub struct Mounted {
    dir: tempfile::TempDir,
}

impl Mounted {
    /// Mounts a layer with all of its data.
    pub fn new(publisher: &MemoryPublisher, id: LayerId) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let (metadata, data) = (dir.path().join("meta"), dir.path().join("data"));
        fs::write(&metadata, publisher.layer(id).metadata).unwrap();
        let mut bytes = publisher.data(id);
        bytes.resize(bytes.len().max(4096), 0);
        fs::write(&data, bytes).unwrap();
        let mounted = Self { dir };
        fs::create_dir(mounted.root()).unwrap();
        let erofs = Erofs { metadata: &metadata, device: Some(&data) };
        erofs
            .mount_detached(Attributes::default())
            .and_then(|mount| mount.attach(&mounted.root()))
            .unwrap();
        mounted
    }

    /// Where it is.
    pub fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = sys::mount::unmount(&self.root(), Unmount::Lazy);
    }
}

/// Everything about one inode that `stat`, `getxattr`, `readlink` and `read` tell.
#[derive(Debug, PartialEq, Eq)]
pub struct Facts {
    pub mode: u32,
    pub owner: (u32, u32),
    pub rdev: u64,
    pub size: u64,
    pub links: u64,
    pub mtime: (i64, i64),
    pub xattrs: BTreeMap<Vec<u8>, Vec<u8>>,
    pub content: Vec<u8>,
    /// The first path of this inode, in path order.
    pub first_name: Vec<u8>,
}

/// Looks at a whole tree.
pub fn look(root: &Path) -> BTreeMap<Vec<u8>, Facts> {
    let mut paths = vec![PathBuf::new()];
    let mut all = Vec::new();
    while let Some(path) = paths.pop() {
        let full = root.join(&path);
        if full.symlink_metadata().unwrap().is_dir() {
            paths.extend(
                fs::read_dir(&full).unwrap().map(|entry| path.join(entry.unwrap().file_name())),
            );
        }
        all.push(path);
    }
    all.sort();
    let mut first_names = BTreeMap::new();
    let mut facts = BTreeMap::new();
    for path in all {
        let name = path.clone().into_os_string().into_vec();
        let full = if name.is_empty() { root.to_owned() } else { root.join(&path) };
        let stat = full.symlink_metadata().unwrap();
        let kind = stat.file_type();
        let content = if kind.is_symlink() {
            fs::read_link(&full).unwrap().into_os_string().into_vec()
        } else if kind.is_file() {
            let mut bytes = Vec::new();
            fs::File::open(&full).unwrap().read_to_end(&mut bytes).unwrap();
            bytes
        } else {
            Vec::new()
        };
        let device = kind.is_block_device() || kind.is_char_device();
        let xattrs = sys::file::xattr::list(&full).unwrap();
        facts.insert(
            name.clone(),
            Facts {
                mode: stat.mode(),
                owner: (stat.uid(), stat.gid()),
                rdev: if device { stat.rdev() } else { 0 },
                size: if kind.is_dir() { 0 } else { stat.size() },
                links: stat.nlink(),
                mtime: (stat.mtime(), stat.mtime_nsec()),
                xattrs: xattrs
                    .into_iter()
                    .map(|key| (key.clone(), sys::file::xattr::get(&full, &key).unwrap().unwrap()))
                    .collect(),
                content,
                first_name: first_names.entry((stat.dev(), stat.ino())).or_insert(name).clone(),
            },
        );
    }
    facts
}

/// Compares two trees.
#[track_caller]
pub fn assert_same(have: &Path, want: &Path, what: &str) {
    assert_equal(&look(have), &look(want), what);
}

/// Compares two trees of which one is an overlay: it counts links as it likes.
#[track_caller]
pub fn assert_same_view(have: &Path, want: &Path, what: &str) {
    let view = |root: &Path| {
        let mut facts = look(root);
        facts.values_mut().for_each(|facts| facts.links = 0);
        facts
    };
    assert_equal(&view(have), &view(want), what);
}

/// Compares everything but which names are one inode.
#[track_caller]
pub fn assert_same_but_links(have: &Path, want: &Path, what: &str) {
    let view = |root: &Path| {
        let mut facts = look(root);
        for facts in facts.values_mut() {
            facts.links = 0;
            facts.first_name.clear();
        }
        facts
    };
    assert_equal(&view(have), &view(want), what);
}

#[track_caller]
fn assert_equal(have: &BTreeMap<Vec<u8>, Facts>, want: &BTreeMap<Vec<u8>, Facts>, what: &str) {
    let names = |facts: &BTreeMap<Vec<u8>, Facts>| {
        facts.keys().map(|path| layer::tree::display_path(path)).collect::<Vec<_>>()
    };
    assert_eq!(names(have), names(want), "{what}");
    for (path, facts) in have {
        let path_text = layer::tree::display_path(path);
        assert!(facts.content == want[path].content, "{what}: content of {path_text}");
        assert_eq!(facts, &want[path], "{what}: {path_text}");
    }
}

/// An overlay in the kernel; unmounted when dropped.
pub struct Stack {
    dir: tempfile::TempDir,
}

impl Stack {
    /// Puts folders over each other, the bottom one first, with a writable layer when asked.
    pub fn new(lowers: &[PathBuf], writable: bool) -> Self {
        let stack = Self { dir: tempfile::tempdir().unwrap() };
        let open = |name: &str| {
            fs::create_dir(stack.dir.path().join(name)).unwrap();
            fs::File::open(stack.dir.path().join(name)).unwrap()
        };
        let (_, upper, work, empty) = (open("view"), open("upper"), open("work"), open("empty"));
        // A read-only overlay needs two layers.
        let mut below: Vec<OverlayLower<'_>> =
            lowers.iter().rev().map(|path| OverlayLower::Path(path)).collect();
        below.push(OverlayLower::Fd(empty.as_fd()));
        let overlay = Overlay {
            name: "test",
            lowers: &below,
            upper: writable.then(|| OverlayUpper { upper: upper.as_fd(), work: work.as_fd() }),
            volatile: false,
        };
        overlay
            .mount_detached(Attributes::default())
            .and_then(|mount| mount.attach(&stack.view()))
            .unwrap();
        stack
    }

    /// What a sandbox sees.
    pub fn view(&self) -> PathBuf {
        self.dir.path().join("view")
    }

    /// What it wrote.
    pub fn upper(&self) -> PathBuf {
        self.dir.path().join("upper")
    }
}

impl Drop for Stack {
    fn drop(&mut self) {
        let _ = sys::mount::unmount(&self.view(), Unmount::Lazy);
    }
}

pub fn run(program: &str, arguments: &[&OsStr]) {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
}
