//! What differs between two read-only subvolumes.
//!
//! The kernel compares the two where they do not share blocks, and sends the steps from one to the other, without data.
//! The steps name every path that can differ. They also name some that do not: what was changed and changed back. So
//! each named path is compared in both trees, of file contents only the ranges that the steps name, and what comes out
//! is exact. The cost is that of what was changed.
//!
//! The kernel takes inodes of one number and one age for one inode. That holds for states of one sandbox, which follow
//! each other; two forks that were written to at the same time may have different files of one number and age. Their
//! trees are walked, and everything is compared.

mod names;
#[cfg(test)]
mod tests;
pub(crate) mod tree;

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::fs::File;
use std::ops::ControlFlow;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use async_trait::async_trait;
use crab_backend_files::blocking;
use crab_core::{Error, ErrorKind, FileChange, FileChangeKind, FileChanges, Result};
use rustix::fs::{FileType, Stat};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::ioctl::SendOptions;
use crate::send::stream::{Command, Commands};
use crate::send::{self, Sending};
use names::Names;
use tree::{Tree, kind, split};

/// How many changes go from the comparing thread to the reader at once.
const BATCH: usize = 256;
const BATCHES: usize = 8;
/// How much is read of a file at once.
const PIECE: usize = 128 << 10;

/// How two subvolumes belong together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kinship {
    /// They are states of one tree, at different times.
    States,
    /// Nothing is known.
    Unknown,
}

/// A subvolume to be compared.
#[derive(Debug)]
pub(crate) struct Side {
    pub(crate) root: OwnedFd,
    /// The number of the subvolume.
    pub(crate) id: u64,
    pub(crate) path: PathBuf,
}

/// The changes from one subvolume to another, as a stream that a thread fills.
pub(crate) fn start(from: Side, to: Side, kinship: Kinship) -> Box<dyn FileChanges> {
    let (sender, receiver) = channel(BATCHES);
    blocking::later(move || {
        let mut batch = Batch { sender: &sender, changes: Vec::new() };
        let end = match run(from, to, kinship, send::version(), &mut |change| batch.add(change)) {
            Ok(()) => batch.flush(),
            Err(error) => {
                let _ = batch.flush();
                let _ = sender.blocking_send(Err(error));
                ControlFlow::Break(())
            }
        };
        if end.is_continue() {
            // An empty batch tells the end from a thread that broke off.
            let _ = sender.blocking_send(Ok(Vec::new()));
        }
    });
    Box::new(Changes { receiver, ready: VecDeque::new(), ended: false })
}

struct Batch<'a> {
    sender: &'a Sender<Result<Vec<FileChange>>>,
    changes: Vec<FileChange>,
}

impl Batch<'_> {
    fn add(&mut self, change: FileChange) -> ControlFlow<()> {
        self.changes.push(change);
        if self.changes.len() < BATCH { ControlFlow::Continue(()) } else { self.flush() }
    }

    fn flush(&mut self) -> ControlFlow<()> {
        let changes = std::mem::take(&mut self.changes);
        if changes.is_empty() || self.sender.blocking_send(Ok(changes)).is_ok() {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    }
}

struct Changes {
    receiver: Receiver<Result<Vec<FileChange>>>,
    ready: VecDeque<FileChange>,
    ended: bool,
}

#[async_trait]
impl FileChanges for Changes {
    async fn next(&mut self) -> Result<Option<FileChange>> {
        while self.ready.is_empty() && !self.ended {
            let batch = self.receiver.recv().await.unwrap_or_else(|| {
                Err(Error::new(ErrorKind::Internal, "the thread that compares two subvolumes broke off"))
            })?;
            self.ended = batch.is_empty();
            self.ready.extend(batch);
        }
        Ok(self.ready.pop_front())
    }
}

/// Gives every change to `emit`, until it breaks. Blocks.
pub(crate) fn run(
    from: Side,
    to: Side,
    kinship: Kinship,
    version: u32,
    emit: &mut dyn FnMut(FileChange) -> ControlFlow<()>,
) -> Result<()> {
    if from.id == to.id {
        return Ok(());
    }
    let steps = match kinship {
        Kinship::States => Some(Steps::between(&from, &to, version)?),
        Kinship::Unknown => None,
    };
    let mut comparison = Comparison {
        from: Tree::new(from.root, from.path),
        to: Tree::new(to.root, to.path),
        known: Known::default(),
        emit,
    };
    let candidates = steps.map_or(Ok(None), |steps| comparison.candidates(steps))?;
    let end = match candidates {
        Some(candidates) => comparison.compare_candidates(candidates)?,
        None => {
            tracing::debug!("two subvolumes may be no states of one tree, so everything in them is compared");
            comparison.compare_all(Vec::new())?
        }
    };
    tracing::trace!(given_up = end.is_break(), "compared two subvolumes");
    Ok(())
}

