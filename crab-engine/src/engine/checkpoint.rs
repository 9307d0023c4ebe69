//! One job: capture at one cut, persist, manifest, re-base, open the gates.

use std::collections::BTreeMap;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use async_trait::async_trait;
use crab_core::{
    Artifact, ArtifactId, AtCut, CaptureRequest, Captured, CheckpointBackend, Condition, Delta, Error, ErrorKind, Half,
    HostFacts, MANIFEST_FORMAT, Manifest, NoCut, Origin, Prepared, Rebase, Result, Sandbox, SandboxId, Timings, Token,
    TurnNumber, VersionId,
};
use futures_util::FutureExt;
use parking_lot::Mutex;
use tracing::Instrument;

use super::attached::Attached;
use super::calls::{blocking, call, panicked};
use super::events::EventKind;
use super::freeze::Frozen;
use super::{Inner, artifacts, describe_delta, meters, names};
use crate::policy::Plan;
use crate::scheduler::{JobId, Lane};

/// What a job came to.
enum Done {
    /// At the cut nothing differed from the standing version.
    Clean(Arc<Manifest>),
    Made(Made),
}

struct Made {
    manifest: Arc<Manifest>,
    plan: Plan,
    delta: String,
    bytes: Option<u64>,
    /// What the new artifacts hold.
    size: Option<u64>,
}

/// What stands captured when the sandbox runs again.
struct Cut {
    /// When it was taken.
    at: Instant,
    delta: Delta,
    /// What had been seen of the processes when their image was whole. A dump lets them do things, such as system calls
    /// of CRIU's own code, that a restore need not bring back. For the files the delta's token stays the right one:
    /// they were captured during the dump, and somebody outside may have changed them since.
    dumped: Option<Token>,
    plan: Plan,
    filesystem: Option<Box<dyn Captured>>,
    process: ProcessCut,
    frozen: Duration,
    capture: Duration,
}

enum ProcessCut {
    /// Unchanged: the standing version's half.
    Standing,
    Captured(Box<dyn Captured>),
    Empty,
    Missing(String),
}

enum CutResult {
    Clean,
    /// A capture of files alone is not enough.
    NeedsProcess,
    Taken(Box<Cut>),
}

/// Runs a job that has begun to its end and gives the verdicts.
pub(super) async fn run(inner: Arc<Inner>, job: JobId, id: SandboxId, lane: Lane) {
    let span = inner.job_span(job, &id);
    let work = Work { inner: inner.clone(), job, id: id.clone() };
    let result = AssertUnwindSafe(work.all(lane).instrument(span))
        .catch_unwind()
        .await
        .unwrap_or_else(|payload| Err(panicked("checkpoint", &*payload)));
    let requests = inner.finish(job);
    let made = matches!(result, Ok(Done::Made(_)));
    match result {
        Ok(Done::Clean(manifest)) => {
            for request in requests {
                let (hidden, exposed) = request.times();
                let turn = request.turn.number;
                let boundary = request.boundary;
                if request.durable(&manifest) && boundary {
                    meters::turn("skip");
                    meters::gate(hidden, exposed);
                    inner.emit(&id, EventKind::Skipped { turn, version: manifest.version, hidden, exposed });
                }
            }
        }
        Ok(Done::Made(made)) => {
            let timings = made.manifest.timings;
            let frozen = Duration::from_micros(timings.frozen_us);
            meters::checkpoint(
                made.plan,
                frozen,
                Duration::from_micros(timings.capture_us),
                Duration::from_micros(timings.persist_us),
            );
            for request in requests {
                let (hidden, exposed) = request.times();
                let turn = request.turn.number;
                let boundary = request.boundary;
                let given = request.durable(&made.manifest);
                if boundary {
                    if given {
                        meters::turn("durable");
                        meters::gate(hidden, exposed);
                    }
                    inner.emit(
                        &id,
                        EventKind::Durable {
                            turn,
                            version: made.manifest.version,
                            plan: made.plan,
                            delta: made.delta.clone(),
                            hidden,
                            exposed,
                            frozen,
                            bytes: made.bytes,
                            size: made.size,
                        },
                    );
                }
            }
        }
        Err(error) => {
            meters::failure(error.kind());
            tracing::warn!(sandbox = %id, "the checkpoint failed: {error}");
            inner.fail(requests, &Arc::new(error), true);
        }
    }
    inner.release(job);
    if made {
        inner.prune_soon(&id);
    }
}

