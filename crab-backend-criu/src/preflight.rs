//! What is looked at before anything is stopped: CRIU would fail on it in the middle of a dump, or hang, and would
//! name a number where a person needs a name.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::time::Duration;

use crab_core::{Error, ErrorKind, External, Result, Sandbox};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::cgroup::{Cgroup, timespec};
use crate::procfs::{self, Descriptor, Stat};

/// Descriptors that no CRIU can save, by what their links show.
const UNSAVABLE: &[(&str, &str)] = &[
    ("anon_inode:[io_uring]", "an io_uring"),
    ("anon_inode:[userfaultfd]", "a userfaultfd"),
    ("anon_inode:[perf_event]", "a perf event"),
    ("anon_inode:seccomp notify", "a seccomp notification listener"),
    ("anon_inode:[landlock-ruleset]", "a Landlock ruleset"),
    ("anon_inode:[fscontext]", "a file system context"),
    ("anon_inode:kvm-vm", "a virtual machine"),
    ("anon_inode:[bpf-prog]", "a BPF program"),
    ("anon_inode:bpf-prog", "a BPF program"),
    ("anon_inode:bpf_link", "a BPF link"),
];

/// A process tree that may be dumped.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) init: u32,
    /// What its memory needs at the most.
    pub(crate) bytes: u64,
}

fn refuse(what: String) -> Error {
    Error::new(ErrorKind::NotCheckpointable, what)
}

/// Looks at the whole sandbox.
pub(crate) fn check(sandbox: &Sandbox) -> Result<Tree> {
    let init = live_init(sandbox)?;
    has_own_namespaces(init)?;
    let cgroup = Cgroup::at(&sandbox.cgroup);
    let processes = membership(&cgroup, init)?;
    let mut pipes = BTreeMap::new();
    for pid in &processes {
        for descriptor in procfs::descriptors(*pid) {
            look_at(*pid, descriptor, &mut pipes)?;
        }
    }
    for (inode, ends) in &pipes {
        let declared =
            sandbox.external.iter().any(|e| matches!(e, External::Pipe { inode: declared } if declared == inode));
        if !declared {
            ends.check(*inode)?;
        }
    }
    let page = u64::try_from(rustix::param::page_size()).unwrap_or(4096);
    let pages: u64 = processes.iter().filter_map(|pid| Stat::read(*pid)).map(|stat| stat.pages).sum();
    Ok(Tree { init, bytes: pages.saturating_mul(page) })
}

/// The init that the host names, where it lives.
fn live_init(sandbox: &Sandbox) -> Result<u32> {
    let invalid = |what: String| Err(Error::new(ErrorKind::InvalidInput, what).fix("capture a sandbox that lives"));
    let Some(init) = sandbox.init else {
        return invalid(format!("nothing lives in the sandbox {}, so there are no processes to save", sandbox.id));
    };
    match Stat::read(init) {
        Some(stat) if !stat.is_dead() => Ok(init),
        _ => invalid(format!("the init of the sandbox {}, process {init}, does not live", sandbox.id)),
    }
}

/// In the host's own pid namespace the numbers would be taken at restore; in its mount namespace a restore would put
/// the sandbox's mounts into the host.
fn has_own_namespaces(init: u32) -> Result<()> {
    let me = std::process::id();
    for (kind, name) in [("pid", "pid"), ("mnt", "mount")] {
        if procfs::namespace(init, kind) == procfs::namespace(me, kind) {
            let fix = "start the sandbox in pid and mount namespaces of its own";
            return Err(refuse(format!("{} shares the host's {name} namespace", procfs::describe(init))).fix(fix));
        }
    }
    if procfs::pid_inside(init) != Some(1) {
        let fix = "name the process that is number 1 in the sandbox as its init";
        return Err(refuse(format!("{} is not number 1 of its pid namespace", procfs::describe(init))).fix(fix));
    }
    Ok(())
}

/// The live processes of the sandbox: those of its cgroup and those below its init must be the same.
pub(crate) fn membership(cgroup: &Cgroup, init: u32) -> Result<BTreeSet<u32>> {
    // Processes come and go between the two looks; what is wrong stays wrong.
    let (mut outside, mut escaped): (Option<BTreeSet<u32>>, Option<BTreeSet<u32>>) = (None, None);
    for _ in 0..4 {
        let members = cgroup.processes()?;
        let tree = procfs::tree(init);
        let alive = |pid: &u32| Stat::read(*pid).is_none_or(|stat| !stat.is_dead());
        let keep = |now: BTreeSet<u32>, before: &Option<BTreeSet<u32>>| match before {
            Some(before) => now.intersection(before).copied().collect(),
            None => now,
        };
        let now_outside = keep(members.difference(&tree).copied().filter(alive).collect(), &outside);
        let now_escaped = keep(
            tree.difference(&members).copied().filter(|pid| Stat::read(*pid).is_some_and(|s| !s.is_dead())).collect(),
            &escaped,
        );
        if now_outside.is_empty() && now_escaped.is_empty() {
            return Ok(members);
        }
        (outside, escaped) = (Some(now_outside), Some(now_escaped));
    }
    let place = cgroup.path().display();
    if let Some(pid) = outside.iter().flatten().next() {
        let who = if *pid == 0 { "a process of another pid namespace".into() } else { procfs::describe(*pid) };
        return Err(refuse(format!("{who} is in the sandbox's cgroup {place} but not below its init, process {init}"))
            .fix("start every process of the sandbox below its init"));
    }
    let who = escaped.iter().flatten().next().map_or_else(String::new, |pid| procfs::describe(*pid));
    Err(refuse(format!("{who} is below the sandbox's init but not in its cgroup {place}"))
        .fix("keep every process of the sandbox in its cgroup"))
}

