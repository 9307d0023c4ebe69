//! The engine. See [`Engine`].

mod artifacts;
mod attached;
mod builder;
mod calls;
mod checkpoint;
mod diff;
mod dispatch;
mod events;
mod fork;
mod freeze;
mod lineage;
mod marks;
mod meters;
mod names;
mod options;
mod prune;
mod request;
mod restore;
mod sizes;

use std::collections::{BTreeSet, HashMap};
use std::panic::AssertUnwindSafe;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crab_core::{
    Boundary, Change, CheckpointBackend, Condition, Delta, Effects, Error, ErrorKind, Manifest, OperationId, Rebase,
    Result, Sandbox, SandboxHost, SandboxId, StateDelta, Token, Turn, TurnBoundary, Unknown, Verdict, VersionId,
};
use futures_util::FutureExt;
use parking_lot::Mutex;
use tokio::sync::{broadcast, oneshot};
use tokio::task::JoinSet;
use tracing::Instrument;

use crate::policy::{Plan, Policy};
use crate::retention::Retention;
use crate::store::{Damaged, OperationKind, SandboxRecord, Store};
use attached::Attached;
use calls::{blocking, call, panicked};
use diff::Readers;
use dispatch::Dispatch;
use options::Options;
use request::Request;

pub use builder::EngineBuilder;
pub use diff::{ProcessChange, ProcessChangeKind, ProcessDiff, VersionDiff};
pub use events::{Event, EventKind, Events, Lagged};
pub use fork::ForkOptions;
pub use lineage::Select;
pub use options::{Deadlines, FailurePolicy};
pub use prune::{PruneReport, VersionInfo};
pub use restore::RestoreOptions;

/// Schedules, takes and restores the checkpoints of a host's sandboxes, and keeps them in a store that it alone owns.
///
/// Clones share one engine. It lives until the last clone and its running jobs are gone; then the store is free for
/// another. All calls must be made within a tokio runtime with time enabled. Dropping the future of a call does not
/// undo what it began: checkpoints, restores and forks go on to their end on their own.
///
/// ```no_run
/// # async fn example(files: std::sync::Arc<dyn crab_core::CheckpointBackend>,
/// #     processes: std::sync::Arc<dyn crab_core::CheckpointBackend>,
/// #     host: std::sync::Arc<dyn crab_core::SandboxHost>, inspector: std::sync::Arc<dyn crab_core::StateDelta>,
/// #     boundaries: impl crab_core::TurnBoundary) -> crab_core::Result<()> {
/// use crab_core::SandboxId;
/// use crab_engine::{Engine, RestoreOptions, Select};
///
/// let engine = Engine::builder("/var/lib/crab/store")
///     .filesystem(files)
///     .process(processes)
///     .host(host)
///     .delta(inspector)
///     .open()
///     .await?;
/// let id = SandboxId::new("box-1")?;
/// engine.attach(&id).await?;
/// engine.drive(boundaries).await;
/// // Later, when the sandbox died:
/// let report = engine.restore(&id, Select::Latest, RestoreOptions::default()).await?;
/// println!("back at turn {}", report.turn);
/// # Ok(()) }
/// ```
#[derive(Clone, Debug)]
pub struct Engine(Arc<Inner>);

pub(crate) struct Inner {
    store: Arc<Store>,
    filesystem: Arc<dyn CheckpointBackend>,
    process: Option<Arc<dyn CheckpointBackend>>,
    host: Arc<dyn SandboxHost>,
    delta: Arc<dyn StateDelta>,
    policy: Arc<dyn Policy>,
    options: Options,
    retention: Option<Retention>,
    /// Sandboxes whose prune waits to begin.
    prunes: Mutex<BTreeSet<SandboxId>>,
    readers: Readers,
    measured: sizes::Measured,
    dispatch: Dispatch,
    attached: Mutex<HashMap<SandboxId, Arc<Attached>>>,
    /// Held by whoever works on a sandbox: a checkpoint, a restore, a removal.
    work: Mutex<HashMap<SandboxId, Arc<tokio::sync::Mutex<()>>>>,
    events: broadcast::Sender<Event>,
    closed: AtomicBool,
    report: OpenReport,
}

