//! The suite that every backend passes.
#![allow(clippy::unwrap_used, reason = "these are tests")]

mod support;

use crab_core::conformance::{self, disk::DiskWorld};
use support::Pool;

#[tokio::test]
async fn the_backend_conforms() {
    let Some(pool) = Pool::new() else { return };
    conformance::backend(&DiskWorld::new(pool)).await;
}
