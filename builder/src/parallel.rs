//! The one way this crate uses threads: a counted list of tasks, some workers, the first error wins.
//!
//! Results must not depend on who does what: workers write to slots that the task number picks.

use crate::progress::Cancel;
use layer::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Runs `work` once for each task number below `tasks`, in rising order of start. Each worker makes
/// its own scratch state once. Stops early at the first error or when cancelled.
pub(crate) fn for_each<S>(
    threads: usize,
    tasks: usize,
    cancel: &Cancel,
    scratch: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, usize) -> Result<()> + Sync,
) -> Result<()> {
    let next = AtomicUsize::new(0);
    let stop = AtomicBool::new(false);
    let failure: Mutex<Option<Error>> = Mutex::new(None);
    let worker = || {
        let mut state = scratch();
        while !stop.load(Ordering::Relaxed) {
            let task = next.fetch_add(1, Ordering::Relaxed);
            if task >= tasks {
                break;
            }
            if let Err(error) = cancel.check().and_then(|()| work(&mut state, task)) {
                stop.store(true, Ordering::Relaxed);
                failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
            }
        }
    };
    let threads = threads.clamp(1, tasks.max(1));
    std::thread::scope(|scope| {
        for _ in 1..threads {
            scope.spawn(worker);
        }
        worker();
    });
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(()),
    }
}

/// Lets the tasks of [`for_each`] do one part of their work in the order of their numbers.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    state: Mutex<TurnState>,
    moved: Condvar,
}

#[derive(Debug, Default)]
struct TurnState {
    next: usize,
    broken: bool,
}

/// A task that has, or will have, its turn. Dropped before [`Turn::take`], it breaks the whole row: the
/// task failed, and those that wait for it are told.
pub(crate) struct Turn<'a> {
    turns: &'a Turns,
    task: usize,
}

impl Turns {
    fn lock(&self) -> MutexGuard<'_, TurnState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Announces a task. Each number has to come exactly once.
    pub fn announce(&self, task: usize) -> Turn<'_> {
        Turn { turns: self, task }
    }
}

impl Turn<'_> {
    /// Waits until all tasks before have had their turn; then it is this one's until the drop. False
    /// when one of them failed, which is told by that one.
    pub fn take(&self) -> bool {
        let mut state = self.turns.lock();
        while state.next < self.task && !state.broken {
            state = self.turns.moved.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !state.broken
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        let mut state = self.turns.lock();
        if state.next == self.task {
            state.next += 1;
        } else {
            state.broken = true;
        }
        self.turns.moved.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_task_runs_once_and_an_error_stops() {
        let seen = Mutex::new(vec![0; 100]);
        for_each(
            4,
            100,
            &Cancel::new(),
            || (),
            |(), task| {
                seen.lock().unwrap()[task] += 1;
                Ok(())
            },
        )
        .unwrap();
        assert!(seen.into_inner().unwrap().iter().all(|&count| count == 1));
        let result = for_each(
            4,
            1000,
            &Cancel::new(),
            || (),
            |(), task| {
                if task == 7 { Err(Error::invalid("seven")) } else { Ok(()) }
            },
        );
        assert_eq!(result.unwrap_err().to_string(), "seven");
    }

    #[test]
    fn turns_come_in_order_and_a_failure_ends_the_wait() {
        let (turns, order) = (Turns::default(), Mutex::new(Vec::new()));
        let run = |failing: Option<usize>, turns: &Turns| {
            for_each(
                4,
                100,
                &Cancel::new(),
                || (),
                |(), task| {
                    let turn = turns.announce(task);
                    if failing == Some(task) {
                        return Err(Error::invalid("seven"));
                    }
                    if turn.take() {
                        order.lock().unwrap().push(task);
                    }
                    Ok(())
                },
            )
        };
        run(None, &turns).unwrap();
        assert_eq!(*order.lock().unwrap(), (0..100).collect::<Vec<_>>());
        order.lock().unwrap().clear();
        assert_eq!(run(Some(7), &Turns::default()).unwrap_err().to_string(), "seven");
        assert!(order.lock().unwrap().iter().all(|task| *task < 7));
    }
}
