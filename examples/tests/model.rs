//! Random steps on real sandboxes, with btrfs and CRIU, against the same simple model as the engine's own test.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[path = "../../crab-engine/tests/common/model.rs"]
mod model;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use async_trait::async_trait;
use crab_backend_btrfs::BtrfsBackend;
use crab_backend_criu::CriuBackend;
use crab_core::{Condition, ErrorKind, SandboxHost, SandboxId, StateDelta};
use crab_engine::Engine;
use crab_examples::sandbox::{Config, ExampleHost, criu_binary, delete_root, home, snapshot_root};
use crab_inspector::{Inspector, PollingInspector};
use model::{Real, Run, State, Step};

/// Real sandboxes. All that they leave is removed with this.
struct RealWorld {
    host: Arc<ExampleHost>,
    delta: Arc<dyn StateDelta>,
    engine: Option<Engine>,
    area: PathBuf,
    store: tempfile::TempDir,
    sandboxes: Vec<SandboxId>,
}

impl RealWorld {
    async fn new(first: &SandboxId) -> Self {
        let area = home().join(format!("pool/scratch/{first}"));
        std::fs::create_dir_all(&area).unwrap();
        let delta: Arc<dyn StateDelta> = match Inspector::load() {
            Ok(inspector) => Arc::new(inspector),
            Err(error) => {
                println!("skipped: BPF ({error})");
                Arc::new(PollingInspector::new())
            }
        };
        let store = tempfile::tempdir().unwrap();
        let host = Arc::new(ExampleHost::new());
        let mut world = Self { host, delta, engine: None, area, store, sandboxes: vec![first.clone()] };
        snapshot_root(&world.root(first)).unwrap();
        std::fs::create_dir(world.root(first).join("data")).unwrap();
        world.host.launch(Config::new(first.clone(), world.root(first))).unwrap();
        world.open().await;
        world.engine().attach(first).await.unwrap();
        world
    }

    fn root(&self, id: &SandboxId) -> PathBuf {
        self.area.join(id.as_str())
    }

