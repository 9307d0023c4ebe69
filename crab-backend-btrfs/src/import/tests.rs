//! What is exported and imported is what it was, in both versions of the stream, of every kind of root.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use async_trait::async_trait;
use crab_core::conformance::trees;
use crab_core::{Artifact, ByteStream, CheckpointBackend, ErrorKind, ExportRequest, ImportRequest, Result, SandboxId};
use proptest::prelude::*;
use rustix::fs::IFlags;

use crate::BtrfsBackend;
use crate::export::Trailer;
use crate::ioctl::SendOptions;
use crate::send::Sending;
use crate::send::makes_first::{Makes, MakesFirst};
use crate::subvolume;
use crate::support::{Disk, Pool, artifact_id, checkpoint, names, run};
use crab_core::conformance::churn::Churn;

struct Pieces(Vec<Vec<u8>>);

#[async_trait]
impl ByteStream for Pieces {
    async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        Ok((!self.0.is_empty()).then(|| self.0.remove(0)))
    }
}

fn id(name: &str) -> SandboxId {
    SandboxId::new(name).unwrap()
}

async fn export(backend: &BtrfsBackend, request: ExportRequest<'_>) -> Vec<u8> {
    let mut stream = backend.export(request).await.unwrap();
    let mut bytes = Vec::new();
    while let Some(piece) = stream.next().await.unwrap() {
        bytes.extend(piece);
    }
    bytes
}

async fn import(backend: &BtrfsBackend, name: &str, base: Option<&Artifact>, bytes: &[u8]) -> Result<Artifact> {
    let mut stream = Pieces(bytes.chunks(50_001).map(<[u8]>::to_vec).collect());
    let sandbox = id("imported");
    backend.import(ImportRequest { sandbox: &sandbox, artifact: artifact_id(name), base, stream: &mut stream }).await
}

/// The stream in a version of choice, as the kernel of another host might give it.
fn export_in(backend: &BtrfsBackend, version: u32, base: Option<&Artifact>, artifact: &Artifact) -> Vec<u8> {
    let path = |artifact: &Artifact| backend.tree(artifact).unwrap();
    let parent = base.map_or(0, |base| subvolume::info(&path(base)).unwrap().id);
    let options = SendOptions { parent, without_data: false, version };
    let path = path(artifact);
    let send = |options| Sending::start(subvolume::open(&path).unwrap(), options).unwrap();
    let makes = Makes::of(send(SendOptions { without_data: true, ..options })).unwrap();
    let mut stream = MakesFirst::begin(send(options), makes).unwrap();
    let mut bytes = Vec::new();
    loop {
        match stream.piece(100_000).unwrap() {
            piece if piece.is_empty() => break,
            piece => bytes.extend(piece),
        }
    }
    let mut trailer = Trailer::empty();
    trailer.add(&bytes);
    bytes.extend(trailer.to_bytes());
    bytes
}

#[track_caller]
fn check(backend: &BtrfsBackend, original: &Artifact, copy: &Artifact) {
    let differ = trees::differences(&backend.tree(original).unwrap(), &backend.tree(copy).unwrap());
    let shown: BTreeMap<_, _> = differ.iter().map(|(p, k)| (String::from_utf8_lossy(p).into_owned(), k)).collect();
    assert!(shown.is_empty(), "{shown:?}");
    let inodes = |artifact| trees::inodes(&backend.tree(artifact).unwrap());
    assert_eq!(inodes(original), inodes(copy));
}

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_time().build().unwrap()
}

/// Runs random changes on roots with these flags, and carries two states over, the second on top of the first.
fn carried_over(flags: IFlags, cases: u32) {
    let Some(pool) = Pool::in_memory(1 << 30) else { return };
    let next = std::cell::Cell::new(0);
    let config = ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(seed: u64, before in 0..50_u32, between in 1..30_u32)| {
        carry_over(&pool, next.replace(next.get() + 1), flags, seed, before, between);
    });
}

fn carry_over(pool: &Pool, case: u32, flags: IFlags, seed: u64, before: u32, between: u32) {
    let (runtime, backend) = (runtime(), pool.backend());
    let sandbox = pool.sandbox(&format!("box-{case}"));
    rustix::fs::ioctl_setflags(fs::File::open(&sandbox.root).unwrap(), flags).unwrap();
    let mut churn = Churn::new(seed);
    runtime.block_on(async {
        (0..before).for_each(|_| churn.step(&sandbox.root));
        let one = checkpoint(&backend, &sandbox, "one").await.unwrap();
        (0..between).for_each(|_| churn.step(&sandbox.root));
        let two = checkpoint(&backend, &sandbox, "two").await.unwrap();
        let mut all = vec![one.clone(), two.clone()];
        for how in ["ours", "v1", "v2"] {
            let (full, since) = match how {
                "ours" => (
                    export(&backend, ExportRequest::full(&one)).await,
                    export(&backend, ExportRequest::since(&one, &two)).await,
                ),
                how => {
                    let version = if how == "v1" { 1 } else { 2 };
                    (export_in(&backend, version, None, &one), export_in(&backend, version, Some(&one), &two))
                }
            };
            let first = import(&backend, &format!("{how}-{case}"), None, &full).await.unwrap();
            check(&backend, &one, &first);
            let second = import(&backend, &format!("{how}-{case}-b"), Some(&first), &since).await.unwrap();
            check(&backend, &two, &second);
            backend.verify(&second).await.unwrap();
            all.extend([first, second]);
        }
        for artifact in &all {
            backend.remove(artifact).await.unwrap();
        }
        assert_eq!(names(&pool.versions()), [".crab-btrfs"]);
    });
    subvolume::delete(&sandbox.root).unwrap();
}

