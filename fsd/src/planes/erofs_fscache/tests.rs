//! The protocol against a scripted peer: no kernel of ours has it, so the peer plays the kernel over a
//! socket pair that keeps message borders, as the device does.

use super::control::{CacheFile, Control, Received};
use super::events::Events;
use super::message::{Body, Message, Reply};
use super::objects::{Name, Part};
use super::{bind, culling};
use crate::cache::NodeCache;
use crate::fetch::{Engine, FetchLayer, FetchSettings, Locator, Source, StoreCounters};
use crate::planes::erofs_fanotify::events::EventCounters;
use crate::served::ServedLayer;
use layer::chunk::{BLOCK_BYTES, Chunk, ChunkTable};
use layer::layer_file::LayerFile;
use layer::location::{Locations, Placement};
use layer::manifest::{LayerKind, Manifest};
use layer::{ChunkDigest, LayerId, Result};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::Duration;
use store::Store;
use store::backend::fault::{Fault, FaultPlan};
use store::backend::memory::Memory;
use sys::cachefiles::MAX_MESSAGE_BYTES;
use sys::socket::Seqpacket;

const CHUNKS: usize = 24;
const CHUNK_BYTES: usize = 4 * BLOCK_BYTES as usize;
const DATA_BYTES: u64 = (CHUNKS * CHUNK_BYTES) as u64;
const METADATA_BYTES: usize = 5000;
const DOMAIN: &str = "test";
const PATIENCE: Duration = Duration::from_secs(30);

