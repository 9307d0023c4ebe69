//! Where dumps are written during the freeze: memory where possible, since the tasks wait for it.

use std::collections::HashSet;
use std::ffi::CString;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crab_core::{Error, Result};
use rustix::fs::FlockOperation;

use crate::{files, orphans};

/// The default: memory that is there on every Linux.
pub(crate) const DEFAULT: &str = "/dev/shm/crab";
/// An owner's directory.
const OWNER: &str = "owner-";
/// Held by the living owner.
const LOCK: &str = "lock";
/// Held by the owner and by every CRIU that it started.
const TIE: &str = "tie";
/// What a run of CRIU has in its directory.
pub(crate) const IMAGES: &str = "images";
pub(crate) const WORK: &str = "work";
/// The CRIUs of a dead owner get this long to end by themselves. CRIU's own limit for stopping tasks is ten seconds.
const PATIENCE: Duration = Duration::from_secs(20);
/// What `statfs` calls a file system in memory.
const TMPFS: i64 = 0x0102_1994;
/// Room that is left to others, and for what is not counted as resident.
const SLACK: u64 = 64 << 20;

/// A directory for captures, with this process's own part in it. The part is locked while this value lives, so that
/// another process can tell what a dead one left.
#[derive(Debug)]
pub(crate) struct Area {
    base: PathBuf,
    own: PathBuf,
    next: AtomicU64,
    tie: File,
    _lock: Lock,
}

impl Area {
    /// Takes a part of `base`.
    pub(crate) fn open(base: &Path) -> Result<Arc<Self>> {
        files::private_directory(base)?;
        let _making = lock_base(base)?;
        let own = Self::free_part(base)?;
        let tied = || {
            let file = File::create_new(own.join(TIE))?;
            rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive)?;
            Ok(file)
        };
        let failed = |e: std::io::Error| Error::io(format!("lock the directory {}", own.display()), e);
        let (lock, tie) = (Lock::take(&own.join(LOCK)).map_err(failed)?, tied().map_err(failed)?);
        Ok(Arc::new(Self { base: base.to_owned(), own, next: AtomicU64::new(0), tie, _lock: lock }))
    }

    /// Makes a part that nobody has. The same process number may be at work in another pid namespace.
    fn free_part(base: &Path) -> Result<PathBuf> {
        let mut number = 0_u64;
        loop {
            let own = base.join(format!("{OWNER}{}-{number}", std::process::id()));
            match std::fs::DirBuilder::new().mode(0o700).create(&own) {
                Ok(()) => return Ok(own),
                Err(e) if e.kind() == std::io::ErrorKind::AlreadyExists => number += 1,
                Err(e) => return Err(Error::io(format!("make the directory {}", own.display()), e)),
            }
        }
    }

    /// This process's part.
    #[cfg(test)]
    pub(crate) fn own(&self) -> &Path {
        &self.own
    }

    /// What a child of this process has before it is its program.
    #[cfg(test)]
    pub(crate) fn descriptors(&self) -> Vec<OwnedFd> {
        [&self._lock._file, &self.tie].map(|file| file.try_clone().unwrap().into()).into()
    }

    /// Where it is.
    pub(crate) fn base(&self) -> &Path {
        &self.base
    }

    /// Whether it is in memory.
    pub(crate) fn is_memory(&self) -> bool {
        is_memory(&self.base)
    }

    /// Whether that much fits into it, and into memory where it is in memory.
    pub(crate) fn has_room(&self, bytes: u64) -> bool {
        let needed = bytes.saturating_add(SLACK);
        let free = rustix::fs::statvfs(&self.base).map_or(0, |stat| stat.f_bavail.saturating_mul(stat.f_frsize));
        free >= needed && (!self.is_memory() || available_memory().is_none_or(|available| available >= needed))
    }

    /// A new directory in it.
    pub(crate) fn directory(self: &Arc<Self>) -> Result<Scratch> {
        let path = self.own.join(self.next.fetch_add(1, Ordering::Relaxed).to_string());
        let scratch = Scratch { path, area: Arc::clone(self) };
        files::private_directory(&scratch.images())?;
        files::private_directory(&scratch.work())?;
        Ok(scratch)
    }

    /// A directory in memory to stand in for `/run` where that is a disk: CRIU keeps there what it learns about the
    /// kernel, and does so in memory only. It saves tens of milliseconds of every dump.
    pub(crate) fn run_directory(&self) -> Result<Option<(CString, CString)>> {
        if !self.is_memory() || is_memory(Path::new("/run")) {
            return Ok(None);
        }
        let path = self.base.join("run");
        files::private_directory(&path)?;
        Ok(CString::new(path.as_os_str().as_bytes()).ok().map(|path| (path, c"/run".to_owned())))
    }

    /// For every CRIU that works in this process's part to inherit: whoever recovers after our death waits for it.
    pub(crate) fn tie(&self) -> Result<OwnedFd> {
        let tie = self.tie.try_clone();
        tie.map(OwnedFd::from).map_err(|e| Error::io("open the capture directory", e))
    }

    /// Waits until the CRIUs of dead owners are gone, and removes their parts.
    pub(crate) fn recover(&self) -> Result<()> {
        let dead = {
            let _making = lock_base(&self.base)?;
            let names = files::names(&self.base)?.into_iter().filter(|name| name.starts_with(OWNER));
            let parts = names.map(|name| self.base.join(name));
            parts.filter(|part| *part != self.own && !Lock::is_held(&part.join(LOCK))).collect::<Vec<_>>()
        };
        orphans::outlive(&dead, PATIENCE)?;
        let _making = lock_base(&self.base)?;
        // Somebody may have removed one meanwhile, and another taken its name.
        for part in dead.iter().filter(|part| !Lock::is_held(&part.join(LOCK))) {
            tracing::info!(path = %part.display(), "removing what a dead process captured");
            files::remove_all(part)?;
        }
        Ok(())
    }
}

