//! What only a store on 3FS has to hold: rings that fail in every way, a daemon that is restarted, and clients
//! that learn late of each other's names.
#![allow(clippy::unwrap_used)]

mod places;

use layer::ErrorKind;
use places::double::{Folder, library};
use places::slow_names::Shared;
use places::threefs::ThreeFsMount;
use std::sync::Barrier;
use std::thread;
use store::{Backend, Key, open};

fn key(text: &str) -> Key {
    Key::new(text).unwrap()
}

fn put(store: &dyn Backend, name: &str, bytes: &[u8]) -> layer::Result<()> {
    let mut upload = store.create(&key(name))?;
    upload.write(bytes)?;
    upload.publish()
}

fn content() -> Vec<u8> {
    (0..7_000_000_u32).map(|number| (number % 251) as u8).collect()
}

fn reads_right(store: &dyn Backend, content: &[u8]) {
    for (start, length) in [(0, content.len()), (1_000_001, 3_000_000), (6_900_000, 100_000)] {
        let mut read = vec![0; length];
        store.read_at(&key("packs/ab/cd"), start as u64, &mut read).unwrap();
        assert!(read == content[start..start + length], "{start}+{length}");
    }
    let mut beyond = vec![0; 100_000];
    let error = store.read_at(&key("packs/ab/cd"), 6_950_000, &mut beyond).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
}

#[test]
fn long_reads_go_by_one_ring_for_each_thread() {
    let folder = Folder::new();
    let store = open(&folder.url()).unwrap();
    let content = content();
    put(&*store, "packs/ab/cd", &content).unwrap();
    reads_right(&*store, &content);
    assert_eq!(folder.counts().0, 1);
    let start = Barrier::new(4);
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                start.wait();
                for _ in 0..10 {
                    reads_right(&*store, &content);
                }
            });
        }
    });
    let (rings, answers) = folder.counts();
    assert!((1..=4).contains(&rings), "{rings} rings");
    assert!(answers > 400, "{answers} answers");
}

#[test]
fn short_late_few_and_failing_answers_give_the_right_bytes() {
    let content = content();
    for settings in [
        "short 100000",
        "short 1 full 2 short 65536",
        "full 1",
        "delay_ms 1",
        "errno 5",
        "errno 5 errno_every 7",
        "errno 110 errno_every 3",
        "no_ring 12",
    ] {
        let folder = Folder::new();
        let store = open(&folder.url()).unwrap();
        put(&*store, "packs/ab/cd", &content).unwrap();
        folder.tell(settings);
        reads_right(&*store, &content);
        reads_right(&*store, &content);
        let (rings, answers) = folder.counts();
        assert!(settings.starts_with("no_ring") || (rings > 0 && answers > 0), "{settings}");
    }
}

#[test]
fn rings_are_made_anew_after_the_daemon_was_restarted() {
    let folder = Folder::new();
    let store = open(&folder.url()).unwrap();
    let content = content();
    put(&*store, "packs/ab/cd", &content).unwrap();
    reads_right(&*store, &content);
    for generation in 1..4 {
        let (rings, answers) = folder.counts();
        assert_eq!(rings, generation);
        folder.tell(&format!("generation {generation}"));
        reads_right(&*store, &content);
        // By the new ring, not through the mount.
        assert!(folder.counts().1 >= answers + 10);
    }
}

#[test]
fn without_the_library_reads_go_through_the_mount() {
    let folder = Folder::new();
    let place = format!("3fs://{}/store", folder.path().display());
    let content = content();
    for url in [place.clone(), format!("{place}?usrbio=off")] {
        let store = open(&url).unwrap();
        let _ = put(&*store, "packs/ab/cd", &content);
        reads_right(&*store, &content);
        assert!(matches!(store::usrbio(&url), Some(Err(_))), "{url}");
    }
    assert_eq!(folder.counts(), (0, 0));
    // Who names a library wants it.
    let error = open(&format!("{place}?library=/no/such.so")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.chain().contains("/no/such.so"), "{}", error.chain());
    let error = open(&format!("3fs:///tmp?library={}", library().display())).unwrap_err();
    assert!(error.chain().contains("does not lie on a 3FS"), "{}", error.chain());
    let top = format!("3fs://{}", folder.path().display());
    assert_eq!(open(&top).unwrap_err().kind(), ErrorKind::Invalid);
    assert_eq!(store::usrbio(&folder.url()).unwrap().unwrap(), folder.path());
    assert!(store::usrbio("file:///tmp").is_none());
}

#[test]
fn a_client_that_saw_no_name_learns_of_the_name_of_another() {
    let tree = Shared::new();
    let (here, there) = (ThreeFsMount::of(&tree), ThreeFsMount::of(&tree));
    let at = |mount: &ThreeFsMount| {
        let path = mount.path().display();
        open(&format!("3fs://{path}/shared?library={}", library().display())).unwrap()
    };
    let (writer, reader) = (at(&here), at(&there));
    // Once in a directory that both know, once in one that the reader takes for absent.
    put(&*writer, "packs/first", b"first").unwrap();
    for name in ["packs/second", "layers/ab/third"] {
        assert_eq!(reader.size(&key(name)).unwrap_err().kind(), ErrorKind::NotFound);
        put(&*writer, name, &content()).unwrap();
        assert_eq!(reader.read_all(&key(name), 8 << 20).unwrap(), content(), "{name}");
        assert_eq!(put(&*reader, name, b"other").unwrap_err().kind(), ErrorKind::Exists);
    }
    let start = Barrier::new(2);
    for number in 0..20 {
        let name = format!("refs/base/x/{number}");
        let won: Vec<bool> = thread::scope(|scope| {
            let race = |store: &'static str| {
                let (backend, name, start) = match store {
                    "writer" => (&writer, &name, &start),
                    _ => (&reader, &name, &start),
                };
                scope.spawn(move || {
                    start.wait();
                    put(&**backend, name, store.as_bytes()).is_ok()
                })
            };
            let racers = [race("writer"), race("reader")];
            racers.into_iter().map(|racer| racer.join().unwrap()).collect()
        });
        assert_ne!(won[0], won[1], "exactly one wins");
        let winner: &[u8] = if won[0] { b"writer" } else { b"reader" };
        assert_eq!(writer.read_all(&key(&name), 9).unwrap(), winner);
        assert_eq!(reader.read_all(&key(&name), 9).unwrap(), winner);
    }
    drop((writer, reader));
    assert_eq!(tree.refused(), Vec::<&str>::new(), "something was asked that 3FS has not");
}
