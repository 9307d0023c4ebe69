//! The in-memory world passes the suites that the real parts pass, and the suites notice a part that breaks a rule.
#![cfg(feature = "conformance")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use async_trait::async_trait;
use crab_core::conformance::{self, BackendFixture, DeltaFixture, HostFixture};
use crab_core::memory::MemoryWorld;
use crab_core::{
    Artifact, Capabilities, CaptureRequest, Captured, CheckpointBackend, Domain, RestoreTarget, Restored, Result,
    SandboxHost, SandboxId, StateDelta,
};

/// Everything in memory completes at once, so one poll is enough.
fn run(future: impl Future<Output = ()>) {
    let mut future = std::pin::pin!(future);
    assert!(matches!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(())));
}

struct Fixture {
    world: MemoryWorld,
    domain: Domain,
    broken: bool,
    next: AtomicU64,
}

impl Fixture {
    fn new(domain: Domain) -> Self {
        Self { world: MemoryWorld::new(), domain, broken: false, next: AtomicU64::new(1) }
    }

    fn name(&self) -> SandboxId {
        SandboxId::new(format!("box-{}", self.next.fetch_add(1, Ordering::Relaxed))).unwrap()
    }

    fn make(&self) -> SandboxId {
        let id = self.name();
        self.world.create(&id);
        id
    }
}

#[async_trait]
impl BackendFixture for Fixture {
    fn backend(&self) -> Arc<dyn CheckpointBackend> {
        let whole = self.world.backend(self.domain);
        if self.broken { Arc::new(NeverRemoves(whole)) } else { whole }
    }
    fn host(&self) -> Arc<dyn SandboxHost> {
        Arc::new(self.world.clone())
    }
    async fn sandbox(&self) -> SandboxId {
        self.make()
    }
    async fn set(&self, id: &SandboxId, value: u64) {
        match self.domain {
            Domain::Filesystem => self.world.write(id, "/value", &value.to_string()).unwrap(),
            Domain::Process => self.world.remember(id, "server", &value.to_string()).unwrap(),
        }
    }
    async fn get(&self, id: &SandboxId) -> Option<u64> {
        match self.domain {
            Domain::Filesystem => self.world.files(id).get("/value")?.parse().ok(),
            Domain::Process => self.world.processes(id).get("server")?.parse().ok(),
        }
    }
    async fn fork_target(&self, _from: &SandboxId) -> Option<SandboxId> {
        let id = self.name();
        self.world.create_stopped(&id);
        Some(id)
    }
    async fn rootless_target(&self, from: &SandboxId) -> Option<SandboxId> {
        self.fork_target(from).await
    }
}

#[async_trait]
impl DeltaFixture for Fixture {
    fn delta(&self) -> Arc<dyn StateDelta> {
        Arc::new(self.world.clone())
    }
    fn host(&self) -> Arc<dyn SandboxHost> {
        Arc::new(self.world.clone())
    }
    async fn sandbox(&self) -> SandboxId {
        self.make()
    }
    async fn change(&self, id: &SandboxId, domain: Domain) {
        let value = self.next.fetch_add(1, Ordering::Relaxed).to_string();
        match domain {
            Domain::Filesystem => self.world.write(id, "/value", &value).unwrap(),
            Domain::Process => self.world.remember(id, "server", &value).unwrap(),
        }
    }
}

#[async_trait]
impl HostFixture for Fixture {
    fn host(&self) -> Arc<dyn SandboxHost> {
        Arc::new(self.world.clone())
    }
    async fn sandbox(&self) -> SandboxId {
        self.make()
    }
}

/// A backend that breaks one rule.
struct NeverRemoves(Arc<dyn CheckpointBackend>);

#[async_trait]
impl CheckpointBackend for NeverRemoves {
    fn name(&self) -> &str {
        self.0.name()
    }
    fn domain(&self) -> Domain {
        self.0.domain()
    }
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }
    async fn recover(&self) -> Result<()> {
        self.0.recover().await
    }
    async fn capture(&self, request: CaptureRequest<'_>) -> Result<Box<dyn Captured>> {
        self.0.capture(request).await
    }
    async fn verify(&self, artifact: &Artifact) -> Result<()> {
        self.0.verify(artifact).await
    }
    async fn restore(&self, artifact: &Artifact, target: RestoreTarget) -> Result<Restored> {
        self.0.restore(artifact, target).await
    }
    async fn remove(&self, _artifact: &Artifact) -> Result<()> {
        Ok(())
    }
    async fn list(&self, id: &SandboxId) -> Result<Vec<Artifact>> {
        self.0.list(id).await
    }
}

#[test]
fn the_memory_filesystem_backend_conforms() {
    run(conformance::backend(&Fixture::new(Domain::Filesystem)));
}

#[test]
fn the_memory_process_backend_conforms() {
    run(conformance::backend(&Fixture::new(Domain::Process)));
}

#[test]
fn the_memory_delta_conforms() {
    run(conformance::delta(&Fixture::new(Domain::Filesystem)));
}

#[test]
fn the_memory_host_conforms() {
    run(conformance::host(&Fixture::new(Domain::Filesystem)));
}

#[test]
#[should_panic(expected = "listed")]
fn the_suite_notices_a_backend_that_does_not_remove() {
    let fixture = Fixture { broken: true, ..Fixture::new(Domain::Filesystem) };
    run(conformance::a_removed_artifact_is_gone_and_removal_repeats(&fixture));
}
