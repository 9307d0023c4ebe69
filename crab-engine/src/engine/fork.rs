//! Another sandbox from a version, while the first runs on.

use std::sync::Arc;
use std::time::Instant;

use crab_core::{
    Condition, Error, ErrorKind, Manifest, OperationId, Origin, RestoreTarget, Result, SandboxId, VersionId,
};

use super::calls::{blocking, call};
use super::events::EventKind;
use super::lineage::Select;
use super::{Engine, Inner, checkpoint, detached, names};
use crate::report::RestoreReport;
use crate::store::{ForkedFrom, Operation, OperationKind, Outcome, SandboxRecord};

/// How a fork is done.
#[derive(Clone, Debug, Default)]
pub struct ForkOptions {
    /// Names the fork. The same name again finishes a fork that was cut off, or returns its report.
    pub operation: Option<OperationId>,
}

impl Engine {
    /// Makes another sandbox, `into`, from a version of `from`, and attaches it. `from` is not touched and may run.
    ///
    /// The host knows `into` already: described, stopped, with a root, a cgroup and namespaces of its own. Before its
    /// tasks resume the host is called with [`prepare_fork`](crab_core::SandboxHost::prepare_fork), where it gives the
    /// fork an identity and randomness of its own. The fork's version 1 shares the artifacts, which stay until neither
    /// needs them.
    ///
    /// Dropping the future does not stop the fork.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where the backends cannot fork; [`ErrorKind::AlreadyExists`] where the store knows
    /// `into`; [`ErrorKind::Busy`] where `into` has tasks; as for [`restore`](Self::restore). The same operation may
    /// be asked for again.
    pub async fn fork(
        &self,
        from: &SandboxId,
        version: VersionId,
        into: &SandboxId,
        options: ForkOptions,
    ) -> Result<RestoreReport> {
        let (inner, from, into) = (self.0.clone(), from.clone(), into.clone());
        detached("fork", async move { inner.fork(&from, version, &into, options).await }).await
    }
}

impl Inner {
    async fn fork(
        self: &Arc<Self>,
        from: &SandboxId,
        version: VersionId,
        into: &SandboxId,
        options: ForkOptions,
    ) -> Result<RestoreReport> {
        self.check_open()?;
        let begun = Instant::now();
        let name = match options.operation {
            Some(operation) => operation,
            None => names::operation()?,
        };
        let kind = OperationKind::Fork { from: from.clone() };
        if from == into {
            return Err(Error::new(ErrorKind::InvalidInput, "a sandbox cannot be forked into itself").fix("restore it"));
        }
        // Both, in the order of their names, so that two forks never wait for each other. The source's is held until
        // the fork names its artifacts: a removal of the version waits for that.
        let (source_lock, into_lock) = (self.work_lock(from), self.work_lock(into));
        let (source, _exclusive) = if from < into {
            let source = source_lock.lock().await;
            (source, into_lock.lock().await)
        } else {
            let exclusive = into_lock.lock().await;
            (source_lock.lock().await, exclusive)
        };
        if let Some(report) = self.known(&name, into, &kind)? {
            return Ok(report);
        }
        match self.fork_exclusively(from, version, into, name, kind, source).await {
            Ok(report) => {
                self.emit(into, EventKind::Forked { report: Arc::new(report.clone()), took: begun.elapsed() });
                Ok(report)
            }
            Err(error) => Err(self.with_condition(into, error).await),
        }
    }

