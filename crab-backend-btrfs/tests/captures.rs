//! What a capture holds, what it refuses, and what it leaves behind.
#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

mod support;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use crab_backend_btrfs::{BtrfsBackend, subvolume};
use crab_core::{CaptureRequest, CheckpointBackend, ErrorKind, NoCut, SandboxId};
use support::{Disk, Pool, artifact_id, capture, checkpoint, files, names, restore, run};

#[tokio::test]
async fn what_was_written_and_not_synced_is_captured() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    let content = vec![7_u8; 3 << 20];
    fs::write(sandbox.root.join("big"), &content).unwrap();
    let artifact = checkpoint(&backend, &sandbox, "a").await.unwrap();
    let tree = backend.tree(&artifact).unwrap();
    assert_eq!(fs::read(tree.join("big")).unwrap(), content);
    assert!(fs::write(tree.join("new"), "").is_err(), "the snapshot is read-only");
}

#[tokio::test]
async fn a_persisted_artifact_outlives_a_power_cut() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    fs::write(sandbox.root.join("file"), "kept").unwrap();
    let artifact = checkpoint(&backend, &sandbox, "a").await.unwrap();
    Pool::copy_disk(&pool.image());

    pool.go_on_from_copy();
    let backend = pool.backend();
    assert_eq!(names(&pool.versions().join("one")), ["a"], "under its name before any recovery");
    backend.recover().await.unwrap();
    backend.verify(&artifact).await.unwrap();
    assert_eq!(fs::read(backend.tree(&artifact).unwrap().join("file")).unwrap(), b"kept");
}

#[tokio::test]
async fn a_capture_that_was_not_persisted_is_gone_after_a_power_cut() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    let pending = capture(&backend, &sandbox, "b").await.unwrap();
    Pool::copy_disk(&pool.image());
    drop(pending);
    pool.go_on_from_copy();
    let backend = pool.backend();
    assert_eq!(names(&pool.versions().join("one")), [".capture-b"]);
    assert!(backend.list(&sandbox.id).await.unwrap().is_empty());
    backend.recover().await.unwrap();
    assert_eq!(names(&pool.versions()), [".crab-btrfs"]);
}

#[tokio::test]
async fn a_nested_subvolume_is_refused_by_its_name() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    let artifact = checkpoint(&backend, &sandbox, "before").await.unwrap();
    fs::create_dir_all(sandbox.root.join("var/lib")).unwrap();
    let nested = sandbox.root.join("var/lib/my volume");
    subvolume::create(&nested).unwrap();
    assert_eq!(subvolume::nested(&sandbox.root, 9).unwrap(), [std::path::Path::new("var/lib/my volume")]);

    let error = capture(&backend, &sandbox, "a").await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::NotCheckpointable);
    assert!(error.to_string().contains("var/lib/my volume"), "{error}");
    // Nor could the tree be replaced without losing it.
    let error = restore(&backend, &artifact, &sandbox, "op", None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotCheckpointable);
    assert!(nested.exists());
    assert_eq!(names(&pool.versions().join("one")), ["before"]);

    for n in 0..5 {
        subvolume::create(&sandbox.root.join(format!("n{n}"))).unwrap();
    }
    let error = capture(&backend, &sandbox, "a").await.err().unwrap();
    assert!(error.to_string().contains("and others") || error.to_string().contains(", others"), "{error}");
    for n in 0..5 {
        subvolume::delete(&sandbox.root.join(format!("n{n}"))).unwrap();
    }
    subvolume::delete(&nested).unwrap();
    checkpoint(&backend, &sandbox, "a").await.unwrap();
}

#[tokio::test]
async fn hundreds_of_nested_subvolumes_are_all_found() {
    let Some(pool) = Pool::new() else { return };
    let sandbox = pool.sandbox("one");
    for n in 0..300 {
        subvolume::create(&sandbox.root.join(format!("n{n}"))).unwrap();
    }
    // More than the kernel tells in one call.
    assert_eq!(subvolume::nested(&sandbox.root, 1000).unwrap().len(), 300);
}

