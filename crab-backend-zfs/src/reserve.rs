//! Room that is kept for going back when the pool is full.
//!
//! A clone needs a little room, and ZFS refuses it where ordinary writes have taken all. So an empty dataset reserves
//! some, and is destroyed, which a full pool allows, when a step is refused for want of it.

use std::sync::{Mutex, PoisonError};

use crab_core::{ErrorKind, Result};

use crate::sys::{Calls, Map, Value};

/// Its name inside the dataset of all versions. No sandbox's name begins like that.
const NAME: &str = "_reserve";
/// Many times what ZFS asks for, in bytes.
const SIZE: u64 = 4 << 20;

/// The reserve of one store.
#[derive(Debug)]
pub(crate) struct Reserve {
    calls: Calls,
    dataset: String,
    /// Whether it is there. Held while it is given away.
    there: Mutex<bool>,
}

impl Reserve {
    /// Of the dataset of all versions. Made where it is missing and there is room. Blocks.
    pub(crate) fn open(calls: Calls, base: &str) -> Self {
        let this = Self { calls, dataset: format!("{base}/{NAME}"), there: Mutex::new(false) };
        this.restock();
        this
    }

    /// Runs a step, and once more with the reserve given away where there was no room. Blocks.
    pub(crate) fn behind<T>(&self, mut step: impl FnMut() -> Result<T>) -> Result<T> {
        match step() {
            Err(error) if error.kind() == ErrorKind::Full => {
                // Who comes at the same time waits until it is there again.
                let mut there = self.there.lock().unwrap_or_else(PoisonError::into_inner);
                if !*there {
                    return Err(error);
                }
                if let Err(failed) = self.calls.destroy(&self.dataset) {
                    // The step's own error says in which condition it left things.
                    tracing::warn!(dataset = self.dataset, ?failed, "the reserve could not be given away");
                    return Err(error);
                }
                tracing::debug!(dataset = self.dataset, "the pool is full; gave the reserve away");
                let outcome = step();
                *there = self.make();
                outcome
            }
            outcome => outcome,
        }
    }

    /// Makes it where it is missing, after something was removed. Blocks only where it is.
    pub(crate) fn restock(&self) {
        if let Ok(mut there) = self.there.try_lock()
            && !*there
        {
            *there = self.make();
        }
    }

    /// Whether it is there.
    fn make(&self) -> bool {
        let properties = Map::from([
            ("mountpoint".to_owned(), "none".into()),
            ("canmount".to_owned(), Value::U64(0)),
            ("reservation".to_owned(), Value::U64(SIZE)),
        ]);
        match self.calls.exists(&self.dataset) {
            Ok(false) => self.calls.create(&self.dataset, &properties),
            exists => exists.map(drop),
        }
        // Without it a restore is refused on a full pool, and changes nothing.
        .inspect_err(|failed| tracing::debug!(dataset = self.dataset, ?failed, "there is no reserve for a full pool"))
        .is_ok()
    }
}
