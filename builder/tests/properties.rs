//! Random trees and hostile bytes: a layer gives back what was put in, and no archive makes the builder
//! panic or take memory that it was not given.

#![allow(clippy::unwrap_used)]

mod support;
#[path = "support/tape.rs"]
mod tape;

use layer::tree::Kind;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use support::{MemoryPublisher, build, tight};
use tape::{Fields, Tape};

/// A file's content, written as runs so that zeros, repeats and sizes around limits are likely.
#[derive(Debug, Clone)]
struct Runs(Vec<(u8, usize)>);

impl Runs {
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::new();
        for &(byte, length) in &self.0 {
            let start = bytes.len();
            bytes.resize(start + length, 0);
            if byte > 3 {
                for (at, slot) in bytes[start..].iter_mut().enumerate() {
                    *slot = byte.wrapping_add((at / 251) as u8).wrapping_mul(at as u8 | 1);
                }
            } else if byte > 0 {
                bytes[start..].fill(byte);
            }
        }
        bytes
    }
}

fn runs() -> impl Strategy<Value = Runs> {
    let length = prop_oneof![1..20_usize, 4000..4200_usize, 8100..8300_usize, 8192..40_000_usize];
    prop::collection::vec((0..8_u8, length), 0..5).prop_map(Runs)
}

fn path() -> impl Strategy<Value = String> {
    prop::collection::vec("[a-c]{1,2}", 1..4).prop_map(|names| names.join("/"))
}

/// What an archive says, one after the other.
#[derive(Debug, Clone)]
enum Step {
    File(String, Runs),
    Directory(String, u32),
    Symlink(String, String),
    Fifo(String),
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (path(), runs()).prop_map(|(path, runs)| Step::File(path, runs)),
        2 => (path(), 0..0o10000_u32).prop_map(|(path, mode)| Step::Directory(path, mode)),
        // Targets that lead nowhere, so that no path goes through a link.
        1 => (path(), "[x-z]{1,80}").prop_map(|(path, target)| Step::Symlink(path, target)),
        1 => path().prop_map(Step::Fifo),
    ]
}

fn record(steps: &[Step]) -> Vec<u8> {
    let mut tape = Tape::default();
    for step in steps {
        tape = match step {
            Step::File(path, runs) => tape.file(path, &runs.bytes()),
            Step::Directory(path, mode) => tape.directory(&format!("{path}/"), *mode),
            Step::Symlink(path, target) => tape.symlink(path, target),
            Step::Fifo(path) => {
                tape.raw(Fields { name: path.clone().into(), kind: b'6', ..Fields::default() }, b"")
            }
        };
    }
    tape.end()
}

/// What the archive means: a much simpler model than the index.
fn model(steps: &[Step]) -> BTreeMap<String, Option<Step>> {
    let mut tree: BTreeMap<String, Option<Step>> = BTreeMap::new();
    let remove = |tree: &mut BTreeMap<String, Option<Step>>, path: &str| {
        let inside = format!("{path}/");
        tree.retain(|name, _| name != path && !name.starts_with(&inside));
    };
    let is_directory =
        |entry: Option<&Option<Step>>| matches!(entry, Some(None | Some(Step::Directory(..))));
    for step in steps {
        let (Step::File(path, _)
        | Step::Directory(path, _)
        | Step::Symlink(path, _)
        | Step::Fifo(path)) = step;
        for (at, _) in path.match_indices('/') {
            let parent = &path[..at];
            if !is_directory(tree.get(parent)) {
                remove(&mut tree, parent);
                tree.insert(parent.to_owned(), None);
            }
        }
        if !(matches!(step, Step::Directory(..)) && is_directory(tree.get(path))) {
            remove(&mut tree, path);
        }
        tree.insert(path.clone(), Some(step.clone()));
    }
    tree
}

fn has_link_above(steps: &[Step]) -> bool {
    // A link in the middle of a path is followed, which the model does not know.
    steps.iter().any(|step| {
        let Step::Symlink(link, _) = step else { return false };
        let inside = format!("{link}/");
        steps.iter().any(|other| {
            let (Step::File(path, _)
            | Step::Directory(path, _)
            | Step::Symlink(path, _)
            | Step::Fifo(path)) = other;
            path.starts_with(&inside)
        })
    })
}

fn write(dir: &Path, bytes: &[u8]) -> std::path::PathBuf {
    let file = dir.join("case.tar");
    fs::write(&file, bytes).unwrap();
    file
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    #[test]
    fn a_layer_gives_back_what_the_archive_says(steps in prop::collection::vec(step(), 0..25)) {
        prop_assume!(!has_link_above(&steps));
        let dir = tempfile::tempdir().unwrap();
        let file = write(dir.path(), &record(&steps));
        let publisher = MemoryPublisher::default();
        let built = build(&file, &publisher, &tight()).unwrap();
        let view = publisher.view(built.layer_id());
        let model = model(&steps);
        prop_assert_eq!(view.paths(), model.keys().cloned().collect::<Vec<_>>());
        for (path, step) in &model {
            let inode = view.inode(path);
            match step {
                None => prop_assert_eq!(inode.mode, 0o755),
                Some(Step::Directory(_, mode)) => prop_assert_eq!(u32::from(inode.mode), *mode),
                Some(Step::File(_, runs)) => prop_assert!(view.bytes(path) == runs.bytes()),
                Some(Step::Symlink(_, target)) => prop_assert_eq!(&view.target(path), target),
                Some(Step::Fifo(_)) => prop_assert_eq!(&inode.kind, &Kind::Fifo),
            }
        }
        // And again, with other threads, on a store that knows it all.
        let mut options = tight();
        options.threads = 1;
        let again = build(&file, &publisher, &options).unwrap();
        prop_assert_eq!(again.layer_id(), built.layer_id());
        prop_assert_eq!(again.top().new_chunks, 0);
    }

    #[test]
    fn hostile_archives_are_errors_or_layers(
        flips in prop::collection::vec((0..6000_usize, any::<u8>()), 0..6),
        cut in 0..9000_usize,
        reseal: bool,
    ) {
        let mut bytes = Tape::default()
            .directory("d/", 0o755)
            .pax(&[
                ("path", b"d/long name"),
                ("mtime", b"-1.5"),
                ("SCHILY.xattr.user.x", b"\0\x01"),
                ("GNU.sparse.map", b"0,3,8192,3"),
                ("GNU.sparse.size", b"10000"),
            ])
            .file("cut", b"abcdef")
            .hard_link("d/hard", "d/long name")
            .symlink("d/link", "target")
            .file("other", &[7; 700])
            .end();
        let length = bytes.len();
        for (at, byte) in flips {
            bytes[at % length] ^= byte;
            if reseal {
                // A header with a right checksum gets further.
                tape::seal(&mut bytes[at % length / 512 * 512..]);
            }
        }
        bytes.truncate(cut.max(1));
        let dir = tempfile::tempdir().unwrap();
        let file = write(dir.path(), &bytes);
        let mut options = tight();
        // A flipped size bit must not make this test read terabytes of zeros.
        options.chunking.hole_entries = 1 << 10;
        let _ = build(&file, &MemoryPublisher::default(), &options);
    }
}
