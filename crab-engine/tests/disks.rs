//! A store on a real small disk: full at each write, and turned read-only under the engine.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use common::{Fixture, assert_sound, close, reopen};
use crab_core::{Condition, ErrorKind, Verdict, VersionId};
use crab_engine::retention::Retention;
use crab_engine::{Deadlines, RestoreOptions, Select};

/// An ext4 of a few MiB in a file, mounted through a loop device. Unmounted when the test ends; the kernel then frees
/// the device.
struct LoopDisk {
    dir: tempfile::TempDir,
}

impl LoopDisk {
    /// `None` where this machine or user cannot make one.
    fn new() -> Option<Self> {
        let memory = Path::new("/dev/shm");
        let dir = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() }.unwrap();
        let disk = Self { dir };
        File::create(disk.image()).unwrap().set_len(4 << 20).unwrap();
        fs::create_dir(disk.path()).unwrap();
        let made = run("mkfs.ext4", &["-q", "-b", "1024", "-m", "0", "-J", "size=1"], &[&disk.image()]);
        if made && disk.mount() {
            return Some(disk);
        }
        println!("skipped: a file system on a loop device");
        None
    }

    fn image(&self) -> PathBuf {
        self.dir.path().join("image")
    }

    fn path(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    fn store(&self) -> PathBuf {
        self.path().join("store")
    }

    fn mount(&self) -> bool {
        run("mount", &["-o", "loop,errors=remount-ro"], &[&self.image(), &self.path()])
    }

    fn unmount(&self) -> bool {
        run("umount", &[], &[&self.path()])
    }

    /// Takes all room but so many KiB.
    fn fill_but(&self, free: u64) {
        let path = self.path().join("filler");
        let mut filler = File::create(&path).unwrap();
        let mut size = 0u64;
        while filler.write_all(&[1; 1024]).is_ok() {
            size += 1024;
        }
        filler.sync_all().unwrap();
        filler.set_len(size.saturating_sub(free << 10)).unwrap();
        filler.sync_all().unwrap();
    }

    fn make_room(&self) {
        fs::remove_file(self.path().join("filler")).unwrap();
        File::open(self.path()).unwrap().sync_all().unwrap();
        // ext4 gives blocks free again once the journal's commit is over, which may be a moment after the sync.
        let probe = self.path().join("probe");
        patiently("the file system gives no block free", || {
            let found = File::create(&probe).and_then(|mut file| {
                file.write_all(&[1; 512 << 10])?;
                file.sync_all()
            });
            fs::remove_file(&probe).unwrap();
            found.is_ok()
        });
    }
}

impl Drop for LoopDisk {
    fn drop(&mut self) {
        if !self.unmount() {
            let _ = run("umount", &["-l"], &[&self.path()]);
        }
    }
}