#[tokio::test]
async fn roots_that_cannot_be_snapshotted_are_refused_before_anything_changes() {
    let (Some(pool), Some(other)) = (Pool::new(), Pool::new()) else { return };
    let backend = pool.backend();
    let mut sandbox = pool.sandbox("one");
    let good = sandbox.root.clone();
    // A restore into them is refused as early, while the sandbox may run; only a root that is not there may be made.
    let artifact = capture(&backend, &sandbox, "whole").await.unwrap().persist().await.unwrap();
    backend.fits(&artifact, &sandbox).await.unwrap();

    for (root, kind, says) in [
        (other.sandbox("one").root, ErrorKind::InvalidInput, "not on the btrfs filesystem"),
        (pool.outside().to_owned(), ErrorKind::InvalidInput, "not a btrfs subvolume"),
        (pool.path().join("boxes"), ErrorKind::InvalidInput, "not a btrfs subvolume"),
        (pool.path(), ErrorKind::InvalidInput, "inside the root"),
        (pool.path().join("missing"), ErrorKind::NotFound, "missing"),
    ] {
        sandbox.root = root;
        let error = capture(&backend, &sandbox, "a").await.err().unwrap();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(says), "{error}");
        match backend.fits(&artifact, &sandbox).await {
            Err(error) => assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}"),
            Ok(()) => assert_eq!(kind, ErrorKind::NotFound),
        }
    }
    backend.remove(&artifact).await.unwrap();
    // A symbolic link could be turned elsewhere between look and use.
    let link = pool.path().join("link");
    std::os::unix::fs::symlink(&good, &link).unwrap();
    sandbox.root = link;
    assert_eq!(capture(&backend, &sandbox, "a").await.err().unwrap().kind(), ErrorKind::InvalidInput);
    assert_eq!(names(&pool.versions()), [".crab-btrfs"]);
}

#[tokio::test]
async fn a_capture_after_its_deadline_is_refused() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    let deadline = Instant::now().checked_sub(Duration::from_secs(1));
    let at_cut = &mut NoCut;
    let request =
        CaptureRequest { sandbox: &sandbox, artifact: artifact_id("a"), parent: None, frozen: false, deadline, at_cut };
    assert_eq!(backend.capture(request).await.err().unwrap().kind(), ErrorKind::TimedOut);
    assert!(names(&pool.versions().join("one")).is_empty());
}

#[test]
fn captures_that_are_dropped_at_any_moment_leave_nothing() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().unwrap();
    // A runtime that is dropped waits for the blocking work that it has begun.
    let rt = runtime();
    rt.block_on(async {
        let mut future = Box::pin(capture(&backend, &sandbox, "a"));
        let first = future.as_mut().poll(&mut Context::from_waker(Waker::noop()));
        assert!(matches!(first, Poll::Pending | Poll::Ready(Ok(_))));
    });
    drop(rt);
    assert!(names(&pool.versions().join("one")).is_empty());

    let rt = runtime();
    rt.block_on(async { drop(capture(&backend, &sandbox, "a").await.unwrap()) });
    drop(rt);
    assert!(names(&pool.versions().join("one")).is_empty());

    // Without a runtime it is done at once.
    let rt = runtime();
    let captured = rt.block_on(capture(&backend, &sandbox, "a")).unwrap();
    drop(rt);
    drop(captured);
    assert!(names(&pool.versions().join("one")).is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixteen_captures_at_once() {
    let Some(pool) = Pool::new() else { return };
    let backend = pool.backend();
    let sandboxes: Vec<_> = (0..4).map(|n| pool.sandbox(&format!("box-{n}"))).collect();
    let mut tasks = Vec::new();
    for n in 0..16 {
        let (backend, sandbox) = (backend.clone(), sandboxes[n % 4].clone());
        tasks.push(tokio::spawn(async move {
            fs::write(sandbox.root.join(format!("file-{n}")), n.to_string()).unwrap();
            checkpoint(&backend, &sandbox, &format!("a-{n}")).await.unwrap()
        }));
    }
    for (n, task) in tasks.into_iter().enumerate() {
        let artifact = task.await.unwrap();
        backend.verify(&artifact).await.unwrap();
        let tree = backend.tree(&artifact).unwrap();
        assert_eq!(fs::read_to_string(tree.join(format!("file-{n}"))).unwrap(), n.to_string());
    }
    for sandbox in &sandboxes {
        assert_eq!(backend.list(&sandbox.id).await.unwrap().len(), 4);
    }
}

#[tokio::test]
async fn one_of_two_captures_of_one_name_wins() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    let first = capture(&backend, &sandbox, "a").await.unwrap();
    let error = capture(&backend, &sandbox, "a").await.err().unwrap();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    let artifact = first.persist().await.unwrap();
    backend.verify(&artifact).await.unwrap();
}

