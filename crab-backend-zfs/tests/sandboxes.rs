//! What captures hold, what is refused, and that nothing leaks.
#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

mod support;

use std::fs;
use std::io::Write;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};

use crab_backend_zfs::{ZfsBackend, dataset};
use crab_core::conformance::trees;
use crab_core::{CheckpointBackend, ErrorKind, Sandbox};
use support::{Disk, Pool, capture, checkpoint, files, restore, run};

#[tokio::test]
async fn what_was_written_through_a_mapping_and_not_synced_is_captured() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    let path = sandbox.root.join("mapped");
    fs::write(&path, vec![0_u8; 8192]).unwrap();
    checkpoint(&backend, &sandbox, "before").await.unwrap();
    let file = fs::File::options().read(true).write(true).open(&path).unwrap();
    support::store_through_mapping(&file, b"hello");
    let artifact = checkpoint(&backend, &sandbox, "after").await.unwrap();
    let tree = backend.tree(&artifact).unwrap();
    assert_eq!(&fs::read(tree.join("mapped")).unwrap()[..5], b"hello");
    assert!(fs::write(tree.join("new"), "").is_err(), "the snapshot is read-only");
}

#[tokio::test]
async fn everything_about_a_file_comes_back_and_differences_are_exact() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    let root = sandbox.root.clone();
    fs::create_dir_all(root.join("d/e")).unwrap();
    fs::write(root.join("d/e/file"), "content").unwrap();
    fs::write(root.join("same"), "same").unwrap();
    fs::write(root.join("moved"), "moved").unwrap();
    fs::write(root.join("mode"), "mode").unwrap();
    symlink("d/e", root.join("link")).unwrap();
    fs::hard_link(root.join("same"), root.join("again")).unwrap();
    let one = checkpoint(&backend, &sandbox, "one").await.unwrap();

    fs::write(root.join("d/e/file"), "CONTENT").unwrap();
    fs::rename(root.join("moved"), root.join("d/moved")).unwrap();
    fs::set_permissions(root.join("mode"), fs::Permissions::from_mode(0o4711)).unwrap();
    fs::remove_file(root.join("link")).unwrap();
    symlink("elsewhere", root.join("link")).unwrap();
    fs::create_dir(root.join("new")).unwrap();
    fs::write(root.join("new/file"), "").unwrap();
    let two = checkpoint(&backend, &sandbox, "two").await.unwrap();

    let (a, b) = (backend.tree(&one).unwrap(), backend.tree(&two).unwrap());
    for (from, to, x, y) in [(&one, &two, &a, &b), (&two, &one, &b, &a)] {
        let mut changes = backend.diff(from, to).await.unwrap();
        let mut found = std::collections::BTreeMap::new();
        while let Some(change) = changes.next().await.unwrap() {
            assert_eq!(found.insert(change.path, change.kind), None);
        }
        assert_eq!(found, trees::differences(x, y));
        assert_eq!(found.len(), 7, "{found:?}");
    }
    restore(&backend, &one, &sandbox, "op", None).await.unwrap();
    assert_eq!(fs::read(root.join("d/e/file")).unwrap(), b"content");
    assert_eq!(fs::read_link(root.join("link")).unwrap().to_str(), Some("d/e"));
    assert_eq!(fs::metadata(root.join("same")).unwrap().nlink(), 2);
    assert!(!root.join("new").exists());
    // The later version stands on a dataset that is mounted nowhere, and can be compared all the same.
    assert_eq!(backend.tree(&two), None);
    assert!(backend.diff(&one, &two).await.unwrap().next().await.unwrap().is_some());
    restore(&backend, &two, &sandbox, "op-2", None).await.unwrap();
    assert_eq!(fs::metadata(root.join("mode")).unwrap().mode() & 0o7777, 0o4711);
}

