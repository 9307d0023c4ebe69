//! How one domain is saved and brought back.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use async_trait::async_trait;

use crate::artifact::{Artifact, Domain};
use crate::error::{Error, ErrorKind, Result};
use crate::id::{ArtifactId, OperationId, SandboxId};
use crate::sandbox::{InheritedFd, Sandbox};
use crate::transfer::{ByteStream, ExportRequest, FileChanges, ImportRequest, ResumeToken, Space};

/// What a backend can do beyond the contract.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Capabilities {
    /// [`CheckpointBackend::restore`] can keep the state that it replaces as an artifact.
    pub keeps_replaced: bool,
    /// An artifact can be restored into another sandbox than the one that it was captured from.
    pub forks: bool,
    /// A capture given a parent stores only what differs from it.
    pub incremental: bool,
    /// [`CheckpointBackend::diff`] works.
    pub diffs: bool,
    /// [`CheckpointBackend::space`] works.
    pub accounts: bool,
    /// [`CheckpointBackend::export`] and [`CheckpointBackend::import`] work.
    pub exports: bool,
    /// An import that was cut short can be continued: [`CheckpointBackend::resume_token`].
    pub resumes: bool,
    /// [`CheckpointBackend::prepare`] shortens the freeze.
    pub prepares: bool,
}

impl Capabilities {
    /// The same with [`keeps_replaced`](Self::keeps_replaced).
    #[must_use]
    pub fn with_keeps_replaced(mut self) -> Self {
        self.keeps_replaced = true;
        self
    }
    /// The same with [`forks`](Self::forks).
    #[must_use]
    pub fn with_forks(mut self) -> Self {
        self.forks = true;
        self
    }
    /// The same with [`incremental`](Self::incremental).
    #[must_use]
    pub fn with_incremental(mut self) -> Self {
        self.incremental = true;
        self
    }
    /// The same with [`diffs`](Self::diffs).
    #[must_use]
    pub fn with_diffs(mut self) -> Self {
        self.diffs = true;
        self
    }
    /// The same with [`accounts`](Self::accounts).
    #[must_use]
    pub fn with_accounts(mut self) -> Self {
        self.accounts = true;
        self
    }
    /// The same with [`exports`](Self::exports).
    #[must_use]
    pub fn with_exports(mut self) -> Self {
        self.exports = true;
        self
    }
    /// The same with [`resumes`](Self::resumes).
    #[must_use]
    pub fn with_resumes(mut self) -> Self {
        self.resumes = true;
        self
    }
    /// The same with [`prepares`](Self::prepares).
    #[must_use]
    pub fn with_prepares(mut self) -> Self {
        self.prepares = true;
        self
    }
}

/// What is to be done at the cut: at the one moment that the captured state belongs to. The engine pairs the domains
/// with it: the filesystem is snapshotted at the cut of the process dump.
#[async_trait]
pub trait AtCut: Send {
    /// Runs at the cut. Where the sandbox's tasks are stopped for the capture, they are stopped during this.
    ///
    /// # Errors
    /// Fail the capture.
    async fn run(&mut self) -> Result<()>;
}

/// Nothing to do at the cut.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoCut;

#[async_trait]
impl AtCut for NoCut {
    async fn run(&mut self) -> Result<()> {
        Ok(())
    }
}

/// What is to be captured.
pub struct CaptureRequest<'a> {
    /// The sandbox as its host describes it now.
    pub sandbox: &'a Sandbox,
    /// The name that the artifact gets.
    pub artifact: ArtifactId,
    /// The last artifact of this domain and sandbox, for backends that store differences.
    pub parent: Option<&'a Artifact>,
    /// The caller has frozen the sandbox's cgroup and will thaw it. The backend must leave it frozen.
    pub frozen: bool,
    /// When to give up. The sandbox must then be as it was.
    pub deadline: Option<Instant>,
    /// Called once, at the cut.
    pub at_cut: &'a mut dyn AtCut,
}

/// What was done for a capture before the freeze. Dropping it undoes that.
#[derive(Default)]
pub struct Prepared {
    stopped: Duration,
    kept: Option<Box<dyn Send + Sync>>,
}

impl Prepared {
    /// Something was done, in which the sandbox's tasks were stopped for so long; `kept` undoes it when it is dropped.
    pub fn new(stopped_for: Duration, kept: impl Send + Sync + 'static) -> Self {
        Self { stopped: stopped_for, kept: Some(Box::new(kept)) }
    }

    /// Nothing was done.
    #[must_use]
    pub fn nothing() -> Self {
        Self::default()
    }

    /// How long the sandbox's tasks were stopped for it.
    #[must_use]
    pub fn stopped_for(&self) -> Duration {
        self.stopped
    }
}

impl std::fmt::Debug for Prepared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Prepared").field("stopped", &self.stopped).field("kept", &self.kept.is_some()).finish()
    }
}

