//! One of two trees: looks at what stands at a path, without ever leaving the tree.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crab_core::{Error, ErrorKind, Result};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

use crate::failure;
use crate::ioctl::{self, Key};

const INODE_ITEM: u8 = 1;
const INODE_REF: u8 = 12;
const INODE_EXTREF: u8 = 13;
/// The inode number of every subvolume's root directory.
const ROOT_DIRECTORY: u64 = 256;

/// A read-only tree.
#[derive(Debug)]
pub(super) struct Tree {
    root: OwnedFd,
    /// For messages.
    path: PathBuf,
    /// The directory that was used last, or that it does not exist.
    last: Option<(Vec<u8>, Option<OwnedFd>)>,
}

pub(super) type Attributes = BTreeMap<Vec<u8>, Vec<u8>>;

/// The parent's path and the last name. The root has neither.
pub(crate) fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (&[], path),
    }
}

/// A name in a directory.
pub(super) fn join(parent: &[u8], name: &[u8]) -> Vec<u8> {
    if parent.is_empty() { name.to_vec() } else { [parent, b"/", name].concat() }
}

/// Opens a path below a directory, going through no symbolic link and to no other mount.
pub(crate) fn open_below(root: impl AsFd, path: &[u8], flags: OFlags) -> Result<OwnedFd, Errno> {
    let path = if path.is_empty() { b"." } else { path };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    let open = || rustix::fs::openat2(&root, OsStr::from_bytes(path), flags | OFlags::CLOEXEC, Mode::empty(), resolve);
    loop {
        match open() {
            // A rename elsewhere came in between.
            Err(Errno::AGAIN | Errno::INTR) => {}
            other => return other,
        }
    }
}

impl Tree {
    pub(super) fn new(root: OwnedFd, path: PathBuf) -> Self {
        Self { root, path, last: None }
    }

    fn failed<'a>(&'a self, what: &'static str, path: &'a [u8]) -> impl FnOnce(Errno) -> crab_core::Error + 'a {
        move |errno| failure::at(what, &self.path.join(OsStr::from_bytes(path)))(errno)
    }

    /// The directory at a path, where there is one.
    fn directory(&mut self, path: &[u8]) -> Result<Option<BorrowedFd<'_>>> {
        if path.is_empty() {
            return Ok(Some(self.root.as_fd()));
        }
        if self.last.as_ref().is_none_or(|(known, _)| known != path) {
            let fd = match open_below(&self.root, path, OFlags::PATH | OFlags::DIRECTORY) {
                Ok(fd) => Some(fd),
                Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => None,
                Err(errno) => return Err(self.failed("open", path)(errno)),
            };
            self.last = Some((path.to_vec(), fd));
        }
        Ok(self.last.as_ref().and_then(|(_, fd)| fd.as_ref()).map(AsFd::as_fd))
    }

    /// What stands at a path, where something does.
    pub(super) fn look(&mut self, path: &[u8]) -> Result<Option<Stat>> {
        let (parent, name) = split(path);
        let Some(directory) = self.directory(parent)? else { return Ok(None) };
        let (name, flags) = if name.is_empty() { (&b""[..], AtFlags::EMPTY_PATH) } else { (name, AtFlags::empty()) };
        match rustix::fs::statat(directory, OsStr::from_bytes(name), flags | AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(self.failed("look at", path)(errno)),
        }
    }

    /// The names in the directory at a path; none where there is no directory.
    pub(super) fn names(&mut self, path: &[u8]) -> Result<Vec<Vec<u8>>> {
        let fd = match open_below(&self.root, path, OFlags::RDONLY | OFlags::DIRECTORY) {
            Ok(fd) => fd,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(Vec::new()),
            Err(errno) => return Err(self.failed("open", path)(errno)),
        };
        let list = || -> Result<Vec<Vec<u8>>, Errno> {
            let mut names = Vec::new();
            for entry in rustix::fs::Dir::new(fd)? {
                let name = entry?.file_name().to_bytes().to_vec();
                if name != b"." && name != b".." {
                    names.push(name);
                }
            }
            Ok(names)
        };
        list().map_err(self.failed("list", path))
    }

    pub(super) fn target(&mut self, path: &[u8]) -> Result<Vec<u8>> {
        let (parent, name) = split(path);
        let read = |directory: Option<BorrowedFd<'_>>| {
            let directory = directory.ok_or(Errno::NOENT)?;
            rustix::fs::readlinkat(directory, OsStr::from_bytes(name), Vec::new())
        };
        let target = read(self.directory(parent)?).map_err(self.failed("read the link", path))?;
        Ok(target.into_bytes())
    }

    pub(super) fn file(&mut self, path: &[u8]) -> Result<File> {
        let (parent, name) = split(path);
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NOATIME | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let open = |directory: Option<BorrowedFd<'_>>| {
            rustix::fs::openat(directory.ok_or(Errno::NOENT)?, OsStr::from_bytes(name), flags, Mode::empty())
        };
        let fd = open(self.directory(parent)?).map_err(self.failed("open", path))?;
        Ok(File::from(fd))
    }

    pub(super) fn attributes(&mut self, path: &[u8]) -> Result<Attributes> {
        let (parent, name) = split(path);
        let Some(directory) = self.directory(parent)? else { return Ok(Attributes::new()) };
        // There is no call that takes a directory and a name on all kernels. The name does not follow a link.
        let through = within(directory, name);
        attributes(&through).map_err(self.failed("read the attributes of", path))
    }

    /// All paths of a file with several names.
    pub(super) fn links(&mut self, inode: u64) -> Result<Vec<Vec<u8>>> {
        let mut found = Vec::new();
        for (parent, name) in self.references(inode)? {
            // It cannot be circular, and the kernel refuses paths of more than so many steps.
            found.extend(self.directory_path(parent, 4096)?.map(|path| join(&path, &name)));
        }
        Ok(found)
    }

    fn directory_path(&self, inode: u64, steps: u32) -> Result<Option<Vec<u8>>> {
        if inode == ROOT_DIRECTORY {
            return Ok(Some(Vec::new()));
        }
        let Some((parent, name)) = self.references(inode)?.into_iter().next() else { return Ok(None) };
        if steps == 0 {
            return Ok(None);
        }
        Ok(self.directory_path(parent, steps - 1)?.map(|path| join(&path, &name)))
    }

    /// The transaction in which the tree's root directory was made. Snapshots take it along, and no two subvolumes are
    /// made in one transaction.
    pub(super) fn age(&self) -> Result<u64> {
        let key = Key { object: ROOT_DIRECTORY, kind: INODE_ITEM, offset: 0 };
        let mut age = None;
        ioctl::search(&self.root, 0, key, key, |_, item| age = item.first_chunk().map(|age| u64::from_le_bytes(*age)))
            .map_err(failure::at("look at the root directory of", &self.path))?;
        age.ok_or_else(|| Error::new(ErrorKind::Internal, format!("{} has no root directory", self.path.display())))
    }

    /// The directories and names by which an inode is known.
    fn references(&self, inode: u64) -> Result<Vec<(u64, Vec<u8>)>> {
        let key = |kind, offset| Key { object: inode, kind, offset };
        let mut found = Vec::new();
        let last = key(INODE_EXTREF, u64::MAX);
        ioctl::search(&self.root, 0, key(INODE_REF, 0), last, |key, item| references(key, item, &mut found))
            .map_err(failure::at("look for the names of a file in", &self.path))?;
        Ok(found)
    }
}

