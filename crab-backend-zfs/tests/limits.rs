//! What stops a capture, and differences of any kind.
#![allow(clippy::unwrap_used, reason = "these are tests")]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::Path;

use crab_backend_zfs::ZfsBackend;
use crab_core::conformance::churn::Churn;
use crab_core::{CheckpointBackend, ErrorKind, ExportRequest, ImportRequest};
use support::{Disk, Pool, checkpoint, restore, run, trees, with_mounted};

/// Writes what does not compress until nothing more goes in, and gives the error.
fn fill(path: &Path) -> io::Error {
    let mut file = fs::File::create(path).unwrap();
    let mut noise = Churn::new(1);
    let block: Vec<u8> = (0..1 << 20).map(|_| noise.byte()).collect();
    (0..200).find_map(|_| file.write_all(&block).and_then(|()| file.sync_all()).err()).unwrap()
}

#[tokio::test]
async fn a_full_pool_can_be_gone_back_on_and_lets_versions_be_removed() {
    let Some(pool) = Pool::small(96 << 20) else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    fs::write(sandbox.root.join("file"), "1").unwrap();
    let kept = checkpoint(&backend, &sandbox, "kept").await.unwrap();
    assert_eq!(fill(&sandbox.root.join("big")).kind(), io::ErrorKind::StorageFull);
    // ZFS keeps some room for itself, in which snapshots may still fit.
    for n in 0..3 {
        if let Err(error) = checkpoint(&backend, &sandbox, &format!("full-{n}")).await {
            assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        }
    }
    backend.recover().await.unwrap();
    backend.verify(&kept).await.unwrap();
    // By what was reserved.
    restore(&backend, &kept, &sandbox, "op", None).await.unwrap();
    assert_eq!(support::names(&sandbox.root), ["file"]);
    // Without it nothing is changed.
    let _ = fill(&sandbox.root.join("big"));
    let before = pool.all();
    if let Err(error) = restore(&backend, &kept, &sandbox, "op-2", None).await {
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        assert_eq!(support::names(&sandbox.root), ["big", "file"]);
        assert_eq!(pool.all(), before);
    }
    for artifact in backend.list(&sandbox.id).await.unwrap() {
        backend.remove(&artifact).await.unwrap();
    }
    backend.delete_root(&sandbox.id, &sandbox.root).await.unwrap();
    assert_eq!(pool.all(), Vec::<String>::new());
}

#[tokio::test]
async fn a_quota_on_the_versions_is_told_from_a_full_pool_and_nothing_changes() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    fs::write(sandbox.root.join("file"), "1").unwrap();
    let kept = checkpoint(&backend, &sandbox, "kept").await.unwrap();
    let mut noise = Churn::new(1);
    fs::write(sandbox.root.join("big"), (0..2 << 20).map(|_| noise.byte()).collect::<Vec<_>>()).unwrap();
    // Room for names, and not for the root that a restore puts aside.
    run("zfs", ["set", "quota=5M", &pool.base()]).unwrap();
    let later = checkpoint(&backend, &sandbox, "later").await.unwrap();
    let before = pool.all();
    let error = restore(&backend, &kept, &sandbox, "op", None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OverQuota, "{error}");
    assert_eq!(support::names(&sandbox.root), ["big", "file"]);
    assert_eq!(pool.all(), before);
    // Nor does what comes in fit.
    let mut stream = backend.export(ExportRequest::full(&later)).await.unwrap();
    let other = "other".parse().unwrap();
    let request =
        ImportRequest { sandbox: &other, artifact: support::artifact_id("in"), base: None, stream: &mut *stream };
    let error = backend.import(request).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OverQuota, "{error}");
    assert_eq!(pool.all(), before);
    run("zfs", ["set", "quota=none", &pool.base()]).unwrap();
    restore(&backend, &kept, &sandbox, "op", None).await.unwrap();
    assert_eq!(support::names(&sandbox.root), ["file"]);
}

#[tokio::test]
async fn without_the_key_of_an_encrypted_root_its_files_are_not_brought_back_and_the_error_says_so() {
    let Some(pool) = Pool::new() else { return };
    let backend = pool.backend();
    let sandbox = pool.rootless("one");
    let (root, key) = (pool.root_dataset(&sandbox.id), pool.outside().join("key"));
    fs::write(&key, [7_u8; 32]).unwrap();
    let location = format!("keylocation=file://{}", key.display());
    run("zfs", ["create", "-o", "encryption=on", "-o", "keyformat=raw", "-o", &location, &root]).unwrap();
    fs::write(sandbox.root.join("file"), "1").unwrap();
    let one = checkpoint(&backend, &sandbox, "one").await.unwrap();
    fs::write(sandbox.root.join("file"), "2").unwrap();
    run("zfs", ["unmount", &root]).unwrap();
    run("zfs", ["unload-key", &root]).unwrap();
    // What is there can be kept without reading it.
    let two = checkpoint(&backend, &sandbox, "two").await.unwrap();
    let before = pool.all();
    for error in [
        restore(&backend, &one, &sandbox, "op", None).await.unwrap_err(),
        backend.diff(&one, &two).await.err().unwrap(),
    ] {
        assert_eq!(error.kind(), ErrorKind::Unsupported, "{error}");
        assert!(error.remedy().is_some_and(|remedy| remedy.contains("load-key")), "{error}");
    }
    assert_eq!(pool.all(), before);
    run("zfs", ["load-key", &root]).unwrap();
    run("zfs", ["mount", &root]).unwrap();
    assert_eq!(fs::read(sandbox.root.join("file")).unwrap(), b"2");
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
    for seed in 1..3 {
        let sandbox = pool.sandbox(&format!("box-{seed}"));
        let mut churn = Churn::new(seed);
        let mut versions = Vec::new();
        for version in ["one", "two", "three"] {
            (0..25).for_each(|_| churn.step(&sandbox.root));
            versions.push(checkpoint(&backend, &sandbox, version).await.unwrap());
        }
        for (from, to) in [(0, 1), (2, 0)] {
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
