//! Restores that fail, are killed or lose power after each step: the sandbox has its old files or its new ones, whole,
//! nothing is left beside them, and a second attempt succeeds.

use std::fs;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};

use crab_backend_files::Steps;
use crab_core::{Artifact, CheckpointBackend, Error, ErrorKind, Result, Sandbox};

use crate::BtrfsBackend;
use crate::restore::Step;
use crate::subvolume;
use crate::support::{Disk, Pool, checkpoint, files, names, restore};

const STEPS: [Step; 6] = [Step::Journaled, Step::Kept, Step::Cloned, Step::Swapped, Step::Committed, Step::Removed];

/// How a restore ends before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The step fails, and the restore can clean up after itself.
    Failure,
    /// The process is gone, and with it all that was to come.
    Kill,
    /// The machine is gone, and with it all that was not on the disk.
    PowerCut,
}

struct CutAfter {
    step: Step,
    end: End,
    image: PathBuf,
    /// Whether the step was reached.
    reached: Mutex<bool>,
}

impl Steps<Step> for CutAfter {
    fn done(&self, step: Step) -> Result<()> {
        if step != self.step {
            return Ok(());
        }
        *self.reached.lock().unwrap() = true;
        match self.end {
            End::Failure => Err(Error::new(ErrorKind::Io, "the step was told to fail")),
            End::Kill => panic!("killed after {step:?}"),
            End::PowerCut => {
                Pool::copy_disk(&self.image);
                panic!("power cut after {step:?}");
            }
        }
    }
}

/// One sandbox at 2, with versions at 1 and 3.
struct Scene {
    sandbox: Sandbox,
    one: Artifact,
    three: Artifact,
}

impl Scene {
    async fn new(pool: &Pool, name: &str) -> Self {
        let (backend, sandbox) = (pool.backend(), pool.sandbox(name));
        let write = |value: &str| {
            for file in ["a", "b", "c"] {
                fs::write(sandbox.root.join(file), value).unwrap();
            }
        };
        write("1");
        let one = checkpoint(&backend, &sandbox, "one").await.unwrap();
        write("3");
        let three = checkpoint(&backend, &sandbox, "three").await.unwrap();
        write("2");
        pool.sync();
        Self { sandbox, one, three }
    }

    /// The value that all files have.
    fn value(&self) -> String {
        let files = files(&self.sandbox.root);
        let value = files["a"].clone();
        assert!(files.len() == 3 && files.values().all(|content| *content == value), "a mixture: {files:?}");
        String::from_utf8(value).unwrap()
    }
}

async fn cut(pool: &Pool, scene: &Scene, step: Step, end: End, keep: Option<&str>) -> Error {
    let steps = Arc::new(CutAfter { step, end, image: pool.image(), reached: Mutex::new(false) });
    let backend = BtrfsBackend::with_steps(&pool.versions(), Arc::clone(&steps) as Arc<dyn Steps<Step>>).unwrap();
    let error = restore(&backend, &scene.one, &scene.sandbox, "op", keep).await.unwrap_err();
    assert!(*steps.reached.lock().unwrap(), "{step:?} was not reached: {error}");
    error
}

/// After recovery: old or new, nothing beside it, and the journal's artifact exactly where the swap happened.
async fn check_settled(pool: &Pool, scene: &Scene, step: Step, keep: bool, what: &str) {
    let value = scene.value();
    match step {
        Step::Journaled | Step::Kept | Step::Cloned => assert_eq!(value, "2", "{what}"),
        // The swap may or may not have reached the disk before the power was cut.
        Step::Swapped => assert!(value == "1" || value == "2", "{what}"),
        Step::Committed | Step::Removed => assert_eq!(value, "1", "{what}"),
    }
    let id = &scene.sandbox.id;
    let beside: Vec<_> =
        names(&pool.path().join("boxes")).into_iter().filter(|name| name.starts_with(&format!(".{id}"))).collect();
    assert!(beside.is_empty(), "{what}: {beside:?}");
    let listed: Vec<_> =
        names(&pool.versions().join(id.as_str())).into_iter().filter(|n| !n.starts_with('.')).collect();
    let kept = keep && value == "1";
    let expected: &[&str] = if kept { &["kept", "one", "three"] } else { &["one", "three"] };
    assert_eq!(listed, expected, "{what}");
}

async fn check_second_attempt(pool: &Pool, scene: &Scene, keep: Option<&str>, what: &str) {
    let backend = pool.backend();
    let restored = restore(&backend, &scene.one, &scene.sandbox, "op", keep).await.expect(what);
    assert_eq!(scene.value(), "1", "{what}");
    assert_eq!(restored.replaced.is_some(), keep.is_some(), "{what}");
    if let Some(replaced) = restored.replaced {
        backend.verify(&replaced).await.unwrap();
        assert_eq!(fs::read(backend.tree(&replaced).unwrap().join("b")).unwrap(), b"2", "{what}");
    }
    backend.verify(&scene.three).await.expect(what);
    restore(&backend, &scene.three, &scene.sandbox, "next", None).await.expect(what);
    assert_eq!(scene.value(), "3", "{what}");
    assert_eq!(names(&pool.path().join("boxes")).iter().filter(|n| n.starts_with('.')).count(), 0, "{what}");
}

