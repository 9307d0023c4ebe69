//! Trees of files, read name by name: whether two differ, and a digest of one.
//!
//! What is read may be changed meanwhile by whoever it belongs to. So everything is reached from a directory held open,
//! no link is followed, and nothing that could block is waited for.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags, Stat};
use sha2::{Digest, Sha256};

use crate::net::{Difference, Kind, Limits, Stamp, Stop};

/// Names that are looked at for each file that may be compared.
const NAMES_PER_FILE: usize = 16;
/// Directories deeper than this are not entered.
const DEEPEST: usize = 200;
/// Paths that are named in a report.
const EXAMPLES: usize = 5;

/// The flags of `chattr` that mean something to whoever uses a file. The rest say how it is stored.
const SETTABLE: u32 = 0x2083_c0ff;

/// A directory, held open.
#[derive(Debug)]
pub(crate) struct Directory {
    fd: OwnedFd,
}

const READ: OFlags =
    OFlags::RDONLY.union(OFlags::NOFOLLOW).union(OFlags::NONBLOCK).union(OFlags::NOCTTY).union(OFlags::CLOEXEC);

impl Directory {
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        Ok(Self { fd: rustix::fs::open(path, flags, Mode::empty())? })
    }

    pub(crate) fn stat(&self) -> io::Result<Stat> {
        Ok(rustix::fs::fstat(&self.fd)?)
    }

    pub(crate) fn fd(&self) -> &OwnedFd {
        &self.fd
    }

    fn child(&self, name: &CStr) -> io::Result<Self> {
        Ok(Self { fd: rustix::fs::openat(&self.fd, name, READ | OFlags::DIRECTORY, Mode::empty())? })
    }

    fn look(&self, name: &CStr) -> io::Result<Stat> {
        Ok(rustix::fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW)?)
    }

    /// Facts of a name in it, or of itself.
    pub(crate) fn stat_of(&self, name: Option<&CStr>) -> io::Result<Stat> {
        name.map_or_else(|| self.stat(), |name| self.look(name))
    }

    fn file(&self, name: &CStr) -> io::Result<File> {
        // Without a trace in access times where that is allowed.
        let open = |flags| rustix::fs::openat(&self.fd, name, flags, Mode::empty());
        Ok(File::from(open(READ | OFlags::NOATIME).or_else(|_| open(READ))?))
    }

    /// What `chattr` sets of a file or directory, where its file system has such.
    fn flags(&self, name: Option<&CStr>) -> io::Result<u32> {
        let flags = match name {
            Some(name) => rustix::fs::ioctl_getflags(self.file(name)?),
            None => rustix::fs::ioctl_getflags(&self.fd),
        };
        match flags {
            Ok(flags) => Ok(flags.bits() & SETTABLE),
            Err(rustix::io::Errno::NOTTY | rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::INVAL) => Ok(0),
            Err(error) => Err(error.into()),
        }
    }

    fn link(&self, name: &CStr) -> io::Result<Vec<u8>> {
        Ok(rustix::fs::readlinkat(&self.fd, name, Vec::new())?.into_bytes())
    }

    /// The names in it, sorted, with at most `most` of them.
    fn names(&self, most: usize) -> io::Result<Option<Vec<CString>>> {
        let mut names = Vec::new();
        for entry in rustix::fs::Dir::read_from(&self.fd)? {
            let entry = entry?;
            let name = entry.file_name();
            if name == c"." || name == c".." {
                continue;
            }
            if names.len() == most {
                return Ok(None);
            }
            names.push(name.to_owned());
        }
        names.sort();
        Ok(Some(names))
    }

    /// Extended attributes of a name, or of the directory itself.
    fn attributes(&self, name: Option<&CStr>) -> io::Result<BTreeMap<Vec<u8>, Vec<u8>>> {
        let mut path = format!("/proc/self/fd/{}/", self.fd.as_raw_fd()).into_bytes();
        path.extend_from_slice(name.unwrap_or(c".").to_bytes());
        let path = CString::new(path).map_err(io::Error::other)?;
        let mut names = vec![0; 64 * 1024];
        let length = match rustix::fs::llistxattr(&path, &mut names[..]) {
            Ok(length) => length,
            Err(rustix::io::Errno::OPNOTSUPP) => 0,
            Err(error) => return Err(error.into()),
        };
        let mut found = BTreeMap::new();
        let mut value = vec![0; if length > 0 { 64 * 1024 } else { 0 }];
        for name in names[..length].split_inclusive(|b| *b == 0) {
            let name = CStr::from_bytes_with_nul(name).map_err(io::Error::other)?;
            let length = rustix::fs::lgetxattr(&path, name, &mut value[..])?;
            found.insert(name.to_bytes().to_vec(), value[..length].to_vec());
        }
        Ok(found)
    }
}

