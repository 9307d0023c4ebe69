//! Restores and forks: what comes back, what is kept, what is said.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use common::{Fixture, assert_sound, boundary, close, newest, reopen};
use crab_core::memory::{Fault, Step};
use crab_core::{Condition, Domain, ErrorKind, Half, OperationId, Origin, TurnNumber, Verdict, VersionId};
use crab_engine::{Engine, LostTurns, ProcessOutcome, RestoreOptions, Select};

/// Turn `n` writes `/n`, and the server remembers `n`.
async fn work(f: &Fixture, engine: &Engine, turns: std::ops::RangeInclusive<u64>) {
    for turn in turns {
        f.world.write(&f.id, &format!("/{turn}"), "x").unwrap();
        f.world.remember(&f.id, "server", &turn.to_string()).unwrap();
        f.covered(engine, turn).await;
    }
}

fn state(f: &Fixture) -> (Vec<String>, String) {
    (f.world.files(&f.id).into_keys().collect(), f.world.processes(&f.id)["server"].clone())
}

fn named(operation: &str) -> RestoreOptions {
    RestoreOptions { operation: Some(OperationId::new(operation).unwrap()), ..RestoreOptions::default() }
}

#[tokio::test]
async fn the_latest_version_comes_back_after_a_crash_in_the_middle_of_a_turn() {
    let f = Fixture::new();
    let engine = f.engine().await;
    work(&f, &engine, 1..=3).await;
    f.world.write(&f.id, "/half-done", "x").unwrap();
    f.world.crash(&f.id);
    let report = engine.restore(&f.id, Select::Latest, named("after-crash")).await.unwrap();
    assert_eq!((report.version, report.turn, report.lost), (VersionId(3), TurnNumber(3), None));
    assert!(matches!(report.process, ProcessOutcome::Restored { .. }));
    assert_eq!(state(&f), (vec!["/1".into(), "/2".into(), "/3".into()], "3".into()));
    // What was replaced is a version of its own.
    let kept = newest(&engine, &f.id);
    assert_eq!(report.replaced, Some(kept.version));
    assert!(matches!(&kept.origin, Origin::Replaced { operation } if operation.as_str() == "after-crash"));
    // It goes on from there.
    work(&f, &engine, 4..=4).await;
    assert_eq!(newest(&engine, &f.id).parent, Some(VersionId(3)));
    assert_sound(&f.world, &engine, "").await;
}

#[tokio::test]
async fn an_older_version_comes_back_and_the_newer_ones_stay() {
    let f = Fixture::new();
    let engine = f.engine().await;
    work(&f, &engine, 1..=4).await;
    let report = engine.restore(&f.id, Select::Turn(TurnNumber(2)), RestoreOptions::default()).await.unwrap();
    assert_eq!(report.version, VersionId(2));
    assert_eq!(report.lost, Some(LostTurns { first: TurnNumber(3), last: Some(TurnNumber(4)) }));
    assert_eq!(report.effects.len(), 2, "nobody watched what turns 3 and 4 sent");
    assert_eq!(state(&f).1, "2");
    // The standing version is the restored one, not the newest, also after a restart.
    assert_eq!(engine.sandboxes()[0].standing, Some(VersionId(2)));
    close(engine).await;
    let engine = reopen(|| f.builder()).await;
    assert_eq!(engine.sandboxes()[0].standing, Some(VersionId(2)));
    let report = engine.restore(&f.id, Select::Latest, RestoreOptions::default()).await.unwrap();
    assert_eq!(report.version, VersionId(2));
    // And forward again.
    let report = engine.restore(&f.id, Select::Version(VersionId(4)), RestoreOptions::default()).await.unwrap();
    assert_eq!((report.turn, state(&f).1.as_str()), (TurnNumber(4), "4"));
    // A kept state comes back too, without its processes.
    let kept = newest(&engine, &f.id).version;
    let report = engine.restore(&f.id, Select::Version(kept), RestoreOptions::default()).await.unwrap();
    assert!(matches!(report.process, ProcessOutcome::Relaunched { .. }));
    assert_sound(&f.world, &engine, "").await;
}

