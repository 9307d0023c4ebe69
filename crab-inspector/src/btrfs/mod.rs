//! btrfs: what changed in a subvolume since a snapshot of it, read from its tree instead of from its files.
//!
//! After `syncfs` a subvolume's generation says whether it was written since the snapshot. If so, a search of its tree
//! for leaves younger than the snapshot gives every inode that may differ, deletions included, since they change the
//! directory they happen in. Those are compared with the snapshot item by item, and byte by byte only where the extents
//! are not the same ones.

mod ioctl;
mod items;
mod shared_sync;

use std::collections::BTreeMap;
use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags};

use crate::net::{self, Body, Difference, Inode, Limits, Pair, Side, Since, Stamp, Stop};
use ioctl::{Key, Searcher, SubvolumeInfo};
use shared_sync::SharedSync;

/// The tree that lists all trees.
const ROOT_TREE: u64 = 1;
/// Says that a tree holds another one: a nested subvolume.
const ROOT_REF: u8 = 156;
const FIRST_FREE: u64 = 256;
const LAST_FREE: u64 = u64::MAX - 256;
/// A file's time may be so much older than the moment it was set: a clock tick.
const COARSE: std::time::Duration = std::time::Duration::from_millis(20);

/// A directory that is the root of a subvolume, held open: it stays the same one when paths change.
#[derive(Debug)]
pub(crate) struct Subvolume {
    fd: OwnedFd,
}

impl Subvolume {
    /// Opens the subvolume whose root lies at a path. `None` where something else lies there.
    pub(crate) fn open(path: &Path) -> io::Result<Option<Self>> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = rustix::fs::open(path, flags, Mode::empty())?;
        let is_btrfs = rustix::fs::fstatfs(&fd)?.f_type == 0x9123_683e;
        if !is_btrfs || rustix::fs::fstat(&fd)?.st_ino != FIRST_FREE {
            return Ok(None);
        }
        Ok(Some(Self { fd }))
    }

    pub(crate) fn info(&self) -> io::Result<SubvolumeInfo> {
        ioctl::subvolume_info(&self.fd)
    }

    /// Its number in its file system.
    pub(crate) fn number(&self) -> io::Result<u64> {
        Ok(self.info()?.tree)
    }

    /// The device number that its files bear.
    pub(crate) fn device(&self) -> io::Result<u64> {
        Ok(rustix::fs::fstat(&self.fd)?.st_dev)
    }

    /// Commits what was written, so that the generation tells the truth, and reads it. Blocks, for less
    /// time where the sandbox is `frozen`.
    pub(crate) fn settled(&self, frozen: bool) -> io::Result<SubvolumeInfo> {
        let shared = SharedSync::of(ioctl::file_system_id(&self.fd)?);
        shared.run(frozen, || Ok(rustix::fs::syncfs(&self.fd)?))?;
        self.info()
    }

    /// Whether another subvolume lies somewhere in this one. A snapshot would not hold its files.
    pub(crate) fn has_nested(&self) -> io::Result<bool> {
        let tree = self.info()?.tree;
        let mut found = false;
        Searcher::new().search(&self.fd, ROOT_TREE, (tree, ROOT_REF, 0), (tree, ROOT_REF, u64::MAX), 0, |item| {
            found |= item.key.0 == tree && item.key.1 == ROOT_REF;
            Ok(!found)
        })?;
        Ok(found)
    }

    /// Some path of an inode, for people.
    pub(crate) fn path_of(&self, inode: u64) -> Option<Vec<u8>> {
        if inode == FIRST_FREE {
            return Some(b"/".to_vec());
        }
        let mut path = ioctl::path_of(&self.fd, inode).ok()?;
        path.insert(0, b'/');
        if path.last() == Some(&b'/') {
            path.pop();
        }
        Some(path)
    }
}

/// How two subvolumes stand to each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kinship {
    /// The old one is a snapshot of the new one.
    SnapshotOf,
    /// The new one was made from the old one.
    MadeFrom,
}

/// A subvolume and the read-only snapshot that it is compared with.
#[derive(Debug)]
pub(crate) struct Lineage {
    old: Subvolume,
    /// What the live subvolume's generation is as long as nothing was written.
    pub(crate) untouched: u64,
    uuid: [u8; 16],
    since: Since,
}

