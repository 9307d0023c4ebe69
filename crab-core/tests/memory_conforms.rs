//! The in-memory world passes the suites that the real parts pass, and the suites notice a part that breaks a rule.
#![cfg(feature = "conformance")]
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::future::Future;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use async_trait::async_trait;
use crab_core::conformance::model::{acts, play};
use crab_core::conformance::{self, BackendFixture, DeltaFixture, HostFixture};
use crab_core::memory::MemoryWorld;
use crab_core::{
    Artifact, ArtifactId, ByteStream, Capabilities, CaptureRequest, Captured, CheckpointBackend, Domain, ExportRequest,
    FileChanges, ImportRequest, RestoreTarget, Restored, Result, ResumeToken, SandboxHost, SandboxId, Space,
    StateDelta,
};
use proptest::prelude::*;

/// Everything in memory completes at once, so one poll is enough.
fn run(future: impl Future<Output = ()>) {
    let mut future = std::pin::pin!(future);
    assert!(matches!(future.as_mut().poll(&mut Context::from_waker(Waker::noop())), Poll::Ready(())));
}

struct Fixture {
    world: MemoryWorld,
    domain: Domain,
    /// Whether the backend is in a wrapper, and whether that hands removals on.
    wrapped: Option<bool>,
    next: AtomicU64,
}

impl Fixture {
    fn new(domain: Domain) -> Self {
        Self { world: MemoryWorld::new(), domain, wrapped: None, next: AtomicU64::new(1) }
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
        match self.wrapped {
            None => whole,
            Some(removes) => Arc::new(Wrapper { inner: whole, removes }),
        }
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

/// A backend around another one, as one that counts or limits calls is. It can break one rule.
struct Wrapper {
    inner: Arc<dyn CheckpointBackend>,
    removes: bool,
}

#[async_trait]
impl CheckpointBackend for Wrapper {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn domain(&self) -> Domain {
        self.inner.domain()
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    async fn recover(&self) -> Result<()> {
        self.inner.recover().await
    }
    async fn capture(&self, request: CaptureRequest<'_>) -> Result<Box<dyn Captured>> {
        self.inner.capture(request).await
    }
    async fn verify(&self, artifact: &Artifact) -> Result<()> {
        self.inner.verify(artifact).await
    }
    async fn restore(&self, artifact: &Artifact, target: RestoreTarget) -> Result<Restored> {
        self.inner.restore(artifact, target).await
    }
    async fn remove(&self, artifact: &Artifact) -> Result<()> {
        if self.removes { self.inner.remove(artifact).await } else { Ok(()) }
    }
    async fn list(&self, id: &SandboxId) -> Result<Vec<Artifact>> {
        self.inner.list(id).await
    }
    fn tree(&self, artifact: &Artifact) -> Option<PathBuf> {
        self.inner.tree(artifact)
    }
    async fn diff(&self, from: &Artifact, to: &Artifact) -> Result<Box<dyn FileChanges>> {
        self.inner.diff(from, to).await
    }
    async fn space(&self, artifact: &Artifact) -> Result<Space> {
        self.inner.space(artifact).await
    }
    async fn export(&self, request: ExportRequest<'_>) -> Result<Box<dyn ByteStream>> {
        self.inner.export(request).await
    }
    async fn import(&self, request: ImportRequest<'_>) -> Result<Artifact> {
        self.inner.import(request).await
    }
    async fn resume_token(&self, sandbox: &SandboxId, artifact: &ArtifactId) -> Result<Option<ResumeToken>> {
        self.inner.resume_token(sandbox, artifact).await
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
fn a_wrapper_conforms() {
    for domain in [Domain::Filesystem, Domain::Process] {
        run(conformance::backend(&Fixture { wrapped: Some(true), ..Fixture::new(domain) }));
    }
}

proptest! {
    #[test]
    fn any_sequence_does_what_the_model_does(acts in acts(), files: bool, wrapped: bool) {
        let domain = if files { Domain::Filesystem } else { Domain::Process };
        run(play(&Fixture { wrapped: wrapped.then_some(true), ..Fixture::new(domain) }, &acts));
    }
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
    let fixture = Fixture { wrapped: Some(false), ..Fixture::new(Domain::Filesystem) };
    run(conformance::a_removed_artifact_is_gone_and_removal_repeats(&fixture));
}
