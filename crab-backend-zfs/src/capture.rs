//! The two halves of a checkpoint: a snapshot, then the hold by which it becomes an artifact.

use std::sync::Arc;
use std::time::Instant;

use crab_backend_files::{Snapshot, artifacts, refuse_late};
use crab_core::{Artifact, ArtifactId, Error, ErrorKind, Result, Sandbox, SandboxId};
use rustix::fs::{Mode, OFlags};

use crate::failure;
use crate::place::Place;
use crate::pool::NotTaken;
use crate::sys::Failed;
use crate::versions::Versions;

/// A snapshot that is not an artifact yet. Dropping it removes it, which blocks.
#[derive(Debug)]
pub(crate) struct Staged {
    versions: Arc<Versions>,
    sandbox: SandboxId,
    artifact: ArtifactId,
    /// The snapshot's whole name when it was taken; `None` once there is nothing to remove.
    snapshot: Option<String>,
}

/// Takes a snapshot of the sandbox's root. Blocks.
pub(crate) fn take(
    versions: &Arc<Versions>,
    sandbox: &Sandbox,
    artifact: ArtifactId,
    deadline: Option<Instant>,
) -> Result<Staged> {
    let place = Place::of(&sandbox.root)?;
    versions.require_outside(&place.dataset)?;
    let wanted = versions.wanted(&place.dataset, &sandbox.id, &artifact)?;
    let _locked = versions.lock([&sandbox.id]);
    refuse_late(deadline, "the snapshot was begun")?;
    if place.mounted {
        write_out(&place)?;
    }
    let snapshot = wanted.snapshot.clone();
    versions.add_pending(&snapshot);
    let outcome = versions.batch.capture(wanted, |all| versions.pool().capture(all));
    let refused = match outcome {
        Ok(None) => None,
        Ok(Some(why)) => Some(refusal(why, &place, &sandbox.id, &artifact)),
        Err(error) => Some(error),
    };
    if let Some(error) = refused {
        versions.remove_pending(&snapshot);
        return Err(error);
    }
    let staged =
        Staged { versions: Arc::clone(versions), sandbox: sandbox.id.clone(), artifact, snapshot: Some(snapshot) };
    refuse_late(deadline, "the snapshot was taken")?;
    tracing::debug!(sandbox = %sandbox.id, artifact = %staged.artifact, dataset = place.dataset, "took a snapshot");
    Ok(staged)
}

/// Makes ZFS know what was written through memory mappings: a snapshot holds what went through `write`, but not pages
/// that are dirty in the page cache alone.
pub(crate) fn write_out(place: &Place) -> Result<()> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(&place.path, flags, Mode::empty())
        .and_then(rustix::fs::syncfs)
        .map_err(|errno| failure::system(format_args!("write out {}", place.path.display()), errno))
}

fn refusal(why: NotTaken, place: &Place, sandbox: &SandboxId, artifact: &ArtifactId) -> Error {
    match why {
        NotTaken::Child(child) => nested(place, &child),
        NotTaken::Errno(17) => artifacts::taken(sandbox, artifact),
        NotTaken::Errno(errno) => {
            failure::zfs(format_args!("take a snapshot of {}", place.dataset), Failed { errno, said: None })
        }
    }
}

/// The refusal of a root with a dataset inside it, which a snapshot would not hold.
pub(crate) fn nested(place: &Place, child: &str) -> Error {
    let message = format!("the root {} holds a dataset of its own: {child}", place.path.display());
    Error::new(ErrorKind::NotCheckpointable, message)
        .fix("replace it by a directory, or move it out of the root and mount it into the sandbox")
}

impl Snapshot for Staged {
    /// Makes it an artifact, for good.
    fn persist(mut self) -> Result<Artifact> {
        let versions = Arc::clone(&self.versions);
        let Some(snapshot) = &self.snapshot else {
            return Err(Error::new(ErrorKind::Internal, "a capture was persisted twice"));
        };
        // It may have moved to another dataset since.
        let found = versions.pool().find_one(&self.sandbox, &self.artifact, Some(crate::pool::dataset_of(snapshot)))?;
        let Some(mut found) = found.filter(|found| !found.removed) else {
            let message = format!("the snapshot of artifact {} is gone", self.artifact);
            return Err(Error::new(ErrorKind::NotFound, message));
        };
        versions.hold(&found.name)?;
        found.held = true;
        versions.remove_pending(snapshot);
        self.snapshot = None;
        tracing::debug!(sandbox = %self.sandbox, artifact = %self.artifact, "made a snapshot an artifact");
        Ok(versions.describe(&found))
    }

    fn discard(mut self) -> Result<()> {
        self.remove()
    }
}

impl Staged {
    /// Removes the snapshot. Blocks.
    fn remove(&mut self) -> Result<()> {
        let Some(snapshot) = self.snapshot.take() else { return Ok(()) };
        let found =
            self.versions.pool().find_one(&self.sandbox, &self.artifact, Some(crate::pool::dataset_of(&snapshot)));
        self.versions.remove_pending(&snapshot);
        match found? {
            Some(found) if !found.held => self.versions.destroy_snapshot(&found.name),
            _ => Ok(()),
        }
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        if let Err(error) = self.remove() {
            tracing::warn!(sandbox = %self.sandbox, artifact = %self.artifact, %error, "a snapshot was left behind");
        }
    }
}
