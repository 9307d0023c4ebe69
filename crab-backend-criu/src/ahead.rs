//! Memory images, read while they are put together: a few threads are ahead of the reader, by a bounded number of
//! pieces. Only pieces whose blocks are whole are ever given out.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use crab_core::{Error, ErrorKind, Result};

use crate::pack::PAGE;
use crate::rebuild::{Blocks, Piece, Whole, is_memory};
use crate::recipe::Image;

/// So many pages are put together in one piece: what the kernel asks for at a time.
const PIECE: u32 = 256;
/// So many pieces lie ready at most.
const READY: usize = 64;
/// So many bytes are made ready before anybody reads. Not more: memory that nobody has touched yet costs more than all
/// that is done with it.
const FIRST: usize = 8 << 20;
/// So many of an image are made ready before it gets there, in room that was used just now.
const DEPTH: usize = 4;

/// Part of a piece that was asked for.
pub(crate) struct Part {
    piece: Arc<Vec<u8>>,
    range: Range<usize>,
}

impl Part {
    pub(crate) fn bytes(&self) -> &[u8] {
        self.piece.get(self.range.clone()).unwrap_or_default()
    }
}

/// The memory images of an artifact.
pub(crate) struct Ahead<'a> {
    whole: &'a Whole,
    images: Vec<&'a Image>,
    pieces: Vec<Piece>,
    /// Whether to go on.
    wanted: &'a (dyn Fn() -> Result<()> + Sync),
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    slots: Vec<Slot>,
    /// To be made ready.
    queue: VecDeque<usize>,
    /// The ready ones, the oldest first.
    ready: VecDeque<usize>,
    /// Room of pieces that were used: new memory costs more than what is done with it.
    spare: Vec<Vec<u8>>,
    /// Images that are being read.
    open: usize,
    error: Option<Error>,
    over: bool,
}

#[derive(Clone, Default)]
enum Slot {
    #[default]
    Missing,
    Queued,
    InWork,
    Ready(Arc<Vec<u8>>),
}

impl<'a> Ahead<'a> {
    /// Whether there are few enough images: where many are read at once, pieces go before they are used, and are made
    /// again and again.
    pub(crate) fn suits(whole: &Whole) -> bool {
        whole.images.iter().filter(|image| is_memory(&image.name)).count() <= READY / 2
    }

    pub(crate) fn new(whole: &'a Whole, wanted: &'a (dyn Fn() -> Result<()> + Sync)) -> Self {
        let images: Vec<&Image> = whole.images.iter().filter(|image| is_memory(&image.name)).collect();
        let mut pieces = Vec::new();
        for (at, image) in images.iter().enumerate() {
            crate::rebuild::cut(at, &image.runs, PIECE, &mut pieces);
        }
        let mut slots = vec![Slot::Missing; pieces.len()];
        let mut bytes = 0;
        let is_early = |piece: &&Piece| {
            bytes += piece.length();
            bytes <= FIRST
        };
        let early = pieces.iter().take(READY).take_while(is_early).count();
        slots.iter_mut().take(early).for_each(|slot| *slot = Slot::Queued);
        let queue = (0..early).collect();
        let state = Mutex::new(State { slots, queue, ..State::default() });
        Self { whole, images, pieces, wanted, state, changed: Condvar::new() }
    }

    /// Which image has a name.
    pub(crate) fn find(&self, name: &[u8]) -> Option<usize> {
        self.images.iter().position(|image| image.name.as_bytes() == name)
    }