#[tokio::test]
async fn damage_to_an_artifact_is_seen() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    fs::write(sandbox.root.join("file"), "1").unwrap();
    let artifact = checkpoint(&backend, &sandbox, "a").await.unwrap();
    let listed = backend.list(&sandbox.id).await.unwrap().remove(0);
    backend.verify(&listed).await.unwrap();
    let tree = backend.tree(&artifact).unwrap();
    let read_only = |yes: bool| {
        run(
            "btrfs",
            ["property", "set", "-f", "-ts", tree.to_str().unwrap(), "ro", if yes { "true" } else { "false" }],
        )
        .unwrap();
    };

    read_only(false);
    assert_eq!(backend.verify(&artifact).await.unwrap_err().kind(), ErrorKind::Corrupt);
    fs::write(tree.join("file"), "2").unwrap();
    read_only(true);
    let error = backend.verify(&artifact).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert_eq!(
        restore(&backend, &artifact, &sandbox, "op", None).await.unwrap_err().kind(),
        ErrorKind::Corrupt,
        "what is damaged is not restored"
    );

    // Another subvolume in its place is neither taken for it nor removed.
    subvolume::delete(&tree).unwrap();
    subvolume::snapshot(&sandbox.root, &tree, subvolume::Access::ReadOnly).unwrap();
    assert_eq!(backend.verify(&artifact).await.unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(backend.remove(&artifact).await.unwrap_err().kind(), ErrorKind::Corrupt);
    subvolume::delete(&tree).unwrap();
    fs::create_dir(&tree).unwrap();
    assert_eq!(backend.verify(&artifact).await.unwrap_err().kind(), ErrorKind::Corrupt);
    assert_eq!(backend.remove(&artifact).await.unwrap_err().kind(), ErrorKind::Corrupt);
    assert!(tree.exists());
    assert!(backend.list(&sandbox.id).await.unwrap().is_empty());
}

#[tokio::test]
async fn a_balance_of_the_filesystem_does_no_harm() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    fs::write(sandbox.root.join("file"), vec![1; 1 << 20]).unwrap();
    let artifact = checkpoint(&backend, &sandbox, "a").await.unwrap();
    run("btrfs", ["balance", "start", "--full-balance", pool.path().to_str().unwrap()]).unwrap();
    backend.verify(&artifact).await.unwrap();
}

#[tokio::test]
async fn artifacts_of_other_backends_are_refused() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    let mut artifact = checkpoint(&backend, &sandbox, "a").await.unwrap();
    artifact.backend = "zfs".to_owned();
    assert_eq!(backend.verify(&artifact).await.unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(backend.remove(&artifact).await.unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(restore(&backend, &artifact, &sandbox, "op", None).await.unwrap_err().kind(), ErrorKind::InvalidInput);
    assert_eq!(backend.tree(&artifact), None);
}

#[tokio::test]
async fn a_full_disk_fails_the_capture_keeps_the_versions_and_lets_them_be_removed() {
    // Data and metadata share their space here, so that files alone can fill all of it.
    let Some(pool) = Pool::with(48 << 20, &["--mixed", "-msingle", "-dsingle"]) else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    fs::write(sandbox.root.join("big"), vec![1; 8 << 20]).unwrap();
    fs::write(sandbox.root.join("file"), "1").unwrap();
    let artifact = checkpoint(&backend, &sandbox, "a").await.unwrap();
    fs::remove_file(sandbox.root.join("big")).unwrap();

    let full = fill(&backend, &pool, &sandbox).await;
    assert_eq!(full.kind(), ErrorKind::Full, "{full}");
    assert!(full.remedy().is_some_and(|remedy| remedy.contains("free space")), "{full}");
    let left: Vec<String> = names(&pool.versions().join("one"));
    assert!(left.iter().all(|name| !name.starts_with('.')), "{left:?}");
    let before = files(&sandbox.root);

    // The restore needs space too: it may fail, and then changes nothing.
    backend.verify(&artifact).await.unwrap();
    match restore(&backend, &artifact, &sandbox, "op", Some("kept")).await {
        Ok(_) => assert_eq!(fs::read(sandbox.root.join("file")).unwrap(), b"1"),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::Full, "{error}");
            assert_eq!(files(&sandbox.root), before);
        }
    }
    for artifact in backend.list(&sandbox.id).await.unwrap() {
        backend.remove(&artifact).await.unwrap();
    }
    assert!(backend.list(&sandbox.id).await.unwrap().is_empty());
    fs::remove_file(pool.path().join("ballast")).unwrap();
    pool.sync();
    checkpoint(&backend, &sandbox, "after").await.unwrap();
}

