//! The flow of a turn, without faults.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use std::time::Duration;

use common::{Fixture, assert_sound, boundary, close, drain, files_below, kinds, newest, reopen};
use crab_core::memory::Step;
use crab_core::{Condition, Domain, ErrorKind, Half, Origin, SandboxId, TurnNumber, Verdict, VersionId};
use crab_engine::EventKind;

#[tokio::test]
async fn the_first_turn_makes_a_full_version_and_an_idle_one_rides_on_it() {
    let f = Fixture::new();
    let engine = f.engine().await;
    let mut events = engine.events();
    assert_eq!(f.covered(&engine, 1).await, VersionId(1));
    let seen = drain(&mut events);
    assert_eq!(kinds(&seen), ["decided", "queued", "promoted", "frozen", "thawed", "durable"]);
    let manifest = newest(&engine, &f.id);
    assert_eq!((manifest.turn, manifest.parent), (TurnNumber(1), None));
    assert_eq!(manifest.origin, Origin::Turn);
    assert!(matches!((&manifest.filesystem, &manifest.process), (Half::Stored(_), Half::Stored(_))));
    assert_eq!(f.covered(&engine, 2).await, VersionId(1));
    assert_eq!(kinds(&drain(&mut events)), ["decided", "skipped"]);
    assert_sound(&f.world, &engine, "").await;
}

#[tokio::test]
async fn a_skipped_turn_writes_nothing() {
    let f = Fixture::new();
    let engine = f.engine().await;
    f.covered(&engine, 1).await;
    let before = files_below(&f.store());
    f.world.write(&f.id, "/scratch", "x").unwrap();
    f.world.unlink(&f.id, "/scratch").unwrap();
    for turn in 2..20 {
        assert_eq!(f.covered(&engine, turn).await, VersionId(1));
    }
    assert_eq!(files_below(&f.store()), before);
    assert_eq!(f.world.artifacts().len(), 2);
}

#[tokio::test]
async fn what_changed_is_captured_and_the_other_half_is_the_standing_one() {
    let f = Fixture::new();
    let engine = f.engine().await;
    f.covered(&engine, 1).await;
    let first = newest(&engine, &f.id);
    let frozen = |world: &crab_core::memory::MemoryWorld| world.steps().iter().filter(|s| **s == Step::Freeze).count();

    let before = frozen(&f.world);
    f.world.write(&f.id, "/a", "1").unwrap();
    f.covered(&engine, 2).await;
    let files_only = newest(&engine, &f.id);
    assert_eq!(frozen(&f.world), before, "files alone need no freeze");
    assert_eq!(files_only.process, first.process);
    assert_ne!(files_only.filesystem, first.filesystem);
    assert_eq!(files_only.parent, Some(VersionId(1)));

    f.world.remember(&f.id, "server", "1").unwrap();
    f.covered(&engine, 3).await;
    let process_only = newest(&engine, &f.id);
    assert_eq!(process_only.filesystem, files_only.filesystem);
    assert_ne!(process_only.process, files_only.process);

    f.world.remember(&f.id, "server", "2").unwrap();
    f.world.write(&f.id, "/a", "2").unwrap();
    assert_eq!(f.covered(&engine, 4).await, VersionId(4));
    let both = newest(&engine, &f.id);
    assert!(both.filesystem != process_only.filesystem && both.process != process_only.process);
    assert_sound(&f.world, &engine, "").await;
}

/// Runs something in the sandbox when a step is reached, through the engine's own steps.
fn at_step(f: &Fixture, step: &'static str, act: impl Fn() + Send + Sync + 'static) -> crab_engine::EngineBuilder {
    f.builder().steps(std::sync::Arc::new(move |reached| {
        if reached == step {
            act();
        }
        Ok(())
    }))
}

