//! Doing what the commands of a stream say, in a subvolume that nobody else uses.
//!
//! The stream comes from outside: paths are resolved below the subvolume's root and through no symbolic link.

use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Weak;

use crab_core::{Error, ErrorKind, Result};
use rustix::fs::{
    AtFlags, FallocateFlags, FileType, Gid, Mode, OFlags, RawMode, Timespec, Timestamps, Uid, XattrFlags,
};
use rustix::io::Errno;

use crate::diff::tree::{open_below, split, within};
use crate::send::stream::{Command, Make, Time, damaged};
use crate::subvolume::Uuid;
use crate::{failure, ioctl};

/// How many inode numbers are passed over in one stream, for files that were removed before it was made: far more than a
/// sandbox leaves behind, and some minutes of work. A stream that wants more would keep the disk busy for nothing.
const PASSED_OVER: u64 = 1 << 24;

/// A subvolume that is being received.
pub(crate) struct Receiving<'a> {
    root: &'a OwnedFd,
    /// For messages.
    path: &'a Path,
    uuid: Uuid,
    base: Option<(Uuid, &'a OwnedFd)>,
    /// The directory that was used last.
    directory: Option<(Vec<u8>, OwnedFd)>,
    /// The file that was written last.
    file: Option<(Vec<u8>, File)>,
    /// How many inode numbers may still be passed over.
    passes: u64,
    /// Gone when nobody waits for the import any more.
    wanted: Weak<()>,
}

impl<'a> Receiving<'a> {
    pub(crate) fn new(
        root: &'a OwnedFd,
        path: &'a Path,
        uuid: Uuid,
        base: Option<(Uuid, &'a OwnedFd)>,
        wanted: Weak<()>,
    ) -> Self {
        Self { root, path, uuid, base, directory: None, file: None, passes: PASSED_OVER, wanted }
    }

    /// Does one command.
    pub(crate) fn apply(&mut self, command: &Command<'_>) -> Result<()> {
        let place = self.path;
        let failed = |what: &'static str, path: &[u8]| {
            let path = place.join(OsStr::from_bytes(path));
            move |errno| failure::at(what, &path)(errno)
        };
        match *command {
            Command::Make { path, inode, what } => match self.make_numbered(path, inode, what) {
                Ok(Numbered::Made) => Ok(()),
                Ok(Numbered::Taken) => Err(Error::new(
                    ErrorKind::InvalidInput,
                    "what the stream makes cannot have the inode numbers that it had: the base has given them to others",
                )
                .fix("export the whole version, or since one that it comes from")),
                Ok(Numbered::TooFar) => Err(Error::new(
                    ErrorKind::InvalidInput,
                    format!("the stream passes over more than {PASSED_OVER} inode numbers, which are used up one by one"),
                )
                .fix("copy the files into a new root, and export that")),
                Err(errno) => Err(failed("make", path)(errno)),
            },
            Command::Rename { path, to } => {
                // Whatever is open below the old name is another thing under it from now on.
                let done =
                    self.two(path, to, |from, name, directory, to| rustix::fs::renameat(from, name, directory, to));
                (self.directory, self.file) = (None, None);
                done.map_err(failed("rename", path))
            }
            Command::Link { path, existing } => self
                .two(existing, path, |from, name, directory, to| {
                    rustix::fs::linkat(from, name, directory, to, AtFlags::empty())
                })
                .map_err(failed("link", path)),
            Command::Unlink { path } => self.unlink(path, AtFlags::empty()).map_err(failed("unlink", path)),
            Command::RemoveDirectory { path } => {
                self.unlink(path, AtFlags::REMOVEDIR).map_err(failed("remove the directory", path))
            }
            Command::SetAttribute { path, name, value } => self
                .at(path, |directory, last| {
                    let name = OsStr::from_bytes(name);
                    rustix::fs::lsetxattr(within(directory, last), name, value, XattrFlags::empty())
                })
                .map_err(failed("set an attribute of", path)),
            Command::RemoveAttribute { path, name } => self
                .at(path, |directory, last| rustix::fs::lremovexattr(within(directory, last), OsStr::from_bytes(name)))
                .map_err(failed("remove an attribute of", path)),
            Command::Write { path, offset, data } => {
                let file = self.file(path).map_err(failed("open", path))?;
                let done = file.write_all_at(data, offset);
                done.map_err(|error| Error::io(format_args!("write {}", Self::shown(path)), error))
            }
            Command::Clone { path, offset, length, from, from_path, from_offset } => {
                let source = match self.base {
                    _ if from == self.uuid => self.root,
                    Some((uuid, root)) if from == uuid => root,
                    _ => return Err(damaged("shares data of a subvolume that is not here")),
                };
                let flags = OFlags::RDONLY | OFlags::NONBLOCK;
                let source = open_below(source, from_path, flags).map_err(failed("open", from_path))?;
                let file = self.file(path).map_err(failed("open", path))?;
                ioctl::clone_range(file, offset, source, from_offset, length).map_err(failed("share data with", path))
            }
            Command::Truncate { path, size } => {
                let file = self.file(path).map_err(failed("open", path))?;
                rustix::fs::ftruncate(file, size).map_err(failed("truncate", path))
            }
            Command::Allocate { path, mode, offset, length } => {
                let file = self.file(path).map_err(failed("open", path))?;
                let mode = FallocateFlags::from_bits_truncate(mode);
                rustix::fs::fallocate(file, mode, offset, length).map_err(failed("allocate", path))
            }
            Command::SetMode { path, mode } => self
                .at(path, |directory, name| {
                    let mode = Mode::from_raw_mode(mode as RawMode);
                    match name {
                        [] => rustix::fs::chmod(within(directory, name), mode),
                        name => rustix::fs::chmodat(directory, OsStr::from_bytes(name), mode, AtFlags::empty()),
                    }
                })
                .map_err(failed("set the mode of", path)),
            Command::SetOwner { path, user, group } => self
                .at(path, |directory, name| {
                    let (user, group) = (Uid::from_raw(user), Gid::from_raw(group));
                    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::EMPTY_PATH;
                    rustix::fs::chownat(directory, OsStr::from_bytes(name), Some(user), Some(group), flags)
                })
                .map_err(failed("set the owner of", path)),
            Command::SetTimes { path, accessed, modified } => self
                .at(path, |directory, name| {
                    let time = |time: Time| Timespec { tv_sec: time.seconds, tv_nsec: time.nanoseconds.into() };
                    let times = Timestamps { last_access: time(accessed), last_modification: time(modified) };
                    let name = OsStr::from_bytes(if name.is_empty() { b"." } else { name });
                    rustix::fs::utimensat(directory, name, &times, AtFlags::SYMLINK_NOFOLLOW)
                })
                .map_err(failed("set the times of", path)),
            // The kernel does not send them yet, and nobody applies them.
            Command::SetFlags { .. } => Ok(()),
            Command::Extent { .. } => Err(damaged("was made without data")),
            Command::Subvolume { .. } | Command::Snapshot { .. } | Command::End => {
                Err(damaged("holds a command where it cannot be"))
            }
        }
    }

