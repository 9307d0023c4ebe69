//! One caller at a time for each sandbox.

use std::collections::HashSet;
use std::sync::{Condvar, Mutex, PoisonError};

use crab_core::SandboxId;

/// A lock for each sandbox, made when it is taken and forgotten when it is let go.
#[derive(Debug, Default)]
pub struct Locks {
    held: Mutex<HashSet<SandboxId>>,
    released: Condvar,
}

/// A sandbox that nobody else may change meanwhile.
#[derive(Debug)]
#[must_use]
pub struct Locked<'a> {
    locks: &'a Locks,
    id: SandboxId,
}

impl Locks {
    /// Waits for the sandbox's lock. Blocks.
    pub fn lock(&self, id: &SandboxId) -> Locked<'_> {
        // Nothing panics while the set is borrowed, so a poisoned one is whole.
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        while !held.insert(id.clone()) {
            held = self.released.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        Locked { locks: self, id: id.clone() }
    }

    /// Waits for the locks of several. Blocks.
    #[must_use]
    pub fn lock_all<'a>(&self, ids: impl IntoIterator<Item = &'a SandboxId>) -> Vec<Locked<'_>> {
        let mut ids: Vec<_> = ids.into_iter().collect();
        // In one order everywhere, so that no two callers wait for each other.
        ids.sort();
        ids.dedup();
        ids.into_iter().map(|id| self.lock(id)).collect()
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.locks.held.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
        self.locks.released.notify_all();
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "these are tests")]
mod tests {
    use super::*;

    #[test]
    fn sandboxes_that_two_callers_name_in_different_orders_do_not_wait_for_ever() {
        let (locks, a, b) = (Locks::default(), "a".parse().unwrap(), "b".parse().unwrap());
        std::thread::scope(|scope| {
            for ids in [[&a, &b], [&b, &a]] {
                let locks = &locks;
                scope.spawn(move || (0..1000).for_each(|_| drop(locks.lock_all(ids))));
            }
        });
        assert_eq!(locks.lock_all([&a, &a]).len(), 1, "one that is named twice is locked once");
    }
}
