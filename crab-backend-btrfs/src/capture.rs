//! The two halves of a checkpoint: a snapshot under a name of its own, then that snapshot under the artifact's name.

use std::ffi::OsString;
use std::os::fd::AsFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use crab_backend_files::{Snapshot, artifacts, refuse_late};
use crab_core::{Artifact, ArtifactId, Error, ErrorKind, Result, Sandbox, SandboxId, keep_house};
use rustix::fs::RenameFlags;
use rustix::io::Errno;

use crate::subvolume::{self, Info, Uuid};
use crate::versions::{self, Versions, capture_name};
use crate::{failure, ioctl};

/// A snapshot in a sandbox's directory that is removed when this is dropped, which blocks for a moment. It takes no
/// lock, so that it can be dropped under one.
#[derive(Debug)]
pub(crate) struct Unfinished {
    versions: Arc<Versions>,
    sandbox: SandboxId,
    /// Its name now; `None` once there is nothing to remove.
    name: Option<OsString>,
}

/// A snapshot that is not an artifact yet. Dropping it removes it.
#[derive(Debug)]
pub(crate) struct Staged {
    snapshot: Unfinished,
    artifact: ArtifactId,
    info: Info,
    root: Option<Uuid>,
}

/// Takes a snapshot of the sandbox's root. Everything that can be refused is refused before anything is changed.
/// Blocks.
pub(crate) fn take(
    versions: &Arc<Versions>,
    sandbox: &Sandbox,
    artifact: ArtifactId,
    deadline: Option<Instant>,
) -> Result<Staged> {
    let root = subvolume::open(&sandbox.root)?;
    versions.require_same_filesystem(&root, &sandbox.root)?;
    versions.require_outside(&sandbox.root)?;
    refuse_nested(&root, &sandbox.root)?;
    let root_uuid = subvolume::info_of(&root, &sandbox.root)?.uuid;

    let _locked = versions.lock(&sandbox.id);
    versions.require_free(&sandbox.id, &artifact)?;
    refuse_late(deadline, "the snapshot was begun")?;
    let directory = versions.make(&sandbox.id)?;
    let take = || {
        let name = capture_name(&artifact);
        ioctl::create_snapshot(&directory, &name, &root, true)
            .map_err(failure::at("take a snapshot of", &sandbox.root))?;
        let path = versions.directory(&sandbox.id).join(&name);
        let snapshot = Unfinished::new(versions, &sandbox.id, name);
        let info = subvolume::info(&path)?;
        // One that was made while the snapshot was taken would be an empty directory in it.
        refuse_nested(&root, &sandbox.root)?;
        refuse_late(deadline, "the snapshot was taken")?;
        Ok((snapshot, info))
    };
    let (snapshot, info) = take().inspect_err(|_| versions.tidy(&sandbox.id))?;
    tracing::debug!(sandbox = %sandbox.id, %artifact, subvolume = info.id, "took a snapshot");
    Ok(Staged::new(snapshot, artifact, info, root_uuid))
}

/// Refuses a root with subvolumes inside it: a snapshot would hold an empty directory in place of each.
pub(crate) fn refuse_nested(root: impl AsFd, path: &Path) -> Result<()> {
    const SHOWN: usize = 3;
    let nested = subvolume::nested_in(root, path, SHOWN + 1)?;
    if nested.is_empty() {
        return Ok(());
    }
    let mut names: Vec<String> = nested.iter().take(SHOWN).map(|name| name.display().to_string()).collect();
    if nested.len() > SHOWN {
        names.push("others".to_owned());
    }
    let message = format!("the root {} holds subvolumes of its own: {}", path.display(), names.join(", "));
    Err(Error::new(ErrorKind::NotCheckpointable, message)
        .fix("replace them by directories, or move them out of the root and mount them into the sandbox"))
}

impl Staged {
    pub(crate) fn new(snapshot: Unfinished, artifact: ArtifactId, info: Info, root: Option<Uuid>) -> Self {
        Self { snapshot, artifact, info, root }
    }
}

impl Snapshot for Staged {
    /// Gives the snapshot the artifact's name, for good.
    fn persist(self) -> Result<Artifact> {
        let Self { mut snapshot, artifact, info, root } = self;
        let (versions, sandbox) = (Arc::clone(&snapshot.versions), snapshot.sandbox.clone());
        let path = versions.directory(&sandbox);
        let directory = subvolume::open_directory(&path).map_err(failure::at("open", &path))?;
        let locked = versions.lock(&sandbox);
        // Within one directory, since a read-only subvolume cannot be moved to another.
        let (from, to) = (capture_name(&artifact), artifact.as_str());
        match keep_house(|| rustix::fs::renameat_with(&directory, &from, &directory, to, RenameFlags::NOREPLACE)) {
            Ok(()) => snapshot.name = Some(to.into()),
            Err(Errno::EXIST) => {
                return Err(artifacts::taken(&sandbox, &artifact));
            }
            Err(errno) => return Err(failure::at("put an artifact in place in", &path)(errno)),
        }
        // Let go before the wait, so that several captures of one sandbox can share a commit.
        drop(locked);
        versions::commit(&directory, &path)?;
        snapshot.name = None;
        tracing::debug!(%sandbox, %artifact, "made a snapshot durable");
        Ok(versions.describe(&sandbox, &artifact, &info, root))
    }

    fn discard(mut self) -> Result<()> {
        self.snapshot.remove()?;
        let _locked = self.snapshot.versions.lock(&self.snapshot.sandbox);
        self.snapshot.versions.tidy(&self.snapshot.sandbox);
        Ok(())
    }
}

impl Unfinished {
    pub(crate) fn new(versions: &Arc<Versions>, sandbox: &SandboxId, name: OsString) -> Self {
        Self { versions: Arc::clone(versions), sandbox: sandbox.clone(), name: Some(name) }
    }

    fn remove(&mut self) -> Result<()> {
        let Some(name) = self.name.take() else { return Ok(()) };
        let Some(directory) = self.versions.open_sandbox(&self.sandbox)? else { return Ok(()) };
        match ioctl::destroy_subvolume(&directory, &name) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(errno) => {
                let path = self.versions.directory(&self.sandbox).join(&name);
                Err(failure::at("remove the snapshot", &path)(errno))
            }
        }
    }
}

impl Drop for Unfinished {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            tracing::warn!(sandbox = %self.sandbox, %error, "a snapshot was left behind");
        }
    }
}
