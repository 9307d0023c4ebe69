//! A pack: the pages that one dump brought and no earlier one had, compressed in blocks.
//!
//! ```text
//! "crabpack" | version | blocks, in any order | table | offset and length of the table
//! ```
//! The table has a row for each block (where it lies, how long, how many pages, how it is stored, its checksum) and the
//! checksum of each page. **A pack's name is the checksum of its table**: who knows the name knows every byte, so a
//! manifest that names its packs vouches for them. A pack is written once and never changed, and an artifact has its
//! own hard link to each pack that it needs.

use std::fmt;
use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

use serde::{Deserialize, Serialize};

use crate::files;

/// What is compared, referred to and counted, whatever the kernel's pages are.
pub(crate) const PAGE: usize = 4096;
/// So many pages are compressed together.
pub(crate) const BLOCK_PAGES: usize = 32;
const MAGIC: &[u8; 8] = b"crabpack";
const VERSION: u32 = 1;
const HEADER: u64 = 12;
const TRAILER: u64 = 16;
const ROW: usize = 32;
const SUM: usize = 16;
/// A table of this size stands for more than a terabyte.
const TABLE_LIMIT: u64 = 8 << 30;
/// A file name.
const PREFIX: &str = "pack-";

/// The first half of a BLAKE3: enough that nobody finds two contents of the same.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Sum([u8; SUM]);

impl Sum {
    /// Stands for a page of zeros, which is stored nowhere. No page has it.
    pub(crate) const ZEROS: Self = Self([0; SUM]);

    pub(crate) fn of(bytes: &[u8]) -> Self {
        let mut sum = [0; SUM];
        sum.iter_mut().zip(blake3::hash(bytes).as_bytes()).for_each(|(half, whole)| *half = *whole);
        Self(sum)
    }
}

impl fmt::Display for Sum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Sum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// A pack's name, which is its table's checksum.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub(crate) struct PackName(Sum);

impl PackName {
    /// The name of its file.
    pub(crate) fn file(&self) -> String {
        format!("{PREFIX}{}", self.0)
    }

    /// From the name of a file.
    pub(crate) fn from_file(name: &str) -> Option<Self> {
        let digits = name.strip_prefix(PREFIX)?;
        let plain = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if digits.len() != 2 * SUM || !digits.bytes().all(plain) {
            return None;
        }
        let mut sum = [0; SUM];
        for (byte, at) in sum.iter_mut().zip((0..).step_by(2)) {
            *byte = u8::from_str_radix(digits.get(at..at + 2)?, 16).ok()?;
        }
        Some(Self(Sum(sum)))
    }
}

impl From<PackName> for String {
    fn from(name: PackName) -> Self {
        name.file()
    }
}

impl TryFrom<String> for PackName {
    type Error = String;
    fn try_from(text: String) -> Result<Self, String> {
        Self::from_file(&text).ok_or_else(|| format!("{text:?} is no name of a pack"))
    }
}

/// A block as the table describes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Row {
    offset: u64,
    length: u32,
    pages: u16,
    compressed: bool,
    sum: Sum,
}

impl Row {
    fn put(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.offset.to_le_bytes());
        bytes.extend(self.length.to_le_bytes());
        bytes.extend(self.pages.to_le_bytes());
        bytes.extend([u8::from(self.compressed), 0]);
        bytes.extend(self.sum.0);
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let compressed = match bytes.get(14..16)? {
            [0, 0] => false,
            [1, 0] => true,
            _ => return None,
        };
        Some(Self {
            offset: u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?),
            length: u32::from_le_bytes(bytes.get(8..12)?.try_into().ok()?),
            pages: u16::from_le_bytes(bytes.get(12..14)?.try_into().ok()?),
            compressed,
            sum: Sum(bytes.get(16..ROW)?.try_into().ok()?),
        })
    }
}

/// The rows, and the checksum of each page: page `n` is in block `n / BLOCK_PAGES`.
#[derive(Debug, PartialEq, Eq)]
struct Table {
    rows: Vec<Row>,
    pages: Vec<Sum>,
}

impl Table {
    fn encode(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(8 + self.rows.len() * ROW + self.pages.len() * SUM);
        bytes.extend((self.rows.len() as u64).to_le_bytes());
        self.rows.iter().for_each(|row| row.put(&mut bytes));
        self.pages.iter().for_each(|sum| bytes.extend(sum.0));
        bytes
    }

