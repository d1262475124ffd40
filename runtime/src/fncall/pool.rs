//! Containers that wait for a call: namespaces, limits and mounts made, nothing of an image run in them yet.
//!
//! Each serves one call and ends: with its init the kernel ends every process, and with its namespaces go
//! mounts, shared memory, queues and sockets. Its slot is cleaned and used again as any slot is. That
//! happens beside the calls, and so does the making of the next ones: as many wait as were missed lately.
//!
//! Locking: a mutex over the list of pools and one over each pool, held for look-ups. CRASH: nothing of a call
//! is in the journal, so the next runtime's sweep clears whatever waited or ran.

use crate::backends::{Backend, Instance};
use crate::node::Node;
use crate::plan::LaunchPlan;
use layer::{EnvId, Error, ErrorKind, LayerId, Result};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Containers of one kind that wait at most.
const MAX_READY: usize = 32;
/// Kinds that have containers waiting.
const MAX_POOLS: usize = 64;
/// Containers of one kind that are made at once, ahead.
const MAKERS: usize = 2;
/// A kind that is not called for so long has half as many waiting, again and again.
const CALM: Duration = Duration::from_secs(5);
/// A kind that is not called for so long has none, and its layers are let go of.
const LINGER: Duration = Duration::from_secs(30);

/// What makes two calls alike enough for the same containers.
#[derive(Debug, Clone)]
pub struct Class {
    /// Bottom first.
    pub layers: Vec<LayerId>,
    /// For fetching ahead.
    pub env_id: Option<EnvId>,
    /// Limits and names.
    pub plan: LaunchPlan,
}

impl Class {
    fn is_like(&self, other: &Self) -> bool {
        self.layers == other.layers
            && self.env_id == other.env_id
            && self.plan.limits == other.plan.limits
    }
}

/// A container for one call. Dropping it ends it and cleans its slot, beside whatever else goes on.
#[derive(Debug)]
pub struct Prepared {
    /// What runs it.
    pub instance: Arc<dyn Instance>,
    layers: Vec<LayerId>,
    node: Weak<Node>,
    living: Living,
}

/// Counts a container until its slot is clean.
#[derive(Debug)]
struct Living(watch::Sender<usize>);

impl Living {
    fn new(count: &watch::Sender<usize>) -> Self {
        count.send_modify(|count| *count += 1);
        Self(count.clone())
    }
}

impl Drop for Living {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

impl Prepared {
    /// Makes one.
    async fn make(node: &Arc<Node>, class: &Class) -> Result<Self> {
        node.room.admit()?;
        let living = Living::new(&node.functions.living);
        let _permit = node.launches.acquire().await.map_err(|error| {
            Error::new(ErrorKind::Unavailable, "the node is closing").with_source(error)
        })?;
        let layers = &class.layers;
        let plane = proto::v1::Plane::Auto;
        let mounts = node.layers.attach(layers, class.env_id.as_ref(), plane).await?;
        let launched = node.container.launch(&class.plan, &mounts).await;
        let instance = launched.inspect_err(|_| node.layers.release(layers))?.into();
        Ok(Self { instance, layers: layers.clone(), node: Arc::downgrade(node), living })
    }

    async fn lives(&self) -> bool {
        tokio::select! {
            biased;
            () = self.instance.ended() => false,
            () = std::future::ready(()) => true,
        }
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        let instance = Arc::clone(&self.instance);
        if let Err(error) = instance.kill() {
            tracing::error!(error = %error.chain(), "end the container of a call");
        }
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        let (layers, node) = (std::mem::take(&mut self.layers), self.node.clone());
        let living = Living::new(&self.living.0);
        runtime.spawn(async move {
            instance.ended().await;
            instance.release().await;
            if let Some(node) = node.upgrade() {
                node.layers.release(&layers);
            }
            drop(living);
        });
    }
}

/// The containers of one class.
#[derive(Debug)]
struct Pool {
    class: Class,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    ready: Vec<Prepared>,
    makers: usize,
    /// How many are to wait.
    wanted: usize,
    last_used: Instant,
    is_closed: bool,
}

impl Pool {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes none any more; those that wait are the caller's to drop.
    fn close(&self) -> Vec<Prepared> {
        let mut state = self.lock();
        state.is_closed = true;
        std::mem::take(&mut state.ready)
    }

