//! Restore by clone and swap.
//!
//! ```text
//! 1  write the journal                             what is meant; with it, in the same step of the pool,
//!    snapshot the root as an artifact              where the replaced state is kept
//! 2  clone the version                             BASE/SANDBOX/next
//! 3  mount the clone in the place of the root      from here on the sandbox sees its old files
//! 4  rename the root away, and the clone to it     from here on the restore outlives a reboot
//! 5  finish                                        promote the root, drop what nobody needs, forget the journal
//! ```
//!
//! Each step but the third is on the disk when it returns. What is refused on a full pool comes before the third and is
//! undone, and tried once more with [the reserve](crate::reserve). What is left after a crash is told by the datasets'
//! guids and marks: where the clone is not mounted yet and the root still has its name, the restore did not happen and is
//! undone; else it did, and is finished. One function, [`Restorer::settle`], does both, for a failed restore, a second
//! attempt and recovery alike.
//!
//! The fifth step turns the lines of versions around: a promoted clone takes over the versions up to the restored one,
//! and what was the root is then a branch on which only the later ones stand. So the branch goes with the last of them,
//! and no version is kept from being removed by the root.

use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use crab_backend_files::{Keep, Steps, refuse_late, tasks};
use crab_core::{Artifact, ArtifactId, Condition, Error, ErrorKind, RestoreTarget, Restored, Result, SandboxId};

use crate::capture::{nested, write_out};
use crate::journal::Record;
use crate::mounts::{self, Mounts};
use crate::place::Place;
use crate::pool::{Dataset, Finish, Found, MARK_CLONE};
use crate::versions::Versions;
use crate::{busy, failure, properties};

/// A step that is behind. Tests stop here.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Step {
    /// The journal is written, and the replaced state kept.
    Begun,
    Cloned,
    Mounted,
    /// The root has another name, and the clone has not got it yet.
    Moved,
    Swapped,
    Finished,
}

/// Restores, and cleans up after restores that were cut short. All calls block.
#[derive(Clone)]
pub(crate) struct Restorer {
    versions: Arc<Versions>,
    steps: Arc<dyn Steps<Step>>,
}

/// The names under which a restore keeps datasets for a while.
struct Names {
    home: String,
    next: String,
    /// Where there is a root to be replaced.
    old: Option<String>,
}

impl Names {
    fn new(home: String, replaced: Option<u64>) -> Self {
        Self { next: format!("{home}/next"), old: replaced.map(|guid| branch(&home, guid)), home }
    }
}

/// The name of what was a sandbox's root once.
pub(crate) fn branch(home: &str, guid: u64) -> String {
    format!("{home}/old-{guid:016x}")
}

impl Restorer {
    pub(crate) fn new(versions: Arc<Versions>, steps: Arc<dyn Steps<Step>>) -> Self {
        Self { versions, steps }
    }

    /// Restores an artifact. See [`CheckpointBackend::restore`](crab_core::CheckpointBackend::restore).
    pub(crate) fn restore(&self, artifact: &Artifact, target: &RestoreTarget) -> Result<Restored> {
        self.versions.reserve.behind(|| self.attempt(artifact, target))
    }

