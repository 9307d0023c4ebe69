//! One caller at a time for each sandbox.

use std::collections::HashSet;
use std::sync::{Condvar, Mutex, PoisonError};

use crab_core::SandboxId;

/// A lock for each sandbox, made when it is taken and forgotten when it is let go.
#[derive(Debug, Default)]
pub(crate) struct Locks {
    held: Mutex<HashSet<SandboxId>>,
    released: Condvar,
}

/// A sandbox that nobody else may change meanwhile.
#[derive(Debug)]
pub(crate) struct Locked<'a> {
    locks: &'a Locks,
    id: SandboxId,
}

impl Locks {
    /// Waits for the sandbox's lock. Blocks.
    pub(crate) fn lock(&self, id: &SandboxId) -> Locked<'_> {
        // Nothing panics while the set is borrowed, so a poisoned one is whole.
        let mut held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        while !held.insert(id.clone()) {
            held = self.released.wait(held).unwrap_or_else(PoisonError::into_inner);
        }
        Locked { locks: self, id: id.clone() }
    }
}

impl Drop for Locked<'_> {
    fn drop(&mut self) {
        self.locks.held.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.id);
        self.locks.released.notify_all();
    }
}
