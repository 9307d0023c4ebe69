//! An exported version as bytes: ZFS's own stream in frames, each of which is checked before ZFS sees it.
//!
//! ```text
//! "CRABZFS2"  the guid of the base or 0 (u64)  the guid of the version (u64)  1 where the blocks are encrypted, else 0 (u64)
//!             where it begins: the object (u64) and the offset in it (u64), or 0 and 0
//! frames:     the count of bytes (u32)  SHA-256 of the hash before and the bytes  the bytes
//! the end:    a count of 0              SHA-256 of the hash before
//! ```
//!
//! Numbers are little-endian. The first hash is over the beginning, so a stream cannot be cut, mixed or lengthened
//! without notice.

use crab_core::{ByteStream, Error, ErrorKind, Result};
use sha2::{Digest, Sha256};

const MAGIC: &[u8; 8] = b"CRABZFS2";
const BEGINNING: usize = 48;
const HEAD: usize = 4 + HASH;
const HASH: usize = 32;
/// The most bytes of one frame that are believed.
const LARGEST: usize = 4 << 20;

/// Which version a stream holds, and on top of which.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Beginning {
    /// The guid of the base; `None` for all of a version.
    pub(crate) base: Option<u64>,
    /// The guid of the version.
    pub(crate) version: u64,
    /// Its blocks are as they are on an encrypted disk.
    pub(crate) raw: bool,
    /// It begins at this object and offset, where another stream of the version broke off; `None` for the beginning.
    pub(crate) from: Option<(u64, u64)>,
}

/// Puts a stream into frames.
pub(crate) struct Writer {
    hash: [u8; HASH],
}

impl Writer {
    /// Begins a stream; gives its first bytes.
    pub(crate) fn begin(beginning: Beginning) -> (Self, Vec<u8>) {
        let mut bytes = MAGIC.to_vec();
        bytes.extend(beginning.base.unwrap_or(0).to_le_bytes());
        bytes.extend(beginning.version.to_le_bytes());
        bytes.extend(u64::from(beginning.raw).to_le_bytes());
        let (object, offset) = beginning.from.unwrap_or((0, 0));
        bytes.extend(object.to_le_bytes());
        bytes.extend(offset.to_le_bytes());
        (Self { hash: Sha256::digest(&bytes).into() }, bytes)
    }

    /// One frame of at most 4 MiB, which must not be empty.
    pub(crate) fn frame(&mut self, data: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(HEAD + data.len());
        // Larger than what is read at once by far.
        bytes.extend(u32::try_from(data.len()).unwrap_or(u32::MAX).to_le_bytes());
        self.hash = next(&self.hash, data);
        bytes.extend(self.hash);
        bytes.extend_from_slice(data);
        bytes
    }

    /// The end.
    pub(crate) fn end(mut self) -> Vec<u8> {
        self.frame(&[])
    }
}

fn next(hash: &[u8; HASH], data: &[u8]) -> [u8; HASH] {
    Sha256::new().chain_update(hash).chain_update(data).finalize().into()
}

/// Takes a stream out of its frames.
pub(crate) struct Reader<'a> {
    stream: &'a mut dyn ByteStream,
    /// What was read and not taken out yet.
    buffer: Vec<u8>,
    hash: [u8; HASH],
}

impl<'a> Reader<'a> {
    /// Reads the beginning. It is checked with the first frame.
    pub(crate) async fn begin(stream: &'a mut dyn ByteStream) -> Result<(Self, Beginning)> {
        let mut this = Self { stream, buffer: Vec::new(), hash: [0; HASH] };
        this.fill(BEGINNING).await?;
        let beginning: Vec<u8> = this.buffer.drain(..BEGINNING).collect();
        if !beginning.starts_with(MAGIC) {
            return Err(corrupt("is not one of this backend's"));
        }
        let number = |at: usize| {
            let mut bytes = [0; 8];
            bytes.copy_from_slice(&beginning[at..at + 8]);
            u64::from_le_bytes(bytes)
        };
        this.hash = Sha256::digest(&beginning).into();
        let base = Some(number(8)).filter(|guid| *guid != 0);
        let from = Some((number(32), number(40))).filter(|(object, _)| *object != 0);
        Ok((this, Beginning { base, version: number(16), raw: number(24) != 0, from }))
    }