impl Drop for Area {
    fn drop(&mut self) {
        // The lock goes after this, so nobody else removes it at the same time.
        let _ = std::fs::remove_dir_all(&self.own);
    }
}

/// Held while parts are made or removed, so that a new part is never seen without its lock.
fn lock_base(base: &Path) -> Result<OwnedFd> {
    let lock = || {
        let directory = files::open_directory(base)?;
        rustix::fs::flock(&directory, FlockOperation::LockExclusive)?;
        Ok(directory)
    };
    lock().map_err(|e: std::io::Error| Error::io(format!("lock {}", base.display()), e))
}

/// The lock of a living owner. It is of the process alone: a child that is not yet its program does not have it, as it
/// would a lock by `flock`. Whoever recovers would else take that child for the owner and let it begin its work.
#[derive(Debug)]
struct Lock {
    id: FileId,
    _file: File,
}

type FileId = (u64, u64);

/// Those of this process. The kernel does not tell a process of its own, and takes one away where the file is closed
/// once more.
static HELD: Mutex<Option<HashSet<FileId>>> = Mutex::new(None);

impl Lock {
    fn take(path: &Path) -> std::io::Result<Self> {
        let file = File::create_new(path)?;
        let id = id_of(&file.metadata()?);
        rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive)?;
        held().get_or_insert_default().insert(id);
        Ok(Self { id, _file: file })
    }

    fn is_held(path: &Path) -> bool {
        let ours = |metadata| held().as_ref().is_some_and(|held| held.contains(&id_of(&metadata)));
        if std::fs::symlink_metadata(path).is_ok_and(ours) {
            return true;
        }
        match File::options().read(true).write(true).open(path) {
            Ok(file) => rustix::fs::fcntl_lock(&file, FlockOperation::NonBlockingLockExclusive).is_err(),
            Err(_) => false,
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        // The file is still open here, so no other has its number yet.
        held().as_mut().map(|held| held.remove(&self.id));
    }
}

fn id_of(metadata: &std::fs::Metadata) -> FileId {
    (metadata.dev(), metadata.ino())
}

fn held() -> MutexGuard<'static, Option<HashSet<FileId>>> {
    // Only inserts and removes happen under it: a panic leaves it whole.
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The tie of a part.
pub(crate) fn tie_of(part: &Path) -> PathBuf {
    part.join(TIE)
}

/// Whether the owner of a part or a CRIU that it started lives.
pub(crate) fn is_tied(part: &Path) -> bool {
    File::open(tie_of(part)).is_ok_and(|tie| rustix::fs::flock(&tie, FlockOperation::NonBlockingLockExclusive).is_err())
}

pub(crate) fn is_memory(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|stat| stat.f_type == TMPFS)
}

fn available_memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
}

/// A directory for one run of CRIU, removed with this value: `images` for the images, `work` for the log and
/// statistics, `before` for what was copied earlier.
#[derive(Debug)]
pub(crate) struct Scratch {
    path: PathBuf,
    area: Arc<Area>,
}

impl Scratch {
    /// The area that it is in.
    pub(crate) fn area(&self) -> &Area {
        &self.area
    }

    /// The [tie](Area::tie) of that area.
    pub(crate) fn tie(&self) -> Result<OwnedFd> {
        self.area.tie()
    }

    pub(crate) fn images(&self) -> PathBuf {
        self.path.join(IMAGES)
    }

    pub(crate) fn work(&self) -> PathBuf {
        self.path.join(WORK)
    }

    /// For copies of memory that are made before the dump. It is not there yet.
    pub(crate) fn before(&self) -> PathBuf {
        self.path.join("before")
    }

    /// Removes it now, and says whether that worked.
    pub(crate) fn remove(self) -> Result<()> {
        files::remove_all(&self.path)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_parts_of_the_dead_are_removed() {
        let base = tempfile::tempdir().unwrap();
        let alive = Area::open(base.path()).unwrap();
        let capture = alive.directory().unwrap();
        let dead = base.path().join("owner-1-0");
        std::fs::create_dir_all(dead.join("0/images")).unwrap();
        std::fs::write(dead.join(LOCK), "").unwrap();
        let other = Area::open(base.path()).unwrap();
        other.recover().unwrap();
        assert!(!dead.exists());
        assert!(capture.images().exists());
        let path = capture.images();
        drop(capture);
        assert!(!path.exists());
    }

    #[test]
    fn a_directory_that_others_may_write_is_refused() {
        use std::os::unix::fs::PermissionsExt;
        let base = tempfile::tempdir().unwrap();
        let open = base.path().join("open");
        std::fs::create_dir(&open).unwrap();
        std::fs::set_permissions(&open, std::fs::Permissions::from_mode(0o777)).unwrap();
        assert!(Area::open(&open).is_err());
        let link = base.path().join("link");
        std::os::unix::fs::symlink(base.path(), &link).unwrap();
        assert!(Area::open(&link).is_err());
    }
}
