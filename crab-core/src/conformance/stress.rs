//! Many sandboxes on one disk, worked on by a process that is killed again and again.

use std::path::Path;
use std::process::{Child, Command, Stdio};

use super::calls::{capture, checkpoint, restore};
use super::churn::Churn;
use super::disk::Disk;
use super::trees;
use crate::{Artifact, CheckpointBackend, Sandbox};

/// The sandboxes, and how many versions each has at most.
pub struct Stress {
    /// The sandboxes. Calls for one must come one at a time.
    pub sandboxes: Vec<Sandbox>,
    /// How many versions.
    pub versions: usize,
}

impl Stress {
    /// Makes one version of each sandbox, of this value.
    pub async fn checkpoint_all(&self, backend: &dyn CheckpointBackend, value: u64) {
        let name = format!("v{value}");
        let all = self.sandboxes.iter().map(|sandbox| {
            trees::set(&sandbox.root, value);
            checkpoint(backend, sandbox, &name)
        });
        for done in super::join_all(all).await {
            done.expect("checkpoint");
        }
    }

    /// One random act on one sandbox: a version, a restore, a removal, a capture that is dropped. `number` is one that
    /// never comes again.
    pub async fn act(&self, backend: &dyn CheckpointBackend, sandbox: &Sandbox, random: &mut Churn, number: u64) {
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
    pub async fn work(&self, backend: &dyn CheckpointBackend, worker: usize, workers: usize, round: u64) {
        let mine: Vec<_> = self.sandboxes.iter().skip(worker).step_by(workers).collect();
        let mut random = Churn::new(round * 100 + worker as u64 + 1);
        for number in 0.. {
            let sandbox = mine[usize::from(random.byte()) % mine.len()];
            let number = (round * 1_000_000 + number) * workers as u64 + worker as u64;
            self.act(backend, sandbox, &mut random, number).await;
        }
    }

    /// Nothing is on the disk but the roots and what is listed, and each version holds what its name says. Gives how
    /// many versions there are.
    pub async fn check(&self, disk: &dyn Disk, backend: &dyn CheckpointBackend) -> usize {
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
    pub async fn end(&self, disk: &dyn Disk, backend: &dyn CheckpointBackend) {
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

/// One test of the running test program, as a process of its own.
pub struct Process(Child);

impl Process {
    /// Starts it, with what it needs to know in its environment.
    #[must_use]
    pub fn start(test: &str, environment: &[(&str, &Path)]) -> Self {
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", test, "--nocapture"])
            .envs(environment.iter().copied())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .spawn();
        Self(child.unwrap())
    }

    /// Kills it, wherever it is.
    ///
    /// # Panics
    /// Where it has ended, which is a failure.
    pub fn kill(mut self) {
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
