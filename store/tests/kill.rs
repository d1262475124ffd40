//! `kill -9` of a writer at random moments: nothing visible is half done, and the next open leaves no file of
//! the dead behind.
#![allow(clippy::unwrap_used)]

use layer::ChunkDigest;
use layer::chunk::ChunkTable;
use layer::layer_file::LayerFile;
use layer::manifest::{LayerKind, Manifest};
use layer::pack::Codec;
use layer::reference::{Reference, Target};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;
use store::codec::decode_chunk;
use store::{Store, open};

const DIRECTORY: &str = "LAMELLA_TEST_KILL_DIRECTORY";

struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn layer_file(note: &str) -> LayerFile {
    let chunk_table = ChunkTable::default();
    let metadata = note.repeat(20_000).into_bytes();
    let manifest = Manifest {
        annotations: [("note".to_owned(), note.to_owned())].into(),
        directories: 1,
        ..Manifest::describing(LayerKind::Base, &chunk_table, &metadata)
    };
    LayerFile { manifest, chunk_table, metadata }
}

/// Publishes for ever; a child process of the test below, and nothing when run by itself.
#[test]
fn endless_writer() {
    let Ok(directory) = std::env::var(DIRECTORY) else { return };
    let store = Store::open(open(&directory).unwrap()).unwrap();
    let reference: Reference = "base/a".parse().unwrap();
    for round in 0_u64.. {
        let mut pack = store.pack_writer().unwrap();
        for number in 0..40_u64 {
            let mut plain = vec![number as u8; 65_536];
            plain[..8].copy_from_slice(&round.to_le_bytes());
            pack.append(ChunkDigest::of(&plain), Codec::None, 65_536, &plain).unwrap();
        }
        pack.finish().unwrap();
        let note = format!("{} {round}", std::process::id());
        let (layer, _) = store.put_layer(&layer_file(&note).encode().unwrap()).unwrap();
        store.move_reference(&reference, Some(Target::Layer(layer)), "me", None).unwrap();
    }
}

fn check(directory: &Path) -> usize {
    let store = Store::open(open(directory.to_str().unwrap()).unwrap()).unwrap();
    let left = std::fs::read_dir(directory.join(".tmp")).map_or(0, Iterator::count);
    assert_eq!(left, 0, "temporary files of the dead writer are still there");
    for pack in store.list_packs().unwrap() {
        for entry in store.read_pack_footer(&pack).unwrap() {
            let mut payload = vec![0; entry.stored_bytes as usize];
            store.read_pack(&pack, entry.offset, &mut payload).unwrap();
            decode_chunk(&payload, entry.codec, entry.plain_bytes, &entry.digest).unwrap();
        }
    }
    let layers = store.list_layers().unwrap();
    for layer in &layers {
        store.read_layer(layer).unwrap();
    }
    let history = store.history(&"base/a".parse().unwrap()).unwrap();
    for (entry, number) in history.iter().zip((1..=history.len() as u64).rev()) {
        assert_eq!(entry.number, number);
        assert!(matches!(entry.target, Some(Target::Layer(id)) if layers.contains(&id)));
    }
    history.len()
}

#[test]
fn a_killed_writer_leaves_nothing_half_done() {
    let directory = tempfile::tempdir().unwrap();
    let mut interrupted = 0;
    for round in 0..20_u64 {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "endless_writer"])
            .env(DIRECTORY, directory.path())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let child = Killed(child);
        thread::sleep(Duration::from_millis(15 + round * 7 % 40));
        drop(child);
        interrupted += std::fs::read_dir(directory.path().join(".tmp")).map_or(0, Iterator::count);
        check(directory.path());
    }
    println!("{interrupted} of 20 kills met an unfinished object");
}
