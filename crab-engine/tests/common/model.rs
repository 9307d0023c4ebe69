//! A simple model of what an engine must do, and a run of random steps against both. Whatever world the engine works on
//! implements [`Real`].

use std::collections::{BTreeMap, BTreeSet};

use async_trait::async_trait;
use crab_core::{Boundary, ErrorKind, Gate, OperationId, SandboxId, Turn, TurnNumber, Verdict, VersionId};
use crab_engine::retention::Retention;
use crab_engine::{Engine, ForkOptions, RestoreOptions, Select};

/// What a sandbox holds, as far as the model looks: some files, and a value in the memory of one process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    pub files: BTreeMap<u8, u32>,
    pub memory: Option<u32>,
}

/// A world with an engine in it.
#[async_trait]
pub trait Real: Send {
    fn engine(&self) -> &Engine;
    /// A task writes a file.
    async fn write(&mut self, id: &SandboxId, file: u8, value: u32);
    /// A task takes a value into its memory.
    async fn remember(&mut self, id: &SandboxId, value: u32);
    /// What the sandbox holds. Its files where it is dead.
    async fn state(&mut self, id: &SandboxId) -> State;
    /// All tasks die.
    async fn crash(&mut self, id: &SandboxId);
    /// Makes a stopped sandbox to fork into.
    async fn prepare(&mut self, id: &SandboxId);
    /// The engine ends and another takes its store. The sandboxes live on.
    async fn restart(&mut self);
    /// What must hold besides.
    async fn check(&mut self, context: &str);
    /// Whether a turn that changed nothing is always seen to have changed nothing.
    fn is_exact(&self) -> bool;
}

#[derive(Clone, Copy, Debug)]
pub enum Step {
    Write { sandbox: usize, file: u8, value: u32 },
    Remember { sandbox: usize, value: u32 },
    Turn { sandbox: usize },
    Checkpoint { sandbox: usize },
    Crash { sandbox: usize },
    Restore { sandbox: usize, version: Option<usize> },
    Fork { sandbox: usize, version: usize },
    Pin { sandbox: usize, version: usize, pinned: bool },
    Remove { sandbox: usize, version: usize },
    Prune { last: usize },
    Restart,
}

#[derive(Clone, Debug, Default)]
struct Modelled {
    now: State,
    lives: bool,
    versions: BTreeMap<u64, State>,
    pinned: BTreeSet<u64>,
    standing: Option<u64>,
    /// The next version's number.
    next: u64,
    /// What happened since the standing version is known.
    based: bool,
    turn: u64,
}

/// The most sandboxes at once.
const SANDBOXES: usize = 4;

pub struct Run<R> {
    pub real: R,
    boxes: Vec<(SandboxId, Modelled)>,
    operations: u64,
}

impl<R: Real> Run<R> {
    /// Begins with one attached, live, empty sandbox.
    pub fn new(real: R, first: SandboxId) -> Self {
        let modelled = Modelled { lives: true, next: 1, ..Modelled::default() };
        Self { real, boxes: vec![(first, modelled)], operations: 0 }
    }

