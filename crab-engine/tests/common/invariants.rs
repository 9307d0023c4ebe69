//! The function that checks what must hold at any time, for every world that can be looked at. `tests/invariants.rs`
//! tests it.

use std::collections::BTreeSet;
use std::sync::Arc;

use crab_core::memory::MemoryWorld;
use crab_core::{ArtifactId, CheckpointBackend, Condition, Domain, Half, SandboxId};
use crab_engine::Engine;

pub type Key = (Domain, SandboxId, ArtifactId);

/// A world, looked at from outside.
pub trait Observed: Sync {
    fn condition_of(&self, id: &SandboxId) -> Condition;
    /// All artifacts that exist.
    fn artifacts(&self) -> Vec<Key>;
    fn backend(&self, domain: Domain) -> Arc<dyn CheckpointBackend>;
}

impl Observed for MemoryWorld {
    fn condition_of(&self, id: &SandboxId) -> Condition {
        self.condition_of(id)
    }
    fn artifacts(&self) -> Vec<Key> {
        self.artifacts()
    }
    fn backend(&self, domain: Domain) -> Arc<dyn CheckpointBackend> {
        self.backend(domain)
    }
}

/// What must hold whenever no call is under way, whatever went wrong before. Says what does not.
pub async fn violations(world: &dyn Observed, engine: &Engine) -> Vec<String> {
    let mut wrong = Vec::new();
    let sandboxes = engine.sandboxes();
    let existing: BTreeSet<Key> = world.artifacts().into_iter().collect();
    let mut named: BTreeSet<Key> = BTreeSet::new();
    for sandbox in &sandboxes {
        // Nothing stays frozen.
        if world.condition_of(&sandbox.id) == Condition::Frozen {
            wrong.push(format!("{} is frozen", sandbox.id));
        }
        let versions = engine.versions(&sandbox.id);
        if !versions.is_sorted_by(|a, b| a.version < b.version) {
            wrong.push(format!("{}: the versions are out of order", sandbox.id));
        }
        for manifest in &versions {
            // Every version is whole.
            for artifact in manifest.artifacts() {
                named.insert((artifact.domain, artifact.sandbox.clone(), artifact.id.clone()));
                for below in &artifact.depends_on {
                    let below = (artifact.domain, artifact.sandbox.clone(), below.clone());
                    if !existing.contains(&below) {
                        wrong.push(format!("{} {}: {below:?} is gone", sandbox.id, manifest.version));
                    }
                    named.insert(below);
                }
                let backend: Arc<dyn CheckpointBackend> = world.backend(artifact.domain);
                if let Err(error) = backend.verify(artifact).await {
                    wrong.push(format!("{} {}: {error}", sandbox.id, manifest.version));
                }
            }
            if !matches!(manifest.filesystem, Half::Stored(_)) {
                wrong.push(format!("{} {} holds no files", sandbox.id, manifest.version));
            }
            if manifest.parent.is_some_and(|parent| parent >= manifest.version) {
                wrong.push(format!("{} {} is older than its parent", sandbox.id, manifest.version));
            }
        }
        if versions.is_empty() != sandbox.standing.is_none() {
            wrong.push(format!("{}: {} versions, standing {:?}", sandbox.id, versions.len(), sandbox.standing));
        }
    }
    // Nothing is left that no version needs.
    let unfinished: BTreeSet<SandboxId> =
        sandboxes.iter().filter(|s| s.unfinished.is_some()).map(|s| s.id.clone()).collect();
    for artifact in existing {
        if !named.contains(&artifact) && !unfinished.contains(&artifact.1) {
            wrong.push(format!("{artifact:?} belongs to no version"));
        }
    }
    wrong
}

pub async fn assert_sound(world: &dyn Observed, engine: &Engine, context: &str) {
    let wrong = violations(world, engine).await;
    assert!(wrong.is_empty(), "{context}: {wrong:#?}");
}