    /// The table of a file whose blocks lie before `end`.
    fn parse(bytes: &[u8], end: u64) -> Option<Self> {
        let count = usize::try_from(u64::from_le_bytes(bytes.get(..8)?.try_into().ok()?)).ok()?;
        let (rows, pages) = bytes.get(8..)?.split_at_checked(count.checked_mul(ROW)?)?;
        let rows: Vec<Row> = rows.chunks_exact(ROW).map(Row::parse).collect::<Option<_>>()?;
        if !pages.len().is_multiple_of(SUM) {
            return None;
        }
        let pages: Vec<Sum> = pages.chunks_exact(SUM).map(|sum| sum.try_into().ok().map(Sum)).collect::<Option<_>>()?;
        let mut left = pages.len();
        for row in &rows {
            let full = left.min(BLOCK_PAGES);
            let inside = row.offset >= HEADER && row.offset.checked_add(row.length.into())? <= end;
            // What does not shrink is stored as it is.
            let fits = row.length as usize <= full * PAGE && (row.compressed || row.length as usize == full * PAGE);
            if full == 0 || usize::from(row.pages) != full || !inside || !fits {
                return None;
            }
            left -= full;
        }
        (left == 0).then_some(Self { rows, pages })
    }
}

/// What a thread needs for reading and writing blocks, used again and again: new memory costs more than what is done
/// with it.
#[derive(Default)]
pub(crate) struct Room {
    stored: Vec<u8>,
    compressor: Option<zstd::bulk::Compressor<'static>>,
    decompressor: Option<zstd::bulk::Decompressor<'static>>,
}

impl Room {
    /// Compresses into `stored`.
    fn compress(&mut self, pages: &[u8], level: i32) -> std::io::Result<()> {
        self.stored.resize(zstd::zstd_safe::compress_bound(pages.len()), 0);
        let compressor = match &mut self.compressor {
            Some(compressor) => compressor,
            none => none.insert(zstd::bulk::Compressor::new(level)?),
        };
        let length = compressor.compress_to_buffer(pages, &mut self.stored[..])?;
        self.stored.truncate(length);
        Ok(())
    }

    /// Decompresses `stored`.
    fn decompress(&mut self, pages: &mut [u8]) -> std::io::Result<usize> {
        let decompressor = match &mut self.decompressor {
            Some(decompressor) => decompressor,
            none => none.insert(zstd::bulk::Decompressor::new()?),
        };
        decompressor.decompress_to_buffer(&self.stored, pages)
    }
}

/// A pack that is open.
#[derive(Debug)]
pub(crate) struct Pack {
    name: PackName,
    file: File,
    table: Table,
}

impl Pack {
    /// Opens a pack in a directory and checks its table; the blocks are checked when they are read.
    pub(crate) fn open(directory: impl AsFd, name: PackName) -> Result<Self, String> {
        let shown = name.file();
        let bad = |what: &str| format!("{shown} {what}");
        let unreadable = |e: std::io::Error| format!("{shown} cannot be read: {e}");
        let file = files::open_file_at(directory, &shown).map_err(unreadable)?;
        let metadata = file.metadata().map_err(unreadable)?;
        if !metadata.is_file() || metadata.uid() != rustix::process::geteuid().as_raw() {
            return Err(bad("is no file of this user"));
        }
        let size = metadata.len();
        let at = size.checked_sub(TRAILER).filter(|at| *at >= HEADER).ok_or_else(|| bad("is cut short"))?;
        let mut header = [0; HEADER as usize];
        file.read_exact_at(&mut header, 0).map_err(unreadable)?;
        if !header.starts_with(MAGIC) {
            return Err(bad("is no pack"));
        }
        if !header.ends_with(&VERSION.to_le_bytes()) {
            return Err(bad("is of another version"));
        }
        let mut trailer = [0; TRAILER as usize];
        file.read_exact_at(&mut trailer, at).map_err(unreadable)?;
        let word = |bytes: &[u8]| bytes.try_into().map(u64::from_le_bytes).unwrap_or(u64::MAX);
        let (offset, length) = trailer.split_at(8);
        let (offset, length) = (word(offset), word(length));
        if offset < HEADER || offset.checked_add(length) != Some(at) || length > TABLE_LIMIT {
            return Err(bad("is cut short"));
        }
        let mut bytes = vec![0; usize::try_from(length).map_err(|_| bad("is too large"))?];
        file.read_exact_at(&mut bytes, offset).map_err(unreadable)?;
        if Sum::of(&bytes) != name.0 {
            return Err(bad("does not match its checksum"));
        }
        let table = Table::parse(&bytes, offset).ok_or_else(|| bad("has no whole table"))?;
        Ok(Self { name, file, table })
    }

