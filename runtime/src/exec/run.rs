//! One running command: moves what it prints, waits for its end, brings it about when its time is over or its
//! client leaves, and writes down how it ended. One task drives a command and ends with it.

use super::command::Command;
use super::record::Ended;
use crate::backends::{Instance, Tree};
use crate::events::report;
use crate::meters::Meters;
use crate::record::End as EndKind;
use crate::sandbox::Sandbox;
use crate::stream::{End, Sink, drain, pump};
use crate::zygote::{Process, StartedCommand};
use proto::v1::ExecOutput;
use proto::v1::exec_output::Output as Out;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;
use sys::process::{Exit, Reach};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;

/// What a client reads of a command that took too long.
pub const TIME_OVER: &str = "the time was over";

/// The process of a command.
#[derive(Debug)]
pub enum Child {
    /// Started by this runtime.
    Started(StartedCommand),
    /// Started by an earlier one.
    Adopted(Process),
    /// It ended before this runtime began; how, if that is known.
    Ended(Option<Exit>),
}

/// The end of a process.
#[derive(Debug, Clone, Copy)]
enum Known {
    Exit(Exit),
    /// It has ended, and nobody can tell how.
    Nothing,
}

impl Child {
    async fn wait(&mut self) -> Known {
        let exit = match self {
            Self::Started(command) => command.process.wait().await,
            Self::Adopted(process) => process.wait().await,
            Self::Ended(exit) => *exit,
        };
        exit.map_or(Known::Nothing, Known::Exit)
    }

    /// Why it could not become the command after all.
    fn refusal(&mut self) -> Option<(i32, String)> {
        match self {
            Self::Started(command) => command.refusal(),
            _ => None,
        }
    }

    /// Ends it, should it live.
    fn kill(&self) {
        let process = match self {
            Self::Started(command) => &command.process,
            Self::Adopted(process) => process,
            Self::Ended(_) => return,
        };
        const SIGKILL: i32 = 9;
        let _ended = sys::process::pidfd_signal(process.pidfd.as_fd(), SIGKILL, Reach::Group);
    }
}

/// One running command.
#[derive(Debug)]
pub struct Run {
    /// Where it runs.
    pub sandbox: Arc<Sandbox>,
    /// What runs that.
    pub instance: Arc<dyn Instance>,
    /// What clients see of it.
    pub command: Arc<Command>,
    /// Its process.
    pub child: Child,
    /// What it prints into.
    pub outputs: Vec<(bool, End)>,
    /// Whether that is a terminal.
    pub is_terminal: bool,
    /// Where that goes.
    pub sink: Sink,
    /// Who started it and waits for its end.
    pub client: Option<mpsc::Sender<ExecOutput>>,
    /// How long it may run from now on.
    pub timeout: Option<Duration>,
    /// Counts its end.
    pub meters: Option<Arc<Meters>>,
}

impl Run {
    /// To its end; answers it.
    pub async fn drive(mut self) -> Ended {
        let counted = self.sandbox.count_command();
        // What a sandbox does of its own is no use of it.
        let is_own = self.command.id() == super::table::MAIN;
        let in_use = (!is_own).then(|| self.sandbox.activity.begin());
        let (tell_end, ended) = watch::channel(false);
        let mut pumps = JoinSet::new();
        for (is_error, source) in std::mem::take(&mut self.outputs) {
            let (sink, ended, is_terminal) = (self.sink.clone(), ended.clone(), self.is_terminal);
            pumps.spawn(async move {
                (is_error, pump(source, is_error, sink, is_terminal, ended).await)
            });
        }
        let end = self.wait().await;
        let _pumps_listen = tell_end.send(true);
        let mut still_open = Vec::new();
        while let Some(pumped) = pumps.join_next().await {
            if let Ok((is_error, Some(source))) = pumped {
                still_open.push((is_error, source));
            }
        }
        let ended = self.ended(end);
        // Before anybody hears of the end, so that the next command finds the group free.
        let tree = self.command.take_tree();
        let is_populated = tree.as_ref().is_some_and(|tree| tree.is_populated());
        self.write_down(&ended).await;
        if is_populated && !self.is_terminal {
            self.leave_children(still_open, tree.as_ref());
        } else {
            drop(tree);
            self.command.output.rest();
        }
        drop((counted, in_use));
        self.command.set_over();
        self.command.drop_input().await;
        if let Some(client) = &self.client {
            // A client that has left needs nothing.
            let _left = client.send(ExecOutput { output: Some(Out::Ended(ended.wire())) }).await;
        }
        if self.is_forgotten() {
            self.sandbox.commands.forget(&self.command);
        } else {
            self.sandbox.commands.forget_oldest();
        }
        ended
    }

