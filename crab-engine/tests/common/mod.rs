//! An engine on the in-memory world.

#![allow(dead_code, unreachable_pub, reason = "each test file uses a part of it")]

pub mod invariants;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crab_core::memory::MemoryWorld;
use crab_core::{Boundary, Domain, Gate, GateHold, Manifest, SandboxId, Turn, TurnNumber, Verdict, VersionId};
use crab_engine::{Deadlines, Engine, EngineBuilder, Event, EventKind};
#[allow(unused_imports, reason = "each test file uses a part of it")]
pub use invariants::{assert_sound, violations};

pub fn id(name: &str) -> SandboxId {
    SandboxId::new(name).unwrap()
}

pub struct Fixture {
    pub world: MemoryWorld,
    pub dir: tempfile::TempDir,
    pub id: SandboxId,
}

/// Memory where there is, so that tests do not wait for a disk.
fn scratch() -> tempfile::TempDir {
    let fast = Path::new("/dev/shm");
    if fast.is_dir() { tempfile::tempdir_in(fast) } else { tempfile::tempdir() }.unwrap()
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
        Self { world, dir: scratch(), id }
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

/// What a restore of this version brings back, by restoring it.
pub fn newest(engine: &Engine, id: &SandboxId) -> Manifest {
    engine.versions(id).into_iter().next_back().unwrap()
}
