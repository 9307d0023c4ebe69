//! The scheduler at work: which requests wait for which job, and waking a job when its turn comes.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crab_core::{Error, ErrorKind, Exposure, GateExposure, Result, SandboxId, Verdict};
use parking_lot::Mutex;
use tokio::sync::oneshot;

use super::attached::Attached;
use super::events::EventKind;
use super::request::Request;
use super::{FailurePolicy, Inner, checkpoint, meters};
use crate::pace::Pace;
use crate::policy::Plan;
use crate::scheduler::{JobId, Lane, Limits, Scheduler, Start};

/// The lane in which a plan is captured.
pub(super) fn lane(plan: Plan) -> Lane {
    if plan.process { Lane::Process } else { Lane::Filesystem }
}

#[derive(Debug)]
struct State {
    scheduler: Scheduler<SandboxId>,
    requests: HashMap<JobId, (SandboxId, Vec<Request>)>,
    permits: HashMap<JobId, oneshot::Sender<()>>,
    /// How fast may be persisted, where that is limited.
    pace: Option<Pace>,
    /// The persists rest until the pace lets them go on.
    rests: bool,
}

#[derive(Debug)]
pub(super) struct Dispatch(Mutex<State>);

impl Dispatch {
    pub(super) fn new(limits: Limits, bytes_per_second: Option<u64>) -> Self {
        Self(Mutex::new(State {
            scheduler: Scheduler::new(limits),
            requests: HashMap::new(),
            permits: HashMap::new(),
            pace: bytes_per_second.map(|rate| Pace::new(rate, Instant::now())),
            rests: false,
        }))
    }

    /// Whether no job waits or runs.
    pub(super) fn is_idle(&self) -> bool {
        self.0.lock().scheduler.is_idle()
    }
}

impl Inner {
    /// Queues a request. Where the queue is full it is given back with the error.
    pub(super) fn submit(
        self: &Arc<Self>,
        mut request: Request,
        plan: Plan,
        urgent: bool,
        exposure: Option<GateExposure>,
    ) -> std::result::Result<(), Box<(Request, Error)>> {
        let id = request.turn.sandbox.clone();
        let turn = request.turn.number;
        let boundary = request.boundary;
        let waiting = request.waiting();
        let submitted = {
            let mut state = self.dispatch.0.lock();
            let Ok(submitted) = state.scheduler.submit(&id, lane(plan), urgent) else {
                let error = Error::new(ErrorKind::Full, "too many turns wait for a checkpoint")
                    .fix("send fewer at once, or raise the limit of waiting requests");
                return Err(Box::new((request, error)));
            };
            request.queued = Some(tracing::info_span!(parent: &request.span, "queued"));
            // The watcher waits for this lock before it can promote, so the request is in its place by then.
            if let Some(exposure) = exposure {
                waiting.hide(&request.span);
                let watcher = tokio::spawn(watch(
                    self.clone(),
                    submitted.job,
                    (request.turn.clone(), request.span.clone()),
                    exposure,
                    waiting,
                ));
                request.watched_by(watcher.abort_handle());
            }
            state.requests.entry(submitted.job).or_insert_with(|| (id.clone(), Vec::new())).1.push(request);
            submitted
        };
        if boundary {
            self.emit(&id, EventKind::Queued { turn, shared: submitted.shared });
        }
        self.pump();
        Ok(())
    }

    /// Starts what can start.
    pub(super) fn pump(self: &Arc<Self>) {
        let mut begin = Vec::new();
        {
            let mut state = self.dispatch.0.lock();
            while let Some(Start { job, lane, begins }) = state.scheduler.start() {
                if begins {
                    if let Some((sandbox, _)) = state.requests.get(&job) {
                        begin.push((job, sandbox.clone(), lane));
                    }
                } else if let Some(permit) = state.permits.remove(&job) {
                    let _ = permit.send(());
                }
            }
            meters::waiting(state.scheduler.waiting());
        }
        for (job, sandbox, lane) in begin {
            tokio::spawn(checkpoint::run(self.clone(), job, sandbox, lane));
        }
    }

    fn promote(self: &Arc<Self>, job: JobId) {
        self.dispatch.0.lock().scheduler.promote(job);
        self.pump();
    }

    /// Gives the job's worker to others until it [`advance`](Self::advance)s.
    pub(super) fn step_aside(self: &Arc<Self>, job: JobId) {
        self.dispatch.0.lock().scheduler.step_aside(job);
        self.pump();
    }

    /// Leaves the worker, where it has one, and waits for one of this lane.
    pub(super) async fn advance(self: &Arc<Self>, job: JobId, lane: Lane, urgent: bool) -> Result<()> {
        let (permit, granted) = oneshot::channel();
        {
            let mut state = self.dispatch.0.lock();
            state.permits.insert(job, permit);
            state.scheduler.advance(job, lane, urgent);
        }
        self.pump();
        granted.await.map_err(|_| Error::new(ErrorKind::Cancelled, "the engine was closed"))
    }

    /// The turns that a job serves. They are complete once it has begun.
    pub(super) fn turns_of(&self, job: JobId) -> Vec<(crab_core::Turn, bool)> {
        let state = self.dispatch.0.lock();
        state
            .requests
            .get(&job)
            .map(|(_, requests)| requests.iter().map(|request| (request.turn.clone(), request.boundary)).collect())
            .unwrap_or_default()
    }

