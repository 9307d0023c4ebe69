//! Root filesystems for sandboxes: snapshots of the base that `cargo xtask setup` makes. They lie on btrfs, or on ZFS
//! where somebody made the pool there.

use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;

use crab_backend_btrfs::BtrfsBackend;
use crab_backend_zfs::ZfsBackend;
use crab_core::{CheckpointBackend, Error, ErrorKind, Result};

use super::state::ProcessIdentity;
use super::zfs;

/// Where `cargo xtask setup` put things: `CRAB_HOME`, or `/var/lib/crab`.
#[must_use]
pub fn home() -> PathBuf {
    match std::env::var_os("CRAB_HOME") {
        Some(path) if !path.is_empty() => path.into(),
        _ => "/var/lib/crab".into(),
    }
}

/// The CRIU that `cargo xtask setup` installed.
#[must_use]
pub fn criu_binary() -> PathBuf {
    home().join("criu/usr/sbin/criu")
}

/// Opens the backend that fits the pool's file system.
///
/// # Errors
/// The backend's.
pub fn open_files(versions: &Path) -> Result<Arc<dyn CheckpointBackend>> {
    match (versions.parent(), versions.file_name()) {
        (Some(area), Some(name)) if zfs::holds(area) => {
            let base = format!("{}/{}", zfs::dataset_at(area)?, name.display());
            Ok(Arc::new(ZfsBackend::open(base)?))
        }
        _ => Ok(Arc::new(BtrfsBackend::open(versions)?)),
    }
}

/// Makes a writable root filesystem at `path`, which must lie in the pool and not exist yet.
///
/// # Errors
/// Where setup has not run, or the path is taken.
pub fn snapshot_root(path: &Path) -> Result<()> {
    let base = home().join("pool/base");
    if !base.join("sbin/crab-init").exists() {
        return Err(Error::new(ErrorKind::Unsupported, format!("{} is no root for sandboxes", base.display()))
            .fix("run `cargo xtask setup`"));
    }
    if path.exists() {
        return Err(Error::new(ErrorKind::AlreadyExists, format!("{} exists", path.display()))
            .fix("delete that root first, or take another path"));
    }
    if zfs::holds(&base) {
        return crab_backend_zfs::dataset::clone(&base, path);
    }
    btrfs(&["subvolume", "snapshot"], &[&base, path])
}

/// Deletes a root filesystem with the subvolumes inside it. One that is not there is no error.
///
/// # Errors
/// Where something in it is in use.
pub fn delete_root(path: &Path) -> Result<()> {
    if !path.exists() {
        return Ok(());
    }
    let deleted = if zfs::is_root(path) { zfs::destroy(path) } else { btrfs(&["subvolume", "delete"], &[path]) };
    // Somebody else may sweep away the same leftover.
    if path.exists() { deleted } else { Ok(()) }
}

/// A root filesystem that goes when this value goes.
#[derive(Debug)]
pub struct ScratchRoot(PathBuf);

impl ScratchRoot {
    /// A fresh writable root in the pool. The name and this process's id make its path, so that runs do not collide.
    ///
    /// # Errors
    /// As [`snapshot_root`].
    pub fn new(name: &str) -> Result<Self> {
        let directory = home().join("pool/scratch");
        std::fs::create_dir_all(&directory).map_err(|e| Error::io(format!("make {}", directory.display()), e))?;
        let path = directory.join(format!("{name}-{}", std::process::id()));
        // What a killed run with the same process id left behind.
        delete_root(&path)?;
        snapshot_root(&path)?;
        Ok(Self(path))
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for ScratchRoot {
    fn drop(&mut self) {
        if let Err(error) = delete_root(&self.0) {
            eprintln!("left behind: {error}");
        }
    }
}

/// A directory in the pool for all that a run keeps: roots, versions, a store. Goes with all of it when this value goes.
#[derive(Debug)]
pub struct ScratchArea(PathBuf);

impl ScratchArea {
    /// An empty one. The name and this process's id make its path. What processes that have died left in such
    /// directories is removed first.
    ///
    /// # Errors
    /// Where setup has not run.
    pub fn new(name: &str) -> Result<Self> {
        let pool = home().join("pool");
        if !pool.join("base").exists() {
            return Err(Error::new(ErrorKind::Unsupported, format!("{} is no pool", pool.display()))
                .fix("run `cargo xtask setup`"));
        }
        let areas = pool.join("areas");
        for entry in std::fs::read_dir(&areas).into_iter().flatten().flatten() {
            let area = entry.file_name();
            let owner = area.to_str().and_then(|area| area.rsplit_once('-')).and_then(|(_, pid)| pid.parse().ok());
            if owner.is_some_and(|owner| ProcessIdentity::of(owner).is_none()) {
                remove_tree(&entry.path())?;
            }
        }
        let path = areas.join(format!("{name}-{}", std::process::id()));
        remove_tree(&path)?;
        match zfs::holds(&pool) {
            true => zfs::make_area(&path)?,
            false => {
                std::fs::create_dir_all(&path).map_err(|e| Error::io(format!("make {}", path.display()), e))?;
            }
        }
        Ok(Self(path))
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

/// Removes a directory with the subvolumes in it.
fn remove_tree(path: &Path) -> Result<()> {
    let Ok(metadata) = std::fs::symlink_metadata(path) else { return Ok(()) };
    // The number that btrfs gives the root directory of every subvolume.
    if metadata.is_dir() && (metadata.ino() == 256 || zfs::is_root(path)) {
        return delete_root(path);
    }
    let io = |e| Error::io(format!("remove {}", path.display()), e);
    if !metadata.is_dir() {
        return std::fs::remove_file(path).map_err(io);
    }
    for entry in std::fs::read_dir(path).map_err(io)? {
        remove_tree(&entry.map_err(io)?.path())?;
    }
    std::fs::remove_dir(path).map_err(io)
}

impl Drop for ScratchArea {
    fn drop(&mut self) {
        if let Err(error) = remove_tree(&self.0) {
            eprintln!("left behind: {error}");
        }
    }
}

fn btrfs(words: &[&str], paths: &[&Path]) -> Result<()> {
    let output = Command::new("btrfs")
        .args(words)
        .args(paths)
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::null())
        .output()
        .map_err(|e| Error::io("run btrfs", e).fix("run `cargo xtask setup`"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Error::new(ErrorKind::Io, format!("btrfs {} failed: {}", words.join(" "), said.trim())))
}
