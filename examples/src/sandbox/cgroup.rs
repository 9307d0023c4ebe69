//! The sandbox's cgroup: freeze, kill, and waiting for what the kernel says about it.

use std::fs::File;
use std::io::{Read, Seek};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crab_core::{Condition, Error, ErrorKind, Result, SandboxId};
use rustix::event::{PollFd, PollFlags, Timespec};

/// How long the kernel may take to stop or end all tasks: it does so in milliseconds, unless one sleeps in a driver.
const PATIENCE: Duration = Duration::from_secs(30);

/// A cgroup v2 directory.
#[derive(Clone, Debug)]
pub(super) struct Cgroup(PathBuf);

impl Cgroup {
    /// Makes the leaf for a sandbox; one that is there already must be empty.
    pub(super) fn create(id: &SandboxId) -> Result<Self> {
        let path = mount_point()?.join("crab").join(id.as_str());
        // Whoever destroys the last sandbox may take the parent away between the two steps.
        let made = (0..5).map(|_| std::fs::create_dir_all(&path)).find(|made| match made {
            Err(error) => error.kind() != std::io::ErrorKind::NotFound,
            Ok(()) => true,
        });
        made.unwrap_or_else(|| std::fs::create_dir_all(&path))
            .map_err(|e| Error::io(format!("make the cgroup {}", path.display()), e))?;
        let cgroup = Self(path);
        if cgroup.event("populated")? {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                format!("processes live in the cgroup {}", cgroup.0.display()),
            )
            .fix("kill that sandbox first, or take another id"));
        }
        // A freeze that somebody left behind would stop the new tasks at once.
        cgroup.write("cgroup.freeze", "0")?;
        Ok(cgroup)
    }

    pub(super) fn at(path: &Path) -> Self {
        Self(path.to_owned())
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn exists(&self) -> bool {
        self.0.join("cgroup.procs").exists()
    }

    /// For a process that is to put itself in.
    pub(super) fn open_procs(&self) -> Result<File> {
        let path = self.0.join("cgroup.procs");
        File::options().write(true).open(&path).map_err(|e| Error::io(format!("open {}", path.display()), e))
    }

    /// The pids of all processes in it and in the cgroups below it.
    pub(super) fn processes(&self) -> Vec<u32> {
        let mut pids = Vec::new();
        let mut open = vec![self.0.clone()];
        while let Some(directory) = open.pop() {
            let text = std::fs::read_to_string(directory.join("cgroup.procs")).unwrap_or_default();
            pids.extend(text.lines().filter_map(|line| line.parse::<u32>().ok()));
            open.extend(children(&directory));
        }
        pids
    }

    pub(super) fn freeze(&self) -> Result<()> {
        self.write("cgroup.freeze", "1")?;
        self.wait("frozen", true).inspect_err(|_| {
            // Running again is what a failed freeze promises.
            let _ = self.write("cgroup.freeze", "0");
        })
    }

    pub(super) fn thaw(&self) -> Result<()> {
        if !self.exists() {
            return Ok(());
        }
        self.write("cgroup.freeze", "0")?;
        self.wait("frozen", false)
    }

    /// Ends every task, frozen ones too, and waits until none is left.
    pub(super) fn kill(&self) -> Result<()> {
        if !self.exists() {
            return Ok(());
        }
        self.write("cgroup.kill", "1")?;
        self.wait("populated", false)?;
        self.write("cgroup.freeze", "0")
    }

    pub(super) fn condition(&self) -> Result<Condition> {
        if !self.exists() || !self.event("populated")? {
            return Ok(Condition::Stopped);
        }
        Ok(if self.event("frozen")? { Condition::Frozen } else { Condition::Running })
    }

    /// Removes it with the cgroups below it. It must be empty. The last one takes the parent with it.
    pub(super) fn remove(&self) -> Result<()> {
        remove_below(&self.0).map_err(|e| Error::io(format!("remove the cgroup {}", self.0.display()), e))?;
        if let Some(parent) = self.0.parent() {
            // It stays while it holds another.
            let _ = std::fs::remove_dir(parent);
        }
        Ok(())
    }

    fn write(&self, file: &str, text: &str) -> Result<()> {
        let path = self.0.join(file);
        std::fs::write(&path, text).map_err(|e| Error::io(format!("write {}", path.display()), e))
    }

    fn event(&self, name: &str) -> Result<bool> {
        self.events().and_then(|mut file| read_event(&mut file, name).map_err(|e| self.events_error(e)))
    }

    fn events(&self) -> Result<File> {
        File::open(self.0.join("cgroup.events")).map_err(|e| self.events_error(e))
    }

    fn events_error(&self, error: std::io::Error) -> Error {
        Error::io(format!("read {}/cgroup.events", self.0.display()), error)
    }

    fn wait(&self, name: &str, wanted: bool) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let mut file = self.events()?;
        loop {
            // Reading arms the notification, so a change between this line and the poll is not missed.
            if read_event(&mut file, name).map_err(|e| self.events_error(e))? == wanted {
                return Ok(());
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(Error::new(
                    ErrorKind::TimedOut,
                    format!("the cgroup {} did not become {name} {}", self.0.display(), u8::from(wanted)),
                ));
            }
            let timeout = timespec(left);
            let _ = rustix::event::poll(&mut [PollFd::new(&file, PollFlags::PRI)], Some(&timeout));
        }
    }
}

/// The directory of all sandboxes' cgroups, where cgroup v2 is mounted.
pub(super) fn parent() -> Option<PathBuf> {
    mount_point().ok().map(|mount| mount.join("crab"))
}

/// Where cgroup v2 is mounted: alone or, on a hybrid system, beside the version 1 hierarchies.
pub(super) fn mount_point() -> Result<PathBuf> {
    let text = std::fs::read_to_string("/proc/self/mountinfo").map_err(|e| Error::io("read the mount table", e))?;
    text.lines()
        .find_map(|line| {
            let (left, right) = line.split_once(" - ")?;
            (right.split(' ').next() == Some("cgroup2")).then(|| left.split(' ').nth(4).map(PathBuf::from))?
        })
        .ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "no cgroup v2 is mounted")
                .fix("mount one: mount -t cgroup2 none /sys/fs/cgroup")
        })
}

pub(super) fn timespec(duration: Duration) -> Timespec {
    Timespec {
        tv_sec: i64::try_from(duration.as_secs()).unwrap_or(i64::MAX),
        tv_nsec: i64::from(duration.subsec_nanos()),
    }
}

fn read_event(file: &mut File, name: &str) -> std::io::Result<bool> {
    let mut text = String::new();
    file.rewind()?;
    file.read_to_string(&mut text)?;
    Ok(text.lines().any(|line| line.split_once(' ') == Some((name, "1"))))
}

fn children(directory: &Path) -> Vec<PathBuf> {
    let Ok(entries) = std::fs::read_dir(directory) else { return Vec::new() };
    entries.flatten().filter(|e| e.file_type().is_ok_and(|t| t.is_dir())).map(|e| e.path()).collect()
}

fn remove_below(directory: &Path) -> std::io::Result<()> {
    for child in children(directory) {
        remove_below(&child)?;
    }
    match std::fs::remove_dir(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}
