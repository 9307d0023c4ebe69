//! Many sandboxes at once, and a process that is killed again and again: nothing leaks, and every version is whole.
#![allow(clippy::unwrap_used, reason = "these are tests")]

mod support;

use std::time::Duration;

use crab_backend_btrfs::BtrfsBackend;
use crab_core::conformance::stress::{Orders, Stress};
use support::Pool;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_that_is_killed() {
    let Some(orders) = Orders::here() else { return };
    let backend = BtrfsBackend::open(&orders.store).unwrap();
    Stress::on(&orders.pool).be_killed(&backend, orders.round).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_sandboxes_and_a_process_that_is_killed_leak_nothing() {
    let Some(pool) = Pool::in_memory(2 << 30) else { return };
    let store = pool.versions().display().to_string();
    Stress::on(&pool.path()).outlive(&pool, &pool.path(), &store, 4, Duration::from_millis(1000)).await;
}
