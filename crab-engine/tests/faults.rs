//! Something goes wrong at each step. Then: nothing is frozen, nothing durable is lost, nothing is claimed that is not.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use common::{Fixture, assert_sound, boundary, close, newest, reopen};
use crab_core::memory::{Fault, Step};
use crab_core::{Condition, Domain, Error, ErrorKind, OperationId, Verdict, VersionId};
use crab_engine::retention::Retention;
use crab_engine::{Engine, FailurePolicy, RestoreOptions, Select};
use parking_lot::Mutex;

const CHECKPOINT_STEPS: [Step; 11] = [
    Step::Describe,
    Step::Freeze,
    Step::Thaw,
    Step::Take,
    Step::Capture(Domain::Filesystem),
    Step::Capture(Domain::Process),
    Step::AfterCut(Domain::Filesystem),
    Step::AfterCut(Domain::Process),
    Step::Persist(Domain::Filesystem),
    Step::Persist(Domain::Process),
    Step::AfterPersist(Domain::Filesystem),
];

const FAULTS: [Fault; 4] = [Fault::Error(ErrorKind::Io), Fault::Error(ErrorKind::Full), Fault::Panic, Fault::Hang];

#[tokio::test]
async fn one_fault_in_a_checkpoint_is_made_up_for_by_the_retry() {
    for step in CHECKPOINT_STEPS {
        for fault in FAULTS {
            let f = Fixture::new();
            let engine = f.engine().await;
            f.covered(&engine, 1).await;
            f.world.write(&f.id, "/a", "1").unwrap();
            f.world.remember(&f.id, "server", "1").unwrap();
            f.world.order(step, fault);
            let context = format!("{step:?} {fault:?}");
            match f.turn(&engine, 2).await {
                Verdict::Durable(VersionId(2)) => {}
                other => panic!("{context}: {other:?}"),
            }
            assert_eq!(f.world.condition_of(&f.id), Condition::Running, "{context}");
            f.world.clear_orders();
            // A version that a fault cut off half way may leave an artifact until the store is opened anew.
            close(engine).await;
            let engine = reopen(|| f.builder()).await;
            assert_sound(&f.world, &engine, &context).await;
            engine.restore(&f.id, Select::Latest, RestoreOptions::default()).await.unwrap();
            assert_eq!(f.world.processes(&f.id)["server"], "1", "{context}");
            assert_eq!(f.world.files(&f.id)["/a"], "1", "{context}");
        }
    }
}

#[tokio::test]
async fn a_checkpoint_that_fails_twice_leaves_everything_as_it_was() {
    for step in CHECKPOINT_STEPS {
        // An unknown delta is not a failure, and a sandbox that cannot be thawed is a case of its own.
        if matches!(step, Step::Take | Step::Thaw) {
            continue;
        }
        for fault in FAULTS {
            let f = Fixture::new();
            let engine = f.engine().await;
            f.covered(&engine, 1).await;
            let before = engine.versions(&f.id);
            f.world.write(&f.id, "/a", "1").unwrap();
            f.world.remember(&f.id, "server", "1").unwrap();
            f.world.order(step, fault);
            f.world.order(step, fault);
            let context = format!("{step:?} {fault:?}");
            match f.turn(&engine, 2).await {
                Verdict::Failed(error) => match fault {
                    Fault::Error(kind) => assert_eq!(error.kind(), kind, "{context}: {error}"),
                    Fault::Panic => assert_eq!(error.kind(), ErrorKind::Internal, "{context}: {error}"),
                    Fault::Hang => assert_eq!(error.kind(), ErrorKind::TimedOut, "{context}: {error}"),
                    Fault::Deaths => assert_eq!(error.kind(), ErrorKind::Died, "{context}: {error}"),
                },
                other => panic!("{context}: {other:?}"),
            }
            assert_eq!(f.world.condition_of(&f.id), Condition::Running, "{context}");
            assert_eq!(engine.versions(&f.id), before, "{context}");
            // The base is the old one: the turn is still dirty, and the next one saves it.
            f.world.clear_orders();
            assert_eq!(f.covered(&engine, 3).await, VersionId(2), "{context}");
            close(engine).await;
            let engine = reopen(|| f.builder()).await;
            assert_sound(&f.world, &engine, &context).await;
            engine.restore(&f.id, Select::Latest, RestoreOptions::default()).await.unwrap();
            assert_eq!(f.world.processes(&f.id)["server"], "1", "{context}");
        }
    }
}

