//! The log of a node, as the rest of the runtime sees it: report an event, count it, go on.

use super::files::{self, Rotation};
use super::record::{DeniedBy, KINDS, Limit, What, encode};
use super::writer::{Inbox, Writer, Written};
use layer::Result;
use proto::meter::{Counter, Counters, Page};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// The log, open.
#[derive(Debug)]
pub struct EventLog {
    folder: PathBuf,
    inbox: Arc<Inbox>,
    writer: Writer,
    written: watch::Receiver<Written>,
    kinds: Counters,
    denials: Counters,
    limits: Counters,
    dropped: Counter,
}

impl EventLog {
    /// Opens it, or begins one, and reports that the node has started.
    pub fn open(folder: PathBuf, rotation: Rotation) -> Result<Arc<Self>> {
        let (writer, inbox, written) = Writer::start(folder.clone(), rotation)?;
        let log = Self {
            folder,
            inbox,
            writer,
            written,
            kinds: Counters::of(&KINDS),
            denials: Counters::of(&DeniedBy::WORDS),
            limits: Counters::of(&Limit::WORDS),
            dropped: Counter::default(),
        };
        log.report(
            "",
            &What::NodeStarted {
                version: env!("CARGO_PKG_VERSION"),
                pid: std::process::id(),
                boot: boot(),
            },
        );
        Ok(Arc::new(log))
    }

    /// Reports an event of a sandbox, or of the node when its id is empty. Waits for no disk.
    pub fn report(&self, sandbox: &str, what: &What) {
        self.kinds.count(what.kind());
        match what {
            What::Denied { by, .. } => self.denials.count(by.word()),
            What::Limit { limit, .. } => self.limits.count(limit.word()),
            _ => {}
        }
        let mut line = Vec::with_capacity(256);
        let encoded = encode(super::now_unix_ns(), sandbox, what, &mut line);
        if let Err(error) = encoded {
            tracing::error!(error = %error.chain(), "an event cannot be written");
            return;
        }
        if !self.inbox.put(&line) {
            self.dropped.add(1);
        }
    }

    /// Where its files are.
    pub fn folder(&self) -> PathBuf {
        self.folder.clone()
    }

    /// How far the writer is.
    pub fn written(&self) -> watch::Receiver<Written> {
        self.written.clone()
    }

    /// Completes when everything that was reported before is written, or after a while on a disk that hangs.
    pub async fn catch_up(&self) {
        const PATIENCE: Duration = Duration::from_secs(2);
        let (goal, mut written) = (self.inbox.count(), self.written());
        let caught_up = written.wait_for(|written| written.taken >= goal);
        let _at_least_what_there_is = tokio::time::timeout(PATIENCE, caught_up).await;
    }

    /// Reports that the node ends, and writes all that waits.
    pub fn close(&self) {
        self.report("", &What::NodeEnded {});
        self.writer.close();
    }

    /// Writes down what was counted.
    pub fn write_meters(&self, page: &mut Page) {
        page.counters("audit_events_total", "Events reported.", "kind", &self.kinds);
        let dropped = "Events that found no room on the way to the disk.";
        page.counter("audit_dropped_total", dropped, self.dropped.get());
        page.gauge("audit_bytes", "Bytes of the log of events.", files::total_bytes(&self.folder));
        page.counters("denials_total", "What was refused to sandboxes.", "by", &self.denials);
        page.counters("limits_total", "Limits that were reached.", "limit", &self.limits);
    }
}

/// Which start of the machine this is.
fn boot() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
    boot.map(|boot| boot.trim().to_owned()).unwrap_or_default()
}