#[test]
fn any_tree_is_carried_over() {
    carried_over(IFlags::empty(), 12);
}

#[test]
fn trees_that_are_stored_compressed_are_carried_over() {
    carried_over(IFlags::COMPRESSED, 6);
}

#[test]
fn trees_without_copies_on_write_are_carried_over() {
    carried_over(IFlags::NOCOW, 6);
}

#[test]
fn numbers_of_inodes_are_kept_whatever_was_moved_or_removed() {
    let Some(pool) = Pool::new() else { return };
    let (runtime, backend) = (runtime(), pool.backend());
    runtime.block_on(async {
        let sandbox = pool.sandbox("box");
        let root = &sandbox.root;
        let make = |name: &str| fs::write(root.join(name), name).unwrap();
        make("old");
        (0..500).for_each(|n| make(&format!("gone-{n}")));
        std::os::unix::fs::symlink("old", root.join("link")).unwrap();
        fs::create_dir_all(root.join("young/deep")).unwrap();
        (0..500).for_each(|n| fs::remove_file(root.join(format!("gone-{n}"))).unwrap());
        // The kernel sends these directories before it sends the file.
        fs::rename(root.join("old"), root.join("young/deep/old")).unwrap();
        let one = checkpoint(&backend, &sandbox, "one").await.unwrap();
        fs::rename(root.join("young/deep/old"), root.join("back")).unwrap();
        fs::remove_dir_all(root.join("young")).unwrap();
        fs::create_dir_all(root.join("later/deep")).unwrap();
        fs::rename(root.join("back"), root.join("later/deep/old")).unwrap();
        make("last");
        let two = checkpoint(&backend, &sandbox, "two").await.unwrap();

        let full = export(&backend, ExportRequest::full(&one)).await;
        let since = export(&backend, ExportRequest::since(&one, &two)).await;
        let first = import(&backend, "one", None, &full).await.unwrap();
        check(&backend, &one, &first);
        let second = import(&backend, "two", Some(&first), &since).await.unwrap();
        check(&backend, &two, &second);
    });
}

#[test]
fn a_base_that_gave_the_numbers_to_others_is_refused() {
    let Some(pool) = Pool::new() else { return };
    let (runtime, backend) = (runtime(), pool.backend());
    runtime.block_on(async {
        let sandbox = pool.sandbox("box");
        fs::write(sandbox.root.join("first"), "x").unwrap();
        let begin = checkpoint(&backend, &sandbox, "begin").await.unwrap();
        let other = pool.sandbox("other");
        fs::write(other.root.join("anything"), "y").unwrap();
        let aside = checkpoint(&backend, &other, "aside").await.unwrap();
        let since = export(&backend, ExportRequest::since(&aside, &begin)).await;
        let error = import(&backend, "begin", Some(&aside), &since).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
        assert!(error.to_string().contains("inode numbers"), "{error}");
        assert!(!pool.versions().join("imported").exists());
        let full = export(&backend, ExportRequest::full(&begin)).await;
        check(&backend, &begin, &import(&backend, "begin", None, &full).await.unwrap());
    });
}

#[test]
fn the_tools_of_btrfs_take_an_export() {
    let Some(pool) = Pool::new() else { return };
    let (runtime, backend) = (runtime(), pool.backend());
    runtime.block_on(async {
        let sandbox = pool.sandbox("box");
        let mut churn = Churn::new(42);
        (0..40).for_each(|_| churn.step(&sandbox.root));
        let artifact = checkpoint(&backend, &sandbox, "one").await.unwrap();
        let file = pool.outside().join("stream");
        fs::write(&file, export(&backend, ExportRequest::full(&artifact)).await).unwrap();
        let target = pool.path().join("received");
        fs::create_dir(&target).unwrap();
        run(
            "btrfs",
            ["receive".as_ref(), "-q".as_ref(), "-e".as_ref(), "-f".as_ref(), file.as_os_str(), target.as_os_str()],
        )
        .unwrap();
        let differ = trees::differences(&backend.tree(&artifact).unwrap(), &target.join("one"));
        assert!(differ.is_empty(), "{differ:?}");
    });
}

