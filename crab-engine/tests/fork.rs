//! What the host gives a fork before any of its tasks runs.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;
use common::{Fixture, assert_sound, builder, id};
use crab_core::memory::MemoryWorld;
use crab_core::{
    Condition, Error, ErrorKind, External, InheritedFd, OperationId, Result, Sandbox, SandboxHost, SandboxId, VersionId,
};
use crab_engine::ForkOptions;

/// A host that gives forks an identity, and fails at that as often as it is told to.
struct Host {
    world: MemoryWorld,
    failures: AtomicUsize,
    /// For each call: of which sandbox and version the fork is, its condition, and how many processes it had.
    prepared: Mutex<Vec<(SandboxId, VersionId, Condition, usize)>>,
}

#[async_trait]
impl SandboxHost for Host {
    async fn prepare_fork(&self, fork: &Sandbox, from: &SandboxId, version: VersionId) -> Result<()> {
        let processes = self.world.processes(&fork.id).len();
        self.prepared.lock().unwrap().push((from.clone(), version, self.world.condition_of(&fork.id), processes));
        if self.failures.load(Ordering::Relaxed) > 0 {
            self.failures.fetch_sub(1, Ordering::Relaxed);
            return Err(Error::new(ErrorKind::Io, "no machine id is left"));
        }
        self.world.write_from_outside(&fork.id, "/etc/machine-id", fork.id.as_str())
    }
    async fn describe(&self, id: &SandboxId) -> Result<Sandbox> {
        self.world.describe(id).await
    }
    async fn freeze(&self, id: &SandboxId) -> Result<()> {
        self.world.freeze(id).await
    }
    async fn thaw(&self, id: &SandboxId) -> Result<()> {
        self.world.thaw(id).await
    }
    async fn kill(&self, id: &SandboxId) -> Result<()> {
        self.world.kill(id).await
    }
    async fn condition(&self, id: &SandboxId) -> Result<Condition> {
        self.world.condition(id).await
    }
    async fn inherit(&self, id: &SandboxId, external: &[External]) -> Result<Vec<InheritedFd>> {
        self.world.inherit(id, external).await
    }
    async fn adopt(&self, id: &SandboxId, init: u32) -> Result<()> {
        self.world.adopt(id, init).await
    }
    async fn relaunch(&self, id: &SandboxId) -> Result<()> {
        self.world.relaunch(id).await
    }
}

#[tokio::test]
async fn the_host_gives_a_fork_its_own_identity_when_its_files_are_there_and_no_task_is() {
    let f = Fixture::new();
    let host = Arc::new(Host { world: f.world.clone(), failures: AtomicUsize::new(1), prepared: Mutex::default() });
    let engine = builder(&f.world, &f.store()).host(Arc::clone(&host) as _).open().await.unwrap();
    engine.attach(&f.id).await.unwrap();
    f.world.write(&f.id, "/etc/machine-id", "of the source").unwrap();
    f.world.remember(&f.id, "server", "1").unwrap();
    f.covered(&engine, 1).await;
    let into = id("fork");
    f.world.create_stopped(&into);

    let named = || ForkOptions { operation: Some(OperationId::new("fork-it").unwrap()) };
    let failed = engine.fork(&f.id, VersionId(1), &into, named()).await.unwrap_err();
    assert!(failed.to_string().contains("no machine id is left"), "{failed}");
    assert_eq!(failed.sandbox_condition(), Some(Condition::Stopped));
    assert_eq!(f.world.condition_of(&into), Condition::Stopped);

    engine.fork(&f.id, VersionId(1), &into, named()).await.unwrap();
    let seen = (f.id.clone(), VersionId(1), Condition::Stopped, 0);
    assert_eq!(*host.prepared.lock().unwrap(), [seen.clone(), seen]);
    assert_eq!(f.world.files(&into)["/etc/machine-id"], "fork");
    assert_eq!(f.world.processes(&into)["server"], "1");
    assert_eq!(f.world.files(&f.id)["/etc/machine-id"], "of the source");
    assert_sound(&f.world, &engine, "").await;
}