impl std::fmt::Debug for Inner {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Engine").field("store", &self.store.root()).finish_non_exhaustive()
    }
}

/// What was found when the store was opened.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct OpenReport {
    /// Files that were stepped over and left alone.
    pub damaged: Vec<Damaged>,
    /// Artifacts that a dead engine had left half made, now removed.
    pub orphans_removed: usize,
    /// Sandboxes of the store that were frozen and run again.
    pub thawed: Vec<SandboxId>,
    /// Sandboxes of the store that live: they are attached.
    pub attached: Vec<SandboxId>,
    /// Sandboxes of the store that have no tasks and a version: a restore of [`Select::Latest`] brings them back.
    pub died: Vec<SandboxId>,
    /// Sandboxes of the store that somebody [detached](Engine::detach): whether they live or not is nobody's business
    /// here until they are attached or restored.
    pub detached: Vec<SandboxId>,
    /// Sandboxes of the store that the host does not know or could not say anything about, and that are not attached.
    pub unreachable: Vec<(SandboxId, Error)>,
    /// Restores and forks that did not end. Asking for the same operation again finishes it.
    pub unfinished: Vec<Unfinished>,
}

/// A restore or fork that did not end.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Unfinished {
    /// Its name.
    pub operation: OperationId,
    /// The sandbox that it changes or makes.
    pub sandbox: SandboxId,
    /// The version that it puts in place. For a fork a version of `from`.
    pub version: VersionId,
    /// For a fork, the sandbox that it copies.
    pub from: Option<SandboxId>,
}

/// A sandbox that the store knows.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SandboxSummary {
    /// Its name.
    pub id: SandboxId,
    /// Whether the engine watches it now.
    pub attached: bool,
    /// The version that a restore of [`Select::Latest`] brings back.
    pub standing: Option<VersionId>,
    /// How many whole versions it has.
    pub versions: usize,
    /// Its restore or fork that did not end.
    pub unfinished: Option<OperationId>,
}

impl Engine {
    /// Begins to build an engine on a store directory, which is made where it does not exist.
    pub fn builder(store: impl AsRef<Path>) -> EngineBuilder {
        EngineBuilder::new(store.as_ref())
    }

    /// What was found when the store was opened.
    #[must_use]
    pub fn opened(&self) -> &OpenReport {
        &self.0.report
    }

    /// The sandboxes that the store knows, in order of their names.
    #[must_use]
    pub fn sandboxes(&self) -> Vec<SandboxSummary> {
        let attached = self.0.attached.lock();
        self.0.store.with(|index| {
            let unfinished = |id: &SandboxId| {
                let mut operations = index.operations.values();
                operations.find(|op| op.sandbox == *id && op.outcome.is_none()).map(|op| op.id.clone())
            };
            let summary = |(id, sandbox): (&SandboxId, &crate::store::SandboxIndex)| SandboxSummary {
                id: id.clone(),
                attached: attached.contains_key(id),
                standing: lineage::standing(sandbox).map(|manifest| manifest.version),
                versions: sandbox.versions.len(),
                unfinished: unfinished(id),
            };
            index.sandboxes.iter().map(summary).collect()
        })
    }

    /// The versions of a sandbox, oldest first; none where the store does not know it.
    #[must_use]
    pub fn versions(&self, id: &SandboxId) -> Vec<Manifest> {
        self.0.store.with(|index| {
            let sandbox = index.sandboxes.get(id);
            sandbox.map(|sandbox| sandbox.versions.values().map(|m| Manifest::clone(m)).collect()).unwrap_or_default()
        })
    }

    /// The events from now on. A subscriber that falls more than 4096 events behind loses the oldest.
    #[must_use]
    pub fn events(&self) -> Events {
        Events(self.0.events.subscribe())
    }

