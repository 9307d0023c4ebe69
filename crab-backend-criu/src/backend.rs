//! The backend: what its callers see.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use crab_core::{
    Artifact, ArtifactId, Capabilities, CaptureRequest, Captured, CheckpointBackend, Domain, Error, ErrorKind,
    Prepared, RestoreTarget, Restored, Result, Sandbox, SandboxId, keep_house,
};

use crate::area::Area;
use crate::copies::AllCopies;
use crate::dump::{self, Dumped};
use crate::oci::{Oci, OciRuntime};
use crate::program::{self, Program};
use crate::store::{Dump, Persisted, Store};
use crate::turns::{Caller, Turns};
use crate::{area, cut, marks, restore, serve};

/// What becomes of live TCP connections.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Connections {
    /// Those with both ends in the sandbox go on after a restore. Those to the outside are reset, since the peer has
    /// moved on: a program gets an error from its next read or write and can connect again.
    #[default]
    Keep,
    /// They are closed after a restore.
    Close,
    /// A sandbox that has one cannot be captured.
    Refuse,
}

/// What becomes of file locks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum FileLocks {
    /// They are there again after a restore. A sandbox with an exclusive one that CRIU would lose is refused while it
    /// lasts: a POSIX lock on a file that its holder also maps, as in a transaction of SQLite in WAL mode.
    #[default]
    Keep,
    /// The same, but those that CRIU loses are lost.
    KeepMost,
    /// A sandbox that holds one cannot be captured.
    Refuse,
}

/// Process checkpoints by CRIU.
///
/// ```no_run
/// # async fn open() -> crab_core::Result<()> {
/// let backend = crab_backend_criu::CriuBackend::builder().images("/var/lib/my-host/images").open().await?;
/// # Ok(())
/// # }
/// ```
///
/// Blocking work runs on the blocking threads of the tokio runtime that calls are made in; the runtime's time must be
/// enabled. A call whose future is dropped undoes there what it began, which takes a moment: captures and restores of
/// the same sandbox wait for that, and who restores into it by other means after a dropped restore must wait until its
/// cgroup is empty.
#[derive(Clone, Debug)]
pub struct CriuBackend {
    inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) program: Program,
    pub(crate) store: Arc<Store>,
    pub(crate) connections: Connections,
    pub(crate) locks: FileLocks,
    pub(crate) ghost_limit: u32,
    pub(crate) oci: Option<Oci>,
    pub(crate) turns: Arc<Turns>,
    /// Memory is copied before the freeze. Off for good once a dump of that kind has failed.
    pub(crate) incremental: AtomicBool,
    pub(crate) prepared: Arc<AllCopies>,
    serves: OnceLock<bool>,
    captures: Arc<Area>,
    /// For captures that do not fit into the other.
    spacious: Arc<Area>,
}

impl Inner {
    /// Whether CRIU can read memory images from us.
    pub(crate) fn serves(&self) -> bool {
        let possible = || self.captures.directory().is_ok_and(|scratch| serve::is_possible(&scratch.images()));
        self.oci.is_none() && *self.serves.get_or_init(possible)
    }

    /// Whether memory can be copied before the freeze.
    pub(crate) fn copies(&self) -> bool {
        self.incremental.load(Ordering::Relaxed) && self.oci.is_none()
    }

    /// Where a capture of that many bytes goes.
    pub(crate) fn area_for(&self, bytes: u64) -> &Arc<Area> {
        if self.captures.has_room(bytes) { &self.captures } else { &self.spacious }
    }
}

/// Makes a [`CriuBackend`].
#[derive(Clone, Debug, Default)]
pub struct CriuBuilder {
    images: Option<PathBuf>,
    captures: Option<PathBuf>,
    binary: Option<PathBuf>,
    connections: Connections,
    locks: FileLocks,
    compression: Option<i32>,
    ghost_limit: Option<u32>,
    runtime: Option<OciRuntime>,
    incremental: bool,
}

/// Deleted files that are still open go into the image up to this size.
const GHOST_LIMIT: u32 = 64 << 20;

