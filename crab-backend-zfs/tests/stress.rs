//! Many sandboxes at once, and a process that is killed again and again: nothing leaks, and every version is whole.
#![allow(clippy::unwrap_used, reason = "these are tests")]

mod support;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crab_backend_zfs::ZfsBackend;
use crab_core::conformance::stress::{Process, Stress};
use crab_core::{Sandbox, SandboxId};
use support::{Disk, Pool};

const SANDBOXES: usize = 64;
const SNAPSHOTS: usize = 10;
const KILLS: u64 = 2;
const WORKERS: usize = 8;
/// Set for the process that is killed: where the pool is mounted, the dataset of the versions, a number.
const POOL: &str = "CRAB_ZFS_STRESS_POOL";
const BASE: &str = "CRAB_ZFS_STRESS_BASE";
const ROUND: &str = "CRAB_ZFS_STRESS_ROUND";

fn stress(pool: &Path) -> Stress {
    let sandbox = |n| {
        let id = SandboxId::new(format!("box-{n}")).unwrap();
        let root = pool.join("boxes").join(id.as_str());
        Sandbox::new(id, root, pool.join("no-cgroup"))
    };
    Stress { sandboxes: (0..SANDBOXES).map(sandbox).collect(), versions: SNAPSHOTS }
}

/// Acts on all sandboxes for ever.
#[test]
fn the_process_that_is_killed() {
    let (Some(pool), Ok(base), Ok(round)) = (std::env::var_os(POOL), std::env::var(BASE), std::env::var(ROUND)) else {
        return;
    };
    let (pool, round) = (Path::new(&pool), round.parse().unwrap());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let backend: Arc<dyn crab_core::CheckpointBackend> = Arc::new(ZfsBackend::open(base).unwrap());
    let stress = Arc::new(stress(pool));
    runtime.block_on(async {
        backend.recover().await.unwrap();
        let mut workers = tokio::task::JoinSet::new();
        for worker in 0..WORKERS {
            let (backend, stress) = (Arc::clone(&backend), Arc::clone(&stress));
            workers.spawn(async move { stress.work(&*backend, worker, WORKERS, round).await });
        }
        // The first one to end has failed.
        workers.join_next().await.unwrap().unwrap();
    });
}

#[test]
fn sixty_four_sandboxes_and_a_process_that_is_killed_leak_nothing() {
    let Some(pool) = Pool::new() else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let stress = stress(&pool.path());
    runtime.block_on(async {
        let backend = pool.open();
        for sandbox in &stress.sandboxes {
            pool.make_root(&sandbox.id);
        }
        for round in 1..=SNAPSHOTS {
            stress.checkpoint_all(&*backend, round as u64).await;
        }
        assert_eq!(stress.check(&pool, &*backend).await, SANDBOXES * SNAPSHOTS);
    });
    for kill in 1..=KILLS {
        let round = kill.to_string();
        let process = Process::start(
            "the_process_that_is_killed",
            &[(POOL, &pool.path()), (BASE, Path::new(&pool.base())), (ROUND, Path::new(&round))],
        );
        std::thread::sleep(Duration::from_millis(12_000 + 3_317 * kill));
        process.kill();
        let backend = pool.open();
        runtime.block_on(async {
            backend.recover().await.unwrap();
            stress.check(&pool, &*backend).await;
        });
    }
    runtime.block_on(async { stress.end(&pool, &*pool.open()).await });
}
