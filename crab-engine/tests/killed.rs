//! SIGKILL of a process that embeds the engine, at any effect; then another process opens the store.
//!
//! A child works on a world in a directory until it reaches a step at which it kills itself. It notes what was promised
//! to it: versions that a gate opened for, with what the sandbox held, and restores that returned. The parent then
//! opens the store, checks every promise and the invariants, and lets the next child go on from there.
//!
//! Each step is met by its name too, so that none is left to chance. `CRAB_KILLS` sets the number of kills, 500 by default.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[path = "common/dir_world.rs"]
mod dir_world;
#[allow(dead_code, reason = "the other tests use the rest")]
#[path = "common/invariants.rs"]
mod invariants;

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crab_core::{
    Boundary, CheckpointBackend, Condition, Domain, Gate, Half, Label, OperationId, SandboxId, Turn, TurnNumber,
    Verdict, VersionId,
};
use crab_engine::retention::Retention;
use crab_engine::{Engine, ForkOptions, RestoreOptions, Select};
use dir_world::{Contents, DirWorld};
use serde::{Deserialize, Serialize};

impl invariants::Observed for DirWorld {
    fn condition_of(&self, id: &SandboxId) -> Condition {
        self.condition_of(id)
    }
    fn artifacts(&self) -> Vec<invariants::Key> {
        self.artifacts()
    }
    fn backend(&self, domain: Domain) -> Arc<dyn CheckpointBackend> {
        self.backend(domain)
    }
}

#[derive(Debug, Serialize, Deserialize)]
enum Note {
    /// A gate opened with this version while the sandbox held this.
    Durable { sandbox: SandboxId, version: VersionId, files: Contents, processes: Contents },
    /// A removal was asked for: from now on the version may be gone.
    Removing { sandbox: SandboxId, version: VersionId },
    /// A removal returned: the version is gone.
    Removed { sandbox: SandboxId, version: VersionId },
    /// A pin returned: from now on the version stays, and stays pinned.
    Pinned { sandbox: SandboxId, version: VersionId },
    /// A fork is to be forgotten: from now on it and its versions may be gone.
    Forgetting { sandbox: SandboxId },
    /// A restore returned.
    Restored { sandbox: SandboxId, operation: OperationId, version: VersionId },
}

struct Random(u64);