    /// Begins to watch a sandbox. It is thawed, in case a dead engine left it frozen. Its first turn makes a version
    /// of everything, since what happened before is not known. A sandbox of the store goes on with its versions.
    /// Attaching an attached sandbox begins anew, for example after the host relaunched it.
    ///
    /// # Errors
    /// What the host says where it knows no such sandbox; [`ErrorKind::Died`] where nothing runs in it though its
    /// newest version holds processes: it is to be restored, or relaunched first; [`ErrorKind::Busy`] where a restore of it did not end;
    /// [`ErrorKind::TimedOut`]; errors of the store.
    pub async fn attach(&self, id: &SandboxId) -> Result<()> {
        let (inner, id) = (self.0.clone(), id.clone());
        detached("attach", async move {
            inner.check_open()?;
            let lock = inner.work_lock(&id);
            let _exclusive = lock.lock().await;
            inner.attach(&id).await
        })
        .await
    }

    /// Stops watching a sandbox. What waits for it is cancelled, what has begun is waited for. Its versions stay. It is
    /// not attached again when the store is opened. Does nothing where it is not attached.
    ///
    /// # Errors
    /// Errors of the store: it is detached all the same, but will be attached again when the store is opened.
    pub async fn detach(&self, id: &SandboxId) -> Result<()> {
        let (inner, id) = (self.0.clone(), id.clone());
        detached("detach", async move { inner.detach(&id, true).await }).await
    }

    /// Handles all boundaries of a source, each as soon as it comes, until the source ends and every turn is decided.
    /// Verdicts go through the gates. No more turns are taken from the source at once than
    /// [may wait](crate::scheduler::Limits::waiting).
    pub async fn drive(&self, mut boundaries: impl TurnBoundary) {
        let most = self.0.options.limits.waiting.max(1);
        let mut turns = JoinSet::new();
        loop {
            tokio::select! {
                boundary = boundaries.next(), if turns.len() < most => match boundary {
                    Some(boundary) => {
                        let engine = self.clone();
                        turns.spawn(async move { engine.turn(boundary).await });
                    }
                    None => break,
                },
                // A panic in there was reported; its gate has failed.
                Some(_) = turns.join_next() => {}
            }
        }
        while turns.join_next().await.is_some() {}
    }

    /// Handles one boundary. Returns when it is decided: the gate is open since nothing changed, or a checkpoint is
    /// queued, or the gate has failed. The verdict goes through the gate.
    pub async fn turn(&self, boundary: Boundary) {
        let begun = Instant::now();
        let span = tracing::info_span!(
            "turn",
            sandbox = %boundary.turn.sandbox,
            turn = boundary.turn.number.0,
            plan = tracing::field::Empty,
            outcome = tracing::field::Empty,
            version = tracing::field::Empty,
        );
        self.0.turn(boundary, begun).instrument(span).await;
    }

    /// Makes a version of what the sandbox is now, or gives the standing one where nothing changed.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] where it is not attached; whatever made the checkpoint fail twice.
    pub async fn checkpoint(&self, id: &SandboxId) -> Result<Manifest> {
        let inner = &self.0;
        inner.check_open()?;
        let attached = inner.attached(id)?;
        let delta = inner.take(id).await;
        // Nothing changed may be found at the cut as well; here it decides only for which worker it waits.
        let plan = attached.plan(inner, &delta);
        let (reply, answer) = oneshot::channel();
        let request = Request::of_call(Turn::new(id.clone(), attached.last_turn()), attached, reply);
        inner.submit(request, plan, true, None).map_err(|refused| refused.1)?;
        match answer.await {
            Ok(Ok(manifest)) => Ok(Manifest::clone(&manifest)),
            Ok(Err(error)) => Err(Error::clone(&error)),
            Err(_) => Err(Error::new(ErrorKind::Cancelled, "the engine was closed")),
        }
    }

