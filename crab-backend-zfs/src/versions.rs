//! What of a pool belongs to this backend.
//!
//! ```text
//! BASE                        crab:format; the dataset that the host names: mounted nowhere
//!   BASE/_reserve             room for a restore when the pool is full
//!   BASE/SANDBOX              crab:restore, the journal of the last restore into this sandbox
//!     BASE/SANDBOX/next       crab:clone; the clone that a restore puts in the place of the root
//!     BASE/SANDBOX/old-GUID   what was the root before a restore, while versions stand on it
//!     BASE/SANDBOX/in-GUID      an imported version
//!     BASE/SANDBOX/incoming-N   one that is being imported; the number is for the artifact's name
//! ROOT@crab-NUMBER-ARTIFACT   crab:base, crab:sandbox, crab:artifact: a version, wherever its dataset is
//! ```
//!
//! A version is a snapshot that carries the marks and is held under the tag `crab`, so that nobody destroys it by
//! mistake. Without the hold it is a capture that was not persisted; destroyed but still there, because a sandbox was
//! cloned from it, it was removed and goes with the last clone.
//!
//! Snapshots move: when a restored root is promoted, the versions up to the restored one move to it. So a version is
//! found by its name and marks in the whole pool, and its identity is its guid.

use std::collections::{BTreeMap, HashSet};
use std::sync::{Mutex, PoisonError};

use crab_backend_files::{Locked, Locks, artifacts};
use crab_core::{Artifact, ArtifactId, Error, ErrorKind, Result, SandboxId};

use crate::batch::Batch;
use crate::failure;
use crate::pool::{Found, HOLD, MARK_FORMAT, MARK_SANDBOX, Pool, Wanted};
use crate::reserve::Reserve;
use crate::sys::{Map, Value};

/// The backend's name, stored with every artifact.
pub(crate) const NAME: &str = "zfs";
/// What this release writes.
const FORMAT: &str = "1";

const FACT_GUID: &str = "snapshot-guid";
const FACT_DATASET: &str = "dataset";

/// The versions in a pool.
#[derive(Debug)]
pub(crate) struct Versions {
    pool: Pool,
    base: String,
    locks: Locks,
    /// For what must work on a full pool.
    pub(crate) reserve: Reserve,
    /// Captures on their way into the pool.
    pub(crate) batch: Batch,
    /// Snapshots that this process took and has not persisted yet.
    pending: Mutex<HashSet<String>>,
}

