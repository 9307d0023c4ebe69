//! What needs `unsafe`: starting a child that arranges its own surroundings between `fork` and `exec`, and asking the
//! kernel about pages.
#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use rustix::io::FdFlags;
use rustix::mount::MountPropagationFlags;
use rustix::thread::UnshareFlags;

/// What a child does before it becomes the program. Everything here is made ready beforehand, since between `fork` and
/// `exec` nothing may allocate. Descriptors that this process was given without having asked are closed in it: CRIU
/// dumps no process that holds one from another mount namespace.
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
        // Kernels before 5.11 cannot; there strays stay.
        // SAFETY: the child has a table of descriptors of its own, in which flags are set.
        let _ = unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) };
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

/// Gives the calling thread a mount namespace of its own, where what it mounts is seen by nobody else.
pub(crate) fn private_mounts() -> io::Result<()> {
    // SAFETY: the descriptor table stays shared; only the thread's mounts and working directory are its own from here on.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS)? };
    Ok(rustix::mount::mount_change(c"/", MountPropagationFlags::REC | MountPropagationFlags::PRIVATE)?)
}

/// Starts `command` in its surroundings.
pub(crate) fn spawn(mut command: Command, surroundings: Surroundings) -> io::Result<Child> {
    // SAFETY: the closure only makes system calls on what was allocated before the fork; it takes no lock and
    // allocates nothing.
    unsafe { command.pre_exec(move || surroundings.arrange()) };
    command.spawn()
}

/// `struct page_region`: pages of the same kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub(crate) struct Region {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) kinds: u64,
}

/// The kinds of pages that `PAGEMAP_SCAN` tells apart.
pub(crate) const PAGE_OF_FILE: u64 = 1 << 2;
pub(crate) const PAGE_PRESENT: u64 = 1 << 3;
pub(crate) const PAGE_SWAPPED: u64 = 1 << 4;
pub(crate) const PAGE_OF_ZEROS: u64 = 1 << 5;
pub(crate) const PAGE_LARGE: u64 = 1 << 6;
pub(crate) const PAGE_WRITTEN: u64 = 1 << 7;

/// `struct pm_scan_arg`.
#[derive(Default)]
#[repr(C)]
struct Scan {
    size: u64,
    flags: u64,
    start: u64,
    end: u64,
    walk_end: u64,
    vec: u64,
    vec_len: u64,
    max_pages: u64,
    category_inverted: u64,
    category_mask: u64,
    category_anyof_mask: u64,
    return_mask: u64,
}

/// `_IOWR('f', 16, struct pm_scan_arg)`.
const PAGEMAP_SCAN: libc::c_ulong = 0xc060_6610;

/// The pages from `start` to `end` that are in memory or swapped out and of none of the kinds `without`, from a
/// `/proc/PID/pagemap`: how many regions were filled in, and where the walk stopped.
pub(crate) fn scan_pages(
    pagemap: &File,
    (start, end): (u64, u64),
    without: u64,
    regions: &mut [Region],
) -> io::Result<(usize, u64)> {
    let mut scan = Scan {
        size: std::mem::size_of::<Scan>() as u64,
        start,
        end,
        vec: regions.as_mut_ptr() as u64,
        vec_len: regions.len() as u64,
        category_inverted: without,
        category_mask: without,
        category_anyof_mask: PAGE_PRESENT | PAGE_SWAPPED,
        return_mask: PAGE_PRESENT | PAGE_SWAPPED,
        ..Scan::default()
    };
    // SAFETY: the request's structure is the kernel's, `scan` outlives the call, and the kernel writes at most `vec_len`
    // regions to `vec`, which `regions` borrows for writing.
    let found = unsafe { libc::ioctl(pagemap.as_raw_fd(), PAGEMAP_SCAN, &raw mut scan) };
    let found = usize::try_from(found).map_err(|_| io::Error::last_os_error())?;
    Ok((found.min(regions.len()), scan.walk_end))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_has_what_it_is_to_keep_and_no_stray_of_ours() {
        let open = || OwnedFd::from(File::open("/dev/null").unwrap());
        let (kept, stray) = (open(), open());
        rustix::io::fcntl_setfd(&stray, FdFlags::empty()).unwrap();
        let mut command = Command::new("/bin/sh");
        command
            .args(["-c", "[ -e /proc/self/fd/$1 ] && ! [ -e /proc/self/fd/$2 ]", "sh"])
            .args([kept.as_raw_fd(), stray.as_raw_fd()].map(|fd| fd.to_string()));
        let surroundings = Surroundings { keep: vec![kept], ..Surroundings::default() };
        assert!(spawn(command, surroundings).unwrap().wait().unwrap().success());
    }
}
