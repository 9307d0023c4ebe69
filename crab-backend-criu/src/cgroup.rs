//! The sandbox's cgroup v2: who is in it, frozen or not, and its end.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::{Read, Seek};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crab_core::{Condition, Error, ErrorKind, Result};
use rustix::event::{PollFd, PollFlags, Timespec};

use crate::turns::Caller;

/// How long the kernel gets to freeze or end tasks where no deadline says otherwise.
const PATIENCE: Duration = Duration::from_secs(10);

/// A cgroup's directory.
#[derive(Clone, Debug)]
pub(crate) struct Cgroup(PathBuf);

impl Cgroup {
    pub(crate) fn at(path: &Path) -> Self {
        Self(path.to_owned())
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    /// All its live processes, those of child cgroups too.
    pub(crate) fn processes(&self) -> Result<BTreeSet<u32>> {
        let mut found = BTreeSet::new();
        collect(&self.0, &mut found)
            .map_err(|e| Error::io(format!("read the processes of the cgroup {}", self.0.display()), e))?;
        Ok(found)
    }

    pub(crate) fn is_populated(&self) -> Result<bool> {
        self.event("populated")
    }

    /// Stops all tasks and returns when they have stopped.
    pub(crate) fn freeze(&self, deadline: Option<Instant>) -> Result<()> {
        self.write("cgroup.freeze", "1")?;
        self.wait("frozen", true, deadline)
    }

    /// Lets all tasks run and returns when they may.
    pub(crate) fn thaw(&self) -> Result<()> {
        self.write("cgroup.freeze", "0")?;
        self.wait("frozen", false, None)
    }

    /// Ends all tasks and returns when none is left.
    pub(crate) fn kill(&self) -> Result<()> {
        self.write("cgroup.kill", "1")?;
        self.wait("populated", false, None)
    }

    /// `cgroup.procs`, for a process that moves itself in.
    pub(crate) fn entrance(&self) -> Result<OwnedFd> {
        let path = self.0.join("cgroup.procs");
        let file = File::options().write(true).open(&path);
        file.map(OwnedFd::from).map_err(|e| Error::io(format!("open {}", path.display()), e))
    }

    fn write(&self, file: &str, text: &str) -> Result<()> {
        let path = self.0.join(file);
        std::fs::write(&path, text).map_err(|e| Error::io(format!("write {}", path.display()), e))
    }

    fn event(&self, name: &str) -> Result<bool> {
        let path = self.0.join("cgroup.events");
        let read = || read_event(&mut File::open(&path)?, name);
        read().map_err(|e| Error::io(format!("read {}", path.display()), e))
    }

    fn wait(&self, name: &str, wanted: bool, deadline: Option<Instant>) -> Result<()> {
        let path = self.0.join("cgroup.events");
        let failed = |e| Error::io(format!("read {}", path.display()), e);
        let patience = Instant::now() + PATIENCE;
        let deadline = deadline.map_or(patience, |deadline| deadline.min(patience));
        let mut file = File::open(&path).map_err(failed)?;
        loop {
            // The read arms the notification: a change between here and the poll is not missed.
            if read_event(&mut file, name).map_err(failed)? == wanted {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let state = if wanted { "" } else { "not " };
                let what = format!("the cgroup {} did not become {state}{name} in time", self.0.display());
                return Err(Error::new(ErrorKind::TimedOut, what));
            }
            let _ = rustix::event::poll(&mut [PollFd::new(&file, PollFlags::PRI)], Some(&timespec(left)));
        }
    }
}

/// What the cgroup's freezer goes back to, also when the code in between fails. CRIU opens the freezer itself once it
/// holds the tasks by ptrace, so a CRIU that was killed may leave it either way.
#[derive(Debug)]
pub(crate) struct FreezerGuard {
    cgroup: Cgroup,
    frozen_by: Option<Caller>,
    armed: bool,
}

impl FreezerGuard {
    /// From now on the freezer goes back to how it is: frozen by the caller, or open.
    pub(crate) fn new(cgroup: &Cgroup, frozen_by: Option<Caller>) -> Self {
        Self { cgroup: cgroup.clone(), frozen_by, armed: true }
    }

    /// Puts it back now.
    pub(crate) fn settle(mut self) -> Result<()> {
        self.armed = false;
        self.put_back()
    }

    fn put_back(&self) -> Result<()> {
        let done = match &self.frozen_by {
            Some(caller) if !caller.has_gone() => {
                let frozen = self.cgroup.freeze(None);
                // A caller that left in between has thawed before this froze, or thaws after it: thawing is right
                // for both, and a caller that is there would see it frozen.
                if caller.has_gone() { self.cgroup.thaw() } else { frozen }
            }
            _ => self.cgroup.thaw(),
        };
        done.map_err(|e| e.while_doing("the freezer was not put back as it was").condition(Condition::Unknown))
    }
}

impl Drop for FreezerGuard {
    fn drop(&mut self) {
        if self.armed
            && let Err(error) = self.put_back()
        {
            tracing::error!(%error, cgroup = %self.cgroup.0.display(), "a sandbox may be left frozen");
        }
    }
}

fn collect(directory: &Path, found: &mut BTreeSet<u32>) -> std::io::Result<()> {
    match std::fs::read_to_string(directory.join("cgroup.procs")) {
        Ok(text) => found.extend(text.lines().filter_map(|line| line.parse::<u32>().ok())),
        // A threaded cgroup: its processes are listed where its domain begins, above.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::OPNOTSUPP.raw_os_error()) => {}
        Err(error) => return Err(error),
    }
    for entry in std::fs::read_dir(directory)?.flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            match collect(&entry.path(), found) {
                Err(error) if is_gone(&error) => {}
                other => other?,
            }
        }
    }
    Ok(())
}

/// A child cgroup may be removed while it is read.
fn is_gone(error: &std::io::Error) -> bool {
    error.kind() == std::io::ErrorKind::NotFound
        || error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error())
}

fn read_event(file: &mut File, name: &str) -> std::io::Result<bool> {
    let mut text = String::new();
    file.rewind()?;
    file.read_to_string(&mut text)?;
    Ok(text.lines().any(|line| line.split_once(' ') == Some((name, "1"))))
}

/// A duration as the kernel takes it.
pub(crate) fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}
