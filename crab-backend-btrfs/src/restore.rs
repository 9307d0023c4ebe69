//! Restore by clone and swap.
//!
//! ```text
//! 1  write the journal                           what is meant, before anything is done
//! 2  snapshot the root as an artifact            where the replaced state is kept
//! 3  clone: a writable snapshot beside the root  .ROOT.crab-restore
//! 4  swap the clone and the root                 one rename; the moment at which the restore happens
//! 5  commit                                      from here on the restore outlives a power cut
//! 6  remove the replaced tree                    which now stands beside the root
//! ```
//!
//! Everything that can fail for want of space comes before the swap and is undone. What is left after a crash is told by
//! the subvolumes' uuids: the journal names the snapshot that is restored and the subvolume that stood at the root. If
//! that one still stands there, the restore did not happen and is undone; else it did, and is finished. One function,
//! [`Restorer::settle`], does both, for a failed restore, a second attempt and recovery alike. The journal stays until
//! the next restore; it then says which operation made which artifact.
//!
//! A power cut undoes steps only from the end, because nothing here is made durable but by commits of the whole
//! filesystem.

use std::ffi::{OsStr, OsString};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crab_backend_files::{Keep, Steps, artifacts, refuse_late, tasks};
use crab_core::{Artifact, ArtifactId, Condition, Error, ErrorKind, RestoreTarget, Restored, Result, SandboxId};
use rustix::fs::{Mode, OFlags, RenameFlags};
use rustix::io::Errno;

use crate::capture::refuse_nested;
use crate::journal::Record;
use crate::subvolume::{self, Info, Uuid};
use crate::versions::{self, Versions};
use crate::{busy, failure, ioctl};

/// A step that is behind. Tests stop here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    Journaled,
    Kept,
    Cloned,
    Swapped,
    Committed,
    Removed,
}

/// Restores, and cleans up after restores that were cut short. All calls block.
#[derive(Clone)]
pub(crate) struct Restorer {
    versions: Arc<Versions>,
    steps: Arc<dyn Steps<Step>>,
}

/// Where a sandbox's root stands, or will stand.
struct Place {
    /// Free of symbolic links.
    path: PathBuf,
    parent: OwnedFd,
    name: OsString,
    /// The name beside the root under which the clone is made and the replaced tree is removed.
    staging: OsString,
}

impl Place {
    fn of(root: &Path) -> Result<Self> {
        let bad = |why: &str| Error::new(ErrorKind::InvalidInput, format!("the root {} {why}", root.display()));
        if !root.is_absolute() {
            return Err(bad("is not an absolute path"));
        }
        let (Some(parent), Some(name)) = (root.parent(), root.file_name()) else {
            return Err(bad("does not end in a file name"));
        };
        let mut staging = OsString::from(".");
        staging.push(name);
        staging.push(".crab-restore");
        if staging.len() > 255 {
            return Err(bad("has a name too long for a second one beside it").fix("use at most 241 bytes"));
        }
        let real =
            parent.canonicalize().map_err(|error| Error::io(format_args!("resolve {}", parent.display()), error))?;
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(&real, flags, Mode::empty()).map_err(failure::at("open", &real))?;
        Ok(Self { path: real.join(name), parent: fd, name: name.to_owned(), staging })
    }

    fn staging_path(&self) -> PathBuf {
        self.path.with_file_name(&self.staging)
    }

    /// What stands under a name here: nothing, a subvolume, or something else.
    fn look(&self, name: &OsStr) -> Result<Found> {
        let path = self.path.with_file_name(name);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = match rustix::fs::openat(&self.parent, name, flags, Mode::empty()) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(Found::Nothing),
            Err(Errno::NOTDIR | Errno::LOOP) => return Ok(Found::Alien),
            Err(errno) => return Err(failure::at("open", &path)(errno)),
        };
        if !subvolume::is_root(&fd).map_err(failure::at("look at", &path))? {
            return Ok(Found::Alien);
        }
        let info = subvolume::info_of(&fd, &path)?;
        Ok(Found::Subvolume(fd, info))
    }

    /// Makes durable what was done here.
    fn commit(&self) -> Result<()> {
        versions::commit(&self.parent, self.path.parent().unwrap_or(&self.path))
    }

    fn remove_staging(&self) -> Result<()> {
        ioctl::destroy_subvolume(&self.parent, &self.staging)
            .map_err(failure::at("remove the subvolume", &self.staging_path()))
    }
}

