//! What processes hold open: whether CRIU can save it, and whether it is the sandbox's own.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use crab_core::{External, Result};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::cgroup::timespec;
use crate::preflight::refuse;
use crate::procfs::{self, Descriptor};
use crate::{mounts, sockets};

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

/// Protocols of sockets that CRIU knows.
const PROTOCOLS: &[&str] = &[
    "UNIX",
    "UNIX-STREAM",
    "TCP",
    "TCPv6",
    "UDP",
    "UDPv6",
    "UDP-Lite",
    "UDPLITEv6",
    "RAW",
    "RAWv6",
    "PACKET",
    "NETLINK",
];

/// Looks at all that the processes of a sandbox hold.
pub(crate) fn check(processes: &BTreeSet<u32>, init: u32, external: &[External]) -> Result<()> {
    let mut held = Held { external, ..Held::default() };
    let mut seen = BTreeSet::new();
    for pid in processes {
        if seen.insert(procfs::namespace(*pid, "mnt")) {
            held.mounts.extend(mounts::of(*pid).into_iter().map(|mount| mount.id));
        }
    }
    for pid in processes {
        for descriptor in procfs::descriptors(*pid) {
            held.look_at(*pid, descriptor)?;
        }
    }
    held.check_pipes()?;
    held.check_sockets(init, processes)
}

/// What was found so far.
#[derive(Default)]
struct Held<'a> {
    external: &'a [External],
    /// The mounts that the sandbox sees.
    mounts: BTreeSet<u64>,
    pipes: BTreeMap<u64, Ends>,
    /// Unix sockets, each by one holder: process and descriptor.
    unix: BTreeMap<u64, (u32, u32)>,
}

impl Held<'_> {
    fn declares(&self, wanted: &External) -> bool {
        self.external.contains(wanted)
    }

    fn look_at(&mut self, pid: u32, descriptor: Descriptor) -> Result<()> {
        let (number, target) = (descriptor.number, descriptor.target.as_str());
        let holds = |what: &str| format!("{} holds {what} at descriptor {number}", procfs::describe(pid));
        if let Some((_, what)) = UNSAVABLE.iter().find(|(link, _)| target == *link) {
            return Err(refuse(format!("{}, which cannot be saved", holds(what))));
        }
        if let Some(inode) = procfs::link_inode(target, "pipe") {
            let ends = self.pipes.entry(inode).or_default();
            match (descriptor.readable, descriptor.writable) {
                (true, true) => *ends = Ends::default().both(pid, descriptor),
                (true, false) if ends.read.is_none() => ends.read = Some((pid, descriptor)),
                (false, true) if ends.write.is_none() => ends.write = Some((pid, descriptor)),
                _ => {}
            }
        } else if let Some(inode) = procfs::link_inode(target, "socket") {
            let protocol = descriptor.protocol().unwrap_or_default();
            if !protocol.is_empty() && !PROTOCOLS.contains(&protocol.as_str()) {
                let what = format!("a socket of the kind {}", protocol.escape_default());
                return Err(refuse(format!("{}, which cannot be saved", holds(&what))));
            }
            if protocol.starts_with("UNIX") {
                self.unix.entry(inode).or_insert((pid, number));
            }
        } else if target.starts_with('/') {
            self.is_own_file(&descriptor, &holds)?;
        }
        Ok(())
    }

    /// A file that was opened through a mount that the sandbox does not have is the host's.
    fn is_own_file(&self, descriptor: &Descriptor, holds: &dyn Fn(&str) -> String) -> Result<()> {
        let Some(mount) = descriptor.mount() else { return Ok(()) };
        if self.mounts.contains(&mount) {
            return Ok(());
        }
        let Ok(metadata) = std::fs::metadata(&descriptor.path) else { return Ok(()) };
        let target = descriptor.target.escape_default();
        if is_terminal(&metadata) {
            if self.declares(&External::Terminal { number: metadata.rdev(), device: metadata.dev() }) {
                return Ok(());
            }
            return Err(refuse(holds(&format!("the host's terminal {target}, which is not declared,")))
                .fix("declare the terminal as external, or close it"));
        }
        // Memory of the kernel's own: a memfd, shared memory, a deleted file of System V.
        if ["/memfd:", "/SYSV", "/dev/zero", "/anon_hugepage", "/[aio]", "/i915", "/drm"]
            .iter()
            .any(|name| descriptor.target.starts_with(name))
        {
            return Ok(());
        }
        Err(refuse(holds(&format!("{target}, which is not in the sandbox's root,")))
            .fix("close it, or open it inside the sandbox"))
    }

    fn check_pipes(&self) -> Result<()> {
        let undeclared = self.pipes.iter().filter(|(inode, _)| !self.declares(&External::Pipe { inode: **inode }));
        for (inode, ends) in undeclared {
            ends.check(*inode)?;
        }
        Ok(())
    }

    /// Refuses a Unix socket whose other end is held outside, or that is of another network namespace.
    fn check_sockets(&self, init: u32, processes: &BTreeSet<u32>) -> Result<()> {
        if self.unix.is_empty() {
            return Ok(());
        }
        let peers = std::fs::File::open(format!("/proc/{init}/ns/net")).and_then(sockets::unix_peers);
        let Ok(peers) = peers.inspect_err(|error| tracing::debug!(%error, "Unix sockets could not be looked at"))
        else {
            return Ok(());
        };
        for (inode, (pid, number)) in &self.unix {
            let name = || format!("{} holds socket:[{inode}] at descriptor {number}", procfs::describe(*pid));
            let declared = self.declares(&External::Socket { inode: *inode });
            match peers.get(inode) {
                None if declared => {
                    return Err(refuse(format!("{}, which was made in another network namespace", name()))
                        .fix("make its pair in the sandbox's network namespace"));
                }
                Some(peer) if *peer != 0 && !declared && !self.unix.contains_key(peer) => {
                    // The other end may also be on its way inside a message.
                    if let Some(holder) = holder_outside(*peer, processes) {
                        return Err(refuse(format!(
                            "{}, whose other end is held by {} outside the sandbox and not declared",
                            name(),
                            procfs::describe(holder)
                        ))
                        .fix("declare the socket as external, or close it"));
                    }
                }
                None => {
                    return Err(refuse(format!("{}, which was made outside the sandbox and is not declared", name()))
                        .fix("declare the socket as external, or close it"));
                }
                _ => {}
            }
        }
        Ok(())
    }
}

fn is_terminal(metadata: &std::fs::Metadata) -> bool {
    // The ends of Unix98 ptys.
    metadata.file_type().is_char_device() && (136..=143).contains(&rustix::fs::major(metadata.rdev()))
}

/// Who holds a socket outside of a sandbox.
fn holder_outside(inode: u64, processes: &BTreeSet<u32>) -> Option<u32> {
    let target = format!("socket:[{inode}]");
    procfs::all()
        .into_iter()
        .filter(|pid| !processes.contains(pid))
        .find(|pid| procfs::descriptors(*pid).iter().any(|descriptor| descriptor.target == target))
}

/// The ends of one pipe that the sandbox holds, each by one holder.
#[derive(Debug, Default)]
struct Ends {
    read: Option<(u32, Descriptor)>,
    write: Option<(u32, Descriptor)>,
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
}