/// The ends of one pipe that the sandbox holds, each by one holder.
#[derive(Debug, Default)]
struct Ends {
    read: Option<(u32, Descriptor)>,
    write: Option<(u32, Descriptor)>,
}

fn look_at(pid: u32, descriptor: Descriptor, pipes: &mut BTreeMap<u64, Ends>) -> Result<()> {
    let (number, target) = (descriptor.number, descriptor.target.as_str());
    if let Some((_, what)) = UNSAVABLE.iter().find(|(link, _)| target == *link) {
        return Err(refuse(format!(
            "{} holds {what} at descriptor {number}, which cannot be saved",
            procfs::describe(pid)
        )));
    }
    if let Some(inode) = procfs::link_inode(target, "pipe") {
        let ends = pipes.entry(inode).or_default();
        match (descriptor.readable, descriptor.writable) {
            (true, true) => *ends = Ends::default().both(pid, descriptor),
            (true, false) if ends.read.is_none() => ends.read = Some((pid, descriptor)),
            (false, true) if ends.write.is_none() => ends.write = Some((pid, descriptor)),
            _ => {}
        }
    }
    Ok(())
}

impl Ends {
    /// One descriptor that is both ends.
    fn both(self, pid: u32, descriptor: Descriptor) -> Self {
        let twin = Descriptor { target: descriptor.target.clone(), path: descriptor.path.clone(), ..descriptor };
        Self { read: Some((pid, twin)), write: Some((pid, descriptor)) }
    }

    /// Refuses a pipe whose other end is held outside.
    fn check(&self, inode: u64) -> Result<()> {
        let (held, other) = match (&self.read, &self.write) {
            (Some(read), None) if has_writer(&read.1.path) => (read, "writing"),
            (None, Some(write)) if has_reader(&write.1.path) => (write, "reading"),
            _ => return Ok(()),
        };
        let (pid, descriptor) = held;
        Err(refuse(format!(
            "{} holds pipe:[{inode}] at descriptor {}, whose {other} end is outside the sandbox and not declared",
            procfs::describe(*pid),
            descriptor.number
        ))
        .fix("declare the pipe as external, or close it"))
    }
}

/// Whether somebody holds the reading end: a writing end reports an error where nobody does.
fn has_reader(writing_end: &Path) -> bool {
    !reports(writing_end, OFlags::WRONLY, PollFlags::OUT, PollFlags::ERR)
}

/// Whether somebody holds the writing end: a reading end reports a hang-up where nobody does.
fn has_writer(reading_end: &Path) -> bool {
    !reports(reading_end, OFlags::RDONLY, PollFlags::IN, PollFlags::HUP)
}

/// Opens one more of the same end for a moment and asks it. An end that is gone has no other end either.
fn reports(end: &Path, mode: OFlags, ask: PollFlags, answer: PollFlags) -> bool {
    match rustix::fs::open(end, mode | OFlags::NONBLOCK | OFlags::CLOEXEC, Mode::empty()) {
        Ok(pipe) => {
            let mut polled = [PollFd::new(&pipe, ask)];
            let done = rustix::event::poll(&mut polled, Some(&timespec(Duration::ZERO)));
            let [polled] = polled;
            done.is_ok() && polled.revents().contains(answer)
        }
        Err(error) => error == Errno::NOENT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsRawFd;

    fn link(fd: &impl AsRawFd) -> std::path::PathBuf {
        format!("/proc/self/fd/{}", fd.as_raw_fd()).into()
    }

    #[test]
    fn a_pipe_tells_whether_its_other_end_is_held() {
        let (reader, writer) = std::io::pipe().unwrap();
        assert!(has_writer(&link(&reader)) && has_reader(&link(&writer)));
        drop(writer);
        assert!(!has_writer(&link(&reader)));
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        assert!(!has_reader(&link(&writer)));
    }

    #[test]
    fn a_sandbox_without_init_is_no_input() {
        let sandbox = Sandbox::new("box".parse().unwrap(), "/", "/no/such/cgroup");
        assert_eq!(check(&sandbox).unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn a_process_of_the_host_is_refused() {
        let sandbox = Sandbox::new("box".parse().unwrap(), "/", "/no/such/cgroup").with_init(std::process::id());
        let error = check(&sandbox).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotCheckpointable, "{error}");
        assert!(error.to_string().contains("namespace"), "{error}");
    }
}
