//! The oracle for processes: who survived by `/proc`, and what they did by the kernel's trace buffer, which knows
//! nothing of BPF. A survivor counts as changed by the rule of the design, told here in its own words.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

/// CPU time that all survivors together may use, in nanoseconds.
const CPU: u64 = 50_000_000;

/// A trace buffer of its own that goes when dropped.
struct Buffer(PathBuf);

impl Buffer {
    fn new(name: &str, events: &[&str]) -> Result<Self, String> {
        let folder = Path::new("/sys/kernel/tracing/instances").join(format!("crab-{name}-{}", std::process::id()));
        fs::create_dir(&folder).map_err(|error| format!("make a trace buffer: {error}"))?;
        let buffer = Self(folder);
        buffer.set("buffer_size_kb", "4096")?;
        for event in events {
            buffer.set(&format!("events/{event}/enable"), "1")?;
        }
        Ok(buffer)
    }

    fn set(&self, file: &str, value: &str) -> Result<(), String> {
        fs::write(self.0.join(file), value).map_err(|error| format!("set {file} of a trace buffer: {error}"))
    }

    fn read(&self) -> Result<String, String> {
        let text = fs::read(self.0.join("trace")).map_err(|error| format!("read a trace buffer: {error}"))?;
        Ok(String::from_utf8_lossy(&text).into_owned())
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        let _ = fs::write(self.0.join("events/enable"), "0");
        if let Err(error) = fs::remove_dir(&self.0) {
            eprintln!("left behind: {}: {error}", self.0.display());
        }
    }
}

type Task = (u32, u64);

/// What a version holds of the processes.
struct Base {
    /// Nanoseconds on a CPU, by task.
    tasks: BTreeMap<Task, u64>,
    /// A digest of what lies in memory file systems.
    memory: String,
}

/// Watches the processes of one sandbox.
pub(crate) struct Oracle {
    cgroup: PathBuf,
    init: u32,
    calls: Buffer,
    signals: Buffer,
    base: Option<Base>,
    /// Once something was seen it stays so until the next base.
    seen: Option<String>,
}

impl Oracle {
    pub(crate) fn new(cgroup: &Path, init: u32) -> Result<Self, String> {
        Ok(Self {
            cgroup: cgroup.to_owned(),
            init,
            calls: Buffer::new("calls", &["raw_syscalls/sys_enter", "raw_syscalls/sys_exit"])?,
            signals: Buffer::new("signals", &["signal/signal_generate"])?,
            base: None,
            seen: None,
        })
    }

    /// Makes what is there now the base. The sandbox is frozen.
    pub(crate) fn rebase(&mut self) -> Result<(), String> {
        let tasks = self.tasks()?;
        let pids: Vec<String> = tasks.keys().map(|(tid, _)| tid.to_string()).collect();
        // No task has the number 0 but the idle ones: an empty list would mean everybody.
        let pids = if pids.is_empty() { "0".to_owned() } else { pids.join(" ") };
        self.calls.set("set_event_pid", &pids)?;
        self.calls.set("trace", "")?;
        self.signals.set("trace", "")?;
        self.base = Some(Base { tasks, memory: self.memory() });
        self.seen = None;
        Ok(())
    }

    /// Whether the processes are in another state than the base's, and why. `changed` are the files that differ. The
    /// sandbox is frozen.
    pub(crate) fn changed(&mut self, changed: &BTreeSet<PathBuf>) -> Result<Option<String>, String> {
        let now = self.tasks()?;
        let Some(base) = &self.base else { return Ok(Some("no base".to_owned())) };
        if self.seen.is_none() {
            let ids: BTreeSet<u32> = base.tasks.keys().map(|(tid, _)| *tid).collect();
            self.seen = acts(&self.calls.read()?, &ids, self.init);
            if self.seen.is_none() {
                self.seen = signals(&self.signals.read()?, &ids);
            }
            self.calls.set("trace", "")?;
            self.signals.set("trace", "")?;
        }
        if let Some(task) = now.keys().find(|task| !base.tasks.contains_key(task)) {
            return Ok(Some(format!("task {} is new", task.0)));
        }
        if let Some(task) = base.tasks.keys().find(|task| !now.contains_key(task)) {
            return Ok(Some(format!("task {} is gone", task.0)));
        }
        if self.seen.is_some() {
            return Ok(self.seen.clone());
        }
        let used: u64 = now.iter().map(|(task, ran)| ran - base.tasks.get(task).copied().unwrap_or(0).min(*ran)).sum();
        if used > CPU {
            return Ok(Some(format!("survivors used {} ms", used / 1_000_000)));
        }
        if base.memory != self.memory() {
            return Ok(Some("a file in memory differs".to_owned()));
        }
        Ok(held(now.keys().map(|(tid, _)| *tid), changed))
    }