/// Fills the disk until a capture fails, and gives its error.
async fn fill(backend: &BtrfsBackend, pool: &Pool, sandbox: &crab_core::Sandbox) -> crab_core::Error {
    use std::io::Write;
    let mut ballast = fs::File::create(pool.path().join("ballast")).unwrap();
    for chunk in [1 << 20, 4096] {
        while ballast.write_all(&vec![3; chunk]).and_then(|()| ballast.sync_data()).is_ok() {}
    }
    for n in 0..20_000 {
        // Small files live in the metadata.
        let _ = fs::write(sandbox.root.join(format!("small-{n}")), [4; 1500]);
        if n % 50 == 0
            && let Err(error) = checkpoint(backend, sandbox, &format!("fill-{n}")).await
        {
            return error;
        }
    }
    panic!("the disk did not become full");
}

#[tokio::test]
async fn removal_takes_the_directory_of_a_sandbox_with_the_last_artifact() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    let artifact = checkpoint(&backend, &sandbox, "a").await.unwrap();
    let kept = restore(&backend, &artifact, &sandbox, "op", Some("k")).await.unwrap().replaced.unwrap();
    assert_eq!(names(&pool.versions().join("one")), [".restore", "a", "k"]);
    backend.remove(&artifact).await.unwrap();
    backend.remove(&kept).await.unwrap();
    assert_eq!(names(&pool.versions()), [".crab-btrfs"]);
    backend.remove(&kept).await.unwrap();
}

#[test]
fn the_versions_directory_is_private_and_marked() {
    let Some(pool) = Pool::new() else { return };
    drop(pool.backend());
    let mode = |path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!(mode(pool.versions()), 0o700);
    assert_eq!(mode(pool.versions().join(".crab-btrfs")), 0o600);
    fs::set_permissions(pool.versions(), fs::Permissions::from_mode(0o755)).unwrap();
    drop(pool.backend());
    assert_eq!(mode(pool.versions()), 0o700);

    let alien = pool.path().join("photos");
    fs::create_dir(&alien).unwrap();
    fs::write(alien.join("cat"), "").unwrap();
    let error = BtrfsBackend::open(&alien).unwrap_err();
    assert!(error.kind() == ErrorKind::InvalidInput && error.to_string().contains("cat"), "{error}");

    let error = BtrfsBackend::open(pool.outside().join("versions")).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    assert!(!pool.outside().join("versions").exists(), "nothing is made on another filesystem");

    fs::write(pool.versions().join(".crab-btrfs"), "crab-backend-btrfs 2\n").unwrap();
    assert_eq!(BtrfsBackend::open(pool.versions()).unwrap_err().kind(), ErrorKind::Unsupported);
}

#[test]
fn a_lack_of_privilege_is_said_when_the_backend_is_opened() {
    use rustix::thread::{CapabilitySet, capabilities, set_capabilities};
    let Some(pool) = Pool::new() else { return };
    // Capabilities belong to the thread.
    let error = std::thread::scope(|scope| {
        let unprivileged = scope.spawn(|| {
            let mut sets = capabilities(None).unwrap();
            sets.effective.remove(CapabilitySet::SYS_ADMIN);
            set_capabilities(None, sets).unwrap();
            BtrfsBackend::open(pool.versions()).unwrap_err()
        });
        unprivileged.join().unwrap()
    });
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.to_string().contains("CAP_SYS_ADMIN"), "{error}");
    assert!(!pool.versions().exists());
}

#[test]
fn outside_of_a_runtime_calls_fail_and_do_not_panic() {
    let Some(pool) = Pool::new() else { return };
    let backend = pool.backend();
    let id = SandboxId::new("one").unwrap();
    let mut list = backend.list(&id);
    let Poll::Ready(Err(error)) = list.as_mut().poll(&mut Context::from_waker(Waker::noop())) else {
        panic!("there is nothing to wait for");
    };
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
}

#[test]
fn the_generation_after_a_sync_tells_whether_something_changed() {
    let Some(pool) = Pool::new() else { return };
    let (one, two) = (pool.sandbox("one"), pool.sandbox("two"));
    let first = subvolume::generation_after_sync(&one.root).unwrap();
    fs::write(two.root.join("file"), "of another").unwrap();
    assert_eq!(subvolume::generation_after_sync(&one.root).unwrap(), first);
    fs::write(one.root.join("file"), "1").unwrap();
    let second = subvolume::generation_after_sync(&one.root).unwrap();
    assert!(second > first);
    fs::read(one.root.join("file")).unwrap();
    let info = subvolume::info(&one.root).unwrap();
    assert!(!info.read_only && info.uuid.is_some() && info.parent_uuid.is_none() && info.id >= 256, "{info:?}");
}