fn plain(chunk: usize) -> Vec<u8> {
    let word = (chunk as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (0..CHUNK_BYTES as u64 / 8)
        .flat_map(|at| (word ^ at.wrapping_mul(word)).to_le_bytes())
        .collect()
}

fn data(range: std::ops::Range<usize>) -> Vec<u8> {
    (0..CHUNKS).flat_map(plain).collect::<Vec<_>>()[range].to_vec()
}

fn publish(store: &Store) -> LayerId {
    let mut writer = store.pack_writer().unwrap();
    let mut chunks = Vec::new();
    for index in 0..CHUNKS {
        let (bytes, blocks) = (plain(index), CHUNK_BYTES as u32 / BLOCK_BYTES);
        let (codec, payload) = store::codec::encode_chunk(&bytes, 1);
        let digest = ChunkDigest::of(&bytes);
        writer.append(digest, codec, bytes.len() as u32, &payload).unwrap();
        chunks.push(Chunk { start_block: index as u32 * blocks, blocks, digest });
    }
    let sealed = writer.finish().unwrap();
    let place = |entry: &layer::pack::PackEntry| {
        let (offset, stored_bytes, codec) = (entry.offset, entry.stored_bytes, entry.codec);
        Some(Placement { pack: 0, offset, stored_bytes, codec })
    };
    let placements = sealed.entries.iter().map(place).collect();
    let chunk_table = ChunkTable::new(chunks).unwrap();
    let metadata = vec![7; METADATA_BYTES];
    let manifest = Manifest {
        directories: 1,
        ..Manifest::describing(LayerKind::Base, &chunk_table, &metadata)
    };
    let file = LayerFile { manifest, chunk_table, metadata };
    let (id, _) = store.put_layer(&file.encode().unwrap()).unwrap();
    store.put_locations(&id, &Locations { packs: vec![sealed.id], placements }).unwrap();
    id
}

struct NoLocator;

impl Locator for NoLocator {
    fn locate(&self, layer: &LayerId) -> Result<()> {
        Err(layer::Error::new(layer::ErrorKind::Unavailable, format!("no imaged for {layer}")))
    }
}

/// The daemon's end of the socket pair.
struct Wire {
    socket: Arc<Seqpacket>,
    refuses: AtomicBool,
    dies: AtomicBool,
    short_rounds: AtomicUsize,
    busy: &'static str,
}

impl Control for Wire {
    fn receive(&self, into: &mut [u8]) -> io::Result<Option<Received>> {
        let Some(message) = self.socket.receive(into.len(), 1)? else { return Ok(None) };
        if self.dies.swap(false, Ordering::SeqCst) {
            return Ok(None);
        }
        into[..message.bytes.len()].copy_from_slice(&message.bytes);
        let file = message.descriptors.into_iter().next().map(|fd| {
            let (file, socket) = (File::from(fd), Arc::clone(&self.socket));
            Box::new(PeerFile { file, socket }) as Box<dyn CacheFile>
        });
        Ok(Some(Received { bytes: message.bytes.len(), file }))
    }

    fn command(&self, text: &str) -> io::Result<()> {
        self.socket.send(text.as_bytes(), &[])?;
        match self.refuses.load(Ordering::SeqCst) {
            true => Err(io::Error::from_raw_os_error(22)),
            false => Ok(()),
        }
    }

    fn is_short_of_room(&self) -> io::Result<bool> {
        let left = self.short_rounds.load(Ordering::SeqCst);
        Ok(left > 0)
    }

    fn cull(&self, folder: &Path, name: &str) -> io::Result<()> {
        let place = folder.file_name().unwrap().to_str().unwrap().to_owned();
        self.socket.send(format!("cull {place}/{name}").as_bytes(), &[])?;
        if name == self.busy {
            return Err(io::Error::from_raw_os_error(16));
        }
        self.short_rounds.fetch_sub(1, Ordering::SeqCst);
        Ok(())
    }
}

/// A cache file: what is written lands in memory that the peer sees, and the peer hears of the rest.
struct PeerFile {
    file: File,
    socket: Arc<Seqpacket>,
}

impl CacheFile for PeerFile {
    fn write_at(&self, bytes: &[u8], offset: u64) -> io::Result<()> {
        assert!(
            offset.is_multiple_of(4096) && bytes.len().is_multiple_of(4096),
            "O_DIRECT refuses"
        );
        self.file.write_all_at(bytes, offset)
    }

    fn complete(&self, number: u32) -> io::Result<()> {
        self.socket.send(format!("complete {number}").as_bytes(), &[])
    }
}

impl Drop for PeerFile {
    fn drop(&mut self) {
        // The peer may be gone.
        let _ = self.socket.send(b"gone", &[]);
    }
}

/// The peer that plays the kernel, and the daemon that it talks to.
struct Peer {
    socket: Seqpacket,
    wire: Arc<Wire>,
    events: Arc<Events>,
    served: Arc<ServedLayer>,
    fault: Arc<Fault>,
    engine: Engine,
    counters: Arc<EventCounters>,
    id: LayerId,
    folder: tempfile::TempDir,
    thread: Option<JoinHandle<()>>,
}

impl Peer {
    fn new() -> Self {
        Self::with_deadline(PATIENCE)
    }

    fn with_deadline(deadline: Duration) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let fault = Arc::new(Fault::new(Arc::new(Memory::new()), FaultPlan::default()));
        let store = Arc::new(Store::open(Arc::clone(&fault) as Arc<dyn store::Backend>).unwrap());
        let id = publish(&store);
        let cache = NodeCache::open(folder.path(), Default::default()).unwrap();
        let cached = Arc::new(cache.open_layer(&id, &store, None).unwrap());
        let counters = Arc::new(StoreCounters::default());
        let source = Source::new(id, CHUNKS, store, Arc::new(NoLocator), counters);
        let settings = FetchSettings { deadline, full_disk_deadline: deadline, threads: 4 };
        let engine = Engine::start(settings, cache.space().clone()).unwrap();
        let served = ServedLayer::new(FetchLayer::new(cached, source), false, Arc::default());
        let (socket, end) = Seqpacket::pair().unwrap();
        socket.set_timeout(Some(PATIENCE)).unwrap();
        let wire = Arc::new(Wire {
            socket: Arc::new(end),
            refuses: AtomicBool::new(false),
            dies: AtomicBool::new(false),
            short_rounds: AtomicUsize::new(0),
            busy: "Dbusy",
        });
        let counters = Arc::new(EventCounters::default());
        let control = Arc::clone(&wire) as Arc<dyn Control>;
        let events = Events::new(control, DOMAIN, engine.clone(), Arc::clone(&counters));
        assert!(events.layers().insert(&served));
        let thread = Some(start(&events));
        Self { socket, wire, events, served, fault, engine, counters, id, folder, thread }
    }

    /// The daemon dies with the next message, and another one takes its place.
    fn daemon_dies_on(&mut self, message: &[u8]) {
        self.wire.dies.store(true, Ordering::SeqCst);
        self.say(message);
        self.thread.take().unwrap().join().unwrap();
        let control = Arc::clone(&self.wire) as Arc<dyn Control>;
        let (engine, counters) = (self.engine.clone(), Arc::clone(&self.counters));
        self.events = Events::new(control, DOMAIN, engine, counters);
        assert!(self.events.layers().insert(&self.served));
        self.thread = Some(start(&self.events));
    }

    fn hears(&self) -> String {
        let message = self.socket.receive(MAX_MESSAGE_BYTES, 0).unwrap().unwrap();
        String::from_utf8(message.bytes).unwrap()
    }

    #[track_caller]
    fn expect(&self, text: &str) {
        assert_eq!(self.hears(), text);
    }

    fn say(&self, bytes: &[u8]) {
        self.socket.send(bytes, &[]).unwrap();
    }

    /// Opens a cache file that the daemon fills and the peer sees.
    fn open(&self, number: u32, object: u32, volume: &str, cookie: &str) -> File {
        let memory = File::from(sys::memory::memfd("cache file").unwrap());
        self.socket.send(&open_message(number, object, volume, cookie), &[memory.as_fd()]).unwrap();
        memory
    }

    /// Opens a part of the layer under the number of the message.
    fn open_part(&self, number: u32, part: Part) -> File {
        let name = Name { layer: self.id, part }.to_string();
        let file = self.open(number, number, &format!("erofs,{DOMAIN}"), &name);
        let bytes = if part == Part::Data { DATA_BYTES } else { METADATA_BYTES as u64 };
        self.expect(&format!("copen {number},{bytes}"));
        file
    }

    fn errors(&self) -> u64 {
        self.counters.errors.load(Ordering::Relaxed)
    }

    /// That the daemon still serves: an opening is answered.
    fn still_serves(&self) {
        self.open_part(999, Part::Data);
        self.say(&message(998, 1, 999, &[]));
        self.expect("gone");
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // The daemon sees the end of its messages.
        let (unused, _) = Seqpacket::pair().unwrap();
        drop(std::mem::replace(&mut self.socket, unused));
        if let Some(thread) = self.thread.take() {
            let ended = thread.join();
            assert!(ended.is_ok() || std::thread::panicking(), "the daemon died");
        }
    }
}