enum Found {
    Nothing,
    Subvolume(OwnedFd, Info),
    Alien,
}

impl Found {
    /// The subvolume's uuid, where it is a subvolume.
    fn uuid(&self) -> Option<Uuid> {
        match self {
            Self::Subvolume(_, info) => info.uuid,
            _ => None,
        }
    }
}

impl Restorer {
    pub(crate) fn new(versions: Arc<Versions>, steps: Arc<dyn Steps<Step>>) -> Self {
        Self { versions, steps }
    }

    /// Restores an artifact. See [`CheckpointBackend::restore`](crab_core::CheckpointBackend::restore).
    pub(crate) fn restore(&self, artifact: &Artifact, target: &RestoreTarget) -> Result<Restored> {
        let sandbox = &target.sandbox;
        let place = Place::of(&sandbox.root)?;
        refuse_late(target.deadline, "the restore was begun")?;
        let _locked = self.versions.lock(&sandbox.id);

        let (source, source_info) = self.versions.open_whole(artifact)?;
        let source_uuid = source_info.uuid.ok_or_else(|| {
            Error::new(ErrorKind::Corrupt, format!("the snapshot of artifact {} has no uuid", artifact.id))
        })?;
        tasks::refuse(&sandbox.cgroup)?;
        self.versions.require_same_filesystem(&place.parent, &place.path)?;
        let earlier = self.settle(&sandbox.id)?;
        let root = self.replaceable(&place)?;
        let keep = self.plan(target, earlier.as_ref(), root.is_some())?;
        refuse_late(target.deadline, "the restore was begun")?;

        let directory = self.versions.make(&sandbox.id)?;
        // What an earlier journal knows about is gone before that journal is, on the disk too: all this is metadata, and
        // commits keep its order.
        let record = Record {
            operation: target.operation.clone(),
            root: place.path.clone(),
            source: source_uuid,
            replaced: root.as_ref().and_then(|(_, info)| info.uuid),
            keep,
        };
        record.write(&self.versions.journal(&sandbox.id)).inspect_err(|_| self.versions.tidy(&sandbox.id))?;

        let root = root.map(|(fd, _)| fd);
        if let Err(error) = self.swap(&record, &place, root.as_ref(), &source, &directory, target) {
            drop(root);
            match self.settle(&sandbox.id) {
                Ok(_) => self.versions.tidy(&sandbox.id),
                Err(left) => {
                    tracing::warn!(sandbox = %sandbox.id, error = %left, "a failed restore could not be undone yet");
                }
            }
            return Err(error);
        }
        drop(root);
        let done = self.steps.done(Step::Swapped).and_then(|()| place.commit());
        if let Err(error) = done {
            // The swap stands in memory, and only the next mount tells whether it does on disk.
            return Err(error
                .while_doing("the restored files are in place but may not outlive a power cut")
                .condition(Condition::Stopped));
        }
        self.steps.done(Step::Committed)?;
        // The restore has happened. What is left to do is left to the next restore or recovery where it fails here.
        if let Err(error) = self.settle(&sandbox.id) {
            tracing::warn!(sandbox = %sandbox.id, %error, "the replaced tree could not be removed yet");
        }
        self.steps.done(Step::Removed)?;
        tracing::debug!(sandbox = %sandbox.id, artifact = %artifact.id, operation = %target.operation, "restored");
        let replaced = match &record.keep {
            Keep::New(id) | Keep::Held(id) => self.kept(&sandbox.id, id)?,
            Keep::No | Keep::Nothing(_) => None,
        };
        Ok(Restored { replaced, init: None })
    }

    /// Whether a root is one that a restore can replace. It may be in use.
    pub(crate) fn fits(&self, root: &Path) -> Result<()> {
        let place = Place::of(root)?;
        self.versions.require_same_filesystem(&place.parent, &place.path)?;
        self.root_of(&place).map(drop)
    }

