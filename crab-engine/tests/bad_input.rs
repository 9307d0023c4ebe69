//! Whatever is bad gets a typed error that says what to do, and harms nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use std::path::PathBuf;
use std::sync::Arc;

use async_trait::async_trait;
use common::{Fixture, assert_sound, close, reopen};
use crab_core::memory::{Fault, MemoryWorld, Step};
use crab_core::{
    Advice, Artifact, ArtifactId, AtCut, Capabilities, CaptureRequest, Captured, CheckpointBackend, Condition, Domain,
    Error, ErrorKind, Label, NoCut, OperationId, RestoreTarget, Restored, Result, SandboxId, Verdict, VersionId,
};
use crab_engine::retention::Retention;
use crab_engine::{CgroupV2, Engine, ForkOptions, RestoreOptions, Select};
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};

#[test]
fn names_with_slashes_dots_nuls_or_ten_kilobytes_are_refused() {
    let long = "x".repeat(10_000);
    let bad = ["", ".", "..", ".hidden", "../up", "a/b", "/abs", "a\0b", "a b", "ä", "-option", "a\nb", long.as_str()];
    for name in bad {
        let refused: [Result<()>; 4] = [
            SandboxId::new(name).map(drop),
            ArtifactId::new(name).map(drop),
            OperationId::new(name).map(drop),
            Label::new(name).map(drop),
        ];
        for error in refused.map(Result::unwrap_err) {
            assert_eq!((error.kind(), error.advice()), (ErrorKind::InvalidInput, Advice::Fix), "{name:?}");
            assert!(error.to_string().len() < 400, "the name is not repeated at length");
        }
        // Nor do they come in through a file.
        assert!(serde_json::from_value::<SandboxId>(serde_json::json!(name)).is_err(), "{name:?}");
    }
}

#[tokio::test]
async fn versions_that_do_not_exist_are_named_and_the_sandbox_runs_on() {
    let f = Fixture::new();
    let engine = f.engine().await;
    f.covered(&engine, 1).await;
    f.world.remember(&f.id, "server", "unsaved").unwrap();
    let (no_version, nobody, into) = (VersionId(42), common::id("nobody"), common::id("fork"));
    f.world.create_stopped(&into);
    let errors = [
        engine.restore(&f.id, Select::Version(no_version), RestoreOptions::default()).await.unwrap_err(),
        engine.restore(&f.id, Select::Turn(crab_core::TurnNumber(0)), RestoreOptions::default()).await.unwrap_err(),
        engine.restore(&nobody, Select::Latest, RestoreOptions::default()).await.unwrap_err(),
        engine.fork(&f.id, no_version, &into, ForkOptions::default()).await.unwrap_err(),
        engine.fork(&nobody, VersionId(1), &into, ForkOptions::default()).await.unwrap_err(),
        engine.remove(&f.id, no_version).await.unwrap_err(),
        engine.pin(&f.id, no_version).await.unwrap_err(),
        engine.diff((&f.id, VersionId(1)), (&f.id, no_version)).await.unwrap_err(),
        engine.checkpoint(&nobody).await.unwrap_err(),
        engine.attach(&nobody).await.unwrap_err(),
    ];
    for error in errors {
        assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    }
    assert_eq!(f.world.processes(&f.id)["server"], "unsaved");
    assert_eq!(f.world.condition_of(&f.id), Condition::Running);
    assert_sound(&f.world, &engine, "").await;
}

#[tokio::test]
async fn a_backend_that_hangs_in_the_freeze_is_given_up_and_the_sandbox_thawed() {
    let f = Fixture::new();
    let engine = f.engine().await;
    for _ in 0..2 {
        f.world.order(Step::Capture(Domain::Process), Fault::Hang);
    }
    let Verdict::Failed(error) = f.turn(&engine, 1).await else { panic!("it was covered") };
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(error.sandbox_condition(), Some(Condition::Running), "{error}");
    assert!(error.to_string().contains("the sandbox is running"), "{error}");
    assert_eq!(f.world.condition_of(&f.id), Condition::Running);
}

