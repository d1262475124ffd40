//! Whose turn it is: so many calls run at once, others wait, and the environments that wait take turns, so that
//! one with a thousand waiting calls does not hold up another with one.
//!
//! Locking: one mutex over the queues, held for a push or a pop. Nothing survives a crash.

use layer::{Error, ErrorKind, LayerId, Result};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::sync::oneshot;

/// What may run and wait.
#[derive(Debug, Clone, Copy)]
pub struct Bounds {
    /// Calls that run at once.
    pub running: usize,
    /// Calls of one environment that wait.
    pub waiting_each: usize,
    /// Calls that wait.
    pub waiting: usize,
    /// Bytes of input and of asked output that running and waiting calls hold.
    pub bytes: u64,
}

/// Who is served together: the layers of an environment.
pub type Key = Vec<LayerId>;

/// The queues.
#[derive(Debug)]
pub struct Turns {
    bounds: Bounds,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    running: usize,
    waiting: usize,
    bytes: u64,
    /// The next turn is of the first.
    queues: VecDeque<(Key, VecDeque<oneshot::Sender<Turn>>)>,
}

/// Permission to run; whoever waits has it next when it is dropped.
#[derive(Debug)]
pub struct Turn(Option<Arc<Turns>>);

impl Drop for Turn {
    fn drop(&mut self) {
        if let Some(turns) = self.0.take() {
            pass(&turns);
        }
    }
}

/// Bytes that a call holds while this lives.
#[derive(Debug)]
pub struct Held {
    turns: Arc<Turns>,
    bytes: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.turns.lock().bytes -= self.bytes;
    }
}

impl Turns {
    /// Nobody runs or waits yet.
    pub fn new(bounds: Bounds) -> Arc<Self> {
        Arc::new(Self { bounds, state: Mutex::default() })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts bytes that a call holds. Busy: all calls together hold too many.
    pub fn hold(self: &Arc<Self>, bytes: u64) -> Result<Held> {
        let mut state = self.lock();
        if state.bytes + bytes > self.bounds.bytes {
            let most = self.bounds.bytes >> 20;
            return Err(busy(format!("calls hold {most} MiB of input and output, the most")));
        }
        state.bytes += bytes;
        drop(state);
        Ok(Held { turns: Arc::clone(self), bytes })
    }

    /// Waits for a turn. Busy: too many wait already.
    pub async fn take(self: &Arc<Self>, key: &Key) -> Result<Turn> {
        let Some(waiter) = self.enter(key)? else { return Ok(Turn(Some(Arc::clone(self)))) };
        waiter.await.map_err(|error| {
            Error::new(ErrorKind::Unavailable, "the node is closing").with_source(error)
        })
    }

    /// `None`: it is this one's turn already.
    fn enter(&self, key: &Key) -> Result<Option<oneshot::Receiver<Turn>>> {
        let mut state = self.lock();
        if state.running < self.bounds.running {
            state.running += 1;
            return Ok(None);
        }
        if state.waiting >= self.bounds.waiting {
            let most = self.bounds.waiting;
            return Err(busy(format!("{most} calls wait already, the most of this node")));
        }
        let (sender, receiver) = oneshot::channel();
        match state.queues.iter_mut().find(|(known, _)| known == key) {
            Some((_, queue)) if queue.len() >= self.bounds.waiting_each => {
                let most = self.bounds.waiting_each;
                return Err(busy(format!("{most} calls of this environment wait, the most")));
            }
            Some((_, queue)) => queue.push_back(sender),
            None => state.queues.push_back((key.clone(), VecDeque::from([sender]))),
        }
        state.waiting += 1;
        Ok(Some(receiver))
    }

    /// How many run and how many wait.
    pub fn counts(&self) -> (usize, usize) {
        let state = self.lock();
        (state.running, state.waiting)
    }
}

fn busy(text: String) -> Error {
    Error::new(ErrorKind::Busy, text)
}

/// Hands a turn on.
fn pass(turns: &Arc<Turns>) {
    loop {
        let mut state = turns.lock();
        let Some((key, mut queue)) = state.queues.pop_front() else {
            state.running -= 1;
            return;
        };
        let next = queue.pop_front();
        if !queue.is_empty() {
            state.queues.push_back((key, queue));
        }
        let Some(next) = next else { continue };
        state.waiting -= 1;
        drop(state);
        match next.send(Turn(Some(Arc::clone(turns)))) {
            Ok(()) => return,
            // Its client has left: the turn is the next one's.
            Err(mut unused) => unused.0 = None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(number: u8) -> Key {
        vec![LayerId::from_slice(&[number; 32]).unwrap()]
    }

    fn turns(running: usize, waiting_each: usize, waiting: usize) -> Arc<Turns> {
        Turns::new(Bounds { running, waiting_each, waiting, bytes: 100 })
    }

    #[tokio::test]
    async fn environments_take_turns_and_bounds_are_named() {
        let turns = turns(1, 3, 4);
        let first = turns.take(&key(0)).await.unwrap();
        let mut many: Vec<_> = (0..3).map(|_| turns.enter(&key(1)).unwrap().unwrap()).collect();
        let refused = turns.enter(&key(1)).unwrap_err();
        assert_eq!(refused.kind(), ErrorKind::Busy);
        assert!(refused.to_string().contains("3 calls of this environment"), "{refused}");
        let mut one = turns.enter(&key(2)).unwrap().unwrap();
        let refused = turns.enter(&key(3)).unwrap_err();
        assert!(refused.to_string().contains("4 calls wait"), "{refused}");
        drop(first);
        let second = many[0].try_recv().unwrap();
        assert!(one.try_recv().is_err());
        drop(second);
        // The other environment is next, although two of the first waited longer.
        let third = one.try_recv().unwrap();
        // A client that left is passed over.
        drop(many.remove(1));
        drop(third);
        let last = many[1].try_recv().unwrap();
        assert_eq!(turns.counts(), (1, 0));
        drop(last);
        assert_eq!(turns.counts(), (0, 0));
    }

    #[tokio::test]
    async fn bytes_are_bounded_and_given_back() {
        let turns = turns(1, 1, 1);
        let held = turns.hold(60).unwrap();
        assert_eq!(turns.hold(60).unwrap_err().kind(), ErrorKind::Busy);
        drop(held);
        assert!(turns.hold(100).is_ok());
    }
}