    /// Takes over a version that another engine made, as a sandbox is moved to another host: its artifacts are in this
    /// engine's backends already, such as imported ones, and `manifest` names them. A restore brings it back.
    ///
    /// Artifacts that no version names are removed when a store is opened: import them after that.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`] where the store has that version; [`ErrorKind::Busy`] where the sandbox is attached;
    /// [`ErrorKind::NotFound`] and [`ErrorKind::Corrupt`] where an artifact is missing or damaged; nothing is changed then.
    pub async fn adopt(&self, manifest: Manifest) -> Result<()> {
        let inner = self.0.clone();
        detached("adopt", async move {
            inner.check_open()?;
            let id = manifest.sandbox.clone();
            let lock = inner.work_lock(&id);
            let _exclusive = lock.lock().await;
            if inner.attached.lock().contains_key(&id) {
                return Err(Error::new(ErrorKind::Busy, format!("{id} is attached")).fix("detach it first"));
            }
            inner.verify(&manifest, None).await?;
            if !inner.store.with(|index| index.sandboxes.contains_key(&id)) {
                inner.put_record(&id, SandboxRecord::default()).await?;
            }
            let store = inner.store.clone();
            blocking("write the manifest", move || store.put_version(Arc::new(manifest)))
                .await?
                .map_err(|(error, _)| error)
        })
        .await
    }

    /// Removes everything that the store knows of a sandbox that is not attached: versions, artifacts, record. Where the
    /// process dies meanwhile, or it fails, some of that may be left, and the sandbox is still known: ask again.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] where it is attached or a fork of it did not end; [`ErrorKind::Corrupt`] where files of it
    /// cannot be read: the whole ones are gone then, the others are left; what a backend says that cannot remove an
    /// artifact.
    pub async fn forget(&self, id: &SandboxId) -> Result<()> {
        let (inner, id) = (self.0.clone(), id.clone());
        detached("forget", async move {
            inner.check_open()?;
            let lock = inner.work_lock(&id);
            let _exclusive = lock.lock().await;
            inner.forget(&id).await
        })
        .await
    }

    /// Accepts nothing more, cancels what waits and returns when what has begun has ended. The store is free when
    /// the last clone of the engine is gone as well.
    pub async fn close(&self) {
        self.0.closed.store(true, Ordering::Release);
        let ids: Vec<SandboxId> = self.0.attached.lock().keys().cloned().collect();
        for id in ids {
            // Nothing is written, so nothing fails.
            let _ = self.0.detach(&id, false).await;
        }
        while !self.0.dispatch.is_idle() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }

    /// Whether a write to stable storage failed: no more versions are made until the store is opened anew.
    #[must_use]
    pub fn is_poisoned(&self) -> bool {
        self.0.store.is_poisoned()
    }
}

/// Runs to its end even where the caller stops waiting.
async fn detached<T: Send + 'static>(what: &str, work: impl Future<Output = Result<T>> + Send + 'static) -> Result<T> {
    match tokio::spawn(work.in_current_span()).await {
        Ok(result) => result,
        Err(failed) if failed.is_panic() => Err(panicked(what, &*failed.into_panic())),
        Err(_) => Err(Error::new(ErrorKind::Cancelled, format!("{what}: the runtime shuts down"))),
    }
}

/// A delta in one line.
pub(crate) fn describe_delta(delta: &Delta) -> String {
    format!("files {}; processes {}", delta.filesystem, delta.process)
}

/// What a sandbox of the store is when the store is opened.
enum Found {
    Lives,
    Died,
    Detached,
    /// The business of an operation that did not end, or nothing that could be brought back.
    Other,
}

impl Inner {
    fn emit(&self, id: &SandboxId, kind: EventKind) {
        // Nobody may be listening.
        let _ = self.events.send(Event { sandbox: id.clone(), kind });
    }

    fn step(&self, name: &'static str) -> Result<()> {
        self.store.steps().reach(name)
    }

    fn check_open(&self) -> Result<()> {
        if self.closed.load(Ordering::Acquire) {
            return Err(Error::new(ErrorKind::Cancelled, "the engine was closed"));
        }
        Ok(())
    }

