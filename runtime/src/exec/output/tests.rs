//! Output in segments: bounds, gaps, readers, restarts.

use super::*;

fn new(folder: &Path, kept: u64) -> Arc<Output> {
    Arc::new(Output::new(folder.join("s-c"), kept, Arc::default()))
}

fn all(output: &Arc<Output>, offset: u64) -> (u64, Vec<u8>, Vec<u8>) {
    let mut reader = output.reader(offset);
    let (mut dropped, mut out, mut err) = (0, Vec::new(), Vec::new());
    while let Some(piece) = reader.now() {
        match piece {
            Piece::Data(false, data) => out.extend(data),
            Piece::Data(true, data) => err.extend(data),
            Piece::Dropped(count) => dropped += count,
        }
    }
    (dropped, out, err)
}

#[test]
fn output_is_read_from_any_offset_and_after_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let output = new(folder.path(), 0);
    output.add(false, b"hello ");
    output.add(true, b"oh");
    output.add(false, b"world");
    assert_eq!(all(&output, 0), (0, b"hello world".to_vec(), b"oh".to_vec()));
    assert_eq!(all(&output, 7), (0, b"world".to_vec(), b"h".to_vec()));
    assert_eq!(all(&output, 13), (0, Vec::new(), Vec::new()));
    // A torn frame at the end is as if it had never been.
    let path = output.path(0);
    let mut file = File::options().append(true).open(&path).unwrap();
    file.write_all(&[0, 9, 0, 0, 0, b'x']).unwrap();
    let shared = Arc::new(AtomicU64::new(0));
    let again = Output::reopen(folder.path().join("s-c"), 0, Arc::clone(&shared), vec![0]);
    let again = Arc::new(again);
    assert_eq!(again.range(), (0, 13));
    assert_eq!(all(&again, 0), (0, b"hello world".to_vec(), b"oh".to_vec()));
    again.add(false, b"!");
    assert_eq!(all(&again, 11), (0, b"ld!".to_vec(), Vec::new()));
    again.remove();
    assert_eq!(shared.load(Ordering::Relaxed), 0);
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
}

#[test]
fn the_oldest_goes_first_and_is_counted_also_of_many_small_pieces() {
    let folder = tempfile::tempdir().unwrap();
    let output = new(folder.path(), 1 << 20);
    for _ in 0..400_000 {
        output.add(false, b"x");
    }
    for _ in 0..40 {
        output.add(true, &[7; 100_000]);
    }
    let (first, end) = output.range();
    assert_eq!(end, 4_400_000);
    let (dropped, out, err) = all(&output, 0);
    assert_eq!(dropped, first);
    assert_eq!(out.len() as u64 + err.len() as u64, end - first);
    let on_disk: u64 = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().len())
        .sum();
    assert!(on_disk <= (1 << 20) + 4 * (MAX_FRAME_BYTES as u64 + 8), "{on_disk}");
    assert!(end - first >= 700_000, "{first}");
}

#[test]
fn a_reader_in_what_goes_away_is_told() {
    let folder = tempfile::tempdir().unwrap();
    let output = new(folder.path(), 1 << 20);
    output.add(false, &[1; 1000]);
    let mut slow = output.reader(0);
    assert!(matches!(slow.now(), Some(Piece::Data(false, _))));
    for _ in 0..100 {
        output.add(false, &[2; 60_000]);
    }
    let (first, end) = output.range();
    assert_eq!(slow.now(), Some(Piece::Dropped(first - 1000)));
    let mut rest = 0;
    while let Some(piece) = slow.now() {
        match piece {
            Piece::Data(_, data) => rest += data.len() as u64,
            Piece::Dropped(count) => panic!("{count} more were dropped"),
        }
    }
    assert_eq!(rest, end - first);
    output.remove();
    assert_eq!(slow.now(), None);
}

#[test]
fn what_cannot_be_written_is_a_gap_and_nothing_worse() {
    let folder = tempfile::tempdir().unwrap();
    let output = new(folder.path(), 1 << 20);
    output.add(false, b"before");
    // A file opened for reading refuses the write like a full disk does.
    output.lock().file = Some(Arc::new(File::open(output.path(0)).unwrap()));
    output.add(false, b"lost");
    output.add(false, b"after");
    let mut reader = output.reader(0);
    assert_eq!(reader.now(), Some(Piece::Data(false, Bytes::from_static(b"before"))));
    assert_eq!(reader.now(), Some(Piece::Dropped(4)));
    assert_eq!(reader.now(), Some(Piece::Data(false, Bytes::from_static(b"after"))));
    assert_eq!(reader.now(), None);
}

#[test]
fn a_sandbox_has_a_bound_for_all_its_commands() {
    let folder = tempfile::tempdir().unwrap();
    let shared = Arc::new(AtomicU64::new(MAX_SANDBOX_BYTES + 1));
    let output = Arc::new(Output::new(folder.path().join("s-c"), 64 << 20, shared));
    for _ in 0..1000 {
        output.add(false, &[3; 60_000]);
    }
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
}
