//! The two halves of a checkpoint.

use std::time::Instant;

use async_trait::async_trait;
use crab_core::{Artifact, AtCut, Captured, Error, ErrorKind, Result};

use crate::blocking;

/// A snapshot that is not an artifact yet. Dropping it removes it. All calls block.
pub trait Snapshot: Send + Sync + 'static {
    /// Makes it an artifact, for good.
    ///
    /// # Errors
    /// It is gone then.
    fn persist(self) -> Result<Artifact>;

    /// Removes it.
    ///
    /// # Errors
    /// Where something may be left.
    fn discard(self) -> Result<()>;
}

/// What a capture gives to the engine.
#[derive(Debug)]
pub struct Capture<S: Snapshot>(Option<S>);

impl<S: Snapshot> Capture<S> {
    /// Of this snapshot.
    pub fn new(snapshot: S) -> Self {
        Self(Some(snapshot))
    }
}

#[async_trait]
impl<S: Snapshot> Captured for Capture<S> {
    async fn persist(mut self: Box<Self>) -> Result<Artifact> {
        let Some(snapshot) = self.0.take() else {
            return Err(Error::new(ErrorKind::Internal, "a capture was persisted twice"));
        };
        blocking::run(|| snapshot.persist()).await
    }

    async fn discard(mut self: Box<Self>) -> Result<()> {
        let Some(snapshot) = self.0.take() else { return Ok(()) };
        blocking::run(|| snapshot.discard()).await
    }
}

impl<S: Snapshot> Drop for Capture<S> {
    fn drop(&mut self) {
        if let Some(snapshot) = self.0.take() {
            blocking::later(move || drop(snapshot));
        }
    }
}

/// Calls what belongs to the moment of a snapshot that was just taken. Where it fails, the snapshot is removed.
///
/// # Errors
/// The callback's.
pub async fn at_cut<S: Snapshot>(snapshot: S, at_cut: &mut dyn AtCut) -> Result<Box<dyn Captured>> {
    let captured = Box::new(Capture::new(snapshot));
    if let Err(error) = at_cut.run().await {
        if let Err(left) = captured.discard().await {
            tracing::warn!(error = %left, "a snapshot was left behind");
        }
        return Err(error);
    }
    Ok(captured)
}

/// Refuses to begin something after its deadline.
///
/// # Errors
/// [`TimedOut`](ErrorKind::TimedOut), with what it was too late for.
pub fn refuse_late(deadline: Option<Instant>, what: &str) -> Result<()> {
    match deadline {
        Some(deadline) if Instant::now() >= deadline => {
            Err(Error::new(ErrorKind::TimedOut, format!("the deadline passed before {what}")))
        }
        _ => Ok(()),
    }
}
