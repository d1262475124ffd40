//! Tests of the parser, and of real events on the file system of the temporary folder.

use super::*;
use crate::memory::SharedMapping;
use crate::mount::{Attributes, Erofs, MountFd};
use crate::probe::{BLOCK_BYTES, Capability, skip_test, tiny_erofs_metadata};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::thread::JoinHandle;

fn record(mask: u64, number: i32) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(48u32.to_ne_bytes());
    bytes.extend([3, 0]);
    bytes.extend(24u16.to_ne_bytes());
    bytes.extend(mask.to_ne_bytes());
    bytes.extend(number.to_ne_bytes());
    bytes.extend(77i32.to_ne_bytes());
    bytes.extend([6, 0]);
    bytes.extend(24u16.to_ne_bytes());
    bytes.extend([0; 4]);
    bytes.extend(4096u64.to_ne_bytes());
    bytes.extend(65536u64.to_ne_bytes());
    bytes
}

#[test]
fn a_record_gives_its_numbers() {
    assert_eq!(
        parse_record(&record(FAN_PRE_ACCESS, 9)).unwrap(),
        Record::PreAccess(PreAccess { number: 9, pid: 77, offset: 4096, count: 65536 })
    );
    assert_eq!(parse_record(&record(FAN_Q_OVERFLOW, -1)).unwrap(), Record::Overflow);
    let foreign = Record::Foreign { number: Some(9) };
    assert_eq!(parse_record(&record(libc::FAN_OPEN_PERM, 9)).unwrap(), foreign);
    assert_eq!(
        parse_record(&record(FAN_PRE_ACCESS, -1)).unwrap(),
        Record::Foreign { number: None }
    );
}

#[test]
fn hostile_records_never_panic() {
    let good = record(FAN_PRE_ACCESS, 9);
    for length in 0..good.len() {
        let _ = parse_record(&good[..length]);
    }
    for index in 0..good.len() {
        for byte in [0, 1, 4, 24, 127, 255] {
            let mut bytes = good.clone();
            bytes[index] = byte;
            let _ = parse_record(&bytes);
        }
    }
    assert!(parse_record(&[0; EVENT_BYTES]).is_err());
}

/// Whether this host lacks what the test stands on; says so if it does.
fn skip(test: &str) -> bool {
    let needed = [Capability::ErofsFileBacked, Capability::FanotifyPreContent];
    skip_test(&format!("fanotify::tests::{test}"), &std::env::temp_dir(), &needed)
}

/// A lazily filled EROFS mount: the metadata, the sparse device and its right bytes.
struct Lazy {
    folder: tempfile::TempDir,
    group: Group,
    journal: SharedMapping,
    /// Opened before the mark.
    quiet: std::fs::File,
    mount: MountFd,
    bytes: Vec<u8>,
}

impl Lazy {
    fn new(block_bits: u8) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let (metadata, data) = (folder.path().join("meta"), folder.path().join("data"));
        std::fs::write(&metadata, tiny_erofs_metadata(block_bits)).unwrap();
        let quiet = std::fs::File::options()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&data)
            .unwrap();
        let bytes = pattern(BLOCK_BYTES << block_bits);
        quiet.set_len(bytes.len() as u64).unwrap();
        let group = Group::new().unwrap();
        group.mark(quiet.as_fd()).unwrap();
        let erofs = Erofs { metadata: &metadata, device: Some(&data) };
        let mount = erofs.mount_detached(Attributes::LAYER).unwrap();
        let journal = SharedMapping::create("journal", 4096).unwrap();
        Self { folder, group, journal, quiet, mount, bytes }
    }

    /// Starts a read of one range through the mount.
    fn read(&self, offset: usize, bytes: usize) -> JoinHandle<io::Result<Vec<u8>>> {
        let fd = self.mount.as_fd().try_clone_to_owned().unwrap();
        std::thread::spawn(move || {
            let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::CLOEXEC;
            let file = rustix::fs::openat(&fd, "data", flags, rustix::fs::Mode::empty())?;
            let mut read = vec![0; bytes];
            std::fs::File::from(file).read_exact_at(&mut read, offset as u64)?;
            Ok(read)
        })
    }

    fn take(&self, slot: usize) -> Event {
        assert!(self.group.wait(Some(Duration::from_secs(20))).unwrap(), "no event came");
        let slot = self.journal.region(slot * 64, EVENT_BYTES).unwrap();
        match self.group.read_into(slot).unwrap() {
            Taken::Event(event) => event,
            other => panic!("{other:?}"),
        }
    }

    fn fill(&self, access: PreAccess) {
        let (from, to) = self.range(access);
        self.quiet.write_all_at(&self.bytes[from..to], from as u64).unwrap();
    }

    fn range(&self, access: PreAccess) -> (usize, usize) {
        let from = access.offset as usize / BLOCK_BYTES * BLOCK_BYTES;
        let to = (access.offset + access.count) as usize;
        (from, to.next_multiple_of(BLOCK_BYTES).min(self.bytes.len()))
    }
}

