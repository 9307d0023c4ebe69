//! The engine: what a turn that changed nothing costs, what a decision of the scheduler costs, what two queues are worth,
//! and what a commit costs beyond the writes that it cannot do without.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crab_core::memory::MemoryWorld;
use crab_core::{Boundary, Domain, Gate, SandboxId, Turn, TurnNumber, Verdict};
use crab_engine::Engine;
use crab_engine::scheduler::{JobId, Lane, Limits, Scheduler};
use parking_lot::Mutex;
use tracing::span::{Attributes, Id};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::Registry;

use crate::report::{Report, percentile};

/// The part's entry.
pub(crate) fn run(report: &mut Report) -> Result<(), String> {
    skipped_turns(report)?;
    scheduling(report);
    urgent_waits(report)?;
    commits(report)
}

/// Keeps how long each `commit` span was open, in milliseconds.
#[derive(Clone, Default)]
struct Commits(Arc<Mutex<Spans>>);

/// The open spans by their numbers, and what the closed ones took.
type Spans = (BTreeMap<u64, Instant>, Vec<f64>);

impl<S: tracing::Subscriber> Layer<S> for Commits {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, _context: Context<'_, S>) {
        if attributes.metadata().name() == "commit" {
            self.0.lock().0.insert(id.into_u64(), Instant::now());
        }
    }
    fn on_close(&self, id: Id, _context: Context<'_, S>) {
        let mut state = self.0.lock();
        if let Some(began) = state.0.remove(&id.into_u64()) {
            state.1.push(began.elapsed().as_secs_f64() * 1e3);
        }
    }
}

/// An engine on the in-memory world, with one sandbox.
struct Bench {
    world: MemoryWorld,
    engine: Engine,
    id: SandboxId,
    turn: u64,
}

impl Bench {
    async fn new(store: &Path) -> Result<Self, String> {
        let world = MemoryWorld::new();
        let id = SandboxId::new("box").map_err(|error| error.to_string())?;
        world.create(&id);
        let engine = Engine::builder(store)
            .filesystem(world.backend(Domain::Filesystem))
            .process(world.backend(Domain::Process))
            .host(Arc::new(world.clone()))
            .delta(Arc::new(world.clone()))
            .open()
            .await
            .map_err(|error| error.to_string())?;
        engine.attach(&id).await.map_err(|error| error.to_string())?;
        Ok(Self { world, engine, id, turn: 0 })
    }

    /// One turn whose answer waits at once; the time from its boundary to the open gate.
    async fn turn(&mut self) -> Result<Duration, String> {
        self.turn += 1;
        let begun = Instant::now();
        let (gate, mut hold) = Gate::new();
        hold.answer_waiting();
        let turn = Turn::new(self.id.clone(), TurnNumber(self.turn));
        self.engine.turn(Boundary { turn, gate }).await;
        match hold.verdict().await {
            Verdict::Durable(_) => Ok(begun.elapsed()),
            other => Err(format!("turn {}: {other:?}", self.turn)),
        }
    }
}

fn runtime() -> Result<tokio::runtime::Runtime, String> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(|error| error.to_string())
}

fn scratch() -> Result<tempfile::TempDir, String> {
    tempfile::tempdir().map_err(|error| error.to_string())
}

fn skipped_turns(report: &mut Report) -> Result<(), String> {
    const TURNS: usize = 5000;
    let dir = scratch()?;
    runtime()?.block_on(async {
        let mut bench = Bench::new(&dir.path().join("store")).await?;
        bench.world.write(&bench.id, "/a", "1").map_err(|error| error.to_string())?;
        bench.turn().await?;
        let mut samples = Vec::with_capacity(TURNS);
        for _ in 0..TURNS {
            samples.push(bench.turn().await?.as_secs_f64() * 1e6);
        }
        report.add_bounded("skip_turn_us_p50", percentile(&mut samples, 50.0), 100.0);
        report.add("skip_turn_us_p99", percentile(&mut samples, 99.0));
        bench.engine.close().await;
        Ok(())
    })
}