fn start(events: &Arc<Events>) -> JoinHandle<()> {
    let events = Arc::clone(events);
    std::thread::spawn(move || events.run())
}

fn message(number: u32, opcode: u32, object: u32, payload: &[u8]) -> Vec<u8> {
    let length = 16 + payload.len() as u32;
    let mut bytes: Vec<u8> =
        [number, opcode, length, object].iter().flat_map(|word| word.to_ne_bytes()).collect();
    bytes.extend_from_slice(payload);
    bytes
}

fn open_message(number: u32, object: u32, volume: &str, cookie: &str) -> Vec<u8> {
    let sizes = [volume.len() as u32 + 1, cookie.len() as u32, 77, 0];
    let mut payload: Vec<u8> = sizes.iter().flat_map(|word| word.to_ne_bytes()).collect();
    payload.extend_from_slice(volume.as_bytes());
    payload.push(0);
    payload.extend_from_slice(cookie.as_bytes());
    message(number, 0, object, &payload)
}

fn read_message(number: u32, object: u32, offset: u64, bytes: u64) -> Vec<u8> {
    let payload: Vec<u8> = [offset, bytes].iter().flat_map(|long| long.to_ne_bytes()).collect();
    message(number, 2, object, &payload)
}

fn content(file: &File, range: std::ops::Range<usize>) -> Vec<u8> {
    let mut bytes = vec![0; range.len()];
    let mut read = 0;
    while let Ok(count @ 1..) = file.read_at(&mut bytes[read..], (range.start + read) as u64) {
        read += count;
    }
    bytes.truncate(read);
    bytes
}

