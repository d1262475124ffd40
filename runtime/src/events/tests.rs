//! The log of events on disks that fill up, under writers that are killed, and before readers of every kind.

use super::files::path_of;
use super::record::{What, cut_all};
use super::*;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};
use sys::mount::{Attributes, Tmpfs, Unmount};

const SMALL: Rotation = Rotation { file_bytes: 4096, files: 4 };

fn open(folder: &Path, rotation: Rotation) -> Arc<EventLog> {
    EventLog::open(folder.join(FOLDER), rotation).unwrap()
}

/// Waits until the writer has written as many as this number.
fn written(log: &EventLog, number: u64) {
    let end = Instant::now() + Duration::from_secs(30);
    while log.written().borrow().last < number {
        assert!(Instant::now() < end, "{} of {number}", log.written().borrow().last);
        std::thread::sleep(Duration::from_millis(1));
    }
}

fn all(folder: &Path, filter: Filter) -> Vec<Event> {
    let mut reader = Reader::new(folder.join(FOLDER), filter);
    let mut found = Vec::new();
    loop {
        let before = reader.next();
        let events = reader.read(u64::MAX).unwrap();
        if events.is_empty() && reader.next() == before {
            return found;
        }
        found.extend(events);
    }
}

fn numbers(events: &[Event]) -> Vec<u64> {
    events.iter().map(|event| event.seq).collect()
}

fn network(word: &str) -> What {
    What::Network { allow: vec![word.to_owned()] }
}

#[test]
fn events_have_numbers_without_a_gap_across_nodes_and_are_for_their_owner_alone() {
    let folder = tempfile::tempdir().unwrap();
    for round in 0..3 {
        let log = open(folder.path(), Rotation::default());
        log.report("abc", &What::Running {});
        log.report("def", &network(&round.to_string()));
        log.close();
    }
    let events = all(folder.path(), Filter::default());
    assert_eq!(numbers(&events), (1..=12).collect::<Vec<u64>>());
    let kinds: Vec<&str> = events.iter().map(|event| event.kind.as_str()).collect();
    assert_eq!(kinds[..4], ["node_started", "running", "network", "node_ended"]);
    let of = Filter { sandbox: "ab".into(), after: 3, ..Filter::default() };
    assert_eq!(numbers(&all(folder.path(), of)), [6, 10]);
    let of = Filter { kinds: vec!["network".into()], ..Filter::default() };
    assert_eq!(numbers(&all(folder.path(), of)), [3, 7, 11]);
    let of = Filter { since_unix_ns: events[8].unix_ns, ..Filter::default() };
    assert!(numbers(&all(folder.path(), of)).starts_with(&[9, 10]));
    let place = folder.path().join(FOLDER);
    assert_eq!(std::fs::metadata(&place).unwrap().permissions().mode() & 0o777, 0o700);
    let file = std::fs::metadata(path_of(&place, 1)).unwrap();
    assert_eq!(file.permissions().mode() & 0o777, 0o600);
}

#[test]
fn a_torn_event_is_cut_off_and_its_number_used_again() {
    let folder = tempfile::tempdir().unwrap();
    let log = open(folder.path(), Rotation::default());
    log.report("abc", &What::Running {});
    log.close();
    let path = path_of(&folder.path().join(FOLDER), 1);
    let whole = std::fs::read(&path).unwrap();
    let lines = whole.iter().filter(|byte| **byte == b'\n').count() as u64;
    assert_eq!(lines, 3);
    // A killed writer can leave any part of a line, and a power cut zeros.
    let next = b"{\"seq\":4,\"unix_ns\":1,\"sandbox\":\"abc\",\"kind\":\"paused\"}\n";
    for torn in (1..next.len()).map(|at| next[..at].to_vec()).chain([vec![0; 10_000]]) {
        std::fs::write(&path, [&whole[..], &torn].concat()).unwrap();
        // Readers pass over it while nobody has cut it off.
        assert_eq!(numbers(&all(folder.path(), Filter::default())), [1, 2, 3]);
        let current = files::open(&folder.path().join(FOLDER)).unwrap();
        assert_eq!((current.next, current.bytes), (4, whole.len() as u64));
        assert_eq!(std::fs::read(&path).unwrap(), whole);
    }
}

#[test]
fn a_follower_reads_across_files_and_what_is_gone_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let log = open(folder.path(), SMALL);
    let mut reader = Reader::new(folder.path().join(FOLDER), Filter::default());
    let mut read = Vec::new();
    // More than is kept; the reader is there all the time.
    for number in 2..=400 {
        log.report("abc", &network("x"));
        if number % 7 == 0 {
            written(&log, number);
            let through = log.written().borrow().last;
            while reader.next() <= through {
                read.extend(reader.read(through).unwrap());
            }
        }
    }
    log.close();
    read.extend(reader.read(u64::MAX).unwrap());
    assert!(read.iter().all(|event| {
        ["node_started", "network", "expired", "node_ended"].contains(&event.kind.as_str())
    }));
    let expected: Vec<u64> = (1..=read.last().unwrap().seq).collect();
    assert_eq!(numbers(&read), expected);
    assert!(read.iter().any(|event| event.kind == "expired"), "the loss of a file is on record");
    // Whoever comes later is told what is missing.
    let late = all(folder.path(), Filter { sandbox: "none".into(), ..Filter::default() });
    assert_eq!(late[0].kind, "expired");
    let through: serde_json::Value = serde_json::from_str(&late[0].json).unwrap();
    let late = all(folder.path(), Filter { after: late[0].seq, ..Filter::default() });
    assert_eq!(through["through"].as_u64().unwrap() + 1, late[0].seq);
    assert_eq!(late.last().unwrap().seq, read.last().unwrap().seq);
    let kept = files::list(&folder.path().join(FOLDER)).unwrap();
    assert!(kept.len() <= SMALL.files, "{kept:?}");
    assert!(files::total_bytes(&folder.path().join(FOLDER)) < 2 * 4 * 4096 * 7);
}

