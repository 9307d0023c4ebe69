//! The steps that must happen between fork and exec, or on a thread of their own: the only unsafe code here.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command};

use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::thread::{CapabilitySet, LinkNameSpaceType, ThreadNameSpaceType, UnshareFlags};

/// Runs `work` on a thread that ends afterwards, so that what it changes about its own thread stays with it.
pub(super) fn on_own_thread<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        std::thread::Builder::new()
            .spawn_scoped(scope, work)?
            .join()
            .unwrap_or_else(|_| Err(io::Error::other("a thread of the sandbox panicked")))
    })
}

/// Gives this thread a network namespace of its own.
pub(super) fn new_network() -> io::Result<()> {
    // SAFETY: the call is unsafe for UnshareFlags::FILES only, which would change what descriptors mean.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }.map_err(io::Error::from)
}

/// Moves this thread into a network namespace.
pub(super) fn enter_network(namespace: &File) -> io::Result<()> {
    rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))
        .map_err(io::Error::from)
}

/// What the new pid 1 does before it becomes the sandbox's init.
pub(super) struct Birth<'a> {
    pub(super) root: &'a Path,
    pub(super) cgroup_procs: File,
    pub(super) network: File,
    pub(super) hostname: &'a str,
    pub(super) tmpfs_tmp: bool,
}

/// Starts `command` as pid 1 of new namespaces, inside the cgroup and with the root of `birth`.
pub(super) fn spawn_init(mut command: Command, birth: Birth<'_>) -> io::Result<Child> {
    let below = |name: &str| cstring(&birth.root.join(name));
    let root = cstring(birth.root)?;
    let (proc, pts, shm, tmp) = (below("proc")?, below("dev/pts")?, below("dev/shm")?, below("tmp")?);
    let hostname = birth.hostname.as_bytes().to_owned();
    let Birth { cgroup_procs, network, tmpfs_tmp, .. } = birth;
    let setup = move || -> io::Result<()> {
        join_cgroup(&cgroup_procs)?;
        enter_network(&network)?;
        // SAFETY: as in new_network; FILES is not among the flags.
        unsafe {
            rustix::thread::unshare_unsafe(UnshareFlags::NEWNS | UnshareFlags::NEWUTS | UnshareFlags::NEWIPC)?;
        }
        rustix::mount::mount_change(c"/", MountPropagationFlags::PRIVATE | MountPropagationFlags::REC)?;
        rustix::mount::mount_bind(root.as_c_str(), root.as_c_str())?;
        let plain = MountFlags::NOSUID | MountFlags::NOEXEC;
        rustix::mount::mount(c"proc", proc.as_c_str(), c"proc", plain | MountFlags::NODEV, None)?;
        rustix::mount::mount(
            c"devpts",
            pts.as_c_str(),
            c"devpts",
            plain,
            Some(c"newinstance,ptmxmode=0666,mode=0620,gid=5"),
        )?;
        let tmpfs = |at: &CString| {
            let flags = MountFlags::NOSUID | MountFlags::NODEV;
            rustix::mount::mount(c"tmpfs", at.as_c_str(), c"tmpfs", flags, Some(c"mode=1777"))
        };
        tmpfs(&shm)?;
        if tmpfs_tmp {
            tmpfs(&tmp)?;
        }
        rustix::process::chdir(root.as_c_str())?;
        // The old root lands on top of the new one and is then taken away: no directory for it is needed.
        rustix::process::pivot_root(c".", c".")?;
        rustix::mount::unmount(c".", UnmountFlags::DETACH)?;
        rustix::process::chdir(c"/")?;
        rustix::system::sethostname(&hostname)?;
        drop_capabilities()
    };
    on_own_thread(move || {
        // SAFETY: as in new_network. The thread itself stays where it is; its next child is the new pid 1.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWPID) }?;
        // SAFETY: the closure makes system calls on values prepared above; it does not allocate or take locks, which
        // a child forked from a program with threads must not do.
        unsafe { command.pre_exec(setup) };
        command.spawn()
    })
}

/// Starts `command` inside the namespaces of the process behind `init`, and inside the cgroup.
pub(super) fn spawn_inside(mut command: Command, init: OwnedFd, cgroup_procs: File) -> io::Result<Child> {
    on_own_thread(move || {
        // This changes only what the thread's next child is born into.
        rustix::thread::move_into_thread_name_spaces(init.as_fd(), ThreadNameSpaceType::PROCESS_ID)?;
        let enter = move || -> io::Result<()> {
            join_cgroup(&cgroup_procs)?;
            rustix::thread::move_into_thread_name_spaces(
                init.as_fd(),
                ThreadNameSpaceType::MOUNT
                    | ThreadNameSpaceType::HOST_NAME_AND_NIS_DOMAIN_NAME
                    | ThreadNameSpaceType::INTER_PROCESS_COMMUNICATION
                    | ThreadNameSpaceType::NETWORK,
            )?;
            // A restored init has clocks of its own, and CRIU restores no tree whose tasks have different ones.
            match rustix::thread::move_into_thread_name_spaces(init.as_fd(), ThreadNameSpaceType::TIME) {
                // A kernel without time namespaces.
                Err(rustix::io::Errno::INVAL) => {}
                other => other?,
            }
            drop_capabilities()
        };
        // SAFETY: as in spawn_init: system calls on prepared values only.
        unsafe { command.pre_exec(enter) };
        command.spawn()
    })
}

fn join_cgroup(procs: &File) -> io::Result<()> {
    rustix::io::write(procs, b"0").map(drop).map_err(io::Error::from)
}

/// What no agent's tool needs and what could harm the host. Taken from the bounding set: exec does the rest.
fn drop_capabilities() -> io::Result<()> {
    for capability in [
        CapabilitySet::SYS_MODULE,
        CapabilitySet::SYS_RAWIO,
        CapabilitySet::SYS_BOOT,
        CapabilitySet::SYS_TIME,
        CapabilitySet::SYSLOG,
        CapabilitySet::WAKE_ALARM,
        CapabilitySet::MAC_ADMIN,
        CapabilitySet::MAC_OVERRIDE,
    ] {
        rustix::thread::remove_capability_from_bounding_set(capability)?;
    }
    Ok(())
}

fn cstring(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}
