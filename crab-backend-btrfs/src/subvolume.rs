//! Subvolumes for hosts and tools: make, snapshot, remove, look at. All calls block on the disk; in async code run
//! them on a thread that may block.
//!
//! A subvolume is a directory with a tree of its own. A sandbox's root has to be one, since only whole subvolumes can
//! be snapshotted.
//!
//! Paths must not end in a symbolic link: what such a path names could change between look and use. Errors are of the
//! kinds [`NotFound`](ErrorKind::NotFound), [`AlreadyExists`](ErrorKind::AlreadyExists),
//! [`InvalidInput`](ErrorKind::InvalidInput) (not a subvolume, another filesystem, no file name),
//! [`Unsupported`](ErrorKind::Unsupported) (not btrfs, or no privilege), [`Full`](ErrorKind::Full),
//! [`Busy`](ErrorKind::Busy) and [`Io`](ErrorKind::Io), and nothing was changed where a call fails.

use std::ffi::OsStr;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use crab_core::{Error, ErrorKind, Result};
use linux_raw_sys::btrfs::{BTRFS_FIRST_FREE_OBJECTID, BTRFS_ROOT_SUBVOL_RDONLY};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

use crate::failure;
use crate::ioctl;
pub use crate::uuid::Uuid;

/// `f_type` of a btrfs.
const BTRFS_MAGIC: u64 = 0x9123_683e;

/// A subvolume, as the kernel describes it.
///
/// A *generation* is the number of a transaction of the filesystem; it only grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Info {
    /// Its number within the filesystem: 5 for the top, 256 and more for others.
    pub id: u64,
    /// The number of the subvolume that it stands in, 0 for the top.
    pub parent_id: u64,
    /// Its identity. `None` only for the top of a filesystem that an old tool made.
    pub uuid: Option<Uuid>,
    /// The subvolume that it is a snapshot of.
    pub parent_uuid: Option<Uuid>,
    /// The subvolume on another filesystem that it was received from.
    pub received_uuid: Option<Uuid>,
    /// The transaction that last changed its tree. It trails behind: what is not written out is not counted, see
    /// [`generation_after_sync`]. A balance of the filesystem raises it too.
    pub generation: u64,
    /// The transaction that last changed one of its files.
    pub changed: u64,
    /// The transaction that made it.
    pub created: u64,
    /// Whether nothing in it can be changed.
    pub read_only: bool,
}

impl From<ioctl::SubvolumeInfo> for Info {
    fn from(raw: ioctl::SubvolumeInfo) -> Self {
        Self {
            id: raw.treeid,
            parent_id: raw.parent_id,
            uuid: Uuid::known(raw.uuid),
            parent_uuid: Uuid::known(raw.parent_uuid),
            received_uuid: Uuid::known(raw.received_uuid),
            generation: raw.generation,
            changed: raw.ctransid,
            created: raw.otransid,
            read_only: raw.flags & u64::from(BTRFS_ROOT_SUBVOL_RDONLY) != 0,
        }
    }
}

/// Whether the files of a new snapshot can be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// They cannot.
    ReadOnly,
    /// They can.
    Writable,
}

/// Opens a directory that is not a symbolic link.
pub(crate) fn open_directory(path: &Path) -> Result<OwnedFd, Errno> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())
}

/// Whether an open directory is on btrfs.
pub(crate) fn on_btrfs(fd: impl AsFd) -> Result<bool, Errno> {
    // The field is signed on some machines and 32 bits wide on others; the magic fits into the low 32 bits of all.
    Ok(rustix::fs::fstatfs(fd)?.f_type as u64 & 0xffff_ffff == BTRFS_MAGIC)
}

/// Whether an open directory is the root of a subvolume.
pub(crate) fn is_root(fd: impl AsFd) -> Result<bool, Errno> {
    // Every subvolume's own root directory has this inode number, and no other directory of a btrfs has it.
    Ok(rustix::fs::fstat(fd.as_fd())?.st_ino == u64::from(BTRFS_FIRST_FREE_OBJECTID) && on_btrfs(fd)?)
}