#[tokio::test]
async fn what_cannot_be_a_root_is_refused_before_anything_changes() {
    let Some(pool) = Pool::new() else { return };
    let backend = pool.backend();
    let mut sandbox = pool.sandbox("one");
    let before = pool.all();
    fs::create_dir(sandbox.root.join("plain")).unwrap();
    for (root, kind, says) in [
        (sandbox.root.join("plain/x"), ErrorKind::InvalidInput, "only a directory"),
        (pool.outside().join("x"), ErrorKind::InvalidInput, "not a ZFS dataset"),
        (pool.path(), ErrorKind::InvalidInput, "overlap"),
        (pool.path().join("boxes/missing"), ErrorKind::NotFound, "missing"),
    ] {
        sandbox.root = root;
        let error = capture(&backend, &sandbox, "a").await.err().unwrap();
        assert_eq!(error.kind(), kind, "{error}");
        assert!(error.to_string().contains(says), "{error}");
    }
    // A dataset inside the root would not be in the snapshot, and would be lost at a restore.
    let sandbox = pool.sandbox("two");
    let artifact = checkpoint(&backend, &sandbox, "a").await.unwrap();
    dataset::create(&sandbox.root.join("inner")).unwrap();
    for error in [
        capture(&backend, &sandbox, "b").await.err().unwrap(),
        restore(&backend, &artifact, &sandbox, "op", None).await.err().unwrap(),
        backend.delete_root(&sandbox.id, &sandbox.root).await.err().unwrap(),
    ] {
        assert_eq!(error.kind(), ErrorKind::NotCheckpointable, "{error}");
        assert!(error.to_string().contains("two/inner"), "{error}");
    }
    assert_eq!(pool.all().len(), before.len() + 3);
}

#[tokio::test]
async fn a_root_in_use_is_busy_and_the_error_names_the_user() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    fs::write(sandbox.root.join("file"), "1").unwrap();
    let artifact = checkpoint(&backend, &sandbox, "a").await.unwrap();
    fs::write(sandbox.root.join("file"), "2").unwrap();
    let held = fs::File::open(sandbox.root.join("file")).unwrap();
    let error = restore(&backend, &artifact, &sandbox, "op", None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.to_string().contains(&std::process::id().to_string()), "{error}");
    drop(held);

    let inside = sandbox.root.join("mounted");
    fs::create_dir(&inside).unwrap();
    run("mount", ["-t".as_ref(), "tmpfs".as_ref(), "crab-test".as_ref(), inside.as_os_str()]).unwrap();
    let error = restore(&backend, &artifact, &sandbox, "op", None).await.unwrap_err();
    run("umount", [&inside]).unwrap();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert!(error.to_string().contains("mounted"), "{error}");
    assert_eq!(fs::read(sandbox.root.join("file")).unwrap(), b"2");
    restore(&backend, &artifact, &sandbox, "op", None).await.unwrap();
    assert_eq!(fs::read(sandbox.root.join("file")).unwrap(), b"1");
}

#[tokio::test]
async fn datasets_that_are_not_ours_are_neither_taken_nor_destroyed() {
    let Some(pool) = Pool::new() else { return };
    let error = ZfsBackend::open(format!("{}/boxes", pool.dataset())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    let error = ZfsBackend::open(format!("{}/no/crab", pool.dataset())).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    let error = ZfsBackend::open("no-such-pool-as-this/crab").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");

    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    let foreign = format!("{}@daily", pool.root_dataset(&sandbox.id));
    run("zfs", ["snapshot", &foreign]).unwrap();
    let artifact = checkpoint(&backend, &sandbox, "a").await.unwrap();
    let error = backend.delete_root(&sandbox.id, &sandbox.root).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    // A restore keeps it too, and so does a recovery.
    restore(&backend, &artifact, &sandbox, "op", None).await.unwrap();
    backend.recover().await.unwrap();
    assert!(pool.all().iter().any(|name| name.ends_with("@daily")), "{:?}", pool.all());
    // A version is held: nobody destroys it by mistake.
    let version = run("zfs", ["list", "-H", "-o", "name", "-t", "snapshot", "-r", &pool.dataset()]).unwrap();
    let version = version.lines().find(|name| name.contains("@crab-")).unwrap();
    assert!(run("zfs", ["destroy", version]).is_err());
    backend.verify(&artifact).await.unwrap();
}

#[tokio::test]
async fn quotas_go_with_a_root_and_are_told_from_a_full_pool() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    let root = pool.root_dataset(&sandbox.id);
    run("zfs", ["set", "refquota=20M", &root]).unwrap();
    run("zfs", ["set", "xattr=sa", &root]).unwrap();
    let artifact = checkpoint(&backend, &sandbox, "a").await.unwrap();
    restore(&backend, &artifact, &sandbox, "op", None).await.unwrap();
    let get = |name: &str| run("zfs", ["get", "-H", "-p", "-o", "value", name, &root]).unwrap().trim().to_owned();
    assert_eq!(get("refquota"), (20 << 20).to_string());
    // Since 2.3 the same is called "on".
    assert!(matches!(get("xattr").as_str(), "sa" | "on"), "{}", get("xattr"));
    // ZFS counts when it writes, so a little more than the quota gets in.
    let mut file = fs::File::create(sandbox.root.join("big")).unwrap();
    let full = (0..50).find_map(|_| file.write_all(&vec![1_u8; 2 << 20]).and_then(|()| file.sync_all()).err());
    assert_eq!(full.unwrap().kind(), std::io::ErrorKind::QuotaExceeded);
    // What is stored can still be removed and gone back to.
    drop(file);
    restore(&backend, &artifact, &sandbox, "op-2", None).await.unwrap();
    assert!(!sandbox.root.join("big").exists());
    backend.remove(&artifact).await.unwrap();
}

