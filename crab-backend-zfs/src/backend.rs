//! The backend.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use crab_backend_files::{Steps, Straight, blocking};
use crab_core::{
    Artifact, ArtifactId, ByteStream, Capabilities, CaptureRequest, Captured, CheckpointBackend, Domain, Error,
    ErrorKind, ExportRequest, FileChanges, ImportRequest, RestoreTarget, Restored, Result, ResumeToken, SandboxId,
    Space,
};

use crate::capture::{self, nested};
use crate::mounts::{self, Mounts};
use crate::place::Place;
use crate::pool::Finish;
use crate::restore::{Restorer, Step, branch};
use crate::versions::{self, NAME, Versions};
use crate::{busy, diff, failure, transfer};

/// Saves a sandbox's files as a snapshot of the ZFS dataset that its root is.
///
/// A capture costs one snapshot, whatever the size of the root, and includes what was written and not synced. It is on
/// the disk when it is taken; what [`persist`](Captured::persist) adds is the hold by which it is an artifact, and
/// which keeps it from being destroyed by mistake. Captures of several sandboxes that come at once go into the pool
/// together.
///
/// A restore clones the snapshot, mounts the clone in the place of the root and gives it the root's name, so a sandbox
/// has its old files or its new ones and never a mixture, also after a power cut. Quotas and the like that were set on
/// the root itself are set on the clone too. Later versions stay. A version that a sandbox was cloned from can be
/// removed like any other; its space is freed when the last clone is gone.
///
/// What it needs: the root a mounted dataset without others inside it; roots and versions in one pool, and below one
/// encryption root where they are encrypted; root's privileges. What lacks is refused with an error that says so,
/// before anything is changed. A restore on a full pool is given room that was set aside when the backend was opened
/// (4 MiB), where nobody else takes it first.
///
/// One process at a time may use a base dataset; the engine's lock on its store sees to that. All calls must be made
/// from within a tokio runtime and never block its threads for long: the pool is waited for on threads that may block.
/// Cheap to clone; clones share their locks.
///
/// Dropping the future of a call does not stop a step that the pool has begun: a capture that was dropped removes its
/// snapshot when it is done, and a restore that was dropped runs to its end.
#[derive(Clone)]
pub struct ZfsBackend {
    versions: Arc<Versions>,
    restorer: Restorer,
}

impl std::fmt::Debug for ZfsBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ZfsBackend").field("base", &self.versions.base()).finish_non_exhaustive()
    }
}

impl ZfsBackend {
    /// Opens the dataset under which this backend keeps what belongs to no sandbox's root, such as `tank/crab`; makes it
    /// where it is missing. Its parent must exist. It is mounted nowhere and belongs to this backend alone.
    ///
    /// Blocks for a few calls to the pool.
    ///
    /// # Errors
    /// [`Unsupported`](crab_core::ErrorKind::Unsupported) where this machine has no usable ZFS, or another release wrote
    /// the dataset; [`InvalidInput`](crab_core::ErrorKind::InvalidInput) where it is somebody else's or a pool itself;
    /// [`NotFound`](crab_core::ErrorKind::NotFound) where its parent is missing.
    pub fn open(base: impl AsRef<str>) -> Result<Self> {
        Self::with_steps(base.as_ref(), Arc::new(Straight))
    }

    pub(crate) fn with_steps(base: &str, steps: Arc<dyn Steps<Step>>) -> Result<Self> {
        let versions = Arc::new(Versions::open(base)?);
        Ok(Self { restorer: Restorer::new(Arc::clone(&versions), steps), versions })
    }

    /// The dataset that it was opened with.
    #[must_use]
    pub fn base(&self) -> &str {
        self.versions.base()
    }

    /// Deletes a stopped sandbox's root, for hosts: its versions and its forks stay, whatever depends on what. `zfs
    /// destroy` would take the versions along, or refuse. A root that is not there is no error.
    ///
    /// # Errors
    /// [`Busy`](crab_core::ErrorKind::Busy) where it is in use,
    /// [`NotCheckpointable`](crab_core::ErrorKind::NotCheckpointable) where it holds other datasets. It is then as it
    /// was.
    pub async fn delete_root(&self, sandbox: &SandboxId, root: impl AsRef<Path>) -> Result<()> {
        let (this, sandbox, root) = (self.clone(), sandbox.clone(), root.as_ref().to_owned());
        blocking::run(move || {
            this.versions.reserve.behind(|| delete_root(&this.versions, &this.restorer, &sandbox, &root))
        })
        .await
    }
}