fn pattern(bytes: usize) -> Vec<u8> {
    (0..bytes).map(|index| (index / 7 + index / BLOCK_BYTES * 13 + 1) as u8).collect()
}

#[test]
fn a_reader_gets_what_was_filled_before_the_answer() {
    if skip("a_reader_gets_what_was_filled_before_the_answer") {
        return;
    }
    let lazy = Lazy::new(8);
    let reader = lazy.read(5 * BLOCK_BYTES + 17, 1000);
    let event = lazy.take(0);
    assert!(event.offset() as usize <= 5 * BLOCK_BYTES && event.count() > 0);
    let (from, to) = lazy.range(event.access());
    // Through the event's own descriptor, which raises no event.
    let file = std::fs::File::from(event.file().try_clone_to_owned().unwrap());
    file.write_all_at(&lazy.bytes[from..to], from as u64).unwrap();
    assert!(event.allow().unwrap());
    let start = 5 * BLOCK_BYTES + 17;
    let read = finish(&lazy, reader, drop).unwrap();
    assert_eq!(read, lazy.bytes[start..start + 1000]);
}

/// Waits for a reader and answers its events meanwhile. A failed readahead is tried again page by page,
/// so one read can raise more than one event.
fn finish(
    lazy: &Lazy,
    reader: JoinHandle<io::Result<Vec<u8>>>,
    answer: impl Fn(Event),
) -> io::Result<Vec<u8>> {
    for _ in 0..2000 {
        if reader.is_finished() {
            return reader.join().unwrap();
        }
        if lazy.group.wait(Some(Duration::from_millis(10))).unwrap() {
            answer(lazy.take(0));
        }
    }
    panic!("the reader never came back");
}

#[test]
fn denials_and_drops_give_an_errno_and_never_bytes() {
    if skip("denials_and_drops_give_an_errno_and_never_bytes") {
        return;
    }
    let lazy = Lazy::new(10);
    let error = finish(&lazy, lazy.read(0, 10), drop).unwrap_err();
    assert_eq!(error.raw_os_error(), Some(libc::EIO));
    for (step, denial) in [Denial::NoSpace, Denial::Io, Denial::Again].into_iter().enumerate() {
        let reader = lazy.read((step + 1) * 64 * BLOCK_BYTES, 10);
        let error = finish(&lazy, reader, |event| assert!(event.deny(denial).unwrap()));
        // EROFS answers EIO to its reader, whatever its backing file answered.
        assert_eq!(error.unwrap_err().raw_os_error(), Some(libc::EIO));
    }
    // A denial is not remembered: the next reader asks again and gets the bytes.
    let reader = lazy.read(0, 10);
    let bytes = finish(&lazy, reader, |event| {
        lazy.fill(event.access());
        event.allow().unwrap();
    });
    assert_eq!(bytes.unwrap(), lazy.bytes[..10]);
}

#[test]
fn a_direct_reader_of_the_file_gets_the_errno_of_the_denial() {
    if skip("a_direct_reader_of_the_file_gets_the_errno_of_the_denial") {
        return;
    }
    let lazy = Lazy::new(8);
    let path = lazy.folder.path().join("data");
    for denial in [Denial::NoSpace, Denial::Quota, Denial::Busy, Denial::NotPermitted] {
        let path = path.clone();
        let reader = std::thread::spawn(move || {
            let mut byte = vec![0; 1];
            std::fs::File::open(path)?.read_exact_at(&mut byte, 0).map(|()| byte)
        });
        let error = finish(&lazy, reader, |event| assert!(event.deny(denial).unwrap()));
        assert_eq!(error.unwrap_err().raw_os_error(), Some(denial.errno()));
        assert_eq!(Denial::from_errno(denial.errno()), denial);
    }
    assert_eq!(Denial::from_errno(libc::ENOMEM), Denial::Io);
}

