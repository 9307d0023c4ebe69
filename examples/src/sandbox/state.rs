//! What other processes of the host need to know of a sandbox: a small file under `/run/crab`.

use std::fs::File;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use crab_core::{Error, ErrorKind, Result, SandboxId};
use serde::{Deserialize, Serialize};

use super::cgroup::Cgroup;

/// A process, told apart from a later one that got the same pid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ProcessIdentity {
    pub(super) pid: u32,
    /// In clock ticks since boot, as in `/proc/PID/stat`.
    started: u64,
}

impl ProcessIdentity {
    pub(super) fn of(pid: u32) -> Option<Self> {
        // The signal is taken off the list before the process is marked as leaving: looked at in the other order, it
        // could be missed by both.
        let killed = is_killed(pid);
        let stat = Stat::read(pid)?;
        (!killed && !stat.dead).then_some(Self { pid, started: stat.started })
    }

    /// Whether it lives or is dead with nobody having asked how it ended.
    pub(super) fn is_known(self) -> bool {
        Stat::read(self.pid).is_some_and(|stat| stat.started == self.started)
    }

    pub(super) fn is_alive(self) -> bool {
        Self::of(self.pid) == Some(self)
    }
}

/// A few fields of `/proc/PID/stat`.
pub(super) struct Stat {
    pub(super) session: u32,
    pub(super) started: u64,
    dead: bool,
}

impl Stat {
    pub(super) fn read(pid: u32) -> Option<Self> {
        Self::parse(&std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        /// PF_EXITING of include/linux/sched.h: it is on its way out and has no namespaces or files any more.
        const EXITING: u64 = 0x4;
        // The name, in parentheses, may hold anything; what follows its last one is plain.
        let (_, rest) = text.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        Some(Self {
            dead: matches!(*fields.first()?, "Z" | "X") || fields.get(6)?.parse::<u64>().ok()? & EXITING != 0,
            session: fields.get(3)?.parse().ok()?,
            started: fields.get(19)?.parse().ok()?,
        })
    }
}

/// Whether a SIGKILL, which is signal 9, is on its way to the process.
fn is_killed(pid: u32) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let pending = |name: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(name));
        line.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0)
    };
    (pending("SigPnd:") | pending("ShdPnd:")) & 1 << 8 != 0
}

/// The state file of a sandbox.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct State {
    pub(super) id: SandboxId,
    pub(super) root: PathBuf,
    pub(super) cgroup: PathBuf,
    pub(super) netns: PathBuf,
    pub(super) tmpfs_tmp: bool,
    /// The sandbox's pid 1; none while it is stopped.
    pub(super) init: Option<ProcessIdentity>,
    /// The process whose end ends the sandbox; none for one that outlives its launcher.
    pub(super) owner: Option<ProcessIdentity>,
}

impl State {
    pub(super) fn load(id: &SandboxId) -> Result<Self> {
        let path = file(id, "json")?;
        let text = std::fs::read_to_string(&path).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => {
                Error::new(ErrorKind::NotFound, format!("there is no sandbox {id}")).fix("launch it first")
            }
            _ => Error::io(format!("read {}", path.display()), e),
        })?;
        serde_json::from_str(&text).map_err(|e| {
            Error::new(ErrorKind::Corrupt, format!("{} is not a sandbox's state", path.display()))
                .caused_by(e)
                .fix("remove it and launch the sandbox again")
        })
    }

    /// Replaces the file in one step.
    pub(super) fn save(&self) -> Result<()> {
        let path = file(&self.id, "json")?;
        let temporary = path.with_extension("json.new");
        let text = serde_json::to_vec_pretty(self)
            .map_err(|e| Error::new(ErrorKind::Internal, "cannot write a sandbox's state as JSON").caused_by(e))?;
        std::fs::write(&temporary, text)
            .and_then(|()| std::fs::rename(&temporary, &path))
            .map_err(|e| Error::io(format!("write {}", path.display()), e))
    }

    pub(super) fn remove(&self) -> Result<()> {
        for extension in ["json", "lock"] {
            let path = file(&self.id, extension)?;
            match std::fs::remove_file(&path) {
                Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::io(format!("remove {}", path.display()), e));
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// The pid of the sandbox's init, if it is still that process and still in the sandbox's cgroup.
    pub(super) fn live_init(&self) -> Option<u32> {
        let init = self.init?;
        (init.is_alive() && Cgroup::at(&self.cgroup).processes().contains(&init.pid)).then_some(init.pid)
    }
}

/// All sandboxes that have a readable state file.
pub(super) fn all() -> Result<Vec<State>> {
    let directory = run_directory()?;
    let entries = std::fs::read_dir(&directory).map_err(|e| Error::io(format!("read {}", directory.display()), e))?;
    Ok(entries
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.strip_suffix(".json")?.parse().ok())
        .filter_map(|id| State::load(&id).ok())
        .collect())
}

/// Held shared while a process of the host is on its way into the sandbox, and exclusively while it is frozen: a
/// checkpoint must not find a process that is half inside.
pub(super) fn entrance(id: &SandboxId) -> Result<File> {
    let path = file(id, "lock")?;
    File::options()
        .create(true)
        .truncate(false)
        .write(true)
        .mode(0o600)
        .open(&path)
        .map_err(|e| Error::io(format!("open {}", path.display()), e))
}

pub(super) fn pipes_directory(id: &SandboxId) -> Result<PathBuf> {
    file(id, "pipes")
}

pub(super) fn run_directory() -> Result<PathBuf> {
    let path = Path::new("/run/crab");
    match std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path) {
        Ok(()) => Ok(path.to_owned()),
        Err(e) => Err(Error::io(format!("make {} (root can)", path.display()), e)),
    }
}

fn file(id: &SandboxId, extension: &str) -> Result<PathBuf> {
    Ok(run_directory()?.join(format!("{id}.{extension}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_name_cannot_confuse_the_parser() {
        let text = "7 (a) b (c) S 1 7 5 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 99 0 0";
        let stat = Stat::parse(text).unwrap();
        assert_eq!((stat.session, stat.started, stat.dead), (5, 99, false));
        assert!(Stat::parse("7 (x) Z 1 7 5 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 99 0 0").unwrap().dead);
        assert!(Stat::parse("nonsense").is_none());
    }

    #[test]
    fn a_reused_pid_is_not_the_same_process() {
        let me = ProcessIdentity::of(std::process::id()).unwrap();
        assert!(me.is_alive());
        assert!(!ProcessIdentity { started: me.started + 1, ..me }.is_alive());
    }
}
