//! The way of a dump's images into a pack: each page is looked at once, and only those that neither the packs of an
//! earlier artifact nor this dump had before are written.

use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::sync::Arc;

use crab_core::{Error, ErrorKind, Result};

use crate::pack::{BLOCK_PAGES, PAGE, Pack, PackName, PackWriter, Room, Sum};
use crate::recipe::{self, Image};
use crate::{files, parallel};

/// So many pages are looked at in one piece.
const CHUNK: usize = 64;
/// An artifact that would need more packs than this writes the pages of the smaller half anew.
const MOST_PACKS: usize = 128;
/// The name of the pack while it has none.
const NAMELESS: &str = "pack.new";
/// `O_NOFOLLOW` as the standard library takes it.
const NOFOLLOW: i32 = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();

/// What a dump became.
#[derive(Debug)]
pub(crate) struct Deposit {
    /// The packs that it needs, its own first.
    pub(crate) packs: Vec<PackName>,
    /// Where its recipe begins in its own pack, in pages.
    pub(crate) recipe: u32,
    /// How long the recipe is, in bytes.
    pub(crate) recipe_size: u64,
    /// How many bytes were written.
    pub(crate) written: u64,
    /// How many bytes all images have.
    pub(crate) size: u64,
}

/// Pages that lie one after another in a file.
#[derive(Clone, Debug)]
pub(crate) struct Part {
    pub(crate) file: Arc<File>,
    /// The first page in the file.
    pub(crate) first: u64,
    pub(crate) count: u64,
}

/// A file of the dump, whole or in parts.
struct Source {
    parts: Vec<Part>,
    image: Image,
}

