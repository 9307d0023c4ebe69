//! Directories that only we may write: made, opened and looked at without following a link.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::Path;

use crab_core::{Error, ErrorKind, Result};
use rustix::fs::{Mode, OFlags};

/// Makes a directory that only we may enter, with its parents, unless it is there. What is there must be ours.
pub(crate) fn private_directory(path: &Path) -> Result<()> {
    let made = std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path);
    made.map_err(|e| Error::io(format!("make the directory {}", path.display()), e))?;
    let metadata = std::fs::symlink_metadata(path).map_err(|e| Error::io(format!("look at {}", path.display()), e))?;
    let ours =
        metadata.is_dir() && metadata.uid() == rustix::process::geteuid().as_raw() && metadata.mode() & 0o022 == 0;
    if ours {
        return Ok(());
    }
    Err(Error::new(
        ErrorKind::InvalidInput,
        format!("{} is not a directory that only this user may write", path.display()),
    )
    .fix("remove it, or configure another directory"))
}

/// Opens a directory, which must be no link.
pub(crate) fn open_directory(path: &Path) -> std::io::Result<OwnedFd> {
    Ok(rustix::fs::open(path, OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?)
}

/// Opens a directory inside another, which must be no link.
pub(crate) fn open_directory_at(parent: impl AsFd, name: impl AsRef<OsStr>) -> std::io::Result<OwnedFd> {
    let flags = OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    Ok(rustix::fs::openat(parent, name.as_ref(), flags, Mode::empty())?)
}

/// Opens a file inside a directory for reading; it must be no link, and a fifo does not block.
pub(crate) fn open_file_at(directory: impl AsFd, name: &str) -> std::io::Result<std::fs::File> {
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC | OFlags::NONBLOCK;
    Ok(rustix::fs::openat(directory, name, flags, Mode::empty())?.into())
}

/// Makes a new file that only we may read.
pub(crate) fn create(path: &Path) -> std::io::Result<std::fs::File> {
    std::fs::File::options().read(true).write(true).create_new(true).mode(0o600).open(path)
}

/// Makes the names in a directory durable.
pub(crate) fn sync_directory(path: &Path) -> Result<()> {
    let sync = || Ok::<_, std::io::Error>(rustix::fs::fsync(open_directory(path)?)?);
    sync().map_err(|e| Error::io(format!("sync the directory {}", path.display()), e))
}

/// Removes a directory and all that is in it. One that is not there is no error. A CRIU may still write into it, until
/// it notices.
pub(crate) fn remove_all(path: &Path) -> Result<()> {
    let mut patience = 200;
    loop {
        match std::fs::remove_dir_all(path) {
            Err(e) if e.kind() == std::io::ErrorKind::DirectoryNotEmpty && patience > 0 => {
                patience -= 1;
                std::thread::sleep(std::time::Duration::from_millis(10));
            }
            Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::io(format!("remove {}", path.display()), e));
            }
            _ => return Ok(()),
        }
    }
}

/// The names in a directory; none where it does not exist.
pub(crate) fn names(path: &Path) -> Result<Vec<String>> {
    let failed = |e| Error::io(format!("read the directory {}", path.display()), e);
    let entries = match std::fs::read_dir(path) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        other => other.map_err(failed)?,
    };
    let mut names = Vec::new();
    for entry in entries {
        // No name of ours is other than ASCII.
        names.extend(entry.map_err(failed)?.file_name().into_string().ok());
    }
    Ok(names)
}