fn kind(stat: &Stat) -> Kind {
    Kind::of_mode(stat.st_mode)
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "nanoseconds lie below 2^30")]
fn modified(stat: &Stat) -> Stamp {
    Stamp { seconds: stat.st_mtime, nanoseconds: stat.st_mtime_nsec as u32 }
}

#[allow(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "nanoseconds lie below 2^30")]
fn changed(stat: &Stat) -> Stamp {
    Stamp { seconds: stat.st_ctime, nanoseconds: stat.st_ctime_nsec as u32 }
}

/// What is known of the old tree's age.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Age {
    /// It was taken after this.
    pub(crate) after: Stamp,
    /// A file whose content changed since has a time of change after that. Not so where memory may be mapped, or the
    /// clock was set.
    pub(crate) times_tell: bool,
}

/// What differs, and some of it by path.
pub(crate) type Found = (Difference, Vec<String>);

/// Compares a tree with an older copy of it. Copies bear other numbers than their originals, so hard links are told by
/// their count, and a file that was rewritten to what it was differs by its time.
pub(crate) fn compare(new: &Directory, old: &Directory, age: Age, limits: Limits) -> Result<Found, Stop> {
    let mut comparison = Comparison {
        age,
        limits,
        names: limits.inodes.saturating_mul(NAMES_PER_FILE),
        bytes: limits.bytes,
        path: Vec::new(),
        found: Difference::default(),
        examples: Vec::new(),
        device: new.stat()?.st_dev,
    };
    let (new_stat, old_stat) = (new.stat()?, old.stat()?);
    let same = comparison.same_facts(&new_stat, &old_stat)
        && new.attributes(None)? == old.attributes(None)?
        && new.flags(None)? == old.flags(None)?;
    if !same || !comparison.same_time(&new_stat, &old_stat) {
        comparison.differs(new_stat.st_ino)?;
    }
    comparison.directory(new, old, 0)?;
    Ok((comparison.found, comparison.examples))
}

struct Comparison {
    age: Age,
    limits: Limits,
    names: usize,
    bytes: u64,
    path: Vec<u8>,
    found: Difference,
    examples: Vec<String>,
    device: u64,
}

impl Comparison {
    fn differs(&mut self, inode: u64) -> Result<(), Stop> {
        self.found.count += 1;
        self.found.new_inodes.insert(inode);
        if self.examples.len() < EXAMPLES {
            let path = if self.path.is_empty() { b"/".as_slice() } else { &self.path };
            self.examples.push(String::from_utf8_lossy(path).into_owned());
        }
        if self.found.count > self.limits.inodes as u64 {
            return Err(Stop::TooMuch("many files differ"));
        }
        Ok(())
    }

    fn directory(&mut self, new: &Directory, old: &Directory, depth: usize) -> Result<(), Stop> {
        if depth > DEEPEST {
            return Err(Stop::TooMuch("directories lie deep"));
        }
        let too_many = || Stop::TooMuch("there are many files");
        let new_names = new.names(self.names)?.ok_or_else(too_many)?;
        let old_names = old.names(self.names)?.ok_or_else(too_many)?;
        self.names = self.names.checked_sub(new_names.len().max(old_names.len())).ok_or_else(too_many)?;
        let length = self.path.len();
        let mut gone = old_names.iter().peekable();
        for name in &new_names {
            while let Some(before) = gone.next_if(|before| *before < name) {
                self.step(length, before);
                self.differs(new.stat()?.st_ino)?;
            }
            self.step(length, name);
            if gone.next_if(|same| *same == name).is_some() {
                self.name(new, old, name, depth)?;
            } else {
                self.differs(new.stat()?.st_ino)?;
            }
        }
        for name in gone {
            self.step(length, name);
            self.differs(new.stat()?.st_ino)?;
        }
        self.path.truncate(length);
        Ok(())
    }

