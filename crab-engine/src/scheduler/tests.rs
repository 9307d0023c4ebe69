//! The properties, by simulation: requests arrive, are promoted, run for a time, end.

use super::*;
use proptest::prelude::*;
use std::collections::{BTreeSet, HashMap};

#[derive(Clone, Debug)]
struct Arrival {
    at: u64,
    sandbox: u8,
    process: bool,
    exposed_after: Option<u64>,
    capture: u64,
    persist: u64,
    fails_once: bool,
    /// For so long it steps aside when it begins.
    aside: u64,
}

fn arrivals(most: usize) -> impl Strategy<Value = Vec<Arrival>> {
    prop::collection::vec(
        (
            0..60u64,
            0..8u8,
            any::<bool>(),
            prop::option::of(0..30u64),
            1..9u64,
            1..9u64,
            prop::bool::weighted(0.1),
            prop_oneof![4 => Just(0u64), 1 => 1..20u64],
        ),
        1..most,
    )
    .prop_map(|raw| {
        let mut all: Vec<Arrival> = raw
            .into_iter()
            .map(|(at, sandbox, process, exposed_after, capture, persist, fails_once, aside)| Arrival {
                at,
                sandbox,
                process,
                exposed_after,
                capture,
                persist,
                fails_once,
                aside,
            })
            .collect();
        all.sort_by_key(|arrival| arrival.at);
        all
    })
}

fn limits() -> impl Strategy<Value = Limits> {
    (1..4usize, 1..4usize, 1..4usize, 0..4u32).prop_map(|(process, filesystem, persist, urgent_burst)| Limits {
        process,
        filesystem,
        persist,
        urgent_burst,
        waiting: 1000,
    })
}

#[derive(Debug, Default)]
struct Trace {
    /// By request: the job that served it, when it began and when it ended.
    served: HashMap<usize, JobId>,
    began: HashMap<JobId, u64>,
    ended: HashMap<JobId, u64>,
    /// Starts per lane in order.
    starts: Vec<Start>,
    order: HashMap<u8, Vec<JobId>>,
}