    pub async fn step(&mut self, step: Step, context: &str) {
        match step {
            Step::Write { sandbox, file, value } => {
                let (id, modelled) = self.pick(sandbox);
                if modelled.lives {
                    modelled.now.files.insert(file, value);
                    self.real.write(&id, file, value).await;
                }
            }
            Step::Remember { sandbox, value } => {
                let (id, modelled) = self.pick(sandbox);
                if modelled.lives {
                    modelled.now.memory = Some(value);
                    self.real.remember(&id, value).await;
                }
            }
            Step::Turn { sandbox } => self.turn(sandbox, context).await,
            Step::Checkpoint { sandbox } => {
                let (id, modelled) = self.pick(sandbox);
                let lives = modelled.lives;
                match self.real.engine().checkpoint(&id).await {
                    Ok(manifest) => self.covered(sandbox, manifest.version.0, context),
                    Err(error) => assert!(!lives, "{context}: {error}"),
                }
            }
            Step::Crash { sandbox } => {
                let (id, modelled) = self.pick(sandbox);
                modelled.lives = false;
                modelled.now.memory = None;
                self.real.crash(&id).await;
            }
            Step::Restore { sandbox, version } => self.restore(sandbox, version, context).await,
            Step::Fork { sandbox, version } => self.fork(sandbox, version, context).await,
            Step::Pin { sandbox, version, pinned } => {
                let (id, modelled) = self.pick(sandbox);
                let Some(version) = nth(&modelled.versions, version) else { return };
                if pinned {
                    modelled.pinned.insert(version);
                    self.real.engine().pin(&id, VersionId(version)).await.unwrap();
                } else {
                    modelled.pinned.remove(&version);
                    self.real.engine().unpin(&id, VersionId(version)).await.unwrap();
                }
            }
            Step::Remove { sandbox, version } => {
                let (id, modelled) = self.pick(sandbox);
                let Some(version) = nth(&modelled.versions, version) else { return };
                let held = modelled.standing == Some(version) || modelled.pinned.contains(&version);
                match self.real.engine().remove(&id, VersionId(version)).await {
                    Ok(()) => {
                        assert!(!held, "{context}: v{version} was held and is gone");
                        self.pick(sandbox).1.versions.remove(&version);
                    }
                    Err(error) => assert!(held && error.kind() == ErrorKind::Busy, "{context}: {error}"),
                }
            }
            Step::Prune { last } => {
                let report = self.real.engine().prune(&Retention::keep_all().last(last)).await.unwrap();
                assert!(report.failed.is_empty(), "{context}: {:?}", report.failed);
                for (_, modelled) in &mut self.boxes {
                    let newest: BTreeSet<u64> = modelled.versions.keys().rev().take(last).copied().collect();
                    let (standing, pinned) = (modelled.standing, modelled.pinned.clone());
                    let kept = |v: &u64| newest.contains(v) || pinned.contains(v) || standing == Some(*v);
                    modelled.versions.retain(|version, _| kept(version));
                }
            }
            Step::Restart => {
                self.real.restart().await;
                let report = self.real.engine().opened().clone();
                assert!(report.damaged.is_empty() && report.unfinished.is_empty(), "{context}: {report:?}");
                for (id, modelled) in &mut self.boxes {
                    modelled.based = false;
                    assert_eq!(report.attached.contains(id), modelled.lives, "{context}: {id}");
                    let died = !modelled.lives && !modelled.versions.is_empty();
                    assert_eq!(report.died.contains(id), died, "{context}: {id}");
                }
            }
        }
        self.compare(context).await;
    }

    fn pick(&mut self, sandbox: usize) -> (SandboxId, &mut Modelled) {
        let at = sandbox % self.boxes.len();
        let (id, modelled) = &mut self.boxes[at];
        (id.clone(), modelled)
    }

    async fn turn(&mut self, sandbox: usize, context: &str) {
        let (id, modelled) = self.pick(sandbox);
        modelled.turn += 1;
        let (turn, lives) = (modelled.turn, modelled.lives);
        let (gate, mut hold) = Gate::new();
        self.real.engine().turn(Boundary { turn: Turn::new(id, TurnNumber(turn)), gate }).await;
        hold.answer_waiting();
        match hold.verdict().await {
            Verdict::Durable(version) => self.covered(sandbox, version.0, context),
            Verdict::Failed(error) => assert!(!lives, "{context}: {error}"),
            Verdict::Unprotected(error) => panic!("{context}: {error}"),
        }
    }

    /// A turn or call is covered by this version: the standing one, or a new one that stands now.
    fn covered(&mut self, sandbox: usize, version: u64, context: &str) {
        let exact = self.real.is_exact();
        let (_, modelled) = self.pick(sandbox);
        let unchanged =
            modelled.standing.filter(|standing| modelled.based && modelled.versions[standing] == modelled.now);
        if Some(version) == unchanged {
            return;
        }
        assert!(unchanged.is_none() || !exact, "{context}: nothing had changed, and v{version} was made");
        assert_eq!(version, modelled.next, "{context}: the number of the new version");
        assert!(modelled.lives, "{context}: a dead sandbox made a version");
        modelled.next += 1;
        modelled.versions.insert(version, modelled.now.clone());
        modelled.standing = Some(version);
        modelled.based = true;
    }

