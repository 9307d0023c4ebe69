//! What a restore does to files, and what it refuses.
#![allow(clippy::unwrap_used, clippy::panic, reason = "these are tests")]

mod support;

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crab_backend_btrfs::subvolume;
use crab_core::{CheckpointBackend, Condition, ErrorKind};
use support::{Disk, Pool, checkpoint, files, names, restore, run, target};

#[tokio::test]
async fn newer_versions_survive_and_the_replaced_state_is_one_of_them() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    let file = sandbox.root.join("file");
    let mut versions = Vec::new();
    for value in ["1", "2", "3"] {
        fs::write(&file, value).unwrap();
        versions.push(checkpoint(&backend, &sandbox, &format!("v{value}")).await.unwrap());
    }
    fs::write(&file, "4, never captured").unwrap();
    let restored = restore(&backend, &versions[0], &sandbox, "op-1", Some("kept-4")).await.unwrap();
    assert_eq!(fs::read(&file).unwrap(), b"1");
    assert_eq!(restored.init, None);
    let kept = restored.replaced.unwrap();
    assert_eq!(names(&pool.versions().join("one")), [".restore", "kept-4", "v1", "v2", "v3"]);
    assert_eq!(names(&pool.path().join("boxes")), ["one"]);

    for (artifact, content) in [(&versions[2], "3"), (&kept, "4, never captured"), (&versions[1], "2")] {
        backend.verify(artifact).await.unwrap();
        restore(&backend, artifact, &sandbox, &format!("to-{}", artifact.id), None).await.unwrap();
        assert_eq!(fs::read_to_string(&file).unwrap(), content);
    }
    assert_eq!(names(&pool.path().join("boxes")), ["one"]);
    // A restored root is captured like any other.
    let again = checkpoint(&backend, &sandbox, "again").await.unwrap();
    backend.verify(&again).await.unwrap();
}

#[tokio::test]
async fn a_second_attempt_restores_again_and_keeps_what_the_first_one_kept() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    let file = sandbox.root.join("file");
    fs::write(&file, "1").unwrap();
    let artifact = checkpoint(&backend, &sandbox, "v1").await.unwrap();
    fs::write(&file, "2").unwrap();
    let first = restore(&backend, &artifact, &sandbox, "op", Some("kept")).await.unwrap().replaced.unwrap();
    // Something of the sandbox ran before the attempt was given up.
    fs::write(&file, "spoiled").unwrap();

    let backend = pool.backend();
    backend.recover().await.unwrap();
    let second = restore(&backend, &artifact, &sandbox, "op", Some("kept")).await.unwrap().replaced.unwrap();
    assert_eq!(fs::read(&file).unwrap(), b"1");
    assert_eq!(first, second);
    assert_eq!(fs::read(backend.tree(&second).unwrap().join("file")).unwrap(), b"2");
    // Another operation may not take the name.
    let error = restore(&backend, &artifact, &sandbox, "other", Some("kept")).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    assert_eq!(names(&pool.path().join("boxes")), ["one"]);
}

#[tokio::test]
async fn a_fork_may_have_a_root_or_none() {
    let Some(pool) = Pool::new() else { return };
    let (backend, one) = (pool.backend(), pool.sandbox("one"));
    fs::write(one.root.join("file"), "1").unwrap();
    let artifact = checkpoint(&backend, &one, "v1").await.unwrap();
    let two = pool.rootless("two");
    for _ in 0..2 {
        let restored = restore(&backend, &artifact, &two, "op", Some("kept")).await.unwrap();
        assert_eq!(restored.replaced, None, "there was nothing to replace, also at the second attempt");
        assert_eq!(fs::read(two.root.join("file")).unwrap(), b"1");
    }
    let three = pool.sandbox("three");
    fs::write(three.root.join("file"), "3").unwrap();
    let kept = restore(&backend, &artifact, &three, "op", Some("kept")).await.unwrap().replaced.unwrap();
    assert_eq!((kept.sandbox.clone(), fs::read(three.root.join("file")).unwrap()), (three.id.clone(), b"1".to_vec()));
    assert_eq!(fs::read(backend.tree(&kept).unwrap().join("file")).unwrap(), b"3");
    // A fork lives on without what it was made from.
    backend.remove(&artifact).await.unwrap();
    fs::write(two.root.join("file"), "2").unwrap();
    checkpoint(&backend, &two, "v1").await.unwrap();
    let error = restore(&backend, &artifact, &one, "op", None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);
}

