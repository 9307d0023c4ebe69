//! A sandbox that moves to another store: its version is taken over there, and goes on.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use common::{Fixture, assert_sound, builder, close, id, newest};
use crab_core::{ErrorKind, Half, Manifest, VersionId};
use crab_engine::{Engine, ProcessOutcome, RestoreOptions, Select};

/// A sandbox with two versions, the newer of which is given, and an engine on another store. The artifacts are in the
/// backends of both, as if they had been imported.
async fn moved() -> (Fixture, Manifest, Engine) {
    let f = Fixture::new();
    let elsewhere = builder(&f.world, &f.dir.path().join("elsewhere")).open().await.unwrap();
    let engine = f.engine().await;
    for turn in 1..=2 {
        f.world.write(&f.id, &format!("/{turn}"), "x").unwrap();
        f.world.remember(&f.id, "server", &turn.to_string()).unwrap();
        f.covered(&engine, turn).await;
    }
    let manifest = newest(&engine, &f.id);
    // It does not move.
    engine.remove(&f.id, VersionId(1)).await.unwrap();
    engine.detach(&f.id).await.unwrap();
    close(engine).await;
    (f, manifest, elsewhere)
}

#[tokio::test]
async fn an_adopted_version_is_restored_and_its_numbers_go_on() {
    let (f, manifest, elsewhere) = moved().await;
    elsewhere.adopt(manifest.clone()).await.unwrap();
    assert_eq!(elsewhere.versions(&f.id), std::slice::from_ref(&manifest));
    f.world.crash(&f.id);
    let report = elsewhere.restore(&f.id, Select::Latest, RestoreOptions::default()).await.unwrap();
    assert_eq!((report.version, report.turn), (manifest.version, manifest.turn));
    assert!(matches!(report.process, ProcessOutcome::Restored { .. }));
    assert_eq!(f.world.processes(&f.id)["server"], "2");
    assert_eq!(f.world.files(&f.id).into_keys().collect::<Vec<_>>(), ["/1", "/2"]);

    f.world.write(&f.id, "/3", "x").unwrap();
    assert!(f.covered(&elsewhere, 3).await > manifest.version);
    assert_sound(&f.world, &elsewhere, "").await;
}

#[tokio::test]
async fn an_adopted_version_is_durable() {
    let (f, manifest, elsewhere) = moved().await;
    elsewhere.adopt(manifest.clone()).await.unwrap();
    close(elsewhere).await;
    f.world.crash(&f.id);
    let again = common::reopen(|| builder(&f.world, &f.dir.path().join("elsewhere"))).await;
    assert_eq!(again.opened().died, std::slice::from_ref(&f.id));
    let report = again.restore(&f.id, Select::Latest, RestoreOptions::default()).await.unwrap();
    assert_eq!(report.version, manifest.version);
}

#[tokio::test]
async fn what_is_there_already_or_lives_here_is_not_adopted() {
    let (f, manifest, elsewhere) = moved().await;
    elsewhere.adopt(manifest.clone()).await.unwrap();
    let again = elsewhere.adopt(manifest.clone()).await.unwrap_err();
    assert_eq!(again.kind(), ErrorKind::AlreadyExists, "{again}");

    let mut other = manifest.clone();
    other.version = VersionId(manifest.version.0 + 1);
    elsewhere.restore(&f.id, Select::Latest, RestoreOptions::default()).await.unwrap();
    let attached = elsewhere.adopt(other).await.unwrap_err();
    assert_eq!(attached.kind(), ErrorKind::Busy, "{attached}");
    assert_sound(&f.world, &elsewhere, "").await;
}

#[tokio::test]
async fn a_version_whose_artifacts_are_not_there_whole_changes_nothing() {
    let (f, manifest, elsewhere) = moved().await;
    let mut elsewhere_named = manifest.clone();
    let Half::Stored(artifact) = &mut elsewhere_named.filesystem else { panic!("it holds files") };
    artifact.id = "v9-never".parse().unwrap();
    let missing = elsewhere.adopt(elsewhere_named).await.unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::NotFound, "{missing}");

    f.world.damage(manifest.process.artifact().unwrap());
    let damaged = elsewhere.adopt(manifest).await.unwrap_err();
    assert_eq!(damaged.kind(), ErrorKind::Corrupt, "{damaged}");
    assert!(elsewhere.sandboxes().is_empty() && elsewhere.versions(&id("box")).is_empty());
}
