//! The places that a store can lie in, for suites that must pass in all of them.
#![allow(dead_code, clippy::unwrap_used)]

pub mod double;
pub mod folder;
pub mod s3;
pub mod slow_names;
pub mod threefs;

use self::s3::Server;
use self::slow_names::Shared;
use self::threefs::ThreeFsMount;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use store::{Backend, open};

/// What is added to a URL so that its backend is wrapped, without being slow or failing.
const WRAPPED: &str = "bandwidth=100G&latency_ms=0&fault_seed=1";

/// Every place, for as long as this lives.
pub struct Places {
    pub directory: tempfile::TempDir,
    pub tree: Shared,
    pub threefs: ThreeFsMount,
    next: AtomicU32,
}

impl Places {
    pub fn new() -> Self {
        let tree = Shared::new();
        let threefs = ThreeFsMount::of(&tree);
        let directory = tempfile::tempdir().unwrap();
        Self { directory, tree, threefs, next: AtomicU32::new(0) }
    }

    /// URLs of empty places of every kind.
    pub fn urls(&self) -> Vec<String> {
        static NAMES: AtomicU32 = AtomicU32::new(0);
        let name = NAMES.fetch_add(1, Ordering::Relaxed);
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let s3 = Server::shared();
        let directory = self.directory.path().display();
        vec![
            format!("memory:places-{name}"),
            format!("file://{directory}/plain-{number}"),
            format!("file://{directory}/wrapped-{number}?{WRAPPED}"),
            self.threefs.url(),
            format!("{}&{WRAPPED}", self.threefs.url()),
            s3.url(),
            format!("{}&{WRAPPED}", s3.url()),
        ]
    }

    /// Calls `check` with every backend, each empty.
    pub fn each(&self, check: impl Fn(Arc<dyn Backend>)) {
        for url in self.urls() {
            eprintln!("at {}", url.split('?').next().unwrap());
            check(open(&url).unwrap());
        }
    }
}

/// Calls `check` with a backend of every kind, each empty.
pub fn on_every_backend(check: impl Fn(Arc<dyn Backend>)) {
    Places::new().each(check);
}
