//! A real btrfs for each test.
#![allow(dead_code, unused_imports, reason = "each test uses a part")]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "these are tests")]
#![allow(unreachable_pub, reason = "the module is shared by several test crates")]

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use crab_backend_btrfs::{BtrfsBackend, subvolume};
use crab_core::{Artifact, CheckpointBackend, SandboxId};

pub use crab_core::conformance::calls::{artifact_id, capture, checkpoint, restore, target};
pub use crab_core::conformance::disk::{Disk, run};
pub use crab_core::conformance::trees::{files, names_in as names};

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

    /// One on two devices: the trees on both, the files on either.
    pub fn of_two_devices() -> Option<Self> {
        let pool = Self::with(256 << 20, &[])?;
        let second = pool.outside().join("second");
        fs::File::create(&second).and_then(|file| file.set_len(256 << 20)).unwrap();
        let device = run("losetup", ["--find".as_ref(), "--show".as_ref(), second.as_os_str()]).unwrap();
        let device = device.trim();
        let added = run("btrfs", ["device", "add", "-f", device, &pool.path().display().to_string()]);
        // From here on it goes with the last who uses it.
        run("losetup", ["--detach", device]).unwrap();
        added.unwrap();
        let balance = ["balance", "start", "-dconvert=raid0", "-mconvert=raid1", &pool.path().display().to_string()];
        run("btrfs", balance).unwrap();
        Some(pool)
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
                run("mkfs.btrfs", args).map(drop)
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

    pub fn image(&self) -> PathBuf {
        self.directory.path().join("image")
    }

    pub fn versions(&self) -> PathBuf {
        self.path().join("versions")
    }

    pub fn backend(&self) -> BtrfsBackend {
        BtrfsBackend::open(self.versions()).unwrap()
    }

    fn mount(&self) -> Result<(), String> {
        run("mount", ["-o".as_ref(), "loop".as_ref(), self.image().as_os_str(), self.path().as_os_str()]).map(drop)
    }

    fn unmount(&self) -> Result<(), String> {
        run("umount", [self.path()]).map(drop)
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
        subvolume::create(&self.root(id)).unwrap();
    }
    async fn delete_root(&self, id: &SandboxId) {
        subvolume::delete(&self.root(id)).unwrap();
    }
    fn outside(&self) -> PathBuf {
        self.directory.path().to_owned()
    }
    fn strays(&self, roots: &BTreeSet<SandboxId>, versions: &[Artifact]) -> Vec<String> {
        let mut known: BTreeSet<String> = roots.iter().map(|id| format!("boxes/{id}")).collect();
        known.extend(versions.iter().map(|artifact| format!("versions/{}/{}", artifact.sandbox, artifact.id)));
        let text =
            run("btrfs", ["subvolume".as_ref(), "list".as_ref(), "-o".as_ref(), self.path().as_os_str()]).unwrap();
        let mut found: BTreeSet<String> =
            text.lines().map(|line| line.rsplit_once(" path ").unwrap().1.to_owned()).collect();
        for known in &known {
            assert!(found.remove(known), "{known} is not there");
        }
        // Journals stay as long as their sandboxes.
        let journal = |name: &String| roots.iter().any(|id| *name == format!("{id}/.restore"));
        for sandbox in names(&self.versions()).into_iter().filter(|name| name != ".crab-btrfs") {
            let inside = names(&self.versions().join(&sandbox));
            if inside.is_empty() {
                found.insert(format!("versions/{sandbox}"));
            }
            let inside = inside.into_iter().map(|name| format!("{sandbox}/{name}"));
            found.extend(inside.filter(|name| !journal(name) && !known.contains(&format!("versions/{name}"))));
        }
        found.extend(
            names(&self.path().join("boxes")).into_iter().filter(|name| !known.contains(&format!("boxes/{name}"))),
        );
        found.into_iter().collect()
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
