//! What the items of a btrfs tree mean. Pure: bytes in, facts out.

use crate::net::{Entry, Extent, Inode, Kind, Stamp};

pub(super) const INODE_ITEM: u8 = 1;
pub(super) const XATTR_ITEM: u8 = 24;
pub(super) const DIR_INDEX: u8 = 96;
pub(super) const EXTENT_DATA: u8 = 108;

fn u64_at(data: &[u8], at: usize) -> Option<u64> {
    Some(u64::from_le_bytes(data.get(at..at + 8)?.try_into().ok()?))
}

fn u32_at(data: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(data.get(at..at + 4)?.try_into().ok()?))
}

fn u16_at(data: &[u8], at: usize) -> Option<u16> {
    Some(u16::from_le_bytes(data.get(at..at + 2)?.try_into().ok()?))
}

fn stamp_at(data: &[u8], at: usize) -> Option<Stamp> {
    Some(Stamp { seconds: u64_at(data, at)?.cast_signed(), nanoseconds: u32_at(data, at + 8)? })
}

/// Reads an inode item. `None` where it is too short to be one.
pub(super) fn inode(data: &[u8]) -> Option<Inode> {
    let mode = u32_at(data, 52)?;
    Some(Inode {
        born: u64_at(data, 0)?,
        touched: u64_at(data, 8)?,
        size: u64_at(data, 16)?,
        links: u32_at(data, 40)?,
        uid: u32_at(data, 44)?,
        gid: u32_at(data, 48)?,
        mode,
        kind: Kind::of_mode(mode),
        device: u64_at(data, 56)?,
        flags: u64_at(data, 64)?,
        changed: stamp_at(data, 124)?,
        modified: stamp_at(data, 136)?,
        made: stamp_at(data, 148)?,
    })
}

/// A name, where it leads, and the value that belongs to it.
pub(super) type Name = (Vec<u8>, Entry, Vec<u8>);

/// Reads the names of a directory or extended-attribute item: several where their hashes collide.
pub(super) fn names(mut data: &[u8]) -> Option<Vec<Name>> {
    const HEAD: usize = 30;
    let mut names = Vec::new();
    while !data.is_empty() {
        let value = usize::from(u16_at(data, 25)?);
        let name = usize::from(u16_at(data, 27)?);
        let entry = Entry {
            inode: u64_at(data, 0)?,
            // The entry of a nested subvolume names a tree instead of an inode.
            foreign: *data.get(8)? != INODE_ITEM,
        };
        names.push((
            data.get(HEAD..HEAD + name)?.to_vec(),
            entry,
            data.get(HEAD + name..HEAD + name + value)?.to_vec(),
        ));
        data = data.get(HEAD + name + value..)?;
    }
    Some(names)
}

/// Reads a file extent item: when it was written, and all else that says which bytes it stands for.
pub(super) fn extent(data: &[u8]) -> Option<Extent> {
    Some(Extent { written: u64_at(data, 0)?, place: data.get(8..)?.to_vec() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(data in proptest::collection::vec(any::<u8>(), 0..400)) {
            let _ = inode(&data);
            let _ = names(&data);
            let _ = extent(&data);
        }
    }

    #[test]
    fn a_torn_name_is_no_name() {
        let mut item = vec![0u8; 30];
        item[8] = INODE_ITEM;
        item[0] = 5;
        item[27] = 3;
        assert_eq!(names(&item), None);
        item.extend(b"abc");
        let read = names(&item).unwrap();
        assert_eq!(read[0].0, b"abc");
        assert_eq!(read[0].1.inode, 5);
        item.extend(b"x");
        assert_eq!(names(&item), None);
    }
}
