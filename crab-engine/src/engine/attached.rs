//! A sandbox that the engine watches.

use std::sync::Arc;

use crab_core::{Delta, Manifest, TurnNumber};
use parking_lot::Mutex;

use super::Inner;
use crate::policy::{Plan, View, sound};

#[derive(Debug)]
pub(super) struct Attached(Mutex<State>);

#[derive(Debug)]
struct State {
    standing: Option<Arc<Manifest>>,
    last_turn: TurnNumber,
    /// Versions since the last that captured both domains.
    since_full: u64,
}

impl Attached {
    pub(super) fn new(standing: Option<Arc<Manifest>>, last_turn: TurnNumber) -> Self {
        Self(Mutex::new(State { standing, last_turn, since_full: 0 }))
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

    /// A durable version stands from now on.
    pub(super) fn stand_on(&self, manifest: Arc<Manifest>, full: bool) {
        let mut state = self.0.lock();
        state.last_turn = state.last_turn.max(manifest.turn);
        state.since_full = if full { 0 } else { state.since_full.saturating_add(1) };
        state.standing = Some(manifest);
    }

    /// What a delta asks for: what the policy wants, and never less than what is sound.
    pub(super) fn plan(&self, inner: &Inner, delta: &Delta) -> Plan {
        let state = self.0.lock();
        let mut view = View::new(delta, state.standing.as_deref(), inner.process.is_some());
        view.since_full = state.since_full;
        let least = sound(&view);
        let mut plan = inner.policy.decide(&view).union(least);
        plan.process &= inner.process.is_some();
        plan
    }
}
