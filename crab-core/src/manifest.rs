//! The pair (P, F) of a turn. A version exists once its manifest is durable.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::artifact::{Artifact, Digest, Domain};
use crate::delta::Effects;
use crate::id::{OperationId, SandboxId, TurnNumber, VersionId};

/// The manifest format that this library writes. It reads every format up to this one and refuses newer ones.
pub const MANIFEST_FORMAT: u32 = 1;

/// One half of a version.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Half {
    /// The state is stored.
    Stored(Artifact),
    /// There was nothing to store: no process lived.
    Empty,
    /// The state could not be stored, and why. A restore relaunches the sandbox and says so.
    Missing(String),
}

impl Half {
    /// The artifact, where the state is stored.
    #[must_use]
    pub fn artifact(&self) -> Option<&Artifact> {
        match self {
            Self::Stored(artifact) => Some(artifact),
            Self::Empty | Self::Missing(_) => None,
        }
    }
}

/// Why a version was made.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
#[non_exhaustive]
pub enum Origin {
    /// A turn changed something.
    Turn,
    /// The caller asked for it.
    Request,
    /// The state that a restore replaced.
    Replaced {
        /// The restore.
        operation: OperationId,
    },
    /// Another sandbox's version that this sandbox was forked from.
    Fork {
        /// The other sandbox.
        sandbox: SandboxId,
        /// Its version.
        version: VersionId,
    },
}

/// What the version was made on. A process image may need the same again.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct HostFacts {
    /// The kernel release.
    pub kernel: String,
    /// The machine architecture.
    pub architecture: String,
    /// Versions of the tools that took part, by name.
    #[serde(default)]
    pub tools: BTreeMap<String, String>,
}

/// How long the parts of a checkpoint took, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Timings {
    /// The sandbox's tasks were stopped.
    pub frozen_us: u64,
    /// The capture, with the freeze.
    pub capture_us: u64,
    /// Making it durable, without the manifest.
    pub persist_us: u64,
}

/// A version: which artifacts belong together, and where they come from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Manifest {
    /// [`MANIFEST_FORMAT`] when it was written.
    pub format: u32,
    /// Whose version.
    pub sandbox: SandboxId,
    /// Which version.
    pub version: VersionId,
    /// The version that was newest when this one was captured.
    pub parent: Option<VersionId>,
    /// The turn at whose boundary it was captured.
    pub turn: TurnNumber,
    /// Why it was made.
    pub origin: Origin,
    /// The files.
    pub filesystem: Half,
    /// The processes.
    pub process: Half,
    /// The digest of the conversation at the boundary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub conversation: Option<Digest>,
    /// What left the sandbox since the parent version: restoring past it does not undo that.
    #[serde(default)]
    pub effects: Effects,
    /// When it was captured, in milliseconds since the epoch, by the host's clock. For people; nothing depends on it.
    pub created_ms: u64,
    /// What it was made on.
    pub host: HostFacts,
    /// How long it took.
    #[serde(default)]
    pub timings: Timings,
}

impl Manifest {
    /// One half.
    #[must_use]
    pub fn half(&self, domain: Domain) -> &Half {
        match domain {
            Domain::Filesystem => &self.filesystem,
            Domain::Process => &self.process,
        }
    }

    /// The stored artifacts, filesystem first.
    pub fn artifacts(&self) -> impl Iterator<Item = &Artifact> {
        [&self.filesystem, &self.process].into_iter().filter_map(Half::artifact)
    }
}
