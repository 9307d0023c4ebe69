//! The btrfs ioctls that the comparison reads through. All only read.
#![allow(unsafe_code)]

use std::ffi::CStr;
use std::io;
use std::os::fd::AsFd;
use std::time::Duration;

use linux_raw_sys::btrfs::{
    btrfs_ioctl_fs_info_args, btrfs_ioctl_get_subvol_info_args, btrfs_ioctl_ino_lookup_args,
    btrfs_ioctl_search_args_v2, btrfs_ioctl_search_key,
};
use rustix::ioctl::{Updater, ioctl, opcode};

const MAGIC: u8 = 0x94;
const FILE_SYSTEM: rustix::ioctl::Opcode = opcode::read::<btrfs_ioctl_fs_info_args>(MAGIC, 31);
const INFO: rustix::ioctl::Opcode = opcode::read::<btrfs_ioctl_get_subvol_info_args>(MAGIC, 60);
const SEARCH: rustix::ioctl::Opcode = opcode::read_write::<btrfs_ioctl_search_args_v2>(MAGIC, 17);
const LOOKUP: rustix::ioctl::Opcode = opcode::read_write::<btrfs_ioctl_ino_lookup_args>(MAGIC, 18);

/// What a subvolume says of itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SubvolumeInfo {
    /// The id of its tree.
    pub(crate) tree: u64,
    /// The transaction that last changed it, as of the last commit.
    pub(crate) generation: u64,
    /// The transaction that made it.
    pub(crate) made_in: u64,
    /// When it was made, since the epoch.
    pub(crate) made_at: Duration,
    pub(crate) uuid: [u8; 16],
    /// Of what it is a snapshot.
    pub(crate) parent_uuid: [u8; 16],
    pub(crate) read_only: bool,
}

/// Reads what a subvolume says of itself. `fd` is anything in it.
pub(crate) fn subvolume_info(fd: impl AsFd) -> io::Result<SubvolumeInfo> {
    // SAFETY: the structure is made of integers and arrays of them, for which zero is a value.
    let mut info: btrfs_ioctl_get_subvol_info_args = unsafe { std::mem::zeroed() };
    // SAFETY: the opcode's argument is this structure, and the kernel writes nothing beyond it. It may answer 1 on
    // success, which `ioctl` takes as success.
    unsafe { ioctl(fd, Updater::<INFO, _>::new(&mut info))? };
    Ok(SubvolumeInfo {
        tree: info.treeid,
        generation: info.generation,
        made_in: info.otransid,
        made_at: Duration::new(info.otime.sec, info.otime.nsec.min(999_999_999)),
        uuid: info.uuid,
        parent_uuid: info.parent_uuid,
        read_only: info.flags & 1 != 0,
    })
}

/// What tells a file system from others. `fd` is anything in it.
pub(crate) fn file_system_id(fd: impl AsFd) -> io::Result<[u8; 16]> {
    // SAFETY: the structure is made of integers and arrays of them, for which zero is a value.
    let mut info: btrfs_ioctl_fs_info_args = unsafe { std::mem::zeroed() };
    // SAFETY: the opcode's argument is this structure, and the kernel writes nothing beyond it.
    unsafe { ioctl(fd, Updater::<FILE_SYSTEM, _>::new(&mut info))? };
    Ok(info.fsid)
}

/// How much one search may answer.
const ANSWER: usize = 64 * 1024;

#[repr(C)]
struct Search {
    key: btrfs_ioctl_search_key,
    size: u64,
    answer: [u8; ANSWER],
}

/// A place in a tree: all items are ordered by it.
pub(crate) type Key = (u64, u8, u64);

/// One item as it lies in the tree.
pub(crate) struct RawItem<'a> {
    pub(crate) key: Key,
    pub(crate) data: &'a [u8],
}

/// A buffer for searches, kept between them.
pub(crate) struct Searcher(Box<Search>);

impl Searcher {
    pub(crate) fn new() -> Self {
        // SAFETY: the structure is made of integers and arrays of them, for which zero is a value.
        Self(unsafe { Box::<Search>::new_zeroed().assume_init() })
    }

