//! A catalog of a million chunks, made the way a build makes one: chunks are uploaded to a node and sealed
//! into packs. What the node's process then costs is measured in a node that was started anew.

use crate::measure::Spread;
use crate::node::{Lamella, Node};
use crate::shell::say;
use anyhow::ensure;
use builder::publish::{EncodedChunk, ImagesPublisher, Publisher};
use layer::ChunkDigest;
use layer::chunk::BLOCK_BYTES;
use std::time::Duration;
use tokio::runtime::Runtime;

/// Chunks of the catalog.
pub const CHUNKS: usize = 1_000_000;
/// Chunks of one pack: as many as there are in one of 128 MiB with chunks of 32 KiB.
const PACK_CHUNKS: usize = 4096;
/// How long a process may take to settle after its work.
const REST: Duration = Duration::from_secs(2);

/// What the node process is resident with.
#[derive(Debug, Default)]
pub struct Resident {
    /// After its start.
    pub started: Spread,
    /// After it was asked for each of the chunks.
    pub asked: Spread,
}

/// A chunk of one block that nobody else has.
fn chunk(index: usize) -> EncodedChunk {
    let mut plain = vec![0; BLOCK_BYTES as usize];
    plain[..8].copy_from_slice(&(index as u64 + 1).to_le_bytes());
    let (codec, payload) = store::codec::encode_chunk(&plain, 1);
    EncodedChunk { digest: ChunkDigest::of(&plain), codec, plain_bytes: BLOCK_BYTES, payload }
}

fn runtime() -> anyhow::Result<Runtime> {
    Ok(tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?)
}

/// Opens a publish on a node, and leaves the runtime to whoever uses it.
fn publisher(runtime: &Runtime, node: &Node) -> anyhow::Result<ImagesPublisher> {
    let channel = runtime.block_on(proto::connect::unix(&node.socket("node.sock")))?;
    Ok(ImagesPublisher::open(runtime.handle().clone(), channel, "bench")?)
}

/// Publishes the chunks. Answers their digests.
pub fn fill(lamella: &Lamella) -> anyhow::Result<Vec<ChunkDigest>> {
    say(format!("publishing {CHUNKS} chunks"));
    let (node, runtime) = (lamella.up()?, runtime()?);
    let publisher = publisher(&runtime, &node)?;
    let mut digests = Vec::with_capacity(CHUNKS);
    for index in 0..CHUNKS {
        let chunk = chunk(index);
        digests.push(chunk.digest);
        publisher.upload(chunk)?;
        if digests.len() % PACK_CHUNKS == 0 {
            publisher.flush()?;
        }
    }
    publisher.flush()?;
    drop(publisher);
    // A node that goes down waits for its clients.
    drop(runtime);
    Ok(digests)
}

/// Measures a node that is started now.
pub fn measure(
    lamella: &Lamella,
    digests: &[ChunkDigest],
    resident: &mut Resident,
) -> anyhow::Result<()> {
    let (node, runtime) = (lamella.up()?, runtime()?);
    std::thread::sleep(REST);
    resident.started.push(node.resident_bytes("node.sock")?);
    let publisher = publisher(&runtime, &node)?;
    for asked in digests.chunks(PACK_CHUNKS) {
        let missing = publisher.missing(asked)?;
        ensure!(!missing.contains(&true), "a chunk that was published is not in the catalog");
    }
    drop(publisher);
    drop(runtime);
    std::thread::sleep(REST);
    resident.asked.push(node.resident_bytes("node.sock")?);
    Ok(())
}
