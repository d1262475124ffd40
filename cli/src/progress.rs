//! A build's progress: a bar on a terminal, else one plain line a phase.
//!
//! Locking: one mutex around the bar of the current phase; counters are atomic. Called from every worker.

use crate::output::{Output, escape};
use crate::quantity::show_bytes;
use builder::{Phase, Progress};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Redraw interval; also the longest time a bar says nothing.
const TICK: Duration = Duration::from_millis(100);

/// Shows what a build does.
pub struct Bars {
    out: Output,
    bar: Mutex<Option<ProgressBar>>,
    plain: AtomicU64,
    stored: AtomicU64,
    reused: AtomicU64,
}

impl Bars {
    /// Draws nothing before the first phase.
    pub fn new(out: Output) -> Self {
        Self {
            out,
            bar: Mutex::new(None),
            plain: AtomicU64::new(0),
            stored: AtomicU64::new(0),
            reused: AtomicU64::new(0),
        }
    }

    /// Takes the bar off the screen.
    pub fn finish(&self) {
        if let Some(bar) = self.bar.lock().unwrap_or_else(PoisonError::into_inner).take() {
            bar.finish_and_clear();
        }
    }

    fn with_bar(&self, act: impl FnOnce(&ProgressBar)) {
        if let Some(bar) = &*self.bar.lock().unwrap_or_else(PoisonError::into_inner) {
            act(bar);
        }
    }

    fn show_totals(&self) {
        let (plain, stored) =
            (self.plain.load(Ordering::Relaxed), self.stored.load(Ordering::Relaxed));
        let reused = self.reused.load(Ordering::Relaxed);
        self.with_bar(|bar| {
            bar.set_message(format!(
                "{} new as {}, {} known",
                show_bytes(plain),
                show_bytes(stored),
                show_bytes(reused)
            ));
        });
    }
}

fn word(phase: Phase) -> &'static str {
    match phase {
        Phase::Index => "listing",
        Phase::Digest => "reading",
        Phase::Encode => "storing",
        Phase::Commit => "naming",
    }
}

/// Where the whole is known, and where it is not.
const BAR: &str = "{prefix:>8} [{bar:30}] {bytes}/{total_bytes} {bytes_per_sec} {msg}";
const SPINNER: &str = "{prefix:>8} {spinner} {bytes} {msg}";

fn style(bytes: u64) -> ProgressStyle {
    let template = if bytes > 0 { BAR } else { SPINNER };
    // A template that does not parse is a defect a test finds; the default is still a bar.
    ProgressStyle::with_template(template)
        .unwrap_or_else(|_| ProgressStyle::default_bar())
        .progress_chars("=> ")
}

impl Progress for Bars {
    fn phase(&self, phase: Phase, files: u64, bytes: u64) {
        self.finish();
        if !self.out.is_watched() {
            if !self.out.is_json() && (files > 0 || bytes > 0) {
                let text = format!("{} {files} files, {}", word(phase), show_bytes(bytes));
                self.out.notice(&text);
            }
            return;
        }
        let bar = ProgressBar::with_draw_target(
            (bytes > 0).then_some(bytes),
            ProgressDrawTarget::stderr(),
        );
        bar.set_style(style(bytes));
        bar.set_prefix(word(phase));
        bar.enable_steady_tick(TICK);
        *self.bar.lock().unwrap_or_else(PoisonError::into_inner) = Some(bar);
    }

    fn advance(&self, _files: u64, bytes: u64) {
        self.with_bar(|bar| bar.inc(bytes));
    }

    fn stored(&self, plain_bytes: u64, stored_bytes: u64) {
        self.plain.fetch_add(plain_bytes, Ordering::Relaxed);
        self.stored.fetch_add(stored_bytes, Ordering::Relaxed);
        self.show_totals();
    }

    fn reused(&self, plain_bytes: u64) {
        self.reused.fetch_add(plain_bytes, Ordering::Relaxed);
        self.show_totals();
    }

    fn notice(&self, text: &str) {
        let mut shown = false;
        self.with_bar(|bar| {
            bar.println(format!("lamella: {}", escape(text)));
            shown = true;
        });
        if !shown {
            self.out.notice(text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_templates_parse() {
        for template in [BAR, SPINNER] {
            assert!(ProgressStyle::with_template(template).is_ok(), "{template}");
        }
    }
}