#[tokio::test]
async fn a_failure_after_each_step_leaves_old_or_new() {
    let Some(pool) = Pool::new() else { return };
    for (n, step) in STEPS.into_iter().enumerate() {
        for keep in [None, Some("kept")] {
            let what = format!("{step:?} keep {keep:?}");
            let scene = Scene::new(&pool, &format!("box-{n}-{}", keep.unwrap_or("none"))).await;
            cut(&pool, &scene, step, End::Failure, keep).await;
            // A restore that fails cleans up after itself up to the swap; after it, the next call does.
            if !matches!(step, Step::Journaled | Step::Kept | Step::Cloned) {
                assert_eq!(scene.value(), "1", "{what}");
                pool.backend().recover().await.expect(&what);
            }
            check_settled(&pool, &scene, step, keep.is_some(), &what).await;
            check_second_attempt(&pool, &scene, keep, &what).await;
        }
    }
}

#[tokio::test]
async fn a_kill_after_each_step_leaves_old_or_new() {
    let Some(pool) = Pool::new() else { return };
    for (n, step) in STEPS.into_iter().enumerate() {
        for (keep, recover) in [(None, true), (None, false), (Some("kept"), true), (Some("kept"), false)] {
            let what = format!("{step:?} keep {keep:?} recover {recover}");
            let scene = Scene::new(&pool, &format!("box-{n}-{}-{recover}", keep.unwrap_or("none"))).await;
            let error = cut(&pool, &scene, step, End::Kill, keep).await;
            assert_eq!(error.kind(), ErrorKind::Internal, "{error}");
            // Whole also before anybody cleans up.
            let value = scene.value();
            if recover {
                let backend = pool.backend();
                backend.recover().await.expect(&what);
                assert_eq!(scene.value(), value, "{what}: recovery does not change which one it is");
                check_settled(&pool, &scene, step, keep.is_some(), &what).await;
                backend.recover().await.expect(&what);
            }
            check_second_attempt(&pool, &scene, keep, &what).await;
        }
    }
}

#[tokio::test]
async fn a_power_cut_after_each_step_leaves_old_or_new() {
    let Some(pool) = Pool::new() else { return };
    for (n, step) in STEPS.into_iter().enumerate() {
        for keep in [None, Some("kept")] {
            let what = format!("{step:?} keep {keep:?}");
            let scene = Scene::new(&pool, &format!("box-{n}-{}", keep.unwrap_or("none"))).await;
            cut(&pool, &scene, step, End::PowerCut, keep).await;
            pool.go_on_from_copy();
            let backend = pool.backend();
            backend.recover().await.expect(&what);
            check_settled(&pool, &scene, step, keep.is_some(), &what).await;
            check_second_attempt(&pool, &scene, keep, &what).await;
        }
    }
}

#[tokio::test]
async fn a_kill_in_a_second_attempt_keeps_what_the_first_one_kept() {
    let Some(pool) = Pool::new() else { return };
    for (n, step) in STEPS.into_iter().enumerate() {
        let what = format!("{step:?}");
        let scene = Scene::new(&pool, &format!("box-{n}")).await;
        restore(&pool.backend(), &scene.one, &scene.sandbox, "op", Some("kept")).await.unwrap();
        cut(&pool, &scene, step, End::Kill, Some("kept")).await;
        pool.backend().recover().await.expect(&what);
        assert_eq!(scene.value(), "1", "{what}");
        check_second_attempt(&pool, &scene, Some("kept"), &what).await;
    }
}

#[tokio::test]
async fn a_kill_of_a_fork_leaves_it_or_nothing() {
    let Some(pool) = Pool::new() else { return };
    let origin = Scene::new(&pool, "origin").await;
    for (n, step) in STEPS.into_iter().enumerate() {
        let what = format!("{step:?}");
        let sandbox = pool.rootless(&format!("fork-{n}"));
        let fork = Scene { sandbox, one: origin.one.clone(), three: origin.three.clone() };
        cut(&pool, &fork, step, End::Kill, None).await;
        pool.backend().recover().await.expect(&what);
        let exists = fork.sandbox.root.exists();
        assert_eq!(exists, !matches!(step, Step::Journaled | Step::Kept | Step::Cloned), "{what}");
        assert!(!pool.versions().join(fork.sandbox.id.as_str()).exists(), "{what}: nothing is left to remember");
        restore(&pool.backend(), &fork.one, &fork.sandbox, "op", None).await.expect(&what);
        assert_eq!(fork.value(), "1", "{what}");
    }
    assert_eq!(origin.value(), "2");
    assert_eq!(names(&pool.path().join("boxes")).iter().filter(|n| n.starts_with('.')).count(), 0);
}

#[tokio::test]
async fn a_root_that_vanished_with_a_restore_cut_short_loses_no_kept_state() {
    let Some(pool) = Pool::new() else { return };
    let scene = Scene::new(&pool, "box").await;
    cut(&pool, &scene, Step::Cloned, End::Kill, Some("kept")).await;
    subvolume::delete(&scene.sandbox.root).unwrap();
    let backend = pool.backend();
    backend.recover().await.unwrap();
    assert_eq!(names(&pool.path().join("boxes")), Vec::<String>::new());
    let kept = backend.list(&scene.sandbox.id).await.unwrap().into_iter().find(|a| a.id.as_str() == "kept").unwrap();
    assert_eq!(fs::read(backend.tree(&kept).unwrap().join("a")).unwrap(), b"2");

    // After the swap the replaced tree beside the root may be the only one: it is not removed without the other.
    let scene = Scene::new(&pool, "other").await;
    cut(&pool, &scene, Step::Committed, End::Kill, None).await;
    subvolume::delete(&scene.sandbox.root).unwrap();
    let error = backend.recover().await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt);
    assert_eq!(names(&pool.path().join("boxes")), [".other.crab-restore"]);
}