    fn shown(path: &[u8]) -> String {
        String::from_utf8_lossy(path).into_owned()
    }

    fn directory(&mut self, path: &[u8]) -> Result<BorrowedFd<'_>, Errno> {
        if path.is_empty() {
            return Ok(self.root.as_fd());
        }
        if self.directory.as_ref().is_none_or(|(known, _)| known != path) {
            let fd = open_below(self.root, path, OFlags::PATH | OFlags::DIRECTORY)?;
            self.directory = Some((path.to_vec(), fd));
        }
        self.directory.as_ref().map(|(_, fd)| fd.as_fd()).ok_or(Errno::NOENT)
    }

    /// Runs a call on a name in its directory.
    fn at(&mut self, path: &[u8], call: impl FnOnce(BorrowedFd<'_>, &[u8]) -> Result<(), Errno>) -> Result<(), Errno> {
        let (parent, name) = split(path);
        call(self.directory(parent)?, name)
    }

    /// Runs a call on two names, each in its directory.
    fn two(
        &mut self,
        from: &[u8],
        to: &[u8],
        call: impl FnOnce(BorrowedFd<'_>, &OsStr, BorrowedFd<'_>, &OsStr) -> Result<(), Errno>,
    ) -> Result<(), Errno> {
        let (parent, name) = split(from);
        let from = open_below(self.root, parent, OFlags::PATH | OFlags::DIRECTORY)?;
        let name = OsStr::from_bytes(name);
        self.at(to, |directory, to| call(from.as_fd(), name, directory, OsStr::from_bytes(to)))
    }

    /// Makes something that has this inode number, which processes may remember; 0 is any.
    fn make_numbered(&mut self, path: &[u8], inode: u64, what: Make<'_>) -> Result<Numbered, Errno> {
        let mut made = self.make(path, what)?;
        if (1..inode).contains(&made) {
            let directory = matches!(what, Make::Directory);
            self.unlink(path, if directory { AtFlags::REMOVEDIR } else { AtFlags::empty() })?;
            match self.passes.checked_sub(inode - made) {
                Some(left) => self.passes = left,
                None => return Ok(Numbered::TooFar),
            }
            while made < inode - 1 {
                made = self.use_up_a_number()?;
            }
            made = self.make(path, what)?;
        }
        Ok(if inode == 0 || made == inode { Numbered::Made } else { Numbered::Taken })
    }

    /// Numbers are given out one after another. A file without a name takes one.
    fn use_up_a_number(&self) -> Result<u64, Errno> {
        if self.wanted.strong_count() == 0 {
            return Err(Errno::CANCELED);
        }
        let flags = OFlags::TMPFILE | OFlags::WRONLY | OFlags::CLOEXEC;
        let file = rustix::fs::openat(self.root, c".", flags, Mode::RUSR | Mode::WUSR)?;
        Ok(rustix::fs::fstat(file)?.st_ino)
    }

    /// Makes something and gives its inode number.
    fn make(&mut self, path: &[u8], what: Make<'_>) -> Result<u64, Errno> {
        let private = Mode::RUSR | Mode::WUSR;
        let mut inode = 0;
        self.at(path, |directory, name| {
            let name = OsStr::from_bytes(name);
            let node = |kind, device| rustix::fs::mknodat(directory, name, kind, private, device);
            match what {
                Make::File => node(FileType::RegularFile, 0),
                Make::Directory => rustix::fs::mkdirat(directory, name, Mode::RWXU),
                Make::Fifo => node(FileType::Fifo, 0),
                Make::Socket => node(FileType::Socket, 0),
                Make::Node { mode, device } => node(FileType::from_raw_mode(mode as RawMode), device),
                Make::Link { target } => rustix::fs::symlinkat(OsStr::from_bytes(target), directory, name),
            }?;
            inode = rustix::fs::statat(directory, name, AtFlags::SYMLINK_NOFOLLOW)?.st_ino;
            Ok(())
        })?;
        Ok(inode)
    }

    fn unlink(&mut self, path: &[u8], flags: AtFlags) -> Result<(), Errno> {
        let done = self.at(path, |directory, name| rustix::fs::unlinkat(directory, OsStr::from_bytes(name), flags));
        (self.directory, self.file) = (None, None);
        done
    }

    fn file(&mut self, path: &[u8]) -> Result<&File, Errno> {
        if self.file.as_ref().is_none_or(|(known, _)| known != path) {
            // A pipe under this name would make a plain open wait.
            let fd = open_below(self.root, path, OFlags::RDWR | OFlags::NONBLOCK)?;
            self.file = Some((path.to_vec(), File::from(fd)));
        }
        self.file.as_ref().map(|(_, file)| file).ok_or(Errno::NOENT)
    }
}

