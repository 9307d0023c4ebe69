//! The backend.

use std::ffi::OsStr;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use crab_backend_files::{Keep, Steps, Straight, artifacts, blocking};
use crab_core::{
    Artifact, ArtifactId, ByteStream, Capabilities, CaptureRequest, Captured, CheckpointBackend, Domain, Error,
    ErrorKind, ExportRequest, FileChanges, ImportRequest, RestoreTarget, Restored, Result, Sandbox, SandboxId, Space,
};
use rustix::io::Errno;
use tokio::sync::mpsc;

use crate::diff::Kinship;
use crate::export::Export;
use crate::import::Part;
use crate::restore::{Restorer, Step};
use crate::subvolume::Info;
use crate::versions::{self, NAME, Versions};
use crate::{capture, diff, export, failure, import, ioctl, space, subvolume};

/// Saves a sandbox's files as a read-only snapshot of the btrfs subvolume that its root is.
///
/// A capture costs one snapshot, whatever the size of the root, and includes what was written and not synced. The
/// kernel makes a snapshot durable as it makes it; what [`persist`](Captured::persist) adds is the artifact's name.
/// Snapshots share their unchanged blocks, so an artifact depends on no other.
///
/// What btrfs pays for that grows a little with the root, as far as a node of its tree has neighbours. A snapshot gets a
/// copy of the tree's topmost node, and with it the kernel counts one more reference to each node below that, of up to
/// 500; they lie scattered over its tree of extents, whose blocks it copies and writes where it counts. The first change of
/// a node after a snapshot does the same for that node, and the next commit, which is the next capture's, pays. Nothing of
/// that is asked for by the call, which is the one ioctl: the `btrfs` program pays as much. Where roots hold hundreds of
/// thousands of files and captures should be quick, make the file system with small nodes (`mkfs.btrfs -n 4096`). What the
/// bench `filesystem` measured and counted on a busy machine, all sizes in turn, after turns of 64 KiB; at rest these are on
/// the disk already, and only the snapshot's own work is left:
///
/// | nodes | files | capture | by `btrfs` | at rest | references | copied blocks |
/// |---|---|---|---|---|---|---|
/// | 16 KiB | 1,000 | 17 ms | 26 ms | 14 ms | 96 | 32 |
/// | 16 KiB | 10,000 | 23 ms | 33 ms | 19 ms | 375 | 37 |
/// | 16 KiB | 100,000 | 26 ms | 38 ms | 16 ms | 72 | 32 |
/// | 16 KiB | 1,000,000 | 41 ms | 46 ms | 28 ms | 238 | 87 |
/// | 4 KiB | 1,000 | 15 ms | 18 ms | 10 ms | 136 | 66 |
/// | 4 KiB | 1,000,000 | 28 ms | 39 ms | 11 ms | 194 | 90 |
///
/// A restore clones the snapshot beside the root and swaps the two, so a sandbox has its old files or its new ones and
/// never a mixture, also after a power cut. The root's uuid and subvolume number are new afterwards.
///
/// What it needs: the root a subvolume, without other subvolumes inside it; root and versions on one btrfs; the
/// privilege to remove subvolumes. What lacks is refused with an error that says so, before anything is changed.
///
/// One process at a time may use a versions directory; the engine's lock on its store sees to that. All calls must be
/// made from within a tokio runtime and never block its threads for long: the disk is waited for on threads that may
/// block. Cheap to clone; clones share their locks.
///
/// Dropping the future of a call does not stop a step that the kernel has begun: a capture that was dropped removes its
/// snapshot when it is done, and a restore that was dropped runs to its end.
#[derive(Clone)]
pub struct BtrfsBackend {
    versions: Arc<Versions>,
    restorer: Restorer,
}

impl std::fmt::Debug for BtrfsBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("BtrfsBackend").field("versions", &self.versions.base()).finish_non_exhaustive()
    }
}

