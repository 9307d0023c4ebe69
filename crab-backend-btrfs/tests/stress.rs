//! Many sandboxes at once, and a process that is killed again and again: nothing leaks, and every version is whole.
#![allow(clippy::unwrap_used, reason = "these are tests")]

mod support;

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crab_backend_btrfs::{BtrfsBackend, subvolume};
use crab_core::{CheckpointBackend, Sandbox};
use support::churn::Churn;
use support::{Pool, checkpoint, names, restore, sandbox_in};

const SANDBOXES: u64 = 64;
const SNAPSHOTS: u64 = 10;
const KILLS: u64 = 4;
/// Set for the process that is killed: the pool's path and a number.
const POOL: &str = "CRAB_BTRFS_STRESS_POOL";
const ROUND: &str = "CRAB_BTRFS_STRESS_ROUND";

const FILES: [&str; 4] = ["a", "b", "deep/c", "deep/d"];

/// Brings the root to a value. A kill in the middle leaves a mixture, which is never captured.
fn set(root: &Path, value: u64) {
    fs::create_dir_all(root.join("deep")).unwrap();
    for file in FILES {
        fs::write(root.join(file), value.to_string().repeat(500)).unwrap();
    }
}

/// The value of a tree; `None` for a mixture.
fn get(root: &Path) -> Option<u64> {
    let texts: BTreeSet<String> =
        FILES.iter().map(|file| fs::read_to_string(root.join(file)).ok()).collect::<Option<_>>()?;
    let text = texts.first().filter(|text| texts.len() == 1 && !text.is_empty())?;
    let value = &text[..text.len() / 500];
    (value.repeat(500) == *text).then(|| value.parse().ok())?
}

/// The value that an artifact of this name holds.
fn value_of(name: &str) -> u64 {
    name.strip_prefix('v').and_then(|rest| rest.split('-').next()).unwrap().parse().unwrap()
}

fn sandboxes(pool: &Path) -> Vec<Sandbox> {
    (0..SANDBOXES).map(|n| sandbox_in(pool, &format!("box-{n}"))).collect()
}

/// One random act on one sandbox.
async fn act(backend: &BtrfsBackend, sandbox: &Sandbox, random: &mut Churn, number: u64) {
    let versions = backend.list(&sandbox.id).await.unwrap();
    let any = versions.get(usize::from(random.byte()) % versions.len().max(1)).cloned();
    match (random.byte() % 8, any) {
        (0 | 1, Some(artifact)) => {
            let keep = get(&sandbox.root).map(|value| format!("v{value}-kept-{number}"));
            restore(backend, &artifact, sandbox, &format!("op-{number}"), keep.as_deref()).await.unwrap();
            assert_eq!(get(&sandbox.root), Some(value_of(artifact.id.as_str())));
        }
        (2, Some(artifact)) => {
            restore(backend, &artifact, sandbox, &format!("op-{number}"), None).await.unwrap();
            assert_eq!(get(&sandbox.root), Some(value_of(artifact.id.as_str())));
        }
        (3, Some(artifact)) => backend.remove(&artifact).await.unwrap(),
        (_, Some(artifact)) if versions.len() as u64 >= SNAPSHOTS => backend.remove(&artifact).await.unwrap(),
        (4, _) => drop(support::capture(backend, sandbox, &format!("v{number}-dropped")).await.unwrap()),
        _ => {
            set(&sandbox.root, number);
            checkpoint(backend, sandbox, &format!("v{number}")).await.unwrap();
        }
    }
}

