//! One turn, or one call, that waits for a version.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crab_core::{Error, GateOpener, Manifest, Turn, Verdict, VersionId};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;

use super::attached::Attached;

/// The part of a request that its exposure watcher shares with its job.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    opener: Mutex<Option<GateOpener>>,
    exposed: OnceLock<Instant>,
}

impl Waiting {
    /// The answer is there and waits.
    pub(super) fn expose(&self) {
        let _ = self.exposed.set(Instant::now());
    }

    /// Gives the verdict, unless one was given.
    pub(super) fn decide(&self, verdict: Verdict) -> bool {
        let opener = self.opener.lock().take();
        opener.map(|opener| opener.decide(verdict)).is_some()
    }
}

#[derive(Debug)]
pub(super) struct Request {
    pub(super) turn: Turn,
    /// It came from a boundary; otherwise from a call.
    pub(super) boundary: bool,
    /// The attachment under which it was made: after a restore there is another.
    pub(super) attached: Arc<Attached>,
    begun: Instant,
    waiting: Arc<Waiting>,
    watcher: Option<AbortHandle>,
    reply: Option<oneshot::Sender<Result<Arc<Manifest>, Arc<Error>>>>,
}

impl Request {
    pub(super) fn of_boundary(turn: Turn, attached: Arc<Attached>, begun: Instant, opener: GateOpener) -> Self {
        let waiting = Waiting { opener: Mutex::new(Some(opener)), exposed: OnceLock::new() };
        Self { turn, boundary: true, attached, begun, waiting: Arc::new(waiting), watcher: None, reply: None }
    }

    pub(super) fn of_call(
        turn: Turn,
        attached: Arc<Attached>,
        reply: oneshot::Sender<Result<Arc<Manifest>, Arc<Error>>>,
    ) -> Self {
        Self {
            turn,
            boundary: false,
            attached,
            begun: Instant::now(),
            waiting: Arc::default(),
            watcher: None,
            reply: Some(reply),
        }
    }

    pub(super) fn waiting(&self) -> Arc<Waiting> {
        self.waiting.clone()
    }

    pub(super) fn watched_by(&mut self, watcher: AbortHandle) {
        self.watcher = Some(watcher);
    }

    /// The time since the boundary: what was hidden behind the model, and what the agent waited.
    pub(super) fn times(&self) -> (Duration, Duration) {
        let now = Instant::now();
        let exposed = self.waiting.exposed.get().map_or(Duration::ZERO, |at| now.saturating_duration_since(*at));
        (now.saturating_duration_since(self.begun).saturating_sub(exposed), exposed)
    }

    /// Opens the gate. `false` where a verdict had been given before.
    pub(super) fn durable(mut self, manifest: &Arc<Manifest>) -> bool {
        let given = self.waiting.decide(Verdict::Durable(manifest.version));
        if let Some(reply) = self.reply.take() {
            let _ = reply.send(Ok(manifest.clone()));
        }
        given
    }

    /// Gives the verdict of a failure. `false` where a verdict had been given before.
    pub(super) fn failed(mut self, error: &Arc<Error>, release: bool) -> bool {
        let verdict = if release { Verdict::Unprotected(error.clone()) } else { Verdict::Failed(error.clone()) };
        let given = self.waiting.decide(verdict);
        if let Some(reply) = self.reply.take() {
            let _ = reply.send(Err(error.clone()));
        }
        given
    }

    /// The version that a skipped turn rides on.
    pub(super) fn skipped(self, version: VersionId) {
        self.waiting.decide(Verdict::Durable(version));
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        if let Some(watcher) = self.watcher.take() {
            watcher.abort();
        }
    }
}
