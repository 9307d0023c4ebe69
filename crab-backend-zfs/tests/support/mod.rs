//! A real ZFS for each test, and a host whose sandboxes are only files.
#![allow(dead_code, reason = "each test uses a part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "these are tests")]
#![allow(unreachable_pub, reason = "the module is shared by several test crates")]

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use async_trait::async_trait;
use crab_backend_zfs::{ZfsBackend, dataset};
use crab_core::{
    Artifact, ArtifactId, CaptureRequest, CheckpointBackend, Condition, Error, ErrorKind, External, InheritedFd, NoCut,
    OperationId, RestoreTarget, Restored, Result, Sandbox, SandboxHost, SandboxId,
};

/// Runs a program and gives what it printed.
pub fn run<I: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = I>) -> std::result::Result<String, String> {
    let output = Command::new(program)
        .args(args)
        .env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(String::from_utf8_lossy(&output.stderr).into_owned())
    }
}

/// A pool in a file, destroyed when this is dropped.
struct Vdev {
    directory: tempfile::TempDir,
    name: String,
}

impl Vdev {
    fn new(bytes: u64) -> std::result::Result<Self, String> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let directory = tempfile::Builder::new().prefix("crab-zfs-test-").tempdir().unwrap();
        let name = format!("crab-test-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let file = directory.path().join("vdev");
        fs::File::create(&file).and_then(|file| file.set_len(bytes)).map_err(|error| error.to_string())?;
        let mount = directory.path().join("pool").display().to_string();
        run(
            "zpool",
            [
                "create",
                "-o",
                "cachefile=none",
                "-O",
                "compression=off",
                "-m",
                &mount,
                &name,
                &file.display().to_string(),
            ],
        )?;
        Ok(Self { directory, name })
    }
}

impl Drop for Vdev {
    fn drop(&mut self) {
        if let Err(why) = run("zpool", ["destroy", "-f", &self.name]) {
            eprintln!("the pool {} was left behind: {why}", self.name);
        }
    }
}

/// A part of a pool that one test has for itself. Tests that run at the same time share the pool.
pub struct Pool {
    vdev: Arc<Vdev>,
    name: String,
}

impl Pool {
    /// `None`, with a line that says so, where this machine has no ZFS.
    pub fn new() -> Option<Self> {
        static SHARED: Mutex<Weak<Vdev>> = Mutex::new(Weak::new());
        let vdev = {
            let mut shared = SHARED.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            match shared.upgrade() {
                Some(vdev) => vdev,
                None => {
                    let vdev = Arc::new(Self::make(1 << 30)?);
                    *shared = Arc::downgrade(&vdev);
                    vdev
                }
            }
        };
        Some(Self::within(vdev))
    }

    /// One of its own, for tests that fill it.
    pub fn small(bytes: u64) -> Option<Self> {
        Some(Self::within(Arc::new(Self::make(bytes)?)))
    }

    fn make(bytes: u64) -> Option<Vdev> {
        let made = if Path::new("/dev/zfs").exists() { Vdev::new(bytes) } else { Err("no /dev/zfs".to_owned()) };
        made.inspect_err(|why| println!("skipped: ZFS ({})", why.trim())).ok()
    }

    fn within(vdev: Arc<Vdev>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let name = format!("t{}", NEXT.fetch_add(1, Ordering::Relaxed));
        let pool = Self { vdev, name };
        dataset::create(&pool.path()).unwrap();
        dataset::create(&pool.path().join("boxes")).unwrap();
        pool
    }

    /// Where it is mounted.
    pub fn path(&self) -> PathBuf {
        self.vdev.directory.path().join("pool").join(&self.name)
    }

    /// The dataset that is mounted there.
    pub fn dataset(&self) -> String {
        format!("{}/{}", self.vdev.name, self.name)
    }

