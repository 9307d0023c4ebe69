//! A sandbox that the engine watches.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crab_core::{Condition, Delta, Error, ErrorKind, Manifest, Result, Sandbox, SandboxId, TurnNumber};
use parking_lot::Mutex;

use super::Inner;
use crate::policy::{Plan, View, sound};

/// For a sandbox that had tasks and has none any more.
pub(super) fn died(id: &SandboxId) -> Error {
    Error::new(ErrorKind::Died, format!("the sandbox {id} has died"))
        .fix("restore it, or relaunch and attach it")
        .condition(Condition::Stopped)
}

#[derive(Debug)]
pub(super) struct Attached(Mutex<State>);

#[derive(Debug)]
struct State {
    standing: Option<Arc<Manifest>>,
    last_turn: TurnNumber,
    /// Versions since the last that captured both domains.
    since_full: u64,
    /// It has had a tree of tasks since it was attached.
    lived: bool,
    /// When the standing version was made, and what its capture took, where that was since the attachment.
    captured: Option<(Instant, Duration)>,
    /// A checkpoint is to come for turns that were deferred.
    deferred: bool,
}

impl Attached {
    pub(super) fn new(standing: Option<Arc<Manifest>>, last_turn: TurnNumber, lived: bool) -> Self {
        Self(Mutex::new(State { standing, last_turn, since_full: 0, lived, captured: None, deferred: false }))
    }

    pub(super) fn standing(&self) -> Option<Arc<Manifest>> {
        self.0.lock().standing.clone()
    }

    pub(super) fn last_turn(&self) -> TurnNumber {
        self.0.lock().last_turn
    }

    pub(super) fn saw_turn(&self, turn: TurnNumber) {
        let mut state = self.0.lock();
        state.last_turn = state.last_turn.max(turn);
    }

    /// The sandbox was attached anew, with or without a tree of tasks.
    pub(super) fn begin_anew(&self, lives: bool) {
        self.0.lock().lived = lives;
    }

    /// Refuses a sandbox that had a tree of tasks and has none any more: what its files are by now is nothing that
    /// anybody wants to come back to, and a version of it would stand before the good ones.
    pub(super) fn check_lives(&self, sandbox: &Sandbox) -> Result<()> {
        let mut state = self.0.lock();
        state.lived |= sandbox.init.is_some();
        if state.lived && sandbox.init.is_none() {
            return Err(died(&sandbox.id));
        }
        Ok(())
    }

    /// A durable version, captured then, stands from now on.
    pub(super) fn stand_on(&self, manifest: Arc<Manifest>, full: bool, captured: Instant) {
        let mut state = self.0.lock();
        state.last_turn = state.last_turn.max(manifest.turn);
        state.since_full = if full { 0 } else { state.since_full.saturating_add(1) };
        state.captured = Some((captured, Duration::from_micros(manifest.timings.capture_us)));
        state.standing = Some(manifest);
    }

    /// What a delta asks for: what the policy wants, and never less than what is sound.
    pub(super) fn plan(&self, inner: &Inner, delta: &Delta) -> Plan {
        self.decide(inner, delta, |view| {
            let mut plan = inner.policy.decide(view).union(sound(view));
            plan.process &= inner.process.is_some();
            plan
        })
    }

    /// How long the policy lets a turn wait that changed something.
    pub(super) fn defer(&self, inner: &Inner, delta: &Delta) -> Duration {
        self.decide(inner, delta, |view| match view.standing {
            Some(_) => inner.policy.defer(view),
            None => Duration::ZERO,
        })
    }

    fn decide<T>(&self, inner: &Inner, delta: &Delta, decide: impl FnOnce(&View<'_>) -> T) -> T {
        let state = self.0.lock();
        let mut view = View::new(delta, state.standing.as_deref(), inner.process.is_some());
        view.since_full = state.since_full;
        if let Some((at, cost)) = state.captured {
            view.since_version = Some(at.elapsed());
            view.last_cost = cost;
        }
        decide(&view)
    }

    /// Whether nobody else has promised the checkpoint for deferred turns.
    pub(super) fn promise_deferred(&self) -> bool {
        !std::mem::replace(&mut self.0.lock().deferred, true)
    }

    pub(super) fn keep_promise(&self) {
        self.0.lock().deferred = false;
    }
}
