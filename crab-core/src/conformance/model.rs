//! Any sequence of changes, captures, restores, forks and removals does what the simplest model of it does.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::{BackendFixture, artifact_name, checkpoint, operation, start_if_files, try_capture, try_restore};
use crate::{Artifact, Domain, ErrorKind, NoCut, SandboxId};

/// One act. Sandboxes and versions are picked by numbers, modulo how many there are; what cannot be picked is left out.
#[derive(Clone, Copy, Debug)]
pub enum Act {
    /// Change a sandbox's state.
    Set {
        /// Which sandbox.
        sandbox: usize,
        /// To what.
        value: u64,
    },
    /// Make a version of a sandbox.
    Checkpoint(usize),
    /// Capture a sandbox, and give that up.
    Discard(usize),
    /// Bring a sandbox to a version, of its own or of another.
    Restore {
        /// Which sandbox.
        sandbox: usize,
        /// Which version.
        version: usize,
        /// Whether the replaced state becomes a version, where the backend offers that.
        keep: bool,
    },
    /// Make another sandbox from a version.
    Fork(usize),
    /// Remove a version.
    Remove(usize),
    /// Go on as another process would.
    Reopen,
}

/// Sequences of acts.
pub fn acts() -> impl Strategy<Value = Vec<Act>> {
    let any = proptest::prelude::any::<usize>;
    let act = prop_oneof![
        5 => (any(), 0..500_u64).prop_map(|(sandbox, value)| Act::Set { sandbox, value }),
        4 => any().prop_map(Act::Checkpoint),
        1 => any().prop_map(Act::Discard),
        3 => (any(), any(), proptest::bool::ANY).prop_map(|(sandbox, version, keep)| Act::Restore { sandbox, version, keep }),
        1 => any().prop_map(Act::Fork),
        2 => any().prop_map(Act::Remove),
        1 => Just(Act::Reopen),
    ];
    prop::collection::vec(act, 1..30)
}

struct Model<'a> {
    f: &'a dyn BackendFixture,
    boxes: Vec<(SandboxId, u64)>,
    versions: Vec<(Artifact, u64)>,
    removed: Vec<Artifact>,
}

/// Plays the acts, and takes everything away at the end.
///
/// # Panics
/// Where the backend does something else than the model.
pub async fn play(f: &dyn BackendFixture, acts: &[Act]) {
    let first = f.sandbox().await;
    f.set(&first, 0).await;
    let mut model = Model { f, boxes: vec![(first, 0)], versions: Vec::new(), removed: Vec::new() };
    for act in acts {
        model.act(*act).await;
    }
    model.check_all().await;
    model.end(acts.len().is_multiple_of(2)).await;
}

impl Model<'_> {
    async fn act(&mut self, act: Act) {
        let f = self.f;
        let picked = match act {
            Act::Set { sandbox, .. }
            | Act::Checkpoint(sandbox)
            | Act::Discard(sandbox)
            | Act::Restore { sandbox, .. } => sandbox % self.boxes.len(),
            _ => 0,
        };
        let id = self.boxes[picked].0.clone();
        match act {
            Act::Set { value, .. } => {
                f.set(&id, value).await;
                self.boxes[picked].1 = value;
            }
            Act::Checkpoint(_) => {
                let artifact = checkpoint(f, &id).await;
                self.versions.push((artifact, self.boxes[picked].1));
            }
            Act::Discard(_) => {
                let captured = try_capture(f, &id, artifact_name(), &mut NoCut).await.expect("capture");
                captured.discard().await.expect("discard");
            }
            Act::Restore { version, keep, .. } => {
                let Some((artifact, value)) = self.pick(version) else { return };
                let keep = (keep && f.backend().capabilities().keeps_replaced).then(artifact_name);
                f.host().kill(&id).await.expect("kill");
                let restored = try_restore(f, &id, &artifact, &operation(), keep.clone()).await.expect("restore");
                start_if_files(f, &id).await;
                let old = std::mem::replace(&mut self.boxes[picked].1, value);
                assert_eq!(restored.replaced.as_ref().map(|replaced| &replaced.id), keep.as_ref());
                self.versions.extend(restored.replaced.map(|replaced| (replaced, old)));
            }
            Act::Fork(version) => {
                let Some((artifact, value)) = self.pick(version) else { return };
                let Some(fork) = f.fork_target(&artifact.sandbox).await else { return };
                try_restore(f, &fork, &artifact, &operation(), None).await.expect("fork");
                start_if_files(f, &fork).await;
                self.boxes.push((fork, value));
            }
            Act::Remove(version) => {
                if self.versions.is_empty() {
                    return;
                }
                let (artifact, _) = self.versions.swap_remove(version % self.versions.len());
                f.backend().remove(&artifact).await.expect("remove");
                let error = f.backend().verify(&artifact).await.expect_err("it is gone");
                assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
                self.removed.push(artifact);
            }
            Act::Reopen => {
                f.reopen().await;
                f.backend().recover().await.expect("recover");
                self.check_all().await;
            }
        }
        self.check(picked).await;
    }

    fn pick(&self, version: usize) -> Option<(Artifact, u64)> {
        (!self.versions.is_empty()).then(|| self.versions[version % self.versions.len()].clone())
    }

    async fn check(&self, at: usize) {
        let (id, value) = &self.boxes[at];
        assert_eq!(self.f.get(id).await, Some(*value), "{id}");
        let expected: BTreeSet<_> =
            self.versions.iter().filter(|(a, _)| a.sandbox == *id).map(|(a, _)| a.id.clone()).collect();
        let listed = self.f.backend().list(id).await.expect("list").into_iter().map(|a| a.id).collect::<Vec<_>>();
        assert_eq!(listed.len(), expected.len(), "{listed:?}");
        assert_eq!(listed.into_iter().collect::<BTreeSet<_>>(), expected);
    }

    async fn check_all(&self) {
        for at in 0..self.boxes.len() {
            self.check(at).await;
        }
        for (artifact, _) in &self.versions {
            self.f.backend().verify(artifact).await.expect("it is whole");
        }
        for artifact in &self.removed {
            assert_eq!(self.f.backend().verify(artifact).await.unwrap_err().kind(), ErrorKind::NotFound);
        }
        let artifacts: Vec<Artifact> = self.versions.iter().map(|(artifact, _)| artifact.clone()).collect();
        if let Some(found) = self.f.read(&artifacts) {
            assert_eq!(found, self.versions.iter().map(|(_, value)| Some(*value)).collect::<Vec<_>>());
        }
        let sandboxes = self.boxes.iter().map(|(id, _)| id.clone()).collect();
        assert_eq!(self.f.strays(&sandboxes, &artifacts), Vec::<String>::new());
    }

    /// Everything goes, in one order or the other.
    async fn end(self, versions_first: bool) {
        let f = self.f;
        let remove = async || {
            for (artifact, _) in &self.versions {
                f.backend().verify(artifact).await.expect("it is whole");
                f.backend().remove(artifact).await.expect("remove");
            }
        };
        if versions_first {
            remove().await;
        }
        for (id, value) in &self.boxes {
            assert_eq!(f.get(id).await, Some(*value), "{id}");
            f.host().kill(id).await.expect("kill");
            f.delete(id).await;
        }
        if !versions_first {
            remove().await;
        }
        f.reopen().await;
        f.backend().recover().await.expect("recover");
        if f.backend().domain() == Domain::Filesystem {
            assert_eq!(f.strays(&BTreeSet::new(), &[]), Vec::<String>::new(), "nothing is left");
        }
    }
}