impl Random {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

struct Paths {
    world: PathBuf,
    store: PathBuf,
    notes: PathBuf,
}

impl Paths {
    fn new(root: &Path) -> Self {
        Self { world: root.join("world"), store: root.join("store"), notes: root.join("notes") }
    }
}

async fn open(world: &DirWorld, store: &Path, hook: dir_world::Hook) -> crab_core::Result<Engine> {
    Engine::builder(store)
        .filesystem(world.backend(Domain::Filesystem))
        .process(world.backend(Domain::Process))
        .host(Arc::new(world.clone()))
        .delta(Arc::new(world.clone()))
        .steps(Arc::new(move |step| {
            hook(step);
            Ok(())
        }))
        .open()
        .await
}

fn main_box() -> SandboxId {
    SandboxId::new("box").unwrap()
}

/// Finishes what a dead engine left, restores what it left stopped, attaches everything.
async fn take_over(engine: &Engine, world: &DirWorld) {
    for unfinished in engine.opened().unfinished.clone() {
        let operation = Some(unfinished.operation.clone());
        match &unfinished.from {
            None => {
                let options = RestoreOptions { operation, ..RestoreOptions::default() };
                engine.restore(&unfinished.sandbox, Select::Latest, options).await.unwrap();
            }
            Some(from) => {
                let options = ForkOptions { operation };
                engine.fork(from, unfinished.version, &unfinished.sandbox, options).await.unwrap();
            }
        }
    }
    for sandbox in engine.sandboxes() {
        if world.condition_of(&sandbox.id) == Condition::Stopped && sandbox.standing.is_some() {
            engine.restore(&sandbox.id, Select::Latest, RestoreOptions::default()).await.unwrap();
        }
        engine.attach(&sandbox.id).await.unwrap();
    }
}

/// The child: dies when a step was reached so often, of any name or of this one.
async fn work(paths: &Paths, seed: u64, kill_at: u64, step: Option<String>) {
    let mut random = Random(seed | 1);
    let count = Arc::new(AtomicU64::new(0));
    let hook: dir_world::Hook = Arc::new(move |reached| {
        let counts = step.as_ref().is_none_or(|step| step == reached);
        if counts && count.fetch_add(1, Ordering::SeqCst) == kill_at {
            let _ = rustix::process::kill_process(rustix::process::getpid(), rustix::process::Signal::KILL);
            loop {
                std::thread::park();
            }
        }
    });
    let world = DirWorld::new(&paths.world, hook.clone());
    let notes = std::fs::OpenOptions::new().create(true).append(true).open(&paths.notes).unwrap();
    let note = |note: Note| {
        let mut line = serde_json::to_string(&note).unwrap();
        line.push('\n');
        (&notes).write_all(line.as_bytes()).unwrap();
    };
    let engine = open(&world, &paths.store, hook).await.unwrap();
    world.create(&main_box(), Condition::Running);
    take_over(&engine, &world).await;
    engine.attach(&main_box()).await.unwrap();
    // What was not reached by then is not reached at all.
    for round in 0..200u64 {
        let boxes: Vec<SandboxId> = engine.sandboxes().into_iter().map(|sandbox| sandbox.id).collect();
        let id = boxes[usize::try_from(random.below(boxes.len() as u64)).unwrap()].clone();
        let versions: Vec<VersionId> = engine.versions(&id).iter().map(|manifest| manifest.version).collect();
        let any = |random: &mut Random| versions[usize::try_from(random.below(versions.len() as u64)).unwrap()];
        match random.below(14) {
            0 if !versions.is_empty() => {
                let operation = OperationId::new(format!("{seed:x}-{round}")).unwrap();
                let options = RestoreOptions { operation: Some(operation.clone()), ..RestoreOptions::default() };
                let report = engine.restore(&id, Select::Version(any(&mut random)), options).await.unwrap();
                note(Note::Restored { sandbox: id, operation, version: report.version });
            }
            1 if !versions.is_empty() => {
                let version = any(&mut random);
                note(Note::Removing { sandbox: id.clone(), version });
                if engine.remove(&id, version).await.is_ok() {
                    note(Note::Removed { sandbox: id, version });
                }
            }
            2 if !versions.is_empty() && boxes.len() < 3 => {
                let into = SandboxId::new(format!("fork-{seed:x}-{round}")).unwrap();
                world.create(&into, Condition::Stopped);
                engine.fork(&id, any(&mut random), &into, ForkOptions::default()).await.unwrap();
            }
            3 if !versions.is_empty() => {
                let version = any(&mut random);
                engine.pin(&id, version).await.unwrap();
                note(Note::Pinned { sandbox: id, version });
            }
            // Somebody ends a fork for good.
            12 if id != main_box() => {
                note(Note::Forgetting { sandbox: id.clone() });
                engine.detach(&id).await.unwrap();
                engine.forget(&id).await.unwrap();
                world.set_condition(&id, Condition::Stopped);
            }
            13 if !versions.is_empty() => {
                engine.detach(&id).await.unwrap();
                engine.label(&id, any(&mut random), &Label::new("best").unwrap()).await.unwrap();
                engine.attach(&id).await.unwrap();
            }
            4 => {
                let retention = Retention::keep_all().last(usize::try_from(random.below(4)).unwrap());
                for removal in engine.prune_plan(&retention).await.removed {
                    note(Note::Removing { sandbox: removal.sandbox, version: removal.version });
                }
                for removal in engine.prune(&retention).await.unwrap().removed {
                    note(Note::Removed { sandbox: removal.sandbox, version: removal.version });
                }
            }
            action => {
                if action % 3 != 0 {
                    let mut files = world.get(&id, Domain::Filesystem);
                    files.insert(format!("/{}", random.below(4)), format!("{seed:x}-{round}"));
                    world.set(&id, Domain::Filesystem, &files);
                }
                if action % 3 != 1 {
                    let mut processes = world.get(&id, Domain::Process);
                    processes.insert("server".to_owned(), format!("{seed:x}-{round}"));
                    world.set(&id, Domain::Process, &processes);
                }
                let (gate, mut hold) = Gate::new();
                hold.answer_waiting();
                engine.turn(Boundary { turn: Turn::new(id.clone(), TurnNumber(round)), gate }).await;
                let Verdict::Durable(version) = hold.verdict().await else { panic!("the turn failed") };
                let (files, processes) = (world.get(&id, Domain::Filesystem), world.get(&id, Domain::Process));
                note(Note::Durable { sandbox: id, version, files, processes });
            }
        }
    }
}

/// Not a test of its own: the process that the test kills.
#[test]
fn child() {
    let (Ok(root), Ok(seed), Ok(kill_at)) =
        (std::env::var("CRAB_KILL_ROOT"), std::env::var("CRAB_KILL_SEED"), std::env::var("CRAB_KILL_AT"))
    else {
        return;
    };
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let step = std::env::var("CRAB_KILL_STEP").ok();
    runtime.block_on(work(&Paths::new(Path::new(&root)), seed.parse().unwrap(), kill_at.parse().unwrap(), step));
}

/// Checks every promise that was made and what must always hold.
async fn check(paths: &Paths, context: &str) {
    let world = DirWorld::new(&paths.world, Arc::new(|_| {}));
    let engine =
        open(&world, &paths.store, Arc::new(|_| {})).await.unwrap_or_else(|error| panic!("{context}: {error}"));
    assert!(engine.opened().damaged.is_empty(), "{context}: {:?}", engine.opened().damaged);
    for sandbox in engine.sandboxes() {
        assert_ne!(world.condition_of(&sandbox.id), Condition::Frozen, "{context}: {}", sandbox.id);
    }
    let unfinished: Vec<OperationId> = engine.opened().unfinished.iter().map(|op| op.operation.clone()).collect();

    let mut promised: BTreeMap<(SandboxId, VersionId), Option<(Contents, Contents)>> = BTreeMap::new();
    let text = std::fs::read_to_string(&paths.notes).unwrap_or_default();
    let notes: Vec<Note> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let (mut gone, mut pinned) = (Vec::new(), Vec::new());
    for note in notes {
        match note {
            Note::Durable { sandbox, version, files, processes } => {
                promised.insert((sandbox, version), Some((files, processes)));
            }
            Note::Removing { sandbox, version } => {
                promised.remove(&(sandbox, version));
            }
            Note::Removed { sandbox, version } => gone.push((sandbox, version)),
            Note::Forgetting { sandbox } => {
                promised.retain(|(of, _), _| *of != sandbox);
                pinned.retain(|(of, _)| *of != sandbox);
            }
            Note::Pinned { sandbox, version } => {
                promised.entry((sandbox.clone(), version)).or_insert(None);
                pinned.push((sandbox, version));
            }
            Note::Restored { sandbox, operation, version } => {
                // Known as done, so asking again returns the report, until newer ones push it out.
                assert!(!unfinished.contains(&operation), "{context}: {operation} had returned");
                promised.entry((sandbox, version)).or_insert(None);
            }
        }
    }
    for ((sandbox, version), state) in &promised {
        let versions = engine.versions(sandbox);
        let found = versions.iter().find(|manifest| manifest.version == *version);
        let manifest = found.unwrap_or_else(|| panic!("{context}: {sandbox} {version} was promised and is gone"));
        let Some((files, processes)) = state else { continue };
        let stored = |half: &Half| world.stored(half.artifact().unwrap());
        assert_eq!(stored(&manifest.filesystem).as_ref(), Some(files), "{context}: {sandbox} {version}");
        assert_eq!(stored(&manifest.process).as_ref(), Some(processes), "{context}: {sandbox} {version}");
    }
    for (sandbox, version) in gone {
        assert!(!engine.versions(&sandbox).iter().any(|m| m.version == version), "{context}: {version} came back");
    }

    for (sandbox, version) in pinned {
        let inventory = engine.inventory(&sandbox).await;
        assert!(inventory.iter().any(|info| info.manifest.version == version && info.pinned), "{context}: {version}");
    }

    take_over(&engine, &world).await;
    for sandbox in engine.sandboxes() {
        if sandbox.standing.is_some() {
            assert_eq!(world.condition_of(&sandbox.id), Condition::Running, "{context}: {}", sandbox.id);
        }
    }
    invariants::assert_sound(&world, &engine, context).await;
    // A restore brings back what stands.
    let id = main_box();
    if let Some(standing) = engine.sandboxes().iter().find(|s| s.id == id).and_then(|s| s.standing) {
        engine.restore(&id, Select::Latest, RestoreOptions::default()).await.unwrap();
        let versions = engine.versions(&id);
        let manifest = versions.iter().find(|manifest| manifest.version == standing).unwrap();
        let files = world.stored(manifest.filesystem.artifact().unwrap()).unwrap();
        assert_eq!(world.get(&id, Domain::Filesystem), files, "{context}");
    }
    engine.close().await;
}

/// Memory where there is, so that 500 runs do not wait for a disk.
fn scratch() -> tempfile::TempDir {
    let fast = Path::new("/dev/shm");
    if fast.is_dir() { tempfile::tempdir_in(fast) } else { tempfile::tempdir() }.unwrap()
}

/// Lets a child work until it kills itself. `false` where it never came to that step.
fn kill(root: &Path, seed: u64, kill_at: u64, step: Option<&str>, context: &str) -> bool {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "child", "--nocapture"])
        .env("CRAB_KILL_ROOT", root)
        .env("CRAB_KILL_SEED", seed.to_string())
        .env("CRAB_KILL_AT", kill_at.to_string())
        .stdin(Stdio::null());
    if let Some(step) = step {
        command.env("CRAB_KILL_STEP", step);
    }
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr);
    let killed = output.status.signal() == Some(9);
    assert!(killed || output.status.success(), "{context}: {:?}\n{said}", output.status);
    killed
}