/// All jobs of so many sandboxes wait at once, half of them urgent, and pass through the scheduler.
fn schedule_all(sandboxes: usize) -> Duration {
    let limits = Limits { waiting: usize::MAX, ..Limits::default() };
    let mut scheduler: Scheduler<usize> = Scheduler::new(limits);
    let begun = Instant::now();
    let mut jobs = Vec::with_capacity(sandboxes);
    for sandbox in 0..sandboxes {
        let lane = if sandbox % 3 == 0 { Lane::Filesystem } else { Lane::Process };
        if let Ok(submitted) = scheduler.submit(&sandbox, lane, false) {
            jobs.push(submitted.job);
        }
    }
    for job in jobs.iter().skip(1).step_by(2) {
        scheduler.promote(*job);
    }
    while let Some(start) = scheduler.start() {
        match start.lane {
            Lane::Persist => scheduler.finish(start.job),
            _ => scheduler.advance(start.job, Lane::Persist, false),
        }
    }
    let took = begun.elapsed();
    assert!(scheduler.is_idle(), "a job did not end");
    took
}

fn scheduling(report: &mut Report) {
    const SIZES: [usize; 4] = [10, 100, 1000, 10_000];
    // Interleaved, so that what disturbs the machine disturbs all sizes.
    let mut samples: [Vec<f64>; 4] = Default::default();
    for _ in 0..30 {
        for (size, samples) in SIZES.iter().zip(&mut samples) {
            // Small rounds are repeated, since one is too short for the clock.
            let rounds = 10_000 / size;
            let took: Duration = (0..rounds).map(|_| schedule_all(*size)).sum();
            samples.push(took.as_nanos() as f64 / (rounds * size) as f64);
        }
    }
    let medians: Vec<f64> = samples.iter_mut().map(|samples| percentile(samples, 50.0)).collect();
    for (size, median) in SIZES.iter().zip(&medians) {
        report.add(&format!("schedule_ns_per_job_{size}"), *median);
    }
    // The logarithm of 100, 1000 and 10,000 is twice, three and four times that of 10; nowhere may the cost have grown by
    // more.
    let growth = (2..).zip(&medians[1..]).map(|(times, median)| median / medians[0] / f64::from(times));
    report.add_bounded("schedule_growth_ratio", growth.fold(0.0, f64::max), 1.0);
}

/// One request of the simulation. Times are in milliseconds.
struct Arrival {
    at: u64,
    sandbox: u64,
    /// When the model's answer waits.
    answer: u64,
    process: bool,
    capture: u64,
    persist: u64,
}

/// The same numbers in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit.max(1)
    }
}

/// 96 sandboxes, whose turns come in bursts: a batch of agents starts together, and goes on roughly together. Most
/// models think for seconds; every fourth answer is short and comes at once.
fn arrivals() -> Vec<Arrival> {
    let mut random = Random(0x5eed);
    let mut all = Vec::new();
    for burst in 0..20u64 {
        for sandbox in 0..96 {
            let at = burst * 8000 + random.below(400);
            let thinks = if random.below(4) == 0 { 100 + random.below(400) } else { 2000 + random.below(6000) };
            let process = random.below(3) > 0;
            let capture = if process { 40 + random.below(100) } else { 5 + random.below(10) };
            all.push(Arrival { at, sandbox, answer: at + thinks, process, capture, persist: 10 + random.below(50) });
        }
    }
    all.sort_by_key(|arrival| arrival.at);
    all
}