impl BtrfsBackend {
    /// Opens the directory in which the snapshots stand, as `versions_dir/SANDBOX/ARTIFACT`; makes it where it is
    /// missing. Its parent must exist. It is kept at mode 0700, and belongs to this backend alone: everything in it that
    /// no version needs may be removed.
    ///
    /// Blocks for a few calls to the filesystem.
    ///
    /// # Errors
    /// [`InvalidInput`](crab_core::ErrorKind::InvalidInput) where it is not on btrfs or holds other things,
    /// [`NotFound`](crab_core::ErrorKind::NotFound) where its parent is missing,
    /// [`Unsupported`](crab_core::ErrorKind::Unsupported) where this process may not remove subvolumes (it takes
    /// CAP_SYS_ADMIN in the first user namespace) or another release wrote the directory.
    pub fn open(versions_dir: impl AsRef<Path>) -> Result<Self> {
        Self::with_steps(versions_dir.as_ref(), Arc::new(Straight))
    }

    pub(crate) fn with_steps(versions_dir: &Path, steps: Arc<dyn Steps<Step>>) -> Result<Self> {
        let versions = Arc::new(Versions::open(versions_dir)?);
        Ok(Self { restorer: Restorer::new(Arc::clone(&versions), steps), versions })
    }

    /// The directory in which the snapshots stand, free of symbolic links.
    #[must_use]
    pub fn versions_dir(&self) -> &Path {
        self.versions.base()
    }
}

#[async_trait]
impl CheckpointBackend for BtrfsBackend {
    fn name(&self) -> &str {
        NAME
    }

    fn domain(&self) -> Domain {
        Domain::Filesystem
    }

    fn capabilities(&self) -> Capabilities {
        Capabilities::default().with_keeps_replaced().with_forks().with_diffs().with_accounts().with_exports()
    }

    async fn recover(&self) -> Result<()> {
        let this = self.clone();
        blocking::run(move || recover(&this.versions, &this.restorer)).await
    }

    /// As the contract says. The deadline is looked at before and after the snapshot, which the kernel cannot be made
    /// to give up.
    async fn capture(&self, request: CaptureRequest<'_>) -> Result<Box<dyn Captured>> {
        let CaptureRequest { sandbox, artifact, deadline, at_cut, .. } = request;
        let (versions, sandbox) = (Arc::clone(&self.versions), sandbox.clone());
        let staged = blocking::run(move || capture::take(&versions, &sandbox, artifact, deadline)).await?;
        crab_backend_files::at_cut(staged, at_cut).await
    }

    async fn verify(&self, artifact: &Artifact) -> Result<()> {
        let (versions, artifact) = (Arc::clone(&self.versions), artifact.clone());
        blocking::run(move || versions.open_whole(&artifact).map(drop)).await
    }

    async fn fits(&self, _artifact: &Artifact, sandbox: &Sandbox) -> Result<()> {
        let (restorer, root) = (self.restorer.clone(), sandbox.root.clone());
        blocking::run(move || restorer.fits(&root)).await
    }

    /// As the contract says. Also refused as [`Busy`](crab_core::ErrorKind::Busy) while the root, or something in it, is
    /// a mount that this process sees.
    async fn restore(&self, artifact: &Artifact, target: RestoreTarget) -> Result<Restored> {
        let (restorer, artifact) = (self.restorer.clone(), artifact.clone());
        blocking::run(move || restorer.restore(&artifact, &target)).await
    }

    /// As the contract says. The space is freed in the background. A power cut within the next seconds can bring the
    /// artifact back; it is then listed again and can be removed again.
    async fn remove(&self, artifact: &Artifact) -> Result<()> {
        let (this, artifact) = (self.clone(), artifact.clone());
        blocking::run(move || remove(&this.versions, &this.restorer, &artifact)).await
    }

    async fn list(&self, id: &SandboxId) -> Result<Vec<Artifact>> {
        let (versions, id) = (Arc::clone(&self.versions), id.clone());
        blocking::run(move || list(&versions, &id)).await
    }

