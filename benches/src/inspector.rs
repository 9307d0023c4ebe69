//! How quickly the inspector judges a turn, and what being watched costs the sandbox.
//!
//! 128 sandboxes are registered, each a subvolume of the pool with one process that waits. Figures with a bound of the
//! design carry it. What is compared with the inspector off runs by turns with it on.

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crab_core::{Change, Delta, Rebase, Sandbox, SandboxId, StateDelta};
use crab_inspector::Inspector;
use tokio::runtime::Runtime;

use crate::report::{Report, percentile};

const SANDBOXES: usize = 128;

pub(crate) fn run(report: &mut Report) -> Result<(), String> {
    let runtime = tokio::runtime::Builder::new_current_thread().build().map_err(|error| error.to_string())?;
    overhead(report, &runtime)?;
    let before = resident()?;
    let mut beds = Vec::new();
    for i in 0..SANDBOXES {
        beds.push(Bed::new(&format!("bench-{i}"))?);
    }
    let inspector = Inspector::load().map_err(|error| error.to_string())?;
    let all = Watched { inspector, runtime };
    for bed in &mut beds {
        bed.wait_process()?;
        all.attach(bed)?;
        all.version(bed)?;
    }
    memory(report, before)?;
    decisions(report, &all, &beds)?;
    comparisons(report, &all, &mut beds[1])?;
    storm(report, &all, &beds)
}

struct Watched {
    inspector: Inspector,
    runtime: Runtime,
}

impl Watched {
    fn attach(&self, bed: &Bed) -> Result<(), String> {
        let sandbox = Sandbox::new(bed.id.clone(), &bed.root, &bed.cgroup);
        self.runtime.block_on(self.inspector.attach(&sandbox)).map_err(|error| error.to_string())
    }

    fn take(&self, bed: &Bed) -> (Delta, Duration) {
        let begin = Instant::now();
        let delta = self.runtime.block_on(self.inspector.take(&bed.id));
        (delta, begin.elapsed())
    }

    /// Makes what is there now the base.
    fn version(&self, bed: &mut Bed) -> Result<(), String> {
        let token = self.take(bed).0.token;
        let tree = bed.snapshot()?;
        let base = Rebase { token, filesystem: true, process: true, tree: Some(tree) };
        self.runtime.block_on(self.inspector.rebase(&bed.id, &base));
        Ok(())
    }

    /// Takes until it is clean by what was noted alone.
    fn settle(&self, bed: &Bed) -> Result<(), String> {
        for _ in 0..20 {
            if self.take(bed).0.is_clean() {
                return Ok(());
            }
        }
        Err(format!("{} is not at rest: {:?}", bed.id, self.take(bed).0))
    }
}

/// A sandbox: a subvolume, a cgroup, and perhaps a process that waits. Goes when dropped.
struct Bed {
    id: SandboxId,
    root: PathBuf,
    cgroup: PathBuf,
    trees: Vec<PathBuf>,
    process: Option<Child>,
}

impl Bed {
    fn new(name: &str) -> Result<Self, String> {
        let home = std::env::var_os("CRAB_HOME").map_or_else(|| PathBuf::from("/var/lib/crab"), PathBuf::from);
        let scratch = home.join("pool/scratch");
        let name = format!("{name}-{}", std::process::id());
        let root = scratch.join(&name);
        fs::create_dir_all(&scratch).map_err(|error| format!("make {}: {error}", scratch.display()))?;
        btrfs(&["subvolume", "create"], &[&root])?;
        let cgroup = hierarchy()?.join(format!("crab-{name}"));
        fs::create_dir(&cgroup).map_err(|error| format!("make {}: {error}", cgroup.display()))?;
        let id = SandboxId::new(name).map_err(|error| error.to_string())?;
        Ok(Self { id, root, cgroup, trees: Vec::new(), process: None })
    }

    fn snapshot(&mut self) -> Result<PathBuf, String> {
        let tree = self.root.with_extension(format!("v{}", self.trees.len()));
        btrfs(&["subvolume", "snapshot", "-r"], &[&self.root, &tree])?;
        self.trees.push(tree.clone());
        Ok(tree)
    }

    fn command(&self, line: &str) -> Command {
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("echo $$ > {}/cgroup.procs; {line}", self.cgroup.display()));
        command.current_dir(&self.root).stdin(Stdio::null()).stdout(Stdio::null());
        command
    }

    fn run(&self, line: &str) -> Result<(), String> {
        let status = self.command(line).status().map_err(|error| format!("run sh: {error}"))?;
        if status.success() { Ok(()) } else { Err(format!("{line}: {status}")) }
    }

    fn wait_process(&mut self) -> Result<(), String> {
        let child = self.command("exec sleep 100000").spawn().map_err(|error| format!("run sh: {error}"))?;
        let comm = format!("/proc/{}/comm", child.id());
        self.process = Some(child);
        while fs::read_to_string(&comm).is_ok_and(|name| name.trim() != "sleep") {
            std::thread::sleep(Duration::from_millis(1));
        }
        std::thread::sleep(Duration::from_millis(15));
        Ok(())
    }
}