/// Opens the root directory of a subvolume.
pub(crate) fn open(path: &Path) -> Result<OwnedFd> {
    let fd = open_directory(path).map_err(failure::at("open", path))?;
    if is_root(&fd).map_err(failure::at("look at", path))? {
        return Ok(fd);
    }
    Err(Error::new(ErrorKind::InvalidInput, format!("{} is not a btrfs subvolume", path.display()))
        .fix("make it one, for example with crab_backend_btrfs::subvolume::create"))
}

/// The description of the subvolume that an open directory is the root of.
pub(crate) fn info_of(fd: impl AsFd, path: &Path) -> Result<Info> {
    Ok(ioctl::subvolume_info(fd).map_err(failure::at("look at the subvolume", path))?.into())
}

fn parent_and_name(path: &Path) -> Result<(OwnedFd, &OsStr)> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        let message = format!("{} does not end in a file name", path.display());
        return Err(Error::new(ErrorKind::InvalidInput, message));
    };
    let parent = if parent.as_os_str().is_empty() { Path::new(".") } else { parent };
    // A parent may be reached over a symbolic link: only the last part is what gets made or removed.
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let fd = rustix::fs::open(parent, flags, Mode::empty()).map_err(failure::at("open", parent))?;
    Ok((fd, name))
}

/// Whether there is a subvolume at `path`.
///
/// # Errors
/// Where that cannot be told; a path without anything, or with something else, is no error.
pub fn exists(path: &Path) -> Result<bool> {
    match open_directory(path) {
        Ok(fd) => is_root(fd).map_err(failure::at("look at", path)),
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Ok(false),
        Err(errno) => Err(failure::at("open", path)(errno)),
    }
}

/// Makes an empty subvolume. It outlives a power cut after the filesystem's next commit.
///
/// # Errors
/// See the [module](self).
pub fn create(path: &Path) -> Result<()> {
    let (parent, name) = parent_and_name(path)?;
    ioctl::create_subvolume(parent, name).map_err(failure::at("create the subvolume", path))
}

/// Makes a snapshot of the subvolume `source` at `target`. It holds all that had been written to the source, synced or
/// not, and is on stable storage when this returns. Subvolumes inside the source come out as empty directories.
///
/// # Errors
/// See the [module](self).
pub fn snapshot(source: &Path, target: &Path, access: Access) -> Result<()> {
    let source = open(source)?;
    let (parent, name) = parent_and_name(target)?;
    ioctl::create_snapshot(parent, name, source, access == Access::ReadOnly)
        .map_err(failure::at("create the snapshot", target))
}

/// Removes a subvolume with all its files, also a read-only one. Its space is freed in the background; a power cut
/// before the filesystem's next commit brings it back.
///
/// # Errors
/// See the [module](self). [`ErrorKind::Busy`] where something is mounted on it or it is the filesystem's default;
/// subvolumes inside it must be removed before.
pub fn delete(path: &Path) -> Result<()> {
    drop(open(path)?);
    let (parent, name) = parent_and_name(path)?;
    ioctl::destroy_subvolume(parent, name).map_err(failure::at("remove the subvolume", path))
}

/// The description of the subvolume at `path`.
///
/// # Errors
/// See the [module](self).
pub fn info(path: &Path) -> Result<Info> {
    info_of(open(path)?, path)
}

/// The subvolumes directly inside the subvolume at `path`, as paths below it, at most `limit` of them.
///
/// # Errors
/// See the [module](self).
pub fn nested(path: &Path, limit: usize) -> Result<Vec<PathBuf>> {
    nested_in(open(path)?, path, limit)
}

pub(crate) fn nested_in(fd: impl AsFd, path: &Path, limit: usize) -> Result<Vec<PathBuf>> {
    let found = ioctl::nested_subvolumes(fd, limit).map_err(failure::at("look for subvolumes inside", path))?;
    Ok(found.into_iter().map(PathBuf::from).collect())
}

/// Writes out the whole filesystem, then gives the generation of the subvolume at `path`: it has grown since an
/// earlier call exactly if something in the subvolume was changed in between (or the filesystem was balanced). Reading
/// does not raise it, except for access times where the mount keeps them.
///
/// Costs from microseconds on a filesystem at rest to the time of writing out everybody's dirty data.
///
/// # Errors
/// See the [module](self).
pub fn generation_after_sync(path: &Path) -> Result<u64> {
    let fd = open(path)?;
    rustix::fs::syncfs(&fd).map_err(failure::at("sync", path))?;
    Ok(info_of(&fd, path)?.generation)
}