    fn tasks(&self) -> Result<BTreeMap<Task, u64>, String> {
        let mut tasks = BTreeMap::new();
        let mut folders = vec![self.cgroup.clone()];
        while let Some(folder) = folders.pop() {
            let text =
                fs::read_to_string(folder.join("cgroup.threads")).map_err(|error| format!("list threads: {error}"))?;
            for tid in text.lines().filter_map(|line| line.parse::<u32>().ok()) {
                let stat = fs::read_to_string(format!("/proc/{tid}/stat")).unwrap_or_default();
                let started = stat.rsplit(')').next().and_then(|rest| rest.split_whitespace().nth(19)?.parse().ok());
                let ran = fs::read_to_string(format!("/proc/{tid}/schedstat")).unwrap_or_default();
                let ran = ran.split_whitespace().next().and_then(|word| word.parse().ok());
                if let (Some(started), Some(ran)) = (started, ran) {
                    tasks.insert((tid, started), ran);
                }
            }
            let entries = fs::read_dir(&folder).map_err(|error| format!("list {}: {error}", folder.display()))?;
            folders.extend(entries.flatten().map(|entry| entry.path()).filter(|path| path.is_dir()));
        }
        Ok(tasks)
    }

    fn memory(&self) -> String {
        let shm = format!("/proc/{}/root/dev/shm", self.init);
        let line = "find . -printf '%p %y %m %U %G %l\\n' | sort; find . -type f -exec sha256sum {} + | sort";
        let output = std::process::Command::new("sh").args(["-c", line]).current_dir(shm).output();
        output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default()
    }
}

/// The first system call by which a survivor took something in or gave something out.
fn acts(trace: &str, survivors: &BTreeSet<u32>, init: u32) -> Option<String> {
    let mut first_arguments: BTreeMap<u32, Vec<u64>> = BTreeMap::new();
    for line in trace.lines() {
        if line.contains("LOST") {
            return Some("the trace is not whole".to_owned());
        }
        let Some((task, call)) = line.split_once(": sys_").and_then(|(head, call)| Some((pid_of(head)?, call))) else {
            continue;
        };
        if !survivors.contains(&task) {
            continue;
        }
        if let Some(enter) = call.strip_prefix("enter: NR ") {
            let arguments = enter.split_once('(').map_or("", |(_, rest)| rest).trim_end_matches(')');
            let arguments = arguments.split(", ").filter_map(|hex| u64::from_str_radix(hex, 16).ok()).collect();
            first_arguments.insert(task, arguments);
        } else if let Some(exit) = call.strip_prefix("exit: NR ") {
            let mut words = exit.split(" = ");
            let (Some(number), Some(result)) = (
                words.next().and_then(|word| word.parse().ok()),
                words.next().and_then(|word| word.trim().parse().ok()),
            ) else {
                continue;
            };
            let arguments = first_arguments.remove(&task).unwrap_or_default();
            if !only_waits(number, result, &arguments, task == init) {
                return Some(format!("survivor {task} made system call {number} = {result}"));
            }
        }
    }
    None
}

fn pid_of(head: &str) -> Option<u32> {
    head.split('[').next()?.trim_end().rsplit('-').next()?.trim().parse().ok()
}