    /// One that waits, if there is one.
    fn pop(&self) -> Option<Prepared> {
        let mut state = self.lock();
        state.last_used = Instant::now();
        let ready = state.ready.pop();
        if ready.is_none() {
            state.wanted = (state.wanted * 2).min(MAX_READY);
        }
        ready
    }

    /// Has as many made as are wanted, by tasks of their own.
    fn refill(self: &Arc<Self>, node: &Arc<Node>) {
        let mut state = self.lock();
        while !state.is_closed
            && state.makers < MAKERS
            && state.ready.len() + state.makers < state.wanted
        {
            state.makers += 1;
            tokio::spawn(make_some(Arc::downgrade(node), Arc::clone(self)));
        }
    }

    /// Keeps one that was made, or gives it back; whether more are wanted.
    fn keep(&self, made: Prepared) -> (Option<Prepared>, bool) {
        let mut state = self.lock();
        if state.is_closed {
            return (Some(made), false);
        }
        state.ready.push(made);
        (None, state.ready.len() + state.makers <= state.wanted)
    }
}

async fn make_some(node: Weak<Node>, pool: Arc<Pool>) {
    let mut is_wanted = true;
    while is_wanted && let Some(node) = node.upgrade() {
        match Prepared::make(&node, &pool.class).await {
            Ok(made) => {
                let (unwanted, more) = pool.keep(made);
                drop(unwanted);
                is_wanted = more;
            }
            Err(error) => {
                // The next call tries again, and tells its client.
                tracing::warn!(error = %error.chain(), "no container is made ahead of a call");
                is_wanted = false;
            }
        }
    }
    pool.lock().makers -= 1;
}

/// All containers that wait.
#[derive(Debug)]
pub struct Pools {
    pools: Mutex<Option<Vec<Arc<Pool>>>>,
}

impl Default for Pools {
    fn default() -> Self {
        Self { pools: Mutex::new(Some(Vec::new())) }
    }
}

impl Pools {
    fn lock(&self) -> MutexGuard<'_, Option<Vec<Arc<Pool>>>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of(&self, class: &Class) -> Result<Arc<Pool>> {
        let mut pools = self.lock();
        let Some(pools) = pools.as_mut() else {
            return Err(Error::new(ErrorKind::Unavailable, "the node is closing"));
        };
        if let Some(known) = pools.iter().find(|pool| pool.class.is_like(class)) {
            return Ok(Arc::clone(known));
        }
        if pools.len() == MAX_POOLS {
            let oldest = pools.iter().enumerate().min_by_key(|(_, pool)| pool.lock().last_used);
            if let Some(oldest) = oldest.map(|(index, _)| index) {
                drop(pools.swap_remove(oldest).close());
            }
        }
        let state = State {
            ready: Vec::new(),
            makers: 0,
            wanted: 1,
            last_used: Instant::now(),
            is_closed: false,
        };
        let pool = Arc::new(Pool { class: class.clone(), state: Mutex::new(state) });
        pools.push(Arc::clone(&pool));
        Ok(pool)
    }

    /// A container for a call: one that waits, or one that is made now.
    pub async fn take(&self, node: &Arc<Node>, class: &Class) -> Result<Prepared> {
        let pool = self.of(class)?;
        while let Some(ready) = pool.pop() {
            pool.refill(node);
            if ready.lives().await {
                return Ok(ready);
            }
        }
        let made = Prepared::make(node, class).await?;
        pool.refill(node);
        Ok(made)
    }

    /// How many containers wait.
    pub fn ready(&self) -> usize {
        self.lock().iter().flatten().map(|pool| pool.lock().ready.len()).sum()
    }

    /// Gives back what nobody has called for lately.
    pub fn shrink(&self) {
        let mut unwanted = Vec::new();
        let mut pools = self.lock();
        let Some(pools) = pools.as_mut() else { return };
        pools.retain(|pool| {
            let mut state = pool.lock();
            let unused = state.last_used.elapsed();
            if unused >= LINGER {
                drop(state);
                unwanted.extend(pool.close());
                return false;
            }
            if unused >= CALM {
                state.wanted = (state.wanted / 2).max(1);
                let wanted = state.wanted;
                let from = wanted.min(state.ready.len());
                unwanted.extend(state.ready.drain(from..));
            }
            true
        });
    }

    /// Gives back all, for good.
    pub fn close(&self) {
        let pools = self.lock().take().unwrap_or_default();
        for pool in pools {
            drop(pool.close());
        }
    }
}
