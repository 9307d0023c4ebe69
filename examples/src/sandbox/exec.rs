//! Commands inside a sandbox.
//!
//! The command becomes a grandchild of the sandbox's pid 1: a small supervisor (`crab-init exec`, from the sandbox's
//! own root) runs it and reports how it ended over a pipe. So a checkpoint finds every process below pid 1, also while
//! a command runs, and children that outlive their command need nothing of the host but the output pipe.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crab_core::{Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::OFlags;
use rustix::process::{Pid, PidfdFlags, Signal};

use super::cgroup::{Cgroup, timespec};
use super::pipes::{Pipe, Pipes};
use super::state::Stat;
use super::sys;

/// The program inside every sandbox's root, built by `cargo xtask setup` from `init.c`.
pub(super) const INIT: &str = "/sbin/crab-init";
const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// How a command is run.
#[derive(Clone, Debug)]
pub struct ExecOptions {
    /// The working directory, as seen inside.
    pub cwd: PathBuf,
    /// After this long the command and its session are killed.
    pub timeout: Option<Duration>,
    /// Output beyond this many bytes is read and thrown away.
    pub output_limit: usize,
    /// Variables besides `PATH`, `HOME`, `LANG` and `TERM`.
    pub env: Vec<(String, String)>,
}

impl Default for ExecOptions {
    fn default() -> Self {
        Self { cwd: "/root".into(), timeout: None, output_limit: 1 << 20, env: Vec::new() }
    }
}

/// What became of a command.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Output {
    /// Its exit code, 128 plus the signal's number where a signal ended it. None where the whole sandbox was killed or
    /// the time was up.
    pub code: Option<i32>,
    /// Standard output and standard error, in the order of writing, up to the limit.
    pub bytes: Vec<u8>,
    /// There was more output than the limit.
    pub truncated: bool,
    /// The time was up.
    pub timed_out: bool,
}

impl Output {
    /// The output as text, with bytes that are none replaced.
    #[must_use]
    pub fn text(&self) -> String {
        String::from_utf8_lossy(&self.bytes).into_owned()
    }

    /// Whether the command ended with exit code 0.
    #[must_use]
    pub fn success(&self) -> bool {
        self.code == Some(0)
    }
}

/// `{kind, value}` as init.c writes them.
enum Record {
    Ready,
    Started(u32),
    Exited(i32),
    Failed(i32),
}

impl Record {
    fn parse(bytes: [u8; 8]) -> Option<Self> {
        let [a, b, c, d, rest @ ..] = bytes;
        let value = i32::from_ne_bytes(rest);
        match i32::from_ne_bytes([a, b, c, d]) {
            1 => Some(Self::Ready),
            2 => u32::try_from(value).ok().map(Self::Started),
            3 => Some(Self::Exited(value)),
            4 => Some(Self::Failed(value)),
            _ => None,
        }
    }

    fn read(pipe: &OwnedFd) -> rustix::io::Result<Option<Self>> {
        let mut bytes = [0; 8];
        match rustix::io::read(pipe, &mut bytes)? {
            8 => Ok(Self::parse(bytes)),
            _ => Ok(None),
        }
    }
}

/// A command line for the program inside: nothing of the host's environment goes in.
pub(super) fn inside(report: OwnedFd) -> Command {
    let mut command = Command::new(INIT);
    command
        .env_clear()
        .env("PATH", PATH)
        .env("HOME", "/root")
        .env("LANG", "C.UTF-8")
        .env("TERM", "xterm-256color")
        .stdin(Stdio::from(report));
    command
}

/// Waits until the new pid 1 says that it holds nothing of the host any more.
pub(super) fn await_ready(report: &OwnedFd) -> Result<()> {
    let failed = |why: String| Error::new(ErrorKind::Internal, format!("the sandbox's init did not start: {why}"));
    let timeout = timespec(Duration::from_secs(30));
    loop {
        match rustix::event::poll(&mut [PollFd::new(report, PollFlags::IN)], Some(&timeout)) {
            Ok(0) => return Err(failed("no word from it in 30 seconds".into())),
            Ok(_) => {}
            Err(rustix::io::Errno::INTR) => continue,
            Err(e) => return Err(Error::io("wait for the sandbox's init", e.into())),
        }
        return match Record::read(report) {
            Ok(Some(Record::Ready)) => Ok(()),
            Ok(Some(Record::Failed(errno))) => Err(failed(std::io::Error::from_raw_os_error(errno).to_string())),
            Ok(_) => Err(failed("it ended".into())),
            Err(e) => Err(Error::io("read from the sandbox's init", e.into())),
        };
    }
}

/// A command that was started, with the pipes to it.
pub(super) struct Running {
    pipes: Pipes,
    cgroup: Cgroup,
    report: OwnedFd,
    report_inode: u64,
    output: OwnedFd,
    output_inode: u64,
}

/// Starts a command; returns when it is wholly inside.
pub(super) fn start(
    line: &str,
    options: &ExecOptions,
    init: OwnedFd,
    cgroup: &Cgroup,
    pipes: &Pipes,
) -> Result<Running> {
    let Pipe { read: report, write: report_in, inode: report_inode } = pipes.make()?;
    let Pipe { read: output, write: output_in, inode: output_inode } = pipes.make()?;
    let running = Running { pipes: pipes.clone(), cgroup: cgroup.clone(), report, report_inode, output, output_inode };
    let cannot = |e| Error::io("start a command in the sandbox", e);
    let error_in = output_in.try_clone().map_err(cannot)?;
    let mut command = inside(report_in);
    command
        .arg("exec")
        .arg(&options.cwd)
        .args(["/bin/bash", "-c", line])
        .envs(options.env.iter().map(|(name, value)| (name, value)))
        .stdout(Stdio::from(output_in))
        .stderr(Stdio::from(error_in));
    let mut entered = sys::spawn_inside(command, init, cgroup.open_procs()?).map_err(cannot)?;
    // It ends once the supervisor has become a child of the sandbox's pid 1.
    entered.wait().map_err(cannot)?;
    Ok(running)
}