    async fn fork_exclusively(
        self: &Arc<Self>,
        from: &SandboxId,
        version: VersionId,
        into: &SandboxId,
        name: OperationId,
        kind: OperationKind,
        source: tokio::sync::MutexGuard<'_, ()>,
    ) -> Result<RestoreReport> {
        let unfinished = self.store.with(|index| index.operations.get(&name).cloned());
        let version = unfinished.as_ref().map_or(version, |operation| operation.version);
        if unfinished.is_none() && self.store.with(|index| index.sandboxes.contains_key(into)) {
            return Err(Error::new(ErrorKind::AlreadyExists, format!("the store knows a sandbox {into}"))
                .fix("name another, or forget that one"));
        }
        let (manifest, _) = self.choose(from, Select::Version(version), false, None).await?;
        for artifact in manifest.artifacts() {
            let backend = self.backend_of(artifact)?;
            if !backend.capabilities().forks {
                let message = format!("the backend {:?} cannot fork the {}", backend.name(), artifact.domain);
                return Err(Error::new(ErrorKind::Unsupported, message));
            }
        }
        let sandbox = self.describe(into).await?;
        self.fits(&manifest, &sandbox, None).await?;
        if unfinished.is_none() {
            let (host, owned) = (self.host.clone(), into.clone());
            let limit = self.options.deadlines.host;
            let condition = call("ask for the condition", limit, async move { host.condition(&owned).await }).await?;
            if condition != Condition::Stopped {
                return Err(Error::new(ErrorKind::Busy, format!("{into} has tasks")).condition(condition));
            }
        }
        let operation = match unfinished {
            Some(operation) => operation,
            None => {
                let operation = Operation {
                    id: name,
                    sandbox: into.clone(),
                    kind,
                    version,
                    keep: None,
                    last_turn: manifest.turn,
                    more_turns: false,
                    standing: None,
                    passed_over: Vec::new(),
                    sequence: self.store.with(|index| {
                        index.operations.values().map(|operation| operation.sequence).max().unwrap_or(0) + 1
                    }),
                    outcome: None,
                };
                self.put_operation(operation.clone()).await?;
                operation
            }
        };
        self.step("fork.recorded")?;
        let first = self.name_shared(from, &manifest, into).await?;
        drop(source);
        self.step("fork.named")?;
        // After a crash in the middle it may be running.
        self.kill(into).await?;
        let target = RestoreTarget {
            sandbox,
            operation: names::attempt(&operation.id)?,
            keep_replaced: None,
            inherited: Vec::new(),
            deadline: Instant::now().checked_add(self.options.deadlines.restore),
        };
        self.restore_half(&first.filesystem, target).await?;
        self.step("fork.files")?;
        self.prepare_fork(into, from, version).await?;
        self.step("fork.prepared")?;
        let process = self.bring_back(into, &first, &operation.id).await?;
        self.step("fork.started")?;
        let report = RestoreReport {
            operation: operation.id.clone(),
            sandbox: into.clone(),
            version: first.version,
            turn: first.turn,
            conversation: first.conversation,
            process,
            replaced: None,
            lost: None,
            passed_over: Vec::new(),
            effects: Vec::new(),
        };
        let lives = matches!(report.process, crate::ProcessOutcome::Restored { .. }) | self.rewatch(into).await;
        self.finish_operation(operation, Outcome::Done(report.clone())).await?;
        self.install(into, true, lives);
        Ok(report)
    }

    /// The host's own work on a fork that has files and no tasks.
    async fn prepare_fork(&self, into: &SandboxId, from: &SandboxId, version: VersionId) -> Result<()> {
        let sandbox = self.describe(into).await?;
        let (host, from) = (self.host.clone(), from.clone());
        let prepared = call("prepare the fork", self.options.deadlines.host, async move {
            host.prepare_fork(&sandbox, &from, version).await
        });
        prepared.await.map_err(|error| match error.sandbox_condition() {
            Some(_) => error,
            None => error.condition(Condition::Stopped),
        })
    }

    /// Makes the fork's first version, which shares the artifacts: from then on they are needed twice.
    async fn name_shared(&self, from: &SandboxId, source: &Manifest, into: &SandboxId) -> Result<Arc<Manifest>> {
        let known = self.store.with(|index| {
            let sandbox = index.sandboxes.get(into)?;
            sandbox.versions.first_key_value().map(|(_, manifest)| manifest.clone())
        });
        if let Some(first) = known {
            return Ok(first);
        }
        let owners = source.artifacts().map(|artifact| artifact.sandbox.clone()).collect();
        let forked_from = Some(ForkedFrom { sandbox: from.clone(), version: source.version, owners });
        self.put_record(into, SandboxRecord { forked_from, ..SandboxRecord::default() }).await?;
        let first = Arc::new(Manifest {
            sandbox: into.clone(),
            version: VersionId(1),
            parent: None,
            origin: Origin::Fork { sandbox: from.clone(), version: source.version },
            created_ms: checkpoint::now_ms(),
            ..source.clone()
        });
        let (store, manifest) = (self.store.clone(), first.clone());
        blocking("write the fork's manifest", move || store.put_version(manifest))
            .await?
            .map_err(|(error, _)| error)?;
        Ok(first)
    }
}
