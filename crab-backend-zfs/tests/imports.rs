//! Imports that break off, and what goes on from there.
#![allow(clippy::unwrap_used, reason = "these are tests")]

mod support;

use std::collections::VecDeque;
use std::fs;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};

use async_trait::async_trait;
use crab_backend_zfs::ZfsBackend;
use crab_core::{
    Artifact, ByteStream, CheckpointBackend, ErrorKind, ExportRequest, ImportRequest, Result, ResumeToken, Sandbox,
    SandboxId,
};
use support::{Disk, Pool, artifact_id, checkpoint, run, trees, with_mounted};

/// Pieces of a stream, after which it ends, or gives nothing more.
struct Pieces {
    left: VecDeque<Vec<u8>>,
    hangs: bool,
}

#[async_trait]
impl ByteStream for Pieces {
    async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        if self.left.is_empty() && self.hangs {
            println!("{HANGS}");
            std::future::pending::<()>().await;
        }
        Ok(self.left.pop_front())
    }
}

fn pieces(bytes: &[u8]) -> Pieces {
    Pieces { left: bytes.chunks(70_001).map(<[u8]>::to_vec).collect(), hangs: false }
}

async fn export(backend: &ZfsBackend, request: ExportRequest<'_>) -> Result<Vec<u8>> {
    let mut stream = backend.export(request).await?;
    let mut bytes = Vec::new();
    while let Some(piece) = stream.next().await? {
        bytes.extend(piece);
    }
    Ok(bytes)
}

fn other() -> SandboxId {
    "other".parse().unwrap()
}

async fn import(backend: &ZfsBackend, name: &str, base: Option<&Artifact>, bytes: &[u8]) -> Result<Artifact> {
    let mut stream = pieces(bytes);
    let request = ImportRequest { sandbox: &other(), artifact: artifact_id(name), base, stream: &mut stream };
    backend.import(request).await
}

async fn token(backend: &ZfsBackend, name: &str) -> Option<ResumeToken> {
    backend.resume_token(&other(), &artifact_id(name)).await.unwrap()
}

/// Writes files that take so many MiB in all, of blocks that all differ.
fn fill(sandbox: &Sandbox, number: u32, mib: u32) {
    for file in 0..mib {
        let mut content = vec![file as u8; 1 << 20];
        for (at, block) in content.chunks_mut(4096).enumerate() {
            block[..4].copy_from_slice(&(at as u32 + 1000 * number).to_le_bytes());
        }
        fs::write(sandbox.root.join(format!("file-{number}-{file}")), content).unwrap();
    }
}

