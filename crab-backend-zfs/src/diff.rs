//! What differs between two versions: a walk over the names of both, which reads only what may have changed.
//!
//! A file is the same without being read where both versions hold the same object with the same time of change, and that
//! time lies well before the earlier of the two was taken: every change since then would have moved it. The snapshots
//! are mounted for the walk alone, and nowhere to be seen, so it does not matter whether their datasets are.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{CString, OsStr};
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::thread;

use async_trait::async_trait;
use crab_backend_files::blocking;
use crab_core::{Artifact, Error, FileChange, FileChangeKind, FileChanges, Result};
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat};
use rustix::io::Errno;
use tokio::sync::mpsc;

use crate::versions::Versions;
use crate::{failure, mounts};

/// How many changes may wait for the reader.
const WAITING: usize = 256;
/// Seconds by which a time of change must lie before a snapshot to count as before it.
const MARGIN: i64 = 10;

/// Begins to compare. The work is done by a thread that ends when the changes are dropped.
pub(crate) async fn diff(versions: &Arc<Versions>, from: &Artifact, to: &Artifact) -> Result<Box<dyn FileChanges>> {
    let (versions, from, to) = (Arc::clone(versions), from.clone(), to.clone());
    blocking::run(move || {
        let (old, new) = (versions.find_whole(&from)?, versions.find_whole(&to)?);
        let (sender, receiver) = mpsc::channel(WAITING);
        if old.guid != new.guid {
            let taken = old.created.min(new.created);
            let (a, b) = (mounts::detached(&old.name, None)?, mounts::detached(&new.name, None)?);
            thread::spawn(move || {
                let walk = Walk { sender, before: i64::try_from(taken).unwrap_or(0) - MARGIN };
                let walked = (|| walk.roots(&a.open()?, &b.open()?))();
                if let Err(Stopped::Failed(error)) = walked {
                    drop(walk.sender.blocking_send(Err(error)));
                }
            });
        }
        Ok(Box::new(Changes(receiver)) as Box<dyn FileChanges>)
    })
    .await
}

struct Changes(mpsc::Receiver<Result<FileChange>>);

#[async_trait]
impl FileChanges for Changes {
    async fn next(&mut self) -> Result<Option<FileChange>> {
        self.0.recv().await.transpose()
    }
}

/// Why a walk came to no end.
enum Stopped {
    Failed(Error),
    /// Nobody reads what it finds any more.
    Dropped,
}

impl From<Error> for Stopped {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

struct Walk {
    sender: mpsc::Sender<Result<FileChange>>,
    /// Times of change before this one were there when both snapshots were taken. Seconds since 1970.
    before: i64,
}

/// A name in a directory.
#[derive(Clone, Copy)]
struct Entry<'a> {
    directory: &'a OwnedFd,
    name: &'a CString,
}

impl Entry<'_> {
    fn look(self) -> Result<Option<Stat>> {
        match rustix::fs::statat(self.directory, self.name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(self.failed("look at", errno)),
        }
    }

    fn open(self, flags: OFlags) -> Result<OwnedFd> {
        rustix::fs::openat(
            self.directory,
            self.name,
            flags | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
            Mode::empty(),
        )
        .map_err(|errno| self.failed("open", errno))
    }

    fn failed(self, what: &str, errno: Errno) -> Error {
        failure::system(format_args!("{what} {} in a version", self.name.to_string_lossy()), errno)
    }

    /// A path that leads here, for the calls that take no directory.
    fn path(self) -> CString {
        let mut path = format!("/proc/self/fd/{}/", self.directory.as_raw_fd()).into_bytes();
        path.extend(self.name.as_bytes());
        // Neither part holds a NUL.
        CString::new(path).unwrap_or_default()
    }
}

impl Walk {
    fn roots(&self, a: &OwnedFd, b: &OwnedFd) -> Result<(), Stopped> {
        let name = CString::default();
        let dot = CString::from(c".");
        let (old, new) = (Entry { directory: a, name: &dot }, Entry { directory: b, name: &dot });
        if let (Some(x), Some(y)) = (old.look()?, new.look()?)
            && !same_metadata(old, &x, new, &y)?
        {
            self.tell(name.as_bytes(), FileChangeKind::Metadata)?;
        }
        self.directories(&mut Vec::new(), Some(a), Some(b))
    }

    fn tell(&self, path: &[u8], kind: FileChangeKind) -> Result<(), Stopped> {
        self.sender.blocking_send(Ok(FileChange { path: path.to_vec(), kind })).map_err(|_| Stopped::Dropped)
    }

    fn directories(&self, path: &mut Vec<u8>, a: Option<&OwnedFd>, b: Option<&OwnedFd>) -> Result<(), Stopped> {
        let mut names = BTreeSet::new();
        for directory in [a, b].into_iter().flatten() {
            names.extend(read(directory)?);
        }
        for name in &names {
            let length = path.len();
            if length > 0 {
                path.push(b'/');
            }
            path.extend(name.as_bytes());
            let at = |directory| Entry { directory, name };
            self.entries(path, a.map(at), b.map(at))?;
            path.truncate(length);
        }
        Ok(())
    }

