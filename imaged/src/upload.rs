//! Uploads: a stream of chunks, each verified, into packs. Chunks that this very process encoded a moment
//! ago are believed: it hashed the bytes that it encoded, and every reader checks them again.
//!
//! ```text
//!  stream ──▶ verify (any thread that may block, in order) ──▶ one writer a stream ──▶ pack ──▶ seal, enter
//! ```
//! Memory is bounded: at most [`IN_FLIGHT_BYTES`] and one chunk are between the stream and the pack; a slow disk
//! slows the stream down. The seal of a full pack (a flush) runs beside the next pack.
//!
//! // CRASH: a pack that is not sealed has no name. A stream that breaks off leaves its last pack sealed where that
//! spares a repetition, else nothing of it.

use crate::images::Images;
use crate::publish::Publish;
use layer::pack::Codec;
use layer::{ChunkDigest, Context, Error, ErrorKind, PackId, Result};
use std::collections::{HashSet, VecDeque};
use std::sync::Arc;
use std::thread;
use store::codec::verify_chunk;
use store::{PackWriter, SealedPack};
use tokio::sync::mpsc;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio_stream::{Stream, StreamExt};

/// Payload bytes on their way from one stream to its pack, beside the chunk that is being received.
const IN_FLIGHT_BYTES: usize = 16 << 20;
/// Chunks on their way to the verifiers, and again to the writer.
const IN_FLIGHT_CHUNKS: usize = 32;
/// A pack that has grown to this is sealed. With chunks of at most 16 MiB none exceeds 160 MiB.
pub(crate) const PACK_BYTES: u64 = 128 << 20;
/// What a broken stream left is sealed from this size on.
const WORTH_KEEPING_BYTES: u64 = 8 << 20;

/// A chunk as it was sent.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub(crate) digest: ChunkDigest,
    pub(crate) codec: Codec,
    pub(crate) plain_bytes: u32,
    pub(crate) payload: Vec<u8>,
}

/// Who sends a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Sender {
    /// Code of this process, which has hashed what it encoded.
    ThisProcess,
    /// Nobody whose word counts.
    Anyone,
}

/// What became of a stream.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Uploaded {
    pub(crate) chunks_stored: u64,
    pub(crate) bytes_stored: u64,
    pub(crate) chunks_known: u64,
}

enum Step {
    Append(Chunk),
    Finish,
}

/// Takes a stream to its end: when this returns, every chunk of it is in a sealed pack.
pub(crate) async fn receive(
    images: Arc<Images>,
    publish: Arc<Publish>,
    sender: Sender,
    mut chunks: impl Stream<Item = Result<Chunk>> + Unpin,
) -> Result<Uploaded> {
    let turn = images.uploads.clone().acquire_owned().await;
    let _turn =
        turn.map_err(|_| Error::new(ErrorKind::Unavailable, "the image daemon is stopping"))?;
    let (steps, writer_steps) = mpsc::channel(IN_FLIGHT_CHUNKS);
    let writer = spawn_blocking(move || write_packs(&images, &publish, writer_steps));
    // When this future is dropped the writer finds the channel closed without `Finish`.
    let fed = match sender {
        Sender::ThisProcess => pass_on(&mut chunks, &steps).await,
        Sender::Anyone => feed(&mut chunks, &steps).await,
    };
    drop(steps);
    let written = joined(writer).await;
    match fed {
        Ok(()) | Err(Broken::Writer) => written,
        Err(Broken::Stream(error)) => Err(error),
    }
}

enum Broken {
    /// The stream, or a chunk in it, is bad.
    Stream(Error),
    /// The writer gave up and says why itself.
    Writer,
}

/// Sizes are checked by the pack.
async fn pass_on(
    chunks: &mut (impl Stream<Item = Result<Chunk>> + Unpin),
    steps: &mpsc::Sender<Step>,
) -> Result<(), Broken> {
    while let Some(chunk) = chunks.next().await {
        let chunk = chunk.map_err(Broken::Stream)?;
        steps.send(Step::Append(chunk)).await.map_err(|_| Broken::Writer)?;
    }
    steps.send(Step::Finish).await.map_err(|_| Broken::Writer)
}

async fn feed(
    chunks: &mut (impl Stream<Item = Result<Chunk>> + Unpin),
    steps: &mpsc::Sender<Step>,
) -> Result<(), Broken> {
    let mut verifying: VecDeque<(usize, JoinHandle<Result<Chunk>>)> = VecDeque::new();
    let mut in_flight = 0;
    loop {
        let next = chunks.next().await;
        let ended = next.is_none();
        if let Some(chunk) = next {
            let chunk = chunk.map_err(Broken::Stream)?;
            in_flight += chunk.payload.len();
            verifying.push_back((chunk.payload.len(), spawn_blocking(move || verified(chunk))));
        }
        let full = |verifying: &VecDeque<_>, in_flight| {
            in_flight > IN_FLIGHT_BYTES || verifying.len() >= IN_FLIGHT_CHUNKS
        };
        while ended || full(&verifying, in_flight) {
            let Some((bytes, verification)) = verifying.pop_front() else { break };
            let chunk = joined(verification).await.map_err(Broken::Stream)?;
            steps.send(Step::Append(chunk)).await.map_err(|_| Broken::Writer)?;
            in_flight -= bytes;
        }
        if ended {
            return steps.send(Step::Finish).await.map_err(|_| Broken::Writer);
        }
    }
}