    /// The bytes of the next frame; `None` at the end, after which nothing may follow.
    pub(crate) async fn frame(&mut self) -> Result<Option<Vec<u8>>> {
        self.fill(HEAD).await?;
        let mut count = [0; 4];
        count.copy_from_slice(&self.buffer[..4]);
        let count = u32::from_le_bytes(count) as usize;
        if count > LARGEST {
            return Err(corrupt("is damaged"));
        }
        self.fill(HEAD + count).await?;
        let frame: Vec<u8> = self.buffer.drain(..HEAD + count).collect();
        self.hash = next(&self.hash, &frame[HEAD..]);
        if self.hash != frame[4..HEAD] {
            return Err(corrupt("is damaged"));
        }
        if count > 0 {
            return Ok(Some(frame[HEAD..].to_vec()));
        }
        if !self.buffer.is_empty() || self.stream.next().await?.is_some() {
            return Err(corrupt("goes on after its end"));
        }
        Ok(None)
    }

    async fn fill(&mut self, count: usize) -> Result<()> {
        while self.buffer.len() < count {
            match self.stream.next().await? {
                Some(piece) => self.buffer.extend(piece),
                None => return Err(corrupt("ends early")),
            }
        }
        Ok(())
    }
}

pub(crate) fn corrupt(why: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the stream {why}"))
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use async_trait::async_trait;
    use proptest::prelude::*;

    use super::*;

    struct Pieces(VecDeque<Vec<u8>>);

    #[async_trait]
    impl ByteStream for Pieces {
        async fn next(&mut self) -> Result<Option<Vec<u8>>> {
            Ok(self.0.pop_front())
        }
    }

    fn written(beginning: Beginning, frames: &[Vec<u8>]) -> Vec<u8> {
        let (mut writer, mut bytes) = Writer::begin(beginning);
        for frame in frames {
            bytes.extend(writer.frame(frame));
        }
        bytes.extend(writer.end());
        bytes
    }

    fn read(bytes: &[u8], piece: usize) -> Result<(Beginning, Vec<Vec<u8>>)> {
        let mut pieces = Pieces(bytes.chunks(piece).map(<[u8]>::to_vec).collect());
        let read = async {
            let (mut reader, beginning) = Reader::begin(&mut pieces).await?;
            let mut frames = Vec::new();
            while let Some(frame) = reader.frame().await? {
                frames.push(frame);
            }
            Ok((beginning, frames))
        };
        tokio::runtime::Builder::new_current_thread().build().unwrap().block_on(read)
    }

    proptest! {
        #[test]
        fn what_was_written_is_read_however_it_arrives(
            base: Option<u64>, version: u64, raw: bool, from: Option<(u64, u64)>, piece in 1..90_usize,
            frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..60), 0..6),
        ) {
            let beginning = Beginning { base: base.filter(|guid| *guid != 0), version, raw, from: from.filter(|(object, _)| *object != 0) };
            let bytes = written(beginning, &frames);
            prop_assert_eq!(read(&bytes, piece).unwrap(), (beginning, frames));
        }

        #[test]
        fn every_damage_is_seen(bit in 0..8_u32, frames in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..9), 1..4)) {
            let bytes = written(Beginning { base: None, version: 7, raw: false, from: None }, &frames);
            for at in 0..bytes.len() {
                let mut damaged = bytes.clone();
                damaged[at] ^= 1 << bit;
                prop_assert_eq!(read(&damaged, 13).unwrap_err().kind(), ErrorKind::Corrupt);
                prop_assert_eq!(read(&bytes[..at], 13).unwrap_err().kind(), ErrorKind::Corrupt);
            }
            prop_assert_eq!(read(&[&bytes[..], b"x"].concat(), 13).unwrap_err().kind(), ErrorKind::Corrupt);
        }

        #[test]
        fn no_bytes_make_the_reader_panic(bytes: Vec<u8>) {
            let _ = read(&bytes, 5);
            let _ = read(&[&MAGIC[..], &bytes].concat(), 5);
        }
    }
}
