//! The engine's metrics. The crate's documentation lists them.

use std::time::Duration;

use crab_core::{Change, Delta, Domain, ErrorKind};
use metrics::{counter, gauge, histogram};

use crate::policy::Plan;
use crate::retention::Rule;

pub(super) fn turn(outcome: &'static str) {
    counter!("crab_turns_total", "outcome" => outcome).increment(1);
}

pub(super) fn checkpoint(plan: Plan, frozen: Duration, capture: Duration, persist: Duration) {
    counter!("crab_checkpoints_total", "plan" => plan.label()).increment(1);
    if !frozen.is_zero() {
        histogram!("crab_frozen_seconds").record(frozen.as_secs_f64());
    }
    histogram!("crab_capture_seconds").record(capture.as_secs_f64());
    histogram!("crab_persist_seconds").record(persist.as_secs_f64());
}

pub(super) fn failure(kind: ErrorKind) {
    counter!("crab_checkpoint_failures_total", "kind" => format!("{kind:?}")).increment(1);
}

pub(super) fn unknown(delta: &Delta) {
    for domain in [Domain::Filesystem, Domain::Process] {
        if let Change::Unknown(reason) = delta.of(domain) {
            let domain = if domain == Domain::Filesystem { "filesystem" } else { "process" };
            counter!("crab_unknown_deltas_total", "domain" => domain, "reason" => reason.label()).increment(1);
        }
    }
}

pub(super) fn gate(hidden: Duration, exposed: Duration) {
    histogram!("crab_hidden_seconds").record(hidden.as_secs_f64());
    histogram!("crab_exposed_seconds").record(exposed.as_secs_f64());
}

pub(super) fn restore(took: Duration) {
    histogram!("crab_restore_seconds").record(took.as_secs_f64());
}

pub(super) fn pruned(rule: Rule, bytes: u64) {
    let rule = match rule {
        Rule::NotKept => "not_kept",
        Rule::SandboxQuota => "sandbox_quota",
        Rule::StoreQuota => "store_quota",
    };
    counter!("crab_pruned_versions_total", "rule" => rule).increment(1);
    counter!("crab_pruned_bytes_total", "rule" => rule).increment(bytes);
}

#[allow(clippy::cast_precision_loss, reason = "a gauge of small numbers")]
pub(super) fn waiting(requests: usize) {
    gauge!("crab_waiting_requests").set(requests as f64);
}

#[allow(clippy::cast_precision_loss, reason = "a gauge of small numbers")]
pub(super) fn opened(damaged: usize, orphans: usize) {
    gauge!("crab_store_damaged_files").set(damaged as f64);
    counter!("crab_orphans_removed_total").increment(orphans as u64);
}
