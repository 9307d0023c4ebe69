//! Process checkpoints by the backend beside plain `criu dump` and `criu restore` of the same tree, in turns.
//!
//! Plain criu writes its images to the disk that the artifacts are on, and they are synced file by file.

mod incremental;

use std::os::fd::AsRawFd;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crab_backend_criu::CriuBackend;
use crab_core::{Artifact, CaptureRequest, CheckpointBackend, External, NoCut, RestoreTarget};
use crab_examples::sandbox::{Config, Sandbox, ScratchRoot, criu_binary, home};
use tokio::sync::Semaphore;

use crate::report::{Report, percentile};

pub(crate) use incremental::bench as incremental;

/// Sizes of memory in megabytes, how much of it changes before each dump, and how often each is measured.
const SIZES: &[(usize, usize, usize)] = &[(10, 1, 15), (100, 4, 9), (1000, 10, 5)];
const CROWD: usize = 32;

type Outcome<T> = Result<T, String>;

fn text(error: impl std::fmt::Display) -> String {
    error.to_string()
}

/// Holds memory that does not compress, and changes some of it when asked.
const HOLDER: &str = "
import os, sys, time
size, part = int(sys.argv[1]) << 20, int(sys.argv[2]) << 20
memory = bytearray(size)
for at in range(0, size, 1 << 20):
    memory[at:at + (1 << 20)] = os.urandom(1 << 20)
n = 0
while True:
    with open('/root/done.new', 'w') as file:
        file.write(str(n))
    os.rename('/root/done.new', '/root/done')
    while not os.path.exists(f'/root/go-{n}'):
        time.sleep(0.002)
    os.unlink(f'/root/go-{n}')
    n += 1
    for at in range(0, part, 1 << 20):
        memory[at:at + (1 << 20)] = os.urandom(1 << 20)
";

/// A sandbox whose one process holds memory.
struct Holder {
    sandbox: Sandbox,
    _root: ScratchRoot,
}

impl Holder {
    fn start(name: &str, megabytes: usize, part: usize) -> Outcome<Self> {
        Self::run(name, HOLDER, megabytes, part)
    }

    fn run(name: &str, program: &str, megabytes: usize, part: usize) -> Outcome<Self> {
        let id = format!("bench-{}-{name}", std::process::id());
        let root = ScratchRoot::new(&id).map_err(text)?;
        let sandbox = Sandbox::launch(Config::new(id.parse().map_err(text)?, root.path())).map_err(text)?;
        std::fs::write(root.path().join("root/holder.py"), program).map_err(text)?;
        let line = format!("setsid python3 /root/holder.py {megabytes} {part} </dev/null >/dev/null 2>&1 &");
        sandbox.exec(&line).map_err(text)?;
        let holder = Self { sandbox, _root: root };
        holder.wait(0)?;
        Ok(holder)
    }