    fn work_lock(&self, id: &SandboxId) -> Arc<tokio::sync::Mutex<()>> {
        let mut work = self.work.lock();
        if let Some(lock) = work.get(id) {
            return lock.clone();
        }
        // Only what nobody holds or waits for may go: two locks of one sandbox would be none.
        work.retain(|_, lock| Arc::strong_count(lock) > 1);
        work.entry(id.clone()).or_default().clone()
    }

    fn attached(&self, id: &SandboxId) -> Result<Arc<Attached>> {
        self.attached.lock().get(id).cloned().ok_or_else(|| {
            Error::new(ErrorKind::NotFound, format!("the sandbox {id} is not attached")).fix("attach or restore it")
        })
    }

    fn next_version(&self, id: &SandboxId) -> VersionId {
        self.store.with(|index| index.sandboxes.get(id).map_or(VersionId(1), |sandbox| sandbox.next_version()))
    }

    /// What changed. A delta source that fails, panics or hangs makes everything unknown.
    async fn take(&self, id: &SandboxId) -> Delta {
        let taken = AssertUnwindSafe(self.delta.take(id)).catch_unwind();
        let why = match tokio::time::timeout(self.options.deadlines.host, taken).await {
            Ok(Ok(delta)) => {
                meters::unknown(&delta);
                return delta;
            }
            Ok(Err(payload)) => panicked("the delta source", &*payload).to_string(),
            Err(_) => "the delta source did not answer in time".to_owned(),
        };
        let delta = Delta {
            filesystem: Change::Unknown(Unknown::Failed(why.clone())),
            process: Change::Unknown(Unknown::Failed(why)),
            effects: Effects::default(),
            // Older than any: it never re-bases.
            token: Token(0),
        };
        meters::unknown(&delta);
        delta
    }

    /// Never fails: a source that does not take the new base sees more changes than there are.
    async fn rebase(&self, id: &SandboxId, base: Rebase) {
        let (delta, owned) = (self.delta.clone(), id.clone());
        let limit = self.options.deadlines.host;
        let rebased = call("re-base the delta", limit, async move {
            delta.rebase(&owned, &base).await;
            Ok(())
        });
        if let Err(error) = rebased.await {
            tracing::warn!(sandbox = %id, "the next turn will seem to change more than it did: {error}");
        }
    }

    async fn describe(&self, id: &SandboxId) -> Result<Sandbox> {
        let (host, id) = (self.host.clone(), id.clone());
        call("describe the sandbox", self.options.deadlines.host, async move { host.describe(&id).await }).await
    }

    /// Says in an error what condition the sandbox is in, where it does not say it yet.
    async fn with_condition(&self, id: &SandboxId, error: Error) -> Error {
        if error.sandbox_condition().is_some() {
            return error;
        }
        let (host, id) = (self.host.clone(), id.clone());
        let asked =
            call("ask for the condition", self.options.deadlines.host, async move { host.condition(&id).await });
        error.condition(asked.await.unwrap_or(Condition::Unknown))
    }

    async fn watch(&self, sandbox: Sandbox) -> Result<()> {
        let delta = self.delta.clone();
        call("watch the sandbox", self.options.deadlines.host, async move { delta.attach(&sandbox).await }).await
    }

    async fn forget_watch(&self, id: &SandboxId) {
        let (delta, owned) = (self.delta.clone(), id.clone());
        let detached = call("stop watching", self.options.deadlines.host, async move {
            delta.detach(&owned).await;
            Ok(())
        });
        if let Err(error) = detached.await {
            tracing::warn!(sandbox = %id, "{error}");
        }
    }

