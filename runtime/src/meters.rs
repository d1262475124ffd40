//! What the runtime counts about itself since it was started; docs/metrics.md says what each number is.

use crate::node::Node;
use crate::record::{End, State};
use proto::meter::calls::Calls;
use proto::meter::{Counter, Counters, Histogram, Kind, Page};
use std::sync::Arc;

/// How a command or a sandbox ends; see [`End`].
const ENDS: [&str; 7] = ["exited", "signal", "oom", "timeout", "killed", "disk_full", "lost"];
/// A command that could not be started.
const REFUSED: &str = "refused";
const STATES: [(State, &str); 7] = [
    (State::Creating, "creating"),
    (State::Running, "running"),
    (State::Paused, "paused"),
    (State::Stopping, "stopping"),
    (State::Gone, "gone"),
    (State::Failed, "failed"),
    (State::Lost, "lost"),
];

/// The word for an end.
pub(crate) fn word(end: End) -> &'static str {
    match end {
        End::Exited(_) => ENDS[0],
        End::Signal(_) => ENDS[1],
        End::Oom => ENDS[2],
        End::Timeout => ENDS[3],
        End::Killed => ENDS[4],
        End::DiskFull(_) => ENDS[5],
        End::Lost => ENDS[6],
    }
}

#[derive(Debug)]
pub(crate) struct Meters {
    pub(crate) calls: Arc<Calls>,
    pub(crate) creates: Histogram,
    pub(crate) create_failures: Counter,
    pub(crate) starts: Counter,
    sandbox_ends: Counters,
    pub(crate) execs: Counter,
    exec_ends: Counters,
    pub(crate) packs: Histogram,
}

impl Default for Meters {
    fn default() -> Self {
        Self {
            calls: Calls::of_sandboxes(),
            creates: Histogram::default(),
            create_failures: Counter::default(),
            starts: Counter::default(),
            sandbox_ends: Counters::of(&ENDS),
            execs: Counter::default(),
            exec_ends: Counters::of(&[&ENDS[..], &[REFUSED]].concat()),
            packs: Histogram::default(),
        }
    }
}

impl Meters {
    pub(crate) fn sandbox_ended(&self, end: End) {
        self.sandbox_ends.count(word(end));
    }

    pub(crate) fn exec_ended(&self, end: End) {
        self.exec_ends.count(word(end));
    }

    pub(crate) fn exec_refused(&self) {
        self.exec_ends.count(REFUSED);
    }
}

impl Node {
    /// Writes down what was counted, but for the calls.
    pub(crate) fn write_meters(&self, page: &mut Page) {
        let meters = &self.meters;
        let sandboxes = self.list(true);
        page.family("sandboxes", "Sandboxes by their state.", Kind::Gauge);
        for (state, word) in STATES {
            let count = sandboxes.iter().filter(|sandbox| sandbox.state() == state).count();
            page.value("sandboxes", &[("state", word)], count as u64);
        }
        let (free, made) = self.container.slots();
        page.gauge("slots_free", "Prepared places for sandboxes that are free.", free);
        page.counter("slots_made_total", "Places that were prepared.", made);
        let (running, waiting, ready) = self.functions.counts();
        page.gauge("calls_running", "Function calls that run.", running as u64);
        page.gauge("calls_waiting", "Function calls that wait for their turn.", waiting as u64);
        page.gauge(
            "call_containers_ready",
            "Containers that wait for function calls.",
            ready as u64,
        );
        let took = "How long creates took that succeeded.";
        page.histogram("create_seconds", took, &meters.creates);
        let failed = meters.create_failures.get();
        page.counter("create_failures_total", "Creates that failed.", failed);
        let started = "Sandboxes whose own command was started.";
        page.counter("starts_total", started, meters.starts.get());
        let ends = "Ends of sandboxes.";
        page.counters("sandbox_ends_total", ends, "end", &meters.sandbox_ends);
        page.counter("execs_total", "Commands asked for in sandboxes.", meters.execs.get());
        page.counters("exec_ends_total", "Ends of commands.", "end", &meters.exec_ends);
        page.histogram("pack_diff_seconds", "How long packs took.", &meters.packs);
        self.events.write_meters(page);
    }
}
