//! What stops a capture, and differences of any kind.
#![allow(clippy::unwrap_used, reason = "these are tests")]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;

use crab_backend_zfs::ZfsBackend;
use crab_core::conformance::churn::Churn;
use crab_core::{CheckpointBackend, ErrorKind};
use support::{Disk, Pool, checkpoint, restore, trees, with_mounted};

#[tokio::test]
async fn a_full_pool_keeps_the_versions_and_lets_them_be_removed() {
    let Some(pool) = Pool::small(96 << 20) else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    fs::write(sandbox.root.join("file"), "1").unwrap();
    let kept = checkpoint(&backend, &sandbox, "kept").await.unwrap();
    let mut file = fs::File::create(sandbox.root.join("big")).unwrap();
    let mut noise = Churn::new(1);
    let block: Vec<u8> = (0..1 << 20).map(|_| noise.byte()).collect();
    let full = (0..200).find_map(|_| file.write_all(&block).and_then(|()| file.sync_all()).err());
    assert_eq!(full.unwrap().kind(), std::io::ErrorKind::StorageFull);
    drop(file);
    // ZFS keeps some room for itself, in which snapshots may still fit.
    for n in 0..3 {
        if let Err(error) = checkpoint(&backend, &sandbox, &format!("full-{n}")).await {
            assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        }
    }
    backend.recover().await.unwrap();
    backend.verify(&kept).await.unwrap();
    restore(&backend, &kept, &sandbox, "op", None).await.unwrap();
    assert_eq!(support::names(&sandbox.root), ["file"]);
    for artifact in backend.list(&sandbox.id).await.unwrap() {
        backend.remove(&artifact).await.unwrap();
    }
    backend.delete_root(&sandbox.id, &sandbox.root).await.unwrap();
    assert_eq!(pool.all(), Vec::<String>::new());
}

#[test]
fn a_lack_of_privilege_is_said_when_the_backend_is_opened() {
    let Some(pool) = Pool::new() else { return };
    let base = pool.base();
    let error = std::thread::scope(|scope| {
        let unprivileged = scope.spawn(|| {
            // Of this thread alone.
            let nobody = rustix::thread::Uid::from_raw(65534);
            rustix::thread::set_thread_uid(nobody).unwrap();
            ZfsBackend::open(&base).unwrap_err()
        });
        unprivileged.join().unwrap()
    });
    assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
    assert!(error.remedy().is_some_and(|remedy| remedy.contains("root")), "{error}");
    // Nothing was made.
    assert!(support::run("zfs", ["list", &base]).is_err());
    pool.backend();
}

#[tokio::test]
async fn any_changes_are_found_as_a_walk_finds_them() {
    let Some(pool) = Pool::new() else { return };
    let backend = pool.backend();
    for seed in 1..4 {
        let sandbox = pool.sandbox(&format!("box-{seed}"));
        let mut churn = Churn::new(seed);
        let mut versions = Vec::new();
        for version in ["one", "two", "three"] {
            (0..25).for_each(|_| churn.step(&sandbox.root));
            versions.push(checkpoint(&backend, &sandbox, version).await.unwrap());
        }
        for (from, to) in [(0, 1), (1, 0), (0, 2)] {
            let mut changes = backend.diff(&versions[from], &versions[to]).await.unwrap();
            let mut found = BTreeMap::new();
            while let Some(change) = changes.next().await.unwrap() {
                assert_eq!(found.insert(change.path, change.kind), None);
            }
            let [a, b] = [from, to].map(|at| pool.snapshot_of(&versions[at]));
            let expected = with_mounted(&a, |a| with_mounted(&b, |b| trees::differences(a, b)));
            assert_eq!(found, expected, "seed {seed}");
            assert!(!found.is_empty());
        }
    }
}
