//! Many sandboxes in one call: one answer for each as soon as it is there, and nothing left of a call whose
//! caller has gone.
//!
//! So many are made at once as the node makes best, so that another caller's create waits for a few of them and
//! not for all. CRASH: a killed runtime leaves what each create leaves.

use crate::node::Node;
use crate::sandbox::Sandbox;
use layer::{Error, ErrorKind, Result};
use proto::v1::{self, made::Outcome};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use tokio::task::JoinSet;

/// The most of one call.
const MAX_COUNT: u32 = 100_000;
/// Answers that wait for the caller.
const QUEUE: usize = 8;

/// Refuses what no call may ask for.
pub fn check_count(count: u32) -> Result<()> {
    if count == 0 || count > MAX_COUNT {
        return Err(Error::invalid(format!(
            "between 1 and {MAX_COUNT} sandboxes are made at once"
        )));
    }
    Ok(())
}

/// One of many, on its way to the caller. Dropped before, it is ended and forgotten.
#[derive(Debug)]
pub struct Made {
    number: u32,
    frozen_us: u64,
    outcome: Result<Unclaimed>,
}

impl Made {
    /// The caller has it.
    pub fn claim(self) -> v1::Made {
        let outcome = match self.outcome {
            Ok(mut made) => made.sandbox.take().map(|sandbox| Outcome::Sandbox(sandbox.wire())),
            Err(error) => Some(Outcome::Failure(v1::Failure {
                kind: error.kind().to_string(),
                message: error.chain(),
            })),
        };
        v1::Made { number: self.number, frozen_us: self.frozen_us, outcome }
    }
}

#[derive(Debug)]
struct Unclaimed {
    node: Arc<Node>,
    sandbox: Option<Arc<Sandbox>>,
    is_removed: bool,
}

impl Drop for Unclaimed {
    fn drop(&mut self) {
        let Some(sandbox) = self.sandbox.take().filter(|_| self.is_removed) else { return };
        let node = Arc::clone(&self.node);
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            match sandbox.stop(Duration::ZERO).await {
                Ok(()) => node.forget(&sandbox),
                Err(error) => {
                    tracing::warn!(id = sandbox.id(), error = %error.chain(), "remove a sandbox");
                }
            }
        });
    }
}

/// Calls `make` for each number below `count`. `is_removed`: what the caller does not take is removed.
pub fn make<F, M>(
    node: &Arc<Node>,
    count: u32,
    frozen_us: u64,
    is_removed: bool,
    make: F,
) -> mpsc::Receiver<Made>
where
    F: Fn(u32) -> M + Send + 'static,
    M: Future<Output = Result<Arc<Sandbox>>> + Send + 'static,
{
    let (answers, receiver) = mpsc::channel(QUEUE);
    let node = Arc::clone(node);
    tokio::spawn(async move {
        let at_once = node.launches_at_once();
        let (mut next, mut making) = (0, JoinSet::new());
        loop {
            while next < count && making.len() < at_once && !answers.is_closed() {
                let (number, one) = (next, make(next));
                let node = Arc::clone(&node);
                next += 1;
                making.spawn(async move {
                    let outcome = one.await.map(|sandbox| Unclaimed {
                        node,
                        sandbox: Some(sandbox),
                        is_removed,
                    });
                    Made { number, frozen_us, outcome }
                });
            }
            let Some(made) = making.join_next().await else { return };
            let made = made.unwrap_or_else(|error| Made {
                number: u32::MAX,
                frozen_us,
                outcome: Err(
                    Error::new(ErrorKind::Internal, "creation panicked").with_source(error)
                ),
            });
            // A caller that has left takes it back with the error, and so it is removed.
            let _left = answers.send(made).await;
        }
    });
    receiver
}

/// Sandboxes after one request.
pub fn create(node: &Arc<Node>, request: v1::CreateManyRequest) -> Result<mpsc::Receiver<Made>> {
    check_count(request.count)?;
    let create = request.create.unwrap_or_default();
    // What is wrong with all of them is an error of the call.
    crate::spec::sandbox(create.clone())?;
    // Who has keys gets the same ones by asking again, also those that were made before this call.
    let is_removed = create.idempotency_key.is_empty();
    let maker = Arc::clone(node);
    let one = move |number| {
        let (node, mut request) = (Arc::clone(&maker), create.clone());
        if !request.idempotency_key.is_empty() {
            request.idempotency_key = format!("{}/{number}", request.idempotency_key);
        }
        async move { node.create(request).await }
    };
    Ok(make(node, request.count, 0, is_removed, one))
}