    pub(crate) fn name(&self) -> PackName {
        self.name
    }

    /// The checksums of its pages.
    pub(crate) fn pages(&self) -> &[Sum] {
        &self.table.pages
    }

    /// Checks one block as it lies there.
    pub(crate) fn check_block(&self, block: usize, room: &mut Room) -> Result<(), String> {
        self.stored(block, room).map(drop)
    }

    /// Reads the pages of one block into `pages`.
    pub(crate) fn read_block(&self, block: usize, room: &mut Room, pages: &mut Vec<u8>) -> Result<(), String> {
        let row = self.stored(block, room)?;
        if !row.compressed {
            std::mem::swap(&mut room.stored, pages);
            return Ok(());
        }
        let size = usize::from(row.pages) * PAGE;
        pages.resize(size, 0);
        match room.decompress(pages) {
            Ok(length) if length == size => Ok(()),
            _ => Err(format!("{} has a block that does not decompress", self.name.file())),
        }
    }

    /// Reads one block that is as large as blocks are.
    pub(crate) fn read_whole_block(&self, block: usize, room: &mut Room, pages: &mut [u8]) -> Result<(), String> {
        let shown = self.name.file();
        let row = *self.table.rows.get(block).ok_or_else(|| format!("{shown} has no block {block}"))?;
        if usize::from(row.pages) * PAGE != pages.len() {
            return Err(format!("{shown} has a block {block} of another size"));
        }
        if row.compressed {
            self.stored(block, room)?;
            return match room.decompress(pages) {
                Ok(length) if length == pages.len() => Ok(()),
                _ => Err(format!("{shown} has a block that does not decompress")),
            };
        }
        self.file.read_exact_at(pages, row.offset).map_err(|e| format!("{shown} cannot be read: {e}"))?;
        if Sum::of(pages) != row.sum {
            return Err(format!("{shown} does not match its checksum in block {block}"));
        }
        Ok(())
    }

    fn stored(&self, block: usize, room: &mut Room) -> Result<Row, String> {
        let shown = self.name.file();
        let row = *self.table.rows.get(block).ok_or_else(|| format!("{shown} has no block {block}"))?;
        let stored = &mut room.stored;
        stored.resize(row.length as usize, 0);
        self.file.read_exact_at(stored, row.offset).map_err(|e| format!("{shown} cannot be read: {e}"))?;
        if Sum::of(stored) != row.sum {
            return Err(format!("{shown} does not match its checksum in block {block}"));
        }
        Ok(row)
    }
}

/// A pack that is being written, by several threads at once.
#[derive(Debug)]
pub(crate) struct PackWriter {
    file: File,
    level: i32,
    state: Mutex<Written>,
}

#[derive(Debug)]
struct Written {
    end: u64,
    rows: Vec<Option<Row>>,
}

impl PackWriter {
    /// Begins a pack of so many blocks, compressed at a zstd level.
    pub(crate) fn create(path: &Path, blocks: usize, level: i32) -> std::io::Result<Self> {
        let file = files::create(path)?;
        let mut header = MAGIC.to_vec();
        header.extend(VERSION.to_le_bytes());
        file.write_all_at(&header, 0)?;
        let state = Mutex::new(Written { end: HEADER, rows: vec![None; blocks] });
        Ok(Self { file, level, state })
    }

    /// Writes one block; all but the last have [`BLOCK_PAGES`] pages.
    pub(crate) fn put(&self, block: usize, pages: &[u8], room: &mut Room) -> std::io::Result<()> {
        room.compress(pages, self.level)?;
        // A little less is not worth the time of every restore.
        let compressed = room.stored.len() < pages.len() - pages.len() / 16;
        let stored = if compressed { &room.stored[..] } else { pages };
        let too_many = || std::io::Error::other("a block is too large");
        let length = u32::try_from(stored.len()).map_err(|_| too_many())?;
        let count = u16::try_from(pages.len() / PAGE).map_err(|_| too_many())?;
        let sum = Sum::of(stored);
        let offset = {
            let mut state = self.state();
            let offset = state.end;
            state.end = offset + u64::from(length);
            *state.rows.get_mut(block).ok_or_else(too_many)? =
                Some(Row { offset, length, pages: count, compressed, sum });
            offset
        };
        self.file.write_all_at(stored, offset)
    }

