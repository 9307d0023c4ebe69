//! CRIU's images that say which pages of a process are where: `pagemap-*.img` beside `pages-*.img`.

use prost::Message;

use crate::proto::{Inventory, PAGES_IN_PARENT, PAGES_PRESENT, PagemapEntry, PagemapHead};

/// Every image but the inventory begins with this and with a number for its kind.
const COMMON: u32 = 0x5456_4319;
const PAGEMAP: u32 = 0x5608_4025;
const INVENTORY: u32 = 0x5831_3116;
/// The format that is written.
const IMAGES: u32 = 2;

/// Pages that lie one after another in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Pages {
    pub(crate) address: u64,
    pub(crate) count: u64,
    /// They are in the parent's images, and not in these.
    pub(crate) in_parent: bool,
    flags: u32,
}

impl Pages {
    /// Pages in the images that the list belongs to.
    pub(crate) fn present(address: u64, count: u64) -> Self {
        Self { address, count, in_parent: false, flags: PAGES_PRESENT }
    }
}

/// The list of one process, by address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Pagemap {
    /// The number in the name of the file that holds the pages.
    pub(crate) pages_id: u32,
    pub(crate) pages: Vec<Pages>,
}

impl Pagemap {
    /// From the bytes of an image.
    pub(crate) fn parse(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        if word(&mut rest)? != COMMON || word(&mut rest)? != PAGEMAP {
            return None;
        }
        let PagemapHead { pages_id } = PagemapHead::decode(message(&mut rest)?).ok()?;
        let mut pages = Vec::new();
        while !rest.is_empty() {
            let entry = PagemapEntry::decode(message(&mut rest)?).ok()?;
            let flags = entry.flags.unwrap_or(PAGES_PRESENT);
            let in_parent = entry.in_parent == Some(true) || flags & PAGES_IN_PARENT != 0;
            let count = entry.nr_pages.unwrap_or(entry.compat_nr_pages.into());
            pages.push(Pages { address: entry.vaddr, count, in_parent, flags });
        }
        Some(Self { pages_id, pages })
    }

    /// As an image. Everything is said to be in the images that it belongs to.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut bytes = [COMMON.to_le_bytes(), PAGEMAP.to_le_bytes()].concat();
        put(&mut bytes, &PagemapHead { pages_id: self.pages_id });
        for pages in &self.pages {
            let entry = PagemapEntry {
                vaddr: pages.address,
                // Older versions read this one only.
                compat_nr_pages: u32::try_from(pages.count).unwrap_or(0),
                in_parent: None,
                flags: Some(pages.flags & !PAGES_IN_PARENT | PAGES_PRESENT),
                nr_pages: Some(pages.count),
            };
            put(&mut bytes, &entry);
        }
        bytes
    }
}

/// An inventory that says no more than when its images were made, in microseconds since the host started: CRIU tells by
/// it whether a process is still the one that it was then.
pub(crate) fn inventory(made: u64) -> Vec<u8> {
    let mut bytes = INVENTORY.to_le_bytes().to_vec();
    put(&mut bytes, &Inventory { img_version: IMAGES, dump_uptime: Some(made) });
    bytes
}

fn put(bytes: &mut Vec<u8>, message: &impl Message) {
    // A message of a few numbers.
    bytes.extend(u32::try_from(message.encoded_len()).unwrap_or(0).to_le_bytes());
    bytes.extend(message.encode_to_vec());
}

fn word(rest: &mut &[u8]) -> Option<u32> {
    let (word, behind) = rest.split_first_chunk()?;
    *rest = behind;
    Some(u32::from_le_bytes(*word))
}

fn message<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = usize::try_from(word(rest)?).ok()?;
    let (message, behind) = rest.split_at_checked(length)?;
    *rest = behind;
    Some(message)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn entries_of_old_and_new_versions_are_read() {
        let mut bytes = [COMMON.to_le_bytes(), PAGEMAP.to_le_bytes()].concat();
        // {1: 7}
        bytes.extend([2, 0, 0, 0, 8, 7]);
        // 3.17: {1: 4096, 2: 2, 3: true}; 4.2: {1: 12288, 2: 0, 4: 1, 5: 3} and {1: 28672, 2: 0, 4: 6, 5: 1}
        bytes.extend([7, 0, 0, 0, 8, 0x80, 0x20, 16, 2, 24, 1]);
        bytes.extend([9, 0, 0, 0, 8, 0x80, 0x60, 16, 0, 32, 1, 40, 3]);
        bytes.extend([10, 0, 0, 0, 8, 0x80, 0xe0, 1, 16, 0, 32, 6, 40, 1]);
        let map = Pagemap::parse(&bytes).unwrap();
        let read: Vec<_> = map.pages.iter().map(|p| (p.address, p.count, p.in_parent)).collect();
        assert_eq!((map.pages_id, read), (7, vec![(4096, 2, true), (12288, 3, true), (28672, 1, false)]));
        // Written anew, they are all here, and what else was said of them stays.
        let whole = Pagemap::parse(&map.encode()).unwrap();
        assert!(whole.pages.iter().all(|pages| !pages.in_parent));
        assert_eq!(whole.pages.iter().map(|pages| pages.flags).collect::<Vec<_>>(), [4, 4, 6]);
        assert_eq!(Pagemap::parse(&bytes[..bytes.len() - 1]), None);
    }

    #[test]
    fn an_inventory_is_as_criu_reads_it() {
        // {1: 2, 8: 300}
        assert_eq!(inventory(300), [0x16, 0x31, 0x31, 0x58, 5, 0, 0, 0, 8, 2, 64, 0xac, 2]);
    }

    proptest! {
        #[test]
        fn no_bytes_make_the_reader_panic(bytes: Vec<u8>) {
            let _ = Pagemap::parse(&bytes);
            let _ = Pagemap::parse(&[&COMMON.to_le_bytes()[..], &PAGEMAP.to_le_bytes(), &bytes].concat());
        }
    }
}