    /// Looks after the sandboxes of the store: thaws what a dead engine left frozen in the middle of a capture, attaches
    /// what lives, and says what does not. All at once, so that one host call that hangs costs its deadline once.
    async fn take_over(&self) -> OpenReport {
        let ids: Vec<SandboxId> = self.store.with(|index| index.sandboxes.keys().cloned().collect());
        let taken = futures_util::future::join_all(ids.iter().map(|id| self.take_over_one(id))).await;
        let mut report = OpenReport::default();
        for (id, taken) in ids.into_iter().zip(taken) {
            match taken {
                Ok((thawed, found)) => {
                    if thawed {
                        tracing::warn!(sandbox = %id, "thawed: an engine died in the middle of a capture");
                        report.thawed.push(id.clone());
                    }
                    match found {
                        Found::Died => report.died.push(id),
                        Found::Lives => report.attached.push(id),
                        Found::Detached => report.detached.push(id),
                        Found::Other => {}
                    }
                }
                Err(error) => {
                    tracing::debug!(sandbox = %id, "not taken over: {error}");
                    report.unreachable.push((id, error));
                }
            }
        }
        report
    }

    /// Whether it had been frozen, and what it is.
    async fn take_over_one(&self, id: &SandboxId) -> Result<(bool, Found)> {
        let (host, owned) = (self.host.clone(), id.clone());
        let (thawed, condition) = call("thaw what was left frozen", self.options.deadlines.host, async move {
            let condition = host.condition(&owned).await?;
            if condition == Condition::Frozen {
                host.thaw(&owned).await?;
            }
            Ok((condition == Condition::Frozen, condition))
        })
        .await?;
        let (unfinished, left, has_versions) = self.store.with(|index| {
            let unfinished = index.operations.values().any(|op| op.sandbox == *id && op.outcome.is_none());
            let sandbox = index.sandboxes.get(id);
            let left = sandbox.is_some_and(|sandbox| sandbox.record.detached);
            (unfinished, left, sandbox.is_some_and(|sandbox| !sandbox.versions.is_empty()))
        });
        let found = match condition {
            _ if unfinished => Found::Other,
            _ if left => Found::Detached,
            Condition::Stopped if has_versions => Found::Died,
            Condition::Stopped => Found::Other,
            _ => {
                self.attach(id).await?;
                Found::Lives
            }
        };
        Ok((thawed, found))
    }

    /// Attaches while the work lock is held.
    async fn attach(&self, id: &SandboxId) -> Result<()> {
        let unfinished = self.store.with(|index| {
            let mut operations = index.operations.values();
            operations.find(|op| op.sandbox == *id && op.outcome.is_none()).map(|op| op.id.clone())
        });
        if let Some(operation) = unfinished {
            return Err(Error::new(ErrorKind::Busy, format!("the operation {operation} on {id} did not end"))
                .fix("ask for the same operation again, or for another restore"));
        }
        let sandbox = self.describe(id).await?;
        let (host, owned) = (self.host.clone(), id.clone());
        call("thaw", self.options.deadlines.host, async move { host.thaw(&owned).await }).await?;
        let lives = sandbox.init.is_some();
        let saved = self.store.with(|index| {
            let standing = index.sandboxes.get(id).and_then(lineage::standing);
            standing.is_some_and(|manifest| manifest.process.artifact().is_some())
        });
        if saved && !lives {
            return Err(attached::died(id));
        }
        self.record(id).await?;
        self.watch(sandbox).await?;
        self.install(id, false, lives);
        Ok(())
    }

    /// Makes the sandbox known to the store, as one that is attached, before anything of it is captured.
    async fn record(&self, id: &SandboxId) -> Result<()> {
        let (record, recorded) = self.store.with(|index| {
            let sandbox = index.sandboxes.get(id);
            (sandbox.map(|sandbox| sandbox.record.clone()), sandbox.is_some_and(|sandbox| sandbox.recorded))
        });
        let record = record.unwrap_or_default();
        if recorded && !record.detached {
            return Ok(());
        }
        self.put_record(id, SandboxRecord { detached: false, ..record }).await
    }

