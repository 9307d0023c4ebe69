//! What the kernel tells of a process's pages: what is mapped, which pages were written since it was told to forget, and
//! which page of the machine each is.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use crate::pack::PAGE;
use crate::sys::{self, PAGE_WRITTEN, Region};

pub(crate) const PAGE_SIZE: u64 = PAGE as u64;
/// A word of `/proc/PID/pagemap`: in memory, and then which page of the machine.
pub(crate) const IN_MEMORY: u64 = 1 << 63;
const FRAME: u64 = (1 << 55) - 1;

/// Whether this kernel marks pages that are written and tells which page of the machine each is. It is tried out.
pub(crate) fn is_possible() -> io::Result<bool> {
    if rustix::param::page_size() != PAGE {
        return Ok(false);
    }
    let mut memory = vec![1_u8; 2 * PAGE];
    let address = (memory.as_ptr() as u64).next_multiple_of(PAGE_SIZE);
    let inside = usize::try_from(address - memory.as_ptr() as u64).unwrap_or(0);
    let map = File::open("/proc/self/pagemap")?;
    std::fs::write("/proc/self/clear_refs", "4")?;
    let unmarked = is_there(&map, address, PAGE_WRITTEN)?;
    if let Some(byte) = memory.get_mut(inside) {
        *std::hint::black_box(byte) = 2;
    }
    let marked = !is_there(&map, address, PAGE_WRITTEN)?;
    let mut words = [0];
    read_words(&map, address, &mut words)?;
    std::hint::black_box(&memory);
    Ok(unmarked && marked && frame(words[0]) & FRAME != 0)
}

/// Whether the page is there and of none of those kinds.
pub(crate) fn is_there(map: &File, address: u64, without: u64) -> io::Result<bool> {
    let mut regions = [Region::default()];
    Ok(sys::scan_pages(map, (address, address + PAGE_SIZE), without, &mut regions)?.0 > 0)
}

/// Which page of the machine a word names; 0 for none.
pub(crate) fn frame(word: u64) -> u64 {
    if word & IN_MEMORY == 0 { 0 } else { word & (FRAME | IN_MEMORY) }
}

pub(crate) fn read_words(map: &File, address: u64, words: &mut [u64]) -> io::Result<()> {
    let mut bytes = vec![0; words.len() * 8];
    map.read_exact_at(&mut bytes, address / PAGE_SIZE * 8)?;
    for (word, bytes) in words.iter_mut().zip(bytes.as_chunks::<8>().0) {
        *word = u64::from_le_bytes(*bytes);
    }
    Ok(())
}

/// Calls `each` for every run of pages in a range, without those of the kinds `without`.
pub(crate) fn scan(
    map: &File,
    (mut start, end): (u64, u64),
    without: u64,
    mut each: impl FnMut(u64, u64) -> io::Result<()>,
) -> io::Result<()> {
    let mut regions = [Region::default(); 512];
    while start < end {
        let (found, stopped) = sys::scan_pages(map, (start, end), without, &mut regions)?;
        for region in regions.iter().take(found) {
            each(region.start, region.end)?;
        }
        if stopped <= start {
            return Err(io::Error::other("the scan of the pages does not go on"));
        }
        start = stopped;
    }
    Ok(())
}

/// The mappings of a process whose pages are looked at.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Private memory.
    pub(crate) private: Vec<(u64, u64)>,
    /// The kernel's own code for the process, which CRIU always saves.
    pub(crate) vdso: Option<(u64, u64)>,
    /// Has a queue of asynchronous I/O, in which the kernel writes without a mark.
    pub(crate) has_queue: bool,
}

impl Layout {
    pub(crate) fn read(pid: u32) -> io::Result<Self> {
        // A path need not be text.
        Ok(Self::parse(&String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/maps"))?)))
    }

    fn parse(text: &str) -> Self {
        let mut layout = Self::default();
        for line in text.lines() {
            let mut fields = line.split_ascii_whitespace();
            let range = fields.next().and_then(|range| {
                let (start, end) = range.split_once('-')?;
                Some((u64::from_str_radix(start, 16).ok()?, u64::from_str_radix(end, 16).ok()?))
            });
            let is_private = fields.next().is_some_and(|rights| rights.ends_with('p'));
            let Some(range) = range else { continue };
            match fields.nth(3).unwrap_or_default() {
                "[vdso]" => layout.vdso = Some(range),
                "/[aio]" => layout.has_queue = true,
                name if name.starts_with("[vvar") || matches!(name, "[vsyscall]" | "[uprobes]") => {}
                _ if is_private => layout.private.push(range),
                _ => {}
            }
        }
        layout
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_private_memory_is_looked_at() {
        let text = "\
00400000-00401000 r-xp 00000000 08:01 5 /bin/a b
7f0000000000-7f0000002000 rw-p 00000000 00:00 0
7f0000002000-7f0000003000 rw-s 00000000 00:01 9 /dev/zero (deleted)
7ffc00000000-7ffc00001000 rw-p 00000000 00:00 0 [stack]
7ffd00000000-7ffd00004000 r--p 00000000 00:00 0 [vvar]
7ffd00004000-7ffd00006000 r-xp 00000000 00:00 0 [vdso]
";
        let layout = Layout::parse(text);
        let private =
            [(0x40_0000, 0x40_1000), (0x7f00_0000_0000, 0x7f00_0000_2000), (0x7ffc_0000_0000, 0x7ffc_0000_1000)];
        assert_eq!(layout.private, private);
        assert_eq!(layout.vdso, Some((0x7ffd_0000_4000, 0x7ffd_0000_6000)));
        assert!(!layout.has_queue);
        assert!(Layout::parse("7f0000000000-7f0000001000 rw-s 00000000 00:0f 77 /[aio] (deleted)").has_queue);
    }
}