/// One domain's checkpoints.
///
/// A checkpoint has two halves. [`capture`](Self::capture) takes the consistent cut and is short; the sandbox may be
/// frozen during it. [`Captured::persist`] makes it durable, after the thaw. An artifact exists when `persist` has
/// returned it: a kill at any moment before that leaves nothing that [`list`](Self::list) names, or something that the
/// engine recognises as an orphan by its name and removes.
///
/// Errors state the sandbox's condition where they can leave it other than it was.
#[async_trait]
pub trait CheckpointBackend: Send + Sync {
    /// A short name that is stored with every artifact, such as `"btrfs"`.
    fn name(&self) -> &str;

    /// The domain that it saves.
    fn domain(&self) -> Domain;

    /// What it can do beyond the contract.
    fn capabilities(&self) -> Capabilities;

    /// Finishes or undoes what a process that died in the middle of a call left behind. Called once when an engine
    /// opens its store, before any other call. Running sandboxes are not disturbed.
    ///
    /// A program that worked for the dead process and outlives it must have ended when this returns: from then on nothing
    /// but new calls touches a sandbox. A sandbox that such a program left frozen may be frozen still: the engine thaws
    /// it afterwards.
    ///
    /// # Errors
    /// Where something was found that could neither be finished nor undone; it says what and where.
    async fn recover(&self) -> Result<()>;

    /// Does beforehand, while the sandbox runs, what shortens the freeze around the [`capture`](Self::capture) of this
    /// name. It is used by that capture where it is still there, and goes when the returned value does. What the sandbox
    /// changes until the cut is in the capture all the same. Without [`Capabilities::prepares`] nothing is done.
    ///
    /// Dropping the future leaves nothing behind and the sandbox running, at the latest after the deadline.
    ///
    /// # Errors
    /// Nothing is left behind, and the sandbox runs. The capture may be made without.
    async fn prepare(
        &self,
        _sandbox: &Sandbox,
        _artifact: &ArtifactId,
        _deadline: Option<Instant>,
    ) -> Result<Prepared> {
        Ok(Prepared::nothing())
    }

    /// Takes the cut and calls [`CaptureRequest::at_cut`] once at it. The sandbox runs on afterwards, unless the
    /// caller froze it.
    ///
    /// Dropping the future lets the sandbox run on, at the latest after the deadline.
    ///
    /// # Errors
    /// Nothing is left behind, and the sandbox is as it was.
    /// [`ErrorKind::AlreadyExists`](crate::ErrorKind::AlreadyExists) where the name is taken,
    /// [`ErrorKind::NotCheckpointable`](crate::ErrorKind::NotCheckpointable) where the sandbox holds something that
    /// cannot be saved.
    async fn capture(&self, request: CaptureRequest<'_>) -> Result<Box<dyn Captured>>;

    /// Checks that an artifact is whole, without restoring it.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) where it is gone,
    /// [`ErrorKind::Corrupt`](crate::ErrorKind::Corrupt) where it is damaged.
    async fn verify(&self, artifact: &Artifact) -> Result<()>;

    /// Checks that a whole artifact could be restored into this sandbox, as far as can be told without touching it: that
    /// its root is one that the backend can replace, that the tools here can bring the processes back. The sandbox may
    /// run. Short: the engine asks before a restore ends anything.
    ///
    /// # Errors
    /// What [`restore`](Self::restore) would say: [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) for the
    /// root, [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) for the tools or the machine.
    async fn fits(&self, _artifact: &Artifact, _sandbox: &Sandbox) -> Result<()> {
        Ok(())
    }

    /// Brings an artifact's state back into a stopped sandbox. The same operation may be tried again after an error or
    /// a crash. Other artifacts survive, newer ones too.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`](crate::ErrorKind::Busy) where the sandbox has tasks,
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) and [`ErrorKind::Corrupt`](crate::ErrorKind::Corrupt) as
    /// for [`verify`](Self::verify). The domain is then in its old state, and the sandbox is stopped.
    async fn restore(&self, artifact: &Artifact, target: RestoreTarget) -> Result<Restored>;

    /// Removes an artifact. Removing what is not there does nothing.
    ///
    /// # Errors
    /// Where it may still take space; the call may be repeated.
    async fn remove(&self, artifact: &Artifact) -> Result<()>;

    /// All durable artifacts of a sandbox, in no order. Their `facts` and `external` may be missing: the manifest
    /// holds those.
    ///
    /// # Errors
    /// Where they cannot be read.
    async fn list(&self, id: &SandboxId) -> Result<Vec<Artifact>>;

    /// Where an artifact's files can be read, for a filesystem backend that keeps them readable.
    fn tree(&self, _artifact: &Artifact) -> Option<PathBuf> {
        None
    }

