//! Many sandboxes on one disk, worked on by a process that is killed again and again.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use super::calls::{capture, checkpoint, restore};
use super::churn::Churn;
use super::disk::Disk;
use super::trees;
use crate::{Artifact, CheckpointBackend, Sandbox, SandboxId};

/// How many act at once.
const WORKERS: usize = 8;
/// In the environment of the process that is killed: where the disk is mounted, the backend's store, a number.
const POOL: &str = "CRAB_STRESS_POOL";
const STORE: &str = "CRAB_STRESS_STORE";
const ROUND: &str = "CRAB_STRESS_ROUND";
/// What that process prints when it begins to act.
const ACTS: &str = "recovered, and acts from now on";

/// The sandboxes, and how many versions each has at most.
pub struct Stress {
    /// The sandboxes. Calls for one must come one at a time.
    pub sandboxes: Vec<Sandbox>,
    /// How many versions.
    pub versions: usize,
}

impl Stress {
    /// 64 sandboxes of 10 versions each, with roots in `boxes` of a disk. Where `CRAB_IN_VM` says that the machine is
    /// slow, 8 of 4 each, unless `CRAB_STRESS` is `full`.
    #[must_use]
    pub fn on(pool: &Path) -> Self {
        let small = std::env::var_os("CRAB_IN_VM").is_some() && std::env::var("CRAB_STRESS").as_deref() != Ok("full");
        let (sandboxes, versions) = if small { (8, 4) } else { (64, 10) };
        let sandbox = |n| {
            let id = SandboxId::new(format!("box-{n}")).unwrap();
            let root = pool.join("boxes").join(id.as_str());
            Sandbox::new(id, root, pool.join("no-cgroup"))
        };
        Self { sandboxes: (0..sandboxes).map(sandbox).collect(), versions }
    }

    /// What the process does that is killed: it acts on all sandboxes for ever.
    pub async fn be_killed(&self, backend: &dyn CheckpointBackend, round: u64) {
        backend.recover().await.expect("recover");
        println!("{ACTS}");
        super::calls::join_all((0..WORKERS).map(|worker| self.work(backend, worker, round))).await;
    }

    /// All of it: versions of all sandboxes, then a process of this test program that is killed so many times, each time
    /// after one `beat` and a little more: of its acts, or, every second time, of its life, in which it may be recovering
    /// still. Nothing leaks, and every version is whole. Blocks while that process works.
    pub async fn outlive(&self, disk: &dyn Disk, pool: &Path, store: &str, kills: u32, beat: Duration) {
        let backend = disk.open();
        for sandbox in &self.sandboxes {
            disk.make_root(&sandbox.id);
        }
        for value in 1..=self.versions {
            self.checkpoint_all(&*backend, value as u64).await;
        }
        assert_eq!(self.check(disk, &*backend).await, self.sandboxes.len() * self.versions);
        drop(backend);
        for round in 1..=kills {
            let mut process = Process::start(pool, store, round);
            if round % 2 == 1 {
                process.wait_until_it_acts();
            }
            std::thread::sleep(beat + beat * round * 3 / 10);
            process.kill();
            let backend = disk.open();
            backend.recover().await.expect("recover");
            self.check(disk, &*backend).await;
        }
        self.end(disk, &*disk.open()).await;
    }

    /// Makes one version of each sandbox, of this value.
    async fn checkpoint_all(&self, backend: &dyn CheckpointBackend, value: u64) {
        let name = format!("v{value}");
        let all = self.sandboxes.iter().map(|sandbox| {
            trees::set(&sandbox.root, value);
            checkpoint(backend, sandbox, &name)
        });
        for done in super::calls::join_all(all).await {
            done.expect("checkpoint");
        }
    }

