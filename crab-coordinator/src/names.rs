//! The names of the coordinator's metrics. They are stable: what reads them may rely on them.
//!
//! The crate records by the `metrics` facade; without a recorder installed, recording costs next to nothing.

/// Counter. Requests by `kind`: `turn`, `auxiliary`, `other`, `refused`.
pub const REQUESTS: &str = "crab_coordinator_requests_total";
/// Counter. New turns by `provider`.
pub const TURNS: &str = "crab_coordinator_turns_total";
/// Counter. Requests that asked again, by `how` they were answered: `joined`, `journal`, `model`.
pub const RETRIES: &str = "crab_coordinator_retries_total";
/// Counter. Turn requests whose body has no digest: not JSON, or beyond the bounds.
pub const NO_DIGEST: &str = "crab_coordinator_requests_without_digest_total";
/// Counter. Verdicts by `verdict`: `durable`, `unprotected`, `failed`.
pub const VERDICTS: &str = "crab_coordinator_verdicts_total";
/// Histogram, seconds. How long an answer waited at its gate.
pub const HELD: &str = "crab_coordinator_held_seconds";
/// Counter. Keep-alive pieces sent while an answer was held.
pub const KEEP_ALIVES: &str = "crab_coordinator_keep_alives_total";
/// Counter. Requests that the model's server did not answer, by `code`.
pub const UPSTREAM_ERRORS: &str = "crab_coordinator_upstream_errors_total";
/// Counter. Requests that speak of turns which a restore had undone.
pub const DIVERGED: &str = "crab_coordinator_diverged_total";
/// Counter. Answers that are whole and durable in the journal.
pub const JOURNALED: &str = "crab_coordinator_journaled_total";
/// Counter. Failed writes of the journal.
pub const JOURNAL_ERRORS: &str = "crab_coordinator_journal_errors_total";
/// Gauge. Open connections of agents.
pub const CONNECTIONS: &str = "crab_coordinator_connections";