    fn step(&mut self, length: usize, name: &CStr) {
        self.path.truncate(length);
        self.path.push(b'/');
        self.path.extend_from_slice(name.to_bytes());
    }

    fn name(&mut self, new: &Directory, old: &Directory, name: &CStr, depth: usize) -> Result<(), Stop> {
        let (new_stat, old_stat) = (new.look(name)?, old.look(name)?);
        if kind(&new_stat) == Kind::Directory && new_stat.st_dev != self.device {
            // Something else is mounted here.
            return Ok(());
        }
        let same = self.same_facts(&new_stat, &old_stat)
            && self.same_time(&new_stat, &old_stat)
            && (self.is_old(&new_stat) || new.attributes(Some(name))? == old.attributes(Some(name))?)
            && match kind(&new_stat) {
                Kind::Directory | Kind::Special => true,
                Kind::Link => new.link(name)? == old.link(name)?,
                Kind::File => {
                    self.same_bytes(new, old, name, &new_stat)?
                        && (self.is_old(&new_stat) || new.flags(Some(name))? == old.flags(Some(name))?)
                }
            };
        if !same {
            self.differs(new_stat.st_ino)?;
        }
        if kind(&new_stat) == Kind::Directory && kind(&old_stat) == Kind::Directory {
            let (new, old) = (new.child(name)?, old.child(name)?);
            if same && !self.is_old(&new_stat) && new.flags(None)? != old.flags(None)? {
                self.differs(new_stat.st_ino)?;
            }
            self.directory(&new, &old, depth + 1)?;
        }
        Ok(())
    }

    /// Whether a file's time of change says that nothing about it changed.
    fn is_old(&self, stat: &Stat) -> bool {
        self.age.times_tell && changed(stat) < self.age.after
    }

    fn same_facts(&self, new: &Stat, old: &Stat) -> bool {
        let directory = kind(new) == Kind::Directory;
        new.st_mode == old.st_mode
            && new.st_uid == old.st_uid
            && new.st_gid == old.st_gid
            && (directory || new.st_size == old.st_size && new.st_nlink == old.st_nlink)
            && (kind(new) != Kind::Special || new.st_rdev == old.st_rdev)
    }

    /// A directory's time may be that of a name that was made and removed.
    fn same_time(&self, new: &Stat, old: &Stat) -> bool {
        let left_by_names =
            kind(new) == Kind::Directory && self.age.after <= modified(new) && modified(new) <= changed(new);
        modified(new) == modified(old) || left_by_names
    }

    fn same_bytes(&mut self, new: &Directory, old: &Directory, name: &CStr, stat: &Stat) -> Result<bool, Stop> {
        if self.is_old(stat) {
            return Ok(true);
        }
        let Some(left) = u64::try_from(stat.st_size).ok().and_then(|size| self.bytes.checked_sub(size)) else {
            return Err(Stop::TooMuch("there is much to compare"));
        };
        self.bytes = left;
        let (new, old) = (new.file(name)?, old.file(name)?);
        if rustix::fs::fstat(&new).map_err(io::Error::from)?.st_ino != stat.st_ino {
            return Err(io::Error::other("a file was replaced while it was compared").into());
        }
        Ok(same_bytes(&new, &old)?)
    }
}