#[test]
fn objects_are_opened_read_and_closed() {
    let peer = Peer::new();
    let metadata = peer.open_part(1, Part::Metadata(0));
    let file = peer.open_part(2, Part::Data);
    peer.say(&read_message(3, 1, 0, 8192));
    peer.expect("complete 3");
    let mut expected = vec![7; METADATA_BYTES];
    expected.resize(8192, 0);
    assert_eq!(content(&metadata, 0..9000), expected, "whole blocks, zeros behind the end");
    let range = 3 * CHUNK_BYTES - 4096..6 * CHUNK_BYTES + 4096;
    peer.say(&read_message(4, 2, range.start as u64, range.len() as u64));
    peer.expect("complete 4");
    assert!(content(&file, range.clone()) == data(range));
    // Ranges inside of a block, and ranges that go beyond the end.
    peer.say(&read_message(5, 2, 100, 50));
    peer.expect("complete 5");
    assert!(content(&file, 0..4096) == data(0..4096));
    peer.say(&read_message(6, 2, DATA_BYTES - 4096, 1 << 40));
    peer.expect("complete 6");
    let last = (DATA_BYTES - 4096) as usize..DATA_BYTES as usize;
    assert!(content(&file, last.clone()) == data(last));
    peer.say(&read_message(7, 2, DATA_BYTES + 4096, 4096));
    peer.expect("complete 7");
    assert_eq!(file.metadata().unwrap().len(), DATA_BYTES, "nothing is written behind the end");
    assert_eq!(peer.events.objects().parts(&peer.id).len(), 2);
    for (number, object) in [(8, 1), (9, 2)] {
        peer.say(&message(number, 1, object, &[]));
        peer.expect("gone");
    }
    assert!(peer.events.objects().parts(&peer.id).is_empty());
    assert_eq!(peer.errors(), 0);
}

#[test]
fn what_cannot_be_opened_is_refused_with_an_errno() {
    let peer = Peer::new();
    let volume = format!("erofs,{DOMAIN}");
    let name = Name { layer: peer.id, part: Part::Data }.to_string();
    let unknown = format!("{}.data", "ab".repeat(32));
    for (number, (volume, cookie)) in [
        ("erofs,other", name.as_str()),
        (&volume, &unknown),
        (&volume, "garbage"),
        (&volume, &name.replace("data", "meta-x")),
        (&volume, ""),
        ("", &name),
    ]
    .into_iter()
    .enumerate()
    {
        peer.open(number as u32, 5, volume, cookie);
        // Given up before or after it is answered: both end the same way.
        let mut heard = [peer.hears(), peer.hears()];
        heard.sort();
        assert_eq!(heard, [format!("copen {number},-2"), "gone".to_owned()], "{cookie}");
    }
    peer.say(&open_message(30, 5, &volume, &name));
    peer.expect("copen 30,-22");
    assert_eq!(peer.errors(), 7);
    peer.events.layers().remove(&peer.id);
    peer.open(31, 5, &volume, &name);
    peer.expect("gone");
    peer.expect("copen 31,-2");
    peer.events.layers().insert(&peer.served);
    peer.still_serves();
}

#[test]
fn malformed_messages_end_the_wait_of_their_sender_and_nothing_else() {
    let peer = Peer::new();
    let file = peer.open_part(1, Part::Data);
    let volume = format!("erofs,{DOMAIN}");
    let name = Name { layer: peer.id, part: Part::Data }.to_string();
    // Every cut of an opening that leaves a header.
    let whole = open_message(2, 2, &volume, &name);
    for length in 16..whole.len() {
        peer.say(&whole[..length]);
        peer.expect("copen 2,-22");
    }
    // Right length, keys that do not fill it or lack their zero byte.
    for (at, value) in [(16, 0u32), (16, u32::MAX), (20, 7), (20, u32::MAX)] {
        let mut bytes = whole.clone();
        bytes[at..at + 4].copy_from_slice(&value.to_ne_bytes());
        peer.say(&bytes);
        peer.expect("copen 2,-22");
    }
    // Every cut of a read, ranges that are none.
    let whole = read_message(3, 1, 0, 4096);
    for length in 16..whole.len() {
        peer.say(&whole[..length]);
        peer.expect("complete 3");
    }
    for (offset, bytes) in [(0, 0), (u64::MAX, 1), (1 << 62, 1 << 62), (4096, u64::MAX)] {
        peer.say(&read_message(4, 1, offset, bytes));
        peer.expect("complete 4");
    }
    assert_eq!(file.metadata().unwrap().len(), 0, "nothing was written");
    // Nobody can be answered: cut headers, unknown kinds, a close with a payload.
    for length in 1..16 {
        peer.say(&whole[..length]);
    }
    peer.say(&message(5, 3, 1, &[]));
    peer.say(&message(5, u32::MAX, 1, &[9; 100]));
    peer.say(&message(5, 1, 1, &[9]));
    peer.still_serves();
}