#[tokio::test]
async fn a_backend_that_panics_anywhere_fails_that_call_alone() {
    let f = Fixture::new();
    let engine = f.engine().await;
    f.covered(&engine, 1).await;
    for step in [Step::Capture(Domain::Filesystem), Step::Persist(Domain::Filesystem)] {
        f.world.order(step, Fault::Panic);
        f.world.order(step, Fault::Panic);
        f.world.write(&f.id, "/a", &format!("{step:?}")).unwrap();
        let Verdict::Failed(error) = f.turn(&engine, 2).await else { panic!("{step:?} was covered") };
        assert_eq!(error.kind(), ErrorKind::Internal, "{error}");
        assert!(error.to_string().contains("ordered panic"), "{error}");
    }
    for step in [Step::Verify(Domain::Process), Step::Restore(Domain::Filesystem), Step::Restore(Domain::Process)] {
        f.world.order(step, Fault::Panic);
        let error = engine.restore(&f.id, Select::Latest, RestoreOptions::default()).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Internal, "{error}");
        assert!(error.sandbox_condition().is_some(), "{error}");
    }
    engine.restore(&f.id, Select::Latest, RestoreOptions::default()).await.unwrap();
    f.world.write(&f.id, "/a", "at last").unwrap();
    f.covered(&engine, 3).await;
}

/// What a [`Liar`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lie {
    None,
    /// Says that it stored another artifact.
    Id,
    /// Says that it stored one of another sandbox.
    Sandbox,
    /// Says that it stored the other domain.
    Domain,
    /// Says that another backend stored it.
    Backend,
    /// Lets pass what belongs at its cut.
    NoCut,
    /// Takes two cuts.
    TwoCuts,
    /// Restores processes and names none.
    NoInit,
    /// Lists what was never stored, with names that are not the engine's.
    List,
}

struct Liar {
    inner: Arc<dyn CheckpointBackend>,
    lie: Arc<Mutex<Lie>>,
}

struct LiarCapture(Box<dyn Captured>, Lie);

#[async_trait]
impl CheckpointBackend for Liar {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn domain(&self) -> Domain {
        self.inner.domain()
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities()
    }
    async fn recover(&self) -> Result<()> {
        self.inner.recover().await
    }
    async fn capture(&self, request: CaptureRequest<'_>) -> Result<Box<dyn Captured>> {
        let lie = *self.lie.lock();
        let CaptureRequest { sandbox, artifact, parent, frozen, deadline, at_cut } = request;
        let mut nothing = NoCut;
        if lie == Lie::TwoCuts {
            at_cut.run().await?;
        }
        let at_cut: &mut dyn AtCut = if lie == Lie::NoCut { &mut nothing } else { at_cut };
        let request = CaptureRequest { sandbox, artifact, parent, frozen, deadline, at_cut };
        Ok(Box::new(LiarCapture(self.inner.capture(request).await?, lie)))
    }
    async fn verify(&self, artifact: &Artifact) -> Result<()> {
        self.inner.verify(artifact).await
    }
    async fn restore(&self, artifact: &Artifact, target: RestoreTarget) -> Result<Restored> {
        let mut restored = self.inner.restore(artifact, target).await?;
        if *self.lie.lock() == Lie::NoInit {
            restored.init = None;
        }
        Ok(restored)
    }
    async fn remove(&self, artifact: &Artifact) -> Result<()> {
        assert!(artifact.id.as_str().starts_with('v'), "{} is not the engine's to remove", artifact.id);
        self.inner.remove(artifact).await
    }
    async fn list(&self, id: &SandboxId) -> Result<Vec<Artifact>> {
        let mut listed = self.inner.list(id).await?;
        if *self.lie.lock() == Lie::List {
            for name in ["nightly", "v0-0000000000000000x", "v99999999999999999999-0123456789abcdef"] {
                let stranger = listed[0].clone();
                listed.push(Artifact { id: ArtifactId::new(name)?, ..stranger });
            }
        }
        Ok(listed)
    }
}

#[async_trait]
impl Captured for LiarCapture {
    async fn persist(self: Box<Self>) -> Result<Artifact> {
        let stored = self.0.persist().await?;
        Ok(match self.1 {
            Lie::Id => Artifact { id: ArtifactId::new("something-else")?, ..stored },
            Lie::Sandbox => Artifact { sandbox: SandboxId::new("other")?, ..stored },
            Lie::Domain => Artifact { domain: Domain::Filesystem, ..stored },
            Lie::Backend => Artifact { backend: "x".to_owned(), ..stored },
            _ => stored,
        })
    }
    async fn discard(self: Box<Self>) -> Result<()> {
        self.0.discard().await
    }
}

