//! The function that checks the invariants finds each violation.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use common::{Fixture, newest, violations};
use crab_core::memory::{Fault, Step};
use crab_core::{Domain, SandboxHost};

async fn found(f: &Fixture, engine: &crab_engine::Engine) -> String {
    violations(&f.world, engine).await.join("; ")
}

#[tokio::test]
async fn each_violation_is_found() {
    let f = Fixture::new();
    let engine = f.engine().await;
    f.covered(&engine, 1).await;
    assert_eq!(found(&f, &engine).await, "");

    f.world.freeze(&f.id).await.unwrap();
    assert!(found(&f, &engine).await.contains("is frozen"));
    f.world.thaw(&f.id).await.unwrap();

    // An artifact of nobody's: the manifest of a persisted version failed, and the removal of its artifact too.
    f.world.write(&f.id, "/a", "1").unwrap();
    f.world.order(Step::AfterPersist(Domain::Filesystem), Fault::Error(crab_core::ErrorKind::Unsupported));
    f.turn(&engine, 2).await;
    assert!(found(&f, &engine).await.contains("belongs to no version"));
    common::close(engine).await;
    let engine = common::reopen(|| f.builder()).await;
    assert_eq!(found(&f, &engine).await, "", "the orphan goes when the store is opened");
    assert_eq!(engine.opened().orphans_removed, 1);

    f.world.damage(newest(&engine, &f.id).filesystem.artifact().unwrap());
    assert!(found(&f, &engine).await.contains("is damaged"));
}