#[test]
fn any_bytes_are_a_message_or_refused() {
    let mut word = 88_172_645_463_325_252_u64;
    let mut next = || {
        word ^= word << 13;
        word ^= word >> 7;
        word ^= word << 17;
        word
    };
    for _ in 0..100_000 {
        let length = next() as usize % 120;
        let mut bytes: Vec<u8> = (0..length).map(|_| next() as u8).collect();
        if length >= 24 && next() % 4 > 0 {
            bytes[4..8].copy_from_slice(&((next() % 4) as u32).to_ne_bytes());
            bytes[8..12].copy_from_slice(&(length as u32).to_ne_bytes());
            bytes[16..20].copy_from_slice(&((next() % 64) as u32).to_ne_bytes());
            bytes[20..24].copy_from_slice(&((next() % 64) as u32).to_ne_bytes());
        }
        match Message::parse(&bytes).map(|message| message.body) {
            Ok(Body::Open { volume, cookie }) => {
                assert_eq!(32 + volume.len() + 1 + cookie.len(), length);
            }
            Ok(Body::Read { offset, bytes }) => assert!(bytes > 0 && offset + bytes < 1 << 63),
            Ok(Body::Close) => assert_eq!(length, 16),
            Err(malformed) => assert!(!malformed.why.is_empty()),
        }
    }
    assert_eq!(Message::parse(&[]).unwrap_err().reply, Reply::Nothing);
}

#[test]
fn unknown_objects_are_survived() {
    let peer = Peer::new();
    peer.say(&read_message(1, 40, 0, 4096));
    peer.say(&message(2, 1, 41, &[]));
    peer.still_serves();
    assert_eq!(peer.errors(), 1);
}

#[test]
fn a_read_whose_bytes_do_not_come_ends_without_any_and_can_be_repeated() {
    let peer = Peer::with_deadline(Duration::from_millis(300));
    let file = peer.open_part(1, Part::Data);
    let plan = |error_per_mille| FaultPlan { error_per_mille, ..FaultPlan::default() };
    peer.fault.set_plan(plan(1000));
    peer.say(&read_message(2, 1, 0, 4096));
    peer.expect("complete 2");
    assert_eq!(file.metadata().unwrap().len(), 0, "no byte that was not verified");
    assert_eq!(peer.errors(), 1);
    peer.fault.set_plan(plan(0));
    peer.say(&read_message(3, 1, 0, 4096));
    peer.expect("complete 3");
    assert!(content(&file, 0..4096) == data(0..4096));
}

#[test]
fn many_readers_of_one_range_are_each_let_go() {
    let peer = Peer::new();
    let file = peer.open_part(1, Part::Data);
    for number in 100..140 {
        peer.say(&read_message(number, 1, 0, DATA_BYTES));
    }
    let mut heard: Vec<String> = (100..140).map(|_| peer.hears()).collect();
    heard.sort();
    assert_eq!(heard, (100..140).map(|number| format!("complete {number}")).collect::<Vec<_>>());
    assert!(content(&file, 0..DATA_BYTES as usize) == data(0..DATA_BYTES as usize));
    assert_eq!(peer.engine.counters().fills.load(Ordering::Relaxed), CHUNKS as u64);
}

#[test]
fn a_close_during_a_read_leaves_the_file_to_the_read() {
    let peer = Peer::new();
    let file = peer.open_part(1, Part::Data);
    let away = peer.folder.path().join("away");
    std::fs::write(&away, "").unwrap();
    let plan = FaultPlan { away_while_exists: Some(away.clone()), ..FaultPlan::default() };
    peer.fault.set_plan(plan);
    peer.say(&read_message(2, 1, 0, 4096));
    peer.say(&message(3, 1, 1, &[]));
    // The close has been taken once the next message is answered.
    peer.open_part(4, Part::Metadata(0));
    assert_eq!(peer.events.objects().parts(&peer.id), [Part::Metadata(0)]);
    std::fs::remove_file(&away).unwrap();
    peer.expect("complete 2");
    peer.expect("gone");
    assert!(content(&file, 0..4096) == data(0..4096));
}

