//! The suite that every backend passes.
#![allow(clippy::unwrap_used, reason = "these are tests")]

mod support;

use crab_core::conformance::{self, disk::DiskWorld};
use support::{Pool, Quotas};

async fn conforms(pool: Pool) {
    conformance::backend(&DiskWorld::new(pool)).await;
}

#[tokio::test]
async fn the_backend_conforms() {
    let Some(pool) = Pool::new() else { return };
    conforms(pool).await;
}

#[tokio::test]
async fn the_backend_conforms_where_full_quota_groups_are_on() {
    let Some(pool) = Pool::new() else { return };
    pool.count(Quotas::Full);
    conforms(pool).await;
}

#[tokio::test]
async fn the_backend_conforms_where_simple_quota_groups_are_on() {
    let Some(pool) = Pool::new() else { return };
    pool.count(Quotas::Simple);
    conforms(pool).await;
}

#[tokio::test]
async fn the_backend_conforms_on_two_devices() {
    let Some(pool) = Pool::of_two_devices() else { return };
    conforms(pool).await;
}