#[tokio::test]
async fn everything_about_a_file_comes_back() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    let at = |name: &str| sandbox.root.join(name);
    fs::write(at("file"), "x").unwrap();
    fs::set_permissions(at("file"), fs::Permissions::from_mode(0o4711)).unwrap();
    std::os::unix::fs::chown(at("file"), Some(1234), Some(5678)).unwrap();
    fs::hard_link(at("file"), at("second name")).unwrap();
    symlink("/nowhere", at("link")).unwrap();
    let flags = rustix::fs::XattrFlags::empty();
    rustix::fs::setxattr(at("file"), c"user.key", b"value", flags).unwrap();
    fs::set_permissions(&sandbox.root, fs::Permissions::from_mode(0o1770)).unwrap();
    let before = fs::metadata(at("file")).unwrap();
    let artifact = checkpoint(&backend, &sandbox, "a").await.unwrap();

    fs::remove_file(at("file")).unwrap();
    fs::remove_file(at("link")).unwrap();
    fs::set_permissions(&sandbox.root, fs::Permissions::from_mode(0o700)).unwrap();
    restore(&backend, &artifact, &sandbox, "op", None).await.unwrap();

    let after = fs::metadata(at("file")).unwrap();
    assert_eq!((after.mode(), after.uid(), after.gid(), after.nlink()), (before.mode(), 1234, 5678, 2));
    assert_eq!(
        (after.mtime_nsec(), after.ctime_nsec(), after.ino()),
        (before.mtime_nsec(), before.ctime_nsec(), before.ino())
    );
    assert_eq!(fs::metadata(&sandbox.root).unwrap().mode() & 0o7777, 0o1770);
    assert_eq!(fs::read_link(at("link")).unwrap(), Path::new("/nowhere"));
    let mut value = [0; 16];
    let (value, _) = rustix::fs::getxattr(at("file"), c"user.key", &mut value).map(|n| value.split_at(n)).unwrap();
    assert_eq!(value, b"value");
}

#[tokio::test]
async fn a_mounted_root_is_busy() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    fs::create_dir(sandbox.root.join("proc")).unwrap();
    let artifact = checkpoint(&backend, &sandbox, "a").await.unwrap();
    let elsewhere = pool.outside().join("bound");
    fs::create_dir(&elsewhere).unwrap();
    for (from, to) in [
        (sandbox.root.clone(), elsewhere.clone()),
        (sandbox.root.join("proc"), elsewhere.clone()),
        (elsewhere.clone(), sandbox.root.join("proc")),
        (sandbox.root.clone(), sandbox.root.clone()),
    ] {
        let mount = Bound::new(&from, &to);
        let error = restore(&backend, &artifact, &sandbox, "op", None).await.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
        drop(mount);
    }
    restore(&backend, &artifact, &sandbox, "op", None).await.unwrap();
}

struct Bound(PathBuf);

impl Bound {
    fn new(from: &Path, to: &Path) -> Self {
        run("mount", ["--bind".as_ref(), from.as_os_str(), to.as_os_str()]).unwrap();
        Self(to.to_owned())
    }
}

impl Drop for Bound {
    fn drop(&mut self) {
        run("umount", [&self.0]).unwrap();
    }
}

#[tokio::test]
async fn a_sandbox_with_tasks_is_busy() {
    let Some(pool) = Pool::new() else { return };
    let Some(cgroup) = Cgroup::new() else { return };
    let backend = pool.backend();
    let mut sandbox = pool.sandbox("one");
    sandbox.cgroup = cgroup.path.clone();
    fs::write(sandbox.root.join("file"), "1").unwrap();
    let artifact = checkpoint(&backend, &sandbox, "a").await.unwrap();
    fs::write(sandbox.root.join("file"), "2").unwrap();
    let before = subvolume::info(&sandbox.root).unwrap().id;

    // Tasks of a child cgroup belong to the sandbox.
    let child = cgroup.path.join("child");
    fs::create_dir(&child).unwrap();
    let mut task = Task::in_cgroup(&child);
    let error = restore(&backend, &artifact, &sandbox, "op", None).await.unwrap_err();
    assert_eq!((error.kind(), error.sandbox_condition()), (ErrorKind::Busy, Some(Condition::Running)), "{error}");
    assert_eq!(subvolume::info(&sandbox.root).unwrap().id, before);
    checkpoint(&backend, &sandbox, "b").await.unwrap();

    task.end();
    // The kernel tells that a cgroup is empty a little after its last task was reaped.
    for _ in 0..200 {
        if fs::read_to_string(cgroup.path.join("cgroup.events")).unwrap().contains("populated 0") {
            break;
        }
        tokio::task::spawn_blocking(|| std::thread::sleep(Duration::from_millis(10))).await.unwrap();
    }
    restore(&backend, &artifact, &sandbox, "op", None).await.unwrap();
    assert_eq!(fs::read(sandbox.root.join("file")).unwrap(), b"1");
}

/// A cgroup v2 directory of our own, removed with everything in it.
struct Cgroup {
    path: PathBuf,
}

impl Cgroup {
    fn new() -> Option<Self> {
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap();
        let mount = mounts.lines().find(|line| line.contains(" - cgroup2 "));
        let made = mount.and_then(|line| {
            let path = Path::new(line.split(' ').nth(4)?).join(format!("crab-btrfs-test-{}", std::process::id()));
            fs::create_dir(&path).ok()?;
            Some(Self { path })
        });
        if made.is_none() {
            println!("skipped: cgroup v2");
        }
        made
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::write(self.path.join("cgroup.kill"), "1");
        for _ in 0..200 {
            let _ = fs::remove_dir(self.path.join("child"));
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        eprintln!("{} is left behind", self.path.display());
    }
}

struct Task(Child);

impl Task {
    fn in_cgroup(cgroup: &Path) -> Self {
        let task = Self(Command::new("sleep").arg("600").spawn().unwrap());
        fs::write(cgroup.join("cgroup.procs"), task.0.id().to_string()).unwrap();
        task
    }