    fn entries(&self, path: &mut Vec<u8>, a: Option<Entry<'_>>, b: Option<Entry<'_>>) -> Result<(), Stopped> {
        let look = |entry: Option<Entry<'_>>| entry.map_or(Ok(None), Entry::look);
        let (old, new) = (look(a)?, look(b)?);
        let kind = match (a.zip(old), b.zip(new)) {
            (Some((a, old)), Some((b, new))) => self.compare(a, &old, b, &new)?,
            (None, Some(_)) => Some(FileChangeKind::Added),
            (Some(_), None) => Some(FileChangeKind::Removed),
            (None, None) => None,
        };
        if let Some(kind) = kind {
            self.tell(path, kind)?;
        }
        let below = |entry: Option<(Entry<'_>, Stat)>| {
            entry
                .filter(|(_, stat)| kind_of(stat) == FileType::Directory)
                .map(|(entry, _)| entry.open(OFlags::DIRECTORY))
        };
        let (x, y) = (below(a.zip(old)).transpose()?, below(b.zip(new)).transpose()?);
        if x.is_none() && y.is_none() { Ok(()) } else { self.directories(path, x.as_ref(), y.as_ref()) }
    }

    fn compare(&self, a: Entry<'_>, old: &Stat, b: Entry<'_>, new: &Stat) -> Result<Option<FileChangeKind>> {
        let same_object = old.st_ino == new.st_ino
            && kind_of(old) == kind_of(new)
            && (old.st_ctime, old.st_ctime_nsec) == (new.st_ctime, new.st_ctime_nsec);
        if same_object && old.st_ctime < self.before {
            return Ok(None);
        }
        if !same_content(a, old, b, new)? {
            return Ok(Some(FileChangeKind::Content));
        }
        Ok((!same_metadata(a, old, b, new)?).then_some(FileChangeKind::Metadata))
    }
}

fn kind_of(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

fn read(directory: &OwnedFd) -> Result<Vec<CString>> {
    let failed = |errno| failure::system("read a directory of a version", errno);
    let mut names = Vec::new();
    for entry in Dir::read_from(directory).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name();
        if !matches!(name.to_bytes(), b"." | b"..") {
            names.push(name.to_owned());
        }
    }
    Ok(names)
}

fn same_content(a: Entry<'_>, old: &Stat, b: Entry<'_>, new: &Stat) -> Result<bool> {
    if kind_of(old) != kind_of(new) {
        return Ok(false);
    }
    let target = |entry: Entry<'_>| {
        rustix::fs::readlinkat(entry.directory, entry.name, Vec::new()).map_err(|errno| entry.failed("read", errno))
    };
    match kind_of(old) {
        FileType::Symlink => Ok(target(a)? == target(b)?),
        FileType::RegularFile => Ok(old.st_size == new.st_size && same_bytes(a, b)?),
        FileType::CharacterDevice | FileType::BlockDevice => Ok(old.st_rdev == new.st_rdev),
        _ => Ok(true),
    }
}

fn same_bytes(a: Entry<'_>, b: Entry<'_>) -> Result<bool> {
    const PIECE: usize = 1 << 16;
    let failed = |error| Error::io("read a file of a version", error);
    let (mut old, mut new) = (File::from(a.open(OFlags::empty())?), File::from(b.open(OFlags::empty())?));
    let (mut x, mut y) = (Vec::with_capacity(PIECE), Vec::with_capacity(PIECE));
    loop {
        x.clear();
        y.clear();
        old.by_ref().take(PIECE as u64).read_to_end(&mut x).map_err(failed)?;
        new.by_ref().take(PIECE as u64).read_to_end(&mut y).map_err(failed)?;
        if x != y || x.is_empty() {
            return Ok(x == y);
        }
    }
}

fn same_metadata(a: Entry<'_>, old: &Stat, b: Entry<'_>, new: &Stat) -> Result<bool> {
    let same = (old.st_mode, old.st_uid, old.st_gid) == (new.st_mode, new.st_uid, new.st_gid);
    let time = |stat: &Stat| (stat.st_mtime, stat.st_mtime_nsec);
    let directory = kind_of(old) == FileType::Directory && kind_of(new) == FileType::Directory;
    Ok(same && (directory || time(old) == time(new)) && attributes(a)? == attributes(b)?)
}

/// The extended attributes of a file, which may be a symbolic link.
fn attributes(entry: Entry<'_>) -> Result<BTreeMap<Vec<u8>, Vec<u8>>> {
    let path = entry.path();
    let failed = |errno| entry.failed("read the attributes of", errno);
    let names = match whole(|buffer| rustix::fs::llistxattr(&path, buffer)) {
        Err(Errno::OPNOTSUPP) => return Ok(BTreeMap::new()),
        names => names.map_err(failed)?,
    };
    let mut found = BTreeMap::new();
    for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let value = whole(|buffer| rustix::fs::lgetxattr(&path, OsStr::from_bytes(name), buffer));
        found.insert(name.to_vec(), value.map_err(failed)?);
    }
    Ok(found)
}

/// Calls with buffers that grow until one is large enough.
fn whole(mut call: impl FnMut(&mut [u8]) -> Result<usize, Errno>) -> Result<Vec<u8>, Errno> {
    // Never empty: an empty buffer would be filled with nothing, and be large enough.
    let mut buffer = vec![0; 256];
    loop {
        match call(&mut buffer) {
            Ok(size) => {
                buffer.truncate(size);
                return Ok(buffer);
            }
            Err(Errno::RANGE) if buffer.len() < 1 << 20 => buffer = vec![0; buffer.len() * 8],
            Err(errno) => return Err(errno),
        }
    }
}