    fn attempt(&self, artifact: &Artifact, target: &RestoreTarget) -> Result<Restored> {
        let sandbox = &target.sandbox;
        self.versions.pool().require_here(&Place::of(&sandbox.root)?.dataset)?;
        refuse_late(target.deadline, "the restore was begun")?;
        let _locked = self.versions.lock([&artifact.sandbox, &sandbox.id]);

        self.versions.find_whole(artifact)?;
        tasks::refuse(&sandbox.cgroup)?;
        let earlier = self.settle(&sandbox.id)?;
        // It may have moved to another dataset.
        let source = self.versions.find_whole(artifact)?;
        // Looked at only now, since what was left over may have been put in its place.
        let place = Place::of(&sandbox.root)?;
        self.versions.require_outside(&place.dataset)?;
        let root = self.replaceable(&place)?;
        let keep = self.plan(target, earlier.as_ref(), &place, root.is_some())?;
        refuse_late(target.deadline, "the restore was begun")?;

        let names = Names::new(self.versions.make_home(&sandbox.id)?, root.as_ref().map(|root| root.guid));
        let record = Record {
            operation: target.operation.clone(),
            root: place.path.clone(),
            dataset: place.dataset.clone(),
            clone: unique(&target.operation),
            replaced: root.as_ref().map(|root| root.guid),
            keep,
        };
        let swapped = self
            .begin(&record, &place, &names, sandbox)
            .and_then(|()| self.swap(&record, &place, root.as_ref(), &source, &names, target));
        if let Err(error) = swapped {
            if let Err(left) = self.take_back(&record, &names).and_then(|()| self.settle(&sandbox.id).map(drop)) {
                tracing::warn!(sandbox = %sandbox.id, error = %left, "a failed restore could not be undone yet");
            }
            return Err(error);
        }
        let finished = self.steps.done(Step::Swapped).and_then(|()| self.finish(&sandbox.id, &record, &names));
        if let Err(error) = finished {
            return Err(error
                .while_doing("the restored files are in place, but not all that belongs to the restore is done")
                .condition(Condition::Stopped));
        }
        self.steps.done(Step::Finished)?;
        tracing::debug!(sandbox = %sandbox.id, artifact = %artifact.id, operation = %target.operation, "restored");
        let replaced = match &record.keep {
            Keep::New(id) | Keep::Held(id) => self.kept(&sandbox.id, id)?.map(|found| self.versions.describe(&found)),
            Keep::No | Keep::Nothing(_) => None,
        };
        Ok(Restored { replaced, init: None })
    }

    /// The dataset at the root, where there is one, after a look at whether it can be replaced.
    fn replaceable(&self, place: &Place) -> Result<Option<Dataset>> {
        let root = self.versions.pool().look_at(&place.dataset)?;
        if let Some(root) = &root {
            if !root.is_filesystem {
                let message = format!("the dataset {} at {} is a volume", place.dataset, place.path.display());
                return Err(Error::new(ErrorKind::InvalidInput, message).fix("use a filesystem"));
            }
            if let Some(child) = root.children.first() {
                return Err(nested(place, child));
            }
        }
        busy::refuse_use(&place.path)?;
        if !place.mounted {
            mounts::make_point(&place.path)?;
        }
        Ok(root)
    }

    /// Decides what becomes of the replaced state.
    fn plan(&self, target: &RestoreTarget, earlier: Option<&Record>, place: &Place, exists: bool) -> Result<Keep> {
        let earlier = earlier.filter(|e| e.operation == target.operation).map(|e| &e.keep);
        Keep::plan(target.keep_replaced.as_ref(), earlier, exists, |name| {
            self.versions.require_free(&target.sandbox.id, name, Some(&place.dataset))
        })
    }

    /// The first step.
    fn begin(&self, record: &Record, place: &Place, names: &Names, sandbox: &crab_core::Sandbox) -> Result<()> {
        let wanted = match &record.keep {
            Keep::New(id) => {
                if place.mounted {
                    write_out(place)?;
                }
                Some(self.versions.wanted(&place.dataset, &sandbox.id, id)?)
            }
            _ => None,
        };
        self.versions.pool().begin(&names.home, &record.to_text()?, wanted.as_ref())?;
        self.steps.done(Step::Begun)
    }