#[tokio::test]
async fn a_turn_that_was_skipped_is_covered_by_the_version_before_it() {
    let f = Fixture::new();
    let engine = f.engine().await;
    work(&f, &engine, 1..=2).await;
    f.covered(&engine, 3).await;
    work(&f, &engine, 4..=4).await;
    let report = engine.restore(&f.id, Select::Turn(TurnNumber(3)), RestoreOptions::default()).await.unwrap();
    assert_eq!(report.version, VersionId(2));
    for (turn, found) in [(4, Some(3)), (2, Some(2)), (1, Some(1)), (0, None), (5, None)] {
        let restored = engine.restore(&f.id, Select::Turn(TurnNumber(turn)), RestoreOptions::default()).await;
        assert_eq!(restored.ok().map(|report| report.version.0), found, "turn {turn}");
    }
}

#[tokio::test]
async fn the_same_operation_again_does_nothing_and_says_the_same() {
    let f = Fixture::new();
    let engine = f.engine().await;
    work(&f, &engine, 1..=2).await;
    let report = engine.restore(&f.id, Select::Version(VersionId(1)), named("once")).await.unwrap();
    work(&f, &engine, 3..=3).await;
    let kills = || f.world.steps().iter().filter(|step| **step == Step::Kill).count();
    let before = kills();
    assert_eq!(engine.restore(&f.id, Select::Latest, named("once")).await.unwrap(), report);
    close(engine).await;
    let engine = reopen(|| f.builder()).await;
    assert_eq!(engine.restore(&f.id, Select::Latest, named("once")).await.unwrap(), report);
    assert_eq!(kills(), before);
    let other = common::id("other");
    f.world.create(&other);
    let error = engine.restore(&other, Select::Latest, named("once")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
}

#[tokio::test]
async fn nothing_is_touched_where_the_version_cannot_be_restored() {
    let f = Fixture::new();
    let engine = f.engine().await;
    work(&f, &engine, 1..=2).await;
    let files = common::files_below(&f.store());
    let missing = engine.restore(&f.id, Select::Version(VersionId(77)), RestoreOptions::default()).await.unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound);
    assert_eq!(missing.sandbox_condition(), Some(Condition::Running));
    let nobody = engine.restore(&common::id("nobody"), Select::Latest, RestoreOptions::default()).await.unwrap_err();
    assert_eq!(nobody.kind(), ErrorKind::NotFound);
    f.world.damage(newest(&engine, &f.id).process.artifact().unwrap());
    let damaged = engine.restore(&f.id, Select::Latest, RestoreOptions::default()).await.unwrap_err();
    assert_eq!(damaged.kind(), ErrorKind::Corrupt);
    assert!(damaged.to_string().contains("allow a fallback"), "{damaged}");
    let late = RestoreOptions { deadline: Some(Instant::now()), ..RestoreOptions::default() };
    let late = engine.restore(&f.id, Select::Version(VersionId(1)), late).await.unwrap_err();
    assert_eq!(late.kind(), ErrorKind::TimedOut);
    assert_eq!(state(&f).1, "2");
    assert_eq!(common::files_below(&f.store()), files);
    // Turns go on.
    work(&f, &engine, 3..=3).await;
}

/// An engine that takes its time at a step, once `armed`.
fn slow_at(f: &Fixture, step: &'static str, armed: &Arc<AtomicBool>) -> crab_engine::EngineBuilder {
    let armed = armed.clone();
    f.builder().steps(Arc::new(move |reached| {
        if reached == step && armed.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(60));
        }
        Ok(())
    }))
}

fn within(time: Duration) -> RestoreOptions {
    RestoreOptions { deadline: Some(Instant::now() + time), ..RestoreOptions::default() }
}