fn assert_same(pool: &Pool, a: &Artifact, b: &Artifact) {
    let [a, b] = [a, b].map(|artifact| pool.snapshot_of(artifact));
    let differences = with_mounted(&a, |a| with_mounted(&b, |b| trees::differences(a, b)));
    assert!(differences.is_empty(), "{differences:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_import_that_broke_off_goes_on_where_it_was_in_full_and_on_top_of_a_base() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    fill(&sandbox, 1, 8);
    let one = checkpoint(&backend, &sandbox, "one").await.unwrap();
    fill(&sandbox, 2, 8);
    fs::remove_file(sandbox.root.join("file-1-3")).unwrap();
    let two = checkpoint(&backend, &sandbox, "two").await.unwrap();
    let first = import(&backend, "first", None, &export(&backend, ExportRequest::full(&one)).await.unwrap()).await;
    let first = first.unwrap();
    let before = pool.all();
    for (base, has) in [(None, None), (Some(&one), Some(&first))] {
        let request = ExportRequest { artifact: &two, base, resume: None };
        // Broken off again and again.
        let mut rest = export(&backend, request).await.unwrap();
        let whole = rest.len();
        for _ in 0..2 {
            let error = import(&backend, "second", has, &rest[..rest.len() * 2 / 5]).await.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
            assert_eq!(backend.list(&other()).await.unwrap().len(), 1, "only the first is there");
            // As if another process went on.
            pool.backend().recover().await.unwrap();
            let token = token(&backend, "second").await.unwrap();
            let left = export(&backend, ExportRequest { resume: Some(&token), ..request }).await.unwrap();
            assert!(left.len() < rest.len() * 9 / 10, "{} of {}", left.len(), rest.len());
            rest = left;
        }
        assert!(rest.len() < whole * 3 / 4, "{} of {whole}", rest.len());
        let second = import(&backend, "second", has, &rest).await.unwrap();
        assert_eq!(token(&backend, "second").await, None);
        assert_same(&pool, &second, &two);
        let dataset = pool.snapshot_of(&second);
        let dataset = dataset.split_once('@').unwrap().0;
        let canmount = run("zfs", ["get", "-H", "-o", "value", "canmount", dataset]).unwrap();
        assert_eq!(canmount.trim(), "off");
        backend.remove(&second).await.unwrap();
        assert_eq!(pool.all(), before);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_came_through_goes_when_the_artifact_is_removed_or_imported_anew() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    fill(&sandbox, 1, 4);
    let one = checkpoint(&backend, &sandbox, "one").await.unwrap();
    let all = export(&backend, ExportRequest::full(&one)).await.unwrap();
    let before = pool.all();
    let cut = &all[..all.len() / 2];
    import(&backend, "a", None, cut).await.unwrap_err();
    assert_eq!(pool.all().len(), before.len() + 2, "a home and what came through");
    let unfinished = Artifact { id: artifact_id("a"), sandbox: other(), ..one.clone() };
    backend.remove(&unfinished).await.unwrap();
    assert_eq!(pool.all(), before);

    import(&backend, "a", None, cut).await.unwrap_err();
    import(&backend, "a", None, cut).await.unwrap_err();
    assert_eq!(pool.all().len(), before.len() + 2);
    let a = import(&backend, "a", None, &all).await.unwrap();
    assert_same(&pool, &a, &one);
    backend.remove(&a).await.unwrap();
    assert_eq!(pool.all(), before);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_that_goes_on_elsewhere_is_refused_and_what_came_through_stays() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    fill(&sandbox, 1, 5);
    let one = checkpoint(&backend, &sandbox, "one").await.unwrap();
    fill(&sandbox, 2, 5);
    let two = checkpoint(&backend, &sandbox, "two").await.unwrap();
    let all = export(&backend, ExportRequest::full(&two)).await.unwrap();
    import(&backend, "a", None, &all[..all.len() / 3]).await.unwrap_err();
    let early = token(&backend, "a").await.unwrap();

    let refused = async |request: ExportRequest<'_>| {
        let error = export(&backend, request).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    };
    // Of another version, on another base, of no place in the version, of nothing.
    refused(ExportRequest { resume: Some(&early), ..ExportRequest::full(&one) }).await;
    refused(ExportRequest { resume: Some(&early), ..ExportRequest::since(&one, &two) }).await;
    let (version, _) = early.0.rsplit_once('-').unwrap().0.rsplit_once('-').unwrap();
    for other in [format!("{version}-ffffffff-0"), format!("{version}-1-0"), "1-2-3".to_owned()] {
        let other = ResumeToken(other);
        if let Ok(stream) = export(&backend, ExportRequest { resume: Some(&other), ..ExportRequest::full(&two) }).await
        {
            // What ZFS can send is refused where it comes in.
            assert_eq!(import(&backend, "a", None, &stream).await.unwrap_err().kind(), ErrorKind::InvalidInput);
        }
    }
    let from_early =
        export(&backend, ExportRequest { resume: Some(&early), ..ExportRequest::full(&two) }).await.unwrap();
    // To another artifact, and after more came through than the token knows of.
    let error = import(&backend, "b", None, &from_early).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    import(&backend, "a", None, &from_early[..from_early.len() / 2]).await.unwrap_err();
    let late = token(&backend, "a").await.unwrap();
    assert_ne!(late, early);
    let error = import(&backend, "a", None, &from_early).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput, "{error}");
    // Damage on the way.
    let mut rest = export(&backend, ExportRequest { resume: Some(&late), ..ExportRequest::full(&two) }).await.unwrap();
    for at in [20, 36, rest.len() / 2] {
        rest[at] ^= 4;
        import(&backend, "a", None, &rest).await.unwrap_err();
        rest[at] ^= 4;
    }
    let last = token(&backend, "a").await.unwrap();
    let rest = export(&backend, ExportRequest { resume: Some(&last), ..ExportRequest::full(&two) }).await.unwrap();
    let a = import(&backend, "a", None, &rest).await.unwrap();
    assert_same(&pool, &a, &two);
}