/// Runs the work through the scheduler in simulated time. Returns how long the answers waited in all, and when the last
/// job ended. Without promotion everything is served in the order of arrival.
fn simulate(arrivals: &[Arrival], limits: Limits, promotes: bool) -> Result<(u64, u64), String> {
    let mut scheduler: Scheduler<u64> = Scheduler::new(limits);
    let mut served: BTreeMap<JobId, Vec<usize>> = BTreeMap::new();
    let mut events: BTreeMap<(u64, u8, usize), JobId> = BTreeMap::new();
    let mut exposures: BTreeMap<(u64, usize), JobId> = BTreeMap::new();
    let mut running: BTreeMap<JobId, Lane> = BTreeMap::new();
    let (mut next, mut now, mut waited, mut ended) = (0, 0, 0, 0);
    let mut sequence = 0;
    loop {
        while let Some(arrival) = arrivals.get(next).filter(|arrival| arrival.at <= now) {
            let lane = if arrival.process { Lane::Process } else { Lane::Filesystem };
            let submitted = scheduler.submit(&arrival.sandbox, lane, false).map_err(|_| "the queue is full")?;
            served.entry(submitted.job).or_default().push(next);
            exposures.insert((arrival.answer, next), submitted.job);
            next += 1;
        }
        while let Some((key, job)) = exposures.first_key_value().map(|(key, job)| (*key, *job)).filter(|e| e.0.0 <= now)
        {
            exposures.remove(&key);
            if promotes {
                scheduler.promote(job);
            }
        }
        while let Some((key, job)) = events.first_key_value().map(|(key, job)| (*key, *job)).filter(|e| e.0.0 <= now) {
            events.remove(&key);
            if running.remove(&job) == Some(Lane::Persist) {
                scheduler.finish(job);
                ended = now;
                for request in served.remove(&job).unwrap_or_default() {
                    waited += now.saturating_sub(arrivals[request].answer);
                }
            } else {
                scheduler.advance(job, Lane::Persist, false);
            }
        }
        while let Some(start) = scheduler.start() {
            let first = served.get(&start.job).and_then(|requests| requests.first()).copied().unwrap_or(0);
            let takes = if start.lane == Lane::Persist { arrivals[first].persist } else { arrivals[first].capture };
            sequence += 1;
            events.insert((now + takes, 0, sequence), start.job);
            running.insert(start.job, start.lane);
        }
        let upcoming = [
            arrivals.get(next).map(|arrival| arrival.at),
            events.first_key_value().map(|(key, _)| key.0),
            exposures.first_key_value().map(|(key, _)| key.0).filter(|_| !scheduler.is_idle()),
        ];
        match upcoming.into_iter().flatten().min() {
            Some(at) => now = at.max(now),
            None => break,
        }
    }
    if scheduler.is_idle() { Ok((waited, ended)) } else { Err("the simulation did not end".to_owned()) }
}

fn urgent_waits(report: &mut Report) -> Result<(), String> {
    let arrivals = arrivals();
    let limits = Limits { process: 2, filesystem: 8, persist: 8, urgent_burst: 4, waiting: usize::MAX };
    let (fifo, fifo_end) = simulate(&arrivals, limits, false)?;
    let (two, two_end) = simulate(&arrivals, limits, true)?;
    let requests = arrivals.len() as f64;
    report.add("urgent_wait_fifo_ms", fifo as f64 / requests);
    report.add("urgent_wait_two_queues_ms", two as f64 / requests);
    report.add_bounded("urgent_wait_ratio", two as f64 / fifo as f64, 0.5);
    // The same work: it is done no later.
    report.add("urgent_end_ratio", two_end as f64 / fifo_end as f64);
    Ok(())
}

/// What no durable commit can do without: the bytes, an fsync, a rename, an fsync of the directory.
fn bare_commit(dir: &Path, bytes: &[u8], number: usize) -> std::io::Result<Duration> {
    let begun = Instant::now();
    let temporary = dir.join("tmp");
    let mut file = File::create(&temporary)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    fs::rename(&temporary, dir.join(format!("{number}.json")))?;
    File::open(dir)?.sync_all()?;
    Ok(begun.elapsed())
}

fn commits(report: &mut Report) -> Result<(), String> {
    const COMMITS: usize = 200;
    let dir = scratch()?;
    let bare = dir.path().join("bare");
    fs::create_dir(&bare).map_err(|error| error.to_string())?;
    let commits = Commits::default();
    // For all threads: a commit runs on whichever is free.
    tracing::subscriber::set_global_default(Registry::default().with(commits.clone()))
        .map_err(|error| error.to_string())?;
    let mut bare_samples = Vec::with_capacity(COMMITS);
    runtime()?.block_on(async {
        let store = dir.path().join("store");
        let mut bench = Bench::new(&store).await?;
        for number in 0..COMMITS {
            bench.world.write(&bench.id, "/n", &number.to_string()).map_err(|error| error.to_string())?;
            bench.turn().await?;
            let newest = store.join(format!("sandboxes/box/versions/v{}.json", number + 1));
            let bytes = fs::read(newest).map_err(|error| error.to_string())?;
            let took = bare_commit(&bare, &bytes, number).map_err(|error| error.to_string())?;
            bare_samples.push(took.as_secs_f64() * 1e3);
        }
        bench.engine.close().await;
        Ok::<(), String>(())
    })?;
    let mut samples = std::mem::take(&mut commits.0.lock().1);
    let (commit, floor) = (percentile(&mut samples, 50.0), percentile(&mut bare_samples, 50.0));
    report.add("commit_ms_p50", commit);
    report.add("commit_bare_ms_p50", floor);
    report.add_bounded("commit_ratio", commit / floor, 1.3);
    Ok(())
}
