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
use super::traced::Traced;
use crate::report::{Report, percentile};

const ROUNDS: usize = 60;
/// What a turn writes between two captures.
const WRITTEN: usize = 64 << 10;
/// Bytes of a tree's node: what mkfs.btrfs takes by itself, and the least that it takes.
const NODE: u32 = 16 << 10;
const SMALL_NODE: u32 = 4 << 10;

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
    fn new(node: u32) -> Result<Self, String> {
        let pool = Pool::new(16 << 30, node)?;
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
    let scene = Scene::new(NODE)?;
    captures(&scene, report)?;
    many_sandboxes(&scene, report)?;
    restores(&scene, report)?;
    differences(&scene, report)?;
    removals(&scene, report)?;
    tree_sizes(&scene, report, &[1_000, 10_000, 100_000, 1_000_000], "")?;
    drop(scene);
    tree_sizes(&Scene::new(SMALL_NODE)?, report, &[1_000, 1_000_000], "_4k_nodes")
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

/// One of the trees in which the same turn is captured.
struct Tree {
    files: usize,
    sandbox: Sandbox,
    turn: Vec<f64>,
    cli: Vec<f64>,
    at_rest: Vec<f64>,
    counts: [Vec<f64>; 2],
}

/// The same turn in trees of 1,000 to 1,000,000 files, one after the other in each round: as the turn leaves the tree, by
/// the program too, and at rest, where the turn is on the disk already and only the snapshot's own work is left. That work
/// is counted: the snapshot gets a copy of the tree's root node, and with it one more reference to each node below that,
/// which lies in the tree of extents. What is far apart there is one more block to be copied and written. A turn's
/// changes do the same to each node on the way to what they change, and the next commit, which is the snapshot's, pays.
fn tree_sizes(scene: &Scene, report: &mut Report, sizes: &[usize], which: &str) -> Result<(), String> {
    let mut trees = Vec::new();
    for &files in sizes {
        let sandbox = scene.sandbox(&format!("files-{files}"))?;
        fill(&sandbox.root, 0, files)?;
        let [turn, cli, at_rest] = [const { Vec::new() }; 3];
        trees.push(Tree { files, sandbox, turn, cli, at_rest, counts: [const { Vec::new() }; 2] });
    }
    scene.pool.sync()?;
    let traced = Traced::new(&scene.pool.image());
    for round in 0..30 {
        for tree in &mut trees {
            scene.turn(&tree.sandbox)?;
            tree.turn.push(scene.checkpoint(&tree.sandbox)?.0);
            scene.turn(&tree.sandbox)?;
            let begun = Instant::now();
            snapshot_by_cli(&tree.sandbox.root, &scene.cli_target(), true)?;
            tree.cli.push(ms(begun));
            scene.turn(&tree.sandbox)?;
            scene.pool.sync()?;
            // What is traced is not measured.
            match traced.as_ref().filter(|_| round % 6 == 5) {
                Some(traced) => {
                    let (captured, counts) = traced.during(|| scene.checkpoint(&tree.sandbox));
                    captured?;
                    tree.counts.iter_mut().zip(counts).for_each(|(all, count)| all.push(count as f64));
                }
                None => tree.at_rest.push(scene.checkpoint(&tree.sandbox)?.0),
            }
        }
    }
    let mut ratios = Vec::new();
    for mut tree in trees {
        let files = tree.files;
        let [turn, cli, at_rest] = [&mut tree.turn, &mut tree.cli, &mut tree.at_rest].map(|all| percentile(all, 50.0));
        report.add(&format!("btrfs_capture_ms_p50_{files}_files{which}"), turn);
        report.add(&format!("btrfs_capture_cli_ms_p50_{files}_files{which}"), cli);
        report.add(&format!("btrfs_capture_at_rest_ms_p50_{files}_files{which}"), at_rest);
        for (what, counts) in ["references", "copied_blocks"].into_iter().zip(&mut tree.counts) {
            if !counts.is_empty() {
                report.add(&format!("btrfs_capture_at_rest_{what}_{files}_files{which}"), percentile(counts, 50.0));
            }
        }
        ratios.push([turn, cli, at_rest]);
    }
    if let (Some(small), Some(large)) = (ratios.first(), ratios.last()) {
        report.add_bounded(&format!("btrfs_capture_1m_vs_1k_files{which}"), large[0] / small[0], 1.5);
        report.add(&format!("btrfs_capture_cli_1m_vs_1k_files{which}"), large[1] / small[1]);
        report.add(&format!("btrfs_capture_at_rest_1m_vs_1k_files{which}"), large[2] / small[2]);
    }
    Ok(())
}
