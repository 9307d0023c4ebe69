//! One at a time: captures and restores of one sandbox. A caller may drop a call and begin the next while the thread
//! of the first is still clearing away.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use crab_core::{Error, ErrorKind, Result};

/// Which cgroups are being worked on.
#[derive(Debug, Default)]
pub(crate) struct Turns {
    busy: Mutex<HashSet<PathBuf>>,
    freed: Condvar,
}

/// The right to work on one cgroup, for as long as this value lives.
#[derive(Debug)]
pub(crate) struct Turn {
    turns: Arc<Turns>,
    cgroup: PathBuf,
}

impl Turns {
    fn busy(&self) -> MutexGuard<'_, HashSet<PathBuf>> {
        // Only inserts and removes happen under the lock: a panic leaves it whole.
        self.busy.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the cgroup, until the deadline.
    pub(crate) fn take(self: &Arc<Self>, cgroup: &Path, deadline: Option<Instant>) -> Result<Turn> {
        let mut busy = self.busy();
        while !busy.insert(cgroup.to_owned()) {
            busy = match deadline {
                None => self.freed.wait(busy).unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        let what = "another capture or restore of the sandbox was not done by the deadline";
                        return Err(Error::new(ErrorKind::TimedOut, what));
                    }
                    self.freed.wait_timeout(busy, left).unwrap_or_else(PoisonError::into_inner).0
                }
            };
        }
        drop(busy);
        Ok(Turn { turns: Arc::clone(self), cgroup: cgroup.to_owned() })
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.turns.busy().remove(&self.cgroup);
        self.turns.freed.notify_all();
    }
}

/// Whether the caller of a call still waits for it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Caller(Arc<AtomicBool>);

impl Caller {
    pub(crate) fn has_gone(&self) -> bool {
        self.0.load(Ordering::SeqCst)
    }

    /// To be held where the caller waits.
    pub(crate) fn present(&self) -> Presence {
        Presence(self.clone())
    }
}

/// Dropping it says that the caller has gone.
#[derive(Debug)]
pub(crate) struct Presence(Caller);

impl Drop for Presence {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::SeqCst);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn the_second_waits_for_the_first_and_not_for_others() {
        let turns = Arc::new(Turns::default());
        let first = turns.take(Path::new("/a"), None).unwrap();
        drop(turns.take(Path::new("/b"), None).unwrap());
        let soon = Some(Instant::now() + Duration::from_millis(10));
        assert_eq!(turns.take(Path::new("/a"), soon).unwrap_err().kind(), ErrorKind::TimedOut);
        std::thread::scope(|scope| {
            let second = scope.spawn(|| turns.take(Path::new("/a"), None).map(drop));
            drop(first);
            second.join().unwrap().unwrap();
        });
    }
}