impl Drop for Bed {
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            let _ = process.kill();
            let _ = process.wait();
        }
        let _ = fs::write(self.cgroup.join("cgroup.kill"), "1");
        let until = Instant::now() + Duration::from_secs(5);
        while fs::remove_dir(&self.cgroup).is_err() && Instant::now() < until {
            std::thread::sleep(Duration::from_millis(5));
        }
        for tree in self.trees.iter().chain([&self.root]) {
            if let Err(error) = btrfs(&["subvolume", "delete"], &[tree]) {
                eprintln!("left behind: {error}");
            }
        }
    }
}

fn btrfs(words: &[&str], paths: &[&Path]) -> Result<(), String> {
    let output = Command::new("btrfs")
        .arg("-q")
        .args(words)
        .args(paths)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("run btrfs: {error}"))?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

/// Where cgroup v2 is mounted.
fn hierarchy() -> Result<PathBuf, String> {
    let table = fs::read_to_string("/proc/self/mountinfo").map_err(|error| error.to_string())?;
    let line = table.lines().find(|line| line.contains(" - cgroup2 ")).ok_or("cgroup v2 is not mounted")?;
    line.split(' ').nth(4).map(PathBuf::from).ok_or_else(|| "a mount cannot be understood".to_owned())
}

/// Kilobytes of this process in memory.
fn resident() -> Result<f64, String> {
    let status = fs::read_to_string("/proc/self/status").map_err(|error| error.to_string())?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse().map_err(|_| format!("odd memory size {line}"))
}

/// What one more sandbox costs, here and in the kernel's maps, which are made for the most that can be.
fn memory(report: &mut Report, before: f64) -> Result<(), String> {
    report.add("memory_kb_per_sandbox", (resident()? - before) / SANDBOXES as f64);
    let mut maps = 0.0;
    for entry in fs::read_dir("/proc/self/fdinfo").map_err(|error| error.to_string())?.flatten() {
        let text = fs::read_to_string(entry.path()).unwrap_or_default();
        if text.contains("map_type:") {
            let size = text.lines().find_map(|line| line.strip_prefix("memlock:")).unwrap_or("0");
            maps += size.trim().parse::<f64>().unwrap_or(0.0);
        }
    }
    report.add("kernel_memory_kb_per_sandbox", maps / 1024.0 / 1024.0);
    Ok(())
}

/// A shell that opens a file 200 times: about 1,200 system calls.
const READS: &str = "i=0; while [ $i -lt 200 ]; do : < f; i=$((i+1)); done";

fn decisions(report: &mut Report, all: &Watched, beds: &[Bed]) -> Result<(), String> {
    let bed = &beds[0];
    fs::write(bed.root.join("f"), "x").map_err(|error| error.to_string())?;
    let mut clean = Vec::new();
    let mut read = Vec::new();
    let mut fell_back = 0.0;
    // The file is new: a look finds it, and the next version holds it.
    let tree = bed.root.with_extension("f");
    btrfs(&["subvolume", "snapshot", "-r"], &[&bed.root, &tree])?;
    let token = all.take(bed).0.token;
    let base = Rebase { token, filesystem: true, process: true, tree: Some(tree.clone()) };
    all.runtime.block_on(all.inspector.rebase(&bed.id, &base));
    let measured = (|| {
        all.settle(bed)?;
        for _ in 0..3000 {
            let (delta, took) = all.take(bed);
            if delta.is_clean() {
                clean.push(took.as_secs_f64() * 1e6);
            }
        }
        for _ in 0..400 {
            bed.run(READS)?;
            let (delta, took) = all.take(bed);
            if delta.is_clean() {
                read.push(took.as_secs_f64() * 1e6);
            } else {
                fell_back += 1.0;
            }
        }
        Ok(())
    })();
    btrfs(&["subvolume", "delete"], &[&tree])?;
    measured.map_err(|error: String| error)?;
    report.add_bounded("decision_clean_us_p50", percentile(&mut clean, 50.0), 10.0);
    report.add("decision_clean_us_p99", percentile(&mut clean, 99.0));
    report.add_bounded("decision_us_p50", percentile(&mut read, 50.0), 50.0);
    report.add_bounded("decision_us_p99", percentile(&mut read, 99.0), 500.0);
    report.add("decision_not_clean", fell_back);
    Ok(())
}

