//! What only the owner of the sandboxes can do to them.

use std::fmt;

use async_trait::async_trait;
use serde::{Deserialize, Serialize};

use crate::error::Result;
use crate::id::{SandboxId, VersionId};
use crate::sandbox::{External, InheritedFd, Sandbox};

/// The condition of a sandbox's processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Condition {
    /// Its tasks may run.
    Running,
    /// Its tasks are frozen.
    Frozen,
    /// It has no tasks.
    Stopped,
    /// Nobody could tell.
    Unknown,
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Running => "running",
            Self::Frozen => "frozen",
            Self::Stopped => "stopped",
            Self::Unknown => "in an unknown condition",
        })
    }
}

/// The owner of the sandboxes, implemented by the orchestrator. The cgroup v2 half of it (freeze, thaw, kill,
/// condition) ships as `crab_engine::CgroupV2`.
///
/// Calls for one sandbox come one at a time; calls for several come at once.
#[async_trait]
pub trait SandboxHost: Send + Sync {
    /// The sandbox as it is at this moment, with all that its processes hold of the host's.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) where the host knows no such sandbox.
    async fn describe(&self, id: &SandboxId) -> Result<Sandbox>;

    /// Stops all tasks where they are, those in child cgroups too, and returns when all have stopped. Freezing a
    /// frozen sandbox does nothing.
    ///
    /// # Errors
    /// The sandbox is running again when this fails.
    async fn freeze(&self, id: &SandboxId) -> Result<()>;

    /// Lets all tasks run again. Thawing a running or empty sandbox does nothing; it also undoes a freeze that a dead
    /// process left behind.
    ///
    /// # Errors
    /// Where the sandbox may still be frozen.
    async fn thaw(&self, id: &SandboxId) -> Result<()>;

    /// Ends all tasks, frozen ones too, and returns when none is left and nothing of the sandbox is mounted.
    ///
    /// # Errors
    /// Where tasks may be left.
    async fn kill(&self, id: &SandboxId) -> Result<()>;

    /// The condition of its tasks.
    ///
    /// # Errors
    /// Where that cannot be told.
    async fn condition(&self, id: &SandboxId) -> Result<Condition>;

    /// Makes ready what restored processes get from the host: one descriptor for each of `external`, and the cgroup.
    /// Called while the sandbox is stopped, after its files were restored.
    ///
    /// # Errors
    /// Where something cannot be given again; nothing is left behind.
    async fn inherit(&self, id: &SandboxId, external: &[External]) -> Result<Vec<InheritedFd>>;

    /// Gives a fork what must be its own before any of its tasks runs: machine id, host keys, seeds of random numbers,
    /// tokens. Its files are in place, it has no task, and its version 1 is `from`'s `version`. The same call may come
    /// again after an error or a crash, also with the files put in place anew.
    ///
    /// What restored processes hold in memory is not changed by this: a process that drew a seed before the fork goes
    /// on with it in both.
    ///
    /// # Errors
    /// Fail the fork. The sandbox is stopped then.
    async fn prepare_fork(&self, _fork: &Sandbox, _from: &SandboxId, _version: VersionId) -> Result<()> {
        Ok(())
    }

    /// Takes over a process tree that a backend restored below `init`. The host reaps it when it ends.
    ///
    /// # Errors
    /// Where the tree is not what the host expects, for example outside the sandbox's cgroup.
    async fn adopt(&self, id: &SandboxId, init: u32) -> Result<()>;

    /// Starts the sandbox afresh on its root filesystem, without a process image.
    ///
    /// # Errors
    /// The sandbox is stopped when this fails.
    async fn relaunch(&self, id: &SandboxId) -> Result<()>;
}