/// Parts of files, as offset and length.
type Ranges = Vec<(u64, u64)>;

/// What the kernel says about the way from one tree to the other.
struct Steps {
    names: Names,
    /// Inodes that only the new tree has, or that are others in it.
    made: HashSet<u64>,
    /// Ranges that may hold other bytes, by the number that `names` gave.
    ranges: HashMap<usize, Ranges>,
}

impl Steps {
    fn between(from: &Side, to: &Side, version: u32) -> Result<Self> {
        let options = SendOptions { parent: from.id, without_data: true, version };
        let root = to.root.try_clone().map_err(|error| Error::io("duplicate a descriptor", error))?;
        let mut sending = Sending::start(root, options)?;
        let mut steps = Self { names: Names::new(), made: HashSet::new(), ranges: HashMap::new() };
        let read = Commands::begin(&mut sending).and_then(|mut commands| steps.read(&mut commands));
        sending.finish(&to.path)?;
        read.map(|()| steps)
    }

    fn read(&mut self, commands: &mut Commands<&mut Sending>) -> Result<()> {
        loop {
            match commands.next()? {
                Command::Subvolume { .. } | Command::Snapshot { .. } => {}
                Command::Make { path, inode, .. } => {
                    self.names.make(path);
                    self.made.insert(inode);
                }
                Command::Rename { path, to } => self.names.rename(path, to),
                Command::Link { path, existing } => {
                    self.names.make(path);
                    self.names.touch(existing);
                }
                Command::Unlink { path } | Command::RemoveDirectory { path } => self.names.remove(path),
                Command::Write { path, offset, data } => self.range(path, offset, data.len() as u64),
                Command::Clone { path, offset, length, .. }
                | Command::Extent { path, offset, length }
                | Command::Allocate { path, offset, length, .. } => self.range(path, offset, length),
                Command::SetAttribute { path, .. }
                | Command::RemoveAttribute { path, .. }
                | Command::Truncate { path, .. }
                | Command::SetMode { path, .. }
                | Command::SetOwner { path, .. }
                | Command::SetTimes { path, .. }
                | Command::SetFlags { path } => {
                    self.names.touch(path);
                }
                Command::End => return Ok(()),
            }
        }
    }

    fn range(&mut self, path: &[u8], offset: u64, length: u64) {
        let ranges = self.ranges.entry(self.names.touch(path)).or_default();
        match ranges.last_mut() {
            Some((before, long)) if *before + *long == offset => *long += length,
            _ => ranges.push((offset, length)),
        }
    }
}

/// What need not be read, since the steps say that it is the same.
#[derive(Default)]
struct Known {
    /// Whether inodes of one number in both trees are the same file, but for those in `made`.
    same_inodes: bool,
    made: HashSet<u64>,
    /// Ranges of the same files that may hold other bytes, by inode.
    ranges: HashMap<u64, Ranges>,
}

/// The paths that can differ.
#[derive(Default)]
struct Candidates {
    alone: HashSet<Vec<u8>>,
    /// With these everything below them.
    moved: BTreeSet<Vec<u8>>,
}

struct Comparison<'a> {
    from: Tree,
    to: Tree,
    known: Known,
    emit: &'a mut dyn FnMut(FileChange) -> ControlFlow<()>,
}