    /// Nobody asks for a command in the foreground once its client has heard of its end.
    fn is_forgotten(&self) -> bool {
        self.client.is_some() && !self.command.is_attached()
    }

    /// Waits for the end of the command, and brings it about when its time is over or its client left.
    async fn wait(&mut self) -> EndKind {
        let timeout = async {
            match self.timeout {
                Some(timeout) => tokio::time::sleep(timeout).await,
                None => std::future::pending().await,
            }
        };
        let client_left = async {
            const LOOK: Duration = Duration::from_millis(200);
            match &self.client {
                Some(client) => client.closed().await,
                None => std::future::pending().await,
            }
            while self.command.is_attached() {
                tokio::time::sleep(LOOK).await;
            }
        };
        let forced = tokio::select! {
            exit = self.child.wait() => return self.end_of(exit),
            () = timeout => EndKind::Timeout,
            () = client_left => EndKind::Killed,
        };
        let killed = match self.command.tree() {
            Some(tree) => tree.kill(),
            // The sandbox's own command: with its instance everything ends.
            None if self.command.id() == super::table::MAIN => self.instance.kill(),
            None => Ok(()),
        };
        if let Err(error) = killed {
            tracing::warn!(error = %error.chain(), "kill a command by its group");
            self.child.kill();
        }
        self.child.wait().await;
        forced
    }

    fn end_of(&self, exit: Known) -> EndKind {
        match exit {
            Known::Exit(Exit::Signal(9)) | Known::Nothing
                if self.instance.is_stopped_for_room() =>
            {
                EndKind::DiskFull(137)
            }
            // A shell whose child was killed answers 137 in its place.
            Known::Exit(Exit::Signal(9) | Exit::Code(137)) if self.sandbox.has_new_oom_kill() => {
                EndKind::Oom
            }
            Known::Exit(Exit::Signal(9)) | Known::Nothing if self.sandbox.is_stop_asked() => {
                EndKind::Killed
            }
            Known::Exit(Exit::Code(code)) if code != 0 && self.instance.is_disk_full() => {
                EndKind::DiskFull(code)
            }
            Known::Exit(Exit::Code(code)) => EndKind::Exited(code),
            Known::Exit(Exit::Signal(signal)) => EndKind::Signal(signal),
            Known::Nothing => EndKind::Lost,
        }
    }

    fn ended(&mut self, end: EndKind) -> Ended {
        let refusal = self.child.refusal();
        if let Some(meters) = &self.meters {
            match refusal {
                Some(_) => meters.exec_refused(),
                None => meters.exec_ended(end),
            }
        }
        let message = match (refusal, end) {
            (Some((_, message)), _) => message,
            (None, EndKind::Oom) => "out of memory".to_owned(),
            (None, EndKind::Timeout) => TIME_OVER.to_owned(),
            (None, EndKind::DiskFull(_)) => "no room on the sandbox's disk".to_owned(),
            (None, _) => String::new(),
        };
        let ended = Ended::now(end, message, self.sink.truncated());
        let printed = self.command.output.range().1;
        report::exec_ended(&self.sandbox, &self.command.record(), &ended, printed);
        ended
    }

    /// CRASH: the end is in the journal before anybody hears of it; the streams are held until it is.
    async fn write_down(&self, ended: &Ended) {
        let record = self.command.update(|record| record.ended = Some(ended.clone()));
        if !self.is_forgotten()
            && let Err(error) = self.sandbox.commands.store().append(&record)
        {
            tracing::warn!(error = %error.chain(), "the end of a command is not written down");
        }
        if matches!(self.child, Child::Started(_)) {
            self.instance.forget_streams(record.pid, record.process_number).await;
        }
    }

    /// Keeps reading what processes print that the command left behind; it is kept if the command's output is.
    fn leave_children(&self, sources: Vec<(bool, End)>, tree: Option<&Arc<dyn Tree>>) {
        let sink = (!self.is_forgotten()).then(|| self.sink.kept_only());
        for (is_error, source) in sources {
            let (sink, tree) = (sink.clone(), tree.cloned());
            tokio::spawn(async move {
                let is_held = || tree.as_ref().is_some_and(|tree| tree.is_populated());
                drain(source, is_error, sink, is_held).await;
            });
        }
    }
}
