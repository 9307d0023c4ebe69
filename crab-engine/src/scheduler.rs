//! Which job runs next. Pure: no clock, no I/O, no runtime.
//!
//! A *job* makes one version of one sandbox and serves one or more requests. It passes through *lanes*, each with so
//! many workers: it is captured in [`Lane::Process`] or [`Lane::Filesystem`], then persisted in [`Lane::Persist`].
//! A job is *urgent* once somebody waits for it at a gate.
//!
//! What holds, each with a property test:
//!
//! - **Order.** A sandbox has at most one job that has begun, and at most one more that has not. Requests that arrive
//!   before a job begins share it; later ones share the next.
//! - **Urgent first, nobody starves.** Urgent jobs start in the order in which they became urgent. But after
//!   [`Limits::urgent_burst`] starts in a row that passed an older job, the oldest job of the lane starts. So a job
//!   with `p` older ones in its lane starts after at most `(urgent_burst + 1) * (p + 1)` starts of that lane.
//! - **Promotion never delays the promoted.** A promoted job keeps its place among all jobs and gets a second one
//!   among the urgent; it starts at whichever comes first. A job that blocks an urgent one of its sandbox is promoted
//!   with it.
//! - **Nothing is lost.** Every request that was accepted is in exactly one job until that job is finished or
//!   cancelled, and no lane idles while a job waits in it.
//! - **A lane may rest**, such as when the disk has had its share: then nothing starts in it, and what waits keeps its
//!   place.
//! - **Bounded.** At most [`Limits::waiting`] requests wait; the next is refused.
//!
//! A call takes time logarithmic in the number of jobs that wait, and touches few places in memory.

mod slots;

use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::hash::Hash;

use slots::Slots;

/// How much runs at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Captures that involve processes, at once. More than the core count lengthens every freeze.
    pub process: usize,
    /// Captures of files alone, at once.
    pub filesystem: usize,
    /// Captures that are being made durable, at once.
    pub persist: usize,
    /// How many urgent jobs may pass an older one in a row.
    pub urgent_burst: u32,
    /// How many requests may wait, over all sandboxes.
    pub waiting: usize,
}

impl Default for Limits {
    /// One process capture per core, four times as many of files and persists, 4096 waiting requests.
    fn default() -> Self {
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        Self { process: cores, filesystem: 4 * cores, persist: 4 * cores, urgent_burst: 4, waiting: 4096 }
    }
}

/// A resource with so many workers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Lane {
    /// Captures of files alone.
    Filesystem,
    /// Captures that involve processes.
    Process,
    /// Making a capture durable.
    Persist,
}

/// Names a job, in the order in which jobs were made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobId {
    /// Smaller is older: its place among all jobs.
    made: u64,
    slot: usize,
}

/// A request was accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Submitted {
    /// The job that serves it.
    pub job: JobId,
    /// Whether the job was there already.
    pub shared: bool,
}

/// Too many requests wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueueFull;

/// A job starts in a lane.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Start {
    /// Which job.
    pub job: JobId,
    /// Where.
    pub lane: Lane,
    /// Whether it begins with this: no further request shares it.
    pub begins: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Waits for the job of its sandbox that has begun.
    Parked,
    Queued,
    Running,
    /// It has begun, holds no worker and waits in no lane.
    Aside,
}

#[derive(Debug)]
struct Job {
    id: JobId,
    /// The slot of its sandbox.
    sandbox: usize,
    lane: Lane,
    /// Its place among the urgent ones, where it is urgent.
    urgent: Option<u64>,
    state: State,
    begun: bool,
    requests: usize,
}

#[derive(Debug, Default)]
struct LaneQueue {
    by_age: BTreeSet<JobId>,
    by_urgency: BTreeMap<u64, JobId>,
    running: usize,
    rests: bool,
    /// Starts in a row that passed an older job.
    passed: u32,
}

impl LaneQueue {
    fn choose(&self, burst: u32) -> Option<JobId> {
        let oldest = self.by_age.first()?;
        match self.by_urgency.first_key_value() {
            Some((_, urgent)) if self.passed < burst => Some(*urgent),
            _ => Some(*oldest),
        }
    }
}

/// The jobs of one sandbox.
#[derive(Debug)]
struct Pair<S> {
    sandbox: S,
    begun: Option<JobId>,
    open: Option<JobId>,
}

/// The scheduler. `S` names sandboxes.
#[derive(Debug)]
pub struct Scheduler<S> {
    limits: Limits,
    next: u64,
    lanes: [LaneQueue; 3],
    jobs: Slots<Job>,
    /// Sandboxes that have a job, and where they are by their names.
    sandboxes: Slots<Pair<S>>,
    names: HashMap<S, usize>,
    waiting: usize,
}

