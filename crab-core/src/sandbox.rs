//! What a sandbox is made of, as its host describes it.

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::id::SandboxId;

/// A sandbox as its host describes it at one moment. Paths are the host's, absolute.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Sandbox {
    /// Its name.
    pub id: SandboxId,
    /// The root filesystem, for example a btrfs subvolume.
    pub root: PathBuf,
    /// The cgroup v2 directory that holds all its tasks, directly or in child cgroups.
    pub cgroup: PathBuf,
    /// The root of its process tree, as a pid of the host's namespace. `None` while nothing lives, and for a tree
    /// whose root is being killed: the engine makes no version of a sandbox that has died.
    pub init: Option<u32>,
    /// What its processes hold that belongs to the host.
    pub external: Vec<External>,
}

impl Sandbox {
    /// A sandbox in which nothing lives, with nothing external.
    pub fn new(id: SandboxId, root: impl Into<PathBuf>, cgroup: impl Into<PathBuf>) -> Self {
        Self { id, root: root.into(), cgroup: cgroup.into(), init: None, external: Vec::new() }
    }

    /// The same with a live process tree below `pid`.
    #[must_use]
    pub fn with_init(mut self, pid: u32) -> Self {
        self.init = Some(pid);
        self
    }

    /// The same with one more thing that belongs to the host.
    #[must_use]
    pub fn with_external(mut self, external: External) -> Self {
        self.external.push(external);
        self
    }
}

/// Something that a sandbox's processes use and that belongs to the host: it is not saved, and the host gives it again
/// at restore. What is not declared is refused by a process backend, by name.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
#[non_exhaustive]
pub enum External {
    /// A network namespace that was made outside, by the path under which it is mounted.
    NetworkNamespace {
        /// For example `/run/netns/box-1`.
        path: PathBuf,
    },
    /// A pipe whose other end the host holds, such as the output of a background command.
    Pipe {
        /// The pipe's inode number: what `readlink /proc/PID/fd/N` shows in brackets.
        inode: u64,
    },
    /// A Unix socket whose other end the host holds, such as the standard streams of a tool server. The pair must have
    /// been made in the sandbox's network namespace: elsewhere nobody can tell whose it is.
    Socket {
        /// The inode number of the end inside: what `readlink /proc/PID/fd/N` shows in brackets.
        inode: u64,
    },
    /// A terminal of the host's, such as the controlling terminal of an interactive shell: the end inside of a pty whose
    /// master the host holds.
    Terminal {
        /// The terminal's own device number, `st_rdev`.
        number: u64,
        /// The device number of the file system that it is on, `st_dev`.
        device: u64,
    },
    /// A file, directory or device node of the host's that is mounted inside.
    Mount {
        /// Where, as seen from inside: an absolute path.
        inside: PathBuf,
    },
}

impl External {
    /// A short unique text for one external thing, the same at dump and at restore.
    #[must_use]
    pub fn key(&self) -> String {
        match self {
            Self::NetworkNamespace { .. } => "network-namespace".to_owned(),
            Self::Pipe { inode } => format!("pipe:[{inode}]"),
            Self::Socket { inode } => format!("socket:[{inode}]"),
            Self::Terminal { number, device } => format!("tty[{number:x}:{device:x}]"),
            Self::Mount { inside } => format!("mount:{}", inside.display()),
        }
    }
}

/// A file descriptor that the host gives to restored processes in place of something external.
#[derive(Debug)]
pub struct InheritedFd {
    /// What it replaces.
    pub external: External,
    /// The descriptor: for a pipe or socket the end that the sandbox's processes held, for a namespace the namespace
    /// file, for a terminal the end inside of the new one, for a mount the file or directory to mount.
    pub fd: OwnedFd,
}