    fn wait(&self, n: usize) -> Outcome<()> {
        let path = self.sandbox.root().join("root/done");
        let deadline = Instant::now() + Duration::from_secs(300);
        while std::fs::read_to_string(&path).ok().and_then(|text| text.parse().ok()) != Some(n) {
            if Instant::now() > deadline {
                return Err("the process in the sandbox does not answer".to_owned());
            }
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Changes a part of the memory.
    fn change(&self, n: usize) -> Outcome<()> {
        std::fs::write(self.sandbox.root().join(format!("root/go-{}", n - 1)), "").map_err(text)?;
        self.wait(n)
    }
}

/// What one checkpoint took, in milliseconds.
struct Took {
    frozen: f64,
    wall: f64,
}

fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

async fn checkpoint(
    backend: &CriuBackend,
    sandbox: &Sandbox,
    name: &str,
    parent: Option<&Artifact>,
) -> Outcome<(Artifact, Took)> {
    let described = sandbox.describe();
    let begun = Instant::now();
    let request = CaptureRequest {
        sandbox: &described,
        artifact: name.parse().map_err(text)?,
        parent,
        frozen: false,
        deadline: None,
        at_cut: &mut NoCut,
    };
    let captured = backend.capture(request).await.map_err(text)?;
    let frozen = captured.stopped_for().map_or(0.0, milliseconds);
    let artifact = captured.persist().await.map_err(text)?;
    Ok((artifact, Took { frozen, wall: milliseconds(begun.elapsed()) }))
}

async fn restore(backend: &CriuBackend, sandbox: &Sandbox, artifact: &Artifact) -> Outcome<f64> {
    sandbox.kill().map_err(text)?;
    let inherited = sandbox.inherit(&artifact.external).map_err(text)?;
    let operation = "bench".parse().map_err(text)?;
    let target =
        RestoreTarget { sandbox: sandbox.describe(), operation, keep_replaced: None, inherited, deadline: None };
    let begun = Instant::now();
    let restored = backend.restore(artifact, target).await.map_err(text)?;
    let took = milliseconds(begun.elapsed());
    sandbox.adopt(restored.init.ok_or("no init")?).map_err(text)?;
    Ok(took)
}

/// The two times of criu's own `stats-dump`: a service image whose message holds them as its first two numbers.
fn frozen_by_stats(images: &Path) -> Option<f64> {
    let bytes = std::fs::read(images.join("stats-dump")).ok()?;
    // After the magic numbers and the length: field 1 of the entry, its length, then {1: freezing, 2: frozen}.
    let mut rest = bytes.get(14..)?.iter();
    let mut number = || {
        rest.next()?;
        let mut value = 0_u64;
        for shift in (0..).step_by(7) {
            let byte = *rest.next()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte & 0x80 == 0 {
                break;
            }
        }
        Some(value)
    };
    Some((number()? + number()?) as f64 / 1000.0)
}

fn ran(output: &std::process::Output, images: &Path, log: &str) -> Outcome<()> {
    if output.status.success() {
        return Ok(());
    }
    let log = std::fs::read_to_string(images.join(log)).unwrap_or_default();
    let last: Vec<&str> = log.lines().rev().take(5).collect();
    Err(format!("plain criu failed: {}", last.join("; ")))
}

/// Plain `criu dump`, and every image synced.
fn plain_dump(sandbox: &Sandbox, images: &Path) -> Outcome<Took> {
    use std::os::unix::fs::MetadataExt;
    std::fs::create_dir_all(images).map_err(text)?;
    let described = sandbox.describe();
    let mut netns = described.external.iter().filter_map(|external| match external {
        External::NetworkNamespace { path } => std::fs::metadata(path).ok().map(|m| m.ino()),
        _ => None,
    });
    let begun = Instant::now();
    let output = Command::new(criu_binary())
        .args(["dump", "-R", "-v1", "-o", "dump.log", "--manage-cgroups=ignore", "--network-lock", "skip"])
        .args(["--file-locks", "-t", &described.init.unwrap_or_default().to_string(), "-D"])
        .arg(images)
        .args(["--external", &format!("net[{}]:extnet", netns.next().unwrap_or_default())])
        .output()
        .map_err(text)?;
    ran(&output, images, "dump.log")?;
    for entry in std::fs::read_dir(images).map_err(text)? {
        let path = entry.map_err(text)?.path();
        std::fs::File::open(path).and_then(|file| file.sync_all()).map_err(text)?;
    }
    std::fs::File::open(images).and_then(|directory| directory.sync_all()).map_err(text)?;
    let wall = milliseconds(begun.elapsed());
    Ok(Took { frozen: frozen_by_stats(images).ok_or("no stats-dump")?, wall })
}

/// Plain `criu restore`.
fn plain_restore(sandbox: &Sandbox, images: &Path) -> Outcome<f64> {
    sandbox.kill().map_err(text)?;
    let network: Vec<External> =
        sandbox.external().into_iter().filter(|e| matches!(e, External::NetworkNamespace { .. })).collect();
    let inherited = sandbox.inherit(&network).map_err(text)?;
    let described = sandbox.describe();
    let pidfile = images.join("pid");
    let _ = std::fs::remove_file(&pidfile);
    let mut command = Command::new("unshare");
    command
        .args(["-m", "--propagation", "private", "sh", "-c"])
        .arg("echo 0 > $1/cgroup.procs && mount --bind $2 $2 && shift 1 && root=$1 && shift 1 && exec \"$@\" --root $root")
        .arg("sh")
        .arg(&described.cgroup)
        .arg(&described.root)
        .arg(criu_binary())
        .args(["restore", "-d", "-v1", "-o", "restore.log", "--manage-cgroups=ignore", "--file-locks", "--pidfile"])
        .arg(&pidfile)
        .arg("-D")
        .arg(images);
    for given in &inherited {
        rustix::io::fcntl_setfd(&given.fd, rustix::io::FdFlags::empty()).map_err(text)?;
        command.args(["--inherit-fd", &format!("fd[{}]:extnet", given.fd.as_raw_fd())]);
    }
    let begun = Instant::now();
    let output = command.output().map_err(text)?;
    let took = milliseconds(begun.elapsed());
    ran(&output, images, "restore.log")?;
    let init = std::fs::read_to_string(pidfile).map_err(text)?.trim().parse::<u32>().map_err(text)?;
    sandbox.adopt(init).map_err(text)?;
    Ok(took)
}

fn p50(samples: &mut [f64]) -> f64 {
    percentile(samples, 50.0)
}

/// One size of memory: dumps in turns, then restores in turns.
async fn one_size(
    report: &mut Report,
    backend: &CriuBackend,
    scratch: &Path,
    (megabytes, part, rounds): (usize, usize, usize),
) -> Outcome<()> {
    let size = if megabytes >= 1000 { format!("{}gb", megabytes / 1000) } else { format!("{megabytes}mb") };
    let holder = Holder::start(&size, megabytes, part)?;
    let (mut ours, mut plain) = ((Vec::new(), Vec::new()), (Vec::new(), Vec::new()));
    let images = scratch.join("plain");
    let (first, took) = checkpoint(backend, &holder.sandbox, "p0", None).await?;
    report.add(&format!("first_wall_ms_{size}"), took.wall);
    let mut last = first;
    let mut written = Vec::new();
    for round in 1..=rounds {
        holder.change(round)?;
        let _ = std::fs::remove_dir_all(&images);
        let mut dump_plain = || {
            let took = plain_dump(&holder.sandbox, &images)?;
            plain.0.push(took.frozen);
            plain.1.push(took.wall);
            Ok::<_, String>(())
        };
        // Each goes first in every other round.
        if round % 2 == 0 {
            dump_plain()?;
        }
        let (artifact, took) = checkpoint(backend, &holder.sandbox, &format!("p{round}"), Some(&last)).await?;
        if round % 2 == 1 {
            dump_plain()?;
        }
        ours.0.push(took.frozen);
        ours.1.push(took.wall);
        written.push(artifact.bytes.unwrap_or_default() as f64 / (part << 20) as f64);
        backend.remove(&last).await.map_err(text)?;
        last = artifact;
    }
    report.add(&format!("frozen_ms_p50_{size}"), p50(&mut ours.0));
    report.add(&format!("criu_frozen_ms_p50_{size}"), p50(&mut plain.0));
    report.add_bounded(&format!("frozen_vs_criu_ratio_p50_{size}"), p50(&mut ours.0) / p50(&mut plain.0), 1.0);
    report.add(&format!("wall_ms_p50_{size}"), p50(&mut ours.1));
    report.add(&format!("criu_wall_ms_p50_{size}"), p50(&mut plain.1));
    report.add_bounded(&format!("wall_vs_criu_ratio_p50_{size}"), p50(&mut ours.1) / p50(&mut plain.1), 1.15);
    match megabytes {
        1000.. => report.add_bounded("persist_bytes_ratio", p50(&mut written), 1.2),
        _ => report.add(&format!("persist_bytes_ratio_{size}"), p50(&mut written)),
    }
    let (mut ours, mut plain) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        ours.push(restore(backend, &holder.sandbox, &last).await?);
        plain.push(plain_restore(&holder.sandbox, &images)?);
    }
    report.add(&format!("restore_ms_p50_{size}"), p50(&mut ours));
    report.add(&format!("criu_restore_ms_p50_{size}"), p50(&mut plain));
    report.add_bounded(&format!("restore_vs_criu_ratio_p50_{size}"), p50(&mut ours) / p50(&mut plain), 1.15);
    Ok(())
}

/// Many sandboxes at once, with as many dumps at a time as there are processors, and all at a time.
async fn crowd(report: &mut Report, backend: &Arc<CriuBackend>) -> Outcome<()> {
    let holders: Vec<Arc<Holder>> =
        (0..CROWD).map(|n| Holder::start(&format!("crowd-{n}"), 10, 1).map(Arc::new)).collect::<Outcome<_>>()?;
    let cores = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
    let mut p95 = [Vec::new(), Vec::new()];
    for round in 0..3 {
        for (which, limit) in [cores, CROWD].into_iter().enumerate() {
            let permits = Arc::new(Semaphore::new(limit));
            let tasks: Vec<_> = holders
                .iter()
                .map(|holder| {
                    let (backend, holder, permits) = (Arc::clone(backend), Arc::clone(holder), Arc::clone(&permits));
                    tokio::spawn(async move {
                        let described = holder.sandbox.describe();
                        let _permit = permits.acquire().await.map_err(text)?;
                        let request = CaptureRequest {
                            sandbox: &described,
                            artifact: format!("crowd-{round}-{which}").parse().map_err(text)?,
                            parent: None,
                            frozen: false,
                            deadline: None,
                            at_cut: &mut NoCut,
                        };
                        let captured = backend.capture(request).await.map_err(text)?;
                        let frozen = captured.stopped_for().map_or(0.0, milliseconds);
                        captured.discard().await.map_err(text)?;
                        Ok::<f64, String>(frozen)
                    })
                })
                .collect();
            let mut frozen = Vec::new();
            for task in tasks {
                frozen.push(task.await.map_err(text)??);
            }
            p95[which].push(percentile(&mut frozen, 95.0));
        }
    }
    let [mut limited, mut unlimited] = p95;
    report.add("crowd_frozen_ms_p95", p50(&mut limited));
    report.add("crowd_unlimited_frozen_ms_p95", p50(&mut unlimited));
    report.add_bounded("crowd_frozen_vs_unlimited_ratio_p95", p50(&mut limited) / p50(&mut unlimited), 0.35);
    Ok(())
}

/// All of it.
pub(crate) fn bench(report: &mut Report) -> Outcome<()> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(text)?;
    runtime.block_on(async {
        let directory = home().join("pool/scratch");
        std::fs::create_dir_all(&directory).map_err(text)?;
        let scratch = tempfile::Builder::new().prefix("bench-").tempdir_in(directory).map_err(text)?;
        let builder = CriuBackend::builder().images(scratch.path().join("images")).binary(criu_binary());
        let backend = Arc::new(builder.open().await.map_err(text)?);
        for size in SIZES {
            one_size(report, &backend, scratch.path(), *size).await?;
        }
        crowd(report, &backend).await
    })
}