    async fn open(&mut self) {
        let images = self.store.path().join("images");
        let processes = CriuBackend::builder().images(images).binary(criu_binary()).open().await.unwrap();
        let processes = Arc::new(processes);
        let files = Arc::new(BtrfsBackend::open(self.area.join("versions")).unwrap());
        let until = Instant::now() + Duration::from_secs(60);
        self.engine = loop {
            let builder = Engine::builder(self.store.path().join("store"))
                .filesystem(files.clone())
                .process(processes.clone())
                .host(Arc::clone(&self.host) as Arc<dyn SandboxHost>)
                .delta(self.delta.clone());
            match builder.open().await {
                Ok(engine) => break Some(engine),
                // The last tasks of the old one are still ending.
                Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < until => {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
                Err(error) => panic!("{error}"),
            }
        };
    }

    async fn exec(&self, id: &SandboxId, line: String) {
        let sandbox = self.host.get(id).unwrap();
        let output = tokio::task::spawn_blocking(move || sandbox.exec(&line)).await.unwrap().unwrap();
        assert!(output.success(), "{}", output.text());
    }

    /// The value that the one process of the test holds: its argument lies in its memory, and is read from outside.
    fn memory(&self, id: &SandboxId) -> Option<u32> {
        let cgroup = self.host.get(id).unwrap().cgroup().to_owned();
        let mut todo = vec![cgroup];
        while let Some(cgroup) = todo.pop() {
            let children = std::fs::read_dir(&cgroup).into_iter().flatten().flatten();
            todo.extend(children.map(|entry| entry.path()).filter(|path| path.is_dir()));
            let pids = std::fs::read_to_string(cgroup.join("cgroup.procs")).unwrap_or_default();
            for pid in pids.lines() {
                let line = std::fs::read_to_string(format!("/proc/{pid}/cmdline")).unwrap_or_default();
                if let Some(value) = line.strip_prefix("sleep\u{0}9000") {
                    return value.trim_end_matches('\u{0}').parse().ok();
                }
            }
        }
        None
    }
}

impl Drop for RealWorld {
    fn drop(&mut self) {
        for id in &self.sandboxes {
            if let Ok(sandbox) = self.host.get(id) {
                let _ = sandbox.kill();
            }
            self.host.forget(id);
            let _ = delete_root(&self.root(id));
        }
        for sandbox in std::fs::read_dir(self.area.join("versions")).into_iter().flatten().flatten() {
            for version in std::fs::read_dir(sandbox.path()).into_iter().flatten().flatten() {
                if version.path().is_dir() {
                    let _ = delete_root(&version.path());
                }
            }
        }
        let _ = std::fs::remove_dir_all(&self.area);
    }
}

#[async_trait]
impl Real for RealWorld {
    fn engine(&self) -> &Engine {
        self.engine.as_ref().unwrap()
    }
    async fn write(&mut self, id: &SandboxId, file: u8, value: u32) {
        self.exec(id, format!("echo {value} > /data/{file}")).await;
    }
    async fn remember(&mut self, id: &SandboxId, value: u32) {
        let line = format!("pkill -x sleep; setsid sleep 9000{value} </dev/null >/dev/null 2>&1 & sleep 0.05");
        self.exec(id, line).await;
        let until = Instant::now() + Duration::from_secs(30);
        while self.memory(id) != Some(value) {
            assert!(Instant::now() < until, "the process does not begin");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    async fn state(&mut self, id: &SandboxId) -> State {
        let mut files = BTreeMap::new();
        for entry in std::fs::read_dir(self.root(id).join("data")).unwrap().flatten() {
            let name = entry.file_name().into_string().unwrap().parse().unwrap();
            files.insert(name, std::fs::read_to_string(entry.path()).unwrap().trim().parse().unwrap());
        }
        State { files, memory: self.memory(id) }
    }
    async fn crash(&mut self, id: &SandboxId) {
        let sandbox = self.host.get(id).unwrap();
        std::fs::write(sandbox.cgroup().join("cgroup.kill"), "1").unwrap();
        let until = Instant::now() + Duration::from_secs(30);
        while sandbox.condition().unwrap() != Condition::Stopped {
            assert!(Instant::now() < until, "the sandbox does not die");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
    async fn prepare(&mut self, id: &SandboxId) {
        self.sandboxes.push(id.clone());
        self.host.prepare(Config::new(id.clone(), self.root(id))).unwrap();
    }
    async fn restart(&mut self) {
        if let Some(engine) = self.engine.take() {
            engine.close().await;
        }
        self.open().await;
    }
    async fn check(&mut self, context: &str) {
        for id in &self.sandboxes {
            assert_ne!(self.host.get(id).unwrap().condition().unwrap(), Condition::Frozen, "{context}: {id}");
        }
    }
    fn is_exact(&self) -> bool {
        false
    }
}

/// The same numbers in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }

    fn step(&mut self) -> Step {
        let (sandbox, version) = (usize::try_from(self.below(2)).unwrap(), usize::try_from(self.below(8)).unwrap());
        let (file, value) = (u8::try_from(self.below(3)).unwrap(), u32::try_from(self.below(4)).unwrap());
        match self.below(20) {
            0..4 => Step::Write { sandbox, file, value },
            4..7 => Step::Remember { sandbox, value },
            7..12 => Step::Turn { sandbox },
            12 => Step::Checkpoint { sandbox },
            13 => Step::Crash { sandbox },
            14..16 => Step::Restore { sandbox, version: (version > 3).then_some(version) },
            16 => Step::Pin { sandbox, version, pinned: true },
            17 => Step::Remove { sandbox, version },
            18 => Step::Prune { last: 2 },
            _ => Step::Restart,
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_on_btrfs_and_criu_does_what_the_model_does() {
    if !home().join("pool/base/sbin/crab-init").exists() || !criu_binary().exists() {
        println!("skipped: sandbox root or criu (run `cargo xtask setup`)");
        return;
    }
    let steps: usize = std::env::var("CRAB_MODEL_STEPS").ok().and_then(|steps| steps.parse().ok()).unwrap_or(30);
    let seed: u64 = std::env::var("CRAB_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x5eed);
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let first: SandboxId = format!("model-{}", std::process::id()).parse().unwrap();
    let mut run = Run::new(RealWorld::new(&first).await, first);
    // What must come up in every run, then whatever comes.
    let fixed = [
        Step::Write { sandbox: 0, file: 1, value: 1 },
        Step::Remember { sandbox: 0, value: 1 },
        Step::Turn { sandbox: 0 },
        Step::Turn { sandbox: 0 },
        Step::Fork { sandbox: 0, version: 0 },
        Step::Write { sandbox: 1, file: 1, value: 2 },
        Step::Remember { sandbox: 0, value: 3 },
        Step::Turn { sandbox: 1 },
        Step::Turn { sandbox: 0 },
        Step::Crash { sandbox: 0 },
        Step::Restore { sandbox: 0, version: None },
        Step::Restart,
    ];
    let steps = fixed.into_iter().chain((0..steps).map(|_| random.step())).collect::<Vec<_>>();
    for (at, step) in steps.into_iter().enumerate() {
        run.step(step, &format!("CRAB_SEED={seed}, step {at}, {step:?}")).await;
    }
    run.step(Step::Prune { last: 2 }, "the end").await;
    run.finish(&format!("CRAB_SEED={seed}")).await;
    if let Some(engine) = run.real.engine.take() {
        engine.close().await;
    }
}