impl Lineage {
    /// Pairs a live subvolume with a snapshot. `None` where one is not the snapshot of the other, or the snapshot may
    /// be written to: then nothing can be said about what differs.
    pub(crate) fn of(live: &Subvolume, snapshot: Subvolume) -> io::Result<Option<Self>> {
        let (new, old) = (live.info()?, snapshot.info()?);
        if !old.read_only {
            return Ok(None);
        }
        let kinship = if old.parent_uuid == new.uuid {
            Kinship::SnapshotOf
        } else if new.parent_uuid == old.uuid {
            Kinship::MadeFrom
        } else {
            return Ok(None);
        };
        let (transaction, time) = match kinship {
            Kinship::SnapshotOf => (old.made_in, old.made_at),
            Kinship::MadeFrom => (new.made_in, new.made_at),
        };
        Ok(Some(Self {
            old: snapshot,
            untouched: transaction,
            uuid: new.uuid,
            since: Since { transaction, time: Stamp::since_epoch(time.saturating_sub(COARSE)) },
        }))
    }

    /// Whether this still is the lineage of the subvolume that says so of itself.
    pub(crate) fn is_of(&self, info: &SubvolumeInfo) -> bool {
        self.uuid == info.uuid
    }

    /// What differs between the snapshot and the live subvolume as it is now. Call after [`Subvolume::settled`].
    pub(crate) fn compare(&self, live: &Subvolume, limits: Limits) -> Result<Difference, Stop> {
        let tree = live.info()?.tree;
        let mut candidates = Vec::new();
        let mut items = 0usize;
        let mut too_many = false;
        Searcher::new().search(
            &live.fd,
            tree,
            (FIRST_FREE, 0, 0),
            (LAST_FREE, u8::MAX, u64::MAX),
            self.since.transaction.saturating_add(1),
            |item| {
                items += 1;
                if item.key.1 == items::INODE_ITEM {
                    let inode = items::inode(item.data).ok_or_else(torn)?;
                    if inode.touched > self.since.transaction {
                        candidates.push(item.key.0);
                    }
                }
                // A leaf holds some hundred items, of which most belong to files that were not touched.
                too_many = candidates.len() > limits.inodes || items > limits.inodes * 256;
                Ok(!too_many)
            },
        )?;
        if too_many {
            return Err(Stop::TooMuch("many files were touched"));
        }
        let mut pair = Trees {
            new: (live, tree),
            old: (&self.old, self.old.info()?.tree),
            searcher: Searcher::new(),
            candidates: &candidates,
            ahead: [Ahead::default(), Ahead::default()],
        };
        net::compare(&mut pair, self.since, &candidates, limits)
    }
}

fn torn() -> io::Error {
    io::Error::other("a btrfs item is not what its type says")
}

/// The most items of one inode that are held in memory.
const BODY_ITEMS: usize = 100_000;

/// So many candidates are read by one search, where so many numbers lie between the first and the last, and as long as
/// there are no more items than these.
const AHEAD: usize = 64;
const AHEAD_SPAN: u64 = 256;
const AHEAD_ITEMS: usize = 4096;

/// What one search read of several inodes that are asked for one after the other.
#[derive(Default)]
struct Ahead {
    /// The candidates that it is about.
    range: std::ops::Range<usize>,
    inodes: BTreeMap<u64, (Inode, Body)>,
}

