//! The sandbox's own command: the sandbox ends with it, and what it prints is the sandbox's log.

use super::command::{Command, Input};
use super::record::{CommandRecord, Ended};
use super::run::{Child, Run};
use super::streams;
use super::table::MAIN;
use crate::backends::{Command as Wanted, Instance};
use crate::events::report;
use crate::plan;
use crate::record::End as EndKind;
use crate::sandbox::Sandbox;
use crate::stream::Sink;
use crate::zygote::CommandStart;
use layer::Result;
use std::os::fd::AsFd;
use std::sync::Arc;

/// Bytes of its output that are kept.
const KEPT_BYTES: u64 = 4 << 20;

/// A sandbox's own command that was started, or could not be.
#[derive(Debug)]
pub struct Own {
    /// What clients see of it.
    pub command: Arc<Command>,
    /// What is left to do; absent when it could not be started.
    pub run: Option<Run>,
}

/// Starts it.
pub async fn start(
    sandbox: &Arc<Sandbox>,
    instance: &Arc<dyn Instance>,
    argv: &[String],
) -> Result<Own> {
    let defaults = sandbox.defaults();
    let wanted = plan::command(&defaults, argv.to_vec(), &[], None, None);
    let (user, cwd) = (wanted.user.clone(), wanted.cwd.clone());
    let wanted = Wanted { is_main: true, is_held: true, ..wanted };
    let (theirs, ours) = streams::pipes(false)?;
    let borrowed: Vec<_> = theirs.iter().map(AsFd::as_fd).collect();
    let mut record = CommandRecord::new(sandbox.id(), MAIN, argv);
    record.kept_bytes = KEPT_BYTES;
    report::exec_started(sandbox, &record, argv, &user, &cwd);
    let output = sandbox.commands.output(MAIN, KEPT_BYTES);
    let started = instance.exec(wanted, &borrowed).await;
    let started = started.inspect_err(|error| report::exec_failed(sandbox, &record, error))?.start;
    let child = match started {
        CommandStart::Refused(code, message) => {
            let ended = Ended::now(EndKind::Exited(code), message, 0);
            report::exec_ended(sandbox, &record, &ended, 0);
            record.ended = Some(ended);
            sandbox.commands.store().append(&record)?;
            let command = Command::new(record, output, Input::default(), None, None);
            sandbox.commands.insert(&command);
            return Ok(Own { command, run: None });
        }
        CommandStart::Started(child) => child,
    };
    let pidfd = Arc::clone(&child.process.pidfd);
    record.pid = child.process.pid;
    record.process_number = sys::process::pidfd_number(pidfd.as_fd()).unwrap_or(0);
    record.inner_pid = child.inner_pid;
    record.outputs = ours.ids;
    sandbox.commands.store().append(&record)?;
    sandbox.set_main(Arc::clone(&pidfd));
    let command = Command::new(record, output, Input::default(), Some(pidfd), None);
    sandbox.commands.insert(&command);
    let run = Run {
        sandbox: Arc::clone(sandbox),
        instance: Arc::clone(instance),
        sink: Sink::new(Arc::clone(&command.output), None, u64::MAX),
        command: Arc::clone(&command),
        child: Child::Started(child),
        outputs: ours.outputs,
        is_terminal: false,
        client: None,
        timeout: None,
        meters: None,
    };
    Ok(Own { command, run: Some(run) })
}

/// Keeps its output, and ends the sandbox with it.
pub async fn follow(sandbox: Arc<Sandbox>, instance: Arc<dyn Instance>, own: Own) {
    let ended = match own.run {
        Some(run) => run.drive().await,
        None => own.command.ended().unwrap_or(Ended::now(EndKind::Lost, String::new(), 0)),
    };
    let is_refused = matches!(ended.end, EndKind::Exited(_)) && !ended.message.is_empty();
    if is_refused {
        own.command.output.add(true, format!("{}\n", ended.message).as_bytes());
        own.command.output.rest();
    }
    let written = sandbox.update(|record| {
        record.end.get_or_insert(ended.end);
        if !record.state.is_over() {
            record.state = crate::record::State::Stopping;
        }
    });
    if let Err(error) = written.and_then(|()| instance.kill()) {
        tracing::error!(id = sandbox.id(), error = %error.chain(), "end a sandbox");
    }
}