#[tokio::test]
async fn a_backend_that_answers_garbage_makes_no_version_of_it() {
    for told in [Lie::Id, Lie::Sandbox, Lie::Domain, Lie::Backend, Lie::NoCut, Lie::TwoCuts] {
        let f = Fixture::new();
        let lie = Arc::new(Mutex::new(Lie::None));
        let liar = Arc::new(Liar { inner: f.world.backend(Domain::Process), lie: lie.clone() });
        let make = || f.builder().process(liar.clone());
        let engine = make().open().await.unwrap();
        engine.attach(&f.id).await.unwrap();
        f.covered(&engine, 1).await;
        *lie.lock() = told;
        f.world.write(&f.id, "/a", "1").unwrap();
        f.world.remember(&f.id, "server", "1").unwrap();
        let Verdict::Failed(error) = f.turn(&engine, 2).await else { panic!("{told:?} was believed") };
        assert_eq!(error.kind(), ErrorKind::Internal, "{told:?}: {error}");
        assert_eq!(f.world.condition_of(&f.id), Condition::Running, "{told:?}");
        assert_eq!(engine.versions(&f.id).len(), 1, "{told:?}");
        *lie.lock() = Lie::None;
        assert_eq!(f.covered(&engine, 3).await, VersionId(2), "{told:?}: the change is still seen");
        close(engine).await;
        let engine = reopen(make).await;
        assert_sound(&f.world, &engine, &format!("{told:?}")).await;
    }
}

#[tokio::test]
async fn a_restore_that_names_no_process_fails_and_may_be_repeated() {
    let f = Fixture::new();
    let lie = Arc::new(Mutex::new(Lie::NoInit));
    let liar = Arc::new(Liar { inner: f.world.backend(Domain::Process), lie: lie.clone() });
    let engine = f.builder().process(liar).open().await.unwrap();
    engine.attach(&f.id).await.unwrap();
    f.covered(&engine, 1).await;
    let options = || RestoreOptions { operation: Some(OperationId::new("back").unwrap()), ..RestoreOptions::default() };
    let error = engine.restore(&f.id, Select::Latest, options()).await.unwrap_err();
    assert_eq!((error.kind(), error.sandbox_condition()), (ErrorKind::Internal, Some(Condition::Stopped)), "{error}");
    *lie.lock() = Lie::None;
    engine.restore(&f.id, Select::Latest, options()).await.unwrap();
    assert_eq!(f.world.condition_of(&f.id), Condition::Running);
}

#[tokio::test]
async fn artifacts_that_the_engine_never_named_are_left_alone() {
    let f = Fixture::new();
    let lie = Arc::new(Mutex::new(Lie::None));
    let liar = Arc::new(Liar { inner: f.world.backend(Domain::Process), lie: lie.clone() });
    let make = || f.builder().process(liar.clone());
    let engine = make().open().await.unwrap();
    engine.attach(&f.id).await.unwrap();
    f.covered(&engine, 1).await;
    close(engine).await;
    *lie.lock() = Lie::List;
    assert_eq!(reopen(make).await.opened().orphans_removed, 0);
}

#[tokio::test]
async fn a_cgroup_that_vanishes_is_stopped_and_not_found() {
    let dir = tempfile::tempdir().unwrap();
    let cgroup = CgroupV2::new(dir.path().join("gone"));
    assert_eq!(cgroup.condition().unwrap(), Condition::Stopped);
    assert_eq!(cgroup.freeze().await.unwrap_err().kind(), ErrorKind::NotFound);
    cgroup.thaw().await.unwrap();
    cgroup.kill().await.unwrap();
    for outside in ["../x", "/x", "a/../../x"] {
        let kind = CgroupV2::below_mount(outside).unwrap_err().kind();
        assert!(matches!(kind, ErrorKind::InvalidInput | ErrorKind::Unsupported), "{outside}");
    }
}

#[tokio::test]
async fn a_sandbox_that_vanishes_in_the_freeze_fails_its_turn_and_its_versions_stay() {
    let f = Fixture::new();
    let (world, id) = (f.world.clone(), f.id.clone());
    let armed = Arc::new(Mutex::new(false));
    let hook = {
        let armed = armed.clone();
        Arc::new(move |step: &'static str| {
            if step == "checkpoint.frozen" && *armed.lock() {
                world.vanish(&id);
            }
            Ok(())
        })
    };
    let engine = f.builder().steps(hook).open().await.unwrap();
    engine.attach(&f.id).await.unwrap();
    f.covered(&engine, 1).await;
    *armed.lock() = true;
    f.world.remember(&f.id, "server", "1").unwrap();
    let Verdict::Failed(error) = f.turn(&engine, 2).await else { panic!("it was covered") };
    assert_eq!((error.kind(), error.sandbox_condition()), (ErrorKind::NotFound, Some(Condition::Stopped)), "{error}");
    assert_eq!(engine.versions(&f.id).len(), 1);
}

