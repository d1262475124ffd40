//! What a new fsd does for the readers that the dead one left blocked, before it reads any event.
//!
//! 1. Every recorded event: its range is filled, then it is answered; or it is answered with an error.
//! 2. Every other number that an event can have is answered with EIO. The kernel matches answers by
//!    number alone, so an event that nobody remembers would otherwise be let go, with zeros, by the
//!    answer to a new event that happens to get the same number.
//!
//! Only then may the group be read.
// CRASH: dying here leaves the slots of unanswered events taken; the next fsd starts over.

use crate::fetch::{Class, Engine, Failure};
use crate::journal::{Journal, Outstanding};
use crate::planes::erofs_fanotify::events::EventCounters;
use crate::served::{Registry, ServedLayer};
use crossbeam_channel::Receiver;
use layer::{Context, Error, ErrorKind, Result};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use sys::fanotify::{Denial, Group, Response};

/// Event numbers that are answered at least, whatever the journal says.
const MIN_NUMBERS: u32 = 1024;

/// Answers everything that a dead fsd owed.
pub fn recover(
    group: &Group,
    journal: &Journal,
    owed: Vec<Outstanding>,
    registry: &Registry,
    engine: &Engine,
    counters: &EventCounters,
) -> Result<()> {
    let count = owed.len();
    let started: Vec<_> = owed
        .into_iter()
        .map(|event| {
            let fills = start_fills(&event, registry, engine);
            (event, fills)
        })
        .collect();
    for (event, fills) in started {
        let response = match fills.and_then(wait_for) {
            Ok(()) => Response::Allow,
            Err(failure) => {
                tracing::error!(access = ?event.access, reason = %failure.chain(), "not recovered");
                counters.errors.fetch_add(1, Ordering::Relaxed);
                Response::Deny(Denial::from_errno(failure.kind().errno()))
            }
        };
        group
            .respond_raw(event.access.number, response)
            .context(|| format!("answer inherited event {}", event.access.number))?;
        counters.events.fetch_add(1, Ordering::Relaxed);
        event.answered();
    }
    let unknown = answer_all_numbers(group, journal)?;
    counters.errors.fetch_add(unknown, Ordering::Relaxed);
    tracing::info!(recorded = count, unknown, "took over from a dead fsd");
    Ok(())
}

type Fills = Vec<Receiver<Result<(), Failure>>>;

fn start_fills(
    event: &Outstanding,
    registry: &Registry,
    engine: &Engine,
) -> Result<Fills, Failure> {
    let layers: Vec<Arc<ServedLayer>> = match event.file {
        Some(key) => registry.find(key).into_iter().collect(),
        // The dead fsd did not come to say whose event it is: the range of every candidate.
        None => registry.marked(),
    };
    if layers.is_empty() {
        let text = format!("no layer for inherited event {}", event.access.number);
        return Err(Error::new(ErrorKind::NotFound, text).into());
    }
    let fill = |layer: &Arc<ServedLayer>| {
        let (tell, told) = crossbeam_channel::bounded(1);
        let chunks =
            layer.fetch().cached().table().covering(event.access.offset, event.access.count.max(1));
        let done = Box::new(move |result| {
            // The other end waits for it, or the takeover has failed as a whole.
            let _ = tell.send(result);
        });
        engine.request(layer.fetch(), chunks, Class::Demand, done);
        told
    };
    Ok(layers.iter().map(fill).collect())
}

fn wait_for(fills: Fills) -> Result<(), Failure> {
    for fill in fills {
        fill.recv().unwrap_or_else(|_| {
            Err(Error::new(ErrorKind::Internal, "a fill was forgotten").into())
        })?;
    }
    Ok(())
}

/// Answers how many numbers were waiting.
fn answer_all_numbers(group: &Group, journal: &Journal) -> Result<u64> {
    let mut waiting = 0;
    for number in 0..journal.numbers()?.max(MIN_NUMBERS) {
        let known = group
            .respond_raw(number as i32, Response::Deny(Denial::Io))
            .context(|| format!("answer event number {number}"))?;
        waiting += u64::from(known);
    }
    Ok(waiting)
}
