//! Many sandboxes at once, and a process that is killed again and again: nothing leaks, and every version is whole.
#![allow(clippy::unwrap_used, reason = "these are tests")]

mod support;

use std::time::Duration;

use crab_backend_zfs::ZfsBackend;
use crab_core::conformance::stress::{Orders, Stress};
use support::Pool;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_that_is_killed() {
    let Some(orders) = Orders::here() else { return };
    let backend = ZfsBackend::open(&orders.store).unwrap();
    Stress::on(&orders.pool).be_killed(&backend, orders.round).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_sandboxes_and_a_process_that_is_killed_leak_nothing() {
    let Some(pool) = Pool::new() else { return };
    let store = pool.base();
    Stress::on(&pool.path()).outlive(&pool, &pool.path(), &store, 2, Duration::from_secs(10)).await;
}
