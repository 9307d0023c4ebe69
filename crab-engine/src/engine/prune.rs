//! Removing versions: one by name, or those that the rules of retention let go.

use std::collections::BTreeMap;
use std::sync::Arc;

use crab_core::{Error, ErrorKind, Manifest, Result, SandboxId, VersionId};

use super::artifacts::{self, Key};
use super::calls::blocking;
use super::events::EventKind;
use super::sizes::Measure;
use super::{Engine, Inner, detached, lineage, meters};
use crate::retention::{Entry, Held, OverQuota, Removal, Removals, Retention, decide};
use crate::store::{Index, OperationKind};

/// What a prune did or would do.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct PruneReport {
    /// The versions that are gone, in the order in which they went.
    pub removed: Vec<Removal>,
    /// Versions that were to go and are still there, or whose artifacts still take space until the store is opened
    /// anew.
    pub failed: Vec<(SandboxId, VersionId, Error)>,
    /// Quotas that are not kept all the same, since everything that is left is held.
    pub over: Vec<OverQuota>,
}

impl PruneReport {
    /// Bytes that are free now, as far as the backends tell.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.removed.iter().map(|removal| removal.bytes).fold(0, u64::saturating_add)
    }
}

/// A version with what it takes and what keeps it.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct VersionInfo {
    /// The version.
    pub manifest: Manifest,
    /// Bytes of all its artifacts, with those that they depend on, as far as the backends tell. Of an artifact that
    /// shares its blocks with others only what it holds alone counts.
    pub bytes: u64,
    /// Bytes that only this version needs: what its removal frees.
    pub own_bytes: u64,
    /// How many of its artifacts have no known size.
    pub unknown: usize,
    /// It is pinned.
    pub pinned: bool,
    /// Its labels.
    pub labels: Vec<crab_core::Label>,
    /// What keeps it whatever the rules say.
    pub held: Option<Held>,
}

impl Engine {
    /// Removes a version and the artifacts that nothing else needs. Works on a full disk too.
    ///
    /// When this returns the removal is durable: the version does not come back after a crash, and its number is never
    /// given away again. Where the future is dropped or the process dies meanwhile, the version is either there whole
    /// or gone; artifacts that are left over go when the store is opened anew.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`]; [`ErrorKind::Busy`] where the version is held, saying by what; errors of the store.
    /// Where an artifact could not be removed the version is gone all the same, and the artifact goes when the store is
    /// opened anew.
    pub async fn remove(&self, id: &SandboxId, version: VersionId) -> Result<()> {
        let (inner, id) = (self.0.clone(), id.clone());
        detached("remove", async move {
            inner.check_open()?;
            let lock = inner.work_lock(&id);
            let _exclusive = lock.lock().await;
            inner.remove(&id, version).await
        })
        .await
    }

    /// Removes the versions of all sandboxes that the rules let go, one after the other; checkpoints go on between
    /// them. A version that has become held meanwhile stays. Stops early when the engine is closed.
    ///
    /// # Errors
    /// [`ErrorKind::Cancelled`] where the engine was closed. What fails for one version is in the report, and the
    /// others go on.
    pub async fn prune(&self, retention: &Retention) -> Result<PruneReport> {
        let (inner, retention) = (self.0.clone(), retention.clone());
        detached("prune", async move {
            inner.check_open()?;
            Ok(inner.prune(&retention, None, Measure::Now).await)
        })
        .await
    }

    /// What [`prune`](Self::prune) would do now. Nothing is removed.
    pub async fn prune_plan(&self, retention: &Retention) -> PruneReport {
        let Removals { removals, over } = self.0.removals(retention, None, Measure::Now).await;
        PruneReport { removed: removals, failed: Vec::new(), over }
    }

    /// The versions of a sandbox with their sizes and what keeps them, oldest first; none where the store does not know
    /// it.
    pub async fn inventory(&self, id: &SandboxId) -> Vec<VersionInfo> {
        let sizes = self.0.sizes(Measure::Now).await;
        self.0.store.with(|index| {
            let mut users: BTreeMap<Key, usize> = BTreeMap::new();
            for manifest in artifacts::all_manifests(index) {
                for key in artifacts::needed(std::iter::once(manifest)).into_keys() {
                    *users.entry(key).or_default() += 1;
                }
            }
            let info = |manifest: &Arc<Manifest>| {
                let keys: Vec<Key> = artifacts::needed(std::iter::once(&**manifest)).into_keys().collect();
                let sum = |keys: &mut dyn Iterator<Item = &Key>| {
                    keys.filter_map(|key| sizes.get(key)).fold(0u64, |sum, bytes| sum.saturating_add(*bytes))
                };
                let mark = index.sandboxes.get(id).and_then(|sandbox| sandbox.marks.get(&manifest.version));
                VersionInfo {
                    bytes: sum(&mut keys.iter()),
                    own_bytes: sum(&mut keys.iter().filter(|key| users.get(key) == Some(&1))),
                    unknown: keys.iter().filter(|key| !sizes.contains_key(key)).count(),
                    pinned: mark.is_some_and(|mark| mark.pinned),
                    labels: mark.map(|mark| mark.labels.iter().cloned().collect()).unwrap_or_default(),
                    held: self.0.held(index, id, manifest.version),
                    manifest: Manifest::clone(manifest),
                }
            };
            let sandbox = index.sandboxes.get(id);
            sandbox.map(|sandbox| sandbox.versions.values().map(info).collect()).unwrap_or_default()
        })
    }
}

