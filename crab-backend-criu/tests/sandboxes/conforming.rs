//! The suite that every backend passes, and what it does not ask.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use crab_core::{AtCut, Condition, ErrorKind, NoCut, Result};
use crab_examples::sandbox::Sandbox;

use crate::support::{eventually, get, python, set, world};

#[tokio::test(flavor = "multi_thread")]
async fn the_backend_passes_the_suite_of_backends() {
    let Some(world) = world().await else { return };
    crab_core::conformance::backend(&world).await;
    world.assert_no_captures();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_the_caller_froze_stays_frozen() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    set(&sandbox, 7);
    sandbox.freeze().unwrap();
    let captured = world.capture_with(&sandbox, true, None, &mut NoCut).await.unwrap();
    assert_eq!(sandbox.condition().unwrap(), Condition::Frozen);
    assert!(captured.stopped_for().is_some());
    let artifact = captured.persist().await.unwrap();
    sandbox.thaw().unwrap();
    assert_eq!(get(&sandbox), Some(7));
    sandbox.kill().unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    assert_eq!(get(&sandbox), Some(7));
}

/// Counts as fast as it can, in a file of the root.
const COUNTER: &str = "
import os
fd = os.open('/root/count', os.O_RDWR | os.O_CREAT)
n = 0
while True:
    n += 1
    os.pwrite(fd, b'%020d' % n, 0)
";

fn count(sandbox: &Sandbox) -> Option<u64> {
    std::fs::read_to_string(sandbox.root().join("root/count")).ok()?.trim_start_matches('0').parse().ok()
}

struct Watching<'a> {
    sandbox: &'a Sandbox,
    seen: Option<u64>,
}

#[async_trait]
impl AtCut for Watching<'_> {
    async fn run(&mut self) -> Result<()> {
        let before = count(self.sandbox);
        for _ in 0..20 {
            tokio::time::sleep(Duration::from_millis(5)).await;
            assert_eq!(count(self.sandbox), before, "tasks run during the cut");
        }
        self.seen = before;
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_task_runs_during_the_cut_and_all_do_after_it() {
    let Some(world) = world().await else { return };
    let sandbox = world.bare();
    python(&sandbox, "counter", COUNTER);
    eventually("it counts", || count(&sandbox));
    for frozen in [false, true] {
        if frozen {
            sandbox.freeze().unwrap();
        }
        let mut watching = Watching { sandbox: &sandbox, seen: None };
        let captured = world.capture_with(&sandbox, frozen, None, &mut watching).await.unwrap();
        let seen = watching.seen.expect("the cut ran");
        if frozen {
            // CRIU opens the freezer while it holds the tasks by ptrace.
            assert_eq!(sandbox.condition().unwrap(), Condition::Frozen);
            sandbox.thaw().unwrap();
        } else {
            assert!(captured.stopped_for().expect("it is known") >= Duration::from_millis(100));
        }
        eventually("it goes on counting", || count(&sandbox).filter(|now| *now > seen));
        captured.discard().await.unwrap();
    }
}

struct Stuck(Arc<AtomicBool>);

#[async_trait]
impl AtCut for Stuck {
    async fn run(&mut self) -> Result<()> {
        self.0.store(true, Ordering::SeqCst);
        std::future::pending().await
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cut_that_outlasts_the_deadline_fails_the_capture_and_the_sandbox_runs() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    set(&sandbox, 3);
    for frozen in [false, true] {
        if frozen {
            sandbox.freeze().unwrap();
        }
        let reached = Arc::new(AtomicBool::new(false));
        let deadline = Instant::now() + Duration::from_secs(3);
        let mut stuck = Stuck(Arc::clone(&reached));
        let Err(error) = world.capture_with(&sandbox, frozen, Some(deadline), &mut stuck).await else {
            panic!("it cannot succeed")
        };
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
        assert!(reached.load(Ordering::SeqCst));
        let expected = if frozen { Condition::Frozen } else { Condition::Running };
        assert_eq!(error.sandbox_condition(), Some(expected));
        assert_eq!(sandbox.condition().unwrap(), expected);
        sandbox.thaw().unwrap();
        assert_eq!(get(&sandbox), Some(3));
    }
    world.assert_no_captures();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_capture_whose_caller_goes_away_at_the_cut_leaves_the_sandbox_running() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    set(&sandbox, 3);
    let reached = Arc::new(AtomicBool::new(false));
    {
        let mut stuck = Stuck(Arc::clone(&reached));
        let capture = world.capture_with(&sandbox, false, None, &mut stuck);
        let gone = async {
            while !reached.load(Ordering::SeqCst) {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::select! {
            _ = capture => panic!("it cannot end"),
            () = gone => {}
        }
    }
    eventually("it runs", || (sandbox.condition().unwrap() == Condition::Running).then_some(()));
    assert_eq!(get(&sandbox), Some(3));
    // The thread that was left behind has cleared away and given back the name.
    world.checkpoint(&sandbox).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_restore_whose_caller_goes_away_leaves_no_tree() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    let artifact = world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    for wait in [0, 5, 20, 50] {
        let restore = world.restore(&sandbox, &artifact);
        // However far it comes: the next one waits for its end.
        let _ = tokio::time::timeout(Duration::from_millis(wait), restore).await;
        sandbox.kill().unwrap();
    }
    // The thread of the last one notices, and clears away.
    eventually("nothing is left", || world.has_no_captures().then_some(()));
    sandbox.kill().unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    assert_eq!(get(&sandbox), Some(0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frozen_sandbox_whose_capture_is_dropped_can_be_thawed_for_good() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    for wait in [0, 10, 25, 40, 60, 80] {
        sandbox.freeze().unwrap();
        {
            let mut at_cut = NoCut;
            let capture = world.capture_with(&sandbox, true, None, &mut at_cut);
            let _ = tokio::time::timeout(Duration::from_millis(wait), capture).await;
        }
        sandbox.thaw().unwrap();
        // The next capture waits until the thread of the first is done.
        world.capture(&sandbox).await.unwrap().discard().await.unwrap();
        assert_eq!(sandbox.condition().unwrap(), Condition::Running, "dropped after {wait} ms");
        assert_eq!(get(&sandbox), Some(0));
    }
    world.assert_no_captures();
}