#[tokio::test]
async fn encrypted_roots_work_like_others_and_without_their_key_the_error_says_so() {
    let Some(pool) = Pool::new() else { return };
    let key = pool.outside().join("key");
    fs::write(&key, [7_u8; 32]).unwrap();
    let location = format!("keylocation=file://{}", key.display());
    let secret = format!("{}/secret", pool.dataset());
    run("zfs", ["create", "-o", "encryption=on", "-o", "keyformat=raw", "-o", &location, &secret]).unwrap();
    let root = pool.path().join("secret/one");
    dataset::create(&root).unwrap();
    let sandbox = Sandbox::new("one".parse().unwrap(), root, pool.outside().join("no-cgroup"));
    let backend = ZfsBackend::open(format!("{secret}/crab")).unwrap();
    fs::write(sandbox.root.join("file"), "1").unwrap();
    let artifact = checkpoint(&backend, &sandbox, "a").await.unwrap();
    fs::write(sandbox.root.join("file"), "2").unwrap();
    restore(&backend, &artifact, &sandbox, "op", Some("kept")).await.unwrap();
    assert_eq!(fs::read(sandbox.root.join("file")).unwrap(), b"1");
    // Versions outside of the encryption root: the root cannot be moved there.
    let outside = pool.backend();
    let artifact = checkpoint(&outside, &sandbox, "b").await.unwrap();
    let error = restore(&outside, &artifact, &sandbox, "op", None).await.unwrap_err();
    assert!(error.to_string().contains("encryption root"), "{error}");
    assert_eq!(fs::read(sandbox.root.join("file")).unwrap(), b"1", "as it was");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn many_sandboxes_at_once_leak_nothing() {
    let Some(pool) = Pool::new() else { return };
    let (sandboxes, rounds) = (6_usize, 4_usize);
    let boxes: Vec<_> = (0..sandboxes).map(|n| pool.sandbox(&format!("box-{n}"))).collect();
    let mut working = tokio::task::JoinSet::new();
    let backend = pool.backend();
    for (n, sandbox) in boxes.iter().cloned().enumerate() {
        let backend = backend.clone();
        working.spawn(async move {
            let mut versions = Vec::new();
            for round in 0..rounds {
                let content = format!("{n} {round}");
                fs::write(sandbox.root.join("file"), &content).unwrap();
                versions.push((checkpoint(&backend, &sandbox, &format!("v{round}")).await.unwrap(), content));
                drop(capture(&backend, &sandbox, "dropped").await);
                if (n + round) % 3 == 0 {
                    let at = (n * 7 + round) % versions.len();
                    restore(&backend, &versions[at].0, &sandbox, &format!("op{round}"), None).await.unwrap();
                    assert_eq!(files(&sandbox.root)["file"], versions[at].1.as_bytes());
                }
                if (n + round) % 4 == 3 {
                    let at = (n + round) % versions.len();
                    backend.remove(&versions.swap_remove(at).0).await.unwrap();
                }
            }
            (sandbox, versions)
        });
    }
    let mut all = Vec::new();
    while let Some(done) = working.join_next().await {
        all.push(done.unwrap());
    }
    // As if the process had ended and another one began.
    drop(backend);
    let backend = pool.backend();
    backend.recover().await.unwrap();
    for (sandbox, versions) in all {
        let mut listed: Vec<_> = backend.list(&sandbox.id).await.unwrap().into_iter().map(|a| a.id).collect();
        let mut expected: Vec<_> = versions.iter().map(|(artifact, _)| artifact.id.clone()).collect();
        listed.sort();
        expected.sort();
        assert_eq!(listed, expected);
        backend.delete_root(&sandbox.id, &sandbox.root).await.unwrap();
        if let Some((artifact, content)) = versions.last() {
            restore(&backend, artifact, &sandbox, "last", None).await.unwrap();
            assert_eq!(files(&sandbox.root)["file"], content.as_bytes());
            backend.delete_root(&sandbox.id, &sandbox.root).await.unwrap();
        }
        for (artifact, _) in &versions {
            backend.remove(artifact).await.unwrap();
        }
    }
    assert_eq!(pool.all(), Vec::<String>::new());
}