impl Comparison<'_> {
    /// The paths that can differ; `None` where the steps do not tell, since the trees are no states of one.
    fn candidates(&mut self, mut steps: Steps) -> Result<Option<Candidates>> {
        if self.from.age()? != self.to.age()? {
            return Ok(None);
        }
        let mut candidates = Candidates::default();
        for (id, fate) in steps.names.fates() {
            if let Some(new) = &fate.new {
                let Some(after) = self.to.look(new)? else { return Ok(None) };
                if let Some(old) = &fate.old {
                    let before = self.from.look(old)?;
                    if before.is_none_or(|before| (before.st_ino, kind(&before)) != (after.st_ino, kind(&after))) {
                        return Ok(None);
                    }
                }
                if let Some(ranges) = steps.ranges.remove(&id) {
                    self.known.ranges.entry(after.st_ino).or_default().extend(ranges);
                }
                // The steps name one of a file's paths only, and that may be a new one.
                if after.st_nlink > 1 && kind(&after) != FileType::Directory {
                    candidates.alone.extend(self.to.links(after.st_ino)?);
                }
            }
            match (fate.old, fate.new) {
                (Some(old), Some(new)) if old != new => candidates.moved.extend([old, new]),
                (old, new) => candidates.alone.extend(old.or(new)),
            }
        }
        self.known.same_inodes = true;
        self.known.made = steps.made;
        Ok(Some(candidates))
    }

    fn compare_candidates(&mut self, candidates: Candidates) -> Result<ControlFlow<()>> {
        let Candidates { alone, moved } = candidates;
        for path in &moved {
            if !below(path, &moved) && self.compare_all(path.clone())?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        // In order, so that what stands in one directory comes together.
        let mut alone: Vec<Vec<u8>> = alone.into_iter().collect();
        alone.sort_unstable();
        for path in alone {
            let covered = moved.contains(&path) || below(&path, &moved);
            if !covered && self.compare(path)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Compares a path and everything below it.
    fn compare_all(&mut self, path: Vec<u8>) -> Result<ControlFlow<()>> {
        let mut open = vec![path];
        while let Some(path) = open.pop() {
            let names: BTreeSet<_> = self.from.names(&path)?.into_iter().chain(self.to.names(&path)?).collect();
            open.extend(names.into_iter().map(|name| tree::join(&path, &name)));
            if self.compare(path)?.is_break() {
                return Ok(ControlFlow::Break(()));
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    fn compare(&mut self, path: Vec<u8>) -> Result<ControlFlow<()>> {
        let kind = match (self.from.look(&path)?, self.to.look(&path)?) {
            (None, None) => None,
            (None, Some(_)) => Some(FileChangeKind::Added),
            (Some(_), None) => Some(FileChangeKind::Removed),
            (Some(old), Some(new)) if !self.same_content(&path, &old, &new)? => Some(FileChangeKind::Content),
            (Some(old), Some(new)) if !self.same_metadata(&path, &old, &new)? => Some(FileChangeKind::Metadata),
            _ => None,
        };
        Ok(kind.map_or(ControlFlow::Continue(()), |kind| (self.emit)(FileChange { path, kind })))
    }

    fn same_content(&mut self, path: &[u8], old: &Stat, new: &Stat) -> Result<bool> {
        if kind(old) != kind(new) {
            return Ok(false);
        }
        match kind(old) {
            FileType::RegularFile => {
                if old.st_size != new.st_size {
                    return Ok(false);
                }
                let size = u64::try_from(old.st_size).unwrap_or(0);
                let same = self.known.same_inodes && old.st_ino == new.st_ino;
                if same && !self.known.made.contains(&new.st_ino) {
                    // Only what was written to it can differ.
                    return match self.known.ranges.get(&new.st_ino) {
                        Some(ranges) => same_bytes(path, &self.from.file(path)?, &self.to.file(path)?, ranges, size),
                        None => Ok(true),
                    };
                }
                same_bytes(path, &self.from.file(path)?, &self.to.file(path)?, &[(0, size)], size)
            }
            FileType::Symlink => Ok(self.from.target(path)? == self.to.target(path)?),
            FileType::CharacterDevice | FileType::BlockDevice => Ok(old.st_rdev == new.st_rdev),
            _ => Ok(true),
        }
    }

    fn same_metadata(&mut self, path: &[u8], old: &Stat, new: &Stat) -> Result<bool> {
        // What is in a directory moves its time of modification.
        let time = |stat: &Stat| (kind(stat) != FileType::Directory).then_some((stat.st_mtime, stat.st_mtime_nsec));
        Ok((old.st_mode, old.st_uid, old.st_gid, time(old)) == (new.st_mode, new.st_uid, new.st_gid, time(new))
            && self.from.attributes(path)? == self.to.attributes(path)?)
    }
}

/// Whether a directory above `path` is in `paths`.
fn below(path: &[u8], paths: &BTreeSet<Vec<u8>>) -> bool {
    let mut at = path;
    while !at.is_empty() && !paths.is_empty() {
        at = split(at).0;
        if paths.contains(at) {
            return true;
        }
    }
    false
}

/// Whether two files of one size hold the same bytes in these ranges.
fn same_bytes(path: &[u8], old: &File, new: &File, ranges: &[(u64, u64)], size: u64) -> Result<bool> {
    let failed = |error| {
        let name = String::from_utf8_lossy(path);
        Error::io(format_args!("compare the contents of {name}"), error)
    };
    let (mut a, mut b) = (vec![0; PIECE], vec![0; PIECE]);
    for (offset, length) in ranges {
        let end = offset.saturating_add(*length).min(size);
        let mut at = *offset;
        while at < end {
            let count = usize::try_from(end - at).unwrap_or(PIECE).min(PIECE);
            old.read_exact_at(&mut a[..count], at).map_err(failed)?;
            new.read_exact_at(&mut b[..count], at).map_err(failed)?;
            if a[..count] != b[..count] {
                return Ok(false);
            }
            at += count as u64;
        }
    }
    Ok(true)
}
