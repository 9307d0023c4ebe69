//! Where turns come from.

use async_trait::async_trait;

use crate::gate::Gate;
use crate::turn::Turn;

/// A source of turn boundaries: an HTTP proxy between agent and model, an in-process runner, a recorded trace.
///
/// ```
/// use crab_core::{Boundary, Gate, SandboxId, Turn, TurnBoundary, TurnNumber};
///
/// /// Plays three turns of one sandbox.
/// struct Three(u64);
///
/// #[async_trait::async_trait]
/// impl TurnBoundary for Three {
///     async fn next(&mut self) -> Option<Boundary> {
///         self.0 += 1;
///         if self.0 > 3 {
///             return None;
///         }
///         let (gate, _hold) = Gate::new();
///         let id = SandboxId::new("box").ok()?;
///         Some(Boundary { turn: Turn::new(id, TurnNumber(self.0)), gate })
///     }
/// }
/// ```
#[async_trait]
pub trait TurnBoundary: Send {
    /// The next boundary, as soon as the agent has sent its request; `None` when no more will come.
    ///
    /// Dropping the future must not lose a boundary: the next call returns it.
    async fn next(&mut self) -> Option<Boundary>;
}

/// A turn that has just ended, and the gate that holds the model's answer.
#[derive(Debug)]
pub struct Boundary {
    /// The turn.
    pub turn: Turn,
    /// Opened when the turn's version is durable. Dropping it unopened is a failure of the turn, not a release.
    pub gate: Gate,
}