    /// What differs between two artifacts, of one sandbox or of two: exactly the paths whose entries differ, whatever
    /// happened to them in between. Costs what was changed, where the filesystem can tell, and not what there is.
    ///
    /// Both artifacts must stay until the changes are read or dropped.
    ///
    /// # Errors
    /// As for [`verify`](Self::verify); [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) without
    /// [`Capabilities::diffs`].
    async fn diff(&self, _from: &Artifact, _to: &Artifact) -> Result<Box<dyn FileChanges>> {
        Err(unsupported(self.name(), "compare artifacts"))
    }

    /// What an artifact takes of the disk at this moment. The exclusive part changes as others come and go. May cost a
    /// walk over the artifact's files.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`](crate::ErrorKind::NotFound) where it is gone;
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) without [`Capabilities::accounts`].
    async fn space(&self, _artifact: &Artifact) -> Result<Space> {
        Err(unsupported(self.name(), "tell the space that an artifact takes"))
    }

    /// Gives an artifact as a checksummed stream of bytes, all of it or what differs from a base.
    ///
    /// The artifact, and the base, must stay until the stream is read or dropped.
    ///
    /// # Errors
    /// As for [`verify`](Self::verify); [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) without
    /// [`Capabilities::exports`].
    async fn export(&self, _request: ExportRequest<'_>) -> Result<Box<dyn ByteStream>> {
        Err(unsupported(self.name(), "export artifacts"))
    }

    /// Makes an artifact of what [`export`](Self::export) gave, here or on another host. It is durable when this
    /// returns, and is listed only then. Dropping the future breaks the stream off. Files keep their inode numbers, by
    /// which processes that are restored beside them know them.
    ///
    /// # Errors
    /// Nothing is left that [`list`](Self::list) names. With [`Capabilities::resumes`], what came through of a stream that
    /// broke off stays, also when the process ends, until an import of the name continues it or begins anew, or it is
    /// [removed](Self::remove) by its name; where none of that happens, a [recovery](Self::recover) removes it some days
    /// later. Else nothing is left at all.
    /// [`ErrorKind::AlreadyExists`](crate::ErrorKind::AlreadyExists) where the name is taken,
    /// [`ErrorKind::Corrupt`](crate::ErrorKind::Corrupt) where the stream is damaged or ends early,
    /// [`ErrorKind::InvalidInput`](crate::ErrorKind::InvalidInput) where the base is missing or another one,
    /// [`ErrorKind::Unsupported`](crate::ErrorKind::Unsupported) without [`Capabilities::exports`].
    async fn import(&self, _request: ImportRequest<'_>) -> Result<Artifact> {
        Err(unsupported(self.name(), "import artifacts"))
    }

    /// From where an import of this name that was cut short can be continued, for [`ExportRequest::resume`]; `None`
    /// where there is nothing to continue. The stream that is exported so goes to another [`import`](Self::import) with
    /// the same name and base.
    ///
    /// # Errors
    /// Where that cannot be told.
    async fn resume_token(&self, _sandbox: &SandboxId, _artifact: &ArtifactId) -> Result<Option<ResumeToken>> {
        Ok(None)
    }
}

fn unsupported(backend: &str, what: &str) -> Error {
    Error::new(ErrorKind::Unsupported, format!("the backend \"{backend}\" cannot {what}")).give_up()
}

/// A cut that is not durable yet. Dropping it is a [`discard`](Self::discard) that happens at leisure, at the latest
/// at the next [`CheckpointBackend::recover`].
#[async_trait]
pub trait Captured: Send + Sync {
    /// Makes it durable. Returns after everything that a restore needs is on stable storage.
    ///
    /// # Errors
    /// Nothing is left behind. The sandbox is not touched.
    async fn persist(self: Box<Self>) -> Result<Artifact>;

    /// Gives it up and removes what it holds.
    ///
    /// # Errors
    /// Where something may be left behind.
    async fn discard(self: Box<Self>) -> Result<()>;

    /// How long the capture itself kept the sandbox's tasks stopped, where the backend knows.
    fn stopped_for(&self) -> Option<Duration> {
        None
    }
}

/// Where a restore goes.
#[derive(Debug)]
pub struct RestoreTarget {
    /// The sandbox, stopped. For a filesystem backend `root` is where the restored tree will stand; it may exist or
    /// not.
    pub sandbox: Sandbox,
    /// Names this restore, so that a second attempt is known to be one.
    pub operation: OperationId,
    /// Keep the replaced state under this name, where [`Capabilities::keeps_replaced`]. `None` removes it.
    pub keep_replaced: Option<ArtifactId>,
    /// What the host gives to the restored processes.
    pub inherited: Vec<InheritedFd>,
    /// When to give up and leave the old state.
    pub deadline: Option<Instant>,
}

/// What a restore did.
#[derive(Clone, Debug, Default)]
pub struct Restored {
    /// The state that was replaced, where it was kept.
    pub replaced: Option<Artifact>,
    /// The root of the restored process tree, as a pid of the host's namespace, for a process backend.
    pub init: Option<u32>,
}
