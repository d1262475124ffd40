//! `top`: what the node and its sandboxes use now, again and again on a terminal, else once a line for each.
//!
//! Two looks are needed for what is a rate. Ctrl-C is the usual end; the screen is the
//! terminal's second one, which is given back on every way out but SIGKILL.

mod screen;

use super::Scene;
use crate::args::{SortBy, Top};
use crate::errors::{Outcome, Remedy};
use crate::node::start;
use crate::output::{escape, write_out};
use crate::quantity::{show_bytes, show_share};
use layer::{Error, ErrorKind};
use proto::v1::layer_fs_client::LayerFsClient;
use proto::v1::sandboxes_client::SandboxesClient;
use proto::v1::{SandboxUsage, State, StatsRequest, UsageRequest, UsageResponse};
use screen::Screen;
use serde::Serialize;
use std::collections::HashMap;
use std::fmt::Write;
use std::io::{self, IsTerminal};
use std::time::Duration;
use tokio::signal::unix::{SignalKind, signal};
use tonic::transport::Channel;

/// Between the two looks of a single table.
const ONCE: Duration = Duration::from_millis(500);
/// Sandboxes whose written bytes are asked for.
const MAX_DISKS: usize = 64;

/// What is known after two looks.
#[derive(Debug, Serialize)]
struct Table {
    sandboxes: HashMap<&'static str, u64>,
    creates_per_s: f64,
    host_cpu_percent: f64,
    host_memory_bytes: u64,
    host_memory_used_bytes: u64,
    disk_bytes: u64,
    disk_free_bytes: u64,
    cache_bytes: Option<u64>,
    cache_limit_bytes: Option<u64>,
    rows: Vec<Row>,
}

/// One sandbox.
#[derive(Debug, Serialize)]
struct Row {
    id: String,
    state: &'static str,
    /// Hundred is one processor.
    cpu_percent: f64,
    memory_bytes: u64,
    tasks: u64,
    commands: u64,
    written_bytes: Option<u64>,
    age_s: u64,
    environment: String,
}

/// What fsd says of its cache: bytes and limit.
type Cache = Option<(u64, u64)>;

/// `top`
pub async fn top(scene: &Scene, args: Top) -> Outcome {
    let Some(node) = start::running(&scene.settings).await? else {
        let data = scene.settings.data().display();
        return Err(Error::new(ErrorKind::Unavailable, format!("no node is running on {data}")))
            .remedy(|_| Some("`lamella up` starts one".to_owned()));
    };
    let mut source = Source {
        runtime: SandboxesClient::new(node.channel.clone()),
        layerfs: LayerFsClient::new(proto::connect::unix_lazy(&scene.settings.fsd_socket())),
        disk_of: Vec::new(),
    };
    let is_live = !args.once && !scene.out.is_json() && io::stdout().is_terminal();
    if is_live {
        return live(&mut source, &args).await;
    }
    // The first look finds out whose disks to ask for, and is what the rates begin at.
    let first = source.look().await?;
    source.ask_for_disks(&first.0, args.sort);
    tokio::time::sleep(ONCE).await;
    let table = Table::new(&first.0, source.look().await?, args.sort);
    if scene.out.is_json() {
        return scene.out.result(&table, String::new);
    }
    write_out(table.text(args.lines.unwrap_or(usize::MAX), usize::MAX).as_bytes())
}

/// Draws until somebody ends it.
async fn live(source: &mut Source, args: &Top) -> Outcome {
    let signals = (SignalKind::interrupt(), SignalKind::terminate(), SignalKind::window_change());
    let failed = |error| Error::io("listen to signals", error);
    let mut interrupt = signal(signals.0).map_err(failed)?;
    let mut terminate = signal(signals.1).map_err(failed)?;
    let mut resized = signal(signals.2).map_err(failed)?;
    let screen = Screen::enter()?;
    let mut before = source.look().await?.0;
    source.ask_for_disks(&before, args.sort);
    let mut pause = ONCE.min(args.every);
    let mut table: Option<Table> = None;
    loop {
        tokio::select! {
            _ = interrupt.recv() => return Ok(()),
            _ = terminate.recv() => return Ok(()),
            _ = resized.recv() => {}
            () = tokio::time::sleep(pause) => {
                pause = args.every;
                let now = source.look().await?;
                let next = now.0.clone();
                table = Some(Table::new(&before, now, args.sort));
                before = next;
                source.ask_for_disks(&before, args.sort);
            }
        }
        if let Some(table) = &table {
            screen.draw(|rows, columns| {
                let room = rows.saturating_sub(HEAD_LINES);
                table.text(args.lines.unwrap_or(room).min(room), columns)
            })?;
        }
    }
}

struct Source {
    runtime: SandboxesClient<Channel>,
    layerfs: LayerFsClient<Channel>,
    disk_of: Vec<String>,
}

