//! Answering cachefiles: which objects exist and how long they are, and the bytes of what is read.
//!
//! ```text
//! OPEN --> name and layer known --> `copen <message>,<length>`; otherwise `copen <message>,-<errno>`
//! READ --> bytes verified --> written to the cache file --> read-complete
//!          no bytes       --> read-complete alone: the kernel finds its hole still there, and the
//!                             reader gets EIO
//! CLOSE --> forgotten; reads that run end on the file that they hold
//! ```
//! An object that the kernel opens a second time (its cache file was withdrawn, or a daemon before us
//! died) comes under a new number; both are good until it is closed.
//!
//! Locking: see `objects`; nothing is held over I/O.
//! What survives a crash: what is in the cache files. With the last descriptor of the device gone,
//! readers get EIO (closed, never zeros). Nobody keeps one beside fsd so far. Nothing here would be in the
//! way: after a `restore` (6.8) the kernel opens objects again and repeats what was not answered, and
//! neither needs anything that the dead one knew.
// INVARIANT: only verified bytes are written to a cache file, and a reader goes only after they are.

use super::control::{CacheFile, Control, Received};
use super::message::{Body, Malformed, Message, Reply};
use super::objects::{Content, Layers, Name, Object, Objects, read_local};
use crate::fetch::Engine;
use crate::planes::erofs_fanotify::events::EventCounters;
use crate::reads;
use layer::chunk::BLOCK_BYTES;
use layer::{Context, Error, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use sys::cachefiles::MAX_MESSAGE_BYTES;

/// More than this is not read at once; the kernel asks for the rest again.
const MAX_READ_BYTES: u64 = 16 << 20;
/// Pause after a message that could not be taken, so that a broken device costs little.
const BROKEN_PAUSE: Duration = Duration::from_millis(10);

/// Answers the messages of one cache.
pub struct Events {
    control: Arc<dyn Control>,
    volume: String,
    layers: Layers,
    objects: Objects,
    engine: Engine,
    counters: Arc<EventCounters>,
}

impl Events {
    /// Serves the domain `domain` of what `control` gives.
    pub fn new(
        control: Arc<dyn Control>,
        domain: &str,
        engine: Engine,
        counters: Arc<EventCounters>,
    ) -> Arc<Self> {
        let (layers, objects) = (Layers::default(), Objects::default());
        let volume = format!("erofs,{domain}");
        Arc::new(Self { control, volume, layers, objects, engine, counters })
    }

    /// Where messages come from.
    pub fn control(&self) -> &Arc<dyn Control> {
        &self.control
    }

    /// What may be opened.
    pub fn layers(&self) -> &Layers {
        &self.layers
    }

    /// What is open.
    pub fn objects(&self) -> &Objects {
        &self.objects
    }

    /// Answers until there are no messages any more.
    pub fn run(&self) {
        let mut buffer = [0; MAX_MESSAGE_BYTES];
        loop {
            match self.control.receive(&mut buffer) {
                Ok(Some(Received { bytes, file })) => self.answer(&buffer[..bytes], file),
                Ok(None) => return,
                Err(error) => {
                    // The kernel has answered such a message itself.
                    tracing::error!(%error, "a message of cachefiles could not be taken");
                    self.counters.errors.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(BROKEN_PAUSE);
                }
            }
        }
    }

    fn answer(&self, bytes: &[u8], file: Option<Box<dyn CacheFile>>) {
        self.counters.events.fetch_add(1, Ordering::Relaxed);
        let message = match Message::parse(bytes) {
            Ok(message) => message,
            Err(Malformed { why, reply }) => {
                tracing::error!(why, "a message of cachefiles is malformed");
                return self.refuse(reply);
            }
        };
        match message.body {
            Body::Open { volume, cookie } => {
                let opened = self.open(message.object, volume, cookie, file);
                self.answer_open(message, &opened);
            }
            Body::Read { offset, bytes } => self.read(message, offset, bytes),
            Body::Close => {
                if self.objects.close(message.object).is_none() {
                    tracing::warn!(object = message.object, "an unknown cache file is closed");
                }
            }
        }
    }

    fn refuse(&self, reply: Reply) {
        self.counters.errors.fetch_add(1, Ordering::Relaxed);
        match reply {
            Reply::Nothing => {}
            Reply::RefuseOpen(number) => {
                self.command_open(number, -i64::from(rustix::io::Errno::INVAL.raw_os_error()));
            }
            Reply::EndRead { number, object } => match self.objects.find(object) {
                Some(object) => end_read(&object, number),
                None => tracing::error!(object, number, "a read of an unknown cache file waits"),
            },
        }
    }

    /// Notes an object as open. Answers its length.
    fn open(
        &self,
        number: u32,
        volume: &[u8],
        cookie: &[u8],
        file: Option<Box<dyn CacheFile>>,
    ) -> Result<u64> {
        if volume != self.volume.as_bytes() {
            let volume = String::from_utf8_lossy(volume);
            return Err(Error::not_found(format!("volume {volume:?} is not ours")));
        }
        let name: Name = String::from_utf8_lossy(cookie).parse()?;
        let layer = self.layers.find(&name.layer)?;
        let file = file.ok_or_else(|| Error::invalid(format!("no file came for {name}")))?;
        let content = Content::of(&layer, name.part)?;
        let bytes = content.bytes(&layer);
        let object = Arc::new(Object { name, layer, content, file });
        if let Some(former) = self.objects.insert(number, object) {
            tracing::warn!(number, former = %former.name, now = %name, "a number is used again");
        }
        Ok(bytes)
    }

    fn answer_open(&self, message: Message<'_>, opened: &Result<u64>) {
        let size = match opened {
            Ok(bytes) => *bytes as i64,
            Err(error) => {
                tracing::error!(error = %error.chain(), "a cache file is refused");
                self.counters.errors.fetch_add(1, Ordering::Relaxed);
                -i64::from(error.kind().errno())
            }
        };
        let told = self.command_open(message.number, size);
        if opened.is_ok() && !told {
            self.objects.remove(message.object);
        }
    }

    fn command_open(&self, number: u32, size: i64) -> bool {
        let told = self.control.command(&format!("copen {number},{size}"));
        if let Err(error) = &told {
            tracing::warn!(%error, number, "nobody waits for this cache file any more");
        }
        told.is_ok()
    }

    fn read(&self, message: Message<'_>, offset: u64, bytes: u64) {
        let number = message.number;
        let Some(object) = self.objects.find(message.object) else {
            return self.refuse(Reply::EndRead { number, object: message.object });
        };
        let block = u64::from(BLOCK_BYTES);
        let start = offset - offset % block;
        let end = (offset + bytes).next_multiple_of(block).min(start + MAX_READ_BYTES);
        let counters = Arc::clone(&self.counters);
        let owner = Arc::clone(&object);
        let answer = move |content: Result<Vec<u8>>| {
            if let Err(error) = content.and_then(|content| fill(&owner, start, &content)) {
                tracing::error!(error = %error.chain(), name = %owner.name, "a read is refused");
                counters.errors.fetch_add(1, Ordering::Relaxed);
            }
            end_read(&owner, number);
        };
        match &object.content {
            Content::Local(file, length) => answer(read_local(file, *length, start, end - start)),
            Content::Fetched => {
                reads::read(&self.engine, &object.layer, start, end - start, answer);
            }
        }
    }
}

fn fill(object: &Object, offset: u64, content: &[u8]) -> Result<()> {
    let written = object.file.write_at(content, offset);
    written.context(|| format!("fill {} bytes at {offset} of {}", content.len(), object.name))
}

/// Lets a reader go, whether its bytes are there or not.
fn end_read(object: &Object, number: u32) {
    if let Err(error) = object.file.complete(number) {
        // Closed meanwhile: the kernel has told the reader.
        tracing::debug!(%error, number, name = %object.name, "nobody waits for this read any more");
    }
}
