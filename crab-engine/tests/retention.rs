//! Removing versions: pins, labels, rules, quotas, and that whatever is kept stays whole.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use common::{Fixture, assert_sound, close, reopen};
use crab_core::memory::{Fault, MemoryWorld, Step};
use crab_core::{
    Artifact, ArtifactId, Capabilities, CaptureRequest, Captured, CheckpointBackend, Domain, ErrorKind, Label,
    OperationId, RestoreTarget, Restored, Result, SandboxId, Space, VersionId,
};
use crab_engine::retention::{Held, Retention, Rule};
use crab_engine::{Engine, ForkOptions, RestoreOptions, Select};

/// Turns that change both domains, so that version N holds N.
async fn work(f: &Fixture, engine: &Engine, turns: std::ops::RangeInclusive<u64>) {
    for turn in turns {
        f.world.write(&f.id, "/n", &turn.to_string()).unwrap();
        f.world.remember(&f.id, "server", &turn.to_string()).unwrap();
        f.covered(engine, turn).await;
    }
}

fn numbers(engine: &Engine, id: &SandboxId) -> Vec<u64> {
    engine.versions(id).iter().map(|manifest| manifest.version.0).collect()
}

#[tokio::test]
async fn pinned_labelled_and_standing_versions_stay_and_say_why() {
    let f = Fixture::new();
    let engine = f.engine().await;
    work(&f, &engine, 1..=6).await;
    let label = Label::new("before-migration").unwrap();
    engine.pin(&f.id, VersionId(2)).await.unwrap();
    engine.label(&f.id, VersionId(3), &label).await.unwrap();
    assert_eq!(engine.labelled(&f.id, &label), Some(VersionId(3)));
    for version in [2, 3, 6] {
        let error = engine.remove(&f.id, VersionId(version)).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        assert!(error.remedy().is_some());
    }
    let plan = engine.prune_plan(&Retention::keep_all().last(2)).await;
    assert_eq!(numbers(&engine, &f.id), [1, 2, 3, 4, 5, 6], "a plan removes nothing");
    let report = engine.prune(&Retention::keep_all().last(2)).await.unwrap();
    assert_eq!(report.removed, plan.removed);
    assert!(report.removed.iter().all(|removal| removal.rule == Rule::NotKept));
    assert_eq!(numbers(&engine, &f.id), [2, 3, 5, 6]);
    assert_sound(&f.world, &engine, "pruned").await;
    let held: Vec<Option<Held>> = engine.inventory(&f.id).await.iter().map(|info| info.held).collect();
    assert_eq!(held, [Some(Held::Pinned), Some(Held::Labelled), None, Some(Held::Standing)]);

    // They outlive the engine, and go when they are taken away.
    close(engine).await;
    let engine = reopen(|| f.builder()).await;
    assert!(engine.prune(&Retention::keep_all().last(0)).await.unwrap().removed.iter().all(|r| r.version.0 == 5));
    engine.unpin(&f.id, VersionId(2)).await.unwrap();
    engine.label(&f.id, VersionId(2), &label).await.unwrap();
    assert_eq!(engine.labelled(&f.id, &label), Some(VersionId(2)), "a label moves");
    engine.unlabel(&f.id, &label).await.unwrap();
    engine.prune(&Retention::keep_all().last(0)).await.unwrap();
    assert_eq!(numbers(&engine, &f.id), [6]);
    assert_eq!(f.world.artifacts().len(), 2);
}