impl Source {
    async fn look(&mut self) -> Outcome<(UsageResponse, Cache)> {
        let request = UsageRequest { disk_of: self.disk_of.clone() };
        let usage = self.runtime.usage(request).await?.into_inner();
        // A node whose fsd is being started again is worth a table all the same.
        let stats = self.layerfs.stats(StatsRequest {}).await.ok().map(tonic::Response::into_inner);
        Ok((usage, stats.map(|stats| (stats.cache_bytes, stats.cache_limit_bytes))))
    }

    /// Of those that are likely to be shown; all of few.
    fn ask_for_disks(&mut self, usage: &UsageResponse, sort: SortBy) {
        let mut known: Vec<&SandboxUsage> = usage.sandboxes.iter().collect();
        match sort {
            SortBy::Memory => known.sort_by_key(|one| std::cmp::Reverse(one.memory_bytes)),
            SortBy::Tasks => known.sort_by_key(|one| std::cmp::Reverse(one.tasks)),
            SortBy::Commands => known.sort_by_key(|one| std::cmp::Reverse(one.commands)),
            SortBy::Age => known.sort_by_key(|one| std::cmp::Reverse(one.created_unix_ns)),
            SortBy::Disk => known.sort_by_key(|one| std::cmp::Reverse(one.written_bytes)),
            SortBy::Id => known.sort_by(|a, b| a.id.cmp(&b.id)),
            SortBy::Cpu => known.sort_by_key(|one| std::cmp::Reverse(one.cpu_us)),
        }
        self.disk_of = known.into_iter().take(MAX_DISKS).map(|one| one.id.clone()).collect();
    }
}

/// Lines above the sandboxes.
const HEAD_LINES: usize = 5;

fn state_word(state: State) -> &'static str {
    match state {
        State::Creating => "creating",
        State::Running => "running",
        State::Paused => "paused",
        State::Stopping => "stopping",
        _ => "ended",
    }
}

impl Table {
    fn new(before: &UsageResponse, (now, cache): (UsageResponse, Cache), sort: SortBy) -> Self {
        let passed_us = (now.unix_ns.saturating_sub(before.unix_ns) / 1000).max(1);
        let cpu_before: HashMap<&str, u64> =
            before.sandboxes.iter().map(|one| (one.id.as_str(), one.cpu_us)).collect();
        let mut states = HashMap::from([("ended", now.ended)]);
        let mut rows = Vec::with_capacity(now.sandboxes.len());
        for one in now.sandboxes {
            let state = state_word(one.state());
            *states.entry(state).or_default() += 1;
            let since = cpu_before.get(one.id.as_str()).copied().unwrap_or(one.cpu_us);
            rows.push(Row {
                state,
                cpu_percent: one.cpu_us.saturating_sub(since) as f64 * 100.0 / passed_us as f64,
                memory_bytes: one.memory_bytes,
                tasks: one.tasks,
                commands: one.commands,
                written_bytes: one.written_bytes,
                age_s: now.unix_ns.saturating_sub(one.created_unix_ns) / 1_000_000_000,
                environment: one.environment,
                id: one.id,
            });
        }
        sort_rows(&mut rows, sort);
        let busy = now.host_busy_us.saturating_sub(before.host_busy_us);
        let all = now.host_cpu_us.saturating_sub(before.host_cpu_us).max(1);
        let created = now.creates_total.saturating_sub(before.creates_total);
        Self {
            sandboxes: states,
            creates_per_s: created as f64 * 1e6 / passed_us as f64,
            host_cpu_percent: busy as f64 * 100.0 / all as f64,
            host_memory_bytes: now.host_memory_bytes,
            host_memory_used_bytes: now.host_memory_bytes.saturating_sub(now.host_available_bytes),
            disk_bytes: now.disk_bytes,
            disk_free_bytes: now.disk_free_bytes,
            cache_bytes: cache.map(|cache| cache.0),
            cache_limit_bytes: cache.map(|cache| cache.1).filter(|limit| *limit > 0),
            rows,
        }
    }

    /// So many sandboxes, and no line longer than the terminal.
    fn text(&self, sandboxes: usize, columns: usize) -> String {
        let count = |state: &str| self.sandboxes.get(state).copied().unwrap_or(0);
        let cache = self.cache_bytes.map_or_else(|| "-".to_owned(), show_bytes);
        let limit = self.cache_limit_bytes.map(|limit| format!(" of {}", show_bytes(limit)));
        let mut lines = vec![
            format!(
                "sandboxes  {} running, {} paused, {} creating, {} stopping, {} ended; {:.1} creates/s",
                count("running"),
                count("paused"),
                count("creating"),
                count("stopping"),
                count("ended"),
                self.creates_per_s
            ),
            format!(
                "host       cpu {:.1} %, memory {} of {} ({})",
                self.host_cpu_percent,
                show_bytes(self.host_memory_used_bytes),
                show_bytes(self.host_memory_bytes),
                show_share(self.host_memory_used_bytes, self.host_memory_bytes)
            ),
            format!(
                "disk       {} of {} free, cache {cache}{}",
                show_bytes(self.disk_free_bytes),
                show_bytes(self.disk_bytes),
                limit.unwrap_or_default()
            ),
            String::new(),
            format!(
                "{:<12} {:<8} {:>7} {:>11} {:>6} {:>5} {:>11} {:>8}  ENVIRONMENT",
                "ID", "STATE", "CPU %", "MEMORY", "TASKS", "CMDS", "WRITTEN", "AGE"
            ),
        ];
        lines.extend(self.rows.iter().take(sandboxes).map(Row::line));
        let mut text = String::new();
        for line in lines {
            let line: String = escape(line.trim_end()).chars().take(columns).collect();
            // Writing to a string cannot fail.
            let _ = writeln!(text, "{line}");
        }
        text
    }
}

