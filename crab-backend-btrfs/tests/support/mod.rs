//! A real btrfs for each test, and a host whose sandboxes are only files.
#![allow(dead_code, reason = "each test uses a part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "these are tests")]
#![allow(unreachable_pub, reason = "the module is shared by several test crates")]

pub mod churn;

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use async_trait::async_trait;
use crab_backend_btrfs::{BtrfsBackend, subvolume};
use crab_core::{
    Artifact, ArtifactId, CaptureRequest, CheckpointBackend, Condition, Error, ErrorKind, External, InheritedFd, NoCut,
    OperationId, RestoreTarget, Restored, Result, Sandbox, SandboxHost, SandboxId,
};

pub fn run<I: AsRef<OsStr>>(program: &str, args: impl IntoIterator<Item = I>) -> std::result::Result<(), String> {
    let output = Command::new(program)
        .args(args)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() { Ok(()) } else { Err(String::from_utf8_lossy(&output.stderr).into_owned()) }
}

/// The two kinds of quota groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quotas {
    Full,
    Simple,
}

/// A btrfs in a file, mounted until it is dropped.
pub struct Pool {
    directory: tempfile::TempDir,
}

impl Pool {
    /// A filesystem of the usual kind. `None`, with a line that says so, where this machine cannot make one.
    pub fn new() -> Option<Self> {
        Self::with(128 << 20, &[])
    }

    pub fn with(bytes: u64, options: &[&str]) -> Option<Self> {
        Self::at(&std::env::temp_dir(), bytes, options)
    }

    /// One whose disk is memory, where a commit need not wait: for tests of many steps and no power cuts.
    pub fn in_memory(bytes: u64) -> Option<Self> {
        let memory = Path::new("/dev/shm");
        Self::at(if memory.is_dir() { memory } else { Path::new("/tmp") }, bytes, &[])
    }

    fn at(place: &Path, bytes: u64, options: &[&str]) -> Option<Self> {
        let directory = tempfile::Builder::new().prefix("crab-btrfs-test-").tempdir_in(place).unwrap();
        let pool = Self { directory };
        let made = fs::File::create(pool.image())
            .and_then(|file| file.set_len(bytes))
            .map_err(|error| error.to_string())
            .and_then(|()| {
                let image = pool.image();
                let mut args: Vec<&OsStr> = vec!["-q".as_ref()];
                args.extend(options.iter().map(OsStr::new));
                args.push(image.as_os_str());
                run("mkfs.btrfs", args)
            })
            .and_then(|()| {
                fs::create_dir(pool.path()).unwrap();
                pool.mount()
            });
        if let Err(why) = made {
            println!("skipped: btrfs ({})", why.trim());
            return None;
        }
        fs::create_dir(pool.path().join("boxes")).unwrap();
        Some(pool)
    }

    /// Where it is mounted.
    pub fn path(&self) -> PathBuf {
        self.directory.path().join("pool")
    }

    /// A directory beside it, on the machine's own filesystem.
    pub fn outside(&self) -> &Path {
        self.directory.path()
    }

    pub fn image(&self) -> PathBuf {
        self.directory.path().join("image")
    }

    pub fn versions(&self) -> PathBuf {
        self.path().join("versions")
    }

    pub fn backend(&self) -> BtrfsBackend {
        BtrfsBackend::open(self.versions()).unwrap()
    }

    fn mount(&self) -> std::result::Result<(), String> {
        run("mount", ["-o".as_ref(), "loop".as_ref(), self.image().as_os_str(), self.path().as_os_str()])
    }

    fn unmount(&self) -> std::result::Result<(), String> {
        run("umount", [self.path()])
    }

    pub fn sync(&self) {
        run("btrfs", ["filesystem".as_ref(), "sync".as_ref(), self.path().as_os_str()]).unwrap();
    }

    /// Copies what the disk holds at this moment, as a power cut would leave it.
    pub fn copy_disk(image: &Path) {
        run("cp", ["--sparse=always".as_ref(), image.as_os_str(), image.with_extension("cut").as_os_str()]).unwrap();
    }

    /// Goes on from the disk as it was copied last.
    pub fn go_on_from_copy(&self) {
        self.unmount().unwrap();
        fs::rename(self.image().with_extension("cut"), self.image()).unwrap();
        self.mount().unwrap();
    }

    /// Turns quota groups on.
    pub fn count(&self, quotas: Quotas) {
        // The programs of btrfs know simple ones only since lately.
        let number = if quotas == Quotas::Full { 1 } else { 4 };
        let program = format!(
            "import fcntl, os, struct; fcntl.ioctl(os.open({:?}, os.O_RDONLY), 0xc0109428, struct.pack('QQ', {number}, 0))",
            self.path().display().to_string()
        );
        run("python3", ["-c", &program]).unwrap();
        if quotas == Quotas::Full {
            run("btrfs", ["quota".as_ref(), "rescan".as_ref(), "-w".as_ref(), self.path().as_os_str()]).unwrap();
        }
    }

    pub fn root(&self, id: &SandboxId) -> PathBuf {
        self.path().join("boxes").join(id.as_str())
    }

    /// A sandbox with an empty root and no tasks.
    pub fn sandbox(&self, name: &str) -> Sandbox {
        let sandbox = self.rootless(name);
        subvolume::create(&sandbox.root).unwrap();
        sandbox
    }

    /// A sandbox whose root does not exist.
    pub fn rootless(&self, name: &str) -> Sandbox {
        let id = SandboxId::new(name).unwrap();
        let root = self.root(&id);
        Sandbox::new(id, root, self.outside().join("no-cgroup").join(name))
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        // A kernel thread may hold the mount for a moment.
        for _ in 0..50 {
            let mounted = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
            if !mounted.contains(&format!(" {} ", self.path().display())) {
                return;
            }
            if self.unmount().is_ok() {
                return;
            }
            std::thread::sleep(std::time::Duration::from_millis(100));
        }
        let _ = run("umount", ["-l".as_ref(), self.path().as_os_str()]);
        eprintln!("{} was busy and is unmounted lazily", self.path().display());
    }
}

/// A sandbox of the pool at this path, without tasks.
pub fn sandbox_in(pool: &Path, name: &str) -> Sandbox {
    let id = SandboxId::new(name).unwrap();
    let root = pool.join("boxes").join(name);
    Sandbox::new(id, root, pool.join("no-cgroup").join(name))
}

pub fn artifact_id(name: &str) -> ArtifactId {
    ArtifactId::new(name).unwrap()
}

pub async fn checkpoint(backend: &BtrfsBackend, sandbox: &Sandbox, name: &str) -> Result<Artifact> {
    capture(backend, sandbox, name).await?.persist().await
}

pub async fn capture(backend: &BtrfsBackend, sandbox: &Sandbox, name: &str) -> Result<Box<dyn crab_core::Captured>> {
    let artifact = artifact_id(name);
    let at_cut = &mut NoCut;
    let request = CaptureRequest { sandbox, artifact, parent: None, frozen: false, deadline: None, at_cut };
    backend.capture(request).await
}

pub async fn restore(
    backend: &BtrfsBackend,
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
