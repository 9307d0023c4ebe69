//! What a restore or a fork did.

use crab_core::{Digest, Effects, OperationId, SandboxId, TurnNumber, VersionId};
use serde::{Deserialize, Serialize};

/// What became of the processes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub enum ProcessOutcome {
    /// They run on from where they were captured.
    Restored {
        /// The root of their tree, as a pid of the host's namespace.
        init: u32,
    },
    /// The host started the sandbox afresh on the restored files.
    Relaunched {
        /// Why: no process lived, or their state could not be stored.
        reason: String,
    },
}

/// Turns whose effect on the sandbox is gone after a restore. Both ends belong to them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LostTurns {
    /// The first.
    pub first: TurnNumber,
    /// The last that was seen. `None` where nobody can tell: the manifest of a newer version cannot be read.
    pub last: Option<TurnNumber>,
}

/// Something that left the sandbox after the restored version was made, or that may have. A restore does not undo it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptEffect {
    /// The version that recorded it.
    pub version: VersionId,
    /// Its turn.
    pub turn: TurnNumber,
    /// What is known. `sent: None` means that nobody watched.
    pub effects: Effects,
}

/// A version that was wanted and could not be used.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassedOver {
    /// Which version.
    pub version: VersionId,
    /// What is wrong with it.
    pub reason: String,
}

/// What a restore or a fork did. The same operation asked for again gives an equal report.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RestoreReport {
    /// The operation.
    pub operation: OperationId,
    /// The sandbox that was restored, or made by the fork.
    pub sandbox: SandboxId,
    /// The version whose state it has now. For a fork: the first version of the new sandbox.
    pub version: VersionId,
    /// The turn at whose boundary that state was captured.
    pub turn: TurnNumber,
    /// The digest of the conversation at that boundary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conversation: Option<Digest>,
    /// What became of the processes.
    pub process: ProcessOutcome,
    /// The version under which the replaced files are kept, where there were any and the backend keeps them. Where a
    /// restore took more than one attempt these are the files that the first attempt replaced: what a later one finds
    /// was put there by the restore itself, and is not kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced: Option<VersionId>,
    /// The turns whose work is not in this state any more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lost: Option<LostTurns>,
    /// Newer versions that were damaged and passed over, newest first. Empty unless a fallback was allowed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub passed_over: Vec<PassedOver>,
    /// What cannot be undone.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub effects: Vec<KeptEffect>,
}
