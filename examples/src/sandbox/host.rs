//! [`SandboxHost`] for this sandbox: what an orchestrator writes for its own.

use std::collections::HashMap;
use std::sync::Arc;

use async_trait::async_trait;
use crab_core::{Condition, Error, ErrorKind, External, InheritedFd, Result, SandboxHost, SandboxId};
use parking_lot::Mutex;

use super::launch::{Config, Sandbox};

/// The sandboxes of this process.
#[derive(Debug, Default)]
pub struct ExampleHost {
    sandboxes: Mutex<HashMap<SandboxId, Arc<Sandbox>>>,
}

impl ExampleHost {
    /// A host without sandboxes.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Launches a sandbox and keeps it.
    ///
    /// # Errors
    /// As [`Sandbox::launch`].
    pub fn launch(&self, config: Config) -> Result<Arc<Sandbox>> {
        Ok(self.keep(Sandbox::launch(config)?))
    }

    /// Makes a sandbox in which nothing lives yet, and keeps it: what a version of another one is restored into.
    ///
    /// # Errors
    /// As [`Sandbox::prepare`].
    pub fn prepare(&self, config: Config) -> Result<Arc<Sandbox>> {
        Ok(self.keep(Sandbox::prepare(config)?))
    }

    /// Keeps a sandbox that was launched or attached elsewhere.
    pub fn keep(&self, sandbox: Sandbox) -> Arc<Sandbox> {
        let sandbox = Arc::new(sandbox);
        self.sandboxes.lock().insert(sandbox.id(), Arc::clone(&sandbox));
        sandbox
    }

    /// A sandbox of this host.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] where it has none of this name.
    pub fn get(&self, id: &SandboxId) -> Result<Arc<Sandbox>> {
        self.sandboxes.lock().get(id).cloned().ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("this host has no sandbox {id}")).fix("launch or attach it first")
        })
    }

    /// Forgets a sandbox. It is destroyed when the last user lets go, unless it is detached.
    pub fn forget(&self, id: &SandboxId) {
        self.sandboxes.lock().remove(id);
    }

    /// Runs work that waits for the kernel where waiting harms nobody.
    async fn blocking<T: Send + 'static>(
        &self,
        id: &SandboxId,
        work: impl FnOnce(&Sandbox) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let sandbox = self.get(id)?;
        tokio::task::spawn_blocking(move || work(&sandbox))
            .await
            .map_err(|e| Error::new(ErrorKind::Internal, "a call of the sandbox's host broke off").caused_by(e))?
    }
}

#[async_trait]
impl SandboxHost for ExampleHost {
    async fn describe(&self, id: &SandboxId) -> Result<crab_core::Sandbox> {
        self.blocking(id, |sandbox| Ok(sandbox.describe())).await
    }

    async fn freeze(&self, id: &SandboxId) -> Result<()> {
        self.blocking(id, Sandbox::freeze).await
    }

    async fn thaw(&self, id: &SandboxId) -> Result<()> {
        self.blocking(id, Sandbox::thaw).await
    }

    async fn kill(&self, id: &SandboxId) -> Result<()> {
        self.blocking(id, Sandbox::kill).await
    }

    async fn condition(&self, id: &SandboxId) -> Result<Condition> {
        self.blocking(id, Sandbox::condition).await
    }

    async fn inherit(&self, id: &SandboxId, external: &[External]) -> Result<Vec<InheritedFd>> {
        let external = external.to_vec();
        self.blocking(id, move |sandbox| sandbox.inherit(&external)).await
    }

    async fn adopt(&self, id: &SandboxId, init: u32) -> Result<()> {
        self.blocking(id, move |sandbox| sandbox.adopt(init)).await
    }

    async fn relaunch(&self, id: &SandboxId) -> Result<()> {
        self.blocking(id, Sandbox::relaunch).await
    }
}