/// Files are rewritten to what they were, so that every one has to be compared.
fn comparisons(report: &mut Report, all: &Watched, bed: &mut Bed) -> Result<(), String> {
    let rewrite = |count: usize| format!("for i in $(seq {count}); do echo a line of text > f$i; done");
    bed.run(&rewrite(1000))?;
    all.version(bed)?;
    for (count, bound) in [(100, 10.0), (1000, 60.0)] {
        let mut took = Vec::new();
        for _ in 0..15 {
            bed.run(&rewrite(count))?;
            let (delta, time) = all.take(bed);
            if delta.filesystem != Change::Unchanged {
                return Err(format!("rewritten files: {}", delta.filesystem));
            }
            took.push(time.as_secs_f64() * 1e3);
        }
        report.add_bounded(&format!("net_compare_{count}_ms_p50"), percentile(&mut took, 50.0), bound);
    }
    Ok(())
}

/// One sandbox makes and removes 50,000 files; the others are asked all the while.
fn storm(report: &mut Report, all: &Watched, beds: &[Bed]) -> Result<(), String> {
    let (noisy, others) = (&beds[2], &beds[3..]);
    for bed in others {
        all.settle(bed)?;
    }
    let done = AtomicBool::new(false);
    let before = resident()?;
    let mut took = Vec::new();
    let mut changed = 0.0;
    let outcome = std::thread::scope(|scope| {
        let storm = scope.spawn(|| {
            let line = "mkdir s; cd s; i=0; while [ $i -lt 50000 ]; do : > $i; i=$((i+1)); done; cd ..; rm -r s";
            let outcome = noisy.run(line);
            done.store(true, Ordering::Release);
            outcome
        });
        while !done.load(Ordering::Acquire) {
            for bed in others {
                let (delta, time) = all.take(bed);
                took.push(time.as_secs_f64() * 1e3);
                changed += f64::from(u8::from(!delta.is_clean()));
            }
            // The noisy one is asked too: what it did must not pile up.
            all.take(noisy);
            std::thread::sleep(Duration::from_millis(20));
        }
        storm.join().map_err(|_| "the storm ended early".to_owned())?
    });
    outcome?;
    report.add("storm_other_decision_ms_p99", percentile(&mut took, 99.0));
    report.add_bounded("storm_other_decision_ms_max", percentile(&mut took, 100.0), 5.0);
    report.add("storm_other_not_clean", changed);
    report.add("storm_memory_growth_kb", resident()? - before);
    Ok(())
}

/// What being watched costs: this process moves into the sandbox for a loop, a shell in it compiles.
fn overhead(report: &mut Report, runtime: &Runtime) -> Result<(), String> {
    let bed = Bed::new("bench-overhead")?;
    let source = "#include <stdio.h>\n#include <stdlib.h>\nint f(int a) { return printf(\"%d\", a) + abs(a); }\n";
    for i in 0..50 {
        let mut file =
            fs::File::create(bed.root.join(format!("{i}.c"))).map_err(|error| format!("write a source: {error}"))?;
        file.write_all(source.as_bytes()).map_err(|error| format!("write a source: {error}"))?;
    }
    let home = own_group()?;
    let mut calls = [Vec::new(), Vec::new()];
    let mut builds = [Vec::new(), Vec::new()];
    for _ in 0..7 {
        for on in [false, true] {
            let watching = on.then(|| watch(&bed, runtime)).transpose()?;
            fs::write(bed.cgroup.join("cgroup.procs"), std::process::id().to_string())
                .map_err(|error| format!("move into the sandbox: {error}"))?;
            let begin = Instant::now();
            for _ in 0..300_000 {
                std::hint::black_box(rustix::process::getppid());
            }
            calls[usize::from(on)].push(begin.elapsed().as_secs_f64());
            fs::write(home.join("cgroup.procs"), std::process::id().to_string())
                .map_err(|error| format!("move out of the sandbox: {error}"))?;
            let begin = Instant::now();
            bed.run("for f in *.c; do cc -c $f -o ${f%.c}.o || exit 1; done")?;
            builds[usize::from(on)].push(begin.elapsed().as_secs_f64());
            drop(watching);
        }
    }
    let ratio = |[off, on]: &mut [Vec<f64>; 2]| percentile(on, 50.0) / percentile(off, 50.0);
    report.add_bounded("syscall_overhead_ratio", ratio(&mut calls), 1.6);
    report.add_bounded("build_overhead_ratio", ratio(&mut builds), 1.03);
    Ok(())
}

fn watch(bed: &Bed, runtime: &Runtime) -> Result<Inspector, String> {
    let inspector = Inspector::load().map_err(|error| error.to_string())?;
    let sandbox = Sandbox::new(bed.id.clone(), &bed.root, &bed.cgroup);
    runtime.block_on(inspector.attach(&sandbox)).map_err(|error| error.to_string())?;
    Ok(inspector)
}

/// The cgroup of this process.
fn own_group() -> Result<PathBuf, String> {
    let groups = fs::read_to_string("/proc/self/cgroup").map_err(|error| error.to_string())?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/")).unwrap_or_default();
    Ok(hierarchy()?.join(own))
}
