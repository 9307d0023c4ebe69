//! Commits of a file system that all who ask for one at the same time share, and that leave the file system time for
//! others: `syncfs` writes out everybody's data and holds up everybody's changes, so a hundred sandboxes that each had
//! their own at every turn would stand still most of the time.

use std::collections::HashMap;
use std::io;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// After a commit the file system is left alone for so many times as long as that took.
const REST: u32 = 10;
/// And for no longer than this.
const MOST_REST: Duration = Duration::from_secs(1);

/// What tells a file system from others.
pub(super) type FileSystemId = [u8; 16];

/// One for each file system.
static ALL: Mutex<Option<HashMap<FileSystemId, Arc<SharedSync>>>> = Mutex::new(None);

/// The commits of one file system.
#[derive(Debug, Default)]
pub(super) struct SharedSync {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    /// How many were begun, and which of them was the last that ended well.
    begun: u64,
    done: u64,
    running: bool,
    /// Not before this.
    next: Option<Instant>,
}

impl SharedSync {
    /// That of a file system.
    pub(super) fn of(file_system: FileSystemId) -> Arc<Self> {
        let mut all = ALL.lock().unwrap_or_else(PoisonError::into_inner);
        Arc::clone(all.get_or_insert_default().entry(file_system).or_default())
    }

    /// Returns when a commit has ended that began after this call did, by whoever runs it. Blocks: for the commit, for
    /// the one before it, and for a time of rest between them; not for the rest where a sandbox is `frozen` until this
    /// returns.
    ///
    /// # Errors
    /// That of `sync`, where it was this call that ran it.
    pub(super) fn run(&self, frozen: bool, sync: impl FnOnce() -> io::Result<()>) -> io::Result<()> {
        let mut state = self.state();
        let wanted = state.begun + 1;
        loop {
            if state.done >= wanted {
                return Ok(());
            }
            let next = state.next.filter(|_| !frozen);
            let rest = next.map_or(Duration::ZERO, |next| next.saturating_duration_since(Instant::now()));
            state = if state.running {
                self.changed.wait(state).unwrap_or_else(PoisonError::into_inner)
            } else if rest > Duration::ZERO {
                self.changed.wait_timeout(state, rest).unwrap_or_else(PoisonError::into_inner).0
            } else {
                break;
            };
        }
        state.running = true;
        state.begun += 1;
        let this = state.begun;
        drop(state);
        let begun = Instant::now();
        let result = sync();
        let mut state = self.state();
        let now = Instant::now();
        state.running = false;
        let rest = now.saturating_duration_since(begun).saturating_mul(REST).min(MOST_REST);
        state.next = now.checked_add(rest);
        if result.is_ok() {
            state.done = this;
        }
        self.changed.notify_all();
        result
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn who_asks_gets_a_commit_that_began_later_and_shares_it() {
        let (shared, data, committed, commits) =
            (SharedSync::default(), AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        let sync = &|| {
            let seen = data.load(Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(2));
            committed.fetch_max(seen, Ordering::SeqCst);
            commits.fetch_add(1, Ordering::SeqCst);
            Ok(())
        };
        let all = &std::sync::Barrier::new(32);
        std::thread::scope(|scope| {
            let (shared, data, committed) = (&shared, &data, &committed);
            for _ in 0..32 {
                scope.spawn(move || {
                    all.wait();
                    for _ in 0..4 {
                        let mine = data.fetch_add(1, Ordering::SeqCst) + 1;
                        shared.run(false, sync).unwrap();
                        assert!(committed.load(Ordering::SeqCst) >= mine, "what was written before is not on disk");
                    }
                });
            }
        });
        let commits = commits.load(Ordering::SeqCst);
        assert!((4..128).contains(&commits), "{commits} commits for 128 calls of 32 threads");
    }

    #[test]
    fn a_frozen_sandbox_does_not_wait_for_the_rest_and_neither_do_others_then() {
        let shared = Arc::new(SharedSync::default());
        shared.state().next = Instant::now().checked_add(Duration::from_secs(86_400));
        let (done, ended) = std::sync::mpsc::channel();
        for frozen in [false, false, true] {
            let (shared, done) = (Arc::clone(&shared), done.clone());
            std::thread::spawn(move || done.send(shared.run(frozen, || Ok(()))));
        }
        for _ in 0..3 {
            ended.recv_timeout(Duration::from_secs(60)).expect("nobody waits for a day").unwrap();
        }
    }

    #[test]
    fn a_commit_that_failed_answers_nobody() {
        let shared = SharedSync::default();
        let failed = shared.run(false, || Err(io::Error::other("broken")));
        assert_eq!(failed.unwrap_err().to_string(), "broken");
        let mut ran = false;
        shared
            .run(false, || {
                ran = true;
                Ok(())
            })
            .unwrap();
        assert!(ran, "the next one needs a commit of its own");
    }
}