#[tokio::test]
async fn what_happens_after_the_cut_belongs_to_the_next_turn() {
    let f = Fixture::new();
    let (world, id) = (f.world.clone(), f.id.clone());
    let engine = at_step(&f, "checkpoint.persisted", move || {
        // The agent's next command runs while the version is being made.
        world.write(&id, "/late", "x").unwrap();
    })
    .open()
    .await
    .unwrap();
    engine.attach(&f.id).await.unwrap();
    assert_eq!(f.covered(&engine, 1).await, VersionId(1));
    // It was not taken for saved.
    assert_eq!(f.covered(&engine, 2).await, VersionId(2));
    let report = engine.restore(&f.id, crab_engine::Select::Version(VersionId(1)), Default::default()).await.unwrap();
    assert_eq!(report.turn, TurnNumber(1));
    assert!(!f.world.files(&f.id).contains_key("/late"));
}

#[tokio::test]
async fn the_decision_is_made_again_at_the_cut() {
    // At the boundary only files had changed; a process changes while the job waits for its worker.
    let f = Fixture::new();
    let engine = f.engine().await;
    f.covered(&engine, 1).await;
    f.world.write(&f.id, "/a", "1").unwrap();
    let mut hold = {
        let hold = boundary(&engine, &f.id, 2).await;
        f.world.remember(&f.id, "server", "new").unwrap();
        hold
    };
    assert!(matches!(hold.verdict().await, Verdict::Durable(VersionId(2))));
    let second = newest(&engine, &f.id);
    let first = engine.versions(&f.id)[0].clone();
    assert_ne!(second.process, first.process, "an old process image was paired with newer files");
}

#[tokio::test]
async fn a_capture_of_files_that_turns_out_not_to_be_enough_is_discarded() {
    let f = Fixture::new();
    let world = f.world.clone();
    let id = f.id.clone();
    // The delta source of this engine lets a process change right after the snapshot of the files.
    struct Sly {
        world: crab_core::memory::MemoryWorld,
        id: SandboxId,
        armed: std::sync::atomic::AtomicBool,
    }
    #[async_trait::async_trait]
    impl crab_core::StateDelta for Sly {
        async fn attach(&self, sandbox: &crab_core::Sandbox) -> crab_core::Result<()> {
            crab_core::StateDelta::attach(&self.world, sandbox).await
        }
        async fn take(&self, id: &SandboxId) -> crab_core::Delta {
            let snapshotted = self.world.steps().last() == Some(&Step::AfterCut(Domain::Filesystem));
            if snapshotted && self.armed.swap(false, std::sync::atomic::Ordering::SeqCst) {
                self.world.remember(&self.id, "server", "woke up").unwrap();
            }
            self.world.take(id).await
        }
        async fn rebase(&self, id: &SandboxId, base: &crab_core::Rebase) {
            self.world.rebase(id, base).await;
        }
        async fn detach(&self, id: &SandboxId) {
            crab_core::StateDelta::detach(&self.world, id).await;
        }
    }
    let sly = Sly { world, id, armed: true.into() };
    let engine = f.builder().delta(std::sync::Arc::new(sly)).open().await.unwrap();
    engine.attach(&f.id).await.unwrap();
    f.covered(&engine, 1).await;
    f.world.write(&f.id, "/a", "1").unwrap();
    f.covered(&engine, 2).await;
    let versions = engine.versions(&f.id);
    assert_eq!(versions.len(), 2);
    assert_ne!(versions[1].process, versions[0].process);
    assert_sound(&f.world, &engine, "the discarded snapshot").await;
}

#[tokio::test]
async fn boundaries_that_arrive_before_the_capture_share_it() {
    let f = Fixture::new();
    let engine = f.builder().limits(one_worker()).open().await.unwrap();
    engine.attach(&f.id).await.unwrap();
    // Another sandbox keeps the only worker busy.
    let other = common::id("other");
    f.world.create(&other);
    engine.attach(&other).await.unwrap();
    f.world.order(Step::Persist(Domain::Process), crab_core::memory::Fault::Hang);
    let busy = boundary(&engine, &other, 1).await;
    let mut events = engine.events();
    let mut holds = Vec::new();
    for turn in 1..=3 {
        holds.push(boundary(&engine, &f.id, turn).await);
    }
    for hold in &mut holds {
        assert!(matches!(hold.verdict().await, Verdict::Durable(VersionId(1))));
    }
    assert_eq!(newest(&engine, &f.id).turn, TurnNumber(3));
    let shared = drain(&mut events)
        .into_iter()
        .filter(|event| matches!(event.kind, EventKind::Queued { shared: true, .. }))
        .count();
    assert_eq!(shared, 2);
    drop(busy);
}

