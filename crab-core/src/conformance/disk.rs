//! Filesystem backends on a real disk: sandboxes that are only files.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use async_trait::async_trait;

use super::{BackendFixture, trees};
use crate::{
    Artifact, CheckpointBackend, Condition, Error, ErrorKind, External, InheritedFd, Result, Sandbox, SandboxHost,
    SandboxId,
};

/// A file system that a test has for itself, with a backend on it.
#[async_trait]
pub trait Disk: Send + Sync {
    /// Opens the backend, as a new process would.
    fn open(&self) -> Arc<dyn CheckpointBackend>;

    /// Where a sandbox's root stands, or will stand.
    fn root(&self, id: &SandboxId) -> PathBuf;

    /// Makes a sandbox's root, empty.
    fn make_root(&self, id: &SandboxId);

    /// Deletes a stopped sandbox's root.
    async fn delete_root(&self, id: &SandboxId);

    /// A directory on another file system.
    fn outside(&self) -> PathBuf;

    /// What is on the disk and belongs neither to these roots nor to these versions, by its name.
    fn strays(&self, roots: &BTreeSet<SandboxId>, versions: &[Artifact]) -> Vec<String>;

    /// The [value](trees::set) that each of these artifacts holds.
    fn read(&self, backend: &dyn CheckpointBackend, artifacts: &[Artifact]) -> Vec<Option<u64>> {
        artifacts.iter().map(|artifact| trees::get(&backend.tree(artifact)?)).collect()
    }

    /// A sandbox with an empty root and no tasks.
    fn sandbox(&self, name: &str) -> Sandbox {
        let sandbox = self.rootless(name);
        self.make_root(&sandbox.id);
        sandbox
    }

    /// A sandbox whose root does not exist.
    fn rootless(&self, name: &str) -> Sandbox {
        let id = SandboxId::new(name).unwrap();
        let root = self.root(&id);
        Sandbox::new(id, root, self.outside().join("no-cgroup").join(name))
    }
}

/// Runs a tool of the system's administrator to its end, and gives what it printed.
///
/// # Errors
/// What it said where it failed.
pub fn run<I: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = I>) -> std::result::Result<String, String> {
    let output = Command::new(program)
        .args(args)
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) }
}

/// Sandboxes on a disk: each has a root and, in place of a cgroup, a directory with the one file by which a backend
/// tells whether tasks live. It is their host, and a fixture for the suites. Its state is [`trees::set`]'s.
pub struct DiskWorld<D> {
    disk: D,
    backend: Mutex<Arc<dyn CheckpointBackend>>,
    host: Arc<Host>,
    next: AtomicU64,
}

#[derive(Default)]
struct Host {
    boxes: Mutex<BTreeMap<SandboxId, Place>>,
}

struct Place {
    sandbox: Sandbox,
    running: bool,
}

impl<D: Disk> DiskWorld<D> {
    /// An empty one.
    pub fn new(disk: D) -> Self {
        Self { backend: Mutex::new(disk.open()), disk, host: Arc::default(), next: AtomicU64::new(1) }
    }

    /// The disk.
    pub fn disk(&self) -> &D {
        &self.disk
    }

    fn add(&self, running: bool) -> SandboxId {
        static WORLDS: AtomicU64 = AtomicU64::new(1);
        let name =
            format!("box-{}-{}", self.next.fetch_add(1, Ordering::Relaxed), WORLDS.fetch_add(1, Ordering::Relaxed));
        let mut sandbox = if running { self.disk.sandbox(&name) } else { self.disk.rootless(&name) };
        sandbox.cgroup = self.disk.outside().join("cgroups").join(&name);
        fs::create_dir_all(&sandbox.cgroup).unwrap();
        let id = sandbox.id.clone();
        self.host.boxes.lock().unwrap().insert(id.clone(), Place { sandbox, running });
        self.host.set(&id, running).unwrap();
        id
    }
}

#[async_trait]
impl<D: Disk> BackendFixture for DiskWorld<D> {
    fn backend(&self) -> Arc<dyn CheckpointBackend> {
        Arc::clone(&self.backend.lock().unwrap())
    }
    fn host(&self) -> Arc<dyn SandboxHost> {
        Arc::clone(&self.host) as Arc<dyn SandboxHost>
    }
    async fn sandbox(&self) -> SandboxId {
        self.add(true)
    }
    async fn set(&self, id: &SandboxId, value: u64) {
        trees::set(&self.disk.root(id), value);
    }
    async fn get(&self, id: &SandboxId) -> Option<u64> {
        trees::get(&self.disk.root(id))
    }
    async fn fork_target(&self, from: &SandboxId) -> Option<SandboxId> {
        self.rootless_target(from).await
    }
    async fn rootless_target(&self, _from: &SandboxId) -> Option<SandboxId> {
        Some(self.add(false))
    }
    async fn reopen(&self) {
        let backend = self.disk.open();
        *self.backend.lock().unwrap() = backend;
    }
    async fn delete(&self, id: &SandboxId) {
        self.disk.delete_root(id).await;
        self.host.boxes.lock().unwrap().remove(id);
    }
    fn strays(&self, sandboxes: &BTreeSet<SandboxId>, artifacts: &[Artifact]) -> Vec<String> {
        self.disk.strays(sandboxes, artifacts)
    }
    fn read(&self, artifacts: &[Artifact]) -> Option<Vec<Option<u64>>> {
        Some(self.disk.read(&*self.backend(), artifacts))
    }
}

impl Host {
    fn set(&self, id: &SandboxId, running: bool) -> Result<()> {
        let mut boxes = self.boxes.lock().unwrap();
        let found = boxes.get_mut(id).ok_or_else(|| unknown(id))?;
        found.running = running;
        write_events(&found.sandbox.cgroup, running);
        Ok(())
    }

    fn known<T>(&self, id: &SandboxId, look: impl FnOnce(&Place) -> T) -> Result<T> {
        self.boxes.lock().unwrap().get(id).map(look).ok_or_else(|| unknown(id))
    }
}

fn unknown(id: &SandboxId) -> Error {
    Error::new(ErrorKind::NotFound, format!("no sandbox {id}"))
}

fn write_events(cgroup: &Path, running: bool) {
    fs::write(cgroup.join("cgroup.events"), format!("populated {}\n", u8::from(running))).unwrap();
}

#[async_trait]
impl SandboxHost for Host {
    async fn describe(&self, id: &SandboxId) -> Result<Sandbox> {
        self.known(id, |found| found.sandbox.clone())
    }
    async fn freeze(&self, id: &SandboxId) -> Result<()> {
        self.known(id, |_| ())
    }
    async fn thaw(&self, id: &SandboxId) -> Result<()> {
        self.known(id, |_| ())
    }
    async fn kill(&self, id: &SandboxId) -> Result<()> {
        self.set(id, false)
    }
    async fn condition(&self, id: &SandboxId) -> Result<Condition> {
        self.known(id, |found| if found.running { Condition::Running } else { Condition::Stopped })
    }
    async fn inherit(&self, id: &SandboxId, _external: &[External]) -> Result<Vec<InheritedFd>> {
        self.known(id, |_| Vec::new())
    }
    async fn adopt(&self, id: &SandboxId, _init: u32) -> Result<()> {
        self.known(id, |_| ())
    }
    async fn relaunch(&self, id: &SandboxId) -> Result<()> {
        self.set(id, true)
    }
}
