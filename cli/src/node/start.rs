//! Finds the node of a data directory, or starts one in the background.
//!
//! A node that is started here tells on its standard output how it went: one JSON line, read once. Two
//! commands may start a node at the same time; one wins the lock, the other's child says so and the
//! command connects to the winner.

use crate::errors::{Failure, Outcome, Remedy};
use crate::node::lock::{self, Shared};
use crate::output::Output;
use crate::settings::Settings;
use layer::{Context, Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};
use std::fs::OpenOptions;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};
use tonic::transport::Channel;

/// How long a node may take to come up, reindexing included.
const START_TIMEOUT: Duration = Duration::from_secs(120);
/// How often a node that somebody else starts is looked for.
const RETRY: Duration = Duration::from_millis(25);

/// How long a node that is started here stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// Until `lamella down`.
    UntilDown,
    /// Until its last user is gone.
    WhileUsed,
}

/// What a node that starts in the background says about it.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Announcement {
    /// The socket accepts.
    Ready,
    /// Another process has the lock.
    Held,
    /// It did not come up.
    Failed {
        /// The kind's word.
        kind: String,
        /// What and why.
        message: String,
    },
}

/// A living node and the right to use it.
#[derive(Debug)]
pub struct Node {
    /// Images and Sandboxes.
    pub channel: Channel,
    _user: Shared,
}

/// Registers a user of the node, living or to come. Blocks while a node ends.
fn user(settings: &Settings) -> Result<Shared> {
    settings.prepare()?;
    lock::shared(&settings.run("users.lock"))
}

/// Connects to the node if one is running.
pub async fn running(settings: &Settings) -> Outcome<Option<Node>> {
    if !settings.run("node.lock").exists() {
        return Ok(None);
    }
    let user = user(settings)?;
    refuse_other_store(settings)?;
    match proto::connect::unix(&settings.node_socket()).await {
        Ok(channel) => Ok(Some(Node { channel, _user: user })),
        Err(_) => Ok(None),
    }
}

/// Connects to the node; starts one in the background when none is running, and says so.
pub async fn connect(settings: &Settings, lifetime: Lifetime, out: Output) -> Outcome<Node> {
    let user = user(settings)?;
    let deadline = Instant::now() + START_TIMEOUT;
    loop {
        refuse_other_store(settings)?;
        if let Ok(channel) = proto::connect::unix(&settings.node_socket()).await {
            return Ok(Node { channel, _user: user });
        }
        if Instant::now() > deadline {
            return Err(Error::new(
                ErrorKind::Timeout,
                format!("the node of {} does not come up", settings.data().display()),
            ))
            .remedy(|_| Some(format!("see {}", settings.run("node.log").display())));
        }
        if lock::holder(&settings.run("node.lock"))?.is_none() {
            match launch(settings, lifetime).await? {
                Announcement::Ready if lifetime == Lifetime::UntilDown => {
                    out.notice(&format!(
                        "started a node for {} in the background; `lamella down` ends it",
                        settings.data().display()
                    ));
                }
                Announcement::Ready | Announcement::Held => {}
                Announcement::Failed { kind, message } => {
                    let kind = kind.parse().unwrap_or(ErrorKind::Internal);
                    return Err(Error::new(kind, message).into());
                }
            }
        }
        tokio::time::sleep(RETRY).await;
    }
}

/// A store that the user named must be the one that the node serves.
fn refuse_other_store(settings: &Settings) -> Outcome {
    let Some(owner) = lock::holder(&settings.run("node.lock"))? else { return Ok(()) };
    if settings.store_is_chosen() && owner.store != settings.store_url() {
        let error = Error::new(
            ErrorKind::Busy,
            format!(
                "the node of {} (process {}) serves the store {}, not {}",
                settings.data().display(),
                owner.pid,
                owner.store,
                settings.store_url()
            ),
        );
        return Err(Failure::Failed {
            error,
            remedy: Some("use another --data directory for another store".to_owned()),
        });
    }
    Ok(())
}

/// This program, with the places of `settings`, running `action`.
pub fn own_command(settings: &Settings, action: &str) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("lamella");
    command.arg("--store").arg(settings.store_url());
    command.arg("--data").arg(settings.data()).arg(action);
    if let Some(config) = settings.config() {
        command.env("LAMELLA_CONFIG", config);
    }
    command
}

/// A file that takes what a daemon writes to its standard error: last words of a panic.
pub fn stray_output(path: &Path) -> Result<Stdio> {
    let file = OpenOptions::new().append(true).create(true).mode(0o600).open(path);
    Ok(Stdio::from(file.context(|| format!("open {}", path.display()))?))
}

async fn launch(settings: &Settings, lifetime: Lifetime) -> Result<Announcement> {
    let mut command = own_command(settings, "up");
    command.arg("--background");
    if lifetime == Lifetime::WhileUsed {
        command.arg("--ephemeral");
    }
    // The node must not hold the directory from which it happened to be started.
    command.current_dir("/").stdin(Stdio::null()).stdout(Stdio::piped());
    command.stderr(stray_output(&settings.run("node.log"))?);
    let mut child = command.spawn().context(|| "start a node".to_owned())?;
    let stdout = child.stdout.take();
    let told = tokio::task::spawn_blocking(move || first_line(stdout)).await.map_err(|error| {
        Error::new(ErrorKind::Internal, "read a node's start").with_source(error)
    })?;
    match told {
        Some(announcement) => Ok(announcement),
        None => Err(silent_death(&mut child, settings)),
    }
}

fn first_line(stdout: Option<ChildStdout>) -> Option<Announcement> {
    let mut line = String::new();
    BufReader::new(stdout?).read_line(&mut line).ok()?;
    serde_json::from_str(&line).ok()
}

fn silent_death(child: &mut Child, settings: &Settings) -> Error {
    let how = child.wait().map_or_else(|error| error.to_string(), |status| status.to_string());
    Error::new(
        ErrorKind::Internal,
        format!("the node died at its start ({how}); see {}", settings.run("node.log").display()),
    )
}