struct Trees<'a> {
    new: (&'a Subvolume, u64),
    old: (&'a Subvolume, u64),
    searcher: Searcher,
    /// The inodes that will be asked for, in order.
    candidates: &'a [u64],
    /// Of the new side and of the old one.
    ahead: [Ahead; 2],
}

impl Trees<'_> {
    fn side(&self, side: Side) -> (&Subvolume, u64) {
        match side {
            Side::New => self.new,
            Side::Old => self.old,
        }
    }

    fn each(
        &mut self,
        side: Side,
        first: Key,
        last: Key,
        each: impl FnMut(ioctl::RawItem<'_>) -> io::Result<bool>,
    ) -> io::Result<()> {
        let (subvolume, tree) = match side {
            Side::New => self.new,
            Side::Old => self.old,
        };
        self.searcher.search(&subvolume.fd, tree, first, last, 0, each)
    }

    /// Reads a candidate and some that follow it. Without an effect where they hold too much to be read together.
    fn read_ahead(&mut self, side: Side, number: u64) -> io::Result<()> {
        let candidates = self.candidates;
        let Ok(first) = candidates.binary_search(&number) else { return Ok(()) };
        if self.ahead[side as usize].range.contains(&first) {
            return Ok(());
        }
        let near = candidates[first..].iter().take(AHEAD).take_while(|other| **other - number < AHEAD_SPAN).count();
        let last = candidates[first + near - 1];
        let mut inodes = BTreeMap::<u64, (Inode, Body)>::new();
        let (mut count, mut reached) = (0, number);
        self.each(side, (number, items::INODE_ITEM, 0), (last, items::EXTENT_DATA, u64::MAX), |item| {
            count += 1;
            reached = item.key.0;
            if item.key.1 == items::INODE_ITEM {
                let inode = items::inode(item.data).ok_or_else(torn)?;
                inodes.insert(item.key.0, (inode, Body::default()));
            } else if let Some((_, body)) = inodes.get_mut(&item.key.0) {
                add(body, &item)?;
            }
            Ok(count <= AHEAD_ITEMS)
        })?;
        let mut end = first + near;
        if count > AHEAD_ITEMS {
            // What the last one holds is not whole; it is read alone where it is the first.
            inodes.remove(&reached);
            end = candidates.partition_point(|other| *other < reached).max(first + 1);
        }
        self.ahead[side as usize] = Ahead { range: first..end, inodes };
        Ok(())
    }

    /// Opens a file by its number, through one of its names and nothing that could lead elsewhere.
    fn open(&self, side: Side, number: u64) -> io::Result<File> {
        let (subvolume, _) = self.side(side);
        let mut path = ioctl::path_of(&subvolume.fd, number)?;
        if path.last() == Some(&b'/') {
            path.pop();
        }
        path.push(0);
        let path = CStr::from_bytes_with_nul(&path).map_err(io::Error::other)?;
        let flags =
            OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NOATIME | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_XDEV;
        let fd = rustix::fs::openat2(subvolume.fd.as_fd(), path, flags, Mode::empty(), resolve)?;
        if rustix::fs::fstat(&fd)?.st_ino != number {
            return Err(io::Error::other("a file moved while it was compared"));
        }
        Ok(File::from(fd))
    }
}

/// Adds what an item says to what its inode holds.
fn add(body: &mut Body, item: &ioctl::RawItem<'_>) -> io::Result<()> {
    match item.key.1 {
        items::DIR_INDEX => {
            for (name, entry, _) in items::names(item.data).ok_or_else(torn)? {
                body.entries.insert(name, entry);
            }
        }
        items::XATTR_ITEM => {
            for (name, _, value) in items::names(item.data).ok_or_else(torn)? {
                body.attributes.insert(name, value);
            }
        }
        items::EXTENT_DATA => {
            let extent = items::extent(item.data).ok_or_else(torn)?;
            body.extents.insert(item.key.2, extent);
        }
        _ => {}
    }
    Ok(())
}

impl Pair for Trees<'_> {
    fn inode(&mut self, side: Side, number: u64) -> io::Result<Option<Inode>> {
        self.read_ahead(side, number)?;
        if let Some((inode, _)) = self.ahead[side as usize].inodes.get(&number) {
            return Ok(Some(inode.clone()));
        }
        let mut found = None;
        let key = (number, items::INODE_ITEM, 0);
        self.each(side, key, key, |item| {
            if item.key == key {
                found = Some(items::inode(item.data).ok_or_else(torn)?);
            }
            Ok(found.is_none())
        })?;
        Ok(found)
    }

    fn body(&mut self, side: Side, number: u64) -> io::Result<Option<Body>> {
        // Asked for once.
        if let Some((_, body)) = self.ahead[side as usize].inodes.remove(&number) {
            return Ok(Some(body));
        }
        let mut body = Body::default();
        let mut count = 0;
        self.each(side, (number, items::XATTR_ITEM, 0), (number, items::EXTENT_DATA, u64::MAX), |item| {
            count += 1;
            if item.key.0 != number {
                return Ok(true);
            }
            add(&mut body, &item)?;
            Ok(count <= BODY_ITEMS)
        })?;
        Ok((count <= BODY_ITEMS).then_some(body))
    }

    fn same_bytes(&mut self, new: u64, old: u64, size: u64) -> io::Result<bool> {
        if size == 0 {
            return Ok(true);
        }
        let (Ok(new), Ok(old)) = (self.open(Side::New, new), self.open(Side::Old, old)) else {
            // A link, or a file that cannot be reached by a path: its bytes are not known to be equal.
            return Ok(false);
        };
        crate::tree::same_bytes(&new, &old)
    }
}

/// The number of the subvolume that a file of btrfs lies in.
pub(crate) fn number_of(fd: &OwnedFd) -> io::Result<u64> {
    Ok(ioctl::subvolume_info(fd)?.tree)
}

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn read_any(data: &[u8]) {
    let _ = (items::inode(data), items::names(data), items::extent(data));
}