    async fn restore(&mut self, sandbox: usize, version: Option<usize>, context: &str) {
        self.operations += 1;
        let operation = OperationId::new(format!("restore-{}", self.operations)).unwrap();
        let (id, modelled) = self.pick(sandbox);
        let (select, wanted) = match version {
            Some(version) => match nth(&modelled.versions, version) {
                Some(version) => (Select::Version(VersionId(version)), Some(version)),
                None => (Select::Version(VersionId(77)), None),
            },
            None => (Select::Latest, modelled.standing),
        };
        let options = RestoreOptions { operation: Some(operation), ..RestoreOptions::default() };
        let restored = self.real.engine().restore(&id, select, options.clone()).await;
        let (_, modelled) = self.pick(sandbox);
        let Some(wanted) = wanted else {
            assert_eq!(restored.unwrap_err().kind(), ErrorKind::NotFound, "{context}");
            return;
        };
        let report = restored.unwrap_or_else(|error| panic!("{context}: {error}"));
        assert_eq!(report.version, VersionId(wanted), "{context}");
        // The files that were there are a version of their own, without processes.
        assert_eq!(report.replaced, Some(VersionId(modelled.next)), "{context}");
        let replaced = State { files: modelled.now.files.clone(), memory: None };
        modelled.versions.insert(modelled.next, replaced);
        modelled.next += 1;
        modelled.now = modelled.versions[&wanted].clone();
        modelled.standing = Some(wanted);
        (modelled.lives, modelled.based) = (true, false);
        let again = self.real.engine().restore(&id, select, options).await;
        assert_eq!(again.unwrap(), report, "{context}: the same operation again");
    }

    async fn fork(&mut self, sandbox: usize, version: usize, context: &str) {
        if self.boxes.len() >= SANDBOXES {
            return;
        }
        let (from, modelled) = self.pick(sandbox);
        let Some(version) = nth(&modelled.versions, version) else { return };
        let state = modelled.versions[&version].clone();
        self.operations += 1;
        let into = SandboxId::new(format!("{}-{}", self.boxes[0].0, self.operations)).unwrap();
        self.real.prepare(&into).await;
        let report = self.real.engine().fork(&from, VersionId(version), &into, ForkOptions::default()).await;
        let report = report.unwrap_or_else(|error| panic!("{context}: {error}"));
        assert_eq!(report.version, VersionId(1), "{context}");
        let versions = BTreeMap::from([(1, state.clone())]);
        let turn = report.turn.0;
        let fork =
            Modelled { now: state, lives: true, versions, standing: Some(1), next: 2, turn, ..Modelled::default() };
        self.boxes.push((into, fork));
    }

    /// The engine knows the versions that it must, and the sandboxes hold what they must.
    async fn compare(&mut self, context: &str) {
        for (id, modelled) in &self.boxes {
            let known: Vec<u64> = self.real.engine().versions(id).iter().map(|manifest| manifest.version.0).collect();
            let wanted: Vec<u64> = modelled.versions.keys().copied().collect();
            assert_eq!(known, wanted, "{context}: {id}");
            let summaries = self.real.engine().sandboxes();
            let standing = summaries.iter().find(|summary| summary.id == *id).and_then(|summary| summary.standing);
            assert_eq!(standing.map(|version| version.0), modelled.standing, "{context}: {id}");
            assert_eq!(self.real.state(id).await, modelled.now, "{context}: {id}");
        }
        self.real.check(context).await;
    }

    /// Every version of every sandbox brings back what it must.
    pub async fn finish(&mut self, context: &str) {
        for at in 0..self.boxes.len() {
            let versions: Vec<u64> = self.boxes[at].1.versions.keys().copied().collect();
            for (number, version) in versions.iter().enumerate() {
                let context = format!("{context}: {} v{version} at the end", self.boxes[at].0);
                let before = self.boxes[at].1.versions.len();
                self.step(Step::Restore { sandbox: at, version: Some(number) }, &context).await;
                assert_eq!(self.boxes[at].1.versions.len(), before + 1);
            }
        }
    }
}

fn nth(versions: &BTreeMap<u64, State>, at: usize) -> Option<u64> {
    versions.keys().nth(at % versions.len().max(1)).copied()
}