impl<S: Eq + Hash + Clone> Scheduler<S> {
    /// An idle scheduler. Limits of 0 workers are taken as 1.
    #[must_use]
    pub fn new(mut limits: Limits) -> Self {
        for limit in [&mut limits.process, &mut limits.filesystem, &mut limits.persist] {
            *limit = (*limit).max(1);
        }
        Self {
            limits,
            next: 0,
            lanes: Default::default(),
            jobs: Slots::default(),
            sandboxes: Slots::default(),
            names: HashMap::new(),
            waiting: 0,
        }
    }

    /// Takes a request. It shares the sandbox's job that has not begun, where there is one; that job then captures at
    /// least what both need.
    ///
    /// # Errors
    /// [`QueueFull`] where too many requests wait; nothing has changed.
    pub fn submit(&mut self, sandbox: &S, lane: Lane, urgent: bool) -> Result<Submitted, QueueFull> {
        if self.waiting >= self.limits.waiting {
            return Err(QueueFull);
        }
        self.waiting += 1;
        let place = match self.names.entry(sandbox.clone()) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(new) => {
                let pair = Pair { sandbox: sandbox.clone(), begun: None, open: None };
                *new.insert(self.sandboxes.insert(pair))
            }
        };
        let open = self.sandboxes.get(place).and_then(|pair| pair.open);
        let (job, shared) = match open {
            Some(job) => (job, true),
            None => (self.make(place, lane), false),
        };
        if let Some(entry) = self.job_mut(job) {
            entry.requests += 1;
            // A capture with processes serves a request for files alone; not the other way round.
            if entry.lane == Lane::Filesystem && lane == Lane::Process {
                let queued = entry.state == State::Queued;
                if queued {
                    self.dequeue(job);
                }
                if let Some(entry) = self.job_mut(job) {
                    entry.lane = Lane::Process;
                }
                if queued {
                    self.enqueue(job);
                }
            }
        }
        if urgent {
            self.promote(job);
        }
        Ok(Submitted { job, shared })
    }

    /// Makes the open job of a sandbox.
    fn make(&mut self, sandbox: usize, lane: Lane) -> JobId {
        let job = JobId { made: self.next, slot: self.jobs.next() };
        self.next += 1;
        let begun = self.sandboxes.get_mut(sandbox).and_then(|pair| {
            pair.open = Some(job);
            pair.begun
        });
        let state = if begun.is_some() { State::Parked } else { State::Queued };
        self.jobs.insert(Job { id: job, sandbox, lane, urgent: None, state, begun: false, requests: 0 });
        if state == State::Queued {
            self.enqueue(job);
        }
        job
    }

    fn job(&self, job: JobId) -> Option<&Job> {
        self.jobs.get(job.slot).filter(|found| found.id == job)
    }

    fn job_mut(&mut self, job: JobId) -> Option<&mut Job> {
        self.jobs.get_mut(job.slot).filter(|found| found.id == job)
    }

    /// Somebody waits for this job now. Does nothing where the job is urgent or gone.
    ///
    /// The sandbox's job that has begun, where this one waits for it, becomes urgent too.
    pub fn promote(&mut self, job: JobId) {
        let Some(entry) = self.job(job) else { return };
        let blocker = match self.sandboxes.get(entry.sandbox) {
            Some(pair) if pair.open == Some(job) => pair.begun,
            _ => None,
        };
        for job in blocker.into_iter().chain([job]) {
            let place = self.next;
            let Some(entry) = self.job_mut(job) else { continue };
            if entry.urgent.is_some() {
                continue;
            }
            entry.urgent = Some(place);
            let (queued, lane) = (entry.state == State::Queued, entry.lane);
            self.next += 1;
            if queued {
                self.lanes[lane as usize].by_urgency.insert(place, job);
            }
        }
    }

    /// The next job to start, where a worker is free. Call until it returns `None`.
    pub fn start(&mut self) -> Option<Start> {
        // What is nearest to its end goes first, so that captures do not pile up in front of the disk.
        for lane in [Lane::Persist, Lane::Process, Lane::Filesystem] {
            let limit = self.limit(lane);
            let burst = self.limits.urgent_burst;
            let queue = &self.lanes[lane as usize];
            if queue.rests || queue.running >= limit {
                continue;
            }
            let Some(job) = queue.choose(burst) else { continue };
            let oldest = queue.by_age.first().copied();
            self.dequeue(job);
            let queue = &mut self.lanes[lane as usize];
            queue.running += 1;
            queue.passed = if oldest == Some(job) { 0 } else { queue.passed.saturating_add(1) };
            let Some(entry) = self.job_mut(job) else { continue };
            entry.state = State::Running;
            let begins = !entry.begun;
            entry.begun = true;
            if begins {
                let (requests, sandbox) = (entry.requests, entry.sandbox);
                self.waiting -= requests;
                if let Some(pair) = self.sandboxes.get_mut(sandbox) {
                    pair.open = None;
                    pair.begun = Some(job);
                }
            }
            return Some(Start { job, lane, begins });
        }
        None
    }

    /// Lets nothing start in a lane, or lets it go on. What runs in it is not touched.
    pub fn rest(&mut self, lane: Lane, rests: bool) {
        self.lanes[lane as usize].rests = rests;
    }

    /// A job that runs gives its worker to others, since it waits for something that no worker can give it. It goes on
    /// by [`advance`](Self::advance), also to the same lane.
    pub fn step_aside(&mut self, job: JobId) {
        let Some(entry) = self.job_mut(job) else { return };
        if entry.state == State::Running {
            entry.state = State::Aside;
            let lane = entry.lane;
            self.lanes[lane as usize].running -= 1;
        }
    }

    /// A job that runs, or that stepped aside, waits for a worker of this lane. With `urgent` it is promoted.
    ///
    /// Used when a capture is to be persisted, when a capture of files turns out to need processes too, and when a
    /// failed capture is tried again. It keeps its age, and no further request shares it.
    pub fn advance(&mut self, job: JobId, lane: Lane, urgent: bool) {
        self.step_aside(job);
        let Some(entry) = self.job_mut(job) else { return };
        if entry.state != State::Aside {
            return;
        }
        entry.lane = lane;
        entry.state = State::Queued;
        self.enqueue(job);
        if urgent {
            self.promote(job);
        }
    }

    /// A job has ended, well or badly. The sandbox's next job may now start.
    pub fn finish(&mut self, job: JobId) {
        let Some(entry) = self.job(job) else { return };
        let lane = entry.lane;
        match entry.state {
            State::Running => self.lanes[lane as usize].running -= 1,
            State::Queued => self.dequeue(job),
            State::Parked | State::Aside => {}
        }
        let Some(entry) = self.jobs.remove(job.slot) else { return };
        if !entry.begun {
            self.waiting -= entry.requests;
        }
        let Some(pair) = self.sandboxes.get_mut(entry.sandbox) else { return };
        if pair.open == Some(job) {
            pair.open = None;
        }
        if pair.begun == Some(job) {
            pair.begun = None;
        }
        match (pair.begun, pair.open) {
            (None, None) => {
                if let Some(pair) = self.sandboxes.remove(entry.sandbox) {
                    self.names.remove(&pair.sandbox);
                }
            }
            (None, Some(open)) => {
                if let Some(next) = self.job_mut(open)
                    && next.state == State::Parked
                {
                    next.state = State::Queued;
                    self.enqueue(open);
                }
            }
            _ => {}
        }
    }

    /// Cancels the sandbox's job that has not begun, and names it. One that has begun goes on.
    pub fn cancel(&mut self, sandbox: &S) -> Option<JobId> {
        let job = self.pair(sandbox)?.open?;
        self.finish(job);
        Some(job)
    }

    fn pair(&self, sandbox: &S) -> Option<&Pair<S>> {
        self.sandboxes.get(*self.names.get(sandbox)?)
    }

    /// The sandbox's job that has begun, where there is one.
    #[must_use]
    pub fn begun(&self, sandbox: &S) -> Option<JobId> {
        self.pair(sandbox)?.begun
    }

    /// Whether somebody waits for this job.
    #[must_use]
    pub fn is_urgent(&self, job: JobId) -> bool {
        self.job(job).is_some_and(|entry| entry.urgent.is_some())
    }

    /// How many jobs wait in a lane, urgent ones included, and how many of them are urgent.
    #[must_use]
    pub fn depth(&self, lane: Lane) -> (usize, usize) {
        let queue = &self.lanes[lane as usize];
        (queue.by_age.len(), queue.by_urgency.len())
    }

    /// How many requests wait for their job to begin.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.waiting
    }

    /// Whether there is no job.
    #[must_use]
    pub fn is_idle(&self) -> bool {
        self.jobs.is_empty()
    }

    fn limit(&self, lane: Lane) -> usize {
        match lane {
            Lane::Filesystem => self.limits.filesystem,
            Lane::Process => self.limits.process,
            Lane::Persist => self.limits.persist,
        }
    }

    fn enqueue(&mut self, job: JobId) {
        let Some(Job { lane, urgent, .. }) = self.job(job) else { return };
        let (lane, urgent) = (*lane, *urgent);
        let queue = &mut self.lanes[lane as usize];
        queue.by_age.insert(job);
        if let Some(place) = urgent {
            queue.by_urgency.insert(place, job);
        }
    }

    fn dequeue(&mut self, job: JobId) {
        let Some(Job { lane, urgent, .. }) = self.job(job) else { return };
        let (lane, urgent) = (*lane, *urgent);
        let queue = &mut self.lanes[lane as usize];
        queue.by_age.remove(&job);
        if let Some(place) = urgent {
            queue.by_urgency.remove(&place);
        }
    }
}

#[cfg(test)]
mod tests;