#[tokio::test]
async fn a_sandbox_that_cannot_be_thawed_is_reported_as_frozen() {
    let f = Fixture::new();
    let engine = f.engine().await;
    for _ in 0..6 {
        f.world.order(Step::Thaw, Fault::Error(ErrorKind::Io));
    }
    match f.turn(&engine, 1).await {
        Verdict::Failed(error) => assert_eq!(error.sandbox_condition(), Some(Condition::Frozen), "{error}"),
        other => panic!("{other:?}"),
    }
    // The next owner thaws it.
    close(engine).await;
    let engine = reopen(|| f.builder()).await;
    engine.attach(&f.id).await.unwrap();
    assert_eq!(f.world.condition_of(&f.id), Condition::Running);
}

#[tokio::test]
async fn best_effort_lets_the_answer_go_and_says_so() {
    let f = Fixture::new();
    let policy = FailurePolicy::BestEffort { max_hold: Duration::from_millis(40) };
    let engine = f.builder().failure_policy(policy).open().await.unwrap();
    engine.attach(&f.id).await.unwrap();
    // It fails twice.
    for _ in 0..2 {
        f.world.order(Step::Capture(Domain::Process), Fault::Error(ErrorKind::Io));
    }
    assert!(matches!(f.turn(&engine, 1).await, Verdict::Unprotected(error) if error.kind() == ErrorKind::Io));
    // It takes too long; the version is made all the same.
    f.world.order(Step::Persist(Domain::Process), Fault::Hang);
    match f.turn(&engine, 2).await {
        Verdict::Unprotected(error) => assert!(error.to_string().contains("waited 40ms for its version"), "{error}"),
        other => panic!("{other:?}"),
    }
    for _ in 0..200 {
        if !engine.versions(&f.id).is_empty() {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(newest(&engine, &f.id).version, VersionId(1));
}

#[tokio::test]
async fn a_sandbox_that_vanishes_fails_its_turn_and_disturbs_nobody() {
    let f = Fixture::new();
    let engine = f.engine().await;
    f.covered(&engine, 1).await;
    f.world.vanish(&f.id);
    assert!(matches!(f.turn(&engine, 2).await, Verdict::Failed(error) if error.kind() == ErrorKind::NotFound));
    let other = common::id("other");
    f.world.create(&other);
    engine.attach(&other).await.unwrap();
    assert!(matches!(common::turn(&engine, &other, 1).await, Verdict::Durable(_)));
}

/// The engine's own steps, recorded, with one of them failing in a given way.
#[derive(Default)]
struct Plan {
    seen: Mutex<Vec<&'static str>>,
    fail: Mutex<Option<(usize, bool)>>,
    count: AtomicUsize,
}

impl Plan {
    fn hook(self: &Arc<Self>) -> crab_engine::StepHook {
        let plan = self.clone();
        Arc::new(move |step| {
            plan.seen.lock().push(step);
            let number = plan.count.fetch_add(1, Ordering::SeqCst);
            match *plan.fail.lock() {
                Some((at, false)) if at == number => Err(Error::new(ErrorKind::Io, format!("ordered at {step}"))),
                Some((at, true)) if at == number => panic!("ordered at {step}"),
                _ => Ok(()),
            }
        })
    }

    /// Lets the `at`th step from now on fail, by an error or a panic.
    fn order(&self, at: usize, panics: bool) {
        self.count.store(0, Ordering::SeqCst);
        *self.fail.lock() = Some((at, panics));
        self.seen.lock().clear();
    }

    fn clear(&self) {
        *self.fail.lock() = None;
    }
}

/// A scenario with turns, a restore, a fork, a pin, a removal and a prune; stops at the first failure.
async fn scenario(f: &Fixture, engine: &Engine) -> Result<(), Error> {
    let failed = |verdict: Verdict| match verdict {
        Verdict::Durable(_) => Ok(()),
        Verdict::Failed(error) | Verdict::Unprotected(error) => Err(Error::new(error.kind(), error.to_string())),
    };
    engine.attach(&f.id).await?;
    for turn in 1..=3 {
        f.world.write(&f.id, "/n", &turn.to_string())?;
        f.world.remember(&f.id, "server", &turn.to_string())?;
        failed(f.turn(engine, turn).await)?;
    }
    let named = |name: &str| RestoreOptions { operation: OperationId::new(name).ok(), ..RestoreOptions::default() };
    engine.restore(&f.id, Select::Version(VersionId(2)), named("back")).await?;
    let fork = common::id("fork");
    f.world.create_stopped(&fork);
    let options = crab_engine::ForkOptions { operation: OperationId::new("forked").ok() };
    engine.fork(&f.id, VersionId(2), &fork, options).await?;
    engine.remove(&f.id, VersionId(1)).await?;
    f.world.write(&f.id, "/n", "4")?;
    failed(f.turn(engine, 4).await)?;
    engine.pin(&f.id, VersionId(3)).await?;
    let report = engine.prune(&Retention::keep_all().last(0)).await?;
    report.failed.into_iter().next().map_or(Ok(()), |(_, _, error)| Err(error))?;
    // What the fork shares goes with it, since its source's version was pruned.
    engine.detach(&fork).await?;
    engine.forget(&fork).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn after_a_fault_at_any_step_of_the_engine_a_reopened_store_is_sound() {
    let mut steps = BTreeSet::new();
    for panics in [false, true] {
        for at in 0.. {
            let f = Fixture::new();
            let plan = Arc::new(Plan::default());
            plan.order(at, panics);
            let ran = match f.builder().steps(plan.hook()).open().await {
                Ok(engine) => {
                    let ran = scenario(&f, &engine).await;
                    engine.close().await;
                    ran
                }
                Err(error) => Err(error),
            };
            let reached = plan.seen.lock().clone();
            if ran.is_ok() && reached.len() <= at {
                break;
            }
            assert!(at < 400, "the scenario does not end");
            let context = format!("step {at} {} panics {panics}: {ran:?}", reached.get(at).copied().unwrap_or("?"));
            steps.extend(reached);
            assert_ne!(f.world.condition_of(&f.id), Condition::Frozen, "{context}");
            plan.clear();
            let engine = reopen(|| f.builder()).await;
            assert_sound(&f.world, &engine, &context).await;
            // What did not end is finished by asking again, and then everything goes on.
            for unfinished in engine.opened().unfinished.clone() {
                let operation = Some(unfinished.operation.clone());
                let done = match &unfinished.from {
                    None => {
                        let options = RestoreOptions { operation, ..RestoreOptions::default() };
                        engine.restore(&unfinished.sandbox, Select::Latest, options).await
                    }
                    Some(from) => {
                        let options = crab_engine::ForkOptions { operation };
                        engine.fork(from, VersionId(2), &unfinished.sandbox, options).await
                    }
                };
                done.unwrap_or_else(|error| panic!("{context}: {error}"));
                assert_eq!(f.world.condition_of(&unfinished.sandbox), Condition::Running, "{context}");
            }
            if f.world.condition_of(&f.id) == Condition::Stopped {
                let done = engine.restore(&f.id, Select::Latest, RestoreOptions::default()).await;
                done.unwrap_or_else(|error| panic!("{context}: {error}"));
            }
            engine.attach(&f.id).await.unwrap_or_else(|error| panic!("{context}: {error}"));
            f.world.write(&f.id, "/after", "x").unwrap();
            f.covered(&engine, 9).await;
            assert_sound(&f.world, &engine, &context).await;
            engine.restore(&f.id, Select::Latest, RestoreOptions::default()).await.unwrap();
            assert!(f.world.files(&f.id).contains_key("/after"), "{context}");
        }
    }
    for step in [
        "checkpoint.frozen",
        "restore.swapped",
        "fork.prepared",
        "prune.next",
        "remove.unlisted",
        "collect.remove",
        "forget.unlisted",
    ] {
        assert!(steps.contains(step), "{step} is not among {steps:?}");
    }
}

#[tokio::test]
async fn a_manifest_that_cannot_be_fsynced_poisons_the_store_until_it_is_opened_anew() {
    for fsync in ["store.fsync", "store.fsync_dir"] {
        let f = Fixture::new();
        let armed = Arc::new(AtomicUsize::new(0));
        let hook: crab_engine::StepHook = {
            let armed = armed.clone();
            Arc::new(move |step| match armed.load(Ordering::SeqCst) {
                1 if step == fsync => Err(Error::new(ErrorKind::Io, "the disk is gone")),
                _ => Ok(()),
            })
        };
        let engine = f.builder().steps(hook).open().await.unwrap();
        engine.attach(&f.id).await.unwrap();
        f.covered(&engine, 1).await;
        f.covered(&engine, 2).await;
        armed.store(1, Ordering::SeqCst);
        f.world.write(&f.id, "/a", "1").unwrap();
        let poisoned = |verdict: Verdict| match verdict {
            Verdict::Failed(error) => assert_eq!(error.kind(), ErrorKind::Poisoned, "{fsync}: {error}"),
            other => panic!("{fsync}: {other:?}"),
        };
        poisoned(f.turn(&engine, 3).await);
        assert!(engine.is_poisoned(), "{fsync}");
        armed.store(0, Ordering::SeqCst);
        poisoned(f.turn(&engine, 4).await);
        let refused = [
            engine.pin(&f.id, VersionId(1)).await.unwrap_err(),
            engine.remove(&f.id, VersionId(1)).await.unwrap_err(),
            engine.restore(&f.id, Select::Latest, RestoreOptions::default()).await.unwrap_err(),
            engine.detach(&f.id).await.unwrap_err(),
        ];
        for (at, error) in refused.into_iter().enumerate() {
            // The standing version is refused before anything is written.
            let kind = if at == 1 { ErrorKind::Busy } else { ErrorKind::Poisoned };
            assert_eq!(error.kind(), kind, "{fsync}, {at}: {error}");
        }
        assert_eq!(f.world.condition_of(&f.id), Condition::Running, "{fsync}");
        close(engine).await;
        let engine = reopen(|| f.builder()).await;
        assert_sound(&f.world, &engine, fsync).await;
        engine.attach(&f.id).await.unwrap();
        f.covered(&engine, 5).await;
    }
}

/// A tmpfs of 64 KiB, unmounted when the test ends. `None` without the privilege.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    fn new(options: &str) -> Option<Self> {
        let dir = tempfile::tempdir().unwrap();
        let mounted = std::process::Command::new("mount")
            .args(["-t", "tmpfs", "-o", options, "crab-engine-test"])
            .arg(dir.path())
            .stderr(std::process::Stdio::null())
            .status();
        if mounted.is_ok_and(|status| status.success()) {
            return Some(Self(dir));
        }
        eprintln!("skipped: cannot mount here");
        None
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

#[tokio::test]
async fn a_full_disk_fails_the_checkpoint_keeps_the_versions_and_still_lets_one_delete() {
    let Some(disk) = SmallDisk::new("size=64k") else { return };
    let f = Fixture::new();
    let store = disk.0.path().join("store");
    let make = || common::builder(&f.world, &store);
    let engine = make().open().await.unwrap();
    engine.attach(&f.id).await.unwrap();
    let mut turn = 0;
    let error = loop {
        turn += 1;
        assert!(turn < 100, "64 KiB are never full");
        f.world.write(&f.id, "/a", &turn.to_string()).unwrap();
        match f.turn(&engine, turn).await {
            Verdict::Durable(_) => {}
            Verdict::Failed(error) => break error,
            other @ Verdict::Unprotected(_) => panic!("{other:?}"),
        }
    };
    assert_eq!(error.kind(), ErrorKind::Full, "{error}");
    assert!(error.to_string().contains("free space"), "{error}");
    let kept = engine.versions(&f.id);
    assert!(kept.len() > 3);
    assert!(!engine.is_poisoned());
    assert_sound(&f.world, &engine, "full").await;
    // Old ones can be removed, and then there is room again.
    for manifest in &kept[..3] {
        engine.remove(&f.id, manifest.version).await.unwrap();
    }
    f.covered(&engine, turn + 1).await;
    close(engine).await;
    let engine = reopen(make).await;
    assert_eq!(engine.versions(&f.id).len(), kept.len() - 3 + 1);
    assert!(engine.opened().damaged.is_empty());
}

#[tokio::test]
async fn a_store_on_a_read_only_disk_is_refused_with_a_reason() {
    let Some(disk) = SmallDisk::new("size=256k") else { return };
    let f = Fixture::new();
    let store = disk.0.path().join("store");
    let make = || common::builder(&f.world, &store);
    let engine = make().open().await.unwrap();
    engine.attach(&f.id).await.unwrap();
    f.covered(&engine, 1).await;
    let remount = |how: &str| {
        let status = std::process::Command::new("mount").args(["-o", how]).arg(disk.0.path()).status().unwrap();
        assert!(status.success());
    };
    // The lock file stays open, so the kernel keeps a writable descriptor: close first.
    close(engine).await;
    tokio::time::sleep(Duration::from_millis(20)).await;
    remount("remount,ro");
    let error = make().open().await.unwrap_err();
    assert!(error.to_string().contains("mount the file system of the store writable"), "{error}");
    remount("remount,rw");
    let engine = reopen(make).await;
    assert_eq!(engine.versions(&f.id).len(), 1);
}

#[tokio::test]
async fn the_runtime_may_end_in_the_middle_of_a_freeze() {
    let f = Fixture::new();
    f.world.order(Step::Capture(Domain::Process), Fault::Hang);
    let (world, id, store) = (f.world.clone(), f.id.clone(), f.store());
    let ended = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        runtime.block_on(async {
            let engine =
                common::builder(&world, &store).deadlines(crab_engine::Deadlines::default()).open().await.unwrap();
            engine.attach(&id).await.unwrap();
            let _hold = boundary(&engine, &id, 1).await;
            while world.condition_of(&id) != Condition::Frozen {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        });
        runtime.shutdown_timeout(Duration::from_secs(5));
    });
    ended.join().unwrap();
    assert_eq!(f.world.condition_of(&f.id), Condition::Running);
}
