//! A stream that makes everything first, in the order of inode numbers.
//!
//! Processes remember the inode numbers of their files, and SQLite refuses to write where they have changed. A file
//! system gives out numbers in the order in which things are made, but the kernel sends a directory early where
//! something older was moved into it. So what it makes is looked up in a stream without data, put in front in order, and
//! left out where it came: it gets names of its own until it is moved to its place, so the order is free.

use std::io::{BufReader, Read};

use crab_core::{Error, ErrorKind, Result};

use super::stream::{Raw, Step};

/// How much is read from the pipe at once.
const BUFFER: usize = 256 << 10;

/// The commands that make something, in the order of inode numbers.
#[derive(Debug)]
pub(crate) struct Makes {
    bytes: Vec<u8>,
    count: usize,
}

impl Makes {
    /// Takes them from a stream, which may be one without data.
    pub(crate) fn of(stream: impl Read) -> Result<Self> {
        let mut bytes = Vec::new();
        let mut raw = Raw::begin(BufReader::with_capacity(BUFFER, stream), &mut bytes)?;
        let mut makes = Vec::new();
        loop {
            bytes.clear();
            match raw.next(&mut bytes)? {
                Step::Make { inode } => makes.push((inode, bytes.clone())),
                Step::End => break,
                Step::Other => {}
            }
        }
        makes.sort_unstable();
        Ok(Self { count: makes.len(), bytes: makes.into_iter().flat_map(|(_, bytes)| bytes).collect() })
    }
}

/// A stream, with what it makes in front.
pub(crate) struct MakesFirst<R: Read> {
    raw: Raw<BufReader<R>>,
    /// What is to be given next.
    ready: Vec<u8>,
    makes: Option<Makes>,
    /// How many commands are left that were given already.
    left: usize,
    ended: bool,
}

impl<R: Read> MakesFirst<R> {
    /// `makes` is of the same subvolume and the same base.
    pub(crate) fn begin(stream: R, makes: Makes) -> Result<Self> {
        let mut ready = Vec::new();
        let raw = Raw::begin(BufReader::with_capacity(BUFFER, stream), &mut ready)?;
        Ok(Self { raw, ready, left: makes.count, makes: Some(makes), ended: false })
    }

    /// The next piece, of about this size; an empty one is the end.
    pub(crate) fn piece(&mut self, size: usize) -> Result<Vec<u8>> {
        let mut piece = std::mem::take(&mut self.ready);
        while piece.len() < size && !self.ended {
            let begin = piece.len();
            match self.raw.next(&mut piece)? {
                Step::Make { .. } => {
                    piece.truncate(begin);
                    self.left = self.left.checked_sub(1).ok_or_else(another)?;
                }
                Step::End => self.ended = true,
                // The first command says what the stream is of.
                Step::Other => piece.extend(self.makes.take().map(|makes| makes.bytes).unwrap_or_default()),
            }
        }
        match self.ended && self.left > 0 {
            true => Err(another()),
            false => Ok(piece),
        }
    }
}

fn another() -> Error {
    Error::new(ErrorKind::Internal, "the kernel sent a subvolume in two ways that do not fit")
}