impl Source {
    fn open(directory: &Path, name: String) -> Result<Self> {
        let open = || {
            let file = File::options().read(true).custom_flags(NOFOLLOW).open(directory.join(&name))?;
            let metadata = file.metadata()?;
            if !recipe::is_image_name(&name) || !metadata.is_file() {
                return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, "it is no image"));
            }
            Ok((file, metadata.len()))
        };
        let (file, size) = open().map_err(|e| Error::io(format!("read the image {}", name.escape_default()), e))?;
        let whole = Part { file: Arc::new(file), first: 0, count: size.div_ceil(PAGE as u64) };
        Ok(Self { parts: vec![whole], image: Image::new(name, size) })
    }

    fn of_parts(name: String, parts: Vec<Part>) -> Self {
        let pages: u64 = parts.iter().map(|part| part.count).sum();
        Self { parts, image: Image::new(name, pages * PAGE as u64) }
    }

    fn pages(&self) -> usize {
        usize::try_from(self.image.size.div_ceil(PAGE as u64)).unwrap_or(usize::MAX)
    }

    /// Reads pages; what is beyond the end is zero.
    fn read(&self, first: usize, pages: &mut [u8]) -> Result<()> {
        let offset = first as u64 * PAGE as u64;
        let inside = usize::try_from(self.image.size.saturating_sub(offset)).unwrap_or(usize::MAX).min(pages.len());
        let (mut rest, beyond) = pages.split_at_mut(inside);
        beyond.fill(0);
        let mut skip = first as u64;
        for part in &self.parts {
            if skip >= part.count {
                skip -= part.count;
                continue;
            }
            let most = usize::try_from((part.count - skip).saturating_mul(PAGE as u64)).unwrap_or(usize::MAX);
            let (now, later) = rest.split_at_mut(most.min(rest.len()));
            let read = part.file.read_exact_at(now, (part.first + skip) * PAGE as u64);
            read.map_err(|e| Error::io(format!("read the image {}", self.image.name), e))?;
            (rest, skip) = (later, 0);
            if rest.is_empty() {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// Stores the images of `source` in `target`, which holds the packs `base` already. Packs that are not needed any more
/// are removed from it. An image that `united` names consists of those parts, and not of its own file.
pub(crate) fn deposit(
    source: &Path,
    mut united: HashMap<String, Vec<Part>>,
    target: &Path,
    base: &[Pack],
    level: i32,
) -> Result<Deposit> {
    let mut names = files::names(source)?;
    names.sort_unstable();
    let open = |name: String| match united.remove(&name) {
        Some(parts) => Ok(Source::of_parts(name, parts)),
        None => Source::open(source, name),
    };
    let mut sources: Vec<Source> = names.into_iter().map(open).collect::<Result<_>>()?;
    let sums = look(&sources)?;
    let known = Known::new(base, &sums);
    let mut new = New::default();
    for (at, (source, sums)) in sources.iter_mut().zip(&sums).enumerate() {
        for (page, sum) in sums.iter().enumerate() {
            match known.find(sum) {
                _ if *sum == Sum::ZEROS => source.image.push(None, 0),
                Some((pack, page)) => source.image.push(Some(pack), page),
                None => source.image.push(Some(0), new.take(*sum, at, page)?),
            }
        }
    }
    let images: Vec<Image> = sources.iter().map(|source| source.image.clone()).collect();
    let mut list = recipe::encode(&images)?;
    let size = images.iter().map(|image| image.size).sum();
    drop(images);
    let (recipe, recipe_size) = (number(new.pages.len())?, list.len() as u64);
    list.resize(list.len().next_multiple_of(PAGE), 0);

    let path = target.join(NAMELESS);
    let failed = |e| Error::io(format!("write {}", path.display()), e);
    let total = new.pages.len() + list.len() / PAGE;
    let writer = PackWriter::create(&path, total.div_ceil(BLOCK_PAGES), level).map_err(failed)?;
    parallel::each(
        total.div_ceil(BLOCK_PAGES),
        || (vec![0; BLOCK_PAGES * PAGE], Room::default()),
        |(buffer, room), block| {
            let first = block * BLOCK_PAGES;
            let pages = BLOCK_PAGES.min(total - first);
            let buffer = buffer.get_mut(..pages * PAGE).unwrap_or_default();
            new.fill(&sources, &list, first, buffer)?;
            writer.put(block, buffer, room).map_err(failed)
        },
    )?;
    let mut page_sums: Vec<Sum> = new.pages.iter().map(|page| page.sum).collect();
    page_sums.extend(list.chunks(PAGE).map(Sum::of));
    let (own, written) = writer.finish(page_sums).map_err(failed)?;
    std::fs::rename(&path, target.join(own.file())).map_err(failed)?;
    let mut packs = vec![own];
    for (pack, kept) in base.iter().zip(&known.kept) {
        if kept.is_some() {
            packs.push(pack.name());
        } else if pack.name() != own {
            let path = target.join(pack.name().file());
            std::fs::remove_file(&path).map_err(|e| Error::io(format!("remove {}", path.display()), e))?;
        }
    }
    Ok(Deposit { packs, recipe, recipe_size, written, size })
}

fn number(page: usize) -> Result<u32> {
    u32::try_from(page).map_err(|_| Error::new(ErrorKind::Full, "the dump is larger than a pack can be"))
}

/// The checksum of every page of every image.
fn look(sources: &[Source]) -> Result<Vec<Vec<Sum>>> {
    let chunks: Vec<(usize, usize)> = sources
        .iter()
        .enumerate()
        .flat_map(|(at, source)| (0..source.pages()).step_by(CHUNK).map(move |first| (at, first)))
        .collect();
    let looked = parallel::each(
        chunks.len(),
        || vec![0; CHUNK * PAGE],
        |buffer, n| {
            let Some((source, at, first)) =
                chunks.get(n).and_then(|(at, first)| Some((sources.get(*at)?, *at, *first)))
            else {
                return Ok((0, Vec::new()));
            };
            let pages = CHUNK.min(source.pages() - first);
            let buffer = buffer.get_mut(..pages * PAGE).unwrap_or_default();
            source.read(first, buffer)?;
            let sum = |page: &[u8]| if *page == [0; PAGE] { Sum::ZEROS } else { Sum::of(page) };
            Ok((at, buffer.chunks_exact(PAGE).map(sum).collect::<Vec<Sum>>()))
        },
    )?;
    let mut sums: Vec<Vec<Sum>> = sources.iter().map(|source| Vec::with_capacity(source.pages())).collect();
    for (at, some) in looked {
        if let Some(all) = sums.get_mut(at) {
            all.extend(some);
        }
    }
    Ok(sums)
}

/// The pages of earlier packs that are worth keeping.
struct Known {
    /// Pack in `base`, and page.
    pages: HashMap<Sum, (usize, u32)>,
    /// For each pack of `base` its place among the packs of the new artifact.
    kept: Vec<Option<usize>>,
}

impl Known {
    /// A pack of which less than half is still needed is given up, as are the smaller ones where they are too many:
    /// their pages are written anew, and the space goes with the last artifact that has them.
    fn new(base: &[Pack], sums: &[Vec<Sum>]) -> Self {
        let mut pages = HashMap::with_capacity(base.iter().map(|pack| pack.pages().len()).sum());
        for (at, pack) in base.iter().enumerate() {
            for (page, sum) in (0..).zip(pack.pages()) {
                pages.entry(*sum).or_insert((at, page));
            }
        }
        let mut used: Vec<Vec<bool>> = base.iter().map(|pack| vec![false; pack.pages().len()]).collect();
        for (pack, page) in sums.iter().flatten().filter_map(|sum| pages.get(sum)) {
            if let Some(used) = used.get_mut(*pack).and_then(|used| used.get_mut(*page as usize)) {
                *used = true;
            }
        }
        let needed: Vec<usize> = used.iter().map(|used| used.iter().filter(|used| **used).count()).collect();
        let mut worthy: Vec<usize> = needed
            .iter()
            .zip(base)
            .enumerate()
            .filter(|(_, (needed, pack))| 2 * **needed >= pack.pages().len().max(1))
            .map(|(at, _)| at)
            .collect();
        if worthy.len() >= MOST_PACKS {
            worthy.sort_by_key(|at| std::cmp::Reverse(needed.get(*at).copied()));
            worthy.truncate(MOST_PACKS / 2);
            worthy.sort_unstable();
        }
        let mut kept = vec![None; base.len()];
        // The first place is that of the new pack.
        for (place, at) in (1..).zip(worthy) {
            if let Some(kept) = kept.get_mut(at) {
                *kept = Some(place);
            }
        }
        Self { pages, kept }
    }

    fn find(&self, sum: &Sum) -> Option<(usize, u32)> {
        let (at, page) = self.pages.get(sum)?;
        Some(((*self.kept.get(*at)?)?, *page))
    }
}

/// The pages that are written, in order, each once.
#[derive(Default)]
struct New {
    places: HashMap<Sum, u32>,
    pages: Vec<NewPage>,
}

struct NewPage {
    sum: Sum,
    source: usize,
    page: usize,
}

impl New {
    /// The page's number in the pack.
    fn take(&mut self, sum: Sum, source: usize, page: usize) -> Result<u32> {
        let next = number(self.pages.len())?;
        let place = *self.places.entry(sum).or_insert(next);
        if place == next {
            self.pages.push(NewPage { sum, source, page });
        }
        Ok(place)
    }

    /// Reads the pages from `first` on; behind the last come those of the list.
    fn fill(&self, sources: &[Source], list: &[u8], first: usize, buffer: &mut [u8]) -> Result<()> {
        let (mut at, mut rest) = (first, buffer);
        while !rest.is_empty() {
            let Some(page) = self.pages.get(at) else {
                let begin = (at - self.pages.len()) * PAGE;
                rest.copy_from_slice(list.get(begin..begin + rest.len()).unwrap_or_default());
                return Ok(());
            };
            let ahead = self.pages.get(at..).unwrap_or_default().iter().take(rest.len() / PAGE);
            let count =
                ahead.zip(0..).take_while(|(next, n)| next.source == page.source && next.page == page.page + n).count();
            let (now, later) = rest.split_at_mut(count * PAGE);
            if let Some(source) = sources.get(page.source) {
                source.read(page.page, now)?;
            }
            (at, rest) = (at + count, later);
        }
        Ok(())
    }
}