fn patiently(otherwise: &str, mut done: impl FnMut() -> bool) {
    for _ in 0..1000 {
        if done() {
            return;
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    panic!("{otherwise}");
}

fn run(program: &str, options: &[&str], paths: &[&Path]) -> bool {
    let mut command = Command::new(program);
    command.args(options).args(paths).stdout(Stdio::null()).stderr(Stdio::null());
    command.status().is_ok_and(|status| status.success())
}

#[tokio::test]
async fn a_disk_that_fills_at_any_write_fails_that_step_keeps_all_versions_and_lets_one_delete() {
    let Some(disk) = LoopDisk::new() else { return };
    let f = Fixture::new();
    let make = || common::builder(&f.world, &disk.store()).deadlines(Deadlines::default());
    let mut engine = make().open().await.unwrap();
    engine.attach(&f.id).await.unwrap();
    let (mut turn, mut full) = (0, 0);
    let change = |turn: &mut u64| {
        *turn += 1;
        f.world.write(&f.id, "/n", &turn.to_string()).unwrap();
        f.world.remember(&f.id, "server", &turn.to_string()).unwrap();
        *turn
    };
    // From no room at all to room for everything, in steps of one block.
    for free in 0..14 {
        let context = format!("{free} KiB free");
        for _ in 0..3 {
            let turn = change(&mut turn);
            f.covered(&engine, turn).await;
        }
        let before: Vec<VersionId> = engine.versions(&f.id).iter().map(|manifest| manifest.version).collect();
        disk.fill_but(free);
        let mut errors = Vec::new();
        for _ in 0..4 {
            let turn = change(&mut turn);
            match f.turn(&engine, turn).await {
                Verdict::Durable(_) => {}
                Verdict::Failed(error) => errors.push((*error).clone()),
                other @ Verdict::Unprotected(_) => panic!("{context}: {other:?}"),
            }
        }
        errors.extend(engine.pin(&f.id, before[1]).await.err());
        if let Err(error) = engine.restore(&f.id, Select::Latest, RestoreOptions::default()).await {
            errors.push(error);
        }
        for error in &errors {
            assert!(error.kind().is_full(), "{context}: {error}");
            assert!(error.to_string().contains("free space"), "{context}: {error}");
        }
        full += errors.len();
        assert!(!engine.is_poisoned(), "{context}");
        // What was there is there, and the oldest can be removed however full it is.
        let after = engine.versions(&f.id);
        assert!(before.iter().all(|version| after.iter().any(|manifest| manifest.version == *version)), "{context}");
        engine.remove(&f.id, before[0]).await.unwrap_or_else(|error| panic!("{context}: {error}"));
        disk.make_room();
        // A restore that was cut short in the middle is finished by another.
        engine.restore(&f.id, Select::Latest, RestoreOptions::default()).await.unwrap();
        assert_eq!(f.world.condition_of(&f.id), Condition::Running, "{context}");
        let turn = change(&mut turn);
        f.covered(&engine, turn).await;
        engine.unpin(&f.id, before[1]).await.unwrap();
        engine.prune(&Retention::keep_all().last(1)).await.unwrap();
        close(engine).await;
        engine = reopen(make).await;
        assert!(engine.opened().damaged.is_empty(), "{context}: {:?}", engine.opened().damaged);
        assert_sound(&f.world, &engine, &context).await;
        assert_eq!(engine.versions(&f.id).len(), 1, "{context}");
    }
    assert!(full >= 14, "the disk was full at {full} steps only");
    close(engine).await;
}

#[tokio::test]
async fn a_disk_that_turns_read_only_fails_what_writes_and_keeps_what_is_durable() {
    let Some(disk) = LoopDisk::new() else { return };
    let f = Fixture::new();
    let make = || common::builder(&f.world, &disk.store()).deadlines(Deadlines::default());
    let engine = make().open().await.unwrap();
    engine.attach(&f.id).await.unwrap();
    for turn in 1..=3 {
        f.world.write(&f.id, "/n", &turn.to_string()).unwrap();
        f.covered(&engine, turn).await;
    }
    let durable = engine.versions(&f.id);
    // As after an error of the device.
    if !run("mount", &["-o", "remount,abort"], &[&disk.path()]) || File::create(disk.path().join("probe")).is_ok() {
        println!("skipped: a file system that can be aborted");
        return;
    }
    f.world.write(&f.id, "/n", "4").unwrap();
    let mut errors = Vec::new();
    for turn in 4..=5 {
        match f.turn(&engine, turn).await {
            Verdict::Failed(error) => errors.push((*error).clone()),
            other => panic!("{other:?}"),
        }
    }
    errors.push(engine.pin(&f.id, VersionId(1)).await.unwrap_err());
    errors.push(engine.remove(&f.id, VersionId(1)).await.unwrap_err());
    errors.push(engine.restore(&f.id, Select::Version(VersionId(1)), RestoreOptions::default()).await.unwrap_err());
    for error in errors {
        assert!(matches!(error.kind(), ErrorKind::Io | ErrorKind::Poisoned), "{error}");
        assert!(error.remedy().is_some(), "{error}");
    }
    assert_eq!(f.world.condition_of(&f.id), Condition::Running, "nothing was touched");
    assert_eq!(f.world.files(&f.id)["/n"], "4");
    assert_eq!(engine.versions(&f.id), durable);
    // A turn that changes nothing needs no disk, but this one did change something.
    close(engine).await;
    patiently("the store is still in use", || disk.unmount());
    // As after a reboot. A mount namespace that somebody makes at this moment may hold the broken mount a little longer.
    patiently("the file system stays broken", || {
        let _ = run("fsck.ext4", &["-p"], &[&disk.image()]);
        assert!(disk.mount());
        let probe = disk.path().join("probe");
        if File::create(&probe).and_then(|_| fs::remove_file(&probe)).is_ok() {
            return true;
        }
        patiently("the file system is in use", || disk.unmount());
        false
    });
    let engine = reopen(make).await;
    assert!(engine.opened().damaged.is_empty(), "{:?}", engine.opened().damaged);
    assert_eq!(engine.versions(&f.id), durable);
    f.covered(&engine, 6).await;
    assert_sound(&f.world, &engine, "").await;
    close(engine).await;
}
