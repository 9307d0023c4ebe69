//! What else than a crash befalls a sandbox: its agent takes turns back, its host must be left, others branch off it, and
//! it is one of many that one service looks after.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crab_examples::crash::{Crash, Moment, Numbers};
use crab_examples::crowd::Crowd;
use crab_examples::run::{Recovery, Runner};
use crab_examples::sandbox::{criu_binary, home, left_for_good};
use crab_examples::session::Session;

/// Why the machine cannot run these tests, said once per test.
fn lacking() -> bool {
    let ready = home().join("pool/base/sbin/crab-init").exists() && criu_binary().exists();
    if !ready {
        println!("skipped: sandboxes (root and `cargo xtask setup` are needed)");
    }
    !ready
}

fn runner(session: &str) -> Runner {
    Runner::new(Arc::new(Session::named(session).unwrap()), Path::new(env!("CARGO_BIN_EXE_demo")))
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_end_the_same_twice_and_after_a_crash() {
    if lacking() {
        return;
    }
    // The others are worked through by `cargo xtask eval`.
    for (session, moment) in
        [("night-watch", Moment::Command), ("loan-database", Moment::Answer), ("repl-survey", Moment::CrabAndSandbox)]
    {
        let mut runner = runner(session);
        let truth = runner.truth("faults-truth").await.unwrap();
        let again = runner.truth("faults-again").await.unwrap();
        assert_eq!(again.end.differences(&truth.end), Vec::<String>::new(), "{session}");
        runner.command_times = truth.command_times.clone();
        let crash = Crash::at(runner.session.responses.len() * 2 / 3, moment, &mut Numbers(3));
        let outcome = runner.run("faults-crash", Recovery::Crab, Some(crash)).await.unwrap();
        assert!(outcome.crashed && !outcome.restores.is_empty(), "{session}");
        assert_eq!(outcome.end.differences(&truth.end), Vec::<String>::new(), "{session}");
    }
    assert_eq!(left_for_good("faults-"), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn turns_that_are_taken_back_are_as_if_they_had_not_been() {
    if lacking() {
        return;
    }
    let runner = runner("job-queue");
    let truth = runner.truth("back-truth").await.unwrap();
    let outcome = runner.take_back("back-run", 14, 4).await.unwrap();
    assert_eq!(outcome.restores.len(), 1);
    assert!(outcome.restores[0].turn < 14, "{:?}", outcome.restores);
    assert_eq!(outcome.end.differences(&truth.end), Vec::<String>::new());
    assert_eq!(left_for_good("back-"), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_leaves_its_host_goes_on_elsewhere() {
    if lacking() {
        return;
    }
    let runner = runner("job-queue");
    let truth = runner.truth("leave-truth").await.unwrap();
    let outcome = runner.evacuate("leave-run", 14).await.unwrap();
    let evacuation = outcome.evacuation.expect("it left");
    assert!(evacuation.bytes > 0 && evacuation.left <= evacuation.whole, "{evacuation:?}");
    assert!(outcome.restores[0].processes);
    assert_eq!(outcome.end.differences(&truth.end), Vec::<String>::new());
    assert_eq!(left_for_good("leave-"), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn branches_end_as_their_trunk() {
    if lacking() {
        return;
    }
    let runner = runner("job-queue");
    let truth = runner.truth("tree-truth").await.unwrap();
    let outcomes = runner.branch("tree-run", 14, 2).await.unwrap();
    assert_eq!(outcomes.len(), 3);
    for (number, outcome) in outcomes.iter().enumerate() {
        assert_eq!(outcome.end.differences(&truth.end), Vec::<String>::new(), "branch {number}");
    }
    assert_eq!(left_for_good("tree-"), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn one_service_looks_after_many_sandboxes() {
    if lacking() {
        return;
    }
    let runners: Vec<Runner> =
        ["job-queue", "scratch-work", "night-watch", "job-queue", "parallel-audit"].map(runner).into();
    let mut truths = Vec::new();
    for (at, runner) in runners.iter().enumerate() {
        truths.push(runner.truth(&format!("crowd-truth{at}")).await.unwrap());
    }
    let crowd = Crowd::launch(&runners, "crowd-run", Some(Recovery::Crab)).await.unwrap();
    assert!(crowd.crab().is_some());
    let outcomes = crowd.work(&[Duration::ZERO, Duration::from_millis(300)], || {}).await;
    assert_eq!(outcomes.len(), runners.len());
    for ((runner, truth), outcome) in runners.iter().zip(&truths).zip(outcomes) {
        let (name, outcome) = (&runner.session.name, outcome.unwrap());
        assert_eq!(outcome.end.differences(&truth.end), Vec::<String>::new(), "{name}");
        let turns = runner.session.responses.len() + 1;
        assert_eq!((outcome.told.covered.len(), &outcome.told.uncovered[..]), (turns, &[][..]), "{name}");
    }
    assert_eq!(left_for_good("crowd-"), Vec::<String>::new());
}