#[test]
fn a_second_opening_serves_beside_the_first_until_both_are_closed() {
    let peer = Peer::new();
    let first = peer.open_part(1, Part::Data);
    let second = peer.open_part(2, Part::Data);
    for (number, object, file) in [(3, 1, &first), (4, 2, &second)] {
        peer.say(&read_message(number, object, 4096, 4096));
        peer.expect(&format!("complete {number}"));
        assert!(content(file, 4096..8192) == data(4096..8192));
    }
    peer.say(&message(5, 1, 2, &[]));
    peer.expect("gone");
    peer.expect("gone");
    assert!(peer.events.objects().parts(&peer.id).is_empty());
    // The same number again: what had it is given up.
    peer.open_part(6, Part::Data);
    let name = Name { layer: peer.id, part: Part::Metadata(1) }.to_string();
    peer.open(7, 6, &format!("erofs,{DOMAIN}"), &name);
    peer.expect("gone");
    peer.expect(&format!("copen 7,{METADATA_BYTES}"));
}

#[test]
fn a_successor_serves_what_is_opened_again() {
    let mut peer = Peer::new();
    peer.open_part(1, Part::Data);
    peer.daemon_dies_on(&read_message(2, 1, 0, 4096));
    peer.expect("gone");
    // An old kernel repeats the read alone: it cannot be answered, and the service goes on.
    peer.say(&read_message(2, 1, 0, 4096));
    // One with `restore` opens the object again first, under a new number.
    let file = peer.open_part(3, Part::Data);
    peer.say(&read_message(2, 3, 0, 4096));
    peer.expect("complete 2");
    assert!(content(&file, 0..4096) == data(0..4096));
    assert_eq!(peer.errors(), 1);
}

#[test]
fn an_opening_that_nobody_waits_for_is_forgotten() {
    let peer = Peer::new();
    peer.wire.refuses.store(true, Ordering::SeqCst);
    peer.open_part(1, Part::Data);
    peer.expect("gone");
    peer.wire.refuses.store(false, Ordering::SeqCst);
    assert!(peer.events.objects().parts(&peer.id).is_empty());
    peer.still_serves();
}

#[test]
fn a_cache_is_bound_on_demand() {
    let peer = Peer::new();
    bind(&*peer.wire, Path::new("/var/lib/x/fscache")).unwrap();
    peer.expect("dir /var/lib/x/fscache");
    peer.expect("tag lamella");
    peer.expect("bind ondemand");
    assert!(bind(&*peer.wire, Path::new("/a b")).is_err(), "commands end at a space");
    peer.wire.refuses.store(true, Ordering::SeqCst);
    assert!(bind(&*peer.wire, Path::new("/x")).is_err());
    peer.expect("dir /x");
}

#[test]
fn the_file_that_was_not_read_for_longest_is_culled_first() {
    let peer = Peer::new();
    let cache = peer.folder.path().join("kernel");
    let made = Mutex::new(0);
    let file = |place: &str, name: &str, accessed: i64| {
        let folder = cache.join("cache/Ierofs,x").join(place);
        std::fs::create_dir_all(&folder).unwrap();
        let file = File::create(folder.join(name)).unwrap();
        let at = std::time::UNIX_EPOCH + Duration::from_secs(accessed as u64);
        file.set_times(std::fs::FileTimes::new().set_accessed(at)).unwrap();
        *made.lock().unwrap() += 1;
    };
    for (place, name, accessed) in
        [("@00", "Dnew", 90), ("@00", "Dold", 10), ("@1f", "Dbusy", 20), ("@1f", "Dmiddle", 50)]
    {
        file(place, name, accessed);
    }
    assert_eq!(culling::cull(&*peer.wire, &cache).unwrap(), 0, "there is room");
    peer.wire.short_rounds.store(2, Ordering::SeqCst);
    assert_eq!(culling::cull(&*peer.wire, &cache).unwrap(), 2);
    for name in ["@00/Dold", "@1f/Dbusy", "@1f/Dmiddle"] {
        peer.expect(&format!("cull {name}"));
    }
    peer.wire.short_rounds.store(9, Ordering::SeqCst);
    assert_eq!(culling::cull(&*peer.wire, &cache).unwrap(), 3, "ends with the last file");
}

#[test]
fn names_round_trip_and_others_are_refused() {
    let layer = LayerId([0xab; 32]);
    for part in [Part::Data, Part::Metadata(0), Part::Metadata(u32::MAX)] {
        let name = Name { layer, part };
        assert_eq!(name.to_string().parse::<Name>().unwrap(), name);
    }
    for bad in ["", ".", "x.data", "data", &format!("{layer}.meta-"), &format!("{layer}.data.data")]
    {
        assert!(bad.parse::<Name>().is_err(), "{bad:?}");
    }
}
