//! An engine on the in-memory world, and the function that checks what must hold at any time.

#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crab_core::memory::MemoryWorld;
use crab_core::{
    Boundary, CheckpointBackend, Condition, Domain, Gate, GateHold, Half, Manifest, SandboxId, Turn, TurnNumber,
    Verdict, VersionId,
};
use crab_engine::{Deadlines, Engine, EngineBuilder, Event, EventKind};

pub fn id(name: &str) -> SandboxId {
    SandboxId::new(name).unwrap()
}

pub struct Fixture {
    pub world: MemoryWorld,
    pub dir: tempfile::TempDir,
    pub id: SandboxId,
}

/// Deadlines that a test can wait for.
pub fn short() -> Deadlines {
    let short = Duration::from_millis(150);
    Deadlines { host: short, capture: short, persist: short, restore: short }
}

pub fn builder(world: &MemoryWorld, store: &Path) -> EngineBuilder {
    Engine::builder(store)
        .filesystem(world.backend(Domain::Filesystem))
        .process(world.backend(Domain::Process))
        .host(Arc::new(world.clone()))
        .delta(Arc::new(world.clone()))
        .deadlines(short())
}

impl Fixture {
    pub fn new() -> Self {
        let world = MemoryWorld::new();
        let id = id("box");
        world.create(&id);
        Self { world, dir: tempfile::tempdir().unwrap(), id }
    }

    pub fn store(&self) -> PathBuf {
        self.dir.path().join("store")
    }

    pub fn builder(&self) -> EngineBuilder {
        builder(&self.world, &self.store())
    }

    /// An engine with the sandbox attached.
    pub async fn engine(&self) -> Engine {
        let engine = self.builder().open().await.unwrap();
        engine.attach(&self.id).await.unwrap();
        engine
    }

    /// A turn of the sandbox whose answer waits at once.
    pub async fn turn(&self, engine: &Engine, number: u64) -> Verdict {
        turn(engine, &self.id, number).await
    }

    /// A turn that must be covered.
    pub async fn covered(&self, engine: &Engine, number: u64) -> VersionId {
        match self.turn(engine, number).await {
            Verdict::Durable(version) => version,
            other => panic!("turn {number}: {other:?}"),
        }
    }
}

/// A boundary whose answer does not wait yet.
pub async fn boundary(engine: &Engine, id: &SandboxId, number: u64) -> GateHold {
    let (gate, hold) = Gate::new();
    engine.turn(Boundary { turn: Turn::new(id.clone(), TurnNumber(number)), gate }).await;
    hold
}

pub async fn turn(engine: &Engine, id: &SandboxId, number: u64) -> Verdict {
    let mut hold = boundary(engine, id, number).await;
    hold.answer_waiting();
    hold.verdict().await
}

/// Waits until the engine and what it started are gone, and the store is free.
pub async fn close(engine: Engine) {
    engine.close().await;
    drop(engine);
    tokio::time::sleep(Duration::from_millis(5)).await;
}

/// Opens again, waiting for the old owner's tasks to end.
pub async fn reopen(make: impl Fn() -> EngineBuilder) -> Engine {
    for _ in 0..400 {
        match make().open().await {
            Ok(engine) => return engine,
            Err(error) if error.kind() == crab_core::ErrorKind::Busy => {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
            Err(error) => panic!("{error}"),
        }
    }
    panic!("the store stays held");
}

/// Every file below a directory with its content.
pub fn files_below(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut found = BTreeMap::new();
    let mut todo = vec![dir.to_owned()];
    while let Some(dir) = todo.pop() {
        for entry in std::fs::read_dir(dir).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                todo.push(path);
            } else {
                let content = std::fs::read(&path).unwrap();
                found.insert(path, content);
            }
        }
    }
    found
}

pub fn drain(events: &mut crab_engine::Events) -> Vec<Event> {
    let mut all = Vec::new();
    while let Some(event) = events.try_next() {
        all.push(event.unwrap());
    }
    all
}

pub fn kinds(events: &[Event]) -> Vec<&'static str> {
    events
        .iter()
        .map(|event| match event.kind {
            EventKind::Attached { .. } => "attached",
            EventKind::Detached => "detached",
            EventKind::Decided { .. } => "decided",
            EventKind::Queued { .. } => "queued",
            EventKind::Promoted { .. } => "promoted",
            EventKind::Frozen => "frozen",
            EventKind::Thawed { .. } => "thawed",
            EventKind::Durable { .. } => "durable",
            EventKind::Skipped { .. } => "skipped",
            EventKind::Retrying { .. } => "retrying",
            EventKind::Failed { .. } => "failed",
            EventKind::Restored { .. } => "restored",
            EventKind::Forked { .. } => "forked",
            EventKind::Removed { .. } => "removed",
            _ => "other",
        })
        .collect()
}

/// What must hold whenever no call is under way, whatever went wrong before. Says what does not.
pub async fn violations(world: &MemoryWorld, engine: &Engine) -> Vec<String> {
    let mut wrong = Vec::new();
    let sandboxes = engine.sandboxes();
    let mut named: BTreeSet<(Domain, SandboxId, crab_core::ArtifactId)> = BTreeSet::new();
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
    for artifact in world.artifacts() {
        if !named.contains(&artifact) && !unfinished.contains(&artifact.1) {
            wrong.push(format!("{artifact:?} belongs to no version"));
        }
    }
    wrong
}

pub async fn assert_sound(world: &MemoryWorld, engine: &Engine, context: &str) {
    let wrong = violations(world, engine).await;
    assert!(wrong.is_empty(), "{context}: {wrong:#?}");
}

/// What a restore of this version brings back, by restoring it.
pub fn newest(engine: &Engine, id: &SandboxId) -> Manifest {
    engine.versions(id).into_iter().next_back().unwrap()
}