fn sort_rows(rows: &mut [Row], sort: SortBy) {
    rows.sort_by(|a, b| {
        let order = match sort {
            SortBy::Cpu => b.cpu_percent.total_cmp(&a.cpu_percent),
            SortBy::Memory => b.memory_bytes.cmp(&a.memory_bytes),
            SortBy::Tasks => b.tasks.cmp(&a.tasks),
            SortBy::Commands => b.commands.cmp(&a.commands),
            SortBy::Disk => b.written_bytes.cmp(&a.written_bytes),
            SortBy::Age => a.age_s.cmp(&b.age_s),
            SortBy::Id => std::cmp::Ordering::Equal,
        };
        order.then_with(|| a.id.cmp(&b.id))
    });
}

impl Row {
    fn line(&self) -> String {
        format!(
            "{:<12} {:<8} {:>7.1} {:>11} {:>6} {:>5} {:>11} {:>8}  {}",
            self.id,
            self.state,
            self.cpu_percent,
            show_bytes(self.memory_bytes),
            self.tasks,
            self.commands,
            self.written_bytes.map_or_else(|| "-".to_owned(), show_bytes),
            show_age(self.age_s),
            self.environment
        )
    }
}

/// `59s`, `1h02m`, `3d04h`
fn show_age(seconds: u64) -> String {
    match seconds {
        0..60 => format!("{seconds}s"),
        60..3_600 => format!("{}m{:02}s", seconds / 60, seconds % 60),
        3_600..86_400 => format!("{}h{:02}m", seconds / 3_600, seconds / 60 % 60),
        _ => format!("{}d{:02}h", seconds / 86_400, seconds / 3_600 % 24),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn usage(unix_ns: u64, creates: u64, cpu: &[(&str, u64)]) -> UsageResponse {
        let one = |(id, cpu_us): &(&str, u64)| SandboxUsage {
            id: (*id).to_owned(),
            state: State::Running.into(),
            environment: "env/a\u{1b}[2J:1".into(),
            created_unix_ns: 0,
            cpu_us: *cpu_us,
            memory_bytes: 1 << 20,
            ..SandboxUsage::default()
        };
        UsageResponse {
            unix_ns,
            creates_total: creates,
            sandboxes: cpu.iter().map(one).collect(),
            host_memory_bytes: 8 << 30,
            host_available_bytes: 6 << 30,
            host_cpu_us: unix_ns / 500,
            host_busy_us: unix_ns / 1000,
            ..UsageResponse::default()
        }
    }

    #[test]
    fn rates_come_from_two_looks_and_rows_are_sorted_and_cut() {
        let before = usage(1_000_000_000, 10, &[("a", 100), ("b", 0)]);
        let now = usage(3_000_000_000, 14, &[("a", 1_000_100), ("b", 3_000_000), ("c", 77)]);
        let table = Table::new(&before, (now, Some((5 << 20, 0))), SortBy::Cpu);
        let rows: Vec<_> =
            table.rows.iter().map(|row| (row.id.as_str(), row.cpu_percent)).collect();
        assert_eq!(rows, [("b", 150.0), ("a", 50.0), ("c", 0.0)]);
        assert_eq!((table.creates_per_s, table.host_cpu_percent), (2.0, 50.0));
        let text = table.text(2, 60);
        assert_eq!(text.lines().count(), HEAD_LINES + 2);
        assert!(text.lines().all(|line| line.chars().count() <= 60), "{text}");
        assert!(text.starts_with("sandboxes  3 running, 0 paused"), "{text}");
        let whole = table.text(usize::MAX, usize::MAX);
        assert!(whole.contains("env/a\\u{1b}[2J:1"), "{whole}");
        assert!(
            whole.contains("cache 5.0 MiB\n") && whole.contains("2.0 GiB of 8.0 GiB"),
            "{whole}"
        );
        let by_id = Table::new(&before, (before.clone(), None), SortBy::Id);
        assert_eq!(by_id.rows[0].id, "a");
    }

    #[test]
    fn ages_are_short() {
        let ages = [0, 59, 62, 3_720, 273_600].map(show_age);
        assert_eq!(ages, ["0s", "59s", "1m02s", "1h02m", "3d04h"]);
    }
}
