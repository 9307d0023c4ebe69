//! Snapshots of a ZFS root beside the `zfs` tool doing the same. Runs where there is ZFS: `cargo xtask vm bench zfs`.

use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Instant;

use crab_backend_zfs::{ZfsBackend, dataset};
use crab_core::{ArtifactId, CaptureRequest, Captured, CheckpointBackend, NoCut, Sandbox};

use crate::report::{Report, percentile};

const ROUNDS: usize = 15;

fn tool(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(program)
        .args(arguments)
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("cannot start {program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program} {}: {}", arguments.join(" "), String::from_utf8_lossy(&output.stderr).trim()))
}

/// A pool in a file, destroyed at the end.
struct Pool(String);

impl Drop for Pool {
    fn drop(&mut self) {
        if let Err(error) = tool("zpool", &["destroy", "-f", &self.0]) {
            eprintln!("left behind: {error}");
        }
    }
}

/// What a capture costs, and what making it an artifact adds, each beside the tool's way, in turns.
pub(crate) fn run(report: &mut Report) -> Result<(), String> {
    let directory = tempfile::tempdir().map_err(|error| error.to_string())?;
    let vdev = directory.path().join("vdev");
    std::fs::File::create(&vdev).and_then(|file| file.set_len(512 << 20)).map_err(|error| error.to_string())?;
    let name = format!("crab-bench-{}", std::process::id());
    let (mount, vdev) = (directory.path().join("pool").display().to_string(), vdev.display().to_string());
    tool("zpool", &["create", "-o", "cachefile=none", "-m", &mount, &name, &vdev])?;
    let pool = Pool(name);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build().map_err(|e| e.to_string())?;
    runtime.block_on(measure(&pool.0, Path::new(&mount), report))
}

async fn measure(pool: &str, mount: &Path, report: &mut Report) -> Result<(), String> {
    let failed = |error: crab_core::Error| error.to_string();
    let (root, beside) = (mount.join("box"), mount.join("beside"));
    dataset::create(&root).map_err(failed)?;
    dataset::create(&beside).map_err(failed)?;
    let backend = ZfsBackend::open(format!("{pool}/crab")).map_err(failed)?;
    let sandbox = Sandbox::new("box".parse().map_err(failed)?, root.clone(), "/nonexistent");
    let (mut ours, mut tools, mut persists) = (Vec::new(), Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        for path in [&root, &beside] {
            std::fs::write(path.join("file"), vec![round as u8; 1 << 16]).map_err(|error| error.to_string())?;
        }
        let artifact = ArtifactId::new(format!("v{round}")).map_err(failed)?;
        let begun = Instant::now();
        let captured: Box<dyn Captured> = backend
            .capture(CaptureRequest {
                sandbox: &sandbox,
                artifact,
                parent: None,
                frozen: false,
                deadline: None,
                at_cut: &mut NoCut,
            })
            .await
            .map_err(failed)?;
        ours.push(begun.elapsed().as_secs_f64() * 1e3);
        let begun = Instant::now();
        captured.persist().await.map_err(failed)?;
        persists.push(begun.elapsed().as_secs_f64() * 1e3);

        let snapshot = format!("{pool}/beside@v{round}");
        let begun = Instant::now();
        tool("zfs", &["snapshot", "-o", "crab:sandbox=box", "-o", "crab:artifact=v", &snapshot])?;
        tools.push(begun.elapsed().as_secs_f64() * 1e3);
    }
    let (ours, tools) = (percentile(&mut ours, 50.0), percentile(&mut tools, 50.0));
    report.add("zfs_capture_ms_p50", ours);
    report.add("zfs_capture_by_cli_ms_p50", tools);
    report.add("zfs_persist_ms_p50", percentile(&mut persists, 50.0));
    report.add_bounded("zfs_capture_vs_cli_p50", ours / tools, 0.3);
    Ok(())
}