    /// Stops watching. With `lasting` it is written down for the next time that the store is opened.
    async fn detach(self: &Arc<Self>, id: &SandboxId, lasting: bool) -> Result<()> {
        if self.attached.lock().remove(id).is_none() {
            return Ok(());
        }
        self.cancel(id, "the sandbox was detached");
        let lock = self.work_lock(id);
        let _exclusive = lock.lock().await;
        // Somebody may have attached it anew while we waited.
        if self.attached.lock().contains_key(id) {
            return Ok(());
        }
        self.forget_watch(id).await;
        let record = self.store.with(|index| index.sandboxes.get(id).map(|sandbox| sandbox.record.clone()));
        let written = match record {
            Some(record) if lasting => self.put_record(id, SandboxRecord { detached: true, ..record }).await,
            _ => Ok(()),
        };
        self.emit(id, EventKind::Detached);
        written.map_err(|error| error.while_doing(format!("{id} is detached, which may not last")))
    }

    async fn put_record(&self, id: &SandboxId, record: SandboxRecord) -> Result<()> {
        let (store, id) = (self.store.clone(), id.clone());
        blocking("write the sandbox's record", move || store.put_sandbox(&id, record)).await?
    }

    /// Turns of the sandbox are accepted from now on. Those that were seen before a restore are not: `anew` tells them
    /// apart.
    fn install(&self, id: &SandboxId, anew: bool, lives: bool) {
        let (standing, last) = self.store.with(|index| {
            let sandbox = index.sandboxes.get(id);
            let standing = sandbox.and_then(|sandbox| lineage::standing(sandbox).cloned());
            (standing, sandbox.map(lineage::last_turn).unwrap_or(crab_core::TurnNumber(0)))
        });
        let version = standing.as_ref().map(|manifest| manifest.version);
        let mut attached = self.attached.lock();
        // Turns that no version covers are not in the store.
        let last = attached.get(id).map_or(last, |before| last.max(before.last_turn()));
        if anew || !attached.contains_key(id) {
            attached.insert(id.clone(), Arc::new(Attached::new(standing, last, lives)));
        } else if let Some(before) = attached.get(id) {
            before.begin_anew(lives);
        }
        drop(attached);
        self.emit(id, EventKind::Attached { standing: version });
    }

    async fn turn(self: &Arc<Self>, boundary: Boundary, begun: Instant) {
        let Boundary { turn, gate } = boundary;
        let (id, number) = (turn.sandbox.clone(), turn.number);
        let refuse = |error: Error| {
            let error = Arc::new(error);
            meters::turn("failed");
            self.emit(&id, EventKind::Failed { turn: number, error: error.clone(), released: false });
            error
        };
        let attached = match self.check_open().and_then(|()| self.attached(&id)) {
            Ok(attached) => attached,
            Err(error) => return gate.decide(Verdict::Failed(refuse(error))),
        };
        attached.saw_turn(number);
        let delta = self.take(&id).instrument(tracing::info_span!("decide")).await;
        let plan = attached.plan(self, &delta);
        tracing::Span::current().record("plan", plan.label());
        // Looked up after the delta was taken: it can only be the delta's base or a later version.
        let standing = attached.standing();
        tracing::debug!(plan = plan.label(), "decided: {}", describe_delta(&delta));
        self.emit(&id, EventKind::Decided { turn: number, plan, delta: describe_delta(&delta) });
        if !self.is_current(&id, &attached) {
            let gone = Error::new(ErrorKind::Cancelled, format!("{id} was restored or detached meanwhile")).retry();
            return gate.decide(Verdict::Failed(refuse(gone)));
        }
        let (exposure, opener) = gate.split();
        let request = Request::of_boundary(turn, attached.clone(), begun, opener);
        if let (Plan::SKIP, Some(standing)) = (plan, standing) {
            let (hidden, exposed) = request.times();
            request.skipped(standing.version);
            meters::turn("skip");
            meters::gate(hidden, exposed);
            self.emit(&id, EventKind::Skipped { turn: number, version: standing.version, hidden, exposed });
            return;
        }
        let wait = attached.defer(self, &delta);
        if !wait.is_zero() {
            meters::turn("deferred");
            request.deferred(
                Error::new(ErrorKind::Busy, format!("the policy lets turn {number} wait {wait:?} for its version"))
                    .retry(),
            );
            self.emit(&id, EventKind::Deferred { turn: number, wait });
            self.checkpoint_later(id, attached, plan, wait);
            return;
        }
        if let Err(refused) = self.submit(request, plan, false, Some(exposure)) {
            let (request, error) = *refused;
            self.fail(vec![request], &Arc::new(error), true);
        }
    }