#[async_trait]
impl CheckpointBackend for ZfsBackend {
    fn name(&self) -> &str {
        NAME
    }

    fn domain(&self) -> Domain {
        Domain::Filesystem
    }

    fn capabilities(&self) -> Capabilities {
        let capabilities = Capabilities::default().with_keeps_replaced().with_forks().with_diffs().with_accounts();
        capabilities.with_exports().with_resumes()
    }

    async fn recover(&self) -> Result<()> {
        let this = self.clone();
        blocking::run(move || recover(&this.versions, &this.restorer)).await
    }

    /// As the contract says. The deadline is looked at before and after the snapshot, which ZFS cannot be made to give
    /// up.
    async fn capture(&self, request: CaptureRequest<'_>) -> Result<Box<dyn Captured>> {
        let CaptureRequest { sandbox, artifact, deadline, at_cut, .. } = request;
        let (versions, sandbox) = (Arc::clone(&self.versions), sandbox.clone());
        let staged = blocking::run(move || capture::take(&versions, &sandbox, artifact, deadline)).await?;
        crab_backend_files::at_cut(staged, at_cut).await
    }

    async fn verify(&self, artifact: &Artifact) -> Result<()> {
        let (versions, artifact) = (Arc::clone(&self.versions), artifact.clone());
        blocking::run(move || versions.find_whole(&artifact).map(drop)).await
    }

    /// As the contract says. Also refused as [`Busy`](crab_core::ErrorKind::Busy) while the root is mounted elsewhere
    /// too, while something is mounted in it, or while a process uses it; the error names it.
    async fn restore(&self, artifact: &Artifact, target: RestoreTarget) -> Result<Restored> {
        let (restorer, artifact) = (self.restorer.clone(), artifact.clone());
        blocking::run(move || restorer.restore(&artifact, &target)).await
    }

    /// As the contract says. The space is freed in the background, and where a sandbox was cloned from the artifact,
    /// with the last such clone.
    async fn remove(&self, artifact: &Artifact) -> Result<()> {
        let (versions, artifact) = (Arc::clone(&self.versions), artifact.clone());
        blocking::run(move || remove(&versions, &artifact)).await
    }

    async fn list(&self, id: &SandboxId) -> Result<Vec<Artifact>> {
        let (versions, id) = (Arc::clone(&self.versions), id.clone());
        blocking::run(move || {
            let found = versions.pool().find_all(&id)?;
            Ok(found.iter().filter(|found| found.held).map(|found| versions.describe(found)).collect())
        })
        .await
    }

    /// The artifact's files in `.zfs/snapshot` of the root that they were captured from. `None` where that is not
    /// mounted, as for versions that are later than the one that the sandbox was restored to last.
    fn tree(&self, artifact: &Artifact) -> Option<PathBuf> {
        let found = self.versions.find_whole(artifact).ok()?;
        let root = Mounts::read().ok()?.of(found.dataset())?.point.clone();
        Some(root.join(".zfs/snapshot").join(found.name.split_once('@')?.1))
    }

    /// As the contract says. Costs a look at every name in both artifacts, and reads what may have changed.
    async fn diff(&self, from: &Artifact, to: &Artifact) -> Result<Box<dyn FileChanges>> {
        diff::diff(&self.versions, from, to).await
    }

    /// As the contract says. A base must be an earlier state of the same line: what was captured after a restore to an
    /// older version is not a later state of what came before the restore. Encrypted roots are sent encrypted.
    async fn export(&self, request: ExportRequest<'_>) -> Result<Box<dyn ByteStream>> {
        transfer::export(&self.versions, request).await
    }

    /// As the contract says. What came through before a stream broke off is kept for a week at least; then a recovery
    /// removes it.
    async fn import(&self, request: ImportRequest<'_>) -> Result<Artifact> {
        transfer::import(&self.versions, request).await
    }

    async fn resume_token(&self, sandbox: &SandboxId, artifact: &ArtifactId) -> Result<Option<ResumeToken>> {
        let (versions, sandbox, artifact) = (Arc::clone(&self.versions), sandbox.clone(), artifact.clone());
        blocking::run(move || transfer::resume_token(&versions, &sandbox, &artifact)).await
    }

    async fn space(&self, artifact: &Artifact) -> Result<Space> {
        let (versions, artifact) = (Arc::clone(&self.versions), artifact.clone());
        blocking::run(move || {
            let found = versions.find_whole(&artifact)?;
            Ok(Space { referenced: found.referenced, exclusive: found.used })
        })
        .await
    }
}