fn one_worker() -> crab_engine::scheduler::Limits {
    crab_engine::scheduler::Limits { process: 1, filesystem: 1, persist: 1, urgent_burst: 4, waiting: 16 }
}

#[tokio::test]
async fn a_full_queue_refuses_with_a_typed_error() {
    let f = Fixture::new();
    let limits = crab_engine::scheduler::Limits { waiting: 2, ..one_worker() };
    let engine = f.builder().limits(limits).open().await.unwrap();
    engine.attach(&f.id).await.unwrap();
    f.world.order(Step::Freeze, crab_core::memory::Fault::Hang);
    let begun = boundary(&engine, &f.id, 1).await;
    let waiting = [boundary(&engine, &f.id, 2).await, boundary(&engine, &f.id, 3).await];
    match f.turn(&engine, 4).await {
        Verdict::Failed(error) => assert_eq!(error.kind(), ErrorKind::Full),
        other => panic!("{other:?}"),
    }
    drop((begun, waiting));
}

#[tokio::test]
async fn processes_are_prepared_for_before_the_freeze_and_files_alone_are_not() {
    let f = Fixture::new();
    let engine = f.engine().await;
    let before = f.world.steps().len();
    f.covered(&engine, 1).await;
    let steps = f.world.steps()[before..].to_vec();
    let at = |wanted: Step| steps.iter().position(|step| *step == wanted);
    assert!(at(Step::Prepare) < at(Step::Freeze) && at(Step::Prepare).is_some(), "{steps:?}");
    f.world.write(&f.id, "/a", "1").unwrap();
    let before = f.world.steps().len();
    f.covered(&engine, 2).await;
    assert!(!f.world.steps()[before..].contains(&Step::Prepare));
    assert!(f.world.prepared().is_empty());
}

#[tokio::test]
async fn a_preparation_that_goes_wrong_does_not_lose_the_version() {
    use crab_core::memory::Fault;
    let f = Fixture::new();
    let engine = f.engine().await;
    for (turn, fault) in [Fault::Error(ErrorKind::Io), Fault::Panic, Fault::Hang].into_iter().enumerate() {
        let turn = turn as u64 + 1;
        f.world.order(Step::Prepare, fault);
        f.world.remember(&f.id, "server", &turn.to_string()).unwrap();
        assert_eq!(f.covered(&engine, turn).await, VersionId(turn), "{fault:?}");
        assert!(matches!(newest(&engine, &f.id).process, Half::Stored(_)));
        assert!(f.world.prepared().is_empty(), "{fault:?}");
    }
    assert_sound(&f.world, &engine, "").await;
}

#[tokio::test]
async fn a_capture_that_goes_wrong_leaves_nothing_prepared() {
    use crab_core::memory::Fault;
    let f = Fixture::new();
    let engine = f.engine().await;
    for (turn, fault) in [Fault::Error(ErrorKind::Io), Fault::Panic, Fault::Hang].into_iter().enumerate() {
        // The second try succeeds.
        f.world.order(Step::Capture(Domain::Process), fault);
        f.world.remember(&f.id, "server", &turn.to_string()).unwrap();
        f.covered(&engine, turn as u64 + 1).await;
        assert!(f.world.prepared().is_empty(), "{fault:?}");
    }
    // Nor does an engine that is closed in the middle of it.
    f.world.order(Step::Prepare, Fault::Hang);
    f.world.remember(&f.id, "server", "last").unwrap();
    drop(boundary(&engine, &f.id, 4).await);
    engine.close().await;
    assert!(f.world.prepared().is_empty());
    assert_sound(&f.world, &engine, "").await;
}

