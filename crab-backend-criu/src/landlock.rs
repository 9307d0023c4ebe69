//! Landlock domains, which CRIU loses without a word and the kernel shows nowhere.
//!
//! A task in a domain may not look into a process outside of it. So each task that could have one is stopped for a
//! moment and made to ask, by `kcmp`, for a helper of ours in the same pid namespace with the same user and no rights:
//! nothing but Landlock forbids that. Its registers, signals and system call are as before afterwards, and a system call
//! that it waits in goes on. Tasks without `no_new_privs` are not asked: whoever restricts itself sets that first.
#![allow(unsafe_code)]

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::fs::FileExt;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use crab_core::Result;
use rustix::thread::LinkNameSpaceType;

use crate::preflight::refuse;
use crate::procfs;

/// A task that does not stop in this time waits for a device, and is left alone.
const PATIENCE: Duration = Duration::from_millis(500);
/// `PTRACE_O_SUSPEND_SECCOMP`: a filter must not judge what we make the task do.
const SUSPEND_SECCOMP: usize = 1 << 21;
const GETSIGMASK: libc::c_uint = 0x420a;
const SETSIGMASK: libc::c_uint = 0x420b;
/// The kernel's signal set, in bytes.
const SIGNAL_SET: usize = 8;
/// Two processes' memory is compared.
const KCMP_VM: u64 = 1;

/// Refuses a process that is in a Landlock domain.
pub(crate) fn check(processes: &BTreeSet<u32>, init: u32) -> Result<()> {
    let suspects: Vec<Task> = processes.iter().flat_map(|pid| Task::suspects_of(*pid)).collect();
    if suspects.is_empty() || !kernel_has_it() || procfs::namespace(init, "user") != own_user_namespace() {
        return Ok(());
    }
    // What this thread is the tracer of, and what it is the parent of, belongs to it alone.
    let asking = || find(&suspects, init);
    let found = std::thread::scope(|scope| {
        scope.spawn(asking).join().unwrap_or_else(|_| Err(io::Error::other("the thread that asks ended")))
    });
    match found {
        Ok(Some(task)) => Err(refuse(format!(
            "{} is restricted by Landlock, and a restore would lose that",
            procfs::describe(task.pid)
        ))
        .fix("let it run without Landlock, or keep the sandbox's files only")),
        Ok(None) => Ok(()),
        Err(error) => {
            tracing::warn!(%error, "it could not be told whether a process is restricted by Landlock");
            Ok(())
        }
    }
}

fn own_user_namespace() -> Option<u64> {
    procfs::namespace(std::process::id(), "user")
}

/// `landlock_create_ruleset` tells its version without making anything.
fn kernel_has_it() -> bool {
    // SAFETY: no memory is passed.
    unsafe { libc::syscall(libc::SYS_landlock_create_ruleset, std::ptr::null::<u8>(), 0_usize, 1_u32) >= 1 }
}

/// A thread that may be in a domain.
#[derive(Clone, Copy, Debug)]
struct Task {
    pid: u32,
    thread: i32,
    user: u32,
    group: u32,
}

impl Task {
    fn suspects_of(pid: u32) -> Vec<Self> {
        let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
        let suspect = |entry: std::fs::DirEntry| {
            let thread = entry.file_name().to_str()?.parse().ok()?;
            let status = std::fs::read_to_string(entry.path().join("status")).ok()?;
            let field = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)).map(str::trim);
            // Zombies have nothing to lose; what the user stopped stays stopped.
            let idle = field("State:")?.starts_with(['Z', 'X', 'T', 't']);
            let effective = |ids: &str| ids.split_ascii_whitespace().nth(1)?.parse().ok();
            if field("NoNewPrivs:")? != "1" || idle || is_confined(&entry.path()) {
                return None;
            }
            Some(Self { pid, thread, user: effective(field("Uid:")?)?, group: effective(field("Gid:")?)? })
        };
        threads.flatten().filter_map(suspect).collect()
    }
}

/// Under another security module a refusal would not tell which of them refused.
fn is_confined(task: &std::path::Path) -> bool {
    let label = std::fs::read_to_string(task.join("attr/current")).unwrap_or_default();
    let label = label.trim_end_matches(['\0', '\n']);
    !label.is_empty() && !label.starts_with("unconfined")
}

