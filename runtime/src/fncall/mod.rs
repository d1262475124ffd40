//! Function calls: one command each, in a container that was made ahead, and nothing left of it afterwards.
//!
//! ```text
//! request -> checked -> resolved -> turn (fair queue) -> container (pool, or made now)
//!     files in -> command -> its end -> [container ends] -> files out -> answer
//!                                            container ends, slot cleaned, next one made
//! ```
//! A call is no sandbox: it has no id, is in no list and in no journal, and ends with the client that waits
//! for it and with the runtime.

mod call;
mod files;
mod pool;
mod request;
mod streams;
mod turns;

use crate::node::Node;
use crate::plan;
use layer::{Error, ErrorKind, Result};
use pool::{Class, Pools};
use proto::v1;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::sync::{oneshot, watch};
use turns::{Bounds, Turns};

/// The most bytes of a message with a call.
pub const MAX_MESSAGE_BYTES: usize = (request::MAX_INPUT_BYTES + (4 << 20)) as usize;
/// Calls that run at once.
const MAX_RUNNING: usize = 64;
/// Calls that wait, of one environment and of all.
const MAX_WAITING_EACH: usize = 1024;
const MAX_WAITING: usize = 4096;
/// Bytes that all calls may hold.
const MAX_HELD_BYTES: u64 = 1 << 30;
/// The host name of every call.
const HOST_NAME: &str = "call";

/// The calls of a node.
#[derive(Debug)]
pub struct Functions {
    turns: Arc<Turns>,
    pools: Pools,
    /// Containers that wait, run, or are cleaned after.
    living: watch::Sender<usize>,
}

impl Default for Functions {
    fn default() -> Self {
        let bounds = Bounds {
            running: MAX_RUNNING,
            waiting_each: MAX_WAITING_EACH,
            waiting: MAX_WAITING,
            bytes: MAX_HELD_BYTES,
        };
        Self { turns: Turns::new(bounds), pools: Pools::default(), living: watch::channel(0).0 }
    }
}

impl Functions {
    /// Ends what waits; answers when nothing of any call is left.
    pub async fn close(&self) {
        self.pools.close();
        let mut living = self.living.subscribe();
        let _watched = living.wait_for(|count| *count == 0).await;
    }

    /// Calls that run and that wait, and containers that wait for calls.
    pub fn counts(&self) -> (usize, usize, usize) {
        let (running, waiting) = self.turns.counts();
        (running, waiting, self.pools.ready())
    }
}

impl Node {
    /// One call. It ends when nobody waits for the answer any more.
    pub async fn call(self: &Arc<Self>, request: v1::CallRequest) -> Result<v1::CallResponse> {
        let call = request::call(request)?;
        let held = self.functions.turns.hold(call.bytes())?;
        let resolved = self.resolve(&call.spec.environment).await?;
        let plan = plan::launch(&call.spec, &self.default_limits(), HOST_NAME);
        let class = Class { layers: resolved.layers, env_id: resolved.env_id, plan };
        let defaults = plan::command_defaults(&call.spec, &resolved.config);
        let turn = self.functions.turns.take(&class.layers).await?;
        self.meters.execs.add(1);
        let (left, _waits) = oneshot::channel();
        // A task of its own, so that a client that leaves tears nothing in the middle.
        let node = Arc::clone(self);
        let running = tokio::spawn(async move {
            let ran = call::run(&node, call, &class, &defaults, left).await;
            drop((turn, held));
            ran
        });
        running.await.unwrap_or_else(|error| {
            Err(Error::new(ErrorKind::Internal, "a call panicked").with_source(error))
        })
    }
}

/// Gives back what waits for calls that do not come, until the node is gone.
pub async fn shrink(node: Weak<Node>) {
    const EVERY: Duration = Duration::from_secs(1);
    loop {
        tokio::time::sleep(EVERY).await;
        let Some(node) = node.upgrade() else { return };
        node.functions.pools.shrink();
    }
}