#[test]
fn a_successor_answers_by_number_from_the_journal() {
    if skip("a_successor_answers_by_number_from_the_journal") {
        return;
    }
    let lazy = Lazy::new(8);
    let reader = lazy.read(0, 3 * BLOCK_BYTES);
    // The process that read the event dies: nothing of the owner object runs.
    std::mem::forget(lazy.take(3));
    assert!(!reader.is_finished());

    let fd = lazy.journal.descriptor().try_clone_to_owned().unwrap();
    let journal = SharedMapping::open(fd).unwrap();
    let successor = Group::from_fd(lazy.group.descriptor().try_clone_to_owned().unwrap());
    let mut raw = [0; EVENT_BYTES];
    journal.region(3 * 64, EVENT_BYTES).unwrap().load(&mut raw);
    let Record::PreAccess(access) = parse_record(&raw).unwrap() else { panic!("no event") };
    lazy.fill(access);
    assert!(successor.respond_raw(access.number, Response::Allow).unwrap());
    assert!(!successor.respond_raw(access.number, Response::Allow).unwrap());
    assert_eq!(finish(&lazy, reader, drop).unwrap(), lazy.bytes[..3 * BLOCK_BYTES]);
    // SAFETY: the number is the descriptor that the forgotten event owned.
    drop(unsafe { OwnedFd::from_raw_fd(access.number) });
}

#[test]
fn one_read_takes_one_event_and_the_token_goes_before_the_descriptor() {
    if skip("one_read_takes_one_event_and_the_token_goes_before_the_descriptor") {
        return;
    }
    let lazy = Lazy::new(10);
    let readers = [lazy.read(0, 10), lazy.read(512 * BLOCK_BYTES, 10)];
    let mut first = lazy.take(0);
    let mut second = lazy.take(1);
    assert_ne!(first.access().number, second.access().number);
    struct StillOpen(RawFd);
    impl Drop for StillOpen {
        fn drop(&mut self) {
            assert!(Path::new(&format!("/proc/self/fd/{}", self.0)).exists());
        }
    }
    for event in [&mut first, &mut second] {
        let token = StillOpen(event.access().number);
        event.keep_until_answered(token);
        lazy.fill(event.access());
    }
    first.allow().unwrap();
    second.allow().unwrap();
    for reader in readers {
        finish(&lazy, reader, drop).unwrap();
    }
    lazy.group.set_nonblocking(true).unwrap();
    let slot = lazy.journal.region(0, EVENT_BYTES).unwrap();
    assert!(matches!(lazy.group.read_into(slot).unwrap(), Taken::Nothing));
    assert!(lazy.group.read_into(lazy.journal.region(0, EVENT_BYTES - 1).unwrap()).is_err());
}

#[test]
fn without_its_mark_a_complete_file_raises_no_event() {
    if skip("without_its_mark_a_complete_file_raises_no_event") {
        return;
    }
    let lazy = Lazy::new(8);
    lazy.quiet.write_all_at(&lazy.bytes, 0).unwrap();
    lazy.quiet.sync_data().unwrap();
    lazy.group.unmark(lazy.quiet.as_fd()).unwrap();
    let reader = lazy.read(0, lazy.bytes.len());
    assert_eq!(finish(&lazy, reader, drop).unwrap(), lazy.bytes);
    assert!(!lazy.group.wait(Some(Duration::ZERO)).unwrap());
    assert!(lazy.folder.path().exists());
}

#[test]
fn a_file_system_that_cannot_is_refused() {
    let mount = crate::mount::Tmpfs { name: "none", mode: 0o700, size_bytes: None, inodes: None }
        .mount_detached(Attributes::default())
        .unwrap();
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::CREATE;
    let mode = rustix::fs::Mode::from_raw_mode(0o600);
    let file = rustix::fs::openat(&mount, "file", flags, mode).unwrap();
    let error = Group::new().unwrap().mark(file.as_fd()).unwrap_err();
    assert!(matches!(error.raw_os_error(), Some(libc::EOPNOTSUPP | libc::EINVAL)), "{error}");
}
