//! One turn, or one call, that waits for a version.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crab_core::{Error, GateOpener, Manifest, Turn, Verdict, VersionId};
use parking_lot::Mutex;
use tokio::sync::oneshot;
use tokio::task::AbortHandle;
use tracing::Span;

use super::attached::Attached;

/// The part of a request that its exposure watcher shares with its job.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    opener: Mutex<Option<GateOpener>>,
    exposed: OnceLock<Instant>,
    /// Open while the model works, then while its answer waits.
    span: Mutex<Option<Span>>,
}

impl Waiting {
    /// The model works on its answer.
    pub(super) fn hide(&self, turn: &Span) {
        *self.span.lock() = Some(tracing::info_span!(parent: turn, "hidden"));
    }

    /// The answer is there and waits.
    pub(super) fn expose(&self, turn: &Span) {
        let _ = self.exposed.set(Instant::now());
        // A verdict that comes meanwhile takes the opener first, then the span.
        let mut span = self.span.lock();
        *span = None;
        if self.opener.lock().is_some() {
            *span = Some(tracing::info_span!(parent: turn, "exposed"));
        }
    }

    /// Gives the verdict, unless one was given.
    pub(super) fn decide(&self, verdict: Verdict) -> bool {
        let opener = self.opener.lock().take();
        self.span.lock().take();
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
    /// The turn's span, open until its verdict.
    pub(super) span: Span,
    /// Open while it waits for its job to begin.
    pub(super) queued: Option<Span>,
    begun: Instant,
    waiting: Arc<Waiting>,
    watcher: Option<AbortHandle>,
    reply: Option<oneshot::Sender<Result<Arc<Manifest>, Arc<Error>>>>,
}

impl Request {
    pub(super) fn of_boundary(turn: Turn, attached: Arc<Attached>, begun: Instant, opener: GateOpener) -> Self {
        let waiting = Waiting { opener: Mutex::new(Some(opener)), ..Waiting::default() };
        let mut request = Self::of_deferred(turn, attached);
        request.begun = begun;
        request.waiting = Arc::new(waiting);
        request
    }

    /// For turns whose answers have gone out.
    pub(super) fn of_deferred(turn: Turn, attached: Arc<Attached>) -> Self {
        Self {
            turn,
            boundary: true,
            attached,
            span: Span::current(),
            queued: None,
            begun: Instant::now(),
            waiting: Arc::default(),
            watcher: None,
            reply: None,
        }
    }

    pub(super) fn of_call(
        turn: Turn,
        attached: Arc<Attached>,
        reply: oneshot::Sender<Result<Arc<Manifest>, Arc<Error>>>,
    ) -> Self {
        let mut request = Self::of_deferred(turn, attached);
        request.boundary = false;
        request.reply = Some(reply);
        request
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
        self.span.record("outcome", "durable").record("version", manifest.version.0);
        let given = self.waiting.decide(Verdict::Durable(manifest.version));
        if let Some(reply) = self.reply.take() {
            let _ = reply.send(Ok(manifest.clone()));
        }
        given
    }

    /// Gives the verdict of a failure. `false` where a verdict had been given before.
    pub(super) fn failed(mut self, error: &Arc<Error>, release: bool) -> bool {
        self.span.record("outcome", if release { "unprotected" } else { "failed" });
        let verdict = if release { Verdict::Unprotected(error.clone()) } else { Verdict::Failed(error.clone()) };
        let given = self.waiting.decide(verdict);
        if let Some(reply) = self.reply.take() {
            let _ = reply.send(Err(error.clone()));
        }
        given
    }

    /// Lets the answer go without a version, which is to come later.
    pub(super) fn deferred(self, error: Error) {
        self.span.record("outcome", "deferred");
        self.waiting.decide(Verdict::Unprotected(Arc::new(error)));
    }

    /// The version that a skipped turn rides on.
    pub(super) fn skipped(self, version: VersionId) {
        self.span.record("outcome", "skip").record("version", version.0);
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