    /// Writes the table and makes all durable. Its name, and how many bytes it has.
    pub(crate) fn finish(self, pages: Vec<Sum>) -> std::io::Result<(PackName, u64)> {
        let Written { end, rows } = self.state.into_inner().unwrap_or_else(PoisonError::into_inner);
        let rows: Option<Vec<Row>> = rows.into_iter().collect();
        let table = Table { rows: rows.ok_or_else(|| std::io::Error::other("a block was not written"))?, pages };
        let mut bytes = table.encode();
        let name = PackName(Sum::of(&bytes));
        let length = bytes.len() as u64;
        bytes.extend(end.to_le_bytes());
        bytes.extend(length.to_le_bytes());
        self.file.write_all_at(&bytes, end)?;
        self.file.sync_all()?;
        Ok((name, end + bytes.len() as u64))
    }

    fn state(&self) -> std::sync::MutexGuard<'_, Written> {
        // Nothing panics under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Pages that can be told apart; every third does not compress.
    fn page(n: u64) -> Vec<u8> {
        let mut page = vec![0; PAGE];
        if n.is_multiple_of(3) {
            blake3::Hasher::new().update(&n.to_le_bytes()).finalize_xof().fill(&mut page);
        } else {
            page[..8].copy_from_slice(&n.to_le_bytes());
        }
        page
    }

    fn pack(directory: &Path, count: u64) -> (PackName, Vec<u8>) {
        let pages: Vec<u8> = (1..=count).flat_map(page).collect();
        let path = directory.join("new");
        let writer = PackWriter::create(&path, pages.len().div_ceil(BLOCK_PAGES * PAGE), 1).unwrap();
        for (n, block) in pages.chunks(BLOCK_PAGES * PAGE).enumerate().collect::<Vec<_>>().into_iter().rev() {
            writer.put(n, block, &mut Room::default()).unwrap();
        }
        let (name, size) = writer.finish(pages.chunks(PAGE).map(Sum::of).collect()).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().len(), size);
        std::fs::rename(path, directory.join(name.file())).unwrap();
        (name, pages)
    }

    fn open(directory: &Path, name: PackName) -> Result<Pack, String> {
        Pack::open(files::open_directory(directory).unwrap(), name)
    }

    #[test]
    fn what_is_packed_is_read_again() {
        let directory = tempfile::tempdir().unwrap();
        let (name, pages) = pack(directory.path(), 70);
        let pack = open(directory.path(), name).unwrap();
        let (mut room, mut block, mut read) = (Room::default(), Vec::new(), Vec::<u8>::new());
        for n in 0..3 {
            pack.read_block(n, &mut room, &mut block).unwrap();
            read.extend(&block);
        }
        assert_eq!(read, pages);
        assert_eq!(pack.pages().len(), 70);
        assert!(pack.read_block(3, &mut room, &mut block).is_err());
    }

    #[test]
    fn no_damaged_byte_goes_unseen() {
        let directory = tempfile::tempdir().unwrap();
        let (name, _) = pack(directory.path(), 40);
        let path = directory.path().join(name.file());
        let whole = std::fs::read(&path).unwrap();
        let damaged = || match open(directory.path(), name) {
            Ok(pack) => (0..2).any(|block| pack.check_block(block, &mut Room::default()).is_err()),
            Err(_) => true,
        };
        // Every byte of the table and the trailer, and a choice of the others.
        for at in (0..whole.len()).filter(|at| at % 97 == 0 || *at < 64 || *at > whole.len() - 800) {
            let mut torn = whole.clone();
            torn[at] ^= 0x20;
            std::fs::write(&path, torn).unwrap();
            assert!(damaged(), "byte {at} of {}", whole.len());
        }
        for length in [0, 11, 12, 40, whole.len() - 1] {
            std::fs::write(&path, &whole[..length]).unwrap();
            assert!(damaged(), "cut to {length}");
        }
        std::fs::write(&path, whole).unwrap();
        assert!(!damaged());
    }

    proptest! {
        #[test]
        fn no_table_makes_the_reader_panic(bytes: Vec<u8>, end: u64) {
            if let Some(table) = Table::parse(&bytes, end) {
                prop_assert_eq!(table.encode(), bytes);
            }
        }

        #[test]
        fn only_its_own_name_is_a_packs_name(name in "(pack-)?[0-9a-fA-F/.]{0,40}") {
            if let Some(pack) = PackName::from_file(&name) {
                prop_assert_eq!(pack.file(), name);
            }
        }
    }
}
