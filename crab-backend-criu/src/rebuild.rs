//! The way back: CRIU's images from the packs, each block checked before it is used. What is in memory at a time is a
//! few blocks for each thread; pages of zeros become holes.

use std::collections::{BTreeSet, HashSet, VecDeque};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};

use crab_core::{Error, ErrorKind, Result};

use crate::pack::{BLOCK_PAGES, PAGE, Pack, PackName, Room};
use crate::recipe::{Image, Run};
use crate::{files, parallel};

/// So many pages are put together in one piece.
const PIECE: u32 = 1024;
/// So many blocks a thread keeps: runs go back and forth between packs.
const KEPT: usize = 16;

/// Packs that were found damaged. Nothing new may refer to them.
pub(crate) type Suspects = Arc<Mutex<HashSet<PackName>>>;

/// Whether an image holds memory. Those are almost all there is to write, and CRIU opens them last.
pub(crate) fn is_memory(name: &str) -> bool {
    name.starts_with("pages-")
}

/// An artifact whose packs and list of images are at hand.
#[derive(Debug)]
pub(crate) struct Whole {
    /// For errors.
    pub(crate) name: String,
    pub(crate) packs: Vec<Pack>,
    pub(crate) images: Vec<Image>,
    pub(crate) suspects: Suspects,
}

/// Consecutive pages of one image.
pub(crate) struct Piece {
    pub(crate) image: usize,
    pub(crate) first: u64,
    runs: Vec<Run>,
}

impl Piece {
    /// How many bytes its pages have.
    pub(crate) fn length(&self) -> usize {
        self.runs.iter().map(|run| run.count as usize * PAGE).sum()
    }
}

impl Whole {
    /// What the images of some names need, without holes.
    pub(crate) fn size(&self, which: impl Fn(&str) -> bool) -> u64 {
        let images = self.images.iter().filter(|image| which(&image.name));
        let runs = images.flat_map(|image| &image.runs).filter(|run| run.pack.is_some());
        runs.map(|run| u64::from(run.count) * PAGE as u64).sum()
    }

    /// Checks every block that it needs.
    pub(crate) fn check(&self) -> Result<()> {
        let mut needed = BTreeSet::new();
        for run in self.images.iter().flat_map(|image| &image.runs) {
            if let Some(pack) = run.pack {
                let (first, last) = (run.first as usize, run.first as usize + run.count as usize - 1);
                needed.extend((first / BLOCK_PAGES..=last / BLOCK_PAGES).map(|block| (pack, block)));
            }
        }
        let needed: Vec<(usize, usize)> = needed.into_iter().collect();
        let check = |room: &mut Room, n: usize| match needed.get(n) {
            Some((pack, block)) => self.read(*pack, |pack| pack.check_block(*block, room)),
            None => Ok(()),
        };
        parallel::each(needed.len(), Room::default, check).map(drop)
    }

    /// Writes the images of some names into a directory. `wanted` is asked now and then whether to go on.
    pub(crate) fn rebuild(
        &self,
        directory: &Path,
        which: impl Fn(&str) -> bool,
        wanted: &(dyn Fn() -> Result<()> + Sync),
    ) -> Result<()> {
        let images: Vec<&Image> = self.images.iter().filter(|image| which(&image.name)).collect();
        let mut files = Vec::with_capacity(images.len());
        for image in &images {
            let make = || {
                let file = files::create(&directory.join(&image.name))?;
                file.set_len(image.size)?;
                Ok(file)
            };
            files.push(make().map_err(|e| cannot_write(&image.name, e))?);
        }
        let mut pieces = Vec::new();
        for (at, image) in images.iter().enumerate() {
            cut(at, &image.runs, PIECE, &mut pieces);
        }
        let one = |blocks: &mut Blocks, n: usize| {
            wanted()?;
            match pieces.get(n).and_then(|piece| Some((piece, files.get(piece.image)?, *images.get(piece.image)?))) {
                Some((piece, file, image)) => self.put(piece, file, image, blocks),
                None => Ok(()),
            }
        };
        parallel::each(pieces.len(), Blocks::default, one).map(drop)
    }

    fn put(&self, piece: &Piece, file: &File, image: &Image, blocks: &mut Blocks) -> Result<()> {
        let mut offset = piece.first * PAGE as u64;
        for run in &piece.runs {
            let end = offset + u64::from(run.count) * PAGE as u64;
            let Some(pack) = run.pack else {
                offset = end;
                continue;
            };
            let mut page = run.first as usize;
            while offset < end {
                let pages = blocks.get(self, pack, page / BLOCK_PAGES)?;
                let begin = page % BLOCK_PAGES * PAGE;
                let most = usize::try_from(end - offset).unwrap_or(usize::MAX);
                let some = pages.get(begin..pages.len().min(begin.saturating_add(most))).unwrap_or_default();
                if some.is_empty() {
                    return Err(self.corrupt("a block is too short"));
                }
                // The last page of a file may be only a part of one.
                let inside = usize::try_from(image.size.saturating_sub(offset)).unwrap_or(usize::MAX).min(some.len());
                let written = file.write_all_at(some.get(..inside).unwrap_or_default(), offset);
                written.map_err(|e| cannot_write(&image.name, e))?;
                offset += some.len() as u64;
                page += some.len() / PAGE;
            }
        }
        Ok(())
    }

