//! btrfs: captures and restores beside the `btrfs` program, differences beside a walk.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crab_backend_btrfs::{BtrfsBackend, subvolume};
use crab_core::conformance::{calls::join_all, trees};
use crab_core::{
    Artifact, ArtifactId, CaptureRequest, CheckpointBackend, FileChangeKind, NoCut, OperationId, RestoreTarget,
    Sandbox, SandboxId,
};
use tokio::runtime::Runtime;

use super::pool::{self, Pool};
use crate::report::{Report, percentile};

const ROUNDS: usize = 60;
/// What a turn writes between two captures.
const WRITTEN: usize = 64 << 10;

struct Scene {
    pool: Pool,
    backend: BtrfsBackend,
    runtime: Runtime,
    next: std::cell::Cell<u64>,
}

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

impl Scene {
    fn new() -> Result<Self, String> {
        let pool = Pool::new(16 << 30)?;
        fs::create_dir(pool.path().join("boxes")).map_err(text)?;
        fs::create_dir(pool.path().join("cli")).map_err(text)?;
        let backend = BtrfsBackend::open(pool.path().join("versions")).map_err(text)?;
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).build().map_err(text)?;
        Ok(Self { pool, backend, runtime, next: std::cell::Cell::new(0) })
    }

    fn number(&self) -> u64 {
        self.next.replace(self.next.get() + 1)
    }

    fn sandbox(&self, name: &str) -> Result<Sandbox, String> {
        let root = self.pool.path().join("boxes").join(name);
        subvolume::create(&root).map_err(text)?;
        Ok(Sandbox::new(SandboxId::new(name).map_err(text)?, root, self.pool.path().join("no-cgroup")))
    }

    /// Some work of the sandbox.
    fn turn(&self, sandbox: &Sandbox) -> Result<(), String> {
        let number = self.number();
        fs::write(sandbox.root.join(format!("turn-{}", number % 50)), vec![number as u8; WRITTEN]).map_err(text)
    }

    fn name(&self) -> Result<ArtifactId, String> {
        ArtifactId::new(format!("v{}", self.number())).map_err(text)
    }

    async fn capture(&self, sandbox: &Sandbox, name: ArtifactId) -> Result<(f64, Artifact), String> {
        let begun = Instant::now();
        let at_cut = &mut NoCut;
        let request = CaptureRequest { sandbox, artifact: name, parent: None, frozen: false, deadline: None, at_cut };
        let captured = self.backend.capture(request).await.map_err(text)?;
        let took = ms(begun);
        Ok((took, captured.persist().await.map_err(text)?))
    }

    fn checkpoint(&self, sandbox: &Sandbox) -> Result<(f64, f64, Artifact), String> {
        let name = self.name()?;
        let begun = Instant::now();
        let (captured, artifact) = self.runtime.block_on(self.capture(sandbox, name))?;
        Ok((captured, ms(begun), artifact))
    }

    fn cli_target(&self) -> PathBuf {
        self.pool.path().join("cli").join(self.number().to_string())
    }
}

fn snapshot_by_cli(from: &Path, to: &Path, read_only: bool) -> Result<(), String> {
    let mut arguments = vec!["subvolume", "snapshot"];
    arguments.extend(read_only.then_some("-r"));
    let arguments = arguments.into_iter().map(AsRef::as_ref).chain([from.as_os_str(), to.as_os_str()]);
    pool::run("btrfs", arguments)
}

pub(crate) fn run(report: &mut Report) -> Result<(), String> {
    let scene = Scene::new()?;
    captures(&scene, report)?;
    many_sandboxes(&scene, report)?;
    restores(&scene, report)?;
    differences(&scene, report)?;
    removals(&scene, report)?;
    tree_sizes(&scene, report)
}

