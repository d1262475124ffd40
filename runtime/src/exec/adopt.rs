//! The commands of an earlier runtime: those that run are followed on, the ends of the others are told.
//!
//! | what | after the death of a runtime |
//! |---|---|
//! | a command | runs on |
//! | how it ended meanwhile | noted by its zygote; `lost` when that died too |
//! | what it printed meanwhile | waits in its pipes or its terminal, which its zygote holds; a full pipe makes it wait |
//! | its input | a pipe ends, a terminal lives on |
//! | its time-out | counts on |
//! | the client that started it | is gone: the command is one in the background from then on |

use super::command::{Command, Input};
use super::own::{self, Own};
use super::record::{CommandRecord, now_unix_ns};
use super::run::{Child, Run};
use super::streams;
use super::table::{MAIN, Remembered};
use crate::backends::Instance;
use crate::meters::Meters;
use crate::sandbox::Sandbox;
use crate::stream::Sink;
use crate::zygote::Process;
use crate::zygote::former::Former;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Duration;

/// Takes over the commands of a sandbox that lives.
pub fn living(
    sandbox: &Arc<Sandbox>,
    instance: &Arc<dyn Instance>,
    former: &Arc<Former>,
    remembered: &mut Remembered,
    meters: &Arc<Meters>,
) {
    for mut record in remembered.records.remove(sandbox.id()).unwrap_or_default() {
        let output = sandbox.commands.old_output(&record, remembered);
        if record.ended.is_some() {
            let command = Command::new(record, output, Input::default(), None, None);
            sandbox.commands.insert(&command);
            continue;
        }
        let child = find(&record, former);
        let pid = matches!(child, Child::Adopted(_)).then_some(record.pid);
        let streams = streams::reopen(&record.outputs, former, pid);
        let pidfd = match &child {
            Child::Adopted(process) => Some(Arc::clone(&process.pidfd)),
            _ => None,
        };
        let left = |deadline: u64| Duration::from_nanos(deadline.saturating_sub(now_unix_ns()));
        let timeout = record.deadline_unix_ns.map(left);
        let tree = record.group.and_then(|number| instance.adopt_tree(number)).map(Arc::from);
        let is_main = record.names().1 == MAIN;
        record.is_background = !is_main;
        let input = Input::new(streams.input, streams.is_terminal);
        let command = Command::new(record, output, input, pidfd.clone(), tree);
        let run = Run {
            sandbox: Arc::clone(sandbox),
            instance: Arc::clone(instance),
            sink: Sink::new(Arc::clone(&command.output), None, u64::MAX),
            command: Arc::clone(&command),
            child,
            outputs: streams.outputs,
            is_terminal: streams.is_terminal,
            client: None,
            timeout,
            meters: (!is_main).then(|| Arc::clone(meters)),
        };
        sandbox.commands.insert(&command);
        if is_main {
            if let Some(pidfd) = pidfd {
                sandbox.set_main(pidfd);
            }
            let own = Own { command, run: Some(run) };
            tokio::spawn(own::follow(Arc::clone(sandbox), Arc::clone(instance), own));
        } else {
            tokio::spawn(run.drive());
        }
    }
}

/// Of a sandbox that has ended only what its own command printed is kept.
pub fn ended(sandbox: &Arc<Sandbox>, remembered: &mut Remembered) {
    let records = remembered.records.remove(sandbox.id()).unwrap_or_default();
    for mut record in records {
        let output = sandbox.commands.old_output(&record, remembered);
        let is_main = record.names().1 == MAIN;
        record.ended.get_or_insert_with(|| {
            super::record::Ended::now(crate::record::End::Lost, String::new(), 0)
        });
        let command = Command::new(record, output, Input::default(), None, None);
        if is_main {
            sandbox.commands.insert(&command);
        } else {
            sandbox.commands.forget(&command);
        }
    }
}

/// Its process, if it lives; else how it ended.
fn find(record: &CommandRecord, former: &Arc<Former>) -> Child {
    let ended = || Child::Ended(former.exit_of(record.process_number));
    let Ok(pidfd) = sys::process::pidfd_open(record.pid) else { return ended() };
    if sys::process::pidfd_number(pidfd.as_fd()).ok() != Some(record.process_number) {
        return ended();
    }
    Child::Adopted(Process::adopted(record.pid, pidfd, Arc::clone(former)))
}