    /// The subvolume at the root, where there is one, after a look at whether it can be replaced now.
    fn replaceable(&self, place: &Place) -> Result<Option<(OwnedFd, Info)>> {
        if !matches!(place.look(&place.staging)?, Found::Nothing) {
            let message = format!("{} is in the way and is not known to be ours", place.staging_path().display());
            return Err(Error::new(ErrorKind::AlreadyExists, message).fix("move it away"));
        }
        let root = self.root_of(place)?;
        if root.is_some() {
            busy::refuse_mounts(&place.path, &place.parent)?;
        }
        Ok(root)
    }

    /// The subvolume at the root, where there is one, after a look at whether it is one that can be replaced.
    fn root_of(&self, place: &Place) -> Result<Option<(OwnedFd, Info)>> {
        match place.look(&place.name)? {
            Found::Nothing => Ok(None),
            Found::Alien => {
                let message = format!("{} is not a btrfs subvolume", place.path.display());
                Err(Error::new(ErrorKind::InvalidInput, message).fix("move it away, or make it a subvolume"))
            }
            Found::Subvolume(fd, info) => {
                self.versions.require_same_filesystem(&fd, &place.path)?;
                self.versions.require_outside(&place.path)?;
                refuse_nested(&fd, &place.path)?;
                if info.uuid.is_none() {
                    let message = format!("the subvolume {} has no uuid", place.path.display());
                    return Err(Error::new(ErrorKind::InvalidInput, message).fix("use a subvolume below the top one"));
                }
                Ok(Some((fd, info)))
            }
        }
    }

    /// Decides what becomes of the replaced state.
    fn plan(&self, target: &RestoreTarget, earlier: Option<&Record>, exists: bool) -> Result<Keep> {
        let earlier = earlier.filter(|e| e.operation == target.operation).map(|e| &e.keep);
        Keep::plan(target.keep_replaced.as_ref(), earlier, exists, |name| {
            self.versions.require_free(&target.sandbox.id, name)
        })
    }

    /// Steps 2 to 4. Where it fails, the root is what it was.
    fn swap(
        &self,
        record: &Record,
        place: &Place,
        root: Option<&OwnedFd>,
        source: &OwnedFd,
        directory: &OwnedFd,
        target: &RestoreTarget,
    ) -> Result<()> {
        self.steps.done(Step::Journaled)?;
        if let (Keep::New(id), Some(root)) = (&record.keep, root) {
            ioctl::create_snapshot(directory, OsStr::new(id.as_str()), root, true)
                .map_err(failure::at("keep the state of", &place.path))?;
        }
        self.steps.done(Step::Kept)?;
        ioctl::create_snapshot(&place.parent, &place.staging, source, false)
            .map_err(failure::at("make the clone", &place.staging_path()))?;
        self.steps.done(Step::Cloned)?;
        refuse_late(target.deadline, "the restored files were in place")?;
        tasks::refuse(&target.sandbox.cgroup)?;
        // Neither form of the rename can overwrite anything.
        let flags = if root.is_some() { RenameFlags::EXCHANGE } else { RenameFlags::NOREPLACE };
        rustix::fs::renameat_with(&place.parent, &place.staging, &place.parent, &place.name, flags)
            .map_err(failure::at("put the restored files in place at", &place.path))
    }

    /// Undoes the sandbox's last restore where it did not happen, or finishes it where it did. Gives its journal where
    /// it happened, and `None` where there is nothing to know. Running it again does nothing. The sandbox must be
    /// locked.
    pub(crate) fn settle(&self, sandbox: &SandboxId) -> Result<Option<Record>> {
        let Some(record) = Record::read(&self.versions.journal(sandbox))? else { return Ok(None) };
        if record.root.parent().is_none_or(|parent| !parent.exists()) {
            // The host removed it all. What an earlier attempt kept stays.
            return Ok(Some(record));
        }
        let place = Place::of(&record.root)?;
        let (at_root, staged) = (place.look(&place.name)?, place.look(&place.staging)?);
        let is_replaced = |found: &Found| record.replaced.is_some() && found.uuid() == record.replaced;
        let is_clone = |found: &Found| match found {
            // The replaced tree may once have been cloned from the same snapshot.
            Found::Subvolume(_, info) => !is_replaced(found) && info.parent_uuid == Some(record.source),
            Found::Nothing | Found::Alien => false,
        };
        let stands = is_replaced(&at_root);
        match (&at_root, &staged) {
            // It happened, and all is done.
            (_, Found::Nothing) if is_clone(&at_root) => Ok(Some(record)),
            // It happened, and the host removed the root since.
            (Found::Nothing, Found::Nothing) if self.is_kept(sandbox, &record)? => Ok(Some(record)),
            // It happened. Without a tree at the root, the replaced one would be the only one left.
            (Found::Subvolume(..), _) if is_replaced(&staged) => {
                place.remove_staging()?;
                tracing::debug!(%sandbox, operation = %record.operation, "removed the replaced tree");
                Ok(Some(record))
            }
            // It did not happen.
            _ if is_clone(&staged) => {
                place.remove_staging()?;
                self.undo(sandbox, record, &place, stands)
            }
            (_, Found::Nothing) => self.undo(sandbox, record, &place, stands),
            _ => {
                let path = place.staging_path();
                let message = format!("{} is not what the restore that was cut short left there", path.display());
                Err(Error::new(ErrorKind::Corrupt, message).fix("see what it is and move it away"))
            }
        }
    }

