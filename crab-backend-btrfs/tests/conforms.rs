//! The suite that every backend passes.
#![allow(clippy::unwrap_used, reason = "these are tests")]

mod support;

use std::fs;
use std::sync::Arc;

use async_trait::async_trait;
use crab_core::conformance::{self, BackendFixture};
use crab_core::{CheckpointBackend, SandboxHost, SandboxId};
use support::{FileHost, Pool, Quotas};

struct Fixture {
    backend: Arc<dyn CheckpointBackend>,
    host: Arc<FileHost>,
}

#[async_trait]
impl BackendFixture for Fixture {
    fn backend(&self) -> Arc<dyn CheckpointBackend> {
        Arc::clone(&self.backend)
    }
    fn host(&self) -> Arc<dyn SandboxHost> {
        Arc::clone(&self.host) as Arc<dyn SandboxHost>
    }
    async fn sandbox(&self) -> SandboxId {
        self.host.add(true)
    }
    async fn set(&self, id: &SandboxId, value: u64) {
        fs::write(self.host.pool.root(id).join("value"), value.to_string()).unwrap();
    }
    async fn get(&self, id: &SandboxId) -> Option<u64> {
        fs::read_to_string(self.host.pool.root(id).join("value")).ok()?.parse().ok()
    }
    async fn fork_target(&self, _from: &SandboxId) -> Option<SandboxId> {
        Some(self.host.add(false))
    }
    async fn rootless_target(&self, _from: &SandboxId) -> Option<SandboxId> {
        Some(self.host.add(false))
    }
}

async fn conforms(pool: Pool) {
    let fixture = Fixture { backend: Arc::new(pool.backend()), host: Arc::new(FileHost::new(pool)) };
    conformance::backend(&fixture).await;
}

#[tokio::test]
async fn the_backend_conforms() {
    let Some(pool) = Pool::new() else { return };
    conforms(pool).await;
}

#[tokio::test]
async fn the_backend_conforms_where_full_quota_groups_are_on() {
    let Some(pool) = Pool::new() else { return };
    pool.count(Quotas::Full);
    conforms(pool).await;
}

#[tokio::test]
async fn the_backend_conforms_where_simple_quota_groups_are_on() {
    let Some(pool) = Pool::new() else { return };
    pool.count(Quotas::Simple);
    conforms(pool).await;
}
