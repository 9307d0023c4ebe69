//! What a host should hear of besides turns.

use crab_core::{SandboxId, TurnNumber};
use tokio::sync::broadcast;

/// Something that a host should know.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Event {
    /// After a restore, a request speaks of turns that the restored version has not lived: the files were restored and
    /// the conversation was not. The turn goes its way; what the agent believes and what its sandbox holds differ.
    Diverged {
        /// Whose.
        sandbox: SandboxId,
        /// The turn whose request showed it.
        turn: TurnNumber,
        /// The turn that the sandbox was restored to.
        restored_to: TurnNumber,
        /// The newest undone turn that the request speaks of.
        speaks_of: TurnNumber,
    },
    /// A turn's answer went out although the turn is not covered by a version.
    Unprotected {
        /// Whose.
        sandbox: SandboxId,
        /// Which turn.
        turn: TurnNumber,
    },
    /// A turn's gate failed, and the agent was asked to try again.
    GateFailed {
        /// Whose.
        sandbox: SandboxId,
        /// Which turn.
        turn: TurnNumber,
    },
}

/// The coordinator's events from the moment of subscribing.
#[derive(Debug)]
pub struct Events(broadcast::Receiver<Event>);

impl Events {
    pub(crate) fn new(receiver: broadcast::Receiver<Event>) -> Self {
        Self(receiver)
    }

    /// The next event; `None` when the coordinator is gone. Whoever falls 256 events behind misses the oldest; each is
    /// in the log as well. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Option<Event> {
        loop {
            match self.0.recv().await {
                Ok(event) => return Some(event),
                Err(broadcast::error::RecvError::Lagged(missed)) => {
                    tracing::warn!(missed, "events of the coordinator were not taken in time");
                }
                Err(broadcast::error::RecvError::Closed) => return None,
            }
        }
    }
}