/// What became of something that was to have a certain inode number.
enum Numbered {
    Made,
    /// The number was given away already.
    Taken,
    /// Too many numbers would be used up on the way there. Nothing was made.
    TooFar,
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;
    use std::sync::Arc;

    use super::*;
    use crate::subvolume;
    use crate::support::Pool;

    #[test]
    fn absurd_inode_numbers_are_refused_before_others_are_used_up() {
        let Some(pool) = Pool::new() else { return };
        let path = pool.path().join("received");
        subvolume::create(&path).unwrap();
        let (root, wanted) = (subvolume::open(&path).unwrap(), Arc::new(()));
        let mut receiving = Receiving::new(&root, &path, Uuid([1; 16]), None, Arc::downgrade(&wanted));
        receiving.passes = 300;
        let mut make = |name: &str, inode| {
            receiving.apply(&Command::Make { path: name.as_bytes(), inode, what: Make::File }).map_err(|e| e.kind())
        };
        // The first number is 257.
        assert_eq!(make("a", 400), Ok(()));
        assert_eq!(make("absurd", u64::MAX / 2), Err(ErrorKind::InvalidInput));
        assert_eq!(make("b", 540), Ok(()));
        assert_eq!(make("c", 580), Err(ErrorKind::InvalidInput));
        let inode = |name: &str| std::fs::metadata(path.join(name)).map(|metadata| metadata.ino()).ok();
        assert_eq!(["a", "absurd", "b", "c"].map(inode), [Some(400), None, Some(540), None]);
        std::fs::write(path.join("next"), "").unwrap();
        assert!(inode("next").is_some_and(|inode| inode < 550), "{:?}", inode("next"));
    }
}
