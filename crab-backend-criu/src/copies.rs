//! Copies of memory that were made for a capture to come, until it takes them or nobody wants it any more.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crab_core::{ArtifactId, SandboxId};

use crate::area::Scratch;
use crate::precopy::Precopy;

/// The copies for one capture.
#[derive(Debug)]
pub(crate) struct Copies {
    pub(crate) precopy: Precopy,
    /// Where they are, and where the images are to go.
    pub(crate) scratch: Scratch,
    /// How long the sandbox was stopped for them.
    pub(crate) stopped: Duration,
}

/// Which capture they are for.
pub(crate) type Key = (SandboxId, ArtifactId);

/// All that wait for their captures.
#[derive(Debug, Default)]
pub(crate) struct AllCopies(Mutex<HashMap<Key, Copies>>);

impl AllCopies {
    fn all(&self) -> MutexGuard<'_, HashMap<Key, Copies>> {
        // Only inserts and removes happen under the lock: a panic leaves it whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps them while the returned value lives.
    pub(crate) fn keep(self: &Arc<Self>, key: Key, copies: Copies) -> Kept {
        // Removes the files of others of that name outside of the lock.
        drop(self.all().insert(key.clone(), copies));
        Kept { all: Arc::clone(self), key }
    }

    /// Takes those of a capture.
    pub(crate) fn take(&self, key: &Key) -> Option<Copies> {
        self.all().remove(key)
    }
}

/// Dropping it removes the copies, unless they were taken.
#[derive(Debug)]
pub(crate) struct Kept {
    all: Arc<AllCopies>,
    key: Key,
}

impl Drop for Kept {
    fn drop(&mut self) {
        drop(self.all.take(&self.key));
    }
}
