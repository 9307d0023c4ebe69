//! Restores that fail or are killed after each step: the sandbox has its old files or its new ones, whole, nothing is
//! left beside them, and a second attempt succeeds.

use std::fs;
use std::sync::{Arc, Mutex};

use crab_backend_files::Steps;
use crab_core::{Artifact, CheckpointBackend, Error, ErrorKind, Result, Sandbox};

use crate::ZfsBackend;
use crate::restore::Step;
use crate::support::{Disk, Pool, checkpoint, files, restore};

const STEPS: [Step; 6] = [Step::Begun, Step::Cloned, Step::Mounted, Step::Moved, Step::Swapped, Step::Finished];

/// How a restore ends before its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The step fails, and the restore can clean up after itself.
    Failure,
    /// The process is gone, and with it all that was to come.
    Kill,
}

struct CutAfter {
    step: Step,
    end: End,
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
            for file in ["a", "b"] {
                fs::write(sandbox.root.join(file), value).unwrap();
            }
        };
        write("1");
        let one = checkpoint(&backend, &sandbox, "one").await.unwrap();
        write("3");
        let three = checkpoint(&backend, &sandbox, "three").await.unwrap();
        write("2");
        Self { sandbox, one, three }
    }

    /// The value that all files have.
    fn value(&self) -> String {
        let files = files(&self.sandbox.root);
        let value = files["a"].clone();
        assert!(files.len() == 2 && files.values().all(|content| *content == value), "a mixture: {files:?}");
        String::from_utf8(value).unwrap()
    }

    async fn cut(&self, pool: &Pool, step: Step, end: End, keep: Option<&str>) {
        let steps = Arc::new(CutAfter { step, end, reached: Mutex::new(false) });
        let backend = ZfsBackend::with_steps(&pool.base(), Arc::clone(&steps) as Arc<dyn Steps<Step>>).unwrap();
        let error = restore(&backend, &self.one, &self.sandbox, "op", keep).await.unwrap_err();
        assert!(*steps.reached.lock().unwrap(), "{step:?} was not reached: {error}");
    }

    /// After recovery: old or new, and the artifact of what was replaced exactly where the swap happened.
    async fn check_settled(&self, pool: &Pool, step: Step, end: End, keep: bool, what: &str) {
        let happened = match end {
            End::Failure => matches!(step, Step::Swapped | Step::Finished),
            // Once the sandbox can have seen the restored files, it keeps them.
            End::Kill => !matches!(step, Step::Begun | Step::Cloned),
        };
        assert_eq!(self.value(), if happened { "1" } else { "2" }, "{what}");
        let mut listed: Vec<_> = pool.backend().list(&self.sandbox.id).await.unwrap();
        listed.sort_by(|a, b| a.id.cmp(&b.id));
        let listed: Vec<_> = listed.iter().map(|artifact| artifact.id.as_str()).collect();
        let expected: &[&str] = if keep && happened { &["kept", "one", "three"] } else { &["one", "three"] };
        assert_eq!(listed, expected, "{what}");
    }

    async fn check_second_attempt(&self, pool: &Pool, keep: Option<&str>, what: &str) {
        let backend = pool.backend();
        let restored = restore(&backend, &self.one, &self.sandbox, "op", keep).await.expect(what);
        assert_eq!(self.value(), "1", "{what}");
        assert_eq!(restored.replaced.is_some(), keep.is_some(), "{what}");
        backend.verify(&self.three).await.expect(what);
        if let Some(replaced) = restored.replaced {
            restore(&backend, &replaced, &self.sandbox, "back", None).await.expect(what);
            assert_eq!(self.value(), "2", "{what}");
            backend.remove(&replaced).await.expect(what);
        }
        restore(&backend, &self.three, &self.sandbox, "next", None).await.expect(what);
        assert_eq!(self.value(), "3", "{what}");
        self.end(pool, &backend, what).await;
    }

    /// Everything goes, and with it everything that restores made.
    async fn end(&self, pool: &Pool, backend: &ZfsBackend, what: &str) {
        backend.remove(&self.one).await.expect(what);
        backend.remove(&self.three).await.expect(what);
        backend.delete_root(&self.sandbox.id, &self.sandbox.root).await.expect(what);
        let name = self.sandbox.id.as_str();
        let left: Vec<_> = pool.all().into_iter().filter(|left| left.contains(name)).collect();
        assert!(left.is_empty(), "{what}: {left:?}");
    }
}

#[tokio::test]
async fn a_failure_after_each_step_leaves_old_or_new() {
    let Some(pool) = Pool::new() else { return };
    for (n, step) in STEPS.into_iter().enumerate() {
        let keep = (n % 2 == 0).then_some("kept");
        let what = format!("{step:?} keep {keep:?}");
        let scene = Scene::new(&pool, &format!("failure-{n}-box")).await;
        scene.cut(&pool, step, End::Failure, keep).await;
        // A restore that fails cleans up after itself up to the swap; after it, the next call does.
        if step == Step::Swapped {
            pool.backend().recover().await.expect(&what);
        }
        scene.check_settled(&pool, step, End::Failure, keep.is_some(), &what).await;
        scene.check_second_attempt(&pool, keep, &what).await;
    }
}

#[tokio::test]
async fn a_kill_after_each_step_leaves_old_or_new() {
    let Some(pool) = Pool::new() else { return };
    for (n, step) in STEPS.into_iter().enumerate() {
        for keep in [None, Some("kept")] {
            let what = format!("{step:?} keep {keep:?}");
            let scene = Scene::new(&pool, &format!("kill-{n}-{}-box", keep.unwrap_or("none"))).await;
            scene.cut(&pool, step, End::Kill, keep).await;
            // Whole also before anybody cleans up.
            let value = scene.value();
            if keep.is_some() || n % 2 == 0 {
                pool.backend().recover().await.expect(&what);
                assert_eq!(scene.value(), value, "{what}: recovery does not change which one it is");
                scene.check_settled(&pool, step, End::Kill, keep.is_some(), &what).await;
            }
            scene.check_second_attempt(&pool, keep, &what).await;
        }
    }
}

#[tokio::test]
async fn a_kill_of_a_fork_leaves_it_or_nothing() {
    let Some(pool) = Pool::new() else { return };
    let origin = Scene::new(&pool, "origin").await;
    for (n, step) in STEPS.into_iter().filter(|step| *step != Step::Moved).enumerate() {
        let what = format!("{step:?}");
        let sandbox = pool.rootless(&format!("fork-{n}-box"));
        let fork = Scene { sandbox, one: origin.one.clone(), three: origin.three.clone() };
        fork.cut(&pool, step, End::Kill, None).await;
        let backend = pool.backend();
        backend.recover().await.expect(&what);
        assert_eq!(fork.sandbox.root.exists(), !matches!(step, Step::Begun | Step::Cloned), "{what}");
        restore(&backend, &fork.one, &fork.sandbox, "op", None).await.expect(&what);
        assert_eq!(fork.value(), "1", "{what}");
        backend.delete_root(&fork.sandbox.id, &fork.sandbox.root).await.expect(&what);
    }
    assert_eq!(origin.value(), "2");
    origin.end(&pool, &pool.backend(), "at the end").await;
    assert_eq!(pool.all(), Vec::<String>::new());
}