#[tokio::test]
async fn a_client_that_goes_away_still_gets_its_version() {
    let f = Fixture::new();
    let engine = f.engine().await;
    drop(boundary(&engine, &f.id, 1).await);
    for _ in 0..500 {
        if !engine.versions(&f.id).is_empty() {
            return;
        }
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    panic!("no version was made");
}

#[tokio::test]
async fn hidden_and_exposed_time_are_told_apart() {
    let f = Fixture::new();
    let engine = f.engine().await;
    let mut events = engine.events();
    f.world.order(Step::Persist(Domain::Process), crab_core::memory::Fault::Hang);
    // The first try hangs for its 150 ms, the second succeeds; the answer comes after 50 ms.
    let mut hold = boundary(&engine, &f.id, 1).await;
    tokio::time::sleep(Duration::from_millis(50)).await;
    hold.answer_waiting();
    assert!(matches!(hold.verdict().await, Verdict::Durable(_)));
    let durable = drain(&mut events).into_iter().find_map(|event| match event.kind {
        EventKind::Durable { hidden, exposed, delta, .. } => Some((hidden, exposed, delta)),
        _ => None,
    });
    let (hidden, exposed, delta) = durable.unwrap();
    assert!(hidden >= Duration::from_millis(45) && hidden < Duration::from_millis(130), "{hidden:?}");
    assert!(exposed >= Duration::from_millis(60), "{exposed:?}");
    assert!(delta.contains("no version since attach"), "{delta}");
}

#[tokio::test]
async fn a_sandbox_without_tasks_has_an_empty_half() {
    let f = Fixture::new();
    f.world.write(&f.id, "/a", "1").unwrap();
    f.world.crash(&f.id);
    let engine = f.engine().await;
    f.covered(&engine, 1).await;
    assert_eq!(newest(&engine, &f.id).process, Half::Empty);
    assert_eq!(f.covered(&engine, 2).await, VersionId(1));
    let report = engine.restore(&f.id, crab_engine::Select::Latest, Default::default()).await.unwrap();
    assert!(matches!(report.process, crab_engine::ProcessOutcome::Relaunched { .. }));
    assert_eq!(f.world.condition_of(&f.id), Condition::Running);
}

#[tokio::test]
async fn processes_that_cannot_be_saved_are_named_and_the_files_saved() {
    let f = Fixture::new();
    let engine = f.engine().await;
    f.world.order(Step::Capture(Domain::Process), crab_core::memory::Fault::Error(ErrorKind::NotCheckpointable));
    f.world.write(&f.id, "/a", "1").unwrap();
    f.covered(&engine, 1).await;
    let manifest = newest(&engine, &f.id);
    assert!(matches!(&manifest.process, Half::Missing(reason) if reason.contains("ordered fault")));
    assert!(matches!(manifest.filesystem, Half::Stored(_)));
    // The next turn tries again: what stood in the way may be gone.
    assert_eq!(f.covered(&engine, 2).await, VersionId(2));
    assert!(matches!(newest(&engine, &f.id).process, Half::Stored(_)));
    assert_sound(&f.world, &engine, "").await;
}

#[tokio::test]
async fn without_a_process_backend_the_manifest_says_so() {
    let f = Fixture::new();
    let engine = crab_engine::Engine::builder(f.store())
        .filesystem(f.world.backend(Domain::Filesystem))
        .host(std::sync::Arc::new(f.world.clone()))
        .delta(std::sync::Arc::new(f.world.clone()))
        .open()
        .await
        .unwrap();
    engine.attach(&f.id).await.unwrap();
    f.world.write(&f.id, "/a", "1").unwrap();
    f.covered(&engine, 1).await;
    assert!(matches!(&newest(&engine, &f.id).process, Half::Missing(_)));
    f.world.remember(&f.id, "server", "1").unwrap();
    assert_eq!(f.covered(&engine, 2).await, VersionId(1));
    assert!(!f.world.steps().contains(&Step::Freeze));
}

#[tokio::test]
async fn a_call_makes_a_version_and_gives_the_standing_one_where_nothing_changed() {
    let f = Fixture::new();
    let engine = f.engine().await;
    let made = engine.checkpoint(&f.id).await.unwrap();
    assert_eq!((made.version, made.origin.clone()), (VersionId(1), Origin::Request));
    assert_eq!(engine.checkpoint(&f.id).await.unwrap(), made);
    assert_eq!(engine.checkpoint(&common::id("nobody")).await.unwrap_err().kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn versions_go_on_after_a_restart_of_the_engine() {
    let f = Fixture::new();
    let engine = f.engine().await;
    f.covered(&engine, 1).await;
    f.world.write(&f.id, "/a", "1").unwrap();
    f.covered(&engine, 2).await;
    close(engine).await;

    // The sandbox lived on, and was left frozen by whoever died.
    crab_core::SandboxHost::freeze(&f.world, &f.id).await.unwrap();
    let engine = reopen(|| f.builder()).await;
    let summary = engine.sandboxes();
    assert_eq!((summary.len(), summary[0].versions, summary[0].standing), (1, 2, Some(VersionId(2))));
    assert!(summary[0].attached, "what lives is attached again");
    assert_eq!(
        (engine.opened().attached.clone(), engine.opened().thawed.clone()),
        (vec![f.id.clone()], vec![f.id.clone()])
    );
    assert_eq!(f.world.condition_of(&f.id), Condition::Running);
    // What it did meanwhile is not known, so there is a checkpoint.
    assert_eq!(f.covered(&engine, 3).await, VersionId(3));
    assert_eq!(newest(&engine, &f.id).parent, Some(VersionId(2)));
    assert_sound(&f.world, &engine, "").await;
}

#[tokio::test]
async fn what_was_detached_stays_so_when_the_store_is_opened_until_it_is_attached_or_restored() {
    let f = Fixture::new();
    let engine = f.engine().await;
    let (ended, moved) = (common::id("ended"), common::id("moved"));
    for id in [&ended, &moved] {
        f.world.create(id);
        engine.attach(id).await.unwrap();
        common::turn(&engine, id, 1).await;
        engine.detach(id).await.unwrap();
        engine.detach(id).await.unwrap();
    }
    f.covered(&engine, 1).await;
    f.world.crash(&ended);
    close(engine).await;
    let engine = reopen(|| f.builder()).await;
    let opened = engine.opened();
    assert_eq!((&opened.attached, &opened.detached), (&vec![f.id.clone()], &vec![ended.clone(), moved.clone()]));
    assert!(opened.died.is_empty() && opened.unreachable.is_empty(), "{opened:?}");
    assert!(matches!(common::turn(&engine, &moved, 2).await, Verdict::Failed(e) if e.kind() == ErrorKind::NotFound));
    engine.attach(&moved).await.unwrap();
    engine.restore(&ended, crab_engine::Select::Latest, Default::default()).await.unwrap();
    close(engine).await;
    let engine = reopen(|| f.builder()).await;
    assert_eq!(engine.opened().attached, [f.id.clone(), ended, moved]);
    assert_sound(&f.world, &engine, "").await;
}

#[tokio::test]
async fn what_died_is_offered_for_restore_and_what_is_unknown_is_named() {
    let f = Fixture::new();
    let engine = f.engine().await;
    let (dead, gone, bare) = (common::id("dead"), common::id("gone"), common::id("bare"));
    for id in [&dead, &gone] {
        f.world.create(id);
        engine.attach(id).await.unwrap();
        common::turn(&engine, id, 1).await;
    }
    // Attached, but without any version: there is nothing to bring back.
    f.world.create(&bare);
    engine.attach(&bare).await.unwrap();
    f.covered(&engine, 1).await;
    close(engine).await;
    f.world.crash(&dead);
    f.world.crash(&bare);
    f.world.vanish(&gone);
    let engine = reopen(|| f.builder()).await;
    let opened = engine.opened();
    assert_eq!((&opened.attached, &opened.died), (&vec![f.id.clone()], &vec![dead.clone()]));
    assert_eq!(opened.unreachable.len(), 1);
    assert_eq!((&opened.unreachable[0].0, opened.unreachable[0].1.kind()), (&gone, ErrorKind::NotFound));
    for id in opened.died.clone() {
        engine.restore(&id, crab_engine::Select::Latest, Default::default()).await.unwrap();
        assert_eq!(f.world.condition_of(&id), Condition::Running);
    }
}

#[tokio::test]
async fn a_policy_may_space_versions_and_one_covers_the_turns_between() {
    use crab_engine::policy::{ChangedOnly, LeastInterval};
    let f = Fixture::new();
    let policy = LeastInterval(Duration::from_millis(300), ChangedOnly);
    let engine = f.builder().policy(std::sync::Arc::new(policy)).open().await.unwrap();
    engine.attach(&f.id).await.unwrap();
    // The first turn never waits: nothing could bring it back.
    f.covered(&engine, 1).await;
    let mut events = engine.events();
    for turn in 2..=4 {
        f.world.write(&f.id, "/n", &turn.to_string()).unwrap();
        match f.turn(&engine, turn).await {
            Verdict::Unprotected(error) => assert!(error.to_string().contains("the policy lets"), "{error}"),
            other => panic!("{other:?}"),
        }
    }
    // A turn that changes nothing does not wait, nor does a call.
    let mut made = drain(&mut events);
    assert_eq!(made.iter().filter(|event| matches!(event.kind, EventKind::Deferred { .. })).count(), 3);
    while engine.versions(&f.id).len() < 2 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    tokio::time::sleep(Duration::from_millis(20)).await;
    made.extend(drain(&mut events));
    let durable = |event: &&crab_engine::Event| matches!(event.kind, EventKind::Durable { turn: TurnNumber(4), .. });
    assert_eq!(made.iter().filter(durable).count(), 1);
    assert_eq!(engine.versions(&f.id).len(), 2);
    f.world.crash(&f.id);
    engine.restore(&f.id, crab_engine::Select::Latest, Default::default()).await.unwrap();
    assert_eq!(f.world.files(&f.id)["/n"], "4");
    f.world.write(&f.id, "/n", "5").unwrap();
    assert_eq!(engine.checkpoint(&f.id).await.unwrap().origin, Origin::Request);
}

#[tokio::test]
async fn a_byte_rate_holds_back_the_next_persist_and_loses_none() {
    let f = Fixture::new();
    let engine = f.builder().limits(one_worker()).persist_rate(10_000).open().await.unwrap();
    let ids = [common::id("first"), common::id("second")];
    let mut holds = Vec::new();
    for id in &ids {
        f.world.create(id);
        // Two seconds' worth, of which one is saved up.
        f.world.write(id, "/big", &"x".repeat(20_000)).unwrap();
        engine.attach(id).await.unwrap();
        holds.push(boundary(&engine, id, 1).await);
    }
    assert!(matches!(holds[0].verdict().await, Verdict::Durable(_)));
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    assert_eq!(f.world.artifacts().len(), 2, "the second is captured and waits to be persisted");
    assert!(matches!(holds[1].verdict().await, Verdict::Durable(_)));
    assert_sound(&f.world, &engine, "").await;
}

#[tokio::test]
async fn a_second_engine_on_the_same_store_is_refused() {
    let f = Fixture::new();
    let engine = f.engine().await;
    let error = f.builder().open().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains("held by"), "{error}");
    close(engine).await;
    reopen(|| f.builder()).await;
}

#[tokio::test]
async fn versions_are_removed_with_what_only_they_need() {
    let f = Fixture::new();
    let engine = f.engine().await;
    f.covered(&engine, 1).await;
    f.world.write(&f.id, "/a", "1").unwrap();
    f.covered(&engine, 2).await;
    assert_eq!(f.world.artifacts().len(), 3);
    assert_eq!(engine.remove(&f.id, VersionId(2)).await.unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(engine.remove(&f.id, VersionId(9)).await.unwrap_err().kind(), ErrorKind::NotFound);
    engine.remove(&f.id, VersionId(1)).await.unwrap();
    // The second version still needs the first one's processes.
    assert_eq!(f.world.artifacts().len(), 2);
    assert_sound(&f.world, &engine, "after the removal").await;
    engine.detach(&f.id).await.unwrap();
    engine.forget(&f.id).await.unwrap();
    assert!(f.world.artifacts().is_empty() && engine.sandboxes().is_empty());
}

#[tokio::test]
async fn detaching_cancels_what_waits() {
    let f = Fixture::new();
    let engine = f.builder().limits(one_worker()).open().await.unwrap();
    engine.attach(&f.id).await.unwrap();
    f.world.order(Step::Freeze, crab_core::memory::Fault::Hang);
    let mut begun = boundary(&engine, &f.id, 1).await;
    tokio::time::sleep(Duration::from_millis(10)).await;
    let mut waits = boundary(&engine, &f.id, 2).await;
    engine.detach(&f.id).await.unwrap();
    match waits.verdict().await {
        Verdict::Failed(error) => assert_eq!(error.kind(), ErrorKind::Cancelled),
        other => panic!("{other:?}"),
    }
    // What had begun went on to its end: the second try did not hang.
    assert!(matches!(begun.verdict().await, Verdict::Durable(VersionId(1))));
    assert_eq!(f.world.condition_of(&f.id), Condition::Running);
    match f.turn(&engine, 3).await {
        Verdict::Failed(error) => assert_eq!(error.kind(), ErrorKind::NotFound),
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn a_source_is_driven_to_its_end() {
    let f = Fixture::new();
    let engine = f.engine().await;
    struct Source(SandboxId, u64, std::sync::Arc<parking_lot::Mutex<Vec<crab_core::GateHold>>>);
    #[async_trait::async_trait]
    impl crab_core::TurnBoundary for Source {
        async fn next(&mut self) -> Option<crab_core::Boundary> {
            self.1 += 1;
            if self.1 > 10 {
                return None;
            }
            let (gate, hold) = crab_core::Gate::new();
            self.2.lock().push(hold);
            Some(crab_core::Boundary { turn: crab_core::Turn::new(self.0.clone(), TurnNumber(self.1)), gate })
        }
    }
    let holds = std::sync::Arc::default();
    engine.drive(Source(f.id.clone(), 0, std::sync::Arc::clone(&holds))).await;
    let holds = std::mem::take(&mut *holds.lock());
    for mut hold in holds {
        assert!(matches!(hold.verdict().await, Verdict::Durable(_)));
    }
}

#[tokio::test]
async fn a_sandbox_that_died_makes_no_version_of_its_death() {
    let f = Fixture::new();
    let engine = f.engine().await;
    f.covered(&engine, 1).await;
    f.world.write(&f.id, "/a", "1").unwrap();
    f.world.crash(&f.id);
    let verdict = f.turn(&engine, 2).await;
    let Verdict::Failed(error) = verdict else { panic!("{verdict:?}") };
    assert_eq!((error.kind(), error.sandbox_condition()), (ErrorKind::Died, Some(Condition::Stopped)));
    assert_eq!(newest(&engine, &f.id).version, VersionId(1), "the version before the death is the newest");
    // Nor does an engine that finds it dead.
    close(engine).await;
    let engine = reopen(|| f.builder()).await;
    assert_eq!(engine.attach(&f.id).await.unwrap_err().kind(), ErrorKind::Died);
    let report = engine.restore(&f.id, crab_engine::Select::Latest, Default::default()).await.unwrap();
    assert_eq!(report.version, VersionId(1));
    assert_eq!(f.world.condition_of(&f.id), Condition::Running);
    f.covered(&engine, 3).await;
    assert_sound(&f.world, &engine, "").await;
}

#[tokio::test]
async fn a_death_in_the_middle_of_a_capture_makes_no_version() {
    let f = Fixture::new();
    let engine = f.engine().await;
    f.covered(&engine, 1).await;
    f.world.write(&f.id, "/a", "1").unwrap();
    f.world.order(Step::Capture(Domain::Filesystem), crab_core::memory::Fault::Deaths);
    let verdict = f.turn(&engine, 2).await;
    assert!(matches!(&verdict, Verdict::Failed(error) if error.kind() == ErrorKind::Died), "{verdict:?}");
    assert_eq!(newest(&engine, &f.id).version, VersionId(1));
    assert_sound(&f.world, &engine, "").await;
}
