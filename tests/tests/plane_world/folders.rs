//! Listings and paths.

use super::{View, plant};
use rustix::fs::{RawDir, SeekFrom};
use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::io;
use std::mem::MaybeUninit;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

/// One entry of a listing: the kind, the number, where the next one starts.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    name: OsString,
    kind: rustix::fs::FileType,
    inode: u64,
    next: u64,
}

/// Everything from the descriptor's place on, read in pieces of `bytes`.
fn list_from(folder: &File, bytes: usize) -> io::Result<Vec<Entry>> {
    let mut buffer = vec![MaybeUninit::uninit(); bytes];
    let mut listing = RawDir::new(folder, &mut buffer);
    let mut entries = Vec::new();
    while let Some(entry) = listing.next() {
        let entry = entry?;
        entries.push(Entry {
            name: OsStr::from_bytes(entry.file_name().to_bytes()).to_owned(),
            kind: entry.file_type(),
            inode: entry.ino(),
            next: entry.next_entry_cookie(),
        });
    }
    Ok(entries)
}

fn names(entries: &[Entry]) -> Vec<&OsStr> {
    entries.iter().map(|entry| entry.name.as_os_str()).collect()
}

pub fn listings(view: &View) {
    let mut folders: Vec<PathBuf> = view.paths();
    folders.retain(|path| view.reference.join(path).symlink_metadata().unwrap().is_dir());
    folders.push(PathBuf::new());
    for name in &folders {
        let sorted = |root: &Path| {
            let entries = list_from(&File::open(root.join(name))?, 32 << 10)?;
            let map: BTreeMap<_, _> =
                entries.iter().map(|entry| (entry.name.clone(), entry.kind)).collect();
            assert_eq!(map.len(), entries.len(), "a name twice in {}", name.display());
            Ok(map)
        };
        view.same(format!("the listing of {}", name.display()), sorted);
        let at = view.mounted.join(name);
        for entry in list_from(&File::open(&at).unwrap(), 1000).unwrap() {
            // Above the root of a mount lies another file system.
            if entry.name == ".." && name.as_os_str().is_empty() {
                continue;
            }
            let stat = fs::symlink_metadata(at.join(&entry.name)).unwrap();
            assert_eq!(entry.inode, stat.ino(), "{}/{:?}", name.display(), entry.name);
            assert_eq!(entry.kind.is_block_device(), stat.file_type().is_block_device());
        }
    }
}

pub fn seeks(view: &View) {
    let folder = File::open(view.mounted.join("many")).unwrap();
    let whole = list_from(&folder, 32 << 10).unwrap();
    assert_eq!(whole.len(), plant::MANY + 2);
    assert_eq!(list_from(&folder, 32 << 10).unwrap(), [], "at the end");
    // The smallest pieces that hold one entry; the same names in the same order.
    rustix::fs::seek(&folder, SeekFrom::Start(0)).unwrap();
    assert_eq!(names(&list_from(&folder, 300).unwrap()), names(&whole));
    for at in (0..whole.len()).step_by(97).chain([whole.len() - 2, whole.len() - 1]) {
        rustix::fs::seek(&folder, SeekFrom::Start(whole[at].next)).unwrap();
        let rest = list_from(&folder, 4096).unwrap();
        assert!(names(&rest) == names(&whole[at + 1..]), "from the entry behind {at}");
    }
    // Another descriptor, opened later, understands the same places.
    let other = File::open(view.mounted.join("many")).unwrap();
    rustix::fs::seek(&other, SeekFrom::Start(whole[1500].next)).unwrap();
    assert_eq!(names(&list_from(&other, 4096).unwrap()), names(&whole[1501..]));
    // Half-way back, while others list.
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let folder = File::open(view.mounted.join("many")).unwrap();
                for _ in 0..5 {
                    rustix::fs::seek(&folder, SeekFrom::Start(0)).unwrap();
                    assert_eq!(names(&list_from(&folder, 2000).unwrap()), names(&whole));
                }
            });
        }
    });
    let cookies: Vec<u64> = whole.iter().map(|entry| entry.next).collect();
    assert!(cookies.iter().all(|cookie| *cookie <= i64::MAX as u64));
}

pub fn paths(view: &View) {
    let long = |length: usize| "l".repeat(length);
    let deep = |bytes: usize| {
        let mut path = "./".repeat(bytes / 2 - 10);
        path.push_str("sizes/100");
        path
    };
    let names = [
        "sizes/100".to_owned(),
        "sizes//100".to_owned(),
        "sizes/../sizes/./100".to_owned(),
        "sizes/100/".to_owned(),
        "sizes/100/below".to_owned(),
        "sizes/100/../100".to_owned(),
        "sizes/absent".to_owned(),
        "sizes/absent/below".to_owned(),
        "absent".to_owned(),
        "Sizes/100".to_owned(),
        "links/loop-a".to_owned(),
        "links/loop-a/below".to_owned(),
        "links/self".to_owned(),
        "links/nowhere".to_owned(),
        "links/to-folder/hard-c".to_owned(),
        "links/to-folder/".to_owned(),
        "links/to-file/".to_owned(),
        "links/chain-19".to_owned(),
        "links/chain-40".to_owned(),
        "links/chain-44".to_owned(),
        "special/fifo/below".to_owned(),
        format!("names/{}", long(255)),
        format!("names/{}", long(254)),
        format!("names/{}", long(256)),
        format!("names/{}", long(1024)),
        format!("names/{}", long(1025)),
        format!("names/{}", long(4000)),
        format!("names/{}/below", long(256)),
        deep(3000),
        deep(4200),
        format!("sizes/{}", "nul\u{1}"),
        "deep/level-0/level-1/level-2/../../..".to_owned(),
    ];
    // Twice: the second answer may come from what the kernel remembers.
    for turn in 1..=2 {
        for name in &names {
            let shown = if name.len() > 60 { &name[..60] } else { name };
            view.same(format!("stat of {shown} ({} bytes), turn {turn}", name.len()), |root| {
                let stat = fs::metadata(root.join(name))?;
                Ok((stat.file_type().is_dir(), stat.mode()))
            });
            view.same(format!("open of {shown} ({} bytes), turn {turn}", name.len()), |root| {
                File::open(root.join(name)).map(|_| ())
            });
        }
    }
    view.same("listing a file", |root| fs::read_dir(root.join("sizes/100")).map(|_| ()));
    view.same("reading a folder", |root| fs::read(root.join("sizes")));
    view.same("the deepest file", |root| {
        let mut path = root.join("deep");
        path.extend((0..60).map(|level| format!("level-{level}")));
        fs::read(path.join("bottom"))
    });
}