fn find(suspects: &[Task], init: u32) -> io::Result<Option<Task>> {
    let namespace = File::open(format!("/proc/{init}/ns/pid"))?;
    rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::ProcessID))?;
    let mut helpers: BTreeMap<(u32, u32), Helper> = BTreeMap::new();
    for task in suspects {
        let key = (task.user, task.group);
        if let std::collections::btree_map::Entry::Vacant(entry) = helpers.entry(key) {
            entry.insert(Helper::start(key)?);
        }
        let inside = helpers.get(&key).map_or(0, |helper| helper.inside);
        match is_forbidden(task.thread, inside) {
            Ok(true) => return Ok(Some(*task)),
            Ok(false) => {}
            // It may have ended, or somebody else traces it: then CRIU will say so.
            Err(error) => tracing::debug!(%error, thread = task.thread, "a task could not be asked"),
        }
    }
    Ok(None)
}

/// A process that does nothing, in the sandbox's pid namespace. Dropping ends it.
struct Helper {
    child: Child,
    /// Its number inside.
    inside: u32,
}

impl Helper {
    fn start((user, group): (u32, u32)) -> io::Result<Self> {
        let child = Command::new("/bin/sleep")
            .arg("60")
            .env_clear()
            .current_dir("/")
            .uid(user)
            .gid(group)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()?;
        let mut helper = Self { child, inside: 0 };
        helper.inside =
            procfs::pid_inside(helper.child.id()).ok_or_else(|| io::Error::other("the helper ended at once"))?;
        Ok(helper)
    }
}

impl Drop for Helper {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Whether a task may not look into the helper.
#[cfg(target_arch = "x86_64")]
fn is_forbidden(thread: i32, helper: u32) -> io::Result<bool> {
    let entry = system_call_instruction(thread)?;
    let traced = Traced::stop(thread)?;
    let helper = u64::from(helper);
    match traced.call(entry, 312, [helper, helper, KCMP_VM, 0, 0])? {
        0 => Ok(false),
        error if error == -i64::from(libc::EPERM) => Ok(true),
        other => Err(io::Error::from_raw_os_error(i32::try_from(-other).unwrap_or(libc::EIO))),
    }
}

#[cfg(not(target_arch = "x86_64"))]
fn is_forbidden(_: i32, _: u32) -> io::Result<bool> {
    Err(io::Error::from(io::ErrorKind::Unsupported))
}

/// Where in the task's memory a `syscall` instruction is: in the kernel's own page that every task has.
#[cfg(target_arch = "x86_64")]
fn system_call_instruction(thread: i32) -> io::Result<u64> {
    let none = || io::Error::other("no system call instruction was found");
    let maps = std::fs::read(format!("/proc/{thread}/maps"))?;
    let maps = String::from_utf8_lossy(&maps);
    let line = maps.lines().find(|line| line.ends_with("[vdso]")).ok_or_else(none)?;
    let range = line.split(' ').next().and_then(|range| range.split_once('-')).ok_or_else(none)?;
    let number = |text: &str| u64::from_str_radix(text, 16).map_err(|_| none());
    let (begin, end) = (number(range.0)?, number(range.1)?);
    let mut code = vec![0; usize::try_from(end.saturating_sub(begin).min(64 << 10)).map_err(|_| none())?];
    File::open(format!("/proc/{thread}/mem"))?.read_exact_at(&mut code, begin)?;
    let at = code.windows(2).position(|two| two == [0x0f, 0x05]).ok_or_else(none)?;
    Ok(begin + at as u64)
}

/// A task that this thread has stopped. Dropping lets it go as it was.
#[cfg(target_arch = "x86_64")]
struct Traced {
    thread: i32,
    registers: libc::user_regs_struct,
    blocked: u64,
}

#[cfg(target_arch = "x86_64")]
impl Traced {
    fn stop(thread: i32) -> io::Result<Self> {
        request(libc::PTRACE_SEIZE, thread, 0, SUSPEND_SECCOMP)?;
        // From here on an error ends the thread that traces before long, and the kernel lets the task go.
        request(libc::PTRACE_INTERRUPT, thread, 0, 0)?;
        wait(thread)?;
        // SAFETY: all zeros are a value of this structure of integers.
        let mut registers: libc::user_regs_struct = unsafe { std::mem::zeroed() };
        request(libc::PTRACE_GETREGS, thread, 0, std::ptr::from_mut(&mut registers) as usize)?;
        let mut blocked = 0_u64;
        request(GETSIGMASK, thread, SIGNAL_SET, std::ptr::from_mut(&mut blocked) as usize)?;
        let traced = Self { thread, registers, blocked };
        // No signal may come between.
        let all = u64::MAX;
        request(SETSIGMASK, thread, SIGNAL_SET, std::ptr::from_ref(&all) as usize)?;
        Ok(traced)
    }