/// What keeps a version whatever the rules say.
fn held(index: &Index, id: &SandboxId, version: VersionId) -> Option<Held> {
    let sandbox = index.sandboxes.get(id)?;
    if lineage::standing(sandbox).is_some_and(|standing| standing.version == version) {
        return Some(Held::Standing);
    }
    if let Some(mark) = sandbox.marks.get(&version) {
        if mark.pinned {
            return Some(Held::Pinned);
        }
        if !mark.labels.is_empty() {
            return Some(Held::Labelled);
        }
    }
    let needed = index.operations.values().filter(|operation| operation.outcome.is_none()).any(|operation| {
        let of = match &operation.kind {
            OperationKind::Restore => &operation.sandbox,
            OperationKind::Fork { from } => from,
        };
        of == id && operation.version == version
    });
    if needed {
        return Some(Held::Operation);
    }
    // Without its record another version may stand than the one that seems to.
    (sandbox.marks_damage.is_some() || sandbox.record_damage.is_some()).then_some(Held::Unreadable)
}

impl Inner {
    fn held(&self, index: &Index, id: &SandboxId, version: VersionId) -> Option<Held> {
        held(index, id, version).or_else(|| self.readers.is_read(id, version).then_some(Held::Read))
    }

    /// Removes a version while its sandbox's work lock is held.
    pub(super) async fn remove(&self, id: &SandboxId, version: VersionId) -> Result<()> {
        let removing = self.readers.remove(vec![(id.clone(), version)]);
        let (before, held) = self.store.with(|index| {
            let manifest = index.sandboxes.get(id).and_then(|sandbox| sandbox.versions.get(&version));
            let before = manifest.map(|manifest| artifacts::needed(std::iter::once(&**manifest)));
            (before, held(index, id, version).or(removing.is_none().then_some(Held::Read)))
        });
        let Some(before) = before else {
            return Err(Error::new(ErrorKind::NotFound, format!("{id} has no version {version}")));
        };
        if let Some(held) = held {
            let error = Error::new(ErrorKind::Busy, format!("{version} of {id} is kept: {held}"));
            return Err(error.fix(match held {
                Held::Standing => "make another version first, or forget the sandbox",
                Held::Pinned => "unpin it first",
                Held::Labelled => "take its labels away first",
                Held::Read => "drop what reads it first",
                Held::Operation => "finish that restore or fork, or begin another",
                Held::Unreadable => {
                    "attach the sandbox and pin or unpin a version, which writes what is readable again"
                }
            }));
        }
        let (store, owned) = (self.store.clone(), id.clone());
        blocking("remove a version", move || store.remove_version(&owned, version)).await??;
        self.emit(id, EventKind::Removed { version });
        self.step("remove.unlisted")?;
        self.collect(before).await.map(|_| ())
    }

    async fn prune(&self, retention: &Retention, only: Option<&SandboxId>, measure: Measure) -> PruneReport {
        let Removals { removals, over } = self.removals(retention, only, measure).await;
        for over in &over {
            let whose = over.sandbox.as_ref().map_or("the store", SandboxId::as_str);
            tracing::warn!(
                bytes = over.bytes,
                quota = over.quota,
                "{whose} is over its quota with held versions alone"
            );
        }
        let mut report = PruneReport { over, ..PruneReport::default() };
        for removal in removals {
            if self.check_open().is_err() {
                break;
            }
            let lock = self.work_lock(&removal.sandbox);
            let _exclusive = lock.lock().await;
            let removed = match self.step("prune.next") {
                Ok(()) => self.remove(&removal.sandbox, removal.version).await,
                Err(error) => Err(error),
            };
            match removed {
                Ok(()) => {
                    meters::pruned(removal.rule, removal.bytes);
                    report.removed.push(removal);
                }
                // Somebody else removed it, or needs it now.
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Busy) => {}
                Err(error) => {
                    tracing::warn!(sandbox = %removal.sandbox, version = %removal.version, "not pruned: {error}");
                    report.failed.push((removal.sandbox, removal.version, error));
                }
            }
        }
        report
    }

    async fn removals(&self, retention: &Retention, only: Option<&SandboxId>, measure: Measure) -> Removals {
        let sizes = self.sizes(if retention.has_quota() { measure } else { Measure::Never }).await;
        self.store.with(|index| {
            let mut store: BTreeMap<SandboxId, Vec<Entry<Key>>> = BTreeMap::new();
            for (id, sandbox) in &index.sandboxes {
                let entry = |manifest: &Arc<Manifest>| Entry {
                    version: manifest.version,
                    created_ms: manifest.created_ms,
                    artifacts: artifacts::needed(std::iter::once(&**manifest)).into_keys().collect(),
                    held: self.held(index, id, manifest.version),
                };
                store.insert(id.clone(), sandbox.versions.values().map(entry).collect());
            }
            decide(retention, &store, &sizes, only)
        })
    }

    /// Prunes a sandbox that has a new version, in the background. At most one prune of it waits to begin.
    pub(super) fn prune_soon(self: &Arc<Self>, id: &SandboxId) {
        if self.retention.is_none() || !self.prunes.lock().insert(id.clone()) {
            return;
        }
        let (inner, id) = (self.clone(), id.clone());
        tokio::spawn(async move {
            inner.prunes.lock().remove(&id);
            if let Some(retention) = &inner.retention {
                // A quota of the store may ask for versions of others.
                let only = (!retention.spans_sandboxes()).then_some(&id);
                inner.prune(retention, only, Measure::AtTimes).await;
            }
        });
    }
}
