//! `kill -9` of a writer at random moments: nothing visible is half done, and the next open leaves no file of
//! the dead behind.
#![allow(clippy::unwrap_used)]

mod places;

use layer::ChunkDigest;
use layer::chunk::ChunkTable;
use layer::layer_file::LayerFile;
use layer::manifest::{LayerKind, Manifest};
use layer::pack::Codec;
use layer::reference::{Reference, Target};
use places::Places;
use places::s3::Server;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;
use store::codec::decode_chunk;
use store::{Store, open};

const STORE: &str = "LAMELLA_TEST_KILL_STORE";

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
    let Ok(url) = std::env::var(STORE) else { return };
    let store = Store::open(open(&url).unwrap()).unwrap();
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

fn check(url: &str) -> usize {
    let store = Store::open(open(url).unwrap()).unwrap();
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

/// Kills a writer again and again, after more and more milliseconds.
fn kill_writers(url: &str, rounds: u64, base_ms: u64, mut after: impl FnMut()) {
    let mut moves = 0;
    for round in 0..rounds {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "endless_writer"])
            .env(STORE, url)
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let child = Killed(child);
        thread::sleep(Duration::from_millis(base_ms + round * 7 % 40));
        drop(child);
        after();
        moves = check(url);
    }
    eprintln!("{moves} moves of the reference");
}

/// Temporary files in a store's directory, after an open that collects those of the dead.
fn left(directory: &Path, before_open: bool) -> usize {
    if !before_open {
        open(directory.to_str().unwrap()).unwrap();
    }
    std::fs::read_dir(directory.join(".tmp")).map_or(0, Iterator::count)
}

#[test]
fn a_killed_writer_leaves_nothing_half_done() {
    let directory = tempfile::tempdir().unwrap();
    let mut interrupted = 0;
    let directory = directory.path();
    kill_writers(directory.to_str().unwrap(), 20, 15, || {
        interrupted += left(directory, true);
        assert_eq!(left(directory, false), 0, "files of the dead writer are still there");
    });
    println!("{interrupted} of 20 kills met an unfinished object");
}

#[test]
fn a_killed_writer_to_3fs_leaves_nothing_half_done() {
    let places = Places::new();
    kill_writers(&places.threefs.url(), 5, 60, || ());
}

#[test]
fn a_killed_writer_to_s3_leaves_nothing_half_done() {
    kill_writers(&Server::shared().url(), 5, 150, || ());
}
