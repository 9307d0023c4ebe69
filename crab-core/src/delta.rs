//! What a turn changed.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::artifact::Domain;
use crate::error::Result;
use crate::id::SandboxId;
use crate::sandbox::Sandbox;

/// What is known about one domain since its base. Only [`Change::Unchanged`] lets a checkpoint be left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Proven: a restore of the base would bring back this state.
    Unchanged,
    /// Seen to differ.
    Changed(Evidence),
    /// Not known, which counts as changed.
    Unknown(Unknown),
}

impl Change {
    /// Whether the domain must be checkpointed: everything but a proof of the opposite.
    #[must_use]
    pub fn needs_checkpoint(&self) -> bool {
        !matches!(self, Self::Unchanged)
    }
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unchanged => f.write_str("unchanged"),
            Self::Changed(evidence) => write!(f, "changed: {evidence}"),
            Self::Unknown(reason) => write!(f, "unknown: {reason}"),
        }
    }
}

/// Why a domain counts as changed.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Evidence {
    /// Files differ: how many are known to, and some of their paths inside the sandbox.
    Files {
        /// At least so many.
        count: u64,
        /// The first few, with bytes that are not UTF-8 replaced.
        examples: Vec<String>,
    },
    /// The filesystem counts as changed without a list of files, and why.
    Filesystem(String),
    /// A process that the version does not hold lives now.
    NewTask(String),
    /// A process that the version holds is gone.
    GoneTask(String),
    /// A process that the version holds ran and may hold another state.
    TaskRan(String),
    /// Both domains are entangled: for example a touched file that a surviving process holds open.
    Crossing(String),
    /// State that only the kernel holds may differ: ipc, mounts, limits, keys.
    Kernel(String),
}

impl fmt::Display for Evidence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Files { count, examples } => {
                write!(f, "{count} file{}", if *count == 1 { "" } else { "s" })?;
                if !examples.is_empty() {
                    write!(f, " ({})", examples.join(", "))?;
                }
                Ok(())
            }
            Self::Filesystem(what) | Self::Crossing(what) | Self::Kernel(what) => f.write_str(what),
            Self::NewTask(what) => write!(f, "new process {what}"),
            Self::GoneTask(what) => write!(f, "process {what} is gone"),
            Self::TaskRan(what) => write!(f, "process {what} ran"),
        }
    }
}

/// Why a change could not be ruled out.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Unknown {
    /// There is no base yet: the sandbox was attached, restored or re-attached, and no version was made since.
    NoBase,
    /// Evidence was lost: a buffer or a table ran over.
    Overflow(String),
    /// The kernel or the sandbox does something that cannot be observed here.
    Unobservable(String),
    /// Looking failed.
    Failed(String),
    /// The sandbox is not attached.
    NotAttached,
}

impl Unknown {
    /// A short name that stays the same, for metrics.
    #[must_use]
    pub fn label(&self) -> &'static str {
        match self {
            Self::NoBase => "no_base",
            Self::Overflow(_) => "overflow",
            Self::Unobservable(_) => "unobservable",
            Self::Failed(_) => "failed",
            Self::NotAttached => "not_attached",
        }
    }
}

impl fmt::Display for Unknown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoBase => f.write_str("no version since attach"),
            Self::Overflow(what) => write!(f, "evidence lost: {what}"),
            Self::Unobservable(what) => write!(f, "not observable: {what}"),
            Self::Failed(what) => write!(f, "observation failed: {what}"),
            Self::NotAttached => f.write_str("not attached"),
        }
    }
}

/// What left the sandbox and cannot be taken back by a restore.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Effects {
    /// Data was sent to somewhere outside the sandbox other than the coordinator. `None`: nobody watched.
    pub sent: Option<bool>,
    /// The first few destinations.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub destinations: Vec<SocketAddr>,
}

/// Names what a [`StateDelta`] had seen when a delta was taken. Only its maker can read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Token(pub u64);

/// What a sandbox changed since its base.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Delta {
    /// The files.
    pub filesystem: Change,
    /// The processes.
    pub process: Change,
    /// What left the sandbox since the base.
    pub effects: Effects,
    /// What had been seen, for [`StateDelta::rebase`].
    pub token: Token,
}

impl Delta {
    /// The change of one domain.
    #[must_use]
    pub fn of(&self, domain: Domain) -> &Change {
        match domain {
            Domain::Filesystem => &self.filesystem,
            Domain::Process => &self.process,
        }
    }

    /// Whether neither domain needs a checkpoint.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        !self.filesystem.needs_checkpoint() && !self.process.needs_checkpoint()
    }
}

/// A version that became durable, as its base for the deltas that follow.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rebase {
    /// What had been seen when the version's state was captured. What came later stays a change.
    pub token: Token,
    /// The version holds the files anew. Where false, the filesystem base stays as it was.
    pub filesystem: bool,
    /// The version holds the processes anew. Where false, the process base stays as it was.
    pub process: bool,
    /// Where the version's files can be read, for an exact comparison.
    pub tree: Option<PathBuf>,
}

/// Sees what sandboxes change. One observer serves many sandboxes.
///
/// Taking a delta and re-basing it are two steps, so that a failed checkpoint leaves the sandbox as dirty as it was
/// and nothing that happens in between is lost.
#[async_trait]
pub trait StateDelta: Send + Sync {
    /// Begins to watch a sandbox. Until the first [`rebase`](Self::rebase) both domains are
    /// [`Unknown::NoBase`], but for an observer that kept its evidence while the host process was restarted: it may go on
    /// from the base that it had. Attaching an attached sandbox begins anew, also with another root or cgroup.
    ///
    /// # Errors
    /// Where it cannot be watched. The sandbox itself is not touched.
    async fn attach(&self, sandbox: &Sandbox) -> Result<()>;

    /// What changed since the base. Never fails: what cannot be told is [`Change::Unknown`]. Cheap enough for every
    /// turn, and writes nothing that lasts. May be called any number of times, also while the sandbox is frozen.
    async fn take(&self, id: &SandboxId) -> Delta;

    /// Makes a durable version the new base. Has no effect where the token is from before the last
    /// [`attach`](Self::attach), or older than the base.
    async fn rebase(&self, id: &SandboxId, base: &Rebase);

    /// Stops watching. Does nothing where the sandbox is not attached.
    async fn detach(&self, id: &SandboxId);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_counts_as_changed() {
        let unknown = Change::Unknown(Unknown::Overflow("ring".into()));
        assert!(unknown.needs_checkpoint());
        let delta =
            Delta { filesystem: Change::Unchanged, process: unknown, effects: Effects::default(), token: Token(1) };
        assert!(!delta.is_clean());
    }
}