    fn end(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Drop for Task {
    fn drop(&mut self) {
        self.end();
    }
}

#[tokio::test]
async fn what_is_in_the_way_is_never_removed() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    fs::write(sandbox.root.join("file"), "1").unwrap();
    let artifact = checkpoint(&backend, &sandbox, "a").await.unwrap();
    fs::write(sandbox.root.join("file"), "2").unwrap();
    let before = files(&sandbox.root);

    let staging = pool.path().join("boxes/.one.crab-restore");
    subvolume::create(&staging).unwrap();
    fs::write(staging.join("precious"), "").unwrap();
    let error = restore(&backend, &artifact, &sandbox, "op", None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists);
    backend.recover().await.unwrap();
    assert!(staging.join("precious").exists());
    subvolume::delete(&staging).unwrap();

    let mut plain = pool.rootless("plain");
    fs::create_dir(&plain.root).unwrap();
    let error = restore(&backend, &artifact, &plain, "op", None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(plain.root.exists());
    plain.root = "relative".into();
    let error = restore(&backend, &artifact, &plain, "op", None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    plain.root = pool.outside().join("elsewhere");
    let error = restore(&backend, &artifact, &plain, "op", None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    plain.root = pool.path().join("missing/root");
    let error = restore(&backend, &artifact, &plain, "op", None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound);

    let mut late = target(&sandbox, "op", None);
    late.deadline = Instant::now().checked_sub(Duration::from_secs(1));
    assert_eq!(backend.restore(&artifact, late).await.unwrap_err().kind(), ErrorKind::TimedOut);
    assert_eq!(files(&sandbox.root), before);
    assert_eq!(names(&pool.versions().join("one")), ["a"]);
}

#[tokio::test]
async fn a_damaged_journal_is_reported_and_stops_only_its_own_sandbox() {
    let Some(pool) = Pool::new() else { return };
    let (backend, one, two) = (pool.backend(), pool.sandbox("one"), pool.sandbox("two"));
    let of_one = checkpoint(&backend, &one, "a").await.unwrap();
    let of_two = checkpoint(&backend, &two, "a").await.unwrap();
    std::os::unix::fs::symlink("crab-btrfs-restore 2 op", pool.versions().join("one/.restore")).unwrap();
    let pending = support::capture(&backend, &two, "b").await.unwrap();
    let error = backend.recover().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert!(error.to_string().contains("one/.restore"), "{error}");
    assert_eq!(names(&pool.versions().join("two")), ["a"], "the other sandbox is cleaned up");
    drop(pending);
    assert_eq!(restore(&backend, &of_one, &one, "op", None).await.unwrap_err().kind(), ErrorKind::Corrupt);
    restore(&backend, &of_two, &two, "op", None).await.unwrap();
    checkpoint(&backend, &one, "b").await.unwrap();
}

#[tokio::test]
async fn a_root_that_the_host_removed_stops_nothing() {
    let Some(pool) = Pool::new() else { return };
    let (backend, sandbox) = (pool.backend(), pool.sandbox("one"));
    let artifact = checkpoint(&backend, &sandbox, "a").await.unwrap();
    restore(&backend, &artifact, &sandbox, "op", Some("kept")).await.unwrap();
    subvolume::delete(&sandbox.root).unwrap();
    backend.recover().await.unwrap();
    assert_eq!(backend.list(&sandbox.id).await.unwrap().len(), 2);
    let again = restore(&backend, &artifact, &sandbox, "op", Some("kept")).await.unwrap();
    assert!(again.replaced.is_some());
    subvolume::delete(&sandbox.root).unwrap();
    restore(&backend, &artifact, &sandbox, "next", None).await.unwrap();
    assert!(sandbox.root.exists());
}

#[tokio::test]
async fn versions_and_roots_may_be_reached_over_different_mounts() {
    let Some(pool) = Pool::new() else { return };
    let sandbox = pool.sandbox("one");
    let elsewhere = pool.outside().join("second");
    fs::create_dir(&elsewhere).unwrap();
    let mount = Bound::new(&pool.path(), &elsewhere);
    let backend = crab_backend_btrfs::BtrfsBackend::open(elsewhere.join("versions")).unwrap();
    fs::write(sandbox.root.join("file"), "1").unwrap();
    let artifact = checkpoint(&backend, &sandbox, "a").await.unwrap();
    fs::write(sandbox.root.join("file"), "2").unwrap();
    restore(&backend, &artifact, &sandbox, "op", Some("kept")).await.unwrap();
    assert_eq!(fs::read(sandbox.root.join("file")).unwrap(), b"1");
    drop(mount);
}