    fn tree(&self, artifact: &Artifact) -> Option<PathBuf> {
        self.versions.require_ours(artifact).ok()?;
        Some(self.versions.path(&artifact.sandbox, &artifact.id))
    }

    /// As the contract says. For artifacts of two sandboxes, or imported ones, it costs a walk over both trees, else
    /// what was changed; the names of that are held in memory while it runs. A removal of one of the two is
    /// refused as [`Busy`](crab_core::ErrorKind::Busy) while the kernel compares them.
    async fn diff(&self, from: &Artifact, to: &Artifact) -> Result<Box<dyn FileChanges>> {
        let (versions, from, to) = (Arc::clone(&self.versions), from.clone(), to.clone());
        blocking::run(move || {
            let ((one, from_info), (other, to_info)) = (side(&versions, &from)?, side(&versions, &to)?);
            // What was imported did not come to be here, one state after the other.
            let imported = from_info.received_uuid.or(to_info.received_uuid).is_some();
            let states = from.sandbox == to.sandbox && !imported;
            Ok(diff::start(one, other, if states { Kinship::States } else { Kinship::Unknown }))
        })
        .await
    }

    /// As the contract says. With full quota groups it costs next to nothing and counts the tree's own blocks too;
    /// without them it looks at every file, and what a version shares within itself counts as shared.
    async fn space(&self, artifact: &Artifact) -> Result<Space> {
        let (versions, artifact) = (Arc::clone(&self.versions), artifact.clone());
        blocking::run(move || {
            let (root, info) = versions.open_whole(&artifact)?;
            space::of(&root, info.id, &versions.path(&artifact.sandbox, &artifact.id))
        })
        .await
    }

    /// As the contract says. The stream is that of `btrfs send`, of which `btrfs receive -e` takes all but the last 20
    /// bytes. Compressed data is sent as what comes out of it. The flags of files (`chattr`), such as that for no copies on
    /// write, are not sent. A removal of what is exported is refused as [`Busy`](crab_core::ErrorKind::Busy) meanwhile.
    async fn export(&self, request: ExportRequest<'_>) -> Result<Box<dyn ByteStream>> {
        if request.resume.is_some() {
            return Err(Error::new(ErrorKind::Unsupported, "btrfs cannot continue an import").fix("export it anew"));
        }
        let (versions, artifact, base) = (Arc::clone(&self.versions), request.artifact.clone(), request.base.cloned());
        blocking::run(move || {
            let (root, _) = versions.open_whole(&artifact)?;
            let base = base.map_or(Ok(0), |base| versions.open_whole(&base).map(|(_, info)| info.id))?;
            export::start(Export { root, path: versions.path(&artifact.sandbox, &artifact.id), base })
        })
        .await
    }

    /// As the contract says. A dropped import that had all of its stream may end as an artifact.
    async fn import(&self, request: ImportRequest<'_>) -> Result<Artifact> {
        let ImportRequest { sandbox, artifact, base, stream } = request;
        let (sender, receiver) = mpsc::channel(4);
        let (versions, sandbox, base) = (Arc::clone(&self.versions), sandbox.clone(), base.cloned());
        let waiting = Arc::new(());
        let wanted = Arc::downgrade(&waiting);
        let work =
            blocking::start(move || import::run(&versions, &sandbox, artifact, base.as_ref(), receiver, wanted))?;
        let fed = async {
            while let Some(piece) = stream.next().await? {
                if sender.send(Part::Piece(piece)).await.is_err() {
                    // The work has ended, and says why.
                    return Ok(());
                }
            }
            let _ = sender.send(Part::End).await;
            Ok(())
        }
        .await;
        drop(sender);
        let imported = work.await;
        drop(waiting);
        fed.and(imported)
    }
}

fn side(versions: &Versions, artifact: &Artifact) -> Result<(diff::Side, Info)> {
    let (root, info) = versions.open_whole(artifact)?;
    let path = versions.path(&artifact.sandbox, &artifact.id);
    Ok((diff::Side { root, id: info.id, path }, info))
}

