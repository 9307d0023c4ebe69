//! Captures that come while the pool is busy with others go in together: one call takes all their snapshots.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crab_core::Result;

use crate::pool::{NotTaken, Wanted};

/// What became of one capture: `None` where its snapshot was taken.
type Outcome = Result<Option<NotTaken>>;

#[derive(Debug, Default)]
pub(crate) struct Batch {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    next: u64,
    waiting: BTreeMap<u64, Wanted>,
    /// One of the callers takes snapshots for all that waited.
    busy: bool,
    done: BTreeMap<u64, Outcome>,
}

impl Batch {
    /// Takes a snapshot, with all others that wait. `take` gives those that failed, by name. Blocks.
    pub(crate) fn capture(
        &self,
        wanted: Wanted,
        take: impl FnOnce(&[Wanted]) -> Result<BTreeMap<String, NotTaken>>,
    ) -> Outcome {
        let mut state = self.state();
        let ticket = state.next;
        state.next += 1;
        state.waiting.insert(ticket, wanted);
        while state.busy && !state.done.contains_key(&ticket) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if let Some(outcome) = state.done.remove(&ticket) {
            return outcome;
        }
        // Nobody is at it, so this caller is.
        let waiting = std::mem::take(&mut state.waiting);
        state.busy = true;
        drop(state);
        let wanted: Vec<Wanted> = waiting.values().cloned().collect();
        let failed = take(&wanted);
        let mut state = self.state();
        state.busy = false;
        for (ticket, wanted) in waiting {
            let outcome = match &failed {
                Ok(failed) => Ok(failed.get(&wanted.snapshot).cloned()),
                Err(error) => Err(error.clone()),
            };
            state.done.insert(ticket, outcome);
        }
        self.changed.notify_all();
        // Its own ticket was among those that waited.
        state.done.remove(&ticket).unwrap_or(Ok(None))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::time::Duration;

    use super::*;
    use crate::sys::Map;

    fn wanted(n: usize) -> Wanted {
        Wanted { dataset: String::new(), snapshot: format!("s{n}"), home: String::new(), marks: Map::new() }
    }

    #[test]
    fn captures_that_wait_go_in_together_and_each_learns_its_own_fate() {
        let (batch, calls, snapshots) = (Batch::default(), AtomicUsize::new(0), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for n in 0..32 {
                let (batch, calls, snapshots) = (&batch, &calls, &snapshots);
                scope.spawn(move || {
                    let outcome = batch.capture(wanted(n), |all| {
                        calls.fetch_add(1, Ordering::SeqCst);
                        snapshots.fetch_add(all.len(), Ordering::SeqCst);
                        std::thread::sleep(Duration::from_millis(20));
                        let odd = |wanted: &&Wanted| wanted.snapshot[1..].parse::<usize>().unwrap() % 2 == 1;
                        Ok(all.iter().filter(odd).map(|w| (w.snapshot.clone(), NotTaken::Errno(28))).collect())
                    });
                    assert_eq!(outcome.unwrap().is_some(), n % 2 == 1);
                });
            }
        });
        assert_eq!(snapshots.into_inner(), 32, "each snapshot is taken once");
        assert!(calls.into_inner() < 32, "some went in together");
    }

    #[test]
    fn a_failure_of_the_whole_is_told_to_all() {
        let batch = Batch::default();
        for _ in 0..2 {
            let error = crab_core::Error::new(crab_core::ErrorKind::Io, "no pool");
            assert!(batch.capture(wanted(1), |_| Err(error)).is_err());
        }
        assert_eq!(batch.capture(wanted(1), |_| Ok(BTreeMap::new())).unwrap(), None);
    }
}
