//! What versions take of the disk, and what happens where a quota is used up.
#![allow(clippy::unwrap_used, reason = "these are tests")]

mod support;

use std::fs;

use crab_backend_btrfs::BtrfsBackend;
use crab_core::conformance::churn::Churn;
use crab_core::{Advice, CheckpointBackend, ErrorKind, Sandbox, Space};
use rustix::fs::IFlags;
use support::{Disk, Pool, Quotas, capture, checkpoint, names, restore, run};

const MIB: u64 = 1 << 20;
/// More than the trees of these tests take for themselves.
const TREES: u64 = MIB / 2;

fn write_noise(sandbox: &Sandbox, name: &str, mib: u64, seed: u64) {
    let mut noise = Churn::new(seed);
    let bytes: Vec<u8> = (0..mib * MIB).map(|_| noise.byte()).collect();
    fs::write(sandbox.root.join(name), bytes).unwrap();
}

#[track_caller]
fn assert_near(space: Space, referenced: u64, exclusive: u64) {
    let near = |found: u64, expected: u64| (expected..=expected + TREES).contains(&found);
    assert!(near(space.referenced, referenced) && near(space.exclusive, exclusive), "{space:?}");
}

/// What is exclusive follows from what others still hold.
async fn follows_what_others_hold(pool: &Pool) {
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    write_noise(&sandbox, "kept", 2, 1);
    write_noise(&sandbox, "replaced", 3, 2);
    let one = checkpoint(&backend, &sandbox, "a").await.unwrap();
    pool.sync();
    assert_near(backend.space(&one).await.unwrap(), 5 * MIB, 0);
    write_noise(&sandbox, "replaced", 1, 3);
    let two = checkpoint(&backend, &sandbox, "b").await.unwrap();
    pool.sync();
    assert_near(backend.space(&one).await.unwrap(), 5 * MIB, 3 * MIB);
    assert_near(backend.space(&two).await.unwrap(), 3 * MIB, 0);
    // A fork holds what it came from.
    let fork = pool.rootless("fork");
    restore(&backend, &one, &fork, "op", None).await.unwrap();
    pool.sync();
    assert_near(backend.space(&one).await.unwrap(), 5 * MIB, 0);
}

#[tokio::test]
async fn space_is_told_without_quota_groups() {
    let Some(pool) = Pool::new() else { return };
    follows_what_others_hold(&pool).await;
}

#[tokio::test]
async fn space_is_told_by_full_quota_groups() {
    let Some(pool) = Pool::new() else { return };
    pool.count(Quotas::Full);
    follows_what_others_hold(&pool).await;
}

#[tokio::test]
async fn space_is_told_beside_simple_quota_groups() {
    let Some(pool) = Pool::new() else { return };
    pool.count(Quotas::Simple);
    follows_what_others_hold(&pool).await;
}

#[tokio::test]
async fn compressed_data_counts_as_it_is_stored() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    rustix::fs::ioctl_setflags(fs::File::open(&sandbox.root).unwrap(), IFlags::COMPRESSED).unwrap();
    fs::write(sandbox.root.join("zeros"), vec![1; 16 << 20]).unwrap();
    let artifact = checkpoint(&backend, &sandbox, "a").await.unwrap();
    fs::write(sandbox.root.join("zeros"), "").unwrap();
    pool.sync();
    let space = backend.space(&artifact).await.unwrap();
    assert!((1..2 * MIB).contains(&space.exclusive) && space.referenced < 2 * MIB, "{space:?}");
}

/// Uses the quota of the pool up, so that nothing new can be made in it.
async fn use_up(pool: &Pool, backend: &BtrfsBackend, sandbox: &Sandbox) -> crab_core::Error {
    run("btrfs", ["qgroup".as_ref(), "limit".as_ref(), "2M".as_ref(), "0/5".as_ref(), pool.path().as_os_str()])
        .unwrap();
    for n in 0..3 {
        // The last one fails.
        let _ = fs::write(pool.path().join(format!("ballast-{n}")), vec![n; 900 << 10]);
        pool.sync();
    }
    for n in 0..500 {
        match capture(backend, sandbox, &format!("full-{n}")).await {
            Ok(captured) => {
                if let Err(error) = captured.persist().await {
                    return error;
                }
            }
            Err(error) => return error,
        }
    }
    panic!("nothing was refused");
}

async fn a_used_up_quota(quotas: Quotas) {
    let Some(pool) = Pool::new() else { return };
    pool.count(quotas);
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    fs::write(sandbox.root.join("file"), "1").unwrap();
    let kept = checkpoint(&backend, &sandbox, "kept").await.unwrap();
    let error = use_up(&pool, &backend, &sandbox).await;
    assert_eq!((error.kind(), error.advice()), (ErrorKind::OverQuota, Advice::Fix), "{error}");
    assert!(error.remedy().is_some_and(|remedy| remedy.contains("quota")), "{error}");
    let left = names(&pool.versions().join("one"));
    assert!(left.iter().all(|name| !name.starts_with('.')), "{left:?}");
    backend.verify(&kept).await.unwrap();
    // Nothing new fits. btrfs wants room for a removal too, and says the same of it.
    let error = restore(&backend, &kept, &sandbox, "op", None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OverQuota, "{error}");
    assert_eq!(fs::read(sandbox.root.join("file")).unwrap(), b"1");
    let error = backend.remove(&kept).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OverQuota, "{error}");
    backend.verify(&kept).await.unwrap();
    run("btrfs", ["qgroup".as_ref(), "limit".as_ref(), "none".as_ref(), "0/5".as_ref(), pool.path().as_os_str()])
        .unwrap();
    for artifact in backend.list(&sandbox.id).await.unwrap() {
        backend.remove(&artifact).await.unwrap();
    }
    checkpoint(&backend, &sandbox, "again").await.unwrap();
}

#[tokio::test]
async fn a_sandbox_that_used_up_its_own_quota_is_captured_and_restored() {
    for quotas in [Quotas::Full, Quotas::Simple] {
        let Some(pool) = Pool::new() else { return };
        pool.count(quotas);
        let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
        fs::write(sandbox.root.join("file"), "1").unwrap();
        let kept = checkpoint(&backend, &sandbox, "kept").await.unwrap();
        run("btrfs", ["qgroup".as_ref(), "limit".as_ref(), "2M".as_ref(), sandbox.root.as_os_str()]).unwrap();
        for n in 0..30 {
            let _ = fs::write(sandbox.root.join(n.to_string()), vec![n; 200 << 10]);
            pool.sync();
        }
        let error = fs::write(sandbox.root.join("more"), vec![1; 1 << 20]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::QuotaExceeded);
        let full = checkpoint(&backend, &sandbox, "full").await.unwrap();
        restore(&backend, &kept, &sandbox, "op", None).await.unwrap();
        assert_eq!(names(&sandbox.root), ["file"]);
        restore(&backend, &full, &sandbox, "back", None).await.unwrap();
        backend.remove(&full).await.unwrap();
    }
}

#[tokio::test]
async fn a_used_up_full_quota_is_told_from_a_full_disk() {
    a_used_up_quota(Quotas::Full).await;
}

#[tokio::test]
async fn a_used_up_simple_quota_is_told_from_a_full_disk() {
    a_used_up_quota(Quotas::Simple).await;
}
