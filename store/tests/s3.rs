//! What only a store in a bucket has to hold: answers that are lost, servers that are busy or careless, and
//! uploads in parts that nobody finishes.
#![allow(clippy::unwrap_used)]

mod places;

use layer::reference::{Reference, Target};
use layer::{ErrorKind, LayerId};
use places::s3::Server;
use std::sync::{Arc, Barrier};
use std::thread;
use store::{Backend, Key, Store, open};

fn key(text: &str) -> Key {
    Key::new(text).unwrap()
}

/// More than one part.
fn large(fill: u8) -> Vec<u8> {
    vec![fill; 9 << 20]
}

fn put(store: &dyn Backend, name: &str, bytes: &[u8]) -> layer::Result<()> {
    let mut upload = store.create(&key(name))?;
    upload.write(bytes)?;
    upload.publish()
}

#[test]
fn a_busy_server_is_asked_again() {
    let server = Server::start();
    let store = open(&server.url()).unwrap();
    server.tell("busy 2");
    put(&*store, "a/b", b"abc").unwrap();
    server.tell("busy 2");
    assert_eq!(store.read_all(&key("a/b"), 9).unwrap(), b"abc");
    server.tell("busy 2");
    assert_eq!(store.list("", None, 9).unwrap(), ["a/b"]);
    server.tell("busy 1000");
    assert_eq!(store.size(&key("a/b")).unwrap_err().kind(), ErrorKind::Unavailable);
}

#[test]
fn a_lost_answer_is_settled_by_who_made_the_object() {
    let server = Server::start();
    let store = open(&server.url()).unwrap();
    // The put happened; its second try is refused, because the object is there.
    server.tell("lost 1");
    put(&*store, "packs/small", b"abc").unwrap();
    assert_eq!(store.read_all(&key("packs/small"), 9).unwrap(), b"abc");
    // Nobody takes another's object for his own.
    server.tell("lost 1");
    assert_eq!(put(&*store, "packs/small", b"abc").unwrap_err().kind(), ErrorKind::Exists);
    // The completion of an upload in parts happened; the server does not know the upload any more.
    let mut upload = store.create(&key("packs/large")).unwrap();
    upload.write(&large(1)).unwrap();
    let mut other = store.create(&key("packs/large")).unwrap();
    other.write(&large(2)).unwrap();
    // The last part and the completion are both answered too late.
    server.tell("lost 2");
    upload.publish().unwrap();
    assert_eq!(other.publish().unwrap_err().kind(), ErrorKind::Exists);
    assert_eq!(store.read_all(&key("packs/large"), 10 << 20).unwrap(), large(1));
    assert_eq!(server.tell("uploads"), "0");
}

#[test]
fn an_abandoned_upload_in_parts_is_aborted() {
    let server = Server::start();
    let store = open(&server.url()).unwrap();
    let mut upload = store.create(&key("packs/half")).unwrap();
    upload.write(&large(1)).unwrap();
    assert_eq!(server.tell("uploads"), "1");
    drop(upload);
    assert_eq!(server.tell("uploads"), "0");
    assert_eq!(store.list("", None, 9).unwrap(), Vec::<String>::new());
}

#[test]
fn a_server_that_replaces_is_refused() {
    let server = Server::start();
    server.tell("unconditional");
    let error = open(&server.url()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{}", error.chain());
    assert!(error.chain().contains("If-None-Match"), "{}", error.chain());
}

#[test]
fn a_bucket_that_is_not_there_is_one_clear_error() {
    let parameters = Server::shared().parameters();
    let error = open(&format!("s3://no-such-bucket/x?{parameters}")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable, "{}", error.chain());
    assert!(error.chain().contains("NoSuchBucket"), "{}", error.chain());
}

#[test]
fn of_two_writers_of_a_reference_on_s3_exactly_one_wins() {
    let url = Server::shared().url();
    let file = {
        use layer::chunk::ChunkTable;
        use layer::layer_file::LayerFile;
        use layer::manifest::{LayerKind, Manifest};
        let (chunk_table, metadata) = (ChunkTable::default(), b"x".to_vec());
        let manifest = Manifest {
            directories: 1,
            ..Manifest::describing(LayerKind::Base, &chunk_table, &metadata)
        };
        LayerFile { manifest, chunk_table, metadata }.encode().unwrap()
    };
    // Each has a client of its own, as two daemons have.
    let stores: Vec<Store> = (0..2).map(|_| Store::open(open(&url).unwrap()).unwrap()).collect();
    let layer: LayerId = stores[0].put_layer(&file).unwrap().0;
    let reference: Reference = "base/a".parse().unwrap();
    for round in 0..10 {
        let start = Arc::new(Barrier::new(2));
        let outcomes: Vec<_> = thread::scope(|scope| {
            let race = |store: &'_ Store, author: &'static str| {
                let (store, reference, start) = (store.clone(), reference.clone(), start.clone());
                scope.spawn(move || {
                    start.wait();
                    store.move_reference(
                        &reference,
                        Some(Target::Layer(layer)),
                        author,
                        Some(round),
                    )
                })
            };
            let racers = [race(&stores[0], "one"), race(&stores[1], "two")];
            racers.into_iter().map(|racer| racer.join().unwrap()).collect()
        });
        let winners: Vec<_> = outcomes.iter().filter_map(|outcome| outcome.as_ref().ok()).collect();
        assert_eq!(winners.len(), 1, "{outcomes:?}");
        for loser in outcomes.iter().filter_map(|outcome| outcome.as_ref().err()) {
            assert_eq!(loser.kind(), ErrorKind::Exists);
        }
        assert_eq!(&stores[0].current(&reference).unwrap().unwrap(), winners[0]);
    }
}