/// Numbers of system calls.
#[cfg(target_arch = "x86_64")]
mod number {
    pub(super) const SLEEPS: &[i64] = &[7, 23, 35, 230, 232, 270, 271, 281, 441];
    pub(super) const FUTEX: i64 = 202;
    pub(super) const RESTART: i64 = 219;
    pub(super) const WAITID: i64 = 247;
    pub(super) const WAITS: &[i64] = &[61, 128, WAITID];
    pub(super) const READS: &[i64] = &[0, 43, 45, 47, 288];
    pub(super) const HARMLESS: &[i64] = &[9, 11, 12, 24, 28, 39, 96, 110, 186, 201, 228, 309];
}

#[cfg(target_arch = "aarch64")]
mod number {
    pub(super) const SLEEPS: &[i64] = &[22, 72, 73, 101, 115, 441];
    pub(super) const FUTEX: i64 = 98;
    pub(super) const RESTART: i64 = 128;
    pub(super) const WAITID: i64 = 95;
    pub(super) const WAITS: &[i64] = &[137, 260, WAITID];
    pub(super) const READS: &[i64] = &[63, 202, 207, 212, 242];
    pub(super) const HARMLESS: &[i64] = &[113, 124, 168, 169, 172, 173, 178, 214, 215, 222, 233];
}

/// Whether a system call took nothing in and gave nothing out.
fn only_waits(call: i64, result: i64, arguments: &[u64], init: bool) -> bool {
    const TIMED_OUT: i64 = -110;
    const AGAIN: i64 = -11;
    const INTERRUPTED: i64 = -4;
    if (-516..=-512).contains(&result) {
        return true;
    }
    if number::SLEEPS.contains(&call) {
        return result == 0 || result == INTERRUPTED;
    }
    if call == number::RESTART {
        return [0, INTERRUPTED, TIMED_OUT].contains(&result);
    }
    if call == number::FUTEX {
        let wakes = arguments.get(1).is_some_and(|operation| matches!(operation & 127, 1 | 10));
        return [TIMED_OUT, AGAIN, INTERRUPTED].contains(&result) || result == 0 && wakes;
    }
    if number::WAITS.contains(&call) {
        return init || [0, -10, AGAIN, INTERRUPTED].contains(&result) && !(call == number::WAITID && result == 0);
    }
    if number::READS.contains(&call) {
        return result == AGAIN;
    }
    number::HARMLESS.contains(&call)
}

/// The first signal to a survivor that is no news of a child.
fn signals(trace: &str, survivors: &BTreeSet<u32>) -> Option<String> {
    trace.lines().filter_map(|line| line.split_once(": signal_generate: ")).find_map(|(_, said)| {
        let field = |name: &str| said.split(' ').find_map(|word| word.strip_prefix(name)?.parse::<i64>().ok());
        let (signal, task) = (field("sig=")?, u32::try_from(field("pid=")?).ok()?);
        let ignored = field("res=") == Some(1) && signal != 18;
        (survivors.contains(&task) && !ignored && signal != 17).then(|| format!("survivor {task} got signal {signal}"))
    })
}

/// The first survivor that holds a file that differs, itself or by the path that leads to it.
fn held(survivors: impl Iterator<Item = u32>, changed: &BTreeSet<PathBuf>) -> Option<String> {
    if changed.is_empty() {
        return None;
    }
    for task in survivors {
        let folder = PathBuf::from(format!("/proc/{task}"));
        let mut links: Vec<PathBuf> = ["cwd", "root", "exe"].iter().map(|name| folder.join(name)).collect();
        for list in ["fd", "map_files"] {
            links.extend(fs::read_dir(folder.join(list)).into_iter().flatten().flatten().map(|entry| entry.path()));
        }
        for link in links {
            let Ok(path) = fs::read_link(&link) else { continue };
            let Ok(path) = path.strip_prefix("/") else { continue };
            if path.to_string_lossy().ends_with(" (deleted)") && !path.starts_with("memfd:") && !path.starts_with("dev")
            {
                return Some(format!("survivor {task} holds {}", path.display()));
            }
            // A changed name above it matters where the name itself came or went, which lists its own path.
            if changed.contains(path) {
                return Some(format!("survivor {task} holds {}", path.display()));
            }
        }
    }
    None
}
