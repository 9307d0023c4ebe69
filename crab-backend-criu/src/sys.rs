//! What needs `unsafe`: starting a child that arranges its own surroundings between `fork` and `exec`.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use rustix::io::FdFlags;
use rustix::mount::MountPropagationFlags;
use rustix::thread::UnshareFlags;

/// What a child does before it becomes the program. Everything here is made ready beforehand, since between `fork` and
/// `exec` nothing may allocate.
#[derive(Debug, Default)]
pub(crate) struct Surroundings {
    /// Descriptors that it keeps, under the numbers that they have here.
    pub(crate) keep: Vec<OwnedFd>,
    /// The `cgroup.procs` of the cgroup that it moves into.
    pub(crate) cgroup: Option<OwnedFd>,
    /// It starts a session of its own.
    pub(crate) session: bool,
    /// Directories that it sees bound to others, in a mount namespace of its own: (what, where).
    pub(crate) binds: Vec<(CString, CString)>,
}

impl Surroundings {
    /// Runs in the child.
    fn arrange(&self) -> io::Result<()> {
        if self.session {
            rustix::process::setsid()?;
        }
        if let Some(cgroup) = &self.cgroup {
            rustix::io::write(cgroup, b"0")?;
        }
        for fd in &self.keep {
            rustix::io::fcntl_setfd(fd, FdFlags::empty())?;
        }
        if !self.binds.is_empty() {
            // SAFETY: the child has one thread and shares no descriptor table; only its mount namespace is unshared.
            unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS)? };
            rustix::mount::mount_change(c"/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?;
            for (what, place) in &self.binds {
                rustix::mount::mount_bind(what.as_c_str(), place.as_c_str())?;
            }
        }
        Ok(())
    }
}

/// Starts `command` in its surroundings.
pub(crate) fn spawn(mut command: Command, surroundings: Surroundings) -> io::Result<Child> {
    // SAFETY: the closure only makes system calls on what was allocated before the fork; it takes no lock and
    // allocates nothing.
    unsafe { command.pre_exec(move || surroundings.arrange()) };
    command.spawn()
}