    /// The names of all.
    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.images.iter().map(|image| image.name.as_str())
    }

    pub(crate) fn size(&self, image: usize) -> Option<u64> {
        self.images.get(image).map(|image| image.size)
    }

    pub(crate) fn opened(&self) {
        self.state().open += 1;
    }

    pub(crate) fn closed(&self) {
        let mut state = self.state();
        state.open = state.open.saturating_sub(1);
    }

    /// Reads. `None` where something is wrong, which [`end`](Self::end) tells.
    pub(crate) fn read(&self, image: usize, offset: u64, size: u32, blocks: &mut Blocks) -> Option<Vec<Part>> {
        let end = self.size(image)?.min(offset.saturating_add(size.into()));
        if offset >= end {
            return Some(Vec::new());
        }
        let mut piece =
            self.pieces.partition_point(|piece| (piece.image, piece.first * PAGE as u64) <= (image, offset));
        let (mut offset, mut parts) = (offset, Vec::new());
        piece = piece.checked_sub(1)?;
        while offset < end {
            let here = self.pieces.get(piece).filter(|here| here.image == image)?;
            let (first, length) = (here.first * PAGE as u64, here.length());
            let begin = usize::try_from(offset.checked_sub(first)?).ok()?;
            let stop = length.min(usize::try_from(end - first).ok()?);
            if begin >= stop {
                return None;
            }
            parts.push(Part { piece: self.get(piece, stop == length, blocks)?, range: begin..stop });
            offset = first + stop as u64;
            piece += 1;
        }
        self.look_ahead(piece, image);
        Some(parts)
    }

    /// Takes the room of parts that were used.
    pub(crate) fn give_back(&self, parts: Vec<Part>) {
        let mut state = self.state();
        for part in parts {
            state.reuse(part.piece);
        }
    }

    /// Makes pieces ready until it is over.
    pub(crate) fn run(&self) {
        let mut blocks = Blocks::default();
        let mut state = self.state();
        while !state.over && state.error.is_none() {
            let Some(piece) = state.queue.pop_front() else {
                state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            if !matches!(state.slots.get(piece), Some(Slot::Queued)) {
                continue;
            }
            let room = state.begin(piece);
            drop(state);
            let Some(made) = self.make(piece, room, &mut blocks) else { return };
            state = self.state();
            state.ready(piece, made);
            self.changed.notify_all();
        }
    }

    /// Ends [`run`](Self::run) and all that waits.
    pub(crate) fn stop(&self) {
        self.state().over = true;
        self.changed.notify_all();
    }

    /// What went wrong.
    pub(crate) fn end(self) -> Option<Error> {
        self.state.into_inner().unwrap_or_else(PoisonError::into_inner).error
    }

    /// One piece. The last reader of it says so.
    fn get(&self, piece: usize, last: bool, blocks: &mut Blocks) -> Option<Arc<Vec<u8>>> {
        let mut state = self.state();
        loop {
            if state.over || state.error.is_some() {
                return None;
            }
            match state.slots.get(piece)? {
                Slot::Ready(made) => {
                    let made = Arc::clone(made);
                    if last {
                        state.ready.retain(|ready| *ready != piece);
                        state.set(piece, Slot::Missing);
                    }
                    return Some(made);
                }
                Slot::InWork => state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
                Slot::Missing | Slot::Queued => break,
            }
        }
        let room = state.begin(piece);
        drop(state);
        let made = self.make(piece, room, blocks)?;
        let mut state = self.state();
        match last {
            true => state.set(piece, Slot::Missing),
            false => state.ready(piece, Arc::clone(&made)),
        }
        self.changed.notify_all();
        Some(made)
    }

    /// Puts a piece together that was [begun](State::begin).
    fn make(&self, piece: usize, mut room: Vec<u8>, blocks: &mut Blocks) -> Option<Arc<Vec<u8>>> {
        let made = (self.wanted)().and_then(|()| match self.pieces.get(piece) {
            Some(piece) => self.whole.fill(piece, &mut room, blocks),
            None => Err(Error::new(ErrorKind::Internal, "there is no such piece")),
        });
        match made {
            Ok(()) => Some(Arc::new(room)),
            Err(error) => {
                let mut state = self.state();
                state.error.get_or_insert(error);
                state.set(piece, Slot::Missing);
                self.changed.notify_all();
                None
            }
        }
    }

    fn look_ahead(&self, next: usize, image: usize) {
        let mut state = self.state();
        let depth = (READY / 2 / state.open.max(1)).clamp(1, DEPTH);
        for (piece, _) in self.pieces.iter().enumerate().skip(next).take(depth).take_while(|(_, p)| p.image == image) {
            if matches!(state.slots.get(piece), Some(Slot::Missing)) {
                state.set(piece, Slot::Queued);
                state.queue.push_back(piece);
                self.changed.notify_all();
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics under the lock.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    fn set(&mut self, piece: usize, slot: Slot) {
        if let Some(place) = self.slots.get_mut(piece) {
            *place = slot;
        }
    }

    /// Takes a piece for oneself to make. Nobody else makes it.
    fn begin(&mut self, piece: usize) -> Vec<u8> {
        self.set(piece, Slot::InWork);
        self.spare.pop().unwrap_or_default()
    }

    /// A piece is made, and the oldest go where there are too many.
    fn ready(&mut self, piece: usize, made: Arc<Vec<u8>>) {
        self.set(piece, Slot::Ready(made));
        self.ready.push_back(piece);
        while self.ready.len() > READY {
            let Some(oldest) = self.ready.pop_front() else { return };
            let slot = self.slots.get_mut(oldest).map(std::mem::take);
            if let Some(Slot::Ready(made)) = slot {
                self.reuse(made);
            }
        }
    }

    fn reuse(&mut self, piece: Arc<Vec<u8>>) {
        if let Ok(room) = Arc::try_unwrap(piece) {
            self.spare.push(room);
        }
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::files;
    use crate::pack::{BLOCK_PAGES, Pack, PackWriter, Room, Sum};
    use crate::rebuild::Suspects;
    use crate::recipe::Run;

    /// Two memory images of one pack, with pages of zeros in the second, and one image of another kind; and the bytes
    /// of the first two.
    pub(crate) fn whole(directory: &std::path::Path, pages: u32) -> (Whole, Vec<u8>, Vec<u8>) {
        let page = |n: u32| {
            let mut page = vec![0; PAGE];
            blake3::Hasher::new()
                .update(&n.to_le_bytes())
                .finalize_xof()
                .fill(&mut page[..PAGE / (1 + n as usize % 2)]);
            page
        };
        let mut bytes = Vec::new();
        (0..pages).for_each(|n| bytes.extend_from_slice(&page(n)));
        let path = directory.join("new");
        let blocks = bytes.chunks(BLOCK_PAGES * PAGE);
        let writer = PackWriter::create(&path, blocks.len(), 1).unwrap();
        blocks.enumerate().for_each(|(n, block)| writer.put(n, block, &mut Room::default()).unwrap());
        let (name, _) = writer.finish(bytes.chunks(PAGE).map(Sum::of).collect()).unwrap();
        std::fs::rename(path, directory.join(name.file())).unwrap();
        let pack = Pack::open(files::open_directory(directory).unwrap(), name).unwrap();
        let run = |pack, first, count| Run { pack, first, count };
        let image = |name: &str, runs: Vec<Run>| {
            let size = runs.iter().map(|run| u64::from(run.count) * PAGE as u64).sum();
            Image { name: name.to_owned(), size, runs }
        };
        let second = vec![run(None, 0, 300), run(Some(0), 5, 40), run(None, 0, 2), run(Some(0), 0, 9)];
        let images = vec![
            image("core-1.img", vec![run(Some(0), 0, 1)]),
            image("pages-1.img", vec![run(Some(0), 3, pages - 3)]),
            image("pages-2.img", second),
        ];
        let first = bytes[3 * PAGE..].to_vec();
        let second =
            [&vec![0; 300 * PAGE][..], &bytes[5 * PAGE..45 * PAGE], &[0; 2 * PAGE], &bytes[..9 * PAGE]].concat();
        let whole = Whole { name: "x".to_owned(), packs: vec![pack], images, suspects: Suspects::default() };
        (whole, first, second)
    }

    fn read(ahead: &Ahead<'_>, image: usize, offset: usize, size: usize) -> Option<Vec<u8>> {
        let parts = ahead.read(image, offset as u64, u32::try_from(size).unwrap(), &mut Blocks::default())?;
        let mut bytes = Vec::new();
        parts.iter().for_each(|part| bytes.extend_from_slice(part.bytes()));
        ahead.give_back(parts);
        Some(bytes)
    }

    #[test]
    fn what_is_read_in_any_order_and_by_many_is_the_image() {
        let directory = tempfile::tempdir().unwrap();
        // More than lies ready at a time.
        let (whole, first, second) = whole(directory.path(), 20_000);
        let wanted = || Ok(());
        let ahead = Ahead::new(&whole, &wanted);
        assert_eq!((ahead.find(b"pages-2.img"), ahead.find(b"core-1.img")), (Some(1), None));
        std::thread::scope(|scope| {
            (0..2).for_each(|_| drop(scope.spawn(|| ahead.run())));
            let readers: Vec<_> =
                [(0, &first, 1 << 20), (0, &first, 700_000), (1, &second, 4096), (1, &second, 1 << 18)]
                    .into_iter()
                    .map(|(image, bytes, size)| {
                        let ahead = &ahead;
                        scope.spawn(move || {
                            ahead.opened();
                            for at in (0..bytes.len()).step_by(size) {
                                let end = bytes.len().min(at + size);
                                assert!(read(ahead, image, at, size).unwrap() == bytes[at..end], "{image} at {at}");
                            }
                            ahead.closed();
                        })
                    })
                    .collect();
            readers.into_iter().for_each(|reader| reader.join().unwrap());
            for at in [0, 60_000_000, 5000, 60_000_001, 81_000_000] {
                let end = first.len().min(at + 100_000);
                assert!(read(&ahead, 0, at, 100_000).unwrap() == first[at..end], "at {at}");
            }
            assert_eq!(read(&ahead, 0, first.len(), 10), Some(Vec::new()));
            ahead.stop();
        });
        assert!(ahead.end().is_none());
    }

    #[test]
    fn after_a_damaged_block_nothing_is_given_out() {
        let directory = tempfile::tempdir().unwrap();
        let (whole, first, _) = whole(directory.path(), 4000);
        let path = directory.path().join(whole.packs[0].name().file());
        let mut torn = std::fs::read(&path).unwrap();
        let at = torn.len() / 2;
        torn[at] ^= 1;
        // In place: the pack is open.
        std::fs::write(&path, torn).unwrap();
        let wanted = || Ok(());
        let ahead = Ahead::new(&whole, &wanted);
        let mut at = 0;
        while let Some(bytes) = read(&ahead, 0, at, 1 << 20) {
            assert!(bytes == first[at..at + bytes.len()]);
            at += bytes.len();
        }
        assert!((1 << 20..first.len()).contains(&at), "{at}");
        assert!(read(&ahead, 0, 0, 4096).is_none());
        assert_eq!(ahead.end().unwrap().kind(), ErrorKind::Corrupt);
        assert!(whole.suspects.lock().unwrap().contains(&whole.packs[0].name()));
    }

    #[test]
    fn it_ends_when_nobody_wants_it_any_more() {
        let directory = tempfile::tempdir().unwrap();
        let (whole, ..) = whole(directory.path(), 400);
        let gone = || Err(Error::new(ErrorKind::Cancelled, "gone"));
        let ahead = Ahead::new(&whole, &gone);
        ahead.run();
        assert!(read(&ahead, 0, 0, 10).is_none());
        assert_eq!(ahead.end().unwrap().kind(), ErrorKind::Cancelled);
    }
}
