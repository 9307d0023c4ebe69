//! A real ZFS for each test.
#![allow(dead_code, unused_imports, reason = "each test uses a part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "these are tests")]
#![allow(unreachable_pub, reason = "the module is shared by several test crates")]

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::fd::{AsFd, AsRawFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};

use async_trait::async_trait;
use crab_backend_zfs::{ZfsBackend, dataset};
use crab_core::{Artifact, CheckpointBackend, SandboxId};

pub use crab_core::conformance::calls::{artifact_id, capture, checkpoint, restore, target};
pub use crab_core::conformance::disk::{Disk, run};
pub use crab_core::conformance::trees::{self, files, names_in as names};

/// A pool in a file, destroyed when this is dropped.
struct Vdev {
    directory: tempfile::TempDir,
    name: String,
}

impl Vdev {
    fn new(bytes: u64) -> Result<Self, String> {
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

    /// The dataset of a sandbox's root.
    pub fn root_dataset(&self, id: &SandboxId) -> String {
        format!("{}/boxes/{id}", self.dataset())
    }

    /// The snapshots of versions, by sandbox and artifact.
    fn snapshots(&self) -> BTreeMap<String, String> {
        let wanted = "crab:sandbox,crab:artifact,name";
        let text = run("zfs", ["list", "-H", "-o", wanted, "-t", "snapshot", "-r", &self.dataset()]).unwrap();
        text.lines().filter_map(|line| line.rsplit_once('\t')).map(|(of, name)| (of.into(), name.into())).collect()
    }

    /// The snapshot that a version is.
    pub fn snapshot_of(&self, artifact: &Artifact) -> String {
        self.snapshots()[&name_of(artifact)].clone()
    }

    /// Everything that there is in this part of the pool, by names below it, and without those of what always is.
    pub fn all(&self) -> Vec<String> {
        let text =
            run("zfs", ["list", "-H", "-o", "name", "-t", "filesystem,snapshot", "-r", &self.dataset()]).unwrap();
        let mut names: Vec<String> = text
            .lines()
            .filter_map(|line| line.strip_prefix(&self.dataset())?.strip_prefix('/'))
            .filter(|name| !matches!(*name, "boxes" | "crab" | "crab/_reserve"))
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

#[async_trait]
impl Disk for Pool {
    fn open(&self) -> Arc<dyn CheckpointBackend> {
        Arc::new(self.backend())
    }
    fn root(&self, id: &SandboxId) -> PathBuf {
        self.path().join("boxes").join(id.as_str())
    }
    fn make_root(&self, id: &SandboxId) {
        dataset::create(&self.root(id)).unwrap();
    }
    async fn delete_root(&self, id: &SandboxId) {
        self.backend().delete_root(id, self.root(id)).await.unwrap();
        assert!(!self.root(id).exists());
    }
    fn outside(&self) -> PathBuf {
        let path = self.vdev.directory.path().join("outside").join(&self.name);
        fs::create_dir_all(&path).unwrap();
        path
    }

    /// Datasets may be roots, homes of sandboxes, and branches on which versions stand; snapshots versions, and removed
    /// ones that something was cloned from.
    fn strays(&self, roots: &BTreeSet<SandboxId>, versions: &[Artifact]) -> Vec<String> {
        let wanted = "name,crab:sandbox,crab:artifact,defer_destroy,clones";
        let text =
            run("zfs", ["list", "-H", "-o", wanted, "-t", "filesystem,snapshot", "-r", &self.dataset()]).unwrap();
        let lines: Vec<Vec<&str>> = text.lines().map(|line| line.split('\t').collect()).collect();
        let mut missing: BTreeSet<(&str, &str)> =
            versions.iter().map(|artifact| (artifact.sandbox.as_str(), artifact.id.as_str())).collect();
        let mut strays = Vec::new();
        for line in &lines {
            let &[name, sandbox, artifact, removed, clones] = &line[..] else { panic!("{line:?}") };
            let Some(inner) = name.strip_prefix(&self.dataset()).and_then(|name| name.strip_prefix('/')) else {
                continue;
            };
            let known = match (inner.split_once('/'), name.contains('@')) {
                (None, _) => matches!(inner, "boxes" | "crab"),
                (_, true) if removed == "on" => !matches!(clones, "" | "-"),
                (_, true) => missing.remove(&(sandbox, artifact)),
                (Some(("boxes", id)), _) => roots.iter().any(|root| root.as_str() == id),
                (Some(("crab", "_reserve")), _) => true,
                (Some(("crab", home)), _) if !home.contains('/') => !roots.is_empty() || !versions.is_empty(),
                (Some(("crab", _)), _) => lines.iter().any(|line| line[0].starts_with(&format!("{name}@"))),
                _ => false,
            };
            if !known {
                strays.push(inner.to_owned());
            }
        }
        assert_eq!(missing, BTreeSet::new(), "are not there");
        strays
    }

    /// Each is mounted for that, since most stand on datasets that are mounted nowhere.
    fn read(&self, _backend: &dyn CheckpointBackend, artifacts: &[Artifact]) -> Vec<Option<u64>> {
        let snapshots = self.snapshots();
        let of = |artifact: &Artifact| snapshots.get(&name_of(artifact));
        artifacts.iter().map(|artifact| with_mounted(of(artifact)?, trees::get)).collect()
    }
}

fn name_of(artifact: &Artifact) -> String {
    format!("{}\t{}", artifact.sandbox, artifact.id)
}

/// Looks at a snapshot or dataset that is mounted nowhere else for that.
pub fn with_mounted<T>(dataset: &str, look: impl FnOnce(&Path) -> T) -> T {
    use rustix::mount::{
        FsMountFlags, FsOpenFlags, MountAttrFlags, fsconfig_create, fsconfig_set_string, fsmount, fsopen,
    };
    let context = fsopen("zfs", FsOpenFlags::FSOPEN_CLOEXEC).unwrap();
    fsconfig_set_string(context.as_fd(), "source", dataset).unwrap();
    fsconfig_create(context.as_fd()).unwrap();
    let mount = fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, MountAttrFlags::empty()).unwrap();
    // The dot leads through the link.
    look(Path::new(&format!("/proc/self/fd/{}/.", mount.as_raw_fd())))
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