#[test]
fn an_import_that_is_dropped_or_killed_leaves_nothing() {
    let Some(pool) = Pool::new() else { return };
    let (runtime, backend) = (runtime(), pool.backend());
    runtime.block_on(async {
        let sandbox = pool.sandbox("box");
        fs::write(sandbox.root.join("file"), vec![1; 3 << 20]).unwrap();
        let artifact = checkpoint(&backend, &sandbox, "one").await.unwrap();
        let bytes = export(&backend, ExportRequest::full(&artifact)).await;

        /// Gives half of the stream, and no more ever.
        struct Stuck(Option<Vec<u8>>);
        #[async_trait]
        impl ByteStream for Stuck {
            async fn next(&mut self) -> Result<Option<Vec<u8>>> {
                match self.0.take() {
                    Some(half) => Ok(Some(half)),
                    None => std::future::pending().await,
                }
            }
        }
        let mut stuck = Stuck(Some(bytes[..bytes.len() / 2].to_vec()));
        let target = id("imported");
        let request = ImportRequest { sandbox: &target, artifact: artifact_id("half"), base: None, stream: &mut stuck };
        let directory = pool.versions().join("imported");
        let watch = async {
            while names(&directory) != [".import-half"] {
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
        };
        tokio::select! {
            _ = backend.import(request) => panic!("it cannot end"),
            () = watch => {}
        }
        // The thread notices that nobody gives any more.
        while directory.exists() {
            tokio::time::sleep(std::time::Duration::from_millis(2)).await;
        }

        // What a killed process leaves is removed when the backend is opened anew.
        fs::create_dir(&directory).unwrap();
        subvolume::create(&directory.join(".import-half")).unwrap();
        fs::write(directory.join(".import-half/file"), "half").unwrap();
        pool.backend().recover().await.unwrap();
        assert!(!directory.exists());
        import(&backend, "half", None, &bytes).await.unwrap();
    });
}

#[test]
fn an_import_that_does_not_fit_is_refused_and_leaves_room() {
    let Some(large) = Pool::with(512 << 20, &[]) else { return };
    let Some(small) = Pool::with(120 << 20, &["--mixed"]) else { return };
    let runtime = runtime();
    runtime.block_on(async {
        let sandbox = large.sandbox("box");
        let mut noise = Churn::new(9);
        let bytes: Vec<u8> = (0..150 << 20_u32).map(|_| noise.byte()).collect();
        fs::write(sandbox.root.join("noise"), bytes).unwrap();
        let backend = large.backend();
        let artifact = checkpoint(&backend, &sandbox, "one").await.unwrap();
        let bytes = export(&backend, ExportRequest::full(&artifact)).await;
        let backend = small.backend();
        let error = import(&backend, "large", None, &bytes).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Full, "{error}");
        assert!(!small.versions().join("imported").exists());
        small.sync();
        let other = small.sandbox("other");
        fs::write(other.root.join("file"), "fits").unwrap();
        checkpoint(&backend, &other, "one").await.unwrap();
    });
}

#[test]
fn a_stream_cannot_reach_out_of_its_tree() {
    let Some(pool) = Pool::new() else { return };
    let (runtime, backend) = (runtime(), pool.backend());
    runtime.block_on(async {
        // A link where a directory was, between two streams: the second one writes through it, were that possible.
        let sandbox = pool.sandbox("box");
        fs::create_dir(sandbox.root.join("dir")).unwrap();
        fs::write(sandbox.root.join("dir/file"), "one").unwrap();
        let one = checkpoint(&backend, &sandbox, "one").await.unwrap();
        fs::write(sandbox.root.join("dir/file"), "two").unwrap();
        let two = checkpoint(&backend, &sandbox, "two").await.unwrap();
        let since = export(&backend, ExportRequest::since(&one, &two)).await;

        let evil = pool.sandbox("evil");
        let outside = pool.outside().join("outside");
        fs::create_dir(&outside).unwrap();
        fs::write(outside.join("file"), "outside").unwrap();
        std::os::unix::fs::symlink(&outside, evil.root.join("dir")).unwrap();
        let base = checkpoint(&backend, &evil, "base").await.unwrap();
        // The base says that it is what the stream builds on.
        forge(&backend.tree(&base).unwrap(), &backend.tree(&one).unwrap());
        let base = Artifact { facts: BTreeMap::new(), ..base };
        let error = import(&backend, "evil", Some(&base), &since).await.unwrap_err();
        assert!(error.to_string().contains("symbolic links"), "{error}");
        assert_eq!(fs::read(outside.join("file")).unwrap(), b"outside");
        assert!(!pool.versions().join("imported").exists());
    });
}

fn forge(base: &Path, as_if: &Path) {
    let uuid = subvolume::info(as_if).unwrap().uuid.unwrap();
    run(
        "btrfs",
        ["property".as_ref(), "set".as_ref(), "-f".as_ref(), base.as_os_str(), "ro".as_ref(), "false".as_ref()],
    )
    .unwrap();
    crate::ioctl::set_received(subvolume::open(base).unwrap(), uuid.0, 1).unwrap();
    run("btrfs", ["property".as_ref(), "set".as_ref(), base.as_os_str(), "ro".as_ref(), "true".as_ref()]).unwrap();
}