    /// The steps from the clone to the swap.
    fn swap(
        &self,
        record: &Record,
        place: &Place,
        root: Option<&Dataset>,
        source: &Found,
        names: &Names,
        target: &RestoreTarget,
    ) -> Result<()> {
        let calls = self.versions.pool().calls();
        let mut wanted = root.map(|root| properties::settable(&root.carried)).unwrap_or_default();
        wanted.insert(MARK_CLONE.to_owned(), record.clone.as_str().into());
        calls
            .clone(&names.next, &source.name, &wanted)
            .map_err(|failed| failure::zfs(format_args!("clone the version {}", source.name), failed))?;
        self.steps.done(Step::Cloned)?;
        let clone = {
            let mounts = Mounts::read()?;
            mounts::detached(&names.next, mounts.at(&place.path))?
        };
        refuse_late(target.deadline, "the restored files were in place")?;
        tasks::refuse(&target.sandbox.cgroup)?;
        busy::refuse_use(&place.path)?;
        mounts::replace(&clone, &place.path)?;
        self.steps.done(Step::Mounted)?;
        if let (Some(_), Some(old)) = (root, &names.old) {
            // A rename takes no room, but ZFS says so where a quota above the new name leaves none for what moves there.
            self.rename(&place.dataset, old).map_err(|error| match error.kind() {
                ErrorKind::Full => over_quota(&names.home, error),
                _ => error,
            })?;
            self.steps.done(Step::Moved)?;
        }
        self.rename(&names.next, &place.dataset)
    }

    fn rename(&self, from: &str, to: &str) -> Result<()> {
        self.versions
            .pool()
            .calls()
            .rename(from, to)
            .map_err(|failed| failure::zfs(format_args!("rename the dataset {from} to {to}"), failed))
    }

    /// After a failure: puts the replaced root back, where it was moved already. Does not concern what a dead process
    /// left behind.
    fn take_back(&self, record: &Record, names: &Names) -> Result<()> {
        let looks = self.versions.pool().look([record.dataset.as_str(), &names.next])?;
        if !is_clone(looks.get(&names.next), record) {
            return Ok(());
        }
        if let (Some(old), None) = (&names.old, looks.get(&record.dataset)) {
            self.rename(old, &record.dataset)?;
        }
        let mounts = Mounts::read()?;
        let Some(mount) = mounts.at(&record.root).filter(|mount| mounts::dataset(mount) == Some(&names.next)) else {
            return Ok(());
        };
        match record.replaced {
            Some(_) => mounts::replace(&mounts::detached(&record.dataset, Some(mount))?, &record.root),
            None => mounts::unmount(&record.root),
        }
    }

    /// The fifth step.
    fn finish(&self, sandbox: &SandboxId, record: &Record, names: &Names) -> Result<()> {
        if let Keep::New(id) = &record.keep
            && let Some(found) = self.kept(sandbox, id)?
            && !found.held
        {
            self.versions.hold(&found.name)?;
        }
        let forget = record.keep == Keep::No;
        self.versions.pool().finish(&Finish {
            home: &names.home,
            live: Some(&record.dataset),
            discard: names.old.as_deref().filter(|_| record.keep == Keep::No),
            // Else it says, at a second attempt, what the first one kept.
            forget,
        })
    }