fn verified(chunk: Chunk) -> Result<Chunk> {
    if chunk.digest == ChunkDigest::ZERO {
        return Err(Error::invalid("a chunk of zeros was uploaded; it lies in no pack"));
    }
    verify_chunk(&chunk.payload, chunk.codec, chunk.plain_bytes, &chunk.digest).context(|| {
        format!("uploaded chunk {} is not what its digest says", chunk.digest.short())
    })?;
    Ok(chunk)
}

async fn joined<T>(task: JoinHandle<Result<T>>) -> Result<T> {
    task.await.unwrap_or_else(|error| {
        Err(Error::new(ErrorKind::Internal, "a thread of the upload ended badly")
            .with_source(error))
    })
}

fn write_packs(
    images: &Images,
    publish: &Publish,
    mut steps: mpsc::Receiver<Step>,
) -> Result<Uploaded> {
    let mut sink = Sink::new(images, publish);
    while let Some(step) = steps.blocking_recv() {
        match step {
            Step::Append(chunk) => sink.append(&chunk)?,
            Step::Finish => return sink.finish(),
        }
    }
    sink.abandon();
    Err(Error::new(
        ErrorKind::Unavailable,
        "the upload broke off; repeat it, what was stored is kept",
    ))
}

/// Where the chunks of one stream go.
pub(crate) struct Sink<'a> {
    images: &'a Images,
    publish: &'a Publish,
    /// Packs whose chunks are stored again, because they are condemned.
    avoided: HashSet<PackId>,
    sound: HashSet<PackId>,
    pack: Option<PackWriter>,
    sealing: Option<thread::JoinHandle<Result<SealedPack>>>,
    /// Chunks in packs that the catalog does not know yet.
    unsealed: HashSet<ChunkDigest>,
    uploaded: Uploaded,
}

impl<'a> Sink<'a> {
    pub(crate) fn new(images: &'a Images, publish: &'a Publish) -> Self {
        let (pack, sealing) = (None, None);
        Self {
            images,
            publish,
            avoided: publish.avoided(),
            sound: publish.sound(),
            pack,
            sealing,
            unsealed: HashSet::new(),
            uploaded: Uploaded::default(),
        }
    }

    fn is_stored(&mut self, digest: &ChunkDigest) -> Result<bool> {
        if self.unsealed.contains(digest) {
            return Ok(true);
        }
        let places = self.images.sound_places(&[*digest], &mut self.sound)?;
        Ok(places.values().any(|place| !self.avoided.contains(&place.pack)))
    }

    pub(crate) fn append(&mut self, chunk: &Chunk) -> Result<()> {
        if self.is_stored(&chunk.digest)? {
            self.uploaded.chunks_known += 1;
            return Ok(());
        }
        let mut pack = match self.pack.take() {
            Some(pack) => pack,
            None => self.images.store.pack_writer()?,
        };
        pack.append(chunk.digest, chunk.codec, chunk.plain_bytes, &chunk.payload)?;
        self.unsealed.insert(chunk.digest);
        self.uploaded.chunks_stored += 1;
        self.uploaded.bytes_stored += chunk.payload.len() as u64;
        let full = pack.stored_bytes() >= PACK_BYTES;
        self.pack = Some(pack);
        if full { self.seal() } else { Ok(()) }
    }

    /// Starts to seal the pack beside what follows, after the one before it is settled.
    fn seal(&mut self) -> Result<()> {
        self.settle()?;
        if let Some(pack) = self.pack.take() {
            self.sealing = Some(thread::spawn(move || pack.finish()));
        }
        Ok(())
    }

    /// Waits for the pack that is being sealed and enters it.
    fn settle(&mut self) -> Result<()> {
        let Some(sealing) = self.sealing.take() else { return Ok(()) };
        let sealed = sealing.join().unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::Internal, "the thread that seals a pack ended badly"))
        })?;
        self.images.catalog.put_pack(&sealed.id, &sealed.entries)?;
        self.sound.insert(sealed.id);
        for entry in &sealed.entries {
            self.unsealed.remove(&entry.digest);
        }
        // A long stream outlasts a lease.
        self.images.renew_if_due(self.publish)
    }

    pub(crate) fn finish(mut self) -> Result<Uploaded> {
        self.seal()?;
        self.settle()?;
        self.images.meters.uploaded_chunks.add(self.uploaded.chunks_stored);
        self.images.meters.uploaded_bytes.add(self.uploaded.bytes_stored);
        Ok(self.uploaded)
    }

    /// The publisher is gone; it will be glad of what is large.
    fn abandon(mut self) {
        if self.pack.as_ref().is_some_and(|pack| pack.stored_bytes() < WORTH_KEEPING_BYTES) {
            self.pack = None;
        }
        if let Err(error) = self.finish() {
            tracing::warn!("the rest of an upload that broke off is lost: {}", error.chain());
        }
    }
}