/// Acts on all sandboxes, eight at a time, for ever.
#[test]
fn the_process_that_is_killed() {
    let (Some(pool), Some(round)) = (std::env::var_os(POOL), std::env::var(ROUND).ok()) else { return };
    let round: u64 = round.parse().unwrap();
    let pool = Path::new(&pool);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let backend = BtrfsBackend::open(pool.join("versions")).unwrap();
    let all = Arc::new(sandboxes(pool));
    let next = Arc::new(AtomicU64::new(round * 1_000_000));
    runtime.block_on(async {
        backend.recover().await.unwrap();
        let mut workers = tokio::task::JoinSet::new();
        for worker in 0..8 {
            let (backend, all, next) = (backend.clone(), Arc::clone(&all), Arc::clone(&next));
            workers.spawn(async move {
                let mut random = Churn::new(round * 100 + worker + 1);
                loop {
                    // Its own share of the sandboxes: calls for one come one at a time.
                    let mine = u64::from(random.byte()) % (SANDBOXES / 8) * 8 + worker;
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    act(&backend, &all[mine as usize], &mut random, number).await;
                }
            });
        }
        // The first one to end has failed.
        workers.join_next().await.unwrap().unwrap();
    });
}

fn subvolumes(pool: &Pool) -> BTreeSet<String> {
    let output = Command::new("btrfs").args(["subvolume", "list", "-o"]).arg(pool.path()).output().unwrap();
    assert!(output.status.success());
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines().map(|line| line.rsplit_once(" path ").unwrap().1.to_owned()).collect()
}

/// What is there is what is listed, and each version holds what its name says.
async fn check(pool: &Pool, backend: &BtrfsBackend) {
    let mut expected = BTreeSet::new();
    for sandbox in sandboxes(&pool.path()) {
        expected.insert(format!("boxes/{}", sandbox.id));
        for artifact in backend.list(&sandbox.id).await.unwrap() {
            backend.verify(&artifact).await.unwrap();
            let value = get(&backend.tree(&artifact).unwrap());
            assert_eq!(value, Some(value_of(artifact.id.as_str())), "{} of {}", artifact.id, sandbox.id);
            expected.insert(format!("versions/{}/{}", sandbox.id, artifact.id));
        }
    }
    assert_eq!(subvolumes(pool), expected);
}

#[test]
fn sixty_four_sandboxes_and_a_process_that_is_killed_leak_nothing() {
    let Some(pool) = Pool::in_memory(2 << 30) else { return };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().unwrap();
    let backend = pool.backend();
    let all: Vec<Sandbox> = (0..SANDBOXES).map(|n| pool.sandbox(&format!("box-{n}"))).collect();
    runtime.block_on(async {
        for round in 0..SNAPSHOTS {
            let captures: Vec<_> = all
                .iter()
                .map(|sandbox| {
                    let (backend, sandbox) = (backend.clone(), sandbox.clone());
                    tokio::spawn(async move {
                        set(&sandbox.root, round + 1);
                        checkpoint(&backend, &sandbox, &format!("v{}", round + 1)).await.unwrap();
                    })
                })
                .collect();
            for capture in captures {
                capture.await.unwrap();
            }
        }
        check(&pool, &backend).await;
    });
    assert_eq!(subvolumes(&pool).len() as u64, SANDBOXES * (1 + SNAPSHOTS));
    drop(backend);

    for kill in 1..=KILLS {
        let mut process = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_process_that_is_killed", "--nocapture"])
            .env(POOL, pool.path())
            .env(ROUND, kill.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        std::thread::sleep(Duration::from_millis(700 + 317 * kill));
        let ended = process.try_wait().unwrap();
        process.kill().unwrap();
        process.wait().unwrap();
        assert!(ended.is_none(), "it failed before it was killed: {ended:?}");
        let backend = pool.backend();
        runtime.block_on(async {
            backend.recover().await.unwrap();
            check(&pool, &backend).await;
        });
    }

    let backend = pool.backend();
    runtime.block_on(async {
        for sandbox in &all {
            for artifact in backend.list(&sandbox.id).await.unwrap() {
                backend.remove(&artifact).await.unwrap();
            }
            subvolume::delete(&sandbox.root).unwrap();
        }
        backend.recover().await.unwrap();
    });
    assert_eq!(subvolumes(&pool), BTreeSet::new());
    assert_eq!(names(&pool.versions()), [".crab-btrfs"]);
    assert_eq!(names(&pool.path().join("boxes")), Vec::<String>::new());
}
