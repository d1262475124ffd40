//! From blocking calls to the asynchronous client of object stores, and back.
//!
//! One small runtime of two threads serves every S3 store of the process. A caller hands it a future and
//! waits on a channel, never inside the runtime: so it may be any thread, one of another runtime too.

use layer::{Error, ErrorKind, Result};
use std::future::Future;
use std::sync::OnceLock;
use std::sync::mpsc::{self, Receiver};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

/// The requests wait for the network; the threads hash what is uploaded and decrypt what comes.
const THREADS: usize = 2;

/// Something that the runtime is busy with. Dropping it does not stop it.
pub(super) struct Pending<T>(Receiver<T>);

impl<T> Pending<T> {
    /// Waits for the result; the requests themselves have deadlines.
    pub(super) fn wait(self) -> Result<T> {
        // The sender goes without an answer only when the future panicked.
        self.0.recv().map_err(|_| Error::new(ErrorKind::Internal, "a request to S3 was lost"))
    }

    /// Waits, but not for longer than this.
    pub(super) fn wait_at_most(self, limit: Duration) -> Option<T> {
        self.0.recv_timeout(limit).ok()
    }
}

/// Starts work without waiting for it.
pub(super) fn start<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
) -> Result<Pending<T>> {
    let (sender, receiver) = mpsc::channel();
    runtime()?.spawn(async move {
        // Nobody listens when the caller gave up; then the result is nobody's.
        let _ = sender.send(future.await);
    });
    Ok(Pending(receiver))
}

/// Does work and waits for its result.
pub(super) fn run<T: Send + 'static>(
    future: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    start(future)?.wait()?
}

fn runtime() -> Result<&'static Runtime> {
    static RUNTIME: OnceLock<Option<Runtime>> = OnceLock::new();
    let make = || {
        let mut builder = Builder::new_multi_thread();
        let runtime = builder.worker_threads(THREADS).thread_name("store-s3").enable_all().build();
        runtime.inspect_err(|error| tracing::error!("cannot start threads for S3: {error}")).ok()
    };
    let runtime = RUNTIME.get_or_init(make).as_ref();
    runtime.ok_or_else(|| Error::new(ErrorKind::NoSpace, "no threads for requests to S3"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_of_another_runtime_may_wait() {
        let other = Builder::new_current_thread().build().unwrap();
        let answer = other.block_on(async { run(async { Ok(42) }) });
        assert_eq!(answer.unwrap(), 42);
    }

    #[test]
    fn a_panic_in_a_request_is_an_error_and_ends_nothing_else() {
        let lost = run(async { if true { panic!("on purpose") } else { Ok(()) } });
        assert_eq!(lost.unwrap_err().kind(), ErrorKind::Internal);
        assert_eq!(run(async { Ok(1) }).unwrap(), 1);
    }
}