fn list(versions: &Versions, id: &SandboxId) -> Result<Vec<Artifact>> {
    let mut found = Vec::new();
    for name in versions.names(id)? {
        // Everything that is not an artifact has a name that is no artifact id.
        let Some(artifact) = name.to_str().and_then(|name| ArtifactId::new(name).ok()) else { continue };
        match subvolume::exists(&versions.path(id, &artifact)) {
            Ok(true) => found.push(artifacts::bare(NAME, id, &artifact)),
            Ok(false) => {
                tracing::warn!(sandbox = %id, name = %artifact, "something that is no snapshot among the versions")
            }
            Err(error) => return Err(error),
        }
    }
    Ok(found)
}

fn remove(versions: &Versions, restorer: &Restorer, artifact: &Artifact) -> Result<()> {
    versions.require_ours(artifact)?;
    let _locked = versions.lock(&artifact.sandbox);
    let Some(directory) = versions.open_sandbox(&artifact.sandbox)? else { return Ok(()) };
    if let Some((fd, info)) = versions.look(artifact)? {
        versions::require_identity(artifact, &info)?;
        drop(fd);
        destroy(versions, &artifact.sandbox, &directory, OsStr::new(artifact.id.as_str()))?;
        tracing::debug!(sandbox = %artifact.sandbox, artifact = %artifact.id, "removed a snapshot");
    }
    // With the last artifact goes the rest of the directory.
    let names = versions.names(&artifact.sandbox)?;
    if names.iter().all(|name| *name == versions.journal(&artifact.sandbox).file_name().unwrap_or_default()) {
        if let Err(error) = restorer.forget_finished(&artifact.sandbox) {
            tracing::debug!(sandbox = %artifact.sandbox, %error, "a journal stays");
        }
        versions.tidy(&artifact.sandbox);
    }
    Ok(())
}

fn destroy(versions: &Versions, sandbox: &SandboxId, directory: impl std::os::fd::AsFd, name: &OsStr) -> Result<()> {
    match ioctl::destroy_subvolume(directory, name) {
        Ok(()) | Err(Errno::NOENT) => Ok(()),
        // The privilege was there when the directory was opened; this is said of what the kernel is sending, too.
        Err(Errno::PERM) => {
            let path = versions.directory(sandbox).join(name);
            Err(Error::new(ErrorKind::Busy, format!("{} is being compared or exported", path.display())))
        }
        Err(errno) => Err(failure::at("remove the subvolume", &versions.directory(sandbox).join(name))(errno)),
    }
}

/// Cleans up every sandbox, as far as it goes, and gives the first error.
fn recover(versions: &Versions, restorer: &Restorer) -> Result<()> {
    let mut first = None;
    for sandbox in versions.sandboxes()? {
        if let Err(error) = recover_sandbox(versions, restorer, &sandbox) {
            tracing::warn!(%sandbox, %error, "what was left behind could not be cleaned up");
            first.get_or_insert(error.while_doing(format_args!("recover the files of {sandbox}")));
        }
    }
    first.map_or(Ok(()), Err)
}

fn recover_sandbox(versions: &Versions, restorer: &Restorer, sandbox: &SandboxId) -> Result<()> {
    let _locked = versions.lock(sandbox);
    let Some(directory) = versions.open_sandbox(sandbox)? else { return Ok(()) };
    for name in versions.names(sandbox)? {
        if versions::is_unfinished(&name) {
            destroy(versions, sandbox, &directory, &name)?;
            tracing::debug!(%sandbox, name = %name.display(), "removed what never became an artifact");
        }
    }
    let journal = versions.journal(sandbox);
    remove_file(&versions::temporary(&journal))?;
    match restorer.settle(sandbox)? {
        // One that kept something is remembered, so that a second attempt of it knows what it kept.
        Some(record) if record.keep == Keep::No => restorer.forget_finished(sandbox)?,
        _ => {}
    }
    versions.tidy(sandbox);
    Ok(())
}

fn remove_file(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Error::io(format_args!("remove {}", path.display()), error))
        }
        _ => Ok(()),
    }
}