/// Quicker than the disk, and most memory shrinks by half and more.
const COMPRESSION: i32 = 1;

impl CriuBuilder {
    /// The directory for durable images. It is made where it is missing; only this user may write it. Required.
    #[must_use]
    pub fn images(mut self, directory: impl Into<PathBuf>) -> Self {
        self.images = Some(directory.into());
        self
    }

    /// The directory that CRIU writes to while the sandbox is stopped. Without this call it is `/dev/shm/crab`, and
    /// `.capture` below the images where that is not in memory or has no room.
    #[must_use]
    pub fn capture_dir(mut self, directory: impl Into<PathBuf>) -> Self {
        self.captures = Some(directory.into());
        self
    }

    /// The CRIU to use. Without this call it is looked for in `PATH` and then in `criu/usr/sbin` below `$CRAB_HOME` or
    /// `/var/lib/crab`, where `cargo xtask setup` installs one; the first that works is taken.
    #[must_use]
    pub fn binary(mut self, path: impl Into<PathBuf>) -> Self {
        self.binary = Some(path.into());
        self
    }

    /// What becomes of live TCP connections.
    #[must_use]
    pub fn connections(mut self, connections: Connections) -> Self {
        self.connections = connections;
        self
    }

    /// What becomes of file locks.
    #[must_use]
    pub fn file_locks(mut self, locks: FileLocks) -> Self {
        self.locks = locks;
        self
    }

    /// A deleted file that is still open goes into the image up to this size in bytes; a larger one is refused. Without
    /// this call it is 64 MiB.
    #[must_use]
    pub fn deleted_file_limit(mut self, bytes: u32) -> Self {
        self.ghost_limit = Some(bytes);
        self
    }

    /// The sandboxes are containers of this runtime.
    #[must_use]
    pub fn oci_runtime(mut self, runtime: OciRuntime) -> Self {
        self.runtime = Some(runtime);
        self
    }

    /// The level of zstd for what is stored: 1, which is the default, to 19. Higher ones save little and take long.
    #[must_use]
    pub fn compression(mut self, level: i32) -> Self {
        self.compression = Some(level);
        self
    }

    /// Where the kernel can tell which pages were written, a capture copies the memory while the sandbox runs, and freezes
    /// it for what was written meanwhile: a long freeze becomes two short ones, for about as much work again outside of
    /// them. It needs a kernel from 6.7 on with `CONFIG_MEM_SOFT_DIRTY`, which [`open`](Self::open) tries out. Elsewhere
    /// and with an OCI runtime captures are full ones all the same, and so are those of a sandbox that the caller has
    /// frozen without [preparing](CheckpointBackend::prepare) for it. What is stored is always whole. Off without this
    /// call.
    #[must_use]
    pub fn incremental(mut self) -> Self {
        self.incremental = true;
        self
    }

