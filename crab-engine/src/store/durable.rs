//! Writing a file so that after a crash at any instruction it is there whole or not at all.

use std::fs::{self, DirBuilder, File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt};
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crab_core::{Error, ErrorKind, Result, keep_house};

use super::io_error;
use crate::nonce::nonce;
use crate::steps::Steps;

/// What an unfinished write is called. Nobody else makes such names in a store.
pub(super) const TEMPORARY: &str = ".crab-tmp-";

/// Writes durably, and refuses after a failed fsync: the kernel then may have dropped the pages and forgotten that it
/// did, so nothing that this process believes about the disk holds until the store is read anew.
#[derive(Debug, Default)]
pub(super) struct Writer {
    poisoned: AtomicBool,
    pub(super) steps: Steps,
}

/// A write failed.
#[derive(Debug)]
pub(super) struct WriteFailed {
    pub(super) error: Error,
    /// The file may stand under its name, now or after a crash.
    pub(super) maybe_written: bool,
}

impl From<WriteFailed> for Error {
    fn from(failed: WriteFailed) -> Self {
        failed.error
    }
}

impl Writer {
    pub(super) fn new(steps: Steps) -> Self {
        Self { steps, ..Self::default() }
    }

    pub(super) fn is_poisoned(&self) -> bool {
        self.poisoned.load(Ordering::Acquire)
    }

    pub(super) fn check(&self) -> Result<()> {
        if self.is_poisoned() {
            return Err(Error::new(ErrorKind::Poisoned, "a write to stable storage failed earlier")
                .fix("check the disk, then open the store anew"));
        }
        Ok(())
    }

    /// Replaces or makes `dir/name`: temporary file, fsync, rename, fsync of the directory.
    pub(super) fn write(&self, dir: &Path, name: &str, text: &str) -> Result<(), WriteFailed> {
        keep_house(|| self.replace(dir, name, text))
    }

    fn replace(&self, dir: &Path, name: &str, text: &str) -> Result<(), WriteFailed> {
        let path = dir.join(name);
        let before = |error: Error| WriteFailed { error, maybe_written: false };
        let after = |error: Error| WriteFailed { error, maybe_written: true };
        self.check().map_err(before)?;
        // Not the pid: in a container every engine may have the same one, and what a dead one left must not be in the
        // way.
        let temporary = dir.join(format!("{TEMPORARY}{:016x}", nonce()));
        let written = self.write_temporary(&temporary, text);
        if let Err(error) = written {
            // Best effort: what stays is removed when the store is opened.
            let _ = fs::remove_file(&temporary);
            return Err(before(error));
        }
        let renamed = self.steps.reach("store.rename").and_then(|()| {
            fs::rename(&temporary, &path)
                .map_err(|source| io_error(format!("rename a record to {}", path.display()), source))
        });
        if let Err(error) = renamed {
            let _ = fs::remove_file(&temporary);
            return Err(before(error));
        }
        self.sync_dir(dir).map_err(after)
    }

    fn write_temporary(&self, path: &Path, text: &str) -> Result<()> {
        self.steps.reach("store.write")?;
        let what = || format!("write {}", path.display());
        let mut file = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(path)
            .map_err(|source| io_error(what(), source))?;
        file.write_all(text.as_bytes()).map_err(|source| io_error(what(), source))?;
        self.steps
            .reach("store.fsync")
            .and_then(|()| file.sync_all().map_err(|source| io_error(format!("fsync {}", path.display()), source)))
            .inspect_err(|_| self.poison())
    }

    /// Removes a file durably. Removing what is not there does nothing.
    pub(super) fn remove(&self, dir: &Path, name: &str) -> Result<()> {
        self.check()?;
        self.steps.reach("store.unlink")?;
        match keep_house(|| fs::remove_file(dir.join(name))) {
            Ok(()) => self.sync_dir(dir),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
            Err(error) => Err(io_error(format!("remove {}", dir.join(name).display()), error)),
        }
    }

    /// Gives a file another name in its directory, durably.
    pub(super) fn rename(&self, dir: &Path, from: &str, to: &str) -> Result<()> {
        self.check()?;
        self.steps.reach("store.rename")?;
        keep_house(|| fs::rename(dir.join(from), dir.join(to)))
            .map_err(|source| io_error(format!("rename {}", dir.join(from).display()), source))?;
        self.sync_dir(dir)
    }

    /// Makes a directory for the owner alone, durably. Does nothing where it exists.
    pub(super) fn make_dir(&self, parent: &Path, name: &str) -> Result<()> {
        let path = parent.join(name);
        if path.is_dir() {
            return Ok(());
        }
        self.check()?;
        self.steps.reach("store.mkdir")?;
        keep_house(|| DirBuilder::new().mode(0o700).create(&path))
            .map_err(|source| io_error(format!("make the directory {}", path.display()), source))?;
        self.sync_dir(parent)
    }

    fn sync_dir(&self, dir: &Path) -> Result<()> {
        self.steps
            .reach("store.fsync_dir")
            .and_then(|()| {
                File::open(dir)
                    .and_then(|dir| dir.sync_all())
                    .map_err(|source| io_error(format!("fsync the directory {}", dir.display()), source))
            })
            .inspect_err(|_| self.poison())
    }

    fn poison(&self) {
        self.poisoned.store(true, Ordering::Release);
        tracing::error!("a write to stable storage failed: the store accepts no more until it is opened anew");
    }
}