impl Versions {
    /// Opens or makes the dataset of all versions. Blocks.
    pub(crate) fn open(base: &str) -> Result<Self> {
        if !base.contains('/') || base.contains('@') {
            let message = format!("\"{base}\" is no dataset inside a pool");
            return Err(Error::new(ErrorKind::InvalidInput, message).fix("name one like tank/crab"));
        }
        let pool = Pool::of(base)?;
        let about = match pool.look_at(base)? {
            Some(about) => about,
            None => {
                let properties = Map::from([
                    ("mountpoint".to_owned(), "none".into()),
                    ("canmount".to_owned(), Value::U64(0)),
                    (MARK_FORMAT.to_owned(), FORMAT.into()),
                ]);
                pool.calls()
                    .create(base, &properties)
                    .map_err(|failed| failure::zfs(format_args!("create the dataset {base}"), failed))?;
                pool.look_at(base)?.unwrap_or_default()
            }
        };
        match about.format.as_deref() {
            Some(FORMAT) => {}
            Some(_) => {
                let message = format!("the dataset {base} was written by another release of this backend");
                return Err(Error::new(ErrorKind::Unsupported, message).fix("use that release, or a new dataset"));
            }
            None => {
                let message = format!("the dataset {base} exists and is not this backend's");
                return Err(Error::new(ErrorKind::InvalidInput, message).fix("name a dataset that does not exist"));
            }
        }
        let pool = pool.for_base(about.guid);
        Ok(Self {
            reserve: Reserve::open(pool.calls(), base),
            pool,
            base: base.to_owned(),
            locks: Locks::default(),
            batch: Batch::default(),
            pending: Mutex::default(),
        })
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(crate) fn base(&self) -> &str {
        &self.base
    }

    /// Waits until nobody else changes the versions of these sandboxes. Blocks.
    pub(crate) fn lock<'a>(&self, ids: impl IntoIterator<Item = &'a SandboxId>) -> Vec<Locked<'_>> {
        self.locks.lock_all(ids)
    }

    /// The dataset under which a sandbox's branches and journal stand.
    pub(crate) fn home(&self, id: &SandboxId) -> String {
        format!("{}/{id}", self.base)
    }

    /// Makes that dataset where it is missing.
    pub(crate) fn make_home(&self, id: &SandboxId) -> Result<String> {
        let home = self.home(id);
        let exists = self.pool.calls().exists(&home).map_err(|failed| failure::zfs("look at datasets", failed))?;
        if !exists {
            let properties = Map::from([
                ("mountpoint".to_owned(), "none".into()),
                ("canmount".to_owned(), Value::U64(0)),
                (MARK_SANDBOX.to_owned(), id.as_str().into()),
            ]);
            self.pool
                .calls()
                .create(&home, &properties)
                .map_err(|failed| failure::zfs(format_args!("create the dataset {home}"), failed))?;
        }
        Ok(home)
    }

    /// Refuses a root that holds the versions, or one in another pool.
    pub(crate) fn require_outside(&self, dataset: &str) -> Result<()> {
        self.pool.require_here(dataset)?;
        let within = |inner: &str, outer: &str| {
            inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('/'))
        };
        if within(&self.base, dataset) || within(dataset, &self.base) {
            let message = format!("the root's dataset {dataset} and that of the versions, {}, overlap", self.base);
            return Err(Error::new(ErrorKind::InvalidInput, message).fix("keep the versions outside of every sandbox"));
        }
        Ok(())
    }

    /// What a snapshot for an artifact needs.
    pub(crate) fn wanted(&self, dataset: &str, sandbox: &SandboxId, artifact: &ArtifactId) -> Result<Wanted> {
        self.pool.wanted(dataset, self.home(sandbox), sandbox, artifact)
    }

    /// Refuses a name under which something is stored or in the making.
    pub(crate) fn require_free(&self, sandbox: &SandboxId, id: &ArtifactId, likely: Option<&str>) -> Result<()> {
        match self.pool.find_one(sandbox, id, likely)? {
            None => Ok(()),
            Some(_) => Err(artifacts::taken(sandbox, id)),
        }
    }

    /// Remembers that a snapshot is not persisted yet.
    pub(crate) fn add_pending(&self, snapshot: &str) {
        self.pending().insert(snapshot.to_owned());
    }

    pub(crate) fn remove_pending(&self, snapshot: &str) {
        self.pending().remove(snapshot);
    }

    pub(crate) fn is_pending(&self, snapshot: &str) -> bool {
        self.pending().contains(snapshot)
    }

    fn pending(&self) -> std::sync::MutexGuard<'_, HashSet<String>> {
        // Nothing panics while the set is borrowed, so a poisoned one is whole.
        self.pending.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Refuses an artifact that another backend made.
    pub(crate) fn require_ours(&self, artifact: &Artifact) -> Result<()> {
        artifacts::require_of(NAME, artifact)
    }

    /// Describes a snapshot as an artifact.
    pub(crate) fn describe(&self, found: &Found) -> Artifact {
        let facts = BTreeMap::from([
            (FACT_GUID.to_owned(), format!("{:016x}", found.guid)),
            (FACT_DATASET.to_owned(), found.dataset().to_owned()),
        ]);
        Artifact { facts, ..artifacts::bare(NAME, &found.sandbox, &found.artifact) }
    }

    /// Finds what stands for an artifact, removed or not.
    pub(crate) fn look(&self, artifact: &Artifact) -> Result<Option<Found>> {
        self.require_ours(artifact)?;
        let likely = artifact.facts.get(FACT_DATASET).map(String::as_str);
        self.pool.find_one(&artifact.sandbox, &artifact.id, likely)
    }

    /// Finds an artifact and checks that it is what it was. ZFS keeps it from changing, and its blocks are checked when
    /// they are read.
    pub(crate) fn find_whole(&self, artifact: &Artifact) -> Result<Found> {
        let found = self.look(artifact)?.filter(|found| !found.removed);
        let Some(found) = found.filter(|found| found.held || !self.is_pending(&found.name)) else {
            return Err(artifacts::missing(artifact));
        };
        require_identity(artifact, &found)?;
        if !found.held {
            let message = format!("the snapshot {} of artifact {} lost its hold", found.name, artifact.id);
            return Err(Error::new(ErrorKind::Corrupt, message)
                .fix(format!("if it is whole, run `zfs hold {HOLD} {}`", found.name)));
        }
        Ok(found)
    }

    /// Holds a snapshot, by which it becomes an artifact.
    pub(crate) fn hold(&self, snapshot: &str) -> Result<()> {
        match self.pool.calls().hold([snapshot], HOLD) {
            Ok(()) => Ok(()),
            // It is held already.
            Err(failed) if failed.errno == 17 => Ok(()),
            Err(failed) => Err(failure::zfs(format_args!("hold the snapshot {snapshot}"), failed)),
        }
    }

    /// Removes a snapshot, now or when nothing depends on it any more. Where this is cut short, the snapshot is removed
    /// and goes at the next recovery.
    pub(crate) fn destroy_snapshot(&self, snapshot: &str) -> Result<()> {
        let calls = self.pool.calls();
        let failed = |failed| failure::zfs(format_args!("destroy the snapshot {snapshot}"), failed);
        calls.destroy_snapshots([snapshot]).map_err(failed)?;
        // The last hold takes a destroyed snapshot with it.
        calls.release(snapshot, HOLD).map_err(failed)
    }

    /// The sandboxes that have a dataset here.
    pub(crate) fn homes(&self) -> Result<Vec<SandboxId>> {
        let base = self.pool.look_at(&self.base)?.unwrap_or_default();
        Ok(base
            .children
            .iter()
            .filter_map(|child| SandboxId::new(child.strip_prefix(&self.base)?.strip_prefix('/')?).ok())
            .collect())
    }
}

/// Refuses a snapshot that is not the one that the artifact's facts record.
pub(crate) fn require_identity(artifact: &Artifact, found: &Found) -> Result<()> {
    match artifact.facts.get(FACT_GUID) {
        Some(recorded) if *recorded != format!("{:016x}", found.guid) => {
            let message = format!("another snapshot stands in the place of artifact {}", artifact.id);
            Err(Error::new(ErrorKind::Corrupt, message))
        }
        _ => Ok(()),
    }
}