    /// Undoes the rest of a restore that did not happen, after its clone.
    fn undo(&self, sandbox: &SandboxId, record: Record, place: &Place, root_stands: bool) -> Result<Option<Record>> {
        // Where the root was removed since, what was kept is the last copy.
        if root_stands && matches!(record.keep, Keep::New(_)) {
            self.undo_keep(sandbox, &record)?;
        }
        tracing::debug!(%sandbox, operation = %record.operation, "undid a restore");
        if matches!(record.keep, Keep::Held(_)) {
            // An earlier attempt was finished, and what it kept stays known.
            return Ok(Some(record));
        }
        // The clone must be gone for good before the journal that knows about it.
        place.commit()?;
        self.remove_journal(sandbox)?;
        Ok(None)
    }

    /// Whether the replaced state stands as the artifact that the record names.
    fn is_kept(&self, sandbox: &SandboxId, record: &Record) -> Result<bool> {
        Ok(match &record.keep {
            Keep::New(id) | Keep::Held(id) => {
                self.versions.look(&artifacts::bare(versions::NAME, sandbox, id))?.is_some()
            }
            Keep::No | Keep::Nothing(_) => false,
        })
    }

    /// Removes the artifact that an undone restore made of the state that it did not replace in the end.
    fn undo_keep(&self, sandbox: &SandboxId, record: &Record) -> Result<()> {
        let Some(id) = record.keep.name() else { return Ok(()) };
        match self.versions.look(&artifacts::bare(versions::NAME, sandbox, id))? {
            Some((_, info)) if info.parent_uuid == record.replaced => {
                let path = self.versions.directory(sandbox);
                let directory = subvolume::open_directory(&path).map_err(failure::at("open", &path))?;
                ioctl::destroy_subvolume(directory, OsStr::new(id.as_str()))
                    .map_err(failure::at("remove the subvolume", &path.join(id.as_str())))
            }
            _ => Ok(()),
        }
    }

    /// The artifact that was made of the replaced state, where it is still there.
    fn kept(&self, sandbox: &SandboxId, id: &ArtifactId) -> Result<Option<Artifact>> {
        let found = self.versions.look(&artifacts::bare(versions::NAME, sandbox, id))?;
        Ok(found.map(|(_, info)| self.versions.describe(sandbox, id, &info, info.parent_uuid)))
    }

    /// Forgets a finished restore that nothing needs to know about any more. The sandbox must be locked.
    ///
    /// # Errors
    /// Where it is left in place, which does no harm.
    pub(crate) fn forget_finished(&self, sandbox: &SandboxId) -> Result<()> {
        if let Some(record) = self.settle(sandbox)? {
            // The replaced tree must be gone for good before the journal that knows about it.
            if record.root.parent().is_some_and(Path::exists) {
                Place::of(&record.root)?.commit()?;
            }
            self.remove_journal(sandbox)?;
        }
        Ok(())
    }

    fn remove_journal(&self, sandbox: &SandboxId) -> Result<()> {
        let path = self.versions.journal(sandbox);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                Err(Error::io(format_args!("remove {}", path.display()), error))
            }
            _ => Ok(()),
        }
    }
}