    /// Makes the version of deferred turns when they have waited long enough. One for all of them.
    fn checkpoint_later(self: &Arc<Self>, id: SandboxId, attached: Arc<Attached>, plan: Plan, wait: Duration) {
        if !attached.promise_deferred() {
            return;
        }
        // Not held by what only waits: a closed engine lets go of its store.
        let inner = Arc::downgrade(self);
        let due = async move {
            tokio::time::sleep(wait).await;
            let Some(inner) = inner.upgrade() else { return };
            attached.keep_promise();
            if inner.check_open().is_err() || !inner.is_current(&id, &attached) {
                return;
            }
            let request = Request::of_deferred(Turn::new(id, attached.last_turn()), attached);
            if let Err(refused) = inner.submit(request, plan, false, None) {
                let (request, error) = *refused;
                inner.fail(vec![request], &Arc::new(error), true);
            }
        };
        tokio::spawn(due);
    }

    fn is_current(&self, id: &SandboxId, attached: &Arc<Attached>) -> bool {
        self.attached.lock().get(id).is_some_and(|current| Arc::ptr_eq(current, attached))
    }

    async fn forget(&self, id: &SandboxId) -> Result<()> {
        if self.attached.lock().contains_key(id) {
            return Err(Error::new(ErrorKind::Busy, format!("{id} is attached")).fix("detach it first"));
        }
        let forked = self.store.with(|index| {
            let mut open = index.operations.values().filter(|operation| operation.outcome.is_none());
            open.find(|op| matches!(&op.kind, OperationKind::Fork { from } if from == id)).map(|op| op.sandbox.clone())
        });
        if let Some(fork) = forked {
            return Err(Error::new(ErrorKind::Busy, format!("a fork of {id} into {fork} did not end"))
                .fix(format!("finish it, or forget {fork} first")));
        }
        // The standing one last: what a crash leaves has one.
        let versions: Vec<VersionId> = self.store.with(|index| {
            let Some(sandbox) = index.sandboxes.get(id) else { return Vec::new() };
            let standing = lineage::standing(sandbox).map(|manifest| manifest.version);
            let others = sandbox.versions.keys().copied().filter(|version| Some(*version) != standing);
            others.chain(standing).collect()
        });
        let names = versions.iter().map(|version| (id.clone(), *version)).collect();
        let Some(_removing) = self.readers.remove(names) else {
            return Err(
                Error::new(ErrorKind::Busy, format!("a version of {id} is being read")).fix("drop what reads it first")
            );
        };
        let (mut before, operations) = self.store.with(|index| {
            let manifests = index.sandboxes.get(id).into_iter().flat_map(|sandbox| sandbox.versions.values());
            let operations: Vec<OperationId> =
                index.operations.values().filter(|op| op.sandbox == *id).map(|op| op.id.clone()).collect();
            (artifacts::needed(manifests.map(AsRef::as_ref)), operations)
        });
        let (store, owned) = (self.store.clone(), id.clone());
        // What an earlier attempt left is in no manifest any more.
        before.extend(self.existing(id).await?);
        blocking("forget a sandbox", move || {
            for operation in operations {
                store.remove_operation(&operation)?;
            }
            // One by one, as any other, so that no number is given again where the sandbox stays known.
            versions.iter().try_for_each(|version| store.remove_version(&owned, *version))
        })
        .await??;
        self.step("forget.unlisted")?;
        self.collect(before).await?;
        self.step("forget.collected")?;
        // Last: while the sandbox is known, what is left of it is found when the store is opened.
        let (store, owned) = (self.store.clone(), id.clone());
        blocking("forget a sandbox", move || store.remove_sandbox(&owned)).await?
    }
}