    /// Makes the task do one system call.
    fn call(&self, entry: u64, number: u64, arguments: [u64; 5]) -> io::Result<i64> {
        let [rdi, rsi, rdx, r10, r8] = arguments;
        // Not in a system call, so that the kernel does not begin the old one again.
        let mut registers = libc::user_regs_struct {
            rip: entry,
            rax: number,
            orig_rax: u64::MAX,
            rdi,
            rsi,
            rdx,
            r10,
            r8,
            ..self.registers
        };
        request(libc::PTRACE_SETREGS, self.thread, 0, std::ptr::from_ref(&registers) as usize)?;
        request(libc::PTRACE_SINGLESTEP, self.thread, 0, 0)?;
        wait(self.thread)?;
        request(libc::PTRACE_GETREGS, self.thread, 0, std::ptr::from_mut(&mut registers) as usize)?;
        Ok(registers.rax.cast_signed())
    }
}

#[cfg(target_arch = "x86_64")]
impl Drop for Traced {
    fn drop(&mut self) {
        let restore = || {
            request(libc::PTRACE_SETREGS, self.thread, 0, std::ptr::from_ref(&self.registers) as usize)?;
            request(SETSIGMASK, self.thread, SIGNAL_SET, std::ptr::from_ref(&self.blocked) as usize)?;
            request(libc::PTRACE_DETACH, self.thread, 0, 0)
        };
        if let Err(error) = restore() {
            // It has ended, then: nothing else makes these fail on a stopped task.
            tracing::debug!(%error, thread = self.thread, "a task that was asked could not be let go");
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn request(what: libc::c_uint, thread: i32, address: usize, data: usize) -> io::Result<()> {
    // SAFETY: the caller passes the address of what the request reads or writes, alive and of its size.
    let done = unsafe { libc::ptrace(what, thread, address, data) };
    if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Waits until a task has stopped.
#[cfg(target_arch = "x86_64")]
fn wait(thread: i32) -> io::Result<()> {
    let end = Instant::now() + PATIENCE;
    loop {
        let mut status = 0;
        // SAFETY: the status is alive.
        match unsafe { libc::waitpid(thread, &raw mut status, libc::__WALL | libc::WNOHANG) } {
            -1 => return Err(io::Error::last_os_error()),
            0 if Instant::now() >= end => return Err(io::Error::from(io::ErrorKind::TimedOut)),
            0 => std::thread::sleep(Duration::from_micros(20)),
            _ if libc::WIFSTOPPED(status) => return Ok(()),
            _ => return Err(io::Error::other("the task has ended")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A process that restricts itself, or does not, and then waits for a line.
    fn subject(restrict: bool) -> Child {
        let program = "
import ctypes, sys
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl(38, 1, 0, 0, 0)
if sys.argv[1] == 'True':
    ruleset = libc.syscall(444, (ctypes.c_uint64 * 1)(1), 8, 0)
    assert ruleset >= 0 and libc.syscall(446, ruleset, 0) == 0
print('ready', flush=True)
for line in sys.stdin:
    print('answer', flush=True)
";
        Command::new("python3")
            .args(["-c", program, if restrict { "True" } else { "False" }])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap()
    }

    #[test]
    fn a_restricted_process_is_told_from_one_that_is_not_and_both_go_on() {
        use std::io::{BufRead, BufReader, Write};
        if !rustix::process::geteuid().is_root()
            || !kernel_has_it()
            || Command::new("python3").arg("-V").output().is_err()
        {
            println!("skipped: Landlock (root, the kernel's support and python3 are needed)");
            return;
        }
        for restrict in [false, true] {
            let mut child = subject(restrict);
            let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
            assert_eq!(lines.next().unwrap().unwrap(), "ready");
            for _ in 0..20 {
                let outcome = check(&BTreeSet::from([child.id()]), std::process::id());
                assert_eq!(outcome.is_err(), restrict, "{outcome:?}");
                writeln!(child.stdin.as_mut().unwrap(), "x").unwrap();
                assert_eq!(lines.next().unwrap().unwrap(), "answer");
            }
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
}
