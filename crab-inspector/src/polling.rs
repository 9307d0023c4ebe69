//! The fallback that needs no BPF: it looks at what is there when it is asked.

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use crab_core::{
    Change, Delta, Effects, Error, Evidence, Rebase, Result, Sandbox, SandboxId, StateDelta, Token, Unknown,
};

use crate::filesystem::{self, Base, Known, Mark, Root};
use crate::ledger::Ledger;
use crate::net::Limits;
use crate::registry::Registry;
use crate::tasks::Census;

/// Sees changes by looking at the sandbox at each take, without events: sound, but slower and coarser than BPF.
///
/// **Files.** A root that is no btrfs subvolume is read whole at each take, which only a small one allows; else the
/// filesystem is [`Unknown::Unobservable`]. Of a btrfs subvolume each take commits what was written (`syncfs`) and reads the subvolume's generation. A generation that is that of the last version's
/// snapshot proves that nothing was written. Otherwise what was written is compared with the snapshot
/// ([`Rebase::tree`]): names, content, modes, owners, extended attributes, link targets, times of modification. More
/// than the limits allow counts as changed.
///
/// **Processes.** They are unchanged if the sandbox has the same threads as the version and none of them was on a CPU
/// since, nor was a process that came and went, told by the scheduler's counters; or if nothing lived then and nothing
/// lives now. Freezing and thawing a thread lets it run, so a sandbox in which anything lives counts as changed in
/// each turn after its first full version.
///
/// It looks as root of the host: searching a btrfs tree needs `CAP_SYS_ADMIN`.
#[derive(Debug)]
pub struct PollingInspector {
    limits: Limits,
    sandboxes: Registry<Watched>,
}

#[derive(Debug)]
struct Watched {
    root: Root,
    cgroup: PathBuf,
    ledger: Ledger<Option<Mark>, Option<Arc<Census>>>,
    files: Option<Base>,
}

impl Default for PollingInspector {
    fn default() -> Self {
        Self::new()
    }
}

impl PollingInspector {
    /// An inspector that compares up to 4,096 files and 32 MiB of their content at a take.
    #[must_use]
    pub fn new() -> Self {
        Self { limits: Limits::DEFAULT, sandboxes: Registry::new() }
    }

    /// The same with other limits to what is compared at a take. What is beyond counts as changed.
    #[must_use]
    pub fn with_limits(mut self, files: usize, bytes: u64) -> Self {
        self.limits = Limits { inodes: files, bytes };
        self
    }
}

#[async_trait]
impl StateDelta for PollingInspector {
    async fn attach(&self, sandbox: &Sandbox) -> Result<()> {
        let root =
            Root::open(&sandbox.root).map_err(|error| Error::io(format!("open {}", sandbox.root.display()), error))?;
        let watched =
            Watched { root, cgroup: sandbox.cgroup.clone(), ledger: Ledger::new(self.sandboxes.token()), files: None };
        self.sandboxes.insert(&sandbox.id, watched);
        Ok(())
    }

    async fn take(&self, id: &SandboxId) -> Delta {
        let limits = self.limits;
        self.sandboxes.take(id, |_, _| None, move |watched, token| watched.take(token, limits)).await
    }

    async fn rebase(&self, id: &SandboxId, base: &Rebase) {
        let base = base.clone();
        self.sandboxes.with(id, move |watched| watched.rebase(&base)).await;
    }

    async fn detach(&self, id: &SandboxId) {
        self.sandboxes.remove(id, |_| {});
    }
}

impl Watched {
    fn take(&mut self, token: u64, limits: Limits) -> Delta {
        // Processes first: one that changes a file after it was looked at changes it before the files are.
        let (process, census) = self.processes();
        let known = Known { moment: None, mapped: true, frozen: crate::cgroup::is_frozen(&self.cgroup), limits };
        let files = filesystem::look_alone(&self.root, self.files.as_mut(), known);
        self.ledger.record(token, files.mark, census);
        // A process that stayed may hold a file that is not what it was. It did not run, so this was done from
        // outside; its open files and their sizes are part of its image.
        let process = match process {
            Change::Unchanged if self.anything_lived() && files.change.needs_checkpoint() => {
                let why = "files changed under a process that stayed";
                Change::Changed(Evidence::Crossing(why.to_owned()))
            }
            other => other,
        };
        Delta { filesystem: files.change, process, effects: Effects::default(), token: Token(token) }
    }

    fn anything_lived(&self) -> bool {
        let base = self.ledger.process.mark.as_ref();
        base.and_then(Option::as_ref).is_some_and(|census| !census.threads.is_empty())
    }

    fn processes(&self) -> (Change, Option<Arc<Census>>) {
        let census = match Census::take(&self.cgroup) {
            Ok(census) => Arc::new(census),
            Err(error) => {
                let why = format!("cannot look at the processes: {error}");
                return (Change::Unknown(Unknown::Failed(why)), None);
            }
        };
        let change = match self.ledger.process.mark.as_ref().and_then(Option::as_ref) {
            None => Change::Unknown(Unknown::NoBase),
            Some(base) => census.since(base).map_or(Change::Unchanged, Change::Changed),
        };
        (change, Some(census))
    }

    fn rebase(&mut self, base: &Rebase) {
        let (files, _) = self.ledger.rebase(base.token, base.filesystem, base.process);
        if files {
            let mark = self.ledger.filesystem.mark.clone().flatten();
            self.files = filesystem::base(&self.root, base.tree.as_ref(), mark);
        }
    }
}