    /// A directory beside it, on the machine's own filesystem.
    pub fn outside(&self) -> PathBuf {
        let path = self.vdev.directory.path().join("outside").join(&self.name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    /// The file that holds the pool.
    pub fn image(&self) -> PathBuf {
        self.vdev.directory.path().join("vdev")
    }

    pub fn base(&self) -> String {
        format!("{}/crab", self.dataset())
    }

    pub fn backend(&self) -> ZfsBackend {
        ZfsBackend::open(self.base()).unwrap()
    }

    pub fn root(&self, id: &SandboxId) -> PathBuf {
        self.path().join("boxes").join(id.as_str())
    }

    /// The dataset of a sandbox's root.
    pub fn root_dataset(&self, id: &SandboxId) -> String {
        format!("{}/boxes/{id}", self.dataset())
    }

    /// A sandbox with an empty root and no tasks.
    pub fn sandbox(&self, name: &str) -> Sandbox {
        let sandbox = self.rootless(name);
        dataset::create(&sandbox.root).unwrap();
        sandbox
    }

    /// A sandbox whose root does not exist.
    pub fn rootless(&self, name: &str) -> Sandbox {
        let id = SandboxId::new(name).unwrap();
        let root = self.root(&id);
        Sandbox::new(id, root, self.outside().join("no-cgroup").join(name))
    }

    /// Everything that there is in this part of the pool, by names below it, and without those of what always is.
    pub fn all(&self) -> Vec<String> {
        let text =
            run("zfs", ["list", "-H", "-o", "name", "-t", "filesystem,snapshot", "-r", &self.dataset()]).unwrap();
        let mut names: Vec<String> = text
            .lines()
            .filter_map(|line| line.strip_prefix(&self.dataset())?.strip_prefix('/'))
            .filter(|name| !matches!(*name, "boxes" | "crab"))
            // The number in the name of a version says which sandbox's it is.
            .map(|name| match name.split_once("@crab-") {
                Some((dataset, rest)) => format!("{dataset}@{}", rest.split_once('-').map_or(rest, |(_, name)| name)),
                None => name.to_owned(),
            })
            .collect();
        names.sort();
        names
    }
}

pub fn artifact_id(name: &str) -> ArtifactId {
    ArtifactId::new(name).unwrap()
}

pub async fn checkpoint(backend: &ZfsBackend, sandbox: &Sandbox, name: &str) -> Result<Artifact> {
    capture(backend, sandbox, name).await?.persist().await
}

pub async fn capture(backend: &ZfsBackend, sandbox: &Sandbox, name: &str) -> Result<Box<dyn crab_core::Captured>> {
    let artifact = artifact_id(name);
    let at_cut = &mut NoCut;
    let request = CaptureRequest { sandbox, artifact, parent: None, frozen: false, deadline: None, at_cut };
    backend.capture(request).await
}

pub async fn restore(
    backend: &ZfsBackend,
    artifact: &Artifact,
    sandbox: &Sandbox,
    operation: &str,
    keep: Option<&str>,
) -> Result<Restored> {
    backend.restore(artifact, target(sandbox, operation, keep)).await
}

pub fn target(sandbox: &Sandbox, operation: &str, keep: Option<&str>) -> RestoreTarget {
    RestoreTarget {
        sandbox: sandbox.clone(),
        operation: OperationId::new(operation).unwrap(),
        keep_replaced: keep.map(artifact_id),
        inherited: Vec::new(),
        deadline: None,
    }
}

pub fn names(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// All regular files of a tree, by path and content.
pub fn files(tree: &Path) -> BTreeMap<String, Vec<u8>> {
    fn walk(base: &Path, at: &Path, found: &mut BTreeMap<String, Vec<u8>>) {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(base, &path, found);
            } else {
                let name = path.strip_prefix(base).unwrap().display().to_string();
                found.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(tree, tree, &mut found);
    found
}

/// A host whose sandboxes have a root and, in place of a cgroup, a directory with the one file by which the backend
/// tells whether tasks live.
pub struct FileHost {
    pub pool: Pool,
    boxes: Mutex<BTreeMap<SandboxId, bool>>,
    next: AtomicU64,
}

impl FileHost {
    pub fn new(pool: Pool) -> Self {
        Self { pool, boxes: Mutex::new(BTreeMap::new()), next: AtomicU64::new(1) }
    }

    /// A new sandbox: running on a root of its own, or stopped without a root.
    pub fn add(&self, running: bool) -> SandboxId {
        let name = format!("box-{}", self.next.fetch_add(1, Ordering::Relaxed));
        let sandbox = if running { self.pool.sandbox(&name) } else { self.pool.rootless(&name) };
        self.set(&sandbox.id, running);
        sandbox.id
    }

    fn set(&self, id: &SandboxId, running: bool) {
        fs::create_dir_all(self.cgroup(id)).unwrap();
        fs::write(self.cgroup(id).join("cgroup.events"), format!("populated {}\n", u8::from(running))).unwrap();
        self.boxes.lock().unwrap().insert(id.clone(), running);
    }

    fn cgroup(&self, id: &SandboxId) -> PathBuf {
        self.pool.outside().join("cgroups").join(id.as_str())
    }

    fn known(&self, id: &SandboxId) -> Result<bool> {
        let boxes = self.boxes.lock().unwrap();
        boxes.get(id).copied().ok_or_else(|| Error::new(ErrorKind::NotFound, format!("no sandbox {id}")))
    }
}

#[async_trait]
impl SandboxHost for FileHost {
    async fn describe(&self, id: &SandboxId) -> Result<Sandbox> {
        self.known(id)?;
        Ok(Sandbox::new(id.clone(), self.pool.root(id), self.cgroup(id)))
    }
    async fn freeze(&self, id: &SandboxId) -> Result<()> {
        self.known(id).map(drop)
    }
    async fn thaw(&self, id: &SandboxId) -> Result<()> {
        self.known(id).map(drop)
    }
    async fn kill(&self, id: &SandboxId) -> Result<()> {
        self.known(id)?;
        self.set(id, false);
        Ok(())
    }
    async fn condition(&self, id: &SandboxId) -> Result<Condition> {
        Ok(if self.known(id)? { Condition::Running } else { Condition::Stopped })
    }
    async fn inherit(&self, id: &SandboxId, _external: &[External]) -> Result<Vec<InheritedFd>> {
        self.known(id).map(|_| Vec::new())
    }
    async fn adopt(&self, id: &SandboxId, _init: u32) -> Result<()> {
        self.known(id).map(drop)
    }
    async fn relaunch(&self, id: &SandboxId) -> Result<()> {
        self.known(id)?;
        self.set(id, true);
        Ok(())
    }
}

/// Stores at the beginning of a file through a shared mapping, without a sync.
#[allow(unsafe_code, reason = "a mapping is written")]
pub fn store_through_mapping(file: &fs::File, bytes: &[u8]) {
    use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
    let size = usize::try_from(file.metadata().unwrap().len()).unwrap();
    assert!(bytes.len() <= size);
    // SAFETY: the mapping is new, large enough, used by nobody else, and gone before this returns.
    unsafe {
        let at =
            mmap(std::ptr::null_mut(), size, ProtFlags::READ | ProtFlags::WRITE, MapFlags::SHARED, file, 0).unwrap();
        std::ptr::copy_nonoverlapping(bytes.as_ptr(), at.cast(), bytes.len());
        munmap(at, size).unwrap();
    }
}