    /// Opens the directories and finds a CRIU that works on this kernel: its version must be 4.2 or newer from kernel
    /// 6.16 on and 3.18 or newer before, and it must dump small processes with a listening TCP socket, a pipe and a
    /// thread. The trial is made once for each binary and kernel and noted in the capture directory.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where no CRIU works, with what is wrong with each; [`ErrorKind::InvalidInput`] where
    /// a directory is missing or others may write to it.
    pub async fn open(self) -> Result<CriuBackend> {
        blocking(move || {
            let images = self.images.ok_or_else(|| {
                Error::new(ErrorKind::InvalidInput, "the CRIU backend has no directory for images")
                    .fix("call CriuBuilder::images")
            })?;
            // Both names reach CRIU and other processes: they must not depend on where this one stands.
            let absolute = |path: PathBuf| std::path::absolute(path).map_err(|e| Error::io("find a directory", e));
            let images = absolute(images)?;
            let level = self.compression.unwrap_or(COMPRESSION);
            if !(1..=19).contains(&level) {
                return Err(Error::new(ErrorKind::InvalidInput, format!("there is no compression level {level}"))
                    .fix("take one from 1 to 19"));
            }
            let store = Store::open(&images, level)?;
            let spacious = Area::open(&images.join(".capture"))?;
            let captures = match self.captures {
                Some(directory) => Area::open(&absolute(directory)?)?,
                None if area::is_memory(std::path::Path::new("/dev/shm")) => {
                    Area::open(std::path::Path::new(area::DEFAULT)).unwrap_or_else(|error| {
                        tracing::warn!(%error, "captures go beside the images, which is slower");
                        Arc::clone(&spacious)
                    })
                }
                None => Arc::clone(&spacious),
            };
            let program = program::find(self.binary.as_deref(), &captures)?;
            let incremental = self.incremental
                && marks::is_possible().unwrap_or_else(|error| {
                    tracing::debug!(%error, "this kernel cannot tell which pages were written");
                    false
                });
            let oci = self.runtime.map(|runtime| Oci::new(runtime, &program.path, &images)).transpose()?;
            let inner = Inner {
                oci,
                program,
                store,
                connections: self.connections,
                locks: self.locks,
                ghost_limit: self.ghost_limit.unwrap_or(GHOST_LIMIT),
                turns: Arc::default(),
                incremental: AtomicBool::new(incremental),
                prepared: Arc::default(),
                serves: OnceLock::new(),
                captures,
                spacious,
            };
            Ok(CriuBackend { inner: Arc::new(inner) })
        })
        .await
    }
}

impl CriuBackend {
    /// Begins to make one.
    #[must_use]
    pub fn builder() -> CriuBuilder {
        CriuBuilder::default()
    }

    /// The CRIU that is used.
    #[must_use]
    pub fn binary(&self) -> &std::path::Path {
        &self.inner.program.path
    }

    /// Its version, such as `4.2.1`.
    #[must_use]
    pub fn version(&self) -> String {
        self.inner.program.version.to_string()
    }

    /// Whether captures copy memory before the freeze: it was [asked for](CriuBuilder::incremental), the kernel can, and
    /// no such capture has failed in a dump yet.
    #[must_use]
    pub fn is_incremental(&self) -> bool {
        self.inner.incremental.load(Ordering::Relaxed)
    }
}

/// Runs blocking work. What it returns undoes itself when it is dropped, so that a caller who has gone leaves nothing.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let joined = tokio::task::spawn_blocking(work).await;
    joined.unwrap_or_else(|e| Err(Error::new(ErrorKind::Internal, "a thread of the CRIU backend ended").caused_by(e)))
}

#[async_trait]
impl CheckpointBackend for CriuBackend {
    fn name(&self) -> &str {
        crate::NAME
    }

    fn domain(&self) -> Domain {
        Domain::Process
    }

    fn capabilities(&self) -> Capabilities {
        let capabilities = Capabilities::default().with_forks().with_incremental();
        if self.inner.copies() { capabilities.with_prepares() } else { capabilities }
    }

