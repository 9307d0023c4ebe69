//! The sandboxes that an inspector watches, each behind a lock of its own, and the numbers it gives to takes.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crab_core::{Delta, SandboxId, Unknown};
use parking_lot::Mutex;

use crate::offload::offload;
use crate::report;

#[derive(Debug)]
pub(crate) struct Registry<W> {
    tokens: AtomicU64,
    sandboxes: Mutex<HashMap<SandboxId, Arc<Mutex<W>>>>,
}

impl<W: Send + 'static> Registry<W> {
    pub(crate) fn new() -> Self {
        Self { tokens: AtomicU64::new(0), sandboxes: Mutex::new(HashMap::new()) }
    }

    /// A number that none had before.
    pub(crate) fn token(&self) -> u64 {
        self.tokens.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn insert(&self, id: &SandboxId, watched: W) {
        let before = self.sandboxes.lock().insert(id.clone(), Arc::new(Mutex::new(watched)));
        // Not under the lock.
        drop(before);
    }

    /// Gives up a sandbox. `last` is done with it before it goes.
    pub(crate) fn remove(&self, id: &SandboxId, last: impl FnOnce(&mut W)) -> bool {
        let before = self.sandboxes.lock().remove(id);
        // Not under the lock.
        before.map(|watched| last(&mut watched.lock())).is_some()
    }

    fn get(&self, id: &SandboxId) -> Option<Arc<Mutex<W>>> {
        self.sandboxes.lock().get(id).cloned()
    }

    /// Takes a delta of a sandbox by work that may block.
    pub(crate) async fn take(
        &self,
        id: &SandboxId,
        at_once: impl FnOnce(&mut W, u64) -> Option<Delta>,
        take: impl FnOnce(&mut W, u64) -> Delta + Send + 'static,
    ) -> Delta {
        let Some(watched) = self.get(id) else {
            return report::both(Unknown::NotAttached, self.token());
        };
        if let Some(mut watched) = watched.try_lock()
            && let Some(delta) = at_once(&mut watched, self.token())
        {
            report::unknowns(id, &delta);
            return delta;
        }
        let lost = self.token();
        let token = self.token();
        let looked = offload("crab-inspector", move || take(&mut watched.lock(), token)).await;
        let delta = looked.unwrap_or_else(|| report::both(Unknown::Failed("no thread could look".to_owned()), lost));
        report::unknowns(id, &delta);
        delta
    }

    /// Does work on a sandbox that may block.
    pub(crate) async fn with(&self, id: &SandboxId, work: impl FnOnce(&mut W) + Send + 'static) {
        if let Some(watched) = self.get(id) {
            offload("crab-inspector", move || work(&mut watched.lock())).await;
        }
    }
}