fn manifest(f: &Fixture, version: u64) -> PathBuf {
    f.store().join(format!("sandboxes/box/versions/v{version}.json"))
}

/// Changes a manifest in the store, with a right checksum.
fn forge(f: &Fixture, version: u64, change: impl FnOnce(&mut serde_json::Value)) {
    let text = std::fs::read_to_string(manifest(f, version)).unwrap();
    let (head, body) = text.split_once("\"body\": ").unwrap();
    let mut value: serde_json::Value = serde_json::from_str(body.rsplit_once('}').unwrap().0).unwrap();
    change(&mut value);
    let body = value.to_string();
    let digest: String = Sha256::digest(body.as_bytes()).iter().map(|byte| format!("{byte:02x}")).collect();
    let before = head.split_once("\"sha256\": ").unwrap().0;
    std::fs::write(manifest(f, version), format!("{before}\"sha256\": \"{digest}\",\n\"body\": {body}\n}}\n")).unwrap();
}

async fn three_versions(f: &Fixture) -> Engine {
    let engine = f.engine().await;
    for turn in 1..=3 {
        f.world.write(&f.id, "/n", &turn.to_string()).unwrap();
        f.covered(&engine, turn).await;
    }
    engine
}

#[tokio::test]
async fn a_clock_that_jumps_changes_neither_what_stands_nor_what_is_kept() {
    let f = Fixture::new();
    close(three_versions(&f).await).await;
    // The second was made in 2100 and the third in 1970, as the host believed.
    forge(&f, 2, |body| body["created_ms"] = serde_json::json!(4_102_444_800_000u64));
    forge(&f, 3, |body| body["created_ms"] = serde_json::json!(5));
    let engine = reopen(|| f.builder()).await;
    assert!(engine.opened().damaged.is_empty(), "{:?}", engine.opened().damaged);
    assert_eq!(engine.sandboxes()[0].standing, Some(VersionId(3)));
    let day = std::time::Duration::from_secs(86_400);
    let report = engine.prune(&Retention::keep_all().every(std::time::Duration::ZERO, day)).await.unwrap();
    assert!(report.removed.is_empty(), "{report:?}");
    f.world.write(&f.id, "/n", "4").unwrap();
    assert_eq!(f.covered(&engine, 4).await, VersionId(4));
    let back = engine.restore(&f.id, Select::Turn(crab_core::TurnNumber(3)), RestoreOptions::default()).await.unwrap();
    assert_eq!(back.version, VersionId(3));
    assert_eq!(f.world.files(&f.id)["/n"], "3");
}

#[tokio::test]
async fn a_manifest_of_a_newer_format_is_named_left_and_passed_over_only_when_allowed() {
    let f = Fixture::new();
    close(three_versions(&f).await).await;
    let text = std::fs::read_to_string(manifest(&f, 3)).unwrap().replace("\"format\": 1", "\"format\": 2");
    std::fs::write(manifest(&f, 3), &text).unwrap();
    let engine = reopen(|| f.builder()).await;
    assert_eq!(engine.opened().damaged.len(), 1);
    let error = engine.restore(&f.id, Select::Latest, RestoreOptions::default()).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert_eq!(error.advice(), Advice::Fix);
    assert_eq!(f.world.condition_of(&f.id), Condition::Running, "nothing was touched");
    let options = RestoreOptions { allow_fallback: true, ..RestoreOptions::default() };
    let report = engine.restore(&f.id, Select::Latest, options).await.unwrap();
    assert_eq!((report.version, report.passed_over[0].version), (VersionId(2), VersionId(3)));
    assert_eq!(std::fs::read_to_string(manifest(&f, 3)).unwrap(), text);
    // Its number is taken, and its artifacts may be needed.
    assert_eq!(report.replaced, Some(VersionId(4)));
}

#[tokio::test]
async fn an_engine_without_its_parts_or_with_the_wrong_ones_is_refused() {
    let f = Fixture::new();
    let world = |world: &MemoryWorld| Arc::new(world.clone());
    let refused: [Error; 3] = [
        Engine::builder(f.store()).open().await.unwrap_err(),
        Engine::builder(f.store()).filesystem(f.world.backend(Domain::Filesystem)).open().await.unwrap_err(),
        Engine::builder(f.store())
            .filesystem(f.world.backend(Domain::Process))
            .host(world(&f.world))
            .delta(world(&f.world))
            .open()
            .await
            .unwrap_err(),
    ];
    for error in refused {
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    }
    assert!(!f.store().exists(), "nothing was made");
}