    /// Fails the requests of a job that were made before the sandbox was restored or re-attached. An error where none
    /// is left.
    pub(super) fn drop_stale(&self, job: JobId, id: &SandboxId, current: &Arc<Attached>) -> Result<()> {
        let gone = || Error::new(ErrorKind::Cancelled, format!("{id} was restored or detached meanwhile")).retry();
        let (stale, left) = {
            let mut state = self.dispatch.0.lock();
            let Some((_, requests)) = state.requests.get_mut(&job) else { return Err(gone()) };
            let (fresh, stale): (Vec<_>, Vec<_>) =
                requests.drain(..).partition(|request| Arc::ptr_eq(&request.attached, current));
            *requests = fresh;
            (stale, requests.len())
        };
        self.fail(stale, &Arc::new(gone()), false);
        if left == 0 { Err(gone()) } else { Ok(()) }
    }

    /// Ends a job and gives back its requests, which want their verdicts.
    pub(super) fn finish(self: &Arc<Self>, job: JobId) -> Vec<Request> {
        let mut state = self.dispatch.0.lock();
        state.permits.remove(&job);
        state.requests.remove(&job).map(|(_, requests)| requests).unwrap_or_default()
    }

    /// Lets the sandbox's next job start. Called after [`finish`](Self::finish), when the verdicts are given.
    pub(super) fn release(self: &Arc<Self>, job: JobId) {
        self.dispatch.0.lock().scheduler.finish(job);
        self.pump();
    }

    /// Cancels what waits for this sandbox and has not begun; its gates fail.
    pub(super) fn cancel(self: &Arc<Self>, id: &SandboxId, why: &str) {
        let requests = {
            let mut state = self.dispatch.0.lock();
            let job = state.scheduler.cancel(id);
            job.and_then(|job| state.requests.remove(&job)).map(|(_, requests)| requests).unwrap_or_default()
        };
        if requests.is_empty() {
            return;
        }
        let error = Arc::new(Error::new(ErrorKind::Cancelled, format!("{id}: {why}")));
        self.fail(requests, &error, false);
        self.pump();
    }

    /// The span of a job that begins, below the turn that it was made for; those that share it are linked. The turns do
    /// not wait in the queue any more.
    pub(super) fn job_span(&self, job: JobId, id: &SandboxId) -> tracing::Span {
        let mut state = self.dispatch.0.lock();
        let Some((_, requests)) = state.requests.get_mut(&job) else { return tracing::Span::none() };
        requests.iter_mut().for_each(|request| request.queued = None);
        let mut spans = requests.iter().map(|request| &request.span);
        let span = tracing::info_span!(
            parent: spans.next().and_then(tracing::Span::id),
            "checkpoint",
            sandbox = %id,
            version = tracing::field::Empty,
            plan = tracing::field::Empty,
        );
        spans.for_each(|shared| _ = span.follows_from(shared));
        span
    }

    /// So much was persisted. Where that is more than the pace allows, no further persist begins for a while.
    pub(super) fn persisted(self: &Arc<Self>, bytes: u64) {
        let mut state = self.dispatch.0.lock();
        let now = Instant::now();
        let Some(pace) = &mut state.pace else { return };
        pace.wrote(bytes, now);
        let wait = pace.wait(now);
        if wait.is_zero() || state.rests {
            return;
        }
        state.rests = true;
        state.scheduler.rest(Lane::Persist, true);
        drop(state);
        let inner = Arc::downgrade(self);
        tokio::spawn(async move {
            let mut wait = wait;
            while !wait.is_zero() {
                tokio::time::sleep(wait).await;
                let Some(inner) = inner.upgrade() else { return };
                let mut state = inner.dispatch.0.lock();
                // More may have been written meanwhile.
                wait = state.pace.as_ref().map_or(Duration::ZERO, |pace| pace.wait(Instant::now()));
                if wait.is_zero() {
                    state.rests = false;
                    state.scheduler.rest(Lane::Persist, false);
                    drop(state);
                    inner.pump();
                }
            }
        });
    }

    /// Gives the verdict of a failure to all of them, as the policy says.
    pub(super) fn fail(&self, requests: Vec<Request>, error: &Arc<Error>, may_release: bool) {
        let release = may_release && matches!(self.options.failure, FailurePolicy::BestEffort { .. });
        for request in requests {
            let (id, turn, boundary) = (request.turn.sandbox.clone(), request.turn.number, request.boundary);
            if request.failed(error, release) && boundary {
                meters::turn(if release { "unprotected" } else { "failed" });
                self.emit(&id, EventKind::Failed { turn, error: error.clone(), released: release });
            }
        }
    }
}

/// Promotes a job when its answer waits, and lets the answer go when it has waited long enough.
async fn watch(
    inner: Arc<Inner>,
    job: JobId,
    (turn, span): (crab_core::Turn, tracing::Span),
    exposure: GateExposure,
    waiting: Arc<super::request::Waiting>,
) {
    // An abandoned gate needs no haste; the version is made all the same.
    if exposure.wait().await != Exposure::Waiting {
        return;
    }
    waiting.expose(&span);
    drop(span);
    inner.emit(&turn.sandbox, EventKind::Promoted { turn: turn.number });
    inner.promote(job);
    if let FailurePolicy::BestEffort { max_hold } = inner.options.failure {
        tokio::time::sleep(max_hold).await;
        let error = Arc::new(
            Error::new(ErrorKind::TimedOut, format!("turn {} waited {max_hold:?} for its version", turn.number))
                .retry(),
        );
        if waiting.decide(Verdict::Unprotected(error.clone())) {
            meters::turn("unprotected");
            inner.emit(&turn.sandbox, EventKind::Failed { turn: turn.number, error, released: true });
        }
    }
}