/// Whether two files hold the same bytes to the end.
pub(crate) fn same_bytes(a: &File, b: &File) -> io::Result<bool> {
    const CHUNK: usize = 128 * 1024;
    let (mut left, mut right) = (vec![0u8; CHUNK], vec![0u8; CHUNK]);
    let mut at = 0;
    loop {
        let (n, m) = (fill(a, &mut left, at)?, fill(b, &mut right, at)?);
        if n != m || left[..n] != right[..m] {
            return Ok(false);
        }
        if n < CHUNK {
            return Ok(true);
        }
        at += n as u64;
    }
}

fn fill(file: &File, buffer: &mut [u8], at: u64) -> io::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        match file.read_at(&mut buffer[filled..], at + filled as u64) {
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}

/// How much a digest may take in.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Most {
    pub(crate) names: usize,
    pub(crate) bytes: u64,
}

/// A digest of trees, everything in it that counts as their state.
#[derive(Default)]
pub(crate) struct TreeDigest {
    digest: Sha256,
    names: usize,
    bytes: u64,
}

impl TreeDigest {
    /// Takes in a tree, or one file of a folder, without what is mounted in it.
    pub(crate) fn tree(&mut self, label: &[u8], top: &Directory, name: Option<&CStr>, most: Most) -> io::Result<()> {
        self.text(label);
        let stat = top.stat_of(name)?;
        if let Some(name) = name {
            return self.name(top, name, stat.st_dev, most, 0);
        }
        self.facts(&stat);
        self.attributes(&top.attributes(None)?);
        self.number(u64::from(top.flags(None)?));
        self.directory(top, stat.st_dev, most, 0)
    }

    fn directory(&mut self, directory: &Directory, device: u64, most: Most, depth: usize) -> io::Result<()> {
        if depth > DEEPEST {
            return Err(io::Error::other("directories lie too deep to compare"));
        }
        let left = most.names.saturating_sub(self.names);
        let names = directory.names(left)?.ok_or_else(|| io::Error::other("too many files to compare"))?;
        self.names += names.len();
        self.number(names.len() as u64);
        for name in &names {
            self.name(directory, name, device, most, depth)?;
        }
        Ok(())
    }

    fn name(&mut self, directory: &Directory, name: &CStr, device: u64, most: Most, depth: usize) -> io::Result<()> {
        self.text(name.to_bytes());
        let stat = directory.look(name)?;
        self.facts(&stat);
        if kind(&stat) == Kind::Directory && stat.st_dev != device {
            return Ok(());
        }
        self.attributes(&directory.attributes(Some(name))?);
        match kind(&stat) {
            Kind::Directory => {
                let child = directory.child(name)?;
                self.number(u64::from(child.flags(None)?));
                self.directory(&child, device, most, depth + 1)?;
            }
            Kind::Link => self.text(&directory.link(name)?),
            Kind::Special => {}
            Kind::File => {
                self.bytes += u64::try_from(stat.st_size).unwrap_or(u64::MAX);
                if self.bytes > most.bytes {
                    return Err(io::Error::other("too much to compare"));
                }
                self.number(u64::from(directory.flags(Some(name))?));
                let mut content = Vec::new();
                directory.file(name)?.take(most.bytes).read_to_end(&mut content)?;
                self.text(&content);
            }
        }
        Ok(())
    }

    fn facts(&mut self, stat: &Stat) {
        for number in [u64::from(stat.st_mode), u64::from(stat.st_uid), u64::from(stat.st_gid)] {
            self.number(number);
        }
        if kind(stat) != Kind::Directory {
            for number in [
                stat.st_nlink,
                stat.st_rdev,
                stat.st_mtime.cast_unsigned(),
                #[allow(clippy::unnecessary_cast, reason = "its type differs between architectures")]
                (stat.st_mtime_nsec as u64),
            ] {
                self.number(number);
            }
        }
    }

    fn attributes(&mut self, attributes: &BTreeMap<Vec<u8>, Vec<u8>>) {
        for (name, value) in attributes {
            self.text(name);
            self.text(value);
        }
    }

    fn number(&mut self, number: u64) {
        self.digest.update(number.to_le_bytes());
    }

    fn text(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.digest.update(bytes);
    }

    pub(crate) fn finish(self) -> [u8; 32] {
        self.digest.finalize().into()
    }
}
