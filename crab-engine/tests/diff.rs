//! What differs between two versions.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use common::Fixture;
use crab_core::{ErrorKind, FileChange, FileChangeKind, SandboxId, VersionId};
use crab_engine::retention::{Held, Retention};
use crab_engine::{Engine, ForkOptions, ProcessChangeKind, ProcessDiff, VersionDiff};

async fn files(diff: &mut VersionDiff) -> Vec<(String, FileChangeKind)> {
    let mut found = Vec::new();
    while let Some(FileChange { path, kind }) = diff.next_file().await.unwrap() {
        found.push((String::from_utf8(path).unwrap(), kind));
    }
    found.sort();
    found
}

async fn diff(engine: &Engine, id: &SandboxId, from: u64, to: u64) -> VersionDiff {
    engine.diff((id, VersionId(from)), (id, VersionId(to))).await.unwrap()
}

#[tokio::test]
async fn files_and_processes_that_differ_are_named() {
    let f = Fixture::new();
    let engine = f.engine().await;
    f.world.write(&f.id, "/kept", "1").unwrap();
    f.world.write(&f.id, "/gone", "1").unwrap();
    f.world.remember(&f.id, "old", "1").unwrap();
    f.covered(&engine, 1).await;
    f.world.unlink(&f.id, "/gone").unwrap();
    f.world.write(&f.id, "/kept", "2").unwrap();
    f.world.write(&f.id, "/new", "1").unwrap();
    f.covered(&engine, 2).await;
    f.world.exit(&f.id, "old").unwrap();
    f.world.remember(&f.id, "server", "1").unwrap();
    f.covered(&engine, 3).await;

    let mut first = diff(&engine, &f.id, 1, 2).await;
    assert_eq!(first.processes(), &ProcessDiff::Unchanged);
    let named = |path: &str, kind| (path.to_owned(), kind);
    let wanted = [
        named("gone", FileChangeKind::Removed),
        named("kept", FileChangeKind::Content),
        named("new", FileChangeKind::Added),
    ];
    assert_eq!(files(&mut first).await, wanted);
    let mut second = diff(&engine, &f.id, 2, 3).await;
    assert!(files(&mut second).await.is_empty());
    let ProcessDiff::Changed(changes) = second.processes() else { panic!("{:?}", second.processes()) };
    let mut changes: Vec<_> = changes.iter().map(|change| (change.name.as_str(), change.kind)).collect();
    changes.sort();
    let wanted =
        [("init", ProcessChangeKind::Lives), ("old", ProcessChangeKind::Ended), ("server", ProcessChangeKind::Started)];
    assert_eq!(changes, wanted);
    assert!(files(&mut diff(&engine, &f.id, 1, 1).await).await.is_empty());
}

#[tokio::test]
async fn a_fork_is_compared_with_its_source_and_what_is_read_stays() {
    let f = Fixture::new();
    let engine = f.engine().await;
    for turn in 1..=2 {
        f.world.write(&f.id, "/n", &turn.to_string()).unwrap();
        f.covered(&engine, turn).await;
    }
    let fork = common::id("fork");
    f.world.create_stopped(&fork);
    engine.fork(&f.id, VersionId(1), &fork, ForkOptions::default()).await.unwrap();
    f.world.write(&fork, "/n", "other").unwrap();
    common::turn(&engine, &fork, 3).await;
    let newest = common::newest(&engine, &fork).version;
    let mut diff = engine.diff((&f.id, VersionId(1)), (&fork, newest)).await.unwrap();
    assert_eq!(engine.inventory(&f.id).await[0].held, Some(Held::Read));
    assert!(engine.prune(&Retention::keep_all().last(1)).await.unwrap().removed.iter().all(|r| r.sandbox == fork));
    assert_eq!(engine.remove(&f.id, VersionId(1)).await.unwrap_err().kind(), ErrorKind::Busy);
    engine.detach(&f.id).await.unwrap();
    assert_eq!(engine.forget(&f.id).await.unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(files(&mut diff).await, [("n".to_owned(), FileChangeKind::Content)]);
    drop(diff);
    engine.remove(&f.id, VersionId(1)).await.unwrap();
    let gone = engine.diff((&f.id, VersionId(1)), (&fork, newest)).await.unwrap_err();
    assert_eq!(gone.kind(), ErrorKind::NotFound);
}
