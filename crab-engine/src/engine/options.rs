//! What an engine can be told.

use std::time::Duration;

use crate::scheduler::Limits;

/// What happens to the model's answer when its turn cannot be covered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum FailurePolicy {
    /// After one retry the gate fails: the agent gets a retryable error.
    #[default]
    Strict,
    /// The answer goes out and the turn is reported as unprotected: after one retry, or when the answer has waited
    /// this long. The version is still made where that is possible.
    BestEffort {
        /// How long an answer may wait at its gate.
        max_hold: Duration,
    },
}

/// How long calls to the host and the backends may take. When one passes, the call is dropped, the sandbox is thawed
/// and the checkpoint has failed with [`TimedOut`](crab_core::ErrorKind::TimedOut).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deadlines {
    /// Freeze, thaw, kill, describe and the delta source: 15 s.
    pub host: Duration,
    /// One capture, during which the sandbox may be frozen: 60 s.
    pub capture: Duration,
    /// Making one artifact durable, or removing one: 300 s.
    pub persist: Duration,
    /// Restoring one domain, with its verification: 300 s.
    pub restore: Duration,
}

impl Default for Deadlines {
    fn default() -> Self {
        Self {
            host: Duration::from_secs(15),
            capture: Duration::from_secs(60),
            persist: Duration::from_secs(300),
            restore: Duration::from_secs(300),
        }
    }
}

/// Everything that has a default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Options {
    pub(super) limits: Limits,
    pub(super) deadlines: Deadlines,
    pub(super) failure: FailurePolicy,
    pub(super) bytes_per_second: Option<u64>,
}