#[tokio::test]
async fn what_does_not_exist_cannot_be_pinned() {
    let f = Fixture::new();
    let engine = f.engine().await;
    work(&f, &engine, 1..=1).await;
    assert_eq!(engine.pin(&f.id, VersionId(7)).await.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(engine.pin(&common::id("nobody"), VersionId(1)).await.unwrap_err().kind(), ErrorKind::NotFound);
    assert_eq!(Label::new("a/b").unwrap_err().kind(), ErrorKind::InvalidInput);
}

#[tokio::test]
async fn while_pins_cannot_be_read_everything_counts_as_pinned() {
    let f = Fixture::new();
    let engine = f.engine().await;
    work(&f, &engine, 1..=3).await;
    engine.pin(&f.id, VersionId(1)).await.unwrap();
    close(engine).await;
    let marks = f.store().join("sandboxes/box/marks.json");
    let text = std::fs::read_to_string(&marks).unwrap();
    std::fs::write(&marks, text.replace("true", "false")).unwrap();
    let engine = reopen(|| f.builder()).await;
    assert_eq!(engine.opened().damaged.len(), 1);
    assert!(engine.prune(&Retention::keep_all().last(0)).await.unwrap().removed.is_empty());
    let error = engine.remove(&f.id, VersionId(2)).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    // A person looks at the file and pins again.
    engine.pin(&f.id, VersionId(2)).await.unwrap();
    engine.prune(&Retention::keep_all().last(0)).await.unwrap();
    assert_eq!(numbers(&engine, &f.id), [2, 3]);
    let aside = std::fs::read_dir(f.store().join("sandboxes/box")).unwrap().flatten();
    assert_eq!(aside.filter(|e| e.file_name().to_string_lossy().contains("damaged")).count(), 1);
}

#[tokio::test]
async fn a_quota_removes_the_oldest_and_counts_what_versions_share_once() {
    let f = Fixture::new();
    let engine = f.engine().await;
    f.world.write(&f.id, "/big", &"x".repeat(1000)).unwrap();
    f.world.remember(&f.id, "server", &"y".repeat(100)).unwrap();
    f.covered(&engine, 1).await;
    // Three versions with processes of their own share the files.
    for turn in 2..=4 {
        f.world.remember(&f.id, "server", &turn.to_string().repeat(100)).unwrap();
        f.covered(&engine, turn).await;
    }
    let inventory = engine.inventory(&f.id).await;
    assert!(inventory.iter().all(|info| info.bytes > 1100 && info.own_bytes > 100 && info.own_bytes < 200));
    assert!(inventory.iter().all(|info| info.unknown == 0));
    let report = engine.prune(&Retention::keep_all().sandbox_quota(1300)).await.unwrap();
    assert_eq!(numbers(&engine, &f.id), [3, 4]);
    assert_eq!(report.bytes(), inventory[0].own_bytes + inventory[1].own_bytes);
    assert!(report.over.is_empty());
    let report = engine.prune(&Retention::keep_all().store_quota(500)).await.unwrap();
    assert_eq!(numbers(&engine, &f.id), [4], "what stands stays");
    assert_eq!((report.over[0].sandbox.clone(), report.over[0].quota), (None, 500));
    assert_sound(&f.world, &engine, "").await;
}

#[tokio::test]
async fn rules_given_to_the_engine_are_kept_after_each_version() {
    let f = Fixture::new();
    let engine = f.builder().retention(Retention::keep_all().last(3)).open().await.unwrap();
    engine.attach(&f.id).await.unwrap();
    work(&f, &engine, 1..=10).await;
    for _ in 0..400 {
        if engine.versions(&f.id).len() == 3 {
            break;
        }
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(numbers(&engine, &f.id), [8, 9, 10]);
    engine.close().await;
    assert_sound(&f.world, &engine, "").await;
}

#[tokio::test]
async fn a_version_that_a_fork_needs_goes_only_by_name_and_its_artifacts_with_the_fork() {
    let f = Fixture::new();
    let engine = f.engine().await;
    work(&f, &engine, 1..=3).await;
    let into = common::id("fork");
    f.world.create_stopped(&into);
    // The fork is cut off in the middle: its source is held until it has ended.
    f.world.order(Step::Restore(Domain::Filesystem), Fault::Error(ErrorKind::Io));
    let options = || ForkOptions { operation: Some(OperationId::new("forked").unwrap()) };
    engine.fork(&f.id, VersionId(1), &into, options()).await.unwrap_err();
    assert_eq!(engine.inventory(&f.id).await[0].held, Some(Held::Operation));
    engine.prune(&Retention::keep_all().last(0)).await.unwrap();
    assert_eq!(numbers(&engine, &f.id), [1, 3]);
    engine.detach(&f.id).await.unwrap();
    assert_eq!(engine.forget(&f.id).await.unwrap_err().kind(), ErrorKind::Busy);
    engine.fork(&f.id, VersionId(1), &into, options()).await.unwrap();
    engine.prune(&Retention::keep_all().last(0)).await.unwrap();
    assert_eq!(numbers(&engine, &f.id), [3]);
    assert_sound(&f.world, &engine, "the fork keeps what it shares").await;
    engine.restore(&into, Select::Version(VersionId(1)), RestoreOptions::default()).await.unwrap();
    assert_eq!(f.world.files(&into)["/n"], "1");
    engine.forget(&f.id).await.unwrap();
    assert_sound(&f.world, &engine, "the source is gone").await;
}

#[tokio::test]
async fn an_artifact_that_cannot_be_removed_is_reported_and_goes_later() {
    let f = Fixture::new();
    let engine = f.engine().await;
    work(&f, &engine, 1..=4).await;
    f.world.order(Step::Remove(Domain::Process), Fault::Error(ErrorKind::Io));
    let report = engine.prune(&Retention::keep_all().last(1)).await.unwrap();
    assert_eq!((report.removed.len(), report.failed.len()), (2, 1));
    assert_eq!(numbers(&engine, &f.id), [4], "the version is gone all the same");
    close(engine).await;
    let engine = reopen(|| f.builder()).await;
    assert_eq!(engine.opened().orphans_removed, 1);
    assert_sound(&f.world, &engine, "").await;
}

/// A backend whose artifacts hold what differs from their parent: without it they are worth nothing.
struct Chained {
    inner: Arc<dyn CheckpointBackend>,
    world: MemoryWorld,
    /// The next artifacts are whole by themselves.
    whole: AtomicBool,
}

struct ChainedCapture(Box<dyn Captured>, Vec<ArtifactId>);

#[async_trait]
impl CheckpointBackend for Chained {
    fn name(&self) -> &str {
        self.inner.name()
    }
    fn domain(&self) -> Domain {
        self.inner.domain()
    }
    fn capabilities(&self) -> Capabilities {
        self.inner.capabilities().with_incremental()
    }
    async fn recover(&self) -> Result<()> {
        Ok(())
    }
    async fn capture(&self, request: CaptureRequest<'_>) -> Result<Box<dyn Captured>> {
        // The nearest alone: the engine knows the rest.
        let whole = self.whole.load(Ordering::SeqCst);
        let below: Vec<ArtifactId> =
            request.parent.filter(|_| !whole).map(|parent| parent.id.clone()).into_iter().collect();
        if let Some(parent) = request.parent {
            assert_eq!(parent.sandbox, request.sandbox.id, "a parent of another sandbox");
        }
        Ok(Box::new(ChainedCapture(self.inner.capture(request).await?, below)))
    }
    async fn verify(&self, artifact: &Artifact) -> Result<()> {
        for below in &artifact.depends_on {
            let key = (artifact.domain, artifact.sandbox.clone(), below.clone());
            assert!(self.world.artifacts().contains(&key), "{} is broken: {below} is gone", artifact.id);
        }
        self.inner.verify(artifact).await
    }
    async fn restore(&self, artifact: &Artifact, target: RestoreTarget) -> Result<Restored> {
        self.verify(artifact).await?;
        self.inner.restore(artifact, target).await
    }
    async fn remove(&self, artifact: &Artifact) -> Result<()> {
        self.inner.remove(artifact).await
    }
    async fn list(&self, id: &SandboxId) -> Result<Vec<Artifact>> {
        let listed = self.inner.list(id).await?;
        Ok(listed.into_iter().map(|artifact| Artifact { bytes: Some(7), ..artifact }).collect())
    }
}

#[async_trait]
impl Captured for ChainedCapture {
    async fn persist(self: Box<Self>) -> Result<Artifact> {
        Ok(Artifact { depends_on: self.1, ..self.0.persist().await? })
    }
    async fn discard(self: Box<Self>) -> Result<()> {
        self.0.discard().await
    }
}

/// A backend that cannot tell what it writes, since its artifacts share blocks: they must be measured.
struct Sharing(Arc<dyn CheckpointBackend>);

struct SharingCapture(Box<dyn Captured>);

#[async_trait]
impl CheckpointBackend for Sharing {
    fn name(&self) -> &str {
        self.0.name()
    }
    fn domain(&self) -> Domain {
        self.0.domain()
    }
    fn capabilities(&self) -> Capabilities {
        self.0.capabilities()
    }
    async fn recover(&self) -> Result<()> {
        Ok(())
    }
    async fn capture(&self, request: CaptureRequest<'_>) -> Result<Box<dyn Captured>> {
        Ok(Box::new(SharingCapture(self.0.capture(request).await?)))
    }
    async fn verify(&self, artifact: &Artifact) -> Result<()> {
        self.0.verify(artifact).await
    }
    async fn restore(&self, artifact: &Artifact, target: RestoreTarget) -> Result<Restored> {
        self.0.restore(artifact, target).await
    }
    async fn remove(&self, artifact: &Artifact) -> Result<()> {
        self.0.remove(artifact).await
    }
    async fn list(&self, id: &SandboxId) -> Result<Vec<Artifact>> {
        self.0.list(id).await
    }
    async fn space(&self, artifact: &Artifact) -> Result<Space> {
        self.0.space(artifact).await
    }
}

#[async_trait]
impl Captured for SharingCapture {
    async fn persist(self: Box<Self>) -> Result<Artifact> {
        Ok(Artifact { bytes: None, ..self.0.persist().await? })
    }
    async fn discard(self: Box<Self>) -> Result<()> {
        self.0.discard().await
    }
}

#[tokio::test]
async fn quotas_in_the_background_count_what_must_be_measured() {
    let f = Fixture::new();
    let files = Arc::new(Sharing(f.world.backend(Domain::Filesystem)));
    let builder = f.builder().filesystem(files).retention(Retention::keep_all().sandbox_quota(2500));
    let engine = builder.open().await.unwrap();
    engine.attach(&f.id).await.unwrap();
    let until = std::time::Instant::now() + Duration::from_secs(20);
    // Each takes 1000 bytes. The background measures when it may; each version gives it an occasion.
    for turn in 1.. {
        f.world.write(&f.id, "/big", &turn.to_string().repeat(1000)[..1000]).unwrap();
        f.covered(&engine, turn).await;
        tokio::time::sleep(Duration::from_millis(5)).await;
        let versions = engine.versions(&f.id).len();
        if turn > 4 && versions == 2 {
            break;
        }
        assert!(std::time::Instant::now() < until, "{versions} versions of {turn} are left");
    }
    engine.close().await;
    assert_sound(&f.world, &engine, "").await;
}

#[tokio::test]
async fn whatever_a_kept_artifact_builds_on_is_kept_counted_and_removed_after_it() {
    let f = Fixture::new();
    let chained =
        Arc::new(Chained { inner: f.world.backend(Domain::Process), world: f.world.clone(), whole: false.into() });
    let make = || f.builder().process(chained.clone());
    let engine = make().open().await.unwrap();
    engine.attach(&f.id).await.unwrap();
    work(&f, &engine, 1..=3).await;
    let third = engine.versions(&f.id)[2].process.artifact().unwrap().depends_on.clone();
    assert_eq!(third.len(), 2, "the whole chain is named");
    engine.prune(&Retention::keep_all().last(1)).await.unwrap();
    assert_eq!(numbers(&engine, &f.id), [3]);
    assert_eq!(f.world.artifacts().len(), 4, "the chain of three processes, one tree of files");
    let info = &engine.inventory(&f.id).await[0];
    let own = |half: &crab_core::Half| half.artifact().unwrap().bytes.unwrap();
    // Two of the chain are known to their backend alone.
    assert_eq!(info.bytes, own(&info.manifest.process) + own(&info.manifest.filesystem) + 14);
    close(engine).await;
    let engine = reopen(make).await;
    assert_eq!(engine.opened().orphans_removed, 0);
    engine.restore(&f.id, Select::Latest, RestoreOptions::default()).await.unwrap();
    assert_eq!(f.world.processes(&f.id)["server"], "3");
    // A fork's first artifact of its own does not build on the source's.
    let into = common::id("fork");
    f.world.create_stopped(&into);
    engine.fork(&f.id, VersionId(3), &into, ForkOptions::default()).await.unwrap();
    f.world.remember(&into, "server", "x").unwrap();
    common::turn(&engine, &into, 9).await;
    let newest = common::newest(&engine, &into);
    assert!(newest.process.artifact().unwrap().depends_on.is_empty());
    engine.detach(&into).await.unwrap();
    engine.forget(&into).await.unwrap();
    // The next is whole by itself: the chain may go, top first.
    chained.whole.store(true, Ordering::SeqCst);
    f.world.remember(&f.id, "server", "4").unwrap();
    f.covered(&engine, 10).await;
    let chain =
        |world: &MemoryWorld| world.artifacts().iter().filter(|(domain, ..)| *domain == Domain::Process).count();
    assert_eq!(chain(&f.world), 4);
    engine.prune(&Retention::keep_all().last(1)).await.unwrap();
    assert_eq!(chain(&f.world), 1);
    assert_sound(&f.world, &engine, "").await;
}