    /// One random act on one sandbox: a version, a restore, a removal, a capture that is dropped. `number` is one that
    /// never comes again.
    async fn act(&self, backend: &dyn CheckpointBackend, sandbox: &Sandbox, random: &mut Churn, number: u64) {
        let versions = backend.list(&sandbox.id).await.expect("list");
        let any = versions.get(usize::from(random.byte()) % versions.len().max(1));
        match (random.byte() % 8, any) {
            (act @ 0..=2, Some(artifact)) => {
                // A kill in the middle of a change leaves a mixture, which is never captured.
                let value = trees::get(&sandbox.root).filter(|_| act < 2);
                let keep = value.map(|value| format!("v{value}-kept-{number}"));
                let operation = format!("op-{number}");
                restore(backend, artifact, sandbox, &operation, keep.as_deref()).await.expect("restore");
                assert_eq!(trees::get(&sandbox.root), Some(value_of(artifact)));
            }
            (3, Some(artifact)) => backend.remove(artifact).await.expect("remove"),
            (_, Some(artifact)) if versions.len() >= self.versions => backend.remove(artifact).await.expect("remove"),
            (4, _) => drop(capture(backend, sandbox, &format!("v{number}-dropped")).await.expect("capture")),
            _ => {
                trees::set(&sandbox.root, number);
                checkpoint(backend, sandbox, &format!("v{number}")).await.expect("checkpoint");
            }
        }
    }

    /// Acts on its share of the sandboxes for ever.
    async fn work(&self, backend: &dyn CheckpointBackend, worker: usize, round: u64) {
        let mine: Vec<_> = self.sandboxes.iter().skip(worker).step_by(WORKERS).collect();
        let mut random = Churn::new(round * 100 + worker as u64 + 1);
        for number in 0.. {
            let sandbox = mine[usize::from(random.byte()) % mine.len()];
            let number = (round * 1_000_000 + number) * WORKERS as u64 + worker as u64;
            self.act(backend, sandbox, &mut random, number).await;
        }
    }

    /// Nothing is on the disk but the roots and what is listed, and each version holds what its name says. Gives how
    /// many versions there are.
    async fn check(&self, disk: &dyn Disk, backend: &dyn CheckpointBackend) -> usize {
        let mut all = Vec::new();
        for sandbox in &self.sandboxes {
            for artifact in backend.list(&sandbox.id).await.expect("list") {
                backend.verify(&artifact).await.expect("it is whole");
                all.push(artifact);
            }
        }
        for (artifact, found) in all.iter().zip(disk.read(backend, &all)) {
            assert_eq!(found, Some(value_of(artifact)), "{} of {}", artifact.id, artifact.sandbox);
        }
        let roots = self.sandboxes.iter().map(|sandbox| sandbox.id.clone()).collect();
        assert_eq!(disk.strays(&roots, &all), Vec::<String>::new());
        all.len()
    }

    /// Takes everything away.
    async fn end(&self, disk: &dyn Disk, backend: &dyn CheckpointBackend) {
        for sandbox in &self.sandboxes {
            for artifact in backend.list(&sandbox.id).await.expect("list") {
                backend.remove(&artifact).await.expect("remove");
            }
            disk.delete_root(&sandbox.id).await;
        }
        backend.recover().await.expect("recover");
        assert_eq!(disk.strays(&Default::default(), &[]), Vec::<String>::new());
    }
}

/// The value that an artifact of this name holds.
fn value_of(artifact: &Artifact) -> u64 {
    let name = artifact.id.as_str();
    name.strip_prefix('v').and_then(|rest| rest.split('-').next()).and_then(|value| value.parse().ok()).unwrap()
}

/// What the process that is killed is told.
pub struct Orders {
    /// Where the disk is mounted.
    pub pool: PathBuf,
    /// The backend's store, as it names it.
    pub store: String,
    /// A number that no other such process has.
    pub round: u64,
}

impl Orders {
    /// `None` in a process that is not to be killed.
    #[must_use]
    pub fn here() -> Option<Self> {
        let round = std::env::var(ROUND).ok()?.parse().ok()?;
        Some(Self { pool: std::env::var_os(POOL)?.into(), store: std::env::var(STORE).ok()?, round })
    }
}

/// The test `the_process_that_is_killed` of the running test program, as a process of its own.
struct Process(Child);

impl Process {
    fn start(pool: &Path, store: &str, round: u32) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "the_process_that_is_killed", "--nocapture"])
            .env(POOL, pool)
            .env(STORE, store)
            .env(ROUND, round.to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn();
        Self(child.unwrap())
    }

    /// Waits until it has recovered.
    fn wait_until_it_acts(&mut self) {
        let said = BufReader::new(self.0.stdout.as_mut().unwrap()).lines();
        assert!(said.map_while(Result::ok).any(|line| line.contains(ACTS)), "it ended before it acted");
    }

    /// Kills it, wherever it is. One that has ended is a failure.
    fn kill(mut self) {
        let ended = self.0.try_wait().unwrap();
        assert!(ended.is_none(), "it failed before it was killed: {ended:?}");
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}
