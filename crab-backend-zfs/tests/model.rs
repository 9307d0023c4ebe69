//! Any sequence of writes, captures, restores and removals does what the simplest model of it does.
#![allow(clippy::unwrap_used, reason = "these are tests")]

mod support;

use std::collections::BTreeMap;
use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

use crab_backend_zfs::ZfsBackend;
use crab_core::{Artifact, CheckpointBackend, ErrorKind, Sandbox};
use proptest::prelude::*;
use support::{Pool, capture, checkpoint, files, restore};

#[derive(Clone, Debug)]
enum Act {
    Write { file: u8, value: u8, size: u16 },
    Delete { file: u8 },
    Capture,
    Discard,
    Restore { version: usize, keep: bool },
    Fork { version: usize },
    Remove { version: usize },
    Reopen,
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        4 => (0..4_u8, any::<u8>(), 0..9000_u16).prop_map(|(file, value, size)| Act::Write { file, value, size }),
        1 => (0..4_u8).prop_map(|file| Act::Delete { file }),
        3 => Just(Act::Capture),
        1 => Just(Act::Discard),
        3 => (any::<usize>(), any::<bool>()).prop_map(|(version, keep)| Act::Restore { version, keep }),
        1 => any::<usize>().prop_map(|version| Act::Fork { version }),
        2 => any::<usize>().prop_map(|version| Act::Remove { version }),
        1 => Just(Act::Reopen),
    ];
    prop::collection::vec(act, 1..25)
}

type Files = BTreeMap<String, Vec<u8>>;

#[derive(Default)]
struct Model {
    root: Files,
    versions: BTreeMap<String, (Artifact, Files)>,
    removed: Vec<Artifact>,
    forks: Vec<(Sandbox, Files)>,
}

impl Model {
    fn pick(&self, version: usize) -> Option<String> {
        let count = self.versions.len();
        (count > 0).then(|| self.versions.keys().nth(version % count).unwrap().clone())
    }

    async fn check(&self, backend: &ZfsBackend, sandbox: &Sandbox) {
        assert_eq!(files(&sandbox.root), self.root);
        let mut listed: Vec<_> =
            backend.list(&sandbox.id).await.unwrap().into_iter().map(|a| a.id.as_str().to_owned()).collect();
        listed.sort();
        assert_eq!(listed, self.versions.keys().cloned().collect::<Vec<_>>());
        for (artifact, _) in self.versions.values() {
            backend.verify(artifact).await.unwrap();
        }
        for artifact in &self.removed {
            assert_eq!(backend.verify(artifact).await.unwrap_err().kind(), ErrorKind::NotFound);
        }
    }

    /// At the end all versions are looked into, and everything goes.
    async fn end(self, pool: &Pool, backend: &ZfsBackend, sandbox: &Sandbox) {
        for (artifact, content) in self.versions.values() {
            // Others stand on a dataset that is mounted nowhere.
            if let Some(tree) = backend.tree(artifact) {
                assert_eq!(files(&tree), *content);
            }
        }
        let mut doomed = self.forks;
        doomed.push((sandbox.clone(), self.root));
        for (sandbox, content) in doomed {
            assert_eq!(files(&sandbox.root), content);
            backend.delete_root(&sandbox.id, &sandbox.root).await.unwrap();
            assert!(!sandbox.root.exists());
        }
        for (artifact, _) in self.versions.values() {
            backend.verify(artifact).await.unwrap();
            backend.remove(artifact).await.unwrap();
        }
        assert_eq!(pool.all(), Vec::<String>::new(), "nothing is left");
    }
}

async fn play(pool: &Pool, name: &str, acts: &[Act]) {
    let (mut backend, sandbox) = (pool.backend(), pool.sandbox(name));
    let mut model = Model::default();
    for (n, act) in acts.iter().enumerate() {
        let id = format!("v{n}");
        match act {
            Act::Write { file, value, size } => {
                let content = vec![*value; usize::from(*size)];
                fs::write(sandbox.root.join(file.to_string()), &content).unwrap();
                model.root.insert(file.to_string(), content);
            }
            Act::Delete { file } => {
                let known = model.root.remove(&file.to_string()).is_some();
                assert_eq!(fs::remove_file(sandbox.root.join(file.to_string())).is_ok(), known);
            }
            Act::Capture => {
                let artifact = checkpoint(&backend, &sandbox, &id).await.unwrap();
                model.versions.insert(id, (artifact, model.root.clone()));
            }
            Act::Discard => capture(&backend, &sandbox, &id).await.unwrap().discard().await.unwrap(),
            Act::Restore { version, keep } => {
                let Some(version) = model.pick(*version) else { continue };
                let (artifact, content) = model.versions[&version].clone();
                let keep = keep.then_some(id.as_str());
                let restored = restore(&backend, &artifact, &sandbox, &format!("op{n}"), keep).await.unwrap();
                let old = std::mem::replace(&mut model.root, content);
                assert_eq!(restored.replaced.is_some(), keep.is_some());
                if let Some(artifact) = restored.replaced {
                    model.versions.insert(id, (artifact, old));
                }
            }
            Act::Fork { version } => {
                let Some(version) = model.pick(*version) else { continue };
                let (artifact, content) = model.versions[&version].clone();
                let fork = pool.rootless(&format!("{name}-fork-{n}"));
                restore(&backend, &artifact, &fork, "fork", None).await.unwrap();
                model.forks.push((fork, content));
            }
            Act::Remove { version } => {
                let Some(version) = model.pick(*version) else { continue };
                let (artifact, _) = model.versions.remove(&version).unwrap();
                backend.remove(&artifact).await.unwrap();
                model.removed.push(artifact);
            }
            Act::Reopen => {
                backend = pool.backend();
                backend.recover().await.unwrap();
            }
        }
        model.check(&backend, &sandbox).await;
    }
    model.end(pool, &backend, &sandbox).await;
}

#[test]
fn any_sequence_does_what_the_model_does() {
    let Some(pool) = Pool::new() else { return };
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let next = AtomicU64::new(0);
    proptest!(ProptestConfig { cases: 4, failure_persistence: None, ..ProptestConfig::default() }, |(acts in acts())| {
        let name = format!("box-{}", next.fetch_add(1, Ordering::Relaxed));
        runtime.block_on(play(&pool, &name, &acts));
    });
}