/// Takes the names out of an item of a tree. A malformed rest is left out.
fn references(key: Key, mut item: &[u8], found: &mut Vec<(u64, Vec<u8>)>) {
    loop {
        // Either an index, a length and the name; or the directory before them, which is then not in the key.
        let mut parent = key.offset;
        if key.kind == INODE_EXTREF {
            let Some((number, rest)) = item.split_first_chunk() else { return };
            (parent, item) = (u64::from_le_bytes(*number), rest);
        }
        let Some((_index, rest)) = item.split_first_chunk::<8>() else { return };
        let Some((length, rest)) = rest.split_first_chunk() else { return };
        let Some((name, rest)) = rest.split_at_checked(usize::from(u16::from_le_bytes(*length))) else { return };
        found.push((parent, name.to_vec()));
        item = rest;
    }
}

/// A path by which a name in an open directory is reached. With an empty name it is the directory itself.
pub(crate) fn within(directory: BorrowedFd<'_>, name: &[u8]) -> PathBuf {
    let mut path = OsString::from(format!("/proc/self/fd/{}/", directory.as_raw_fd()));
    path.push(OsStr::from_bytes(name));
    path.into()
}

fn attributes(path: &Path) -> Result<Attributes, Errno> {
    let names = grown(|buffer| rustix::fs::llistxattr(path, buffer))?;
    let names = names.split(|byte| *byte == 0).filter(|name| !name.is_empty());
    names
        .map(|name| {
            let value = grown(|buffer| rustix::fs::lgetxattr(path, OsStr::from_bytes(name), buffer))?;
            Ok((name.to_vec(), value))
        })
        .collect()
}

/// Reads with a buffer that grows until it is large enough.
fn grown(mut read: impl FnMut(&mut [u8]) -> Result<usize, Errno>) -> Result<Vec<u8>, Errno> {
    let mut buffer = vec![0; 512];
    loop {
        match read(&mut buffer) {
            Ok(length) => {
                buffer.truncate(length);
                return Ok(buffer);
            }
            Err(Errno::RANGE) if buffer.len() < 1 << 20 => buffer = vec![0; buffer.len() * 8],
            Err(Errno::OPNOTSUPP) => return Ok(Vec::new()),
            Err(errno) => return Err(errno),
        }
    }
}

/// What kind of thing it is.
pub(super) fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_out_of_items_and_malformed_ones_do_no_harm() {
        let mut item = Vec::new();
        for name in [&b"one"[..], b"two"] {
            item.extend(5_u64.to_le_bytes());
            item.extend(u16::try_from(name.len()).unwrap().to_le_bytes());
            item.extend(name);
        }
        let key = Key { object: 300, kind: INODE_REF, offset: 256 };
        let mut found = Vec::new();
        references(key, &item, &mut found);
        assert_eq!(found, [(256, b"one".to_vec()), (256, b"two".to_vec())]);
        for end in 0..item.len() {
            references(key, &item[..end], &mut found);
        }
        let extended = [&7_u64.to_le_bytes()[..], &item[..13]].concat();
        found.clear();
        references(Key { kind: INODE_EXTREF, ..key }, &extended, &mut found);
        assert_eq!(found, [(7, b"one".to_vec())]);
    }
}
