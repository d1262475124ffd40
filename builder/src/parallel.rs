//! The one way this crate uses threads: a counted list of tasks, some workers, the first error wins.
//!
//! Results must not depend on who does what: workers write to slots that the task number picks.

use crate::progress::Cancel;
use layer::{Error, Result};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

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
}
