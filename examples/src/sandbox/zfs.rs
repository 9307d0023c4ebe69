//! Roots and areas on ZFS, for a pool that is a mounted dataset.

use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, Stdio};

use crab_backend_zfs::dataset;
use crab_core::{Error, ErrorKind, Result};

/// Whether a directory is on ZFS.
pub(super) fn holds(path: &Path) -> bool {
    const MAGIC: u64 = 0x2fc1_2fc1;
    rustix::fs::statfs(path).is_ok_and(|found| u64::try_from(found.f_type).is_ok_and(|kind| kind == MAGIC))
}

/// The dataset that is mounted at a path.
pub(super) fn dataset_at(path: &Path) -> Result<String> {
    Ok(zfs(&["list", "-H", "-o", "name"], path)?.trim().to_owned())
}

/// Whether a directory is a dataset's uppermost one.
pub(super) fn is_root(path: &Path) -> bool {
    let device = |path: &Path| std::fs::symlink_metadata(path).map(|found| found.dev()).ok();
    holds(path) && path.parent().is_some_and(|parent| device(path) != device(parent))
}

/// Makes an empty dataset, and the one around it where that is missing.
pub(super) fn make_area(path: &Path) -> Result<()> {
    if let Some(around) = path.parent().filter(|around| !around.exists()) {
        dataset::create(around)?;
    }
    dataset::create(path)
}

/// Destroys the dataset at a path with everything in it, versions too.
pub(super) fn destroy(path: &Path) -> Result<()> {
    let dataset = dataset_at(path)?;
    let snapshots = zfs(&["list", "-H", "-o", "name,userrefs", "-t", "snapshot", "-r"], dataset.as_ref())?;
    for held in snapshots.lines().filter_map(|line| line.split_once('\t')).filter(|(_, holds)| *holds != "0") {
        zfs(&["release", "crab"], held.0.as_ref())?;
    }
    zfs(&["destroy", "-R", "-f"], dataset.as_ref())?;
    match std::fs::remove_dir(path) {
        // It goes with the dataset where ZFS made it.
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io(format!("remove {}", path.display()), error))
        }
        _ => Ok(()),
    }
}

fn zfs(words: &[&str], what: &Path) -> Result<String> {
    let output = Command::new("zfs")
        .args(words)
        .arg(what)
        .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
        .stdin(Stdio::null())
        .output()
        .map_err(|e| Error::io("run zfs", e))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(Error::new(ErrorKind::Io, format!("zfs {} {} failed: {}", words.join(" "), what.display(), said.trim())))
}
