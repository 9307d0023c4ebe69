//! What a version takes of the disk.
//!
//! Full quota groups count it all the time. Without them, or with simple ones, which count for the subvolume that wrote
//! something first, the version's extents are looked at one by one.

use std::collections::BTreeMap;
use std::fs;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crab_core::{Error, Result, Space};
use linux_raw_sys::btrfs as raw;
use rustix::fs::OFlags;
use rustix::io::Errno;

use crate::failure;
use crate::ioctl::{self, Key};

const QUOTA_TREE: u64 = raw::BTRFS_QUOTA_TREE_OBJECTID as u64;

/// What the subvolume whose root is `root`, of this number, takes. Blocks.
pub(crate) fn of(root: &OwnedFd, id: u64, path: &Path) -> Result<Space> {
    if let Some(space) = counted(root, id).map_err(failure::at("read the quota groups of", path))? {
        return Ok(space);
    }
    let mut extents = Extents::read(root).map_err(failure::at("read the extents of", path))?;
    extents.find_exclusive(path)?;
    Ok(extents.space())
}

fn number(item: &[u8], at: usize) -> Option<u64> {
    item.get(at..at + 8)?.first_chunk().map(|bytes| u64::from_le_bytes(*bytes))
}

/// What the quota groups say, where they are on and right.
fn counted(root: &OwnedFd, id: u64) -> Result<Option<Space>, Errno> {
    let read = |kind: u32, offset: u64, take: &mut dyn FnMut(&[u8])| {
        let key = Key { object: 0, kind: kind as u8, offset };
        match ioctl::search(root, QUOTA_TREE, key, key, |_, item| take(item)) {
            // There is no such tree: they are off.
            Err(Errno::NOENT) => Ok(()),
            other => other,
        }
    };
    let mut flags = 0;
    read(raw::BTRFS_QGROUP_STATUS_KEY, 0, &mut |item| flags = number(item, 16).unwrap_or(0))?;
    if flags & u64::from(raw::BTRFS_QGROUP_STATUS_FLAGS_MASK) != u64::from(raw::BTRFS_QGROUP_STATUS_FLAG_ON) {
        return Ok(None);
    }
    let mut space = None;
    read(raw::BTRFS_QGROUP_INFO_KEY, id, &mut |item| {
        let both = number(item, 8).zip(number(item, 24));
        space = both.map(|(referenced, exclusive)| Space { referenced, exclusive: exclusive.min(referenced) });
    })?;
    Ok(space)
}

/// The extents of a subvolume, by where they are on the disk.
#[derive(Debug, Default)]
struct Extents {
    found: BTreeMap<u64, Extent>,
    /// Bytes that stand in the tree itself.
    inline: u64,
}

#[derive(Debug)]
struct Extent {
    length: u64,
    exclusive: bool,
}

impl Extents {
    fn read(root: &OwnedFd) -> Result<Self, Errno> {
        const EXTENT: u8 = raw::BTRFS_EXTENT_DATA_KEY as u8;
        // Where the fields of a file's extent begin.
        const KIND: usize = 20;
        const PLACE: usize = 21;
        const LENGTH: usize = 29;
        let mut extents = Self::default();
        let first = Key { object: 0, kind: 0, offset: 0 };
        let last = Key { object: u64::MAX, kind: u8::MAX, offset: u64::MAX };
        ioctl::search(root, 0, first, last, |key, item| {
            if key.kind != EXTENT {
                return;
            }
            match (item.get(KIND), number(item, PLACE), number(item, LENGTH)) {
                (Some(0), ..) => extents.inline += (item.len() - PLACE.min(item.len())) as u64,
                // At zero there is a hole.
                (Some(_), Some(place), Some(length)) if place != 0 => {
                    extents.found.insert(place, Extent { length, exclusive: false });
                }
                _ => {}
            }
        })?;
        Ok(extents)
    }

    /// Asks for every file which of its extents nobody else has.
    fn find_exclusive(&mut self, path: &Path) -> Result<()> {
        let mut open = vec![path.to_owned()];
        while let Some(directory) = open.pop() {
            let failed = |error| Error::io(format_args!("list {}", directory.display()), error);
            for entry in fs::read_dir(&directory).map_err(failed)? {
                let entry = entry.map_err(failed)?;
                let kind = entry.file_type().map_err(failed)?;
                if kind.is_dir() {
                    open.push(entry.path());
                } else if kind.is_file() {
                    self.look_at_file(&entry.path())?;
                }
            }
        }
        Ok(())
    }

    fn look_at_file(&mut self, path: &Path) -> Result<()> {
        let flags = (OFlags::NOFOLLOW | OFlags::NOATIME | OFlags::NONBLOCK).bits();
        let file = fs::OpenOptions::new().read(true).custom_flags(flags.cast_signed()).open(path);
        let file = file.map_err(|error| Error::io(format_args!("open {}", path.display()), error))?;
        ioctl::file_extents(&file, |extent| {
            if !extent.shared {
                self.mark(extent);
            }
        })
        .map_err(failure::at("look at the extents of", path))
    }

    fn mark(&mut self, found: ioctl::FileExtent) {
        // The length of what is compressed is that of what comes out.
        let end = if found.encoded { found.place + 1 } else { found.place.saturating_add(found.length) };
        // One may have begun before, when only a part of it is used.
        let before = self.found.range(..=found.place).next_back().map(|(place, _)| *place);
        for (place, extent) in self.found.range_mut(before.unwrap_or(found.place)..end) {
            if place + extent.length > found.place {
                extent.exclusive = true;
            }
        }
    }

    fn space(&self) -> Space {
        let sum = |all: bool| -> u64 {
            self.found.values().filter(|extent| all || extent.exclusive).map(|extent| extent.length).sum()
        };
        Space { referenced: sum(true) + self.inline, exclusive: sum(false) }
    }
}
