//! What could not be told is told: a counter and a line in the log.

use crab_core::{Change, Delta, Domain, Effects, SandboxId, Token, Unknown};

/// A delta of which nothing is known.
pub(crate) fn both(reason: Unknown, token: u64) -> Delta {
    Delta {
        filesystem: Change::Unknown(reason.clone()),
        process: Change::Unknown(reason),
        effects: Effects::default(),
        token: Token(token),
    }
}

/// Counts and logs what a delta does not know. That there is no base yet is in the nature of things, and only counted.
pub(crate) fn unknowns(id: &SandboxId, delta: &Delta) {
    for domain in [Domain::Filesystem, Domain::Process] {
        let Change::Unknown(reason) = delta.of(domain) else {
            continue;
        };
        metrics::counter!("crab_inspector_unknown_total", "reason" => reason.label()).increment(1);
        if !matches!(reason, Unknown::NoBase | Unknown::NotAttached) {
            tracing::warn!(sandbox = %id, ?domain, %reason, "a change could not be ruled out");
        }
    }
}