struct Work {
    inner: Arc<Inner>,
    job: JobId,
    id: SandboxId,
}

impl Work {
    async fn all(&self, mut lane: Lane) -> Result<Done> {
        let lock = self.inner.work_lock(&self.id);
        let _exclusive = match lock.try_lock() {
            Ok(held) => held,
            Err(_) => {
                // A restore or a prune of this sandbox may take long, and others want the worker.
                self.inner.step_aside(self.job);
                let held = lock.lock().await;
                self.inner.advance(self.job, lane, false).await?;
                held
            }
        };
        let attached = self.inner.attached(&self.id)?;
        self.inner.drop_stale(self.job, &self.id, &attached)?;
        let mut retried = false;
        loop {
            match self.attempt(&attached, lane).await {
                Ok(Some(done)) => return Ok(done),
                Ok(None) => {
                    lane = Lane::Process;
                    self.inner.advance(self.job, lane, false).await?;
                }
                Err(error) if !retried && is_worth_a_retry(&error) => {
                    retried = true;
                    meters::failure(error.kind());
                    tracing::warn!("the checkpoint failed and is tried once more: {error}");
                    self.inner.emit(&self.id, EventKind::Retrying { error: Arc::new(error) });
                    self.inner.advance(self.job, lane, true).await?;
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// One try. `None` where a capture of files alone turned out not to be enough.
    async fn attempt(&self, attached: &Arc<Attached>, lane: Lane) -> Result<Option<Done>> {
        let standing = attached.standing();
        let version = self.inner.next_version(&self.id);
        let artifact = names::artifact(version)?;
        let cut = match lane {
            Lane::Process => self.cut_frozen(attached, standing.as_deref(), &artifact).await?,
            Lane::Filesystem | Lane::Persist => self.cut_running(attached, standing.as_deref(), &artifact).await?,
        };
        match cut {
            CutResult::NeedsProcess => Ok(None),
            CutResult::Clean => match standing {
                Some(standing) => Ok(Some(Done::Clean(standing))),
                None => Err(Error::new(ErrorKind::Internal, "nothing was captured though no version stands")),
            },
            CutResult::Taken(cut) => {
                self.inner.step("checkpoint.captured")?;
                let waits = tracing::info_span!("queued");
                self.inner.advance(self.job, Lane::Persist, false).instrument(waits).await?;
                self.make(attached, standing, version, *cut).await.map(|made| Some(Done::Made(made)))
            }
        }
    }

    /// Files alone, while the sandbox runs. Looks before and after: what began to matter in between is noticed.
    async fn cut_running(
        &self,
        attached: &Attached,
        standing: Option<&Manifest>,
        artifact: &ArtifactId,
    ) -> Result<CutResult> {
        let inner = &self.inner;
        let before = inner.take(&self.id).await;
        let plan = attached.plan(inner, &before);
        if plan.is_skip() {
            return Ok(CutResult::Clean);
        }
        if plan.process {
            return Ok(CutResult::NeedsProcess);
        }
        let begun = Instant::now();
        let sandbox = self.describe_living(attached).await?;
        let process = if inner.process.is_some() {
            ProcessCut::Standing
        } else if sandbox.init.is_none() {
            ProcessCut::Empty
        } else {
            ProcessCut::Missing("this engine has no process backend".to_owned())
        };
        let parent = self.parent(standing, &inner.filesystem);
        let files = self.capture_files(&sandbox, artifact, parent, false).await?;
        let after = inner.take(&self.id).await;
        if inner.process.is_some() && attached.plan(inner, &after).process {
            discard(files, inner.options.deadlines.persist).await;
            return Ok(CutResult::NeedsProcess);
        }
        // The token of the look before the snapshot: what was seen between it and the snapshot counts as changed once
        // more, and nothing that came after the snapshot counts as saved.
        Ok(CutResult::Taken(Box::new(Cut {
            at: begun,
            delta: before,
            dumped: None,
            plan,
            filesystem: Some(files),
            process,
            frozen: Duration::ZERO,
            capture: begun.elapsed(),
        })))
    }

    /// Whatever is needed at one cut, with the sandbox frozen.
    async fn cut_frozen(
        &self,
        attached: &Attached,
        standing: Option<&Manifest>,
        artifact: &ArtifactId,
    ) -> Result<CutResult> {
        let inner = &self.inner;
        let begun = Instant::now();
        // Kept until the capture is over.
        let prepared = self.prepare(attached, artifact).await?;
        let frozen = Frozen::freeze(&inner.host, &self.id, inner.options.deadlines.host).await?;
        inner.emit(&self.id, EventKind::Frozen);
        let span = tracing::info_span!("frozen");
        let taken = match inner.step("checkpoint.frozen") {
            Ok(()) => AssertUnwindSafe(self.within_freeze(attached, standing, artifact).instrument(span.clone()))
                .catch_unwind()
                .await
                .unwrap_or_else(|payload| Err(panicked("capture", &*payload))),
            Err(error) => Err(error),
        };
        let thawed = frozen.thaw().instrument(span).await;
        if let Ok(frozen) = &thawed {
            inner.emit(&self.id, EventKind::Thawed { frozen: *frozen });
        }
        let failed = match (taken, thawed) {
            (Ok(Some(mut cut)), Ok(frozen)) => {
                cut.frozen = frozen.saturating_add(prepared.stopped_for());
                cut.capture = begun.elapsed();
                return Ok(CutResult::Taken(Box::new(cut)));
            }
            (Ok(None), Ok(_)) => return Ok(CutResult::Clean),
            (Ok(cut), Err(error)) => {
                if let Some(cut) = cut {
                    cut.discard(inner.options.deadlines.persist).await;
                }
                error
            }
            (Err(error), Ok(_)) if error.sandbox_condition().is_none() => error.condition(Condition::Running),
            (Err(error), Ok(_)) => error,
            // Both failed: what went wrong first, in the condition that the second left.
            (Err(error), Err(thaw)) => error.condition(thaw.sandbox_condition().unwrap_or(Condition::Frozen)),
        };
        Err(failed)
    }

    /// Lets the process backend do what it can before the freeze. A capture does without what fails here.
    async fn prepare(&self, attached: &Attached, artifact: &ArtifactId) -> Result<Prepared> {
        let inner = &self.inner;
        let Some(backend) = inner.process.as_ref().filter(|backend| backend.capabilities().prepares) else {
            return Ok(Prepared::nothing());
        };
        let (backend, artifact, limit) = (backend.clone(), artifact.clone(), inner.options.deadlines.capture);
        let sandbox = self.describe_living(attached).await?;
        if sandbox.init.is_none() {
            return Ok(Prepared::nothing());
        }
        let deadline = Instant::now().checked_add(limit);
        let prepared =
            call("prepare the capture", limit, async move { backend.prepare(&sandbox, &artifact, deadline).await })
                .instrument(tracing::info_span!("prepare"))
                .await;
        Ok(prepared.unwrap_or_else(|error| {
            tracing::warn!(sandbox = %self.id, "the freeze will be longer than it might be: {error}");
            Prepared::nothing()
        }))
    }

    /// `None` where nothing differs from the standing version after all.
    async fn within_freeze(
        &self,
        attached: &Attached,
        standing: Option<&Manifest>,
        artifact: &ArtifactId,
    ) -> Result<Option<Cut>> {
        let inner = &self.inner;
        let sandbox = self.describe_living(attached).await?;
        // This look decides: the sandbox ran on since the boundary.
        let delta = inner.take(&self.id).await;
        let plan = attached.plan(inner, &delta);
        if plan.is_skip() {
            return Ok(None);
        }
        let files_parent = self.parent(standing, &inner.filesystem);
        let cut = |plan, filesystem, process, dumped| {
            Some(Cut {
                at: Instant::now(),
                delta: delta.clone(),
                dumped,
                plan,
                filesystem,
                process,
                frozen: Duration::ZERO,
                capture: Duration::ZERO,
            })
        };
        let backend = match (&inner.process, plan.process) {
            (Some(backend), true) if sandbox.init.is_some() => backend.clone(),
            (process, wanted) => {
                let half = match (process, wanted) {
                    _ if sandbox.init.is_none() && (wanted || process.is_none()) => ProcessCut::Empty,
                    (None, _) => ProcessCut::Missing("this engine has no process backend".to_owned()),
                    _ => ProcessCut::Standing,
                };
                let files = match plan.filesystem {
                    true => Some(self.capture_files(&sandbox, artifact, files_parent, true).await?),
                    false => None,
                };
                return Ok(cut(plan, files, half, None));
            }
        };
        let process_parent = self.parent(standing, &backend);
        let slot = Slot::default();
        let paired = plan.filesystem.then(|| PairedFiles {
            backend: inner.filesystem.clone(),
            sandbox: sandbox.clone(),
            artifact: artifact.clone(),
            parent: files_parent.clone(),
            limit: inner.options.deadlines.capture,
            slot: slot.clone(),
        });
        let captured = self.capture_processes(backend, &sandbox, artifact, process_parent, paired).await;
        let mut files = slot.lock().take();
        let process = match captured {
            Ok(captured) => ProcessCut::Captured(captured),
            Err(error) if error.kind() == ErrorKind::NotCheckpointable => {
                // The files are still worth a version; still frozen, the cut is still one.
                tracing::warn!(sandbox = %self.id, "the processes cannot be saved: {error}");
                ProcessCut::Missing(error.to_string())
            }
            Err(error) => {
                if let Some(files) = files {
                    discard(files, inner.options.deadlines.persist).await;
                }
                return Err(error);
            }
        };
        if plan.filesystem && files.is_none() {
            if matches!(process, ProcessCut::Captured(_)) {
                let broken = Error::new(ErrorKind::Internal, "the process backend did not run what belongs at its cut");
                cut(plan, None, process, None).map(|cut| tokio::spawn(cut.discard(inner.options.deadlines.persist)));
                return Err(broken);
            }
            files = Some(self.capture_files(&sandbox, artifact, files_parent, true).await?);
        }
        let dumped = match process {
            ProcessCut::Captured(_) => Some(inner.take(&self.id).await.token),
            _ => None,
        };
        Ok(cut(plan, files, process, dumped))
    }

    /// What a capture may store its differences from: the last artifact of the same sandbox and backend. A fork's first
    /// capture of its own has none, so that no artifact ever depends on one of another sandbox.
    fn parent(&self, standing: Option<&Manifest>, backend: &Arc<dyn CheckpointBackend>) -> Option<Artifact> {
        let artifact = standing?.half(backend.domain()).artifact()?;
        (artifact.sandbox == self.id && artifact.backend == backend.name()).then(|| artifact.clone())
    }

    /// What the host says of the sandbox; an error where it has died.
    async fn describe_living(&self, attached: &Attached) -> Result<Sandbox> {
        let sandbox = self.inner.describe(&self.id).await?;
        attached.check_lives(&sandbox)?;
        Ok(sandbox)
    }

    async fn capture_files(
        &self,
        sandbox: &Sandbox,
        artifact: &ArtifactId,
        parent: Option<Artifact>,
        frozen: bool,
    ) -> Result<Box<dyn Captured>> {
        let limit = self.inner.options.deadlines.capture;
        let (backend, sandbox, artifact) = (self.inner.filesystem.clone(), sandbox.clone(), artifact.clone());
        call("capture the files", limit, async move {
            let mut at_cut = NoCut;
            let request = CaptureRequest {
                sandbox: &sandbox,
                artifact,
                parent: parent.as_ref(),
                frozen,
                deadline: Instant::now().checked_add(limit),
                at_cut: &mut at_cut,
            };
            backend.capture(request).await
        })
        .instrument(tracing::info_span!("capture_files"))
        .await
    }

    async fn capture_processes(
        &self,
        backend: Arc<dyn CheckpointBackend>,
        sandbox: &Sandbox,
        artifact: &ArtifactId,
        parent: Option<Artifact>,
        paired: Option<PairedFiles>,
    ) -> Result<Box<dyn Captured>> {
        let limit = self.inner.options.deadlines.capture;
        let (sandbox, artifact) = (sandbox.clone(), artifact.clone());
        call("capture the processes", limit, async move {
            let (mut nothing, mut paired) = (NoCut, paired);
            let at_cut: &mut dyn AtCut = match &mut paired {
                Some(paired) => paired,
                None => &mut nothing,
            };
            let request = CaptureRequest {
                sandbox: &sandbox,
                artifact,
                parent: parent.as_ref(),
                frozen: true,
                deadline: Instant::now().checked_add(limit),
                at_cut,
            };
            backend.capture(request).await
        })
        .instrument(tracing::info_span!("capture_processes"))
        .await
    }

    /// Makes a cut durable, and a version of it.
    async fn make(
        &self,
        attached: &Arc<Attached>,
        standing: Option<Arc<Manifest>>,
        version: VersionId,
        cut: Cut,
    ) -> Result<Made> {
        let inner = &self.inner;
        let begun = Instant::now();
        let Cut { at, delta, dumped, plan, filesystem, process, frozen, capture } = cut;
        let persist = inner.options.deadlines.persist;
        let files = async {
            match filesystem {
                Some(captured) => {
                    let stored = call("persist the files", persist, captured.persist()).await?;
                    self.accept(&inner.filesystem, version, stored).map(Some)
                }
                None => Ok(None),
            }
        };
        let processes = async {
            Ok(match process {
                ProcessCut::Standing => None,
                ProcessCut::Empty => Some(Half::Empty),
                ProcessCut::Missing(reason) => Some(Half::Missing(reason)),
                ProcessCut::Captured(captured) => {
                    let stored = call("persist the processes", persist, captured.persist()).await?;
                    let backend = inner.process.as_ref().unwrap_or(&inner.filesystem);
                    Some(self.accept(backend, version, stored)?)
                }
            })
        };
        let (files, processes): (Result<Option<Half>>, Result<Option<Half>>) =
            async { tokio::join!(files, processes) }.instrument(tracing::info_span!("persist")).await;
        let (files, processes) = match (files, processes) {
            (Ok(files), Ok(processes)) => (files, processes),
            (files, processes) => {
                let mut failed = None;
                for half in [files, processes] {
                    match half {
                        Ok(half) => self.remove_half(half.as_ref()).await,
                        Err(error) => failed = failed.or(Some(error)),
                    }
                }
                // One of the two failed, or we would not be here.
                return Err(failed.unwrap_or_else(|| Error::new(ErrorKind::Internal, "persist failed")));
            }
        };
        let new = [files.clone(), processes.clone()];
        let sum = |of: fn(&Artifact) -> Option<u64>| {
            let known = new.iter().flatten().filter_map(|half| of(half.artifact()?));
            known.fold(None, |sum: Option<u64>, bytes| Some(sum.unwrap_or(0).saturating_add(bytes)))
        };
        let (bytes, size) = (sum(|artifact| artifact.bytes), sum(|artifact| artifact.size));
        inner.persisted(bytes.unwrap_or(0));
        // Processes that were captured were alive then. Others may have been dying since the last look.
        if !matches!(processes, Some(Half::Stored(_)))
            && let Err(error) = self.describe_living(attached).await
        {
            for half in new {
                self.remove_half(half.as_ref()).await;
            }
            return Err(error);
        }
        let stand = |pick: fn(&Manifest) -> &Half| standing.as_deref().map(|manifest| pick(manifest).clone());
        let missing = || Half::Missing("no version held it".to_owned());
        let turns = inner.turns_of(self.job);
        let newest = turns.iter().max_by_key(|(turn, _)| turn.number).map(|(turn, _)| turn.clone());
        let process_rebased = matches!(processes, Some(Half::Stored(_) | Half::Empty));
        let mut manifest = Manifest {
            format: MANIFEST_FORMAT,
            sandbox: self.id.clone(),
            version,
            parent: standing.as_ref().map(|manifest| manifest.version),
            turn: newest.as_ref().map_or(TurnNumber(0), |turn| turn.number),
            origin: if turns.iter().any(|(_, boundary)| *boundary) { Origin::Turn } else { Origin::Request },
            filesystem: files.or_else(|| stand(|m| &m.filesystem)).unwrap_or_else(missing),
            process: processes.or_else(|| stand(|m| &m.process)).unwrap_or_else(missing),
            conversation: newest.and_then(|turn| turn.conversation),
            effects: delta.effects.clone(),
            created_ms: now_ms(),
            host: HostFacts::default(),
            timings: Timings {
                frozen_us: micros(frozen),
                capture_us: micros(capture),
                persist_us: micros(begun.elapsed()),
            },
        };
        manifest.host = host_facts(&manifest);
        let manifest = Arc::new(manifest);
        let stored = match inner.step("checkpoint.persisted") {
            Ok(()) => self.commit(manifest.clone()).instrument(tracing::info_span!("commit")).await,
            Err(error) => Err((error, false)),
        };
        if let Err((error, maybe_written)) = stored {
            if maybe_written {
                inner.store.burn(&self.id, version);
            } else {
                for half in &new {
                    self.remove_half(half.as_ref()).await;
                }
            }
            return Err(error);
        }
        inner.step("checkpoint.committed")?;
        attached.stand_on(manifest.clone(), plan == Plan::FULL, at);
        tracing::Span::current().record("version", version.0).record("plan", plan.label());
        let tree = manifest.filesystem.artifact().and_then(|artifact| inner.filesystem.tree(artifact));
        let whole = dumped.is_none();
        let base = Rebase { token: delta.token, filesystem: plan.filesystem, process: process_rebased && whole, tree };
        inner.rebase(&self.id, base).await;
        if let Some(token) = dumped {
            let base = Rebase { token, filesystem: false, process: process_rebased, tree: None };
            inner.rebase(&self.id, base).await;
        }
        inner.step("checkpoint.rebased")?;
        Ok(Made { manifest, plan, delta: describe_delta(&delta), bytes, size })
    }

    /// Checks that a backend stored what it was asked for, and names everything that the artifact depends on.
    fn accept(&self, backend: &Arc<dyn CheckpointBackend>, version: VersionId, mut stored: Artifact) -> Result<Half> {
        let asked = (&self.id, backend.domain(), backend.name(), Some(version));
        if (&stored.sandbox, stored.domain, stored.backend.as_str(), names::version_of(&stored.id)) != asked {
            // Whatever it names is not touched: it may be somebody else's.
            return Err(Error::new(
                ErrorKind::Internal,
                format!("the backend {:?} says that it stored {stored:?} as {version} of {}", backend.name(), self.id),
            ));
        }
        stored.depends_on = self.inner.store.with(|index| artifacts::dependencies(index, &stored));
        Ok(Half::Stored(stored))
    }

    async fn commit(&self, manifest: Arc<Manifest>) -> std::result::Result<(), (Error, bool)> {
        let store = self.inner.store.clone();
        match blocking("write the manifest", move || store.put_version(manifest)).await {
            Ok(result) => result,
            // Cut off in the middle: it may stand.
            Err(error) => Err((error, true)),
        }
    }

    /// Removes what a failed checkpoint stored. What stays is an orphan and goes when the store is opened.
    async fn remove_half(&self, half: Option<&Half>) {
        let Some(artifact) = half.and_then(Half::artifact) else { return };
        if let Err(error) = self.inner.remove_artifact(artifact).await {
            tracing::warn!(sandbox = %self.id, "an artifact of a failed checkpoint stays for now: {error}");
        }
    }
}

impl Cut {
    async fn discard(self, limit: Duration) {
        if let Some(files) = self.filesystem {
            discard(files, limit).await;
        }
        if let ProcessCut::Captured(processes) = self.process {
            discard(processes, limit).await;
        }
    }
}

async fn discard(captured: Box<dyn Captured>, limit: Duration) {
    if let Err(error) = call("discard a capture", limit, captured.discard()).await {
        tracing::warn!("a discarded capture may take space until the store is opened anew: {error}");
    }
}

/// Whether a second try may do better.
fn is_worth_a_retry(error: &Error) -> bool {
    !matches!(
        error.kind(),
        ErrorKind::InvalidInput
            | ErrorKind::NotFound
            | ErrorKind::Unsupported
            | ErrorKind::Died
            | ErrorKind::Cancelled
            | ErrorKind::Poisoned
    )
}

type Slot = Arc<Mutex<Option<Box<dyn Captured>>>>;

/// The capture of files at the cut of a process capture.
struct PairedFiles {
    backend: Arc<dyn CheckpointBackend>,
    sandbox: Sandbox,
    artifact: ArtifactId,
    parent: Option<Artifact>,
    limit: Duration,
    slot: Slot,
}

#[async_trait]
impl AtCut for PairedFiles {
    async fn run(&mut self) -> Result<()> {
        if self.slot.lock().is_some() {
            return Err(Error::new(ErrorKind::Internal, "the process backend ran twice what belongs at its one cut"));
        }
        let mut nothing = NoCut;
        let request = CaptureRequest {
            sandbox: &self.sandbox,
            artifact: self.artifact.clone(),
            parent: self.parent.as_ref(),
            frozen: true,
            deadline: Instant::now().checked_add(self.limit),
            at_cut: &mut nothing,
        };
        let capture = self.backend.capture(request).instrument(tracing::info_span!("capture_files"));
        let captured = capture.await?;
        *self.slot.lock() = Some(captured);
        Ok(())
    }
}

pub(super) fn now_ms() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}

/// What the version was made on. A backend that depends on a tool states its version as the fact of its own name.
pub(super) fn host_facts(manifest: &Manifest) -> HostFacts {
    let uname = rustix::system::uname();
    let tools: BTreeMap<String, String> = manifest
        .artifacts()
        .filter_map(|artifact| Some((artifact.backend.clone(), artifact.facts.get(&artifact.backend)?.clone())))
        .collect();
    HostFacts {
        kernel: uname.release().to_string_lossy().into_owned(),
        architecture: uname.machine().to_string_lossy().into_owned(),
        tools,
    }
}
