//! What lies on disk, and what is not read from it.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;

use crab_backend_criu::CriuBackend;
use crab_core::{Artifact, CheckpointBackend, Condition, ErrorKind};
use crab_examples::sandbox::criu_binary;

use crate::support::{World, get, set, world};

fn place(world: &World, artifact: &Artifact) -> PathBuf {
    world.images.join(artifact.sandbox.as_str()).join(artifact.id.as_str())
}

/// A pack of an artifact that has one.
fn pack(world: &World, artifact: &Artifact) -> PathBuf {
    let mut names = fs::read_dir(place(world, artifact)).unwrap().map(|entry| entry.unwrap().path());
    names.find(|path| path.file_name().unwrap().to_string_lossy().starts_with("pack-")).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_bit_is_found_before_criu_runs() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    set(&sandbox, 5);
    let artifact = world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    let path = pack(&world, &artifact);
    let whole = fs::read(&path).unwrap();
    let mut torn = whole.clone();
    torn[whole.len() / 2] ^= 0x10;
    fs::write(&path, torn).unwrap();
    assert_eq!(world.backend.verify(&artifact).await.unwrap_err().kind(), ErrorKind::Corrupt);
    let error = world.restore(&sandbox, &artifact).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(error.to_string().contains("pack-"), "{error}");
    assert_eq!(error.sandbox_condition(), Some(Condition::Stopped));
    assert!(!world.images.join(".failed").exists(), "CRIU did not run");
    fs::write(&path, whole).unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    assert_eq!(get(&sandbox), Some(5));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_among_the_images_is_refused() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    let artifact = world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    let path = pack(&world, &artifact);
    let aside = world.images.join("aside");
    fs::rename(&path, &aside).unwrap();
    std::os::unix::fs::symlink(&aside, &path).unwrap();
    let error = world.restore(&sandbox, &artifact).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    fs::remove_file(&path).unwrap();
    fs::rename(&aside, &path).unwrap();
    fs::write(place(&world, &artifact).join("inventory.img.new"), "x").unwrap();
    assert_eq!(world.backend.verify(&artifact).await.unwrap_err().kind(), ErrorKind::Corrupt);
}

#[tokio::test(flavor = "multi_thread")]
async fn images_are_readable_by_their_owner_only() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    let artifact = world.checkpoint(&sandbox).await;
    let directory = place(&world, &artifact);
    let mut open = vec![directory.clone(), directory.parent().unwrap().to_owned()];
    open.extend(fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()));
    for path in open {
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o077, 0, "{} is {mode:o}", path.display());
    }
    for fact in ["kernel", "criu", "architecture", "tasks", "init"] {
        assert!(artifact.facts.contains_key(fact), "{fact}");
    }
    assert_eq!(artifact.facts["tasks"], "2");
    assert!(artifact.bytes.unwrap() > 100_000);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_artifact_outlives_the_backend_that_made_it() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    set(&sandbox, 9);
    let artifact = world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    let other = CriuBackend::builder()
        .images(&world.images)
        .capture_dir(&world.captures)
        .binary(criu_binary())
        .open()
        .await
        .unwrap();
    other.recover().await.unwrap();
    let listed = other.list(&sandbox.id()).await.unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].facts, artifact.facts);
    assert_eq!(listed[0].external, artifact.external);
    // What is listed is enough for a restore.
    world.restore(&sandbox, &listed[0]).await.unwrap();
    assert_eq!(get(&sandbox), Some(9));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_filesystem_of_another_moment_is_told_as_the_reason() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    let file = sandbox.root().join("root/open");
    fs::write(&file, "some text").unwrap();
    crate::support::background(&sandbox, "bash -c 'exec 5</root/open; exec sleep 1000'");
    crate::support::eventually("the file is open", || sandbox.exec("pgrep -x sleep").unwrap().success().then_some(()));
    let artifact = world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    fs::write(&file, "another text").unwrap();
    let error = world.restore(&sandbox, &artifact).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert_eq!(error.sandbox_condition(), Some(Condition::Stopped));
    assert_eq!(sandbox.condition().unwrap(), Condition::Stopped);
    assert!(error.to_string().contains("root/open"), "{error}");
    fs::write(&file, "some text").unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    assert_eq!(get(&sandbox), Some(0));
}