#[tokio::test]
async fn a_restore_that_misses_its_deadline_at_any_step_before_the_kill_changes_nothing() {
    let late = Duration::from_millis(30);
    for case in ["verify", "fits", "record", "lock"] {
        let f = Fixture::new();
        let armed = Arc::new(AtomicBool::new(false));
        let engine = slow_at(&f, "store.fsync", &armed).open().await.unwrap();
        engine.attach(&f.id).await.unwrap();
        work(&f, &engine, 1..=2).await;
        let mut begun = None;
        match case {
            "verify" => f.world.order(Step::Verify(Domain::Process), Fault::Hang),
            "fits" => f.world.order(Step::Fits(Domain::Filesystem), Fault::Hang),
            "record" => armed.store(true, Ordering::SeqCst),
            _ => {
                f.world.write(&f.id, "/new", "x").unwrap();
                f.world.order(Step::Persist(Domain::Filesystem), Fault::Hang);
                begun = Some(boundary(&engine, &f.id, 3).await);
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        }
        let before = state(&f);
        let mut waits = boundary(&engine, &f.id, 4).await;
        let error = engine.restore(&f.id, Select::Version(VersionId(1)), within(late)).await.unwrap_err();
        armed.store(false, Ordering::SeqCst);
        assert_eq!(error.kind(), ErrorKind::TimedOut, "{case}: {error}");
        assert_eq!(error.sandbox_condition(), Some(Condition::Running), "{case}: {error}");
        assert_eq!(state(&f), before, "{case}");
        // Its turns were not touched either.
        assert!(matches!(waits.verdict().await, Verdict::Durable(_)), "{case}");
        if let Some(mut begun) = begun {
            assert!(matches!(begun.verdict().await, Verdict::Durable(_)), "{case}");
        }
        assert_eq!(engine.sandboxes()[0].unfinished, None, "{case}");
        close(engine).await;
        let engine = reopen(|| f.builder()).await;
        assert!(engine.opened().unfinished.is_empty(), "{case}");
        assert_sound(&f.world, &engine, case).await;
    }
}

#[tokio::test]
async fn a_restore_that_has_ended_the_tasks_by_its_deadline_is_carried_through() {
    for step in ["restore.recorded", "restore.killed", "restore.files", "restore.processes"] {
        let f = Fixture::new();
        let armed = Arc::new(AtomicBool::new(false));
        let engine = slow_at(&f, step, &armed).open().await.unwrap();
        engine.attach(&f.id).await.unwrap();
        work(&f, &engine, 1..=2).await;
        armed.store(true, Ordering::SeqCst);
        let report = engine.restore(&f.id, Select::Version(VersionId(1)), within(Duration::from_millis(40))).await;
        let report = report.unwrap_or_else(|error| panic!("{step}: {error}"));
        assert_eq!(report.version, VersionId(1), "{step}");
        assert_eq!(state(&f).1, "1", "{step}");
        assert_sound(&f.world, &engine, step).await;
    }
}

#[tokio::test]
async fn a_root_or_a_host_that_does_not_fit_is_told_before_anything_is_touched() {
    for domain in [Domain::Filesystem, Domain::Process] {
        let f = Fixture::new();
        let engine = f.engine().await;
        work(&f, &engine, 1..=2).await;
        f.world.remember(&f.id, "server", "unsaved").unwrap();
        let fork = common::id("fork");
        f.world.create_stopped(&fork);
        f.world.order(Step::Fits(domain), Fault::Error(ErrorKind::InvalidInput));
        f.world.order(Step::Fits(domain), Fault::Error(ErrorKind::InvalidInput));
        let errors = [
            engine.restore(&f.id, Select::Version(VersionId(1)), RestoreOptions::default()).await.unwrap_err(),
            engine.fork(&f.id, VersionId(1), &fork, Default::default()).await.unwrap_err(),
        ];
        for error in errors {
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        }
        assert_eq!(state(&f).1, "unsaved");
        assert_eq!(engine.sandboxes().len(), 1);
        work(&f, &engine, 3..=3).await;
    }
}

#[tokio::test]
async fn a_sandbox_that_is_being_restored_holds_up_no_worker() {
    let f = Fixture::new();
    let limits = crab_engine::scheduler::Limits { process: 1, filesystem: 1, persist: 1, urgent_burst: 4, waiting: 16 };
    let deadlines = crab_engine::Deadlines { restore: Duration::from_secs(2), ..common::short() };
    let engine = f.builder().limits(limits).deadlines(deadlines).open().await.unwrap();
    engine.attach(&f.id).await.unwrap();
    work(&f, &engine, 1..=1).await;
    let other = common::id("other");
    f.world.create(&other);
    engine.attach(&other).await.unwrap();
    // It is verified for long, while the sandbox's next turn is there already.
    f.world.order(Step::Verify(Domain::Process), Fault::Hang);
    let restored = {
        let (engine, id) = (engine.clone(), f.id.clone());
        tokio::spawn(async move { engine.restore(&id, Select::Latest, RestoreOptions::default()).await })
    };
    tokio::time::sleep(Duration::from_millis(10)).await;
    f.world.remember(&f.id, "server", "2").unwrap();
    let mut waits = boundary(&engine, &f.id, 2).await;
    assert!(matches!(common::turn(&engine, &other, 1).await, Verdict::Durable(_)));
    assert!(!restored.is_finished(), "the other one waited for the restore");
    assert_eq!(restored.await.unwrap().unwrap_err().kind(), ErrorKind::TimedOut);
    assert!(matches!(waits.verdict().await, Verdict::Durable(VersionId(2))));
}

#[tokio::test]
async fn a_fallback_passes_over_what_is_damaged_and_says_what_is_lost() {
    let f = Fixture::new();
    let engine = f.engine().await;
    work(&f, &engine, 1..=4).await;
    let versions = engine.versions(&f.id);
    f.world.damage(versions[3].filesystem.artifact().unwrap());
    f.world.damage(versions[2].process.artifact().unwrap());
    let options = RestoreOptions { allow_fallback: true, ..RestoreOptions::default() };
    let report = engine.restore(&f.id, Select::Latest, options).await.unwrap();
    assert_eq!(report.version, VersionId(2));
    assert_eq!(report.passed_over.iter().map(|passed| passed.version.0).collect::<Vec<_>>(), [4, 3]);
    assert_eq!(report.lost, Some(LostTurns { first: TurnNumber(3), last: Some(TurnNumber(4)) }));
    assert_eq!(state(&f).1, "2");
}

#[tokio::test]
async fn a_torn_newest_manifest_is_not_silently_passed_over() {
    let f = Fixture::new();
    let engine = f.engine().await;
    work(&f, &engine, 1..=3).await;
    close(engine).await;
    let path = f.store().join("sandboxes/box/versions/v3.json");
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, &text[..200]).unwrap();
    let engine = reopen(|| f.builder()).await;
    assert_eq!(engine.opened().damaged.len(), 1);
    assert_eq!(engine.opened().orphans_removed, 0, "what the torn manifest names may still be wanted");
    let error = engine.restore(&f.id, Select::Latest, RestoreOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    let options = RestoreOptions { allow_fallback: true, ..RestoreOptions::default() };
    let report = engine.restore(&f.id, Select::Latest, options).await.unwrap();
    assert_eq!((report.version, report.passed_over[0].version), (VersionId(2), VersionId(3)));
    // Only the torn manifest knew which turn was the last.
    assert_eq!(report.lost, Some(LostTurns { first: TurnNumber(3), last: None }));
    // A person repairs it, and it is whole again.
    close(engine).await;
    std::fs::write(&path, text).unwrap();
    let engine = reopen(|| f.builder()).await;
    let report = engine.restore(&f.id, Select::Version(VersionId(3)), RestoreOptions::default()).await.unwrap();
    assert_eq!((report.turn, state(&f).1.as_str()), (TurnNumber(3), "3"));
}

#[tokio::test]
async fn a_restore_cancels_the_sandboxes_waiting_turns_and_waits_for_what_has_begun() {
    let f = Fixture::new();
    let engine = f.engine().await;
    work(&f, &engine, 1..=1).await;
    f.world.write(&f.id, "/new", "x").unwrap();
    f.world.order(Step::Persist(Domain::Filesystem), Fault::Hang);
    let mut begun = boundary(&engine, &f.id, 2).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    let mut waits = boundary(&engine, &f.id, 3).await;
    let report = engine.restore(&f.id, Select::Latest, RestoreOptions::default()).await.unwrap();
    assert!(matches!(waits.verdict().await, Verdict::Failed(error) if error.kind() == ErrorKind::Cancelled));
    assert!(matches!(begun.verdict().await, Verdict::Durable(VersionId(2))));
    assert_eq!(report.version, VersionId(2), "what had begun was the latest by then");
    assert_eq!(report.lost, Some(LostTurns { first: TurnNumber(3), last: Some(TurnNumber(3)) }));
}

#[tokio::test]
async fn a_failed_process_restore_says_what_is_in_place_and_can_be_repeated() {
    for step in [Step::Inherit, Step::Restore(Domain::Process), Step::AfterRestore(Domain::Process), Step::Adopt] {
        for fault in [Fault::Error(ErrorKind::Io), Fault::Panic, Fault::Hang] {
            let f = Fixture::new();
            let engine = f.engine().await;
            work(&f, &engine, 1..=2).await;
            f.world.write(&f.id, "/unsaved", "x").unwrap();
            f.world.order(step, fault);
            let error = engine.restore(&f.id, Select::Version(VersionId(1)), named("again")).await.unwrap_err();
            let context = format!("{step:?} {fault:?}: {error}");
            assert_eq!(error.sandbox_condition(), Some(Condition::Stopped), "{context}");
            assert_eq!(f.world.condition_of(&f.id), Condition::Stopped, "{context}");
            assert!(error.to_string().contains("the files of v1 are in place"), "{context}");
            assert_eq!(f.world.files(&f.id).len(), 1, "{context}");
            // Turns of a sandbox in between are refused.
            assert!(matches!(f.turn(&engine, 3).await, Verdict::Failed(_)));
            assert_eq!(engine.attach(&f.id).await.unwrap_err().kind(), ErrorKind::Busy, "{context}");
            let report = engine.restore(&f.id, Select::Latest, named("again")).await.unwrap();
            assert_eq!(report.version, VersionId(1), "{context}");
            assert_eq!(state(&f).1, "1");
            // What was replaced first is what is kept.
            let kept = report.replaced.unwrap();
            engine.restore(&f.id, Select::Version(kept), RestoreOptions::default()).await.unwrap();
            assert!(f.world.files(&f.id).contains_key("/unsaved"), "{context}");
            assert_sound(&f.world, &engine, &context).await;
        }
    }
}

#[tokio::test]
async fn another_restore_takes_the_place_of_one_that_did_not_end() {
    let f = Fixture::new();
    let engine = f.engine().await;
    work(&f, &engine, 1..=3).await;
    f.world.write(&f.id, "/unsaved", "x").unwrap();
    f.world.order(Step::Adopt, Fault::Error(ErrorKind::Io));
    engine.restore(&f.id, Select::Version(VersionId(1)), named("first")).await.unwrap_err();
    close(engine).await;
    let engine = reopen(|| f.builder()).await;
    assert_eq!(engine.opened().unfinished[0].operation.as_str(), "first");
    assert_eq!(engine.sandboxes()[0].unfinished.as_ref().map(|op| op.as_str()), Some("first"));
    let report = engine.restore(&f.id, Select::Version(VersionId(2)), named("second")).await.unwrap();
    assert_eq!(report.version, VersionId(2));
    assert!(engine.sandboxes()[0].unfinished.is_none());
    let error = engine.restore(&f.id, Select::Latest, named("first")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    // The first one's replaced state is still there.
    let versions = engine.versions(&f.id);
    let kept =
        versions.iter().find(|m| matches!(&m.origin, Origin::Replaced { operation } if operation.as_str() == "first"));
    let kept = kept.unwrap().version;
    engine.restore(&f.id, Select::Version(kept), RestoreOptions::default()).await.unwrap();
    assert!(f.world.files(&f.id).contains_key("/unsaved"));
    assert_sound(&f.world, &engine, "").await;
}

#[tokio::test]
async fn a_dropped_restore_is_carried_through() {
    let f = Fixture::new();
    let engine = f.engine().await;
    work(&f, &engine, 1..=2).await;
    {
        let restore = engine.restore(&f.id, Select::Version(VersionId(1)), named("dropped"));
        let _ = tokio::time::timeout(Duration::from_micros(300), restore).await;
    }
    let report = engine.restore(&f.id, Select::Version(VersionId(1)), named("dropped")).await.unwrap();
    assert_eq!((report.version, state(&f).1.as_str()), (VersionId(1), "1"));
    let kept = engine.versions(&f.id).iter().filter(|m| matches!(m.origin, Origin::Replaced { .. })).count();
    assert_eq!(kept, 1);
}

#[tokio::test]
async fn two_forks_run_beside_their_source() {
    let f = Fixture::new();
    let engine = f.engine().await;
    work(&f, &engine, 1..=2).await;
    for name in ["fork-1", "fork-2"] {
        let into = common::id(name);
        f.world.create_stopped(&into);
        let report = engine.fork(&f.id, VersionId(1), &into, Default::default()).await.unwrap();
        assert_eq!((report.version, report.turn), (VersionId(1), TurnNumber(1)));
        assert_eq!(f.world.files(&into).len(), 1);
        assert_eq!(f.world.processes(&into)["server"], "1");
        f.world.write(&into, "/own", name).unwrap();
        assert!(matches!(common::turn(&engine, &into, 2).await, Verdict::Durable(VersionId(2))));
        assert!(!f.world.files(&f.id).contains_key("/own"));
    }
    assert_eq!(state(&f).1, "2", "the source ran on");
    assert_sound(&f.world, &engine, "").await;
    // The shared artifacts live as long as anybody needs them.
    engine.remove(&f.id, VersionId(1)).await.unwrap();
    assert_sound(&f.world, &engine, "the source's version is gone").await;
    let into = common::id("fork-1");
    engine.restore(&into, Select::Version(VersionId(1)), RestoreOptions::default()).await.unwrap();
    assert_eq!(f.world.processes(&into)["server"], "1");
    for name in ["fork-1", "fork-2"] {
        engine.detach(&common::id(name)).await.unwrap();
        engine.forget(&common::id(name)).await.unwrap();
    }
    assert_sound(&f.world, &engine, "the forks are gone").await;
    assert!(matches!(newest(&engine, &f.id).process, Half::Stored(_)));
}

#[tokio::test]
async fn a_fork_into_something_that_exists_or_runs_is_refused() {
    let f = Fixture::new();
    let engine = f.engine().await;
    work(&f, &engine, 1..=1).await;
    let into = common::id("other");
    let fork = |into: crab_core::SandboxId| {
        let engine = engine.clone();
        let from = f.id.clone();
        async move { engine.fork(&from, VersionId(1), &into, Default::default()).await.unwrap_err().kind() }
    };
    assert_eq!(fork(into.clone()).await, ErrorKind::NotFound);
    f.world.create(&into);
    assert_eq!(fork(into.clone()).await, ErrorKind::Busy);
    assert_eq!(f.world.processes(&into).len(), 1, "it was not touched");
    engine.attach(&into).await.unwrap();
    assert_eq!(fork(into.clone()).await, ErrorKind::AlreadyExists);
    assert_eq!(fork(f.id.clone()).await, ErrorKind::InvalidInput);
}