    async fn recover(&self) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        blocking(move || {
            // First of all nobody is to work on a sandbox any more.
            inner.captures.recover()?;
            inner.spacious.recover()?;
            inner.store.recover()
        })
        .await
    }

    async fn prepare(&self, sandbox: &Sandbox, artifact: &ArtifactId, deadline: Option<Instant>) -> Result<Prepared> {
        if !self.inner.copies() {
            return Ok(Prepared::nothing());
        }
        let caller = Caller::default();
        let _presence = caller.present();
        let (inner, sandbox, artifact) = (Arc::clone(&self.inner), sandbox.clone(), artifact.clone());
        blocking(move || {
            let copies = dump::copy(&inner, &sandbox, deadline, &caller)?;
            Ok(Prepared::new(copies.stopped, inner.prepared.keep((sandbox.id, artifact), copies)))
        })
        .await
    }

    async fn capture(&self, request: CaptureRequest<'_>) -> Result<Box<dyn Captured>> {
        let CaptureRequest { sandbox, artifact, parent, frozen, deadline, at_cut } = request;
        let caller = Caller::default();
        let _presence = caller.present();
        let like = parent.filter(|parent| self.own(parent).is_ok()).map(|p| (p.sandbox.clone(), p.id.clone()));
        let (inner, sandbox) = (Arc::clone(&self.inner), sandbox.clone());
        let job = dump::Job { inner, sandbox, artifact, like, frozen, deadline, caller };
        let (cut, reached) = cut::bridge();
        let dumping = tokio::task::spawn_blocking(move || dump::run(job, cut));
        let attended = reached.attend(at_cut, deadline).await;
        let dumped = dumping
            .await
            .unwrap_or_else(|e| Err(Error::new(ErrorKind::Internal, "the dumping thread ended").caused_by(e)));
        match (attended, dumped) {
            (Ok(()), Ok(dumped)) => Ok(Box::new(CriuCapture { inner: Arc::clone(&self.inner), dumped })),
            (Ok(()), Err(error)) => Err(error),
            // The cut's own error tells why; the dump's tells what condition the sandbox is in.
            (Err(why), Err(error)) if error.kind() == ErrorKind::Cancelled => Err(match error.sandbox_condition() {
                Some(condition) => why.condition(condition),
                None => why,
            }),
            (Err(why), Err(error)) => Err(error.caused_by(why)),
            (Err(why), Ok(_)) => Err(why),
        }
    }

    async fn verify(&self, artifact: &Artifact) -> Result<()> {
        let (inner, artifact) = (Arc::clone(&self.inner), self.own(artifact)?);
        blocking(move || inner.store.open_whole(&artifact)?.whole.check()).await
    }

    async fn fits(&self, artifact: &Artifact, _sandbox: &Sandbox) -> Result<()> {
        restore::suits(&self.own(artifact)?.facts, self.inner.program.version)
    }

    async fn restore(&self, artifact: &Artifact, target: RestoreTarget) -> Result<Restored> {
        let (inner, artifact) = (Arc::clone(&self.inner), self.own(artifact)?);
        let caller = Caller::default();
        let _presence = caller.present();
        let tree = blocking(move || restore::run(&inner, &artifact, target, &caller)).await?;
        Ok(Restored { replaced: None, init: Some(tree.hand_on()) })
    }

    async fn remove(&self, artifact: &Artifact) -> Result<()> {
        let (inner, artifact) = (Arc::clone(&self.inner), self.own(artifact)?);
        blocking(move || keep_house(|| inner.store.remove(&artifact.sandbox, &artifact.id))).await
    }

    async fn list(&self, id: &SandboxId) -> Result<Vec<Artifact>> {
        let (inner, id) = (Arc::clone(&self.inner), id.clone());
        blocking(move || inner.store.list(&id)).await
    }
}

impl CriuBackend {
    /// The artifact, where it is one of this backend.
    fn own(&self, artifact: &Artifact) -> Result<Artifact> {
        if artifact.domain == Domain::Process && artifact.backend == crate::NAME {
            return Ok(artifact.clone());
        }
        let what = format!(
            "the artifact {} is of the {} domain by {}, and not of this backend",
            artifact.id,
            artifact.domain,
            artifact.backend.escape_default()
        );
        Err(Error::new(ErrorKind::InvalidInput, what))
    }
}

/// A dump in the capture directory, which goes when this value goes.
struct CriuCapture {
    inner: Arc<Inner>,
    dumped: Dumped,
}

#[async_trait]
impl Captured for CriuCapture {
    async fn persist(self: Box<Self>) -> Result<Artifact> {
        let Self { inner, dumped } = *self;
        let persisted: Persisted = blocking(move || {
            let Dumped { name, scratch, precopy, like, external, facts, .. } = dumped;
            let images = scratch.images();
            let united = precopy.map_or_else(|| Ok(HashMap::new()), |precopy| precopy.unite(&images))?;
            keep_house(|| inner.store.persist(name, Dump { images: &images, united, like, external, facts }))
        })
        .await?;
        Ok(persisted.keep())
    }

    async fn discard(self: Box<Self>) -> Result<()> {
        blocking(move || self.dumped.scratch.remove()).await
    }

    fn stopped_for(&self) -> Option<Duration> {
        self.dumped.stopped
    }
}