/// What the process prints that is killed, when its stream gives nothing more.
const HANGS: &str = "the stream hangs";
const BASE: &str = "CRAB_TEST_IMPORT_INTO";
const STREAM: &str = "CRAB_TEST_IMPORT_FROM";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_process_that_is_killed_amid_an_import() {
    let (Ok(base), Ok(stream)) = (std::env::var(BASE), std::env::var(STREAM)) else { return };
    let backend = ZfsBackend::open(base).unwrap();
    let mut stream = Pieces { hangs: true, ..pieces(&fs::read(stream).unwrap()) };
    let request = ImportRequest { sandbox: &other(), artifact: artifact_id("a"), base: None, stream: &mut stream };
    backend.import(request).await.unwrap();
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_import_goes_on_after_its_process_was_killed() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    fill(&sandbox, 1, 8);
    let one = checkpoint(&backend, &sandbox, "one").await.unwrap();
    let all = export(&backend, ExportRequest::full(&one)).await.unwrap();
    let part = pool.outside().join("part");
    fs::write(&part, &all[..all.len() * 3 / 4]).unwrap();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "the_process_that_is_killed_amid_an_import", "--nocapture"])
        .env(BASE, pool.base())
        .env(STREAM, &part)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let said = BufReader::new(child.stdout.take().unwrap());
    let hangs = said.lines().map_while(|line| line.ok()).any(|line| line.contains(HANGS));
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(hangs, "it ended before its stream did");

    backend.recover().await.unwrap();
    let token = token(&backend, "a").await.unwrap();
    let rest = export(&backend, ExportRequest { resume: Some(&token), ..ExportRequest::full(&one) }).await.unwrap();
    assert!(rest.len() < all.len() * 3 / 4, "{} of {}", rest.len(), all.len());
    let a = import(&backend, "a", None, &rest).await.unwrap();
    assert_same(&pool, &a, &one);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn encrypted_versions_go_on_too() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.rootless("one"));
    let (root, key) = (pool.root_dataset(&sandbox.id), pool.outside().join("key"));
    fs::write(&key, [7_u8; 32]).unwrap();
    let location = format!("keylocation=file://{}", key.display());
    run("zfs", ["create", "-o", "encryption=on", "-o", "keyformat=raw", "-o", &location, &root]).unwrap();
    fill(&sandbox, 1, 4);
    let one = checkpoint(&backend, &sandbox, "one").await.unwrap();
    let all = export(&backend, ExportRequest::full(&one)).await.unwrap();
    import(&backend, "a", None, &all[..all.len() / 2]).await.unwrap_err();
    let token = token(&backend, "a").await.unwrap();
    let rest = export(&backend, ExportRequest { resume: Some(&token), ..ExportRequest::full(&one) }).await.unwrap();
    assert!(rest.len() + (512 << 10) < all.len(), "{} of {}", rest.len(), all.len());
    let a = import(&backend, "a", None, &rest).await.unwrap();
    let dataset = pool.snapshot_of(&a);
    run("zfs", ["load-key", "-L", &format!("file://{}", key.display()), dataset.split_once('@').unwrap().0]).unwrap();
    assert_same(&pool, &a, &one);
}
