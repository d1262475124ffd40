//! One suite that every backend must pass, plain or wrapped: what `store::Backend` promises.
#![allow(clippy::unwrap_used)]

mod places;

use layer::ErrorKind;
use places::on_every_backend;
use proptest::prelude::*;
use std::collections::BTreeMap;
use std::sync::Barrier;
use std::thread;
use store::{Backend, Key};

fn key(text: &str) -> Key {
    Key::new(text).unwrap()
}

fn put(store: &dyn Backend, name: &str, bytes: &[u8]) -> layer::Result<()> {
    let mut upload = store.create(&key(name))?;
    upload.write(bytes)?;
    upload.publish()
}

#[test]
fn what_was_published_is_read_back() {
    on_every_backend(|store| {
        let bytes: Vec<u8> = (0..3_000_000u32).map(|number| (number % 251) as u8).collect();
        let mut upload = store.create(&key("packs/ab/cd")).unwrap();
        for part in bytes.chunks(70_001) {
            upload.write(part).unwrap();
        }
        upload.write(b"").unwrap();
        upload.publish().unwrap();
        assert_eq!(store.size(&key("packs/ab/cd")).unwrap(), bytes.len() as u64);
        assert_eq!(store.read_all(&key("packs/ab/cd"), bytes.len() as u64).unwrap(), bytes);
        let mut part = vec![0; 100_000];
        store.read_at(&key("packs/ab/cd"), 2_900_000, &mut part).unwrap();
        assert_eq!(part, bytes[2_900_000..]);
        store.read_at(&key("packs/ab/cd"), 3_000_000, &mut []).unwrap();
        put(&*store, "empty", b"").unwrap();
        assert_eq!(store.read_all(&key("empty"), 0).unwrap(), b"");
    });
}

#[test]
fn wrong_ranges_and_names_are_errors_of_the_right_kind() {
    on_every_backend(|store| {
        put(&*store, "a/b", b"0123456789").unwrap();
        let kind = |result: layer::Result<()>| result.unwrap_err().kind();
        assert_eq!(kind(store.read_at(&key("a/b"), 5, &mut [0; 6])), ErrorKind::Corrupt);
        assert_eq!(kind(store.read_at(&key("a/b"), u64::MAX, &mut [0; 6])), ErrorKind::Corrupt);
        assert_eq!(kind(store.read_all(&key("a/b"), 9).map(drop)), ErrorKind::Corrupt);
        for absent in ["a", "a/c", "a/b/c", "b"] {
            assert_eq!(
                kind(store.read_at(&key(absent), 0, &mut [0])),
                ErrorKind::NotFound,
                "{absent}"
            );
            assert_eq!(
                kind(store.read_all(&key(absent), 9).map(drop)),
                ErrorKind::NotFound,
                "{absent}"
            );
            assert_eq!(kind(store.size(&key(absent)).map(drop)), ErrorKind::NotFound, "{absent}");
            store.delete(&key(absent)).unwrap_or_else(|error| panic!("{absent}: {error:?}"));
        }
        assert_eq!(kind(store.list("a", None, 9).map(drop)), ErrorKind::Invalid);
    });
}

#[test]
fn an_object_is_never_replaced() {
    on_every_backend(|store| {
        put(&*store, "x", b"first").unwrap();
        assert_eq!(put(&*store, "x", b"second").unwrap_err().kind(), ErrorKind::Exists);
        assert_eq!(store.read_all(&key("x"), 99).unwrap(), b"first");
        store.delete(&key("x")).unwrap();
        assert_eq!(store.size(&key("x")).unwrap_err().kind(), ErrorKind::NotFound);
        put(&*store, "x", b"third").unwrap();
        let mut bytes = [0; 5];
        store.read_at(&key("x"), 0, &mut bytes).unwrap();
        assert_eq!(&bytes, b"third");
    });
}

