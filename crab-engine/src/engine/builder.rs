//! Putting an engine together, and what happens when its store is opened.

use std::collections::{BTreeSet, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use crab_core::{CheckpointBackend, Domain, Error, ErrorKind, Result, SandboxHost, StateDelta};
use parking_lot::Mutex;
use tokio::sync::broadcast;

use super::calls::{blocking, call};
use super::diff::Readers;
use super::dispatch::Dispatch;
use super::options::{Deadlines, FailurePolicy, Options};
use super::sizes::Measured;
use super::{Engine, Inner, OpenReport, Unfinished, meters};
use crate::policy::{ChangedOnly, Policy};
use crate::retention::Retention;
use crate::scheduler::Limits;
use crate::steps::Steps;
use crate::store::{OperationKind, Store};

/// How many events a slow subscriber may fall behind.
const EVENTS: usize = 4096;

/// Collects the parts of an [`Engine`]. A filesystem backend, a host and a delta source are needed.
#[must_use]
pub struct EngineBuilder {
    store: PathBuf,
    filesystem: Option<Arc<dyn CheckpointBackend>>,
    process: Option<Arc<dyn CheckpointBackend>>,
    host: Option<Arc<dyn SandboxHost>>,
    delta: Option<Arc<dyn StateDelta>>,
    policy: Arc<dyn Policy>,
    options: Options,
    retention: Option<Retention>,
    steps: Steps,
}

impl EngineBuilder {
    pub(super) fn new(store: &Path) -> Self {
        Self {
            store: store.to_owned(),
            filesystem: None,
            process: None,
            host: None,
            delta: None,
            policy: Arc::new(ChangedOnly),
            options: Options::default(),
            retention: None,
            steps: Steps::default(),
        }
    }

    /// Saves the files.
    pub fn filesystem(mut self, backend: Arc<dyn CheckpointBackend>) -> Self {
        self.filesystem = Some(backend);
        self
    }

    /// Saves the processes. Without one, versions hold files alone, say so, and a restore relaunches the sandbox.
    pub fn process(mut self, backend: Arc<dyn CheckpointBackend>) -> Self {
        self.process = Some(backend);
        self
    }

    /// The owner of the sandboxes.
    pub fn host(mut self, host: Arc<dyn SandboxHost>) -> Self {
        self.host = Some(host);
        self
    }

    /// Sees what sandboxes change.
    pub fn delta(mut self, delta: Arc<dyn StateDelta>) -> Self {
        self.delta = Some(delta);
        self
    }

    /// Decides what is captured. By default [`ChangedOnly`].
    pub fn policy(mut self, policy: Arc<dyn Policy>) -> Self {
        self.policy = policy;
        self
    }

    /// How much runs and waits at once.
    pub fn limits(mut self, limits: Limits) -> Self {
        self.options.limits = limits;
        self
    }

    /// How many bytes a second all persists together may write on average, as far as the backends tell; what was not
    /// written is saved up for a second. Where that is exceeded further persists wait, urgent ones first in the row; one
    /// that has begun is not slowed down. By default there is no limit.
    pub fn persist_rate(mut self, bytes_per_second: u64) -> Self {
        self.options.bytes_per_second = Some(bytes_per_second);
        self
    }

    /// How long calls to the host and the backends may take.
    pub fn deadlines(mut self, deadlines: Deadlines) -> Self {
        self.options.deadlines = deadlines;
        self
    }

    /// What happens to an answer whose turn cannot be covered. By default [`FailurePolicy::Strict`].
    pub fn failure_policy(mut self, policy: FailurePolicy) -> Self {
        self.options.failure = policy;
        self
    }

    /// Prunes a sandbox by these rules after each of its new versions, in the background. Where quotas need sizes that
    /// must be measured, such as those of snapshots that share blocks, this takes at most a tenth of the time: until the
    /// next measurement what was measured last counts, and what is newer than that as nothing. A call of
    /// [`Engine::prune`] measures anew. By default nothing is removed but by that call and [`Engine::remove`].
    pub fn retention(mut self, retention: Retention) -> Self {
        self.retention = Some(retention);
        self
    }

    /// Calls `hook` at every step between two effects; its error becomes the step's.
    #[cfg(feature = "failpoints")]
    pub fn steps(mut self, hook: crate::StepHook) -> Self {
        self.steps = Steps::new(hook);
        self
    }

    /// Takes the store, lets the backends recover from what a dead engine left, removes its orphans, thaws the sandboxes
    /// of the store that it left frozen, and attaches those that live. [`Engine::opened`] names those that died, for the
    /// caller to [`restore`](Engine::restore). A sandbox that the host itself keeps frozen is thawed too: freeze it
    /// again afterwards.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where a part is missing or the directory is not a store; [`ErrorKind::Busy`] where
    /// another engine holds the store, saying which process; [`ErrorKind::Unsupported`] where a newer Crab made it;
    /// what a backend says that cannot recover. Nothing is held then.
    pub async fn open(self) -> Result<Engine> {
        let missing = |what: &str| Error::new(ErrorKind::InvalidInput, format!("the engine was given no {what}"));
        let filesystem = self.filesystem.ok_or_else(|| missing("filesystem backend"))?;
        let host = self.host.ok_or_else(|| missing("host"))?;
        let delta = self.delta.ok_or_else(|| missing("delta source"))?;
        let parts = [(Some(&filesystem), Domain::Filesystem), (self.process.as_ref(), Domain::Process)];
        for (backend, domain) in parts {
            if let Some(backend) = backend
                && backend.domain() != domain
            {
                let message = format!("the backend {:?} was given for the {domain} domain", backend.name());
                return Err(Error::new(ErrorKind::InvalidInput, message));
            }
        }
        let (root, steps) = (self.store, self.steps);
        let store = blocking("open the store", move || Store::open(&root, steps)).await??;
        let mut inner = Inner {
            store: Arc::new(store),
            filesystem,
            process: self.process,
            host,
            delta,
            policy: self.policy,
            options: self.options,
            retention: self.retention,
            prunes: Mutex::new(BTreeSet::new()),
            readers: Readers::default(),
            measured: Measured::default(),
            dispatch: Dispatch::new(self.options.limits, self.options.bytes_per_second),
            attached: Mutex::new(HashMap::new()),
            work: Mutex::new(HashMap::new()),
            events: broadcast::Sender::new(EVENTS),
            closed: AtomicBool::new(false),
            report: OpenReport::default(),
        };
        for backend in inner.backends() {
            let (backend, limit) = (backend.clone(), inner.options.deadlines.persist);
            call("recover", limit, async move { backend.recover().await }).await?;
        }
        // What cannot be removed now costs space, not safety; it is tried again at the next opening.
        let orphans_removed = inner.collect_orphans().await.unwrap_or_else(|error| {
            tracing::warn!("orphans stay for now: {error}");
            0
        });
        let taken = inner.take_over().await;
        inner.report = inner.store.with(|index| OpenReport {
            damaged: index.damaged.clone(),
            orphans_removed,
            unfinished: index
                .operations
                .values()
                .filter(|operation| operation.outcome.is_none())
                .map(|operation| Unfinished {
                    operation: operation.id.clone(),
                    sandbox: operation.sandbox.clone(),
                    version: operation.version,
                    from: match &operation.kind {
                        OperationKind::Restore => None,
                        OperationKind::Fork { from } => Some(from.clone()),
                    },
                })
                .collect(),
            ..taken
        });
        meters::opened(inner.report.damaged.len(), orphans_removed);
        Ok(Engine(Arc::new(inner)))
    }
}
