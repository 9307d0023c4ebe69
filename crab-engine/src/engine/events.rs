//! What the engine tells while it works.

use std::sync::Arc;
use std::time::Duration;

use crab_core::{Error, SandboxId, TurnNumber, VersionId};
use tokio::sync::broadcast;

use crate::policy::Plan;
use crate::report::RestoreReport;

/// Something happened to a sandbox.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct Event {
    /// Which sandbox.
    pub sandbox: SandboxId,
    /// What happened.
    pub kind: EventKind,
}

/// What happened. For each turn the last event is one of [`Skipped`](Self::Skipped), [`Durable`](Self::Durable),
/// [`Failed`](Self::Failed); a turn whose answer went out at [`Deferred`](Self::Deferred) may be the last of several that
/// one of those covers.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum EventKind {
    /// The engine watches the sandbox now.
    Attached {
        /// The version that a restore would bring back.
        standing: Option<VersionId>,
    },
    /// The engine does not watch the sandbox any more.
    Detached,
    /// A boundary was seen and it was decided what its turn needs.
    Decided {
        /// The turn.
        turn: TurnNumber,
        /// What is to be captured. It is decided again at the cut, where it can grow and shrink.
        plan: Plan,
        /// What changed, for people.
        delta: String,
    },
    /// The turn waits for a worker.
    Queued {
        /// The turn.
        turn: TurnNumber,
        /// It shares the capture of a request that came earlier.
        shared: bool,
    },
    /// The model's answer waits for the turn's version: from now on the checkpoint costs the agent time.
    Promoted {
        /// The turn.
        turn: TurnNumber,
    },
    /// The sandbox's tasks are stopped for a capture.
    Frozen,
    /// They run again.
    Thawed {
        /// For how long they were stopped.
        frozen: Duration,
    },
    /// The turn is covered by a new version.
    Durable {
        /// The turn.
        turn: TurnNumber,
        /// The version that covers it.
        version: VersionId,
        /// What was captured.
        plan: Plan,
        /// What had changed at the cut, for people.
        delta: String,
        /// Time from the boundary to the open gate that was hidden behind the model.
        hidden: Duration,
        /// Time that the answer waited at the gate.
        exposed: Duration,
        /// Time that the sandbox's tasks were stopped.
        frozen: Duration,
        /// Bytes written, where the backends know.
        bytes: Option<u64>,
        /// Bytes that whole copies of what was captured take, where the backends know.
        size: Option<u64>,
    },
    /// The turn changed nothing and rides on the standing version.
    Skipped {
        /// The turn.
        turn: TurnNumber,
        /// The version that covers it.
        version: VersionId,
        /// Time from the boundary to the open gate that was hidden behind the model.
        hidden: Duration,
        /// Time that the answer waited at the gate.
        exposed: Duration,
    },
    /// The turn changed something, its answer goes out, and its checkpoint comes later, as the policy says.
    Deferred {
        /// The turn.
        turn: TurnNumber,
        /// When the checkpoint is due.
        wait: Duration,
    },
    /// A checkpoint failed and is tried once more, urgent.
    Retrying {
        /// Why.
        error: Arc<Error>,
    },
    /// The turn is not covered.
    Failed {
        /// The turn.
        turn: TurnNumber,
        /// Why.
        error: Arc<Error>,
        /// The answer went out all the same: the turn is unprotected.
        released: bool,
    },
    /// The sandbox has the state of an older version.
    Restored {
        /// What was done.
        report: Arc<RestoreReport>,
        /// How long it took.
        took: Duration,
    },
    /// The sandbox was made from a version of another one.
    Forked {
        /// What was done.
        report: Arc<RestoreReport>,
        /// How long it took.
        took: Duration,
    },
    /// A version was removed.
    Removed {
        /// Which.
        version: VersionId,
    },
}

/// The events of an engine, from the moment of the call on.
#[derive(Debug)]
pub struct Events(pub(super) broadcast::Receiver<Event>);

/// The subscriber was slower than the engine: so many events were dropped for it. The engine never waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lagged(
    /// How many.
    pub u64,
);

impl Events {
    /// The next event; `None` once the engine is gone. May be dropped at any point without losing an event.
    pub async fn next(&mut self) -> Option<std::result::Result<Event, Lagged>> {
        match self.0.recv().await {
            Ok(event) => Some(Ok(event)),
            Err(broadcast::error::RecvError::Lagged(count)) => Some(Err(Lagged(count))),
            Err(broadcast::error::RecvError::Closed) => None,
        }
    }

    /// The next event where one is there already.
    pub fn try_next(&mut self) -> Option<std::result::Result<Event, Lagged>> {
        match self.0.try_recv() {
            Ok(event) => Some(Ok(event)),
            Err(broadcast::error::TryRecvError::Lagged(count)) => Some(Err(Lagged(count))),
            Err(broadcast::error::TryRecvError::Empty | broadcast::error::TryRecvError::Closed) => None,
        }
    }
}