#[test]
fn what_is_not_published_is_not_there() {
    on_every_backend(|store| {
        let mut upload = store.create(&key("packs/half")).unwrap();
        upload.write(&[1; 3_000_000]).unwrap();
        assert_eq!(store.size(&key("packs/half")).unwrap_err().kind(), ErrorKind::NotFound);
        assert_eq!(store.list("", None, 9).unwrap(), Vec::<String>::new());
        drop(upload);
        assert_eq!(store.list("", None, 9).unwrap(), Vec::<String>::new());
        put(&*store, "packs/half", b"whole").unwrap();
        assert_eq!(store.list("", None, 9).unwrap(), ["packs/half"]);
    });
}

#[test]
fn of_many_publishers_of_one_name_exactly_one_wins() {
    on_every_backend(|store| {
        let start = Barrier::new(8);
        let winners: Vec<u8> = thread::scope(|scope| {
            let race = |number: u8| {
                let (store, start) = (&store, &start);
                scope.spawn(move || {
                    let mut upload = store.create(&key("refs/base/x/1")).unwrap();
                    upload.write(&[number; 100]).unwrap();
                    start.wait();
                    match upload.publish() {
                        Ok(()) => Some(number),
                        Err(error) if error.kind() == ErrorKind::Exists => None,
                        Err(error) => panic!("{error:?}"),
                    }
                })
            };
            let racers: Vec<_> = (0..8).map(race).collect();
            racers.into_iter().filter_map(|racer| racer.join().unwrap()).collect()
        });
        assert_eq!(winners.len(), 1);
        assert_eq!(store.read_all(&key("refs/base/x/1"), 100).unwrap(), [winners[0]; 100]);
    });
}

#[test]
fn listings_page_in_byte_order() {
    on_every_backend(|store| {
        let names = ["a", "b+c/1", "b-c", "b.c", "b/a/1", "b/a/2", "b/b", "b0", "c/1"];
        let mut sorted = names.to_vec();
        sorted.sort_unstable();
        for name in names {
            put(&*store, name, b"").unwrap();
        }
        assert_eq!(store.list("", None, 99).unwrap(), sorted);
        assert_eq!(store.list("b/", None, 99).unwrap(), ["b/a/1", "b/a/2", "b/b"]);
        assert_eq!(store.list("b/a/", Some("b/a/1"), 99).unwrap(), ["b/a/2"]);
        assert_eq!(store.list("z/", None, 99).unwrap(), Vec::<String>::new());
        let mut paged: Vec<String> = Vec::new();
        loop {
            let page = store.list("", paged.last().map(String::as_str), 2).unwrap();
            assert!(page.len() <= 2);
            if page.is_empty() {
                break;
            }
            paged.extend(page);
        }
        assert_eq!(paged, sorted);
    });
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// Against a map as the model, for any names, sizes and order.
    #[test]
    fn backends_behave_like_a_map_that_refuses_to_replace(
        steps in proptest::collection::vec(("[ab]{1,2}(/[ab.+-]?[ab]{1,2})?", 0..3u8, 0..5000usize), 1..40),
    ) {
        on_every_backend(|store| {
            let mut model: BTreeMap<String, Vec<u8>> = BTreeMap::new();
            for (number, (name, action, size)) in steps.iter().enumerate() {
                let Ok(key) = Key::new(name.as_str()) else { continue };
                let clash = |other: &String| {
                    other.starts_with(&format!("{name}/")) || name.starts_with(&format!("{other}/"))
                };
                if model.keys().any(clash) || name.contains('/') != name.starts_with('a') {
                    continue; // a name that is both object and prefix: no store of ours makes one
                }
                if *action == 2 {
                    store.delete(&key).unwrap();
                    model.remove(name);
                    continue;
                }
                let bytes = vec![number as u8; *size];
                match put(&*store, name, &bytes) {
                    Ok(()) => assert!(model.insert(name.clone(), bytes).is_none()),
                    Err(error) => {
                        assert_eq!(error.kind(), ErrorKind::Exists);
                        assert!(model.contains_key(name));
                    }
                }
            }
            assert_eq!(store.list("", None, 999).unwrap(), model.keys().cloned().collect::<Vec<_>>());
            for (name, bytes) in &model {
                assert_eq!(&store.read_all(&key(name), 5000).unwrap(), bytes);
            }
        });
    }
}
