//! Which artifacts must be kept, and removing the others. The first half is pure.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crab_core::{Artifact, ArtifactId, CheckpointBackend, Domain, Error, ErrorKind, Manifest, Result, SandboxId};

use super::calls::call;
use super::{Inner, names};
use crate::store::Index;

/// Names an artifact within a store.
pub(super) type Key = (Domain, SandboxId, ArtifactId);

pub(super) fn key(artifact: &Artifact) -> Key {
    (artifact.domain, artifact.sandbox.clone(), artifact.id.clone())
}

/// Everything that the manifests need, with what it depends on.
pub(super) fn needed<'a>(manifests: impl Iterator<Item = &'a Manifest>) -> BTreeMap<Key, Artifact> {
    let mut needed = BTreeMap::new();
    for artifact in manifests.flat_map(Manifest::artifacts) {
        needed.insert(key(artifact), artifact.clone());
        for id in &artifact.depends_on {
            let below =
                Artifact { id: id.clone(), bytes: None, size: None, depends_on: Vec::new(), ..artifact.clone() };
            needed.entry(key(&below)).or_insert(below);
        }
    }
    needed
}

/// Everything that a new artifact depends on: what its backend names, and what those depend on. Those are in manifests
/// that still stand, and were completed in the same way.
pub(super) fn dependencies(index: &Index, artifact: &Artifact) -> Vec<ArtifactId> {
    let mut all: BTreeSet<ArtifactId> = artifact.depends_on.iter().cloned().collect();
    let own = index.sandboxes.get(&artifact.sandbox).into_iter().flat_map(|sandbox| sandbox.versions.values());
    let named = own.flat_map(|manifest| manifest.artifacts()).filter(|known| {
        known.domain == artifact.domain && known.sandbox == artifact.sandbox && artifact.depends_on.contains(&known.id)
    });
    all.extend(named.flat_map(|known| known.depends_on.iter().cloned()));
    all.remove(&artifact.id);
    all.into_iter().collect()
}

pub(super) fn all_manifests(index: &Index) -> impl Iterator<Item = &Manifest> {
    index.sandboxes.values().flat_map(|sandbox| sandbox.versions.values()).map(Arc::as_ref)
}

/// Whether an artifact that no whole manifest needs must be kept all the same, since something that cannot be read may
/// need it.
pub(super) fn is_protected(index: &Index, (_, sandbox, artifact): &Key) -> bool {
    // Not ours to judge.
    let Some(version) = names::version_of(artifact) else { return true };
    let of_own = index.sandboxes.get(sandbox).is_some_and(|own| {
        // A manifest may name artifacts as old as the oldest, and none that is newer than itself.
        own.damaged.iter().filter_map(|damaged| damaged.version).max().is_some_and(|damaged| version <= damaged)
    });
    // A fork, also a fork of a fork, names artifacts of others.
    let of_forks = index.sandboxes.iter().any(|(id, other)| {
        let may_be_fork = other.record.forked_from.is_some() || !other.recorded;
        id != sandbox && !other.damaged.is_empty() && may_be_fork
    });
    let of_operations = index
        .operations
        .values()
        .any(|operation| operation.outcome.is_none() && operation.keep.as_ref() == Some(artifact));
    of_own || of_forks || of_operations
}

impl Inner {
    pub(super) fn backends(&self) -> impl Iterator<Item = &Arc<dyn CheckpointBackend>> {
        std::iter::once(&self.filesystem).chain(&self.process)
    }

    /// The backend that can read an artifact.
    pub(super) fn backend_of(&self, artifact: &Artifact) -> Result<Arc<dyn CheckpointBackend>> {
        let found =
            self.backends().find(|backend| backend.domain() == artifact.domain && backend.name() == artifact.backend);
        found.cloned().ok_or_else(|| {
            Error::new(
                ErrorKind::Unsupported,
                format!("artifact {} was made by the {} backend {:?}", artifact.id, artifact.domain, artifact.backend),
            )
            .fix("open the engine with that backend")
        })
    }

    pub(super) async fn remove_artifact(&self, artifact: &Artifact) -> Result<()> {
        let backend = self.backend_of(artifact)?;
        let artifact = artifact.clone();
        call("remove an artifact", self.options.deadlines.persist, async move { backend.remove(&artifact).await }).await
    }

    /// Removes, of `before`, what nothing needs any more. An error names the first that stays; it goes when the store
    /// is opened anew.
    pub(super) async fn collect(&self, before: BTreeMap<Key, Artifact>) -> Result<usize> {
        let mut gone: Vec<Artifact> = self.store.with(|index| {
            let after = needed(all_manifests(index));
            let free = |key: &Key| !after.contains_key(key) && !is_protected(index, key);
            before.into_iter().filter(|(key, _)| free(key)).map(|(_, artifact)| artifact).collect()
        });
        // Newest first: an artifact goes before what it depends on.
        gone.sort_by_key(|artifact| std::cmp::Reverse(names::version_of(&artifact.id)));
        let mut removed = 0;
        let mut failed = None;
        for artifact in gone {
            match self.step("collect.remove") {
                Ok(()) => match self.remove_artifact(&artifact).await {
                    Ok(()) => removed += 1,
                    Err(error) => failed = failed.or(Some(error)),
                },
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        failed.map_or(Ok(removed), Err)
    }

    /// Removes what a dead engine left: artifacts of ours that no manifest needs.
    pub(super) async fn collect_orphans(&self) -> Result<usize> {
        let sandboxes: BTreeSet<SandboxId> = self.store.with(|index| {
            let forked = index.sandboxes.values().filter_map(|sandbox| sandbox.record.forked_from.as_ref());
            // Of these the store may know nothing else any more.
            let owners = forked.flat_map(|from| from.owners.iter());
            index.sandboxes.keys().chain(owners).cloned().collect()
        });
        let mut found = BTreeMap::new();
        for id in &sandboxes {
            found.extend(self.existing(id).await?);
        }
        self.collect(found).await
    }

    /// All artifacts that exist under a sandbox's name.
    pub(super) async fn existing(&self, id: &SandboxId) -> Result<BTreeMap<Key, Artifact>> {
        let mut found = BTreeMap::new();
        for backend in self.backends() {
            let (backend, id) = (backend.clone(), id.clone());
            let limit = self.options.deadlines.host;
            let listed = call("list artifacts", limit, async move { backend.list(&id).await }).await?;
            found.extend(listed.into_iter().map(|artifact| (key(&artifact), artifact)));
        }
        Ok(found)
    }
}
