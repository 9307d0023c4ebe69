//! What lies on disk, and what is not read from it.

use std::fs;
use std::os::unix::fs::{FileExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crab_backend_criu::CriuBackend;
use crab_core::{Artifact, CheckpointBackend, Condition, ErrorKind, RestoreTarget};
use crab_examples::sandbox::criu_binary;

use crate::dying;
use crate::support::{get, set, world};

fn place(images: &Path, artifact: &Artifact) -> PathBuf {
    images.join(artifact.sandbox.as_str()).join(artifact.id.as_str())
}

/// A pack of an artifact that has one.
pub(crate) fn pack(images: &Path, artifact: &Artifact) -> PathBuf {
    let mut names = fs::read_dir(place(images, artifact)).unwrap().map(|entry| entry.unwrap().path());
    names.find(|path| path.file_name().unwrap().to_string_lossy().starts_with("pack-")).unwrap()
}

/// A CRIU that notes when it is started, and the file where it does.
pub(crate) fn noting_criu(directory: &Path) -> (PathBuf, PathBuf) {
    let (noting, started) = (directory.join("criu"), directory.join("started"));
    let script = format!("#!/bin/sh\necho >> '{}'\nexec '{}' \"$@\"\n", started.display(), criu_binary().display());
    fs::write(&noting, script).unwrap();
    fs::set_permissions(&noting, fs::Permissions::from_mode(0o700)).unwrap();
    (noting, started)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flipped_bit_never_reaches_a_task() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    set(&sandbox, 5);
    let artifact = world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    let path = pack(&world.images, &artifact);
    let whole = fs::read(&path).unwrap();
    let mut torn = whole.clone();
    torn[whole.len() / 2] ^= 0x10;
    fs::write(&path, torn).unwrap();
    assert_eq!(world.backend.verify(&artifact).await.unwrap_err().kind(), ErrorKind::Corrupt);
    let error = world.restore(&sandbox, &artifact).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert!(error.to_string().contains("pack-"), "{error}");
    assert_eq!(error.sandbox_condition(), Some(Condition::Stopped));
    assert!(!world.images.join(".failed").exists(), "it was not CRIU's failure");
    fs::write(&path, whole).unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    assert_eq!(get(&sandbox), Some(5));
}

/// By then CRIU may have made all tasks, and have read what lies before it.
#[tokio::test(flavor = "multi_thread")]
async fn a_block_that_is_damaged_anywhere_in_the_memory_leaves_no_task() {
    let Some(world) = world().await else { return };
    let (sandbox, artifact) = dying::prepared(&world, 48).await;
    let path = pack(&world.images, &artifact);
    let length = fs::metadata(&path).unwrap().len();
    assert!(length > 48 << 20);
    let file = fs::File::options().read(true).write(true).open(&path).unwrap();
    for part in 1..8 {
        sandbox.kill().unwrap();
        let (at, mut byte) = (length / 8 * part, [0]);
        file.read_exact_at(&mut byte, at).unwrap();
        file.write_all_at(&[byte[0] ^ 1], at).unwrap();
        let error = world.restore(&sandbox, &artifact).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{part}: {error}");
        assert_eq!(error.sandbox_condition(), Some(Condition::Stopped));
        assert_eq!(sandbox.condition().unwrap(), Condition::Stopped, "{part}");
        world.assert_no_captures();
        file.write_all_at(&byte, at).unwrap();
        world.restore(&sandbox, &artifact).await.unwrap();
        assert_eq!(get(&sandbox), Some(42));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_link_among_the_images_is_refused() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    let artifact = world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    let path = pack(&world.images, &artifact);
    let aside = world.images.join("aside");
    fs::rename(&path, &aside).unwrap();
    std::os::unix::fs::symlink(&aside, &path).unwrap();
    let error = world.restore(&sandbox, &artifact).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    fs::remove_file(&path).unwrap();
    fs::rename(&aside, &path).unwrap();
    fs::write(place(&world.images, &artifact).join("inventory.img.new"), "x").unwrap();
    assert_eq!(world.backend.verify(&artifact).await.unwrap_err().kind(), ErrorKind::Corrupt);
}

/// Whatever somebody does to an artifact's directory, CRIU is not even started.
#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_image_directory_never_reaches_criu() {
    use rustix::fs::{CWD, FileType, Mode, mknodat};
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    set(&sandbox, 5);
    let artifact = world.checkpoint(&sandbox).await;
    sandbox.kill().unwrap();
    // The same store, by another CRIU.
    let (noting, started) = noting_criu(&world.captures);
    let builder = CriuBackend::builder().images(&world.images).capture_dir(&world.captures).binary(&noting);
    let backend = builder.open().await.unwrap();
    assert!(started.exists(), "its version was asked for");

    let (place, pack) = (place(&world.images, &artifact), pack(&world.images, &artifact));
    let (parent, manifest) = (place.parent().unwrap().to_owned(), place.join("manifest.json"));
    let fifo = |path: &Path| mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
    let rewrite =
        |path: &Path, change: &dyn Fn(Vec<u8>) -> Vec<u8>| fs::write(path, change(fs::read(path).unwrap())).unwrap();
    let replace = |from: &str, to: &str| {
        let (from, to) = (from.to_owned(), to.to_owned());
        move |text: Vec<u8>| String::from_utf8(text).unwrap().replacen(&from, &to, 1).into_bytes()
    };
    let name = pack.file_name().unwrap().to_str().unwrap();
    let hostile: [(&str, &dyn Fn()); 11] = [
        ("a pack that is a fifo", &|| (fs::remove_file(&pack).unwrap(), fifo(&pack)).1),
        ("a manifest that is a fifo", &|| (fs::remove_file(&manifest).unwrap(), fifo(&manifest)).1),
        ("one more file, a fifo", &|| fifo(&place.join("pages-1.img"))),
        ("a pack that is a directory", &|| (fs::remove_file(&pack).unwrap(), fs::create_dir(&pack).unwrap()).1),
        ("a pack that is a link", &|| {
            fs::rename(&pack, parent.join("aside")).unwrap();
            std::os::unix::fs::symlink("../aside", &pack).unwrap();
        }),
        ("a directory that is a link", &|| {
            fs::rename(&place, parent.join("aside")).unwrap();
            std::os::unix::fs::symlink("aside", &place).unwrap();
        }),
        ("a pack that is too long", &|| rewrite(&pack, &|mut bytes| (bytes.push(0), bytes).1)),
        ("a pack that is cut short", &|| rewrite(&pack, &|bytes| bytes[..bytes.len() - 4096].to_vec())),
        ("an empty pack", &|| fs::write(&pack, "").unwrap()),
        ("a name that leads elsewhere", &|| {
            fs::rename(&pack, parent.join(name)).unwrap();
            rewrite(&manifest, &replace(name, &format!("../{name}")));
        }),
        ("another size of the whole", &|| rewrite(&manifest, &replace("\"size\":", "\"size\":9"))),
    ];
    // Kept by links and copies, since each case begins with the whole one.
    let (kept, before) = (world.images.join(".kept"), fs::read(&started).unwrap());
    copy(&place, &kept);
    for (what, act) in hostile {
        act();
        let target = RestoreTarget {
            sandbox: sandbox.describe(),
            operation: "hostile".parse().unwrap(),
            keep_replaced: None,
            inherited: sandbox.inherit(&artifact.external).unwrap(),
            deadline: None,
        };
        let error = backend.restore(&artifact, target).await.expect_err(what);
        assert_eq!(error.kind(), ErrorKind::Corrupt, "{what}: {error}");
        assert_eq!(error.sandbox_condition(), Some(Condition::Stopped), "{what}: {error}");
        assert_eq!(backend.verify(&artifact).await.unwrap_err().kind(), ErrorKind::Corrupt, "{what}");
        assert_eq!(fs::read(&started).unwrap(), before, "{what}: CRIU was started");
        fs::remove_file(&place).or_else(|_| fs::remove_dir_all(&place)).unwrap();
        for left in fs::read_dir(&parent).unwrap().map(|entry| entry.unwrap().path()) {
            fs::remove_file(&left).or_else(|_| fs::remove_dir_all(&left)).unwrap();
        }
        copy(&kept, &place);
    }
    fs::remove_dir_all(&kept).unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    assert_eq!(get(&sandbox), Some(5));
}

fn copy(from: &Path, to: &Path) {
    use std::os::unix::fs::DirBuilderExt;
    fs::DirBuilder::new().mode(0o700).create(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        fs::copy(entry.path(), to.join(entry.file_name())).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn images_are_readable_by_their_owner_only() {
    let Some(world) = world().await else { return };
    let sandbox = world.with_server();
    let artifact = world.checkpoint(&sandbox).await;
    let directory = place(&world.images, &artifact);
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