/// One sandbox: a capture, a capture that is made durable, and the same two by the program.
fn captures(scene: &Scene, report: &mut Report) -> Result<(), String> {
    let sandbox = scene.sandbox("captures")?;
    let [mut ours, mut durable, mut cli, mut cli_durable] = [const { Vec::new() }; 4];
    for _ in 0..ROUNDS {
        scene.turn(&sandbox)?;
        let (captured, persisted, _) = scene.checkpoint(&sandbox)?;
        ours.push(captured);
        durable.push(persisted);

        scene.turn(&sandbox)?;
        let (target, named) = (scene.cli_target(), scene.cli_target());
        let begun = Instant::now();
        snapshot_by_cli(&sandbox.root, &target, true)?;
        cli.push(ms(begun));
        // A version has its name only when all of it is there.
        pool::run("mv", [&target, &named])?;
        scene.pool.sync()?;
        cli_durable.push(ms(begun));
    }
    let [ours, durable, cli, cli_durable] = [ours, durable, cli, cli_durable].map(|mut s| percentile(&mut s, 50.0));
    report.add("btrfs_capture_ms_p50", ours);
    report.add("btrfs_capture_cli_ms_p50", cli);
    report.add_bounded("btrfs_capture_vs_cli_p50", ours / cli, 0.5);
    report.add("btrfs_durable_ms_p50", durable);
    report.add_bounded("btrfs_durable_vs_cli_p50", durable / cli_durable, 0.5);
    Ok(())
}

/// Many at once, as a host that runs many has it.
fn many_sandboxes(scene: &Scene, report: &mut Report) -> Result<(), String> {
    for count in [1, 16, 64] {
        let sandboxes: Vec<Sandbox> =
            (0..count).map(|n| scene.sandbox(&format!("many-{count}-{n}"))).collect::<Result<_, _>>()?;
        let mut samples = Vec::new();
        for _ in 0..if count == 1 { 30 } else { 5 } {
            for sandbox in &sandboxes {
                scene.turn(sandbox)?;
            }
            let names: Vec<ArtifactId> = sandboxes.iter().map(|_| scene.name()).collect::<Result<_, _>>()?;
            let all = sandboxes.iter().zip(names).map(|(sandbox, name)| scene.capture(sandbox, name));
            for done in scene.runtime.block_on(join_all(all)) {
                samples.push(done?.0);
            }
        }
        report.add(&format!("btrfs_capture_ms_p50_{count}_sandboxes"), percentile(&mut samples, 50.0));
        report.add(&format!("btrfs_capture_ms_p95_{count}_sandboxes"), percentile(&mut samples, 95.0));
    }
    Ok(())
}

/// A restore, beside a snapshot and two renames by programs and the removal of what was replaced.
fn restores(scene: &Scene, report: &mut Report) -> Result<(), String> {
    let sandbox = scene.sandbox("restores")?;
    scene.turn(&sandbox)?;
    let (_, _, artifact) = scene.checkpoint(&sandbox)?;
    let version = scene.backend.tree(&artifact).ok_or("the artifact has no tree")?;
    let (mut ours, mut cli) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        scene.turn(&sandbox)?;
        let target = RestoreTarget {
            sandbox: sandbox.clone(),
            operation: OperationId::new(format!("op{}", scene.number())).map_err(text)?,
            keep_replaced: None,
            inherited: Vec::new(),
            deadline: None,
        };
        let begun = Instant::now();
        scene.runtime.block_on(scene.backend.restore(&artifact, target)).map_err(text)?;
        ours.push(ms(begun));

        scene.turn(&sandbox)?;
        let (clone, replaced) = (scene.cli_target(), scene.cli_target());
        let begun = Instant::now();
        snapshot_by_cli(&version, &clone, false)?;
        pool::run("mv", [&sandbox.root, &replaced])?;
        pool::run("mv", [&clone, &sandbox.root])?;
        scene.pool.sync()?;
        pool::run("btrfs", ["subvolume".as_ref(), "delete".as_ref(), replaced.as_os_str()])?;
        cli.push(ms(begun));
    }
    let [ours, cli] = [ours, cli].map(|mut samples| percentile(&mut samples, 50.0));
    report.add("btrfs_restore_ms_p50", ours);
    report.add("btrfs_restore_cli_ms_p50", cli);
    report.add_bounded("btrfs_restore_vs_cli_p50", ours / cli, 0.6);
    Ok(())
}

/// 50,000 files of which 100 were changed.
fn differences(scene: &Scene, report: &mut Report) -> Result<(), String> {
    let sandbox = scene.sandbox("differences")?;
    fill(&sandbox.root, 0, 50_000)?;
    let (_, _, before) = scene.checkpoint(&sandbox)?;
    for n in 0..100 {
        fs::write(file(&sandbox.root, n * 499), format!("changed {n}")).map_err(text)?;
    }
    let (_, _, after) = scene.checkpoint(&sandbox)?;
    let trees = [&before, &after].map(|artifact| scene.backend.tree(artifact).unwrap_or_default());
    let (mut ours, mut walk) = (Vec::new(), Vec::new());
    for _ in 0..7 {
        let begun = Instant::now();
        let found = scene.runtime.block_on(diff(&scene.backend, &before, &after))?;
        ours.push(ms(begun));
        let begun = Instant::now();
        let expected = trees::differences(&trees[0], &trees[1]);
        walk.push(ms(begun));
        if found != expected {
            return Err(format!("the difference is {} paths, and a walk finds {}", found.len(), expected.len()));
        }
    }
    let [ours, walk] = [ours, walk].map(|mut samples| percentile(&mut samples, 50.0));
    report.add("diff_ms_p50", ours);
    report.add("walk_ms_p50", walk);
    report.add_bounded("diff_vs_walk_ratio", ours / walk, 0.1);
    Ok(())
}

