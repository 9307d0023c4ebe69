//! What is kept of a sandbox for the process that comes after this one, where the programs are pinned.
//!
//! The programs note on while nobody reads, but the base is known here alone: which moment it was, and what lived then.
//! It is written at each rebase, with what was noted up to then. A successor goes on from it where all that was noted
//! since is still in the maps.

use std::fs;
use std::io::{self, Write};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crab_core::{SandboxId, keep_house};
use serde::{Deserialize, Serialize};

use crate::filesystem::Mark;
use crate::history::History;
use crate::mounts::Mounts;
use crate::tasks::{Census, Thread, Trace};

/// One sandbox.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Saved {
    /// The boot of the machine that it belongs to.
    boot: String,
    /// The inode of its cgroup, and what its root is.
    pub(crate) cgroup: u64,
    pub(crate) root: String,
    /// Of the processes' base.
    pub(crate) epoch: u64,
    pub(crate) time: u64,
    threads: Vec<(Thread, Trace)>,
    usage: u64,
    /// What was noted since, and the interval that was not over when this was written.
    pub(crate) history: History,
    pub(crate) current: u64,
    pub(crate) mounts: Mounts,
    /// Of the files' base.
    pub(crate) mark: Mark,
    pub(crate) tree: Option<PathBuf>,
    /// A process could have files changed without a system call of its own.
    pub(crate) asynchronous: bool,
}

impl Saved {
    pub(crate) fn census(&self) -> Census {
        Census { threads: self.threads.iter().cloned().collect(), usage: self.usage }
    }

    /// The same with what was noted up to an interval.
    pub(crate) fn noted(mut self, history: &History, current: u64) -> Self {
        (self.history, self.current) = (history.clone(), current);
        self
    }

    /// The same with what lived.
    pub(crate) fn with(mut self, census: &Census) -> Self {
        self.threads = census.threads.iter().map(|(thread, trace)| (*thread, trace.clone())).collect();
        self.usage = census.usage;
        self
    }

    #[allow(clippy::too_many_arguments, reason = "each is a fact of its own")]
    pub(crate) fn new(
        cgroup: u64,
        root: String,
        (epoch, time): (u64, u64),
        mounts: Mounts,
        mark: Mark,
        tree: Option<PathBuf>,
        asynchronous: bool,
    ) -> Self {
        Self {
            boot: boot(),
            cgroup,
            root,
            epoch,
            time,
            threads: Vec::new(),
            usage: 0,
            history: History::default(),
            current: epoch,
            mounts,
            mark,
            tree,
            asynchronous,
        }
    }
}

fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default()
}

/// The folder that they lie in.
#[derive(Clone, Debug)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        fs::DirBuilder::new().recursive(true).mode(0o700).create(path)?;
        Ok(Self(path.to_owned()))
    }

    fn file(&self, id: &SandboxId) -> PathBuf {
        self.0.join(format!("{id}.json"))
    }

    /// Writes one, whole or not at all. It need not outlive the machine.
    pub(crate) fn write(&self, id: &SandboxId, saved: &Saved) -> io::Result<()> {
        let new = self.0.join(format!("{id}.new"));
        let text = serde_json::to_vec(saved)?;
        keep_house(|| {
            let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&new)?;
            file.write_all(&text)?;
            fs::rename(&new, self.file(id))
        })
    }

    /// Reads one, of this boot.
    pub(crate) fn read(&self, id: &SandboxId) -> Option<Saved> {
        let saved: Saved = serde_json::from_slice(&fs::read(self.file(id)).ok()?).ok()?;
        (!saved.boot.is_empty() && saved.boot == boot()).then_some(saved)
    }

    pub(crate) fn remove(&self, id: &SandboxId) {
        match keep_house(|| fs::remove_file(self.file(id))) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                tracing::warn!(sandbox = %id, %error, "cannot remove what was kept for a successor");
            }
            _ => {}
        }
    }
}
