//! The agent's work between two requests to its model.

use crate::artifact::Digest;
use crate::id::{SandboxId, TurnNumber};

/// One turn of one sandbox, named when its boundary is seen.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Turn {
    /// Whose turn.
    pub sandbox: SandboxId,
    /// Which turn, from 1, never going back.
    pub number: TurnNumber,
    /// The digest of the conversation that the request carried, where the source could tell.
    pub conversation: Option<Digest>,
}

impl Turn {
    /// A turn whose conversation is not known.
    #[must_use]
    pub fn new(sandbox: SandboxId, number: TurnNumber) -> Self {
        Self { sandbox, number, conversation: None }
    }

    /// The same with the digest of its conversation.
    #[must_use]
    pub fn with_conversation(mut self, digest: Digest) -> Self {
        self.conversation = Some(digest);
        self
    }
}