async fn diff(
    backend: &BtrfsBackend,
    from: &Artifact,
    to: &Artifact,
) -> Result<BTreeMap<Vec<u8>, FileChangeKind>, String> {
    let mut changes = backend.diff(from, to).await.map_err(text)?;
    let mut found = BTreeMap::new();
    while let Some(change) = changes.next().await.map_err(text)? {
        found.insert(change.path, change.kind);
    }
    Ok(found)
}

fn file(root: &Path, n: usize) -> PathBuf {
    root.join(format!("d{}/f{n}", n / 500))
}

fn fill(root: &Path, from: usize, to: usize) -> Result<(), String> {
    for n in from..to {
        let file = file(root, n);
        if n % 500 == 0 {
            file.parent().map_or(Ok(()), fs::create_dir_all).map_err(text)?;
        }
        fs::write(file, n.to_string()).map_err(text)?;
    }
    Ok(())
}

/// Captures while nothing else happens, and while many large versions are being removed.
fn removals(scene: &Scene, report: &mut Report) -> Result<(), String> {
    let sandbox = scene.sandbox("quiet")?;
    let (mut quiet, mut removing) = (Vec::new(), Vec::new());
    for _ in 0..20 {
        scene.turn(&sandbox)?;
        quiet.push(scene.checkpoint(&sandbox)?.0);
    }
    let large = scene.sandbox("large")?;
    let mut versions = Vec::new();
    for n in 0..20 {
        fill(&large.root, n * 500, (n + 1) * 500)?;
        versions.push(scene.checkpoint(&large)?.2);
        fs::remove_dir_all(large.root.join(format!("d{n}"))).map_err(text)?;
    }
    for version in versions {
        scene.runtime.block_on(scene.backend.remove(&version)).map_err(text)?;
        scene.turn(&sandbox)?;
        removing.push(scene.checkpoint(&sandbox)?.0);
    }
    let [quiet, removing] = [quiet, removing].map(|mut samples| percentile(&mut samples, 50.0));
    report.add("btrfs_capture_while_removing_ms_p50", removing);
    report.add("btrfs_capture_while_removing_vs_quiet", removing / quiet);
    Ok(())
}

/// The same turn in trees of 1,000 to 1,000,000 files, one after the other in each round. A capture commits what is not on
/// the disk yet; beside it, one that finds the turn there already shows what of that is the snapshot's own.
fn tree_sizes(scene: &Scene, report: &mut Report) -> Result<(), String> {
    let mut trees = Vec::new();
    for files in [1_000, 10_000, 100_000, 1_000_000] {
        let sandbox = scene.sandbox(&format!("files-{files}"))?;
        fill(&sandbox.root, 0, files)?;
        trees.push((files, sandbox, Vec::new(), Vec::new()));
    }
    scene.pool.sync()?;
    for _ in 0..40 {
        for (_, sandbox, samples, at_rest) in &mut trees {
            scene.turn(sandbox)?;
            samples.push(scene.checkpoint(sandbox)?.0);
            scene.turn(sandbox)?;
            scene.pool.sync()?;
            at_rest.push(scene.checkpoint(sandbox)?.0);
        }
    }
    let mut smallest = None;
    for (files, _, mut samples, mut at_rest) in trees {
        let took = percentile(&mut samples, 50.0);
        report.add(&format!("btrfs_capture_ms_p50_{files}_files"), took);
        report.add(&format!("btrfs_capture_at_rest_ms_p50_{files}_files"), percentile(&mut at_rest, 50.0));
        let smallest = *smallest.get_or_insert(took);
        if files == 1_000_000 {
            report.add_bounded("btrfs_capture_1m_vs_1k_files", took / smallest, 1.5);
        }
    }
    Ok(())
}