/// Runs a scenario to its end and checks, at each instant, what must hold at each instant.
fn simulate(limits: Limits, arrivals: &[Arrival]) -> Trace {
    let mut scheduler: Scheduler<u8> = Scheduler::new(limits);
    let mut trace = Trace::default();
    let mut work: HashMap<JobId, &Arrival> = HashMap::new();
    let mut failed: BTreeSet<JobId> = BTreeSet::new();
    let mut running: BTreeMap<(u64, JobId), Lane> = BTreeMap::new();
    let mut aside: BTreeMap<(u64, JobId), Lane> = BTreeMap::new();
    let mut now = 0;
    loop {
        for (index, arrival) in arrivals.iter().enumerate() {
            if arrival.at == now {
                let lane = if arrival.process { Lane::Process } else { Lane::Filesystem };
                let submitted = scheduler.submit(&arrival.sandbox, lane, false).unwrap();
                assert!(!trace.began.contains_key(&submitted.job), "a request joined a job that had begun");
                work.entry(submitted.job).or_insert(arrival);
                trace.served.insert(index, submitted.job);
            }
            if arrival.exposed_after.is_some_and(|after| arrival.at + after == now) {
                let job = trace.served[&index];
                scheduler.promote(job);
            }
        }
        let due: Vec<_> =
            running.range(..=(now, JobId { made: u64::MAX, slot: 0 })).map(|(key, lane)| (*key, *lane)).collect();
        for ((at, job), lane) in due {
            running.remove(&(at, job));
            match lane {
                Lane::Persist if work[&job].fails_once && failed.insert(job) => {
                    scheduler.advance(job, Lane::Process, true);
                }
                Lane::Persist => {
                    scheduler.finish(job);
                    trace.ended.insert(job, now);
                }
                _ => scheduler.advance(job, Lane::Persist, false),
            }
        }
        while let Some(((_, job), lane)) =
            aside.first_key_value().map(|(key, lane)| (*key, *lane)).filter(|e| e.0.0 <= now)
        {
            aside.pop_first();
            scheduler.advance(job, lane, false);
        }
        while let Some(start) = scheduler.start() {
            let arrival = work[&start.job];
            if start.begins && arrival.aside > 0 {
                scheduler.step_aside(start.job);
                aside.insert((now + arrival.aside, start.job), start.lane);
            }
            trace.starts.push(start);
            if start.begins {
                assert!(trace.began.insert(start.job, now).is_none(), "a job began twice");
                trace.order.entry(arrival.sandbox).or_default().push(start.job);
            }
            if start.begins && arrival.aside > 0 {
                continue;
            }
            let takes = if start.lane == Lane::Persist { arrival.persist } else { arrival.capture };
            running.insert((now + takes, start.job), start.lane);
        }
        for (lane, limit) in
            [(Lane::Process, limits.process), (Lane::Filesystem, limits.filesystem), (Lane::Persist, limits.persist)]
        {
            let busy = running.values().filter(|running| **running == lane).count();
            assert!(busy <= limit, "more workers than allowed");
            assert!(busy == limit || scheduler.depth(lane).0 == 0, "a worker idles while a job waits");
        }
        let mut sandboxes = BTreeSet::new();
        for (_, job) in running.keys().chain(aside.keys()) {
            assert!(sandboxes.insert(work[job].sandbox), "two jobs of one sandbox at once");
        }
        now += 1;
        if now > 60 && running.is_empty() && aside.is_empty() {
            assert!(scheduler.is_idle(), "a job never ended: {scheduler:?}");
            assert_eq!(scheduler.waiting(), 0);
            return trace;
        }
        assert!(now < 100_000, "the simulation does not end");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn every_request_is_served_by_a_job_that_began_after_it_and_ended(
        limits in limits(), arrivals in arrivals(60),
    ) {
        let trace = simulate(limits, &arrivals);
        for (index, arrival) in arrivals.iter().enumerate() {
            let job = trace.served[&index];
            prop_assert!(trace.began[&job] >= arrival.at);
            prop_assert!(trace.ended[&job] > arrival.at);
        }
        // In order per sandbox: jobs are numbered as they were made.
        for jobs in trace.order.values() {
            prop_assert!(jobs.is_sorted());
        }
        // Work is conserved: each job captures and persists once, or twice where it was told to.
        for job in trace.began.keys() {
            let persists = trace.starts.iter().filter(|s| s.job == *job && s.lane == Lane::Persist).count();
            prop_assert!(persists == 1 || persists == 2);
        }
    }

    #[test]
    fn a_promotion_never_delays_the_promoted(
        limits in limits(), arrivals in arrivals(40), chosen: prop::sample::Index, after in 0..20u64,
    ) {
        // One request per sandbox and one lane: what is promoted is then one job in one queue, and the comparison is
        // of the queue alone, not of which requests happened to share a job.
        let mut arrivals = arrivals;
        let limits = Limits { process: limits.process, persist: 1000, ..limits };
        for (index, arrival) in arrivals.iter_mut().enumerate() {
            arrival.sandbox = u8::try_from(index).unwrap();
            arrival.process = true;
            arrival.fails_once = false;
            arrival.aside = 0;
        }
        let index = chosen.index(arrivals.len());
        arrivals[index].exposed_after = None;
        let before = simulate(limits, &arrivals);
        arrivals[index].exposed_after = Some(after);
        let promoted = simulate(limits, &arrivals);
        let job = before.served[&index];
        prop_assert!(promoted.began[&job] <= before.began[&job]);
        prop_assert!(promoted.ended[&job] <= before.ended[&job]);
    }

    #[test]
    fn no_job_starves(burst in 0..5u32, older in 0..6u64) {
        // One worker, an endless stream of urgent jobs, and a normal one with so many older than it.
        let mut scheduler = Scheduler::new(Limits { process: 1, urgent_burst: burst, ..Limits::default() });
        let mut name = 0u64;
        let mut submit = |scheduler: &mut Scheduler<u64>, urgent| {
            name += 1;
            scheduler.submit(&name, Lane::Process, urgent).unwrap().job
        };
        for _ in 0..older {
            submit(&mut scheduler, false);
        }
        let normal = submit(&mut scheduler, false);
        let bound = u64::from(burst + 1) * (older + 1);
        for starts in 1.. {
            prop_assert!(starts <= bound, "still waiting after {} starts", starts - 1);
            submit(&mut scheduler, true);
            let start = scheduler.start().unwrap();
            scheduler.finish(start.job);
            if start.job == normal {
                break;
            }
        }
    }
}

fn one_at_a_time() -> Limits {
    Limits { process: 1, filesystem: 1, persist: 1, urgent_burst: 4, waiting: 8 }
}

#[test]
fn requests_before_the_capture_share_it_and_later_ones_share_the_next() {
    let mut scheduler = Scheduler::new(one_at_a_time());
    let first = scheduler.submit(&"a", Lane::Filesystem, false).unwrap();
    let second = scheduler.submit(&"a", Lane::Process, false).unwrap();
    assert_eq!(second, Submitted { job: first.job, shared: true });
    let start = scheduler.start().unwrap();
    assert_eq!(start, Start { job: first.job, lane: Lane::Process, begins: true });
    let third = scheduler.submit(&"a", Lane::Filesystem, false).unwrap();
    assert_ne!(third.job, first.job);
    assert!(scheduler.submit(&"a", Lane::Filesystem, false).unwrap().shared);
    assert_eq!(scheduler.start(), None, "the sandbox's first job has not ended");
    scheduler.finish(first.job);
    assert_eq!(scheduler.start().map(|start| start.job), Some(third.job));
}

#[test]
fn a_job_that_blocks_an_urgent_one_of_its_sandbox_becomes_urgent() {
    let mut scheduler = Scheduler::new(one_at_a_time());
    let other = scheduler.submit(&"b", Lane::Process, false).unwrap().job;
    let begun = scheduler.submit(&"a", Lane::Filesystem, false).unwrap().job;
    while scheduler.start().is_some() {}
    scheduler.advance(other, Lane::Persist, false);
    scheduler.advance(begun, Lane::Persist, false);
    while scheduler.start().is_some() {}
    let next = scheduler.submit(&"a", Lane::Process, true).unwrap().job;
    assert!(scheduler.is_urgent(next) && scheduler.is_urgent(begun) && !scheduler.is_urgent(other));
}

#[test]
fn the_queue_is_bounded_and_says_so() {
    let mut scheduler = Scheduler::new(one_at_a_time());
    for _ in 0..8 {
        scheduler.submit(&"a", Lane::Process, false).unwrap();
    }
    assert_eq!(scheduler.submit(&"b", Lane::Process, true), Err(QueueFull));
    scheduler.start().unwrap();
    assert!(scheduler.submit(&"b", Lane::Process, true).is_ok());
}

#[test]
fn cancelling_takes_what_has_not_begun_and_leaves_what_has() {
    let mut scheduler = Scheduler::new(one_at_a_time());
    let begun = scheduler.submit(&"a", Lane::Process, false).unwrap().job;
    scheduler.start().unwrap();
    let open = scheduler.submit(&"a", Lane::Process, true).unwrap().job;
    assert_eq!(scheduler.cancel(&"a"), Some(open));
    assert_eq!(scheduler.cancel(&"a"), None);
    assert_eq!(scheduler.begun(&"a"), Some(begun));
    scheduler.finish(begun);
    assert!(scheduler.is_idle());
    assert_eq!(scheduler.waiting(), 0);
}

#[test]
fn a_lane_that_rests_starts_nothing_and_keeps_the_places() {
    let mut scheduler = Scheduler::new(one_at_a_time());
    scheduler.rest(Lane::Filesystem, true);
    let first = scheduler.submit(&"a", Lane::Filesystem, false).unwrap().job;
    let urgent = scheduler.submit(&"b", Lane::Filesystem, true).unwrap().job;
    let other = scheduler.submit(&"c", Lane::Process, false).unwrap().job;
    assert_eq!(scheduler.start().map(|start| start.job), Some(other));
    assert_eq!(scheduler.start(), None);
    scheduler.rest(Lane::Filesystem, false);
    assert_eq!(scheduler.start().map(|start| start.job), Some(urgent));
    scheduler.finish(urgent);
    assert_eq!(scheduler.start().map(|start| start.job), Some(first));
}

#[test]
fn a_job_that_steps_aside_gives_its_worker_to_others_and_keeps_its_place() {
    let mut scheduler = Scheduler::new(one_at_a_time());
    let aside = scheduler.submit(&"a", Lane::Process, false).unwrap().job;
    scheduler.start().unwrap();
    scheduler.step_aside(aside);
    scheduler.step_aside(aside);
    let other = scheduler.submit(&"b", Lane::Process, false).unwrap().job;
    let third = scheduler.submit(&"c", Lane::Process, false).unwrap().job;
    assert_eq!(scheduler.start().map(|start| start.job), Some(other));
    // It is older than the third; and a promotion meanwhile counts.
    let next = scheduler.submit(&"a", Lane::Process, true).unwrap().job;
    assert!(scheduler.is_urgent(aside) && scheduler.is_urgent(next));
    scheduler.advance(aside, Lane::Process, false);
    assert_eq!(scheduler.start(), None, "the worker is taken");
    scheduler.finish(other);
    assert_eq!(scheduler.start(), Some(Start { job: aside, lane: Lane::Process, begins: false }));
    scheduler.step_aside(aside);
    assert_eq!(scheduler.start().map(|start| start.job), Some(third));
    // It may end without a worker, too.
    scheduler.finish(aside);
    scheduler.finish(third);
    assert_eq!(scheduler.start().map(|start| start.job), Some(next));
    scheduler.finish(next);
    assert!(scheduler.is_idle());
}