#[test]
fn a_reader_sees_nothing_that_can_be_taken_back() {
    let folder = tempfile::tempdir().unwrap();
    let log = open(folder.path(), Rotation::default());
    log.report("abc", &What::Running {});
    written(&log, 2);
    let path = path_of(&folder.path().join(FOLDER), 1);
    let half = b"{\"seq\":3,\"unix_ns\":1,\"sandbox\":\"\",\"kind\":\"a\"}\n{\"seq\":4";
    let length = std::fs::metadata(&path).unwrap().len();
    let mut file = std::fs::File::options().append(true).open(&path).unwrap();
    file.write_all(half).unwrap();
    let mut reader = Reader::new(folder.path().join(FOLDER), Filter::default());
    assert_eq!(numbers(&reader.read(2).unwrap()), [1, 2]);
    assert!(reader.read(2).unwrap().is_empty());
    file.set_len(length).unwrap();
    log.report("abc", &What::Paused {});
    written(&log, 3);
    let events = reader.read(3).unwrap();
    assert_eq!((numbers(&events), events[0].kind.as_str()), (vec![3], "paused"));
}

#[test]
fn a_full_disk_loses_events_and_says_how_many() {
    let folder = tempfile::tempdir().unwrap();
    let place = folder.path().join(FOLDER);
    std::fs::create_dir(&place).unwrap();
    let _small = Small::mount(&place);
    let log = open(folder.path(), Rotation::default());
    let hog = place.join("hog");
    written(&log, 1);
    std::fs::write(&hog, vec![1; 56 << 10]).unwrap();
    let big = "x".repeat(4000);
    for _ in 0..20 {
        log.report("abc", &network(&big));
        std::thread::sleep(Duration::from_millis(2));
    }
    std::thread::sleep(Duration::from_millis(50));
    std::fs::remove_file(&hog).unwrap();
    let end = Instant::now() + Duration::from_secs(20);
    // Each is in the log or counted.
    while told_and_lost(folder.path()).iter().sum::<u64>() < 20 {
        assert!(Instant::now() < end, "the loss was never told");
        std::thread::sleep(Duration::from_millis(20));
    }
    log.close();
    let [told, lost] = told_and_lost(folder.path());
    assert!(told + lost == 20 && lost > 0, "{told} {lost}");
    let events = all(folder.path(), Filter::default());
    assert_eq!(numbers(&events), (1..=events.len() as u64).collect::<Vec<u64>>());
}

/// Events of a kind that are in the log, and those that are only counted there.
fn told_and_lost(folder: &Path) -> [u64; 2] {
    let (mut told, mut lost) = (0, 0);
    for event in all(folder, Filter::default()) {
        let json: serde_json::Value = serde_json::from_str(&event.json).unwrap();
        match event.kind.as_str() {
            "network" => told += 1,
            "dropped" => lost += json["count"].as_u64().unwrap(),
            _ => {}
        }
    }
    [told, lost]
}

/// A small disk in memory; goes with the value.
struct Small(std::path::PathBuf);

impl Small {
    fn mount(at: &Path) -> Self {
        let disk = Tmpfs { name: "test", mode: 0o700, size_bytes: Some(64 << 10), inodes: None };
        sys::mount::attach(&disk.mount_detached(Attributes::default()).unwrap(), at).unwrap();
        Self(at.to_owned())
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _gone = sys::mount::unmount(&self.0, Unmount::Lazy);
    }
}

#[test]
fn ten_thousand_events_are_taken_at_once_and_none_is_lost() {
    let folder = tempfile::tempdir().unwrap();
    let log = open(folder.path(), Rotation { file_bytes: 256 << 10, files: 100 });
    let threads: Vec<_> = (0..4)
        .map(|thread| {
            let log = Arc::clone(&log);
            std::thread::spawn(move || {
                let id = format!("s{thread}");
                for number in 0..2500 {
                    log.report(&id, &network(&number.to_string()));
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    log.close();
    let events = all(folder.path(), Filter::default());
    assert_eq!(events.len(), 10_002);
    for thread in 0..4 {
        // In the order of whoever reported them.
        let of = events.iter().filter(|event| event.sandbox == format!("s{thread}"));
        for (number, event) in of.enumerate() {
            assert!(event.json.contains(&format!("\"allow\":[\"{number}\"]")), "{}", event.json);
        }
    }
}

#[test]
fn a_full_buffer_holds_nobody_up_and_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let log = open(folder.path(), Rotation::default());
    let argv = cut_all(&["x".repeat(128 << 10)]);
    let long = What::Network { allow: argv };
    let reported = 5_000;
    for _ in 0..reported {
        log.report("abc", &long);
    }
    log.close();
    let total: u64 = told_and_lost(folder.path()).iter().sum();
    // `node_ended` may be among those that had no room.
    assert!((reported..=reported + 1).contains(&total), "{total}");
}