    /// Calls `each` for the items from `first` to `last` in leaves that were written in transaction `since` or later,
    /// in order, until it says to stop.
    pub(crate) fn search(
        &mut self,
        fd: impl AsFd,
        tree: u64,
        first: Key,
        last: Key,
        since: u64,
        mut each: impl FnMut(RawItem<'_>) -> io::Result<bool>,
    ) -> io::Result<()> {
        let mut next = first;
        loop {
            // SAFETY: as in `new`.
            self.0.key = unsafe { std::mem::zeroed() };
            let key = &mut self.0.key;
            key.tree_id = tree;
            (key.min_objectid, key.min_type, key.min_offset) = (next.0, next.1.into(), next.2);
            (key.max_objectid, key.max_type, key.max_offset) = (last.0, last.1.into(), last.2);
            key.min_transid = since;
            key.max_transid = u64::MAX;
            key.nr_items = u32::MAX;
            self.0.size = ANSWER as u64;
            // SAFETY: the opcode's argument is the key and a size, followed by as many bytes as the size says: this
            // is what `Search` is, and the kernel writes nothing beyond.
            unsafe { ioctl(&fd, Updater::<SEARCH, _>::new(&mut *self.0))? };
            let count = self.0.key.nr_items;
            if count == 0 {
                return Ok(());
            }
            let mut at = 0;
            let mut seen = next;
            for _ in 0..count {
                let (key, data, end) =
                    split(&self.0.answer, at).ok_or_else(|| io::Error::other("a btrfs search gave a torn answer"))?;
                at = end;
                seen = key;
                if key <= last && !each(RawItem { key, data })? {
                    return Ok(());
                }
            }
            next = match after(seen) {
                Some(next) if next <= last => next,
                _ => return Ok(()),
            };
        }
    }
}

/// Splits one item off a search's answer: its key, its data and where the next begins.
fn split(answer: &[u8], at: usize) -> Option<(Key, &[u8], usize)> {
    const HEADER: usize = 32;
    let header = answer.get(at..at + HEADER)?;
    let word = |i: usize| Some(u64::from_ne_bytes(header.get(i..i + 8)?.try_into().ok()?));
    let half = |i: usize| Some(u32::from_ne_bytes(header.get(i..i + 4)?.try_into().ok()?));
    let key = (word(8)?, u8::try_from(half(24)?).ok()?, word(16)?);
    let start = at + HEADER;
    let end = start.checked_add(half(28)? as usize)?;
    Some((key, answer.get(start..end)?, end))
}

fn after(key: Key) -> Option<Key> {
    match key {
        (object, kind, offset) if offset < u64::MAX => Some((object, kind, offset + 1)),
        (object, kind, _) if kind < u8::MAX => Some((object, kind + 1, 0)),
        (object, _, _) if object < u64::MAX => Some((object + 1, 0, 0)),
        _ => None,
    }
}

/// A path of an inode below its subvolume's root. Fails where the inode has no name, or one of 4,080 bytes and more.
pub(crate) fn path_of(fd: impl AsFd, inode: u64) -> io::Result<Vec<u8>> {
    // SAFETY: the structure is made of integers and an array of them, for which zero is a value.
    let mut lookup: btrfs_ioctl_ino_lookup_args = unsafe { std::mem::zeroed() };
    lookup.objectid = inode;
    // SAFETY: the opcode's argument is this structure, and the kernel writes nothing beyond it.
    unsafe { ioctl(fd, Updater::<LOOKUP, _>::new(&mut lookup))? };
    let bytes = lookup.name.map(|c| c.cast_unsigned());
    let name = CStr::from_bytes_until_nul(&bytes).map_err(|_| io::Error::other("a btrfs path has no end"))?;
    Ok(name.to_bytes().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_answer_is_split_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200), at in 0usize..220) {
            if let Some((_, data, end)) = split(&bytes, at) {
                prop_assert!(end <= bytes.len() && data.len() <= bytes.len());
                prop_assert!(end >= at + 32);
            }
        }

        #[test]
        fn the_key_after_is_the_next_one(object: u64, kind: u8, offset: u64) {
            let key = (object, kind, offset);
            if let Some(next) = after(key) {
                prop_assert!(next > key);
            } else {
                prop_assert_eq!(key, (u64::MAX, u8::MAX, u64::MAX));
            }
        }
    }
}