    /// Undoes the sandbox's last restore where it did not happen, or finishes it where it did. Gives its journal where
    /// that is still of use. Running it again does nothing. The sandbox must be locked.
    pub(crate) fn settle(&self, sandbox: &SandboxId) -> Result<Option<Record>> {
        let pool = self.versions.pool();
        let home = self.versions.home(sandbox);
        let Some(text) = pool.look_at(&home)?.and_then(|home| home.journal) else { return Ok(None) };
        let Some(record) = Record::from_text(&text) else {
            let message = format!("the journal of {sandbox}, the property crab:restore of {home}, is not whole");
            return Err(Error::new(ErrorKind::Corrupt, message)
                .fix("see whether the dataset \"next\" in it is needed, then run `zfs inherit crab:restore` on it"));
        };
        let names = Names::new(home, record.replaced);
        let asked = [Some(record.dataset.as_str()), Some(&*names.next), names.old.as_deref()];
        let looks = pool.look(asked.into_iter().flatten())?;
        let (root, next) = (looks.get(&record.dataset), looks.get(&names.next));
        let moved = names.old.as_ref().is_some_and(|old| looks.contains_key(old)) && root.is_none();
        let stands = root.is_some_and(|root| Some(root.guid) == record.replaced);

        let happened = if is_clone(root, &record) {
            true
        } else if is_clone(next, &record) {
            let mounts = Mounts::read()?;
            let seen = mounts.stack(&record.root).any(|mount| mounts::dataset(mount) == Some(&names.next));
            if root.is_some() && !stands {
                let message = format!("{} is not what the restore that was cut short found there", record.dataset);
                return Err(Error::new(ErrorKind::Corrupt, message).fix("see what it is and move it away"));
            }
            if seen || moved {
                if let (true, Some(old)) = (stands, &names.old) {
                    self.rename(&record.dataset, old)?;
                }
                self.rename(&names.next, &record.dataset)?;
                true
            } else {
                let failed = |failed| failure::zfs(format_args!("destroy the dataset {}", names.next), failed);
                pool.calls().destroy(&names.next).map_err(failed)?;
                false
            }
        } else if let (true, Some(old)) = (moved, &names.old) {
            self.rename(old, &record.dataset)?;
            false
        } else {
            // It was finished and the host replaced or removed the root since; or nothing was done yet.
            !stands && record.replaced.is_some()
        };
        if happened {
            mount_again(&record)?;
            self.finish(sandbox, &record, &names)?;
            return Ok((record.keep != Keep::No).then_some(record));
        }
        if stands || moved {
            match mount_again(&record) {
                // Without its key nobody had it mounted before either.
                Err(error) if error.kind() == ErrorKind::Unsupported => {
                    tracing::debug!(%sandbox, %error, "the old root stays unmounted");
                }
                mounted => mounted?,
            }
        }
        self.undo(sandbox, record, &names)
    }

    /// Undoes the rest of a restore that did not happen, after its clone.
    fn undo(&self, sandbox: &SandboxId, record: Record, names: &Names) -> Result<Option<Record>> {
        if let Keep::New(id) = &record.keep
            && let Some(found) = self.kept(sandbox, id)?.filter(|found| !found.held)
        {
            self.versions.destroy_snapshot(&found.name)?;
        }
        if record.replaced.is_none() {
            // The directory that was made to mount at. It may have been there before, or be in use.
            let _ = fs::remove_dir(&record.root);
        }
        tracing::debug!(%sandbox, operation = %record.operation, "undid a restore");
        // Where an earlier attempt was finished, what it kept stays known.
        let forget = !matches!(record.keep, Keep::Held(_));
        self.versions.pool().finish(&Finish { home: &names.home, live: None, discard: None, forget })?;
        Ok((!forget).then_some(record))
    }

    /// The snapshot that was made of the replaced state, where it is still there.
    fn kept(&self, sandbox: &SandboxId, id: &ArtifactId) -> Result<Option<Found>> {
        Ok(self.versions.pool().find_one(sandbox, id, None)?.filter(|found| !found.removed))
    }
}

fn over_quota(home: &str, error: Error) -> Error {
    let message = format!("a quota above {home} leaves no room for what the root holds");
    Error::new(ErrorKind::OverQuota, message).caused_by(error).fix("raise the quota or remove versions")
}

fn is_clone(dataset: Option<&Dataset>, record: &Record) -> bool {
    dataset.is_some_and(|dataset| dataset.clone.as_deref() == Some(&record.clone))
}

/// Mounts a sandbox's dataset again where nothing is mounted at its root, and takes away what was put on it.
fn mount_again(record: &Record) -> Result<()> {
    let mounts = Mounts::read()?;
    let stack: Vec<_> = mounts.stack(&record.root).collect();
    match stack.as_slice() {
        [] if is_directory(&record.root) && mounts.of(&record.dataset).is_none() => {
            mounts::attach(&mounts::detached(&record.dataset, None)?, &record.root)
        }
        // Cut short between the two halves of putting one in the place of the other.
        [_, _, ..] if mounts.at(&record.root).and_then(mounts::dataset) != Some(&record.dataset) => {
            mounts::unmount(&record.root)
        }
        _ => Ok(()),
    }
}

fn is_directory(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|about| about.is_dir())
}

/// A mark that no other clone has.
fn unique(operation: &crab_core::OperationId) -> String {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_nanos());
    format!("{operation}.{now:x}.{}", std::process::id())
}