    /// Puts a piece together in memory.
    pub(crate) fn fill(&self, piece: &Piece, into: &mut Vec<u8>, blocks: &mut Blocks) -> Result<()> {
        into.resize(piece.length(), 0);
        let mut rest = &mut into[..];
        for run in &piece.runs {
            let (mut pages, behind) = rest.split_at_mut_checked(run.count as usize * PAGE).unwrap_or_default();
            rest = behind;
            let Some(pack) = run.pack else {
                pages.fill(0);
                continue;
            };
            let mut page = run.first as usize;
            while !pages.is_empty() {
                let (block, begin) = (page / BLOCK_PAGES, page % BLOCK_PAGES * PAGE);
                let done = if begin == 0 && pages.len() >= BLOCK_PAGES * PAGE {
                    let whole = pages.get_mut(..BLOCK_PAGES * PAGE).unwrap_or_default();
                    self.read(pack, |pack| pack.read_whole_block(block, &mut blocks.room, whole))?;
                    BLOCK_PAGES * PAGE
                } else {
                    let found = blocks.get(self, pack, block)?.get(begin..).unwrap_or_default();
                    let some = found.len().min(pages.len());
                    if some == 0 {
                        return Err(self.corrupt("a block is too short"));
                    }
                    let (to, from) = (pages.get_mut(..some), found.get(..some));
                    to.zip(from).into_iter().for_each(|(to, from)| to.copy_from_slice(from));
                    some
                };
                page += done / PAGE;
                pages = pages.get_mut(done..).unwrap_or_default();
            }
        }
        Ok(())
    }

    fn read<T>(&self, pack: usize, read: impl FnOnce(&Pack) -> Result<T, String>) -> Result<T> {
        let pack = self.packs.get(pack).ok_or_else(|| self.corrupt("a pack is missing"))?;
        read(pack).map_err(|what| {
            self.suspects.lock().unwrap_or_else(PoisonError::into_inner).insert(pack.name());
            self.corrupt(&what)
        })
    }

    pub(crate) fn corrupt(&self, what: &str) -> Error {
        corrupt(&self.name, what)
    }
}

pub(crate) fn corrupt(name: &str, what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("{name} is damaged: {what}"))
}

fn cannot_write(name: &str, error: std::io::Error) -> Error {
    Error::io(format!("put the image {name} together"), error)
}

/// Cuts the runs of an image into pieces, long runs at the end of a block.
pub(crate) fn cut(image: usize, runs: &[Run], most: u32, pieces: &mut Vec<Piece>) {
    let block = BLOCK_PAGES as u32;
    let mut piece = Piece { image, first: 0, runs: Vec::new() };
    let mut room = most;
    for run in runs {
        let mut run = *run;
        while run.count > 0 {
            let mut now = run.count.min(room);
            if now < run.count && now > block {
                now -= run.first.wrapping_add(now) % block;
            }
            piece.runs.push(Run { count: now, ..run });
            run.count -= now;
            room -= now;
            if run.pack.is_some() {
                run.first += now;
            }
            if room == 0 || run.count > 0 {
                let first = piece.first + u64::from(most - room);
                pieces.push(std::mem::replace(&mut piece, Piece { image, first, runs: Vec::new() }));
                room = most;
            }
        }
    }
    if !piece.runs.is_empty() {
        pieces.push(piece);
    }
}

/// The blocks that a thread read last, the newest first.
#[derive(Default)]
pub(crate) struct Blocks {
    kept: VecDeque<((usize, usize), Vec<u8>)>,
    room: Room,
}

impl Blocks {
    fn get(&mut self, whole: &Whole, pack: usize, block: usize) -> Result<&[u8]> {
        let key = (pack, block);
        let mut found = match self.kept.iter().position(|(kept, _)| *kept == key) {
            Some(at) => self.kept.remove(at),
            None => None,
        };
        if found.is_none() {
            let oldest = if self.kept.len() >= KEPT { self.kept.pop_back() } else { None };
            let mut pages = oldest.map(|(_, pages)| pages).unwrap_or_default();
            whole.read(pack, |pack| pack.read_block(block, &mut self.room, &mut pages))?;
            found = Some((key, pages));
        }
        self.kept.extend(found);
        self.kept.rotate_right(1);
        Ok(self.kept.front().map(|(_, pages)| &pages[..]).unwrap_or_default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_pieces_of_an_image_are_all_of_it() {
        let run = |pack, first, count| Run { pack, first, count };
        let runs = [run(Some(0), 5, 3000), run(None, 0, 2000), run(Some(1), 0, 1), run(Some(0), 9, 1023)];
        let mut pieces = Vec::new();
        cut(7, &runs, PIECE, &mut pieces);
        let mut whole = Image::new("x".into(), 0);
        for piece in &pieces {
            let before: u64 = whole.runs.iter().map(|run| u64::from(run.count)).sum();
            assert_eq!((piece.image, piece.first), (7, before));
            for run in &piece.runs {
                assert!(run.count > 0);
                (0..run.count).for_each(|n| whole.push(run.pack, run.first + n));
            }
        }
        assert_eq!(whole.runs, runs);
        assert!(pieces.iter().all(|piece| piece.runs.iter().map(|run| run.count).sum::<u32>() <= PIECE));
    }
}