fn remove(versions: &Versions, artifact: &Artifact) -> Result<()> {
    let _locked = versions.lock([&artifact.sandbox]);
    if let Some(found) = versions.look(artifact)?.filter(|found| !versions.is_pending(&found.name)) {
        versions::require_identity(artifact, &found)?;
        versions.destroy_snapshot(&found.name)?;
        tracing::debug!(sandbox = %artifact.sandbox, artifact = %artifact.id, "removed a version");
        // The last version on what was a root once takes that along.
        let home = versions.home(&artifact.sandbox);
        if found.dataset().starts_with(&home) {
            versions.pool().finish(&Finish { home: &home, ..Finish::default() })?;
        }
        versions.reserve.restock();
    } else {
        transfer::give_up(versions, &artifact.sandbox, &artifact.id)?;
    }
    Ok(())
}

/// Cleans up every sandbox, as far as it goes, and gives the first error.
fn recover(versions: &Versions, restorer: &Restorer) -> Result<()> {
    let mut first = None;
    let mut note = |what: &str, error: Error| {
        tracing::warn!(%what, %error, "what was left behind could not be cleaned up");
        first.get_or_insert(error.while_doing(format_args!("recover {what}")));
    };
    // First the restores, by which kept states become versions.
    let homes = versions.homes()?;
    for sandbox in &homes {
        let _locked = versions.lock([sandbox]);
        if let Err(error) = restorer.settle(sandbox) {
            note(&format!("the files of {sandbox}"), error);
        }
    }
    for found in versions.pool().find_everything()? {
        // One that was removed, but whose hold was not released.
        let unfinished = if found.removed { found.held } else { !found.held };
        if unfinished && !versions.is_pending(&found.name) {
            let _locked = versions.lock([&found.sandbox]);
            match versions.destroy_snapshot(&found.name) {
                Ok(()) => tracing::debug!(snapshot = found.name, "removed what was never persisted or half removed"),
                Err(error) => note(&found.name, error),
            }
        }
    }
    for sandbox in &homes {
        let _locked = versions.lock([sandbox]);
        if let Err(error) = transfer::recover(versions, sandbox, transfer::KEPT) {
            note(&format!("the imports of {sandbox}"), error);
        }
        if let Err(error) = versions.pool().finish(&Finish { home: &versions.home(sandbox), ..Finish::default() }) {
            note(&format!("the branches of {sandbox}"), error);
        }
    }
    first.map_or(Ok(()), Err)
}

fn delete_root(versions: &Versions, restorer: &Restorer, sandbox: &SandboxId, root: &Path) -> Result<()> {
    let _locked = versions.lock([sandbox]);
    restorer.settle(sandbox)?;
    let place = Place::of(root)?;
    versions.require_outside(&place.dataset)?;
    let pool = versions.pool();
    let Some(about) = pool.look_at(&place.dataset)? else { return Ok(()) };
    if let Some(child) = about.children.first() {
        return Err(nested(&place, child));
    }
    let ours = pool.find_below(&place.dataset)?;
    if let Some(foreign) = about.snapshots.iter().find(|name| !ours.iter().any(|found| found.name == **name)) {
        let message = format!("the root {} has a snapshot that is not Crab's: {foreign}", place.path.display());
        return Err(Error::new(ErrorKind::Busy, message).fix("destroy it first"));
    }
    busy::refuse_use(&place.path)?;
    let failed = |what: &'static str| {
        let dataset = place.dataset.clone();
        move |failed| failure::zfs(format_args!("{what} the dataset {dataset}"), failed)
    };
    let home = versions.home(sandbox);
    if !about.snapshots.is_empty() {
        versions.make_home(sandbox)?;
    }
    if place.mounted {
        mounts::unmount(&place.path)?;
    }
    if about.snapshots.is_empty() {
        pool.calls().destroy(&place.dataset).map_err(failed("destroy"))?;
    } else {
        pool.calls().rename(&place.dataset, &branch(&home, about.guid)).map_err(failed("move away"))?;
    }
    let _ = std::fs::remove_dir(&place.path);
    pool.finish(&Finish { home: &home, discard: Some(&branch(&home, about.guid)), forget: true, live: None })?;
    // Where it was cloned from a version of a sandbox whose root is gone, that may go now too.
    let origin = about.origin.as_deref().map(crate::pool::dataset_of).and_then(|dataset| dataset.rsplit_once('/'));
    if let Some((home, _)) = origin.filter(|(home, _)| home.starts_with(versions.base())) {
        pool.finish(&Finish { home, ..Finish::default() })?;
    }
    Ok(())
}