/// The names of all steps between two effects, as they stand in the engine's source.
fn named_steps() -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    let mut todo = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("src")];
    while let Some(path) = todo.pop() {
        if path.is_dir() {
            todo.extend(std::fs::read_dir(&path).unwrap().flatten().map(|entry| entry.path()));
            continue;
        }
        let text = std::fs::read_to_string(&path).unwrap();
        for call in [".step(\"", ".reach(\""] {
            names.extend(text.split(call).skip(1).filter_map(|rest| Some(rest.split_once('"')?.0.to_owned())));
        }
    }
    names
}

#[test]
fn whatever_was_promised_survives_a_kill_at_each_step_by_its_name() {
    let names = named_steps();
    assert!(names.len() > 20, "{names:?}");
    for step in &names {
        for occurrence in [0, 1] {
            let root = scratch();
            let context = format!("killed at {step}, occurrence {occurrence}");
            let killed = kill(root.path(), 77 + occurrence, occurrence, Some(step), &context);
            assert!(killed || occurrence > 0, "{step} is never reached");
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(check(&Paths::new(root.path()), &context));
        }
    }
}

#[test]
fn whatever_was_promised_survives_a_kill_at_any_step() {
    let kills: u64 = std::env::var("CRAB_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(500);
    let seed: u64 = std::env::var("CRAB_SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x5eed);
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
    let mut scratch_dir = scratch();
    for number in 0..kills {
        if number % 10 == 0 {
            scratch_dir = scratch();
        }
        let (child_seed, kill_at) = (random.below(u64::MAX), random.below(150));
        let context = format!("kill {number} of CRAB_SEED={seed}: child {child_seed} at step {kill_at}");
        assert!(kill(scratch_dir.path(), child_seed, kill_at, None, &context), "{context}: it ended by itself");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(check(&Paths::new(scratch_dir.path()), &context));
    }
}