impl Running {
    /// Waits for the command's end. What its children still write afterwards is drained in the background.
    pub(super) fn finish(self, options: &ExecOptions) -> Result<Output> {
        let deadline = options.timeout.and_then(|t| Instant::now().checked_add(t));
        let mut collected = Output::default();
        let outcome = self.wait(deadline, options.output_limit, &mut collected);
        let Self { pipes, report, report_inode, output, output_inode, .. } = self;
        if outcome.is_ok() && is_at_end(&report) {
            pipes.forget(report_inode);
        } else {
            pipes.drain(report, report_inode);
        }
        if is_at_end(&output) {
            pipes.forget(output_inode);
        } else {
            pipes.drain(output, output_inode);
        }
        outcome.map(|()| collected)
    }

    fn wait(&self, deadline: Option<Instant>, limit: usize, collected: &mut Output) -> Result<()> {
        for pipe in [&self.report, &self.output] {
            rustix::fs::fcntl_setfl(pipe, OFlags::NONBLOCK).map_err(|e| Error::io("prepare a pipe", e.into()))?;
        }
        let mut supervisor = None;
        let mut output_open = true;
        loop {
            let left =
                if collected.timed_out { None } else { deadline.map(|d| d.saturating_duration_since(Instant::now())) };
            if left == Some(Duration::ZERO) {
                collected.timed_out = true;
                kill_session(&self.cgroup, supervisor);
                continue;
            }
            let mut wanted = vec![PollFd::new(&self.report, PollFlags::IN)];
            if output_open {
                wanted.push(PollFd::new(&self.output, PollFlags::IN));
            }
            match rustix::event::poll(&mut wanted, left.map(timespec).as_ref()) {
                Ok(_) | Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Error::io("wait for the command", e.into())),
            }
            let (about, output) = (wanted[0].revents(), wanted.get(1).map(PollFd::revents));
            if output.is_some_and(|events| !events.is_empty()) {
                output_open = self.take_output(64 << 10, limit, collected);
            }
            if about.is_empty() {
                continue;
            }
            match Record::read(&self.report) {
                Ok(Some(Record::Started(pid))) => supervisor = Some(pid),
                // The supervisor ends right after it; the next read finds that, so that nothing of it is left behind.
                Ok(Some(Record::Exited(code))) => collected.code = Some(code),
                Ok(Some(Record::Failed(errno))) => {
                    return Err(Error::io("run the command in the sandbox", std::io::Error::from_raw_os_error(errno)));
                }
                Ok(Some(Record::Ready) | None) => break,
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                Err(e) => return Err(Error::io("read how the command ended", e.into())),
            }
        }
        if collected.timed_out {
            collected.code = None;
        }
        // What it wrote before its end is in the pipe now; what survivors go on writing is not waited for.
        if output_open {
            self.take_output(1 << 20, limit, collected);
        }
        Ok(())
    }

    /// Reads what is there, `most` bytes at the most; whether more can come.
    fn take_output(&self, most: usize, limit: usize, collected: &mut Output) -> bool {
        let mut buffer = [0; 16 << 10];
        let mut taken = 0;
        while taken < most {
            match rustix::io::read(&self.output, &mut buffer) {
                Ok(0) => return false,
                Ok(count) => {
                    taken += count;
                    let room = limit.saturating_sub(collected.bytes.len());
                    collected.bytes.extend_from_slice(&buffer[..count.min(room)]);
                    collected.truncated |= count > room;
                }
                Err(rustix::io::Errno::INTR) => {}
                Err(rustix::io::Errno::AGAIN) => return true,
                Err(_) => return false,
            }
        }
        true
    }
}

/// Whether nobody holds the other end any more and nothing is left to read.
fn is_at_end(pipe: &OwnedFd) -> bool {
    let mut poll = [PollFd::new(pipe, PollFlags::IN)];
    let _ = rustix::event::poll(&mut poll, Some(&timespec(Duration::ZERO)));
    let events = poll[0].revents();
    events.contains(PollFlags::HUP) && !events.contains(PollFlags::IN)
}

/// Kills the supervisor, named by its pid inside, and everything in its session. Daemons have sessions of their own.
fn kill_session(cgroup: &Cgroup, supervisor: Option<u32>) {
    let Some(inside) = supervisor else { return };
    let processes = cgroup.processes();
    let Some(leader) = processes.iter().copied().find(|pid| pid_inside(*pid) == Some(inside)) else { return };
    for pid in processes {
        let Some(target) = i32::try_from(pid).ok().and_then(Pid::from_raw) else { continue };
        // The descriptor first, then the look: the signal cannot reach another process that got the pid.
        let Ok(handle) = rustix::process::pidfd_open(target, PidfdFlags::empty()) else { continue };
        if Stat::read(pid).is_some_and(|stat| stat.session == leader) {
            let _ = rustix::process::pidfd_send_signal(handle.as_fd(), Signal::KILL);
        }
    }
}

/// A process's pid in its own namespace.
fn pid_inside(pid: u32) -> Option<u32> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"))?;
    line.split_whitespace().last()?.parse().ok()
}
