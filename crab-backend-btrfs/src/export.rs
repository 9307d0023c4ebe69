//! An artifact as a stream of bytes: what btrfs sends, then how long that was and its checksum.
//!
//! The stream of btrfs guards each command by a checksum; what follows it tells a whole stream from one that lacks
//! commands. What the stream makes comes [first](crate::send::makes_first).

use std::os::fd::OwnedFd;
use std::path::PathBuf;

use async_trait::async_trait;
use crab_backend_files::blocking;
use crab_core::{ByteStream, Error, ErrorKind, Result};
use tokio::sync::mpsc::{Receiver, Sender, channel};

use crate::crc32c;
use crate::ioctl::SendOptions;
use crate::send::makes_first::{Makes, MakesFirst};
use crate::send::{self, Sending};

/// How much goes from the reading thread to the caller at once.
const PIECE: usize = 256 << 10;
const PIECES: usize = 4;

/// What stands behind the stream of btrfs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Trailer {
    /// Bytes before the trailer.
    pub(crate) length: u64,
    /// Their checksum.
    pub(crate) crc: u32,
}

impl Trailer {
    pub(crate) const LENGTH: usize = 20;
    const MAGIC: &[u8; 8] = b"crab-end";

    /// What stands behind nothing.
    pub(crate) fn empty() -> Self {
        Self { length: 0, crc: !0 }
    }

    pub(crate) fn add(&mut self, bytes: &[u8]) {
        self.length += bytes.len() as u64;
        self.crc = crc32c::update(self.crc, bytes);
    }

    pub(crate) fn to_bytes(self) -> Vec<u8> {
        [&Self::MAGIC[..], &self.length.to_le_bytes(), &self.crc.to_le_bytes()].concat()
    }
}

/// A read-only subvolume that is to be sent.
#[derive(Debug)]
pub(crate) struct Export {
    pub(crate) root: OwnedFd,
    pub(crate) path: PathBuf,
    /// The number of the subvolume that the receiver has; 0 for none.
    pub(crate) base: u64,
}

/// Begins to send.
pub(crate) fn start(export: Export) -> Result<Box<dyn ByteStream>> {
    let version = send::version();
    // Compressed data is sent as what comes out of it. The kernel would send it as it is stored, but does not take every
    // such piece back: not one that begins within a sector, or ends within one before the file's end.
    let options = SendOptions { parent: export.base, without_data: false, version };
    let again = export.root.try_clone().map_err(|error| Error::io("open a subvolume once more", error))?;
    let outline = Sending::start(again, SendOptions { without_data: true, ..options })?;
    let sending = Sending::start(export.root, options)?;
    let (sender, receiver) = channel(PIECES);
    blocking::later(move || {
        if let Err(error) = pump(outline, sending, &export.path, &sender) {
            // Where nobody wants it any more, nobody wants the reason.
            let _ = sender.blocking_send(Err(error));
        }
    });
    Ok(Box::new(Exported { receiver, ended: false }))
}

/// Gives all pieces to the channel, as long as somebody wants them.
fn pump(
    mut outline: Sending,
    mut sending: Sending,
    path: &std::path::Path,
    sender: &Sender<Result<Vec<u8>>>,
) -> Result<()> {
    // The kernel's own reason is better than that the stream ends early.
    let makes = match (Makes::of(&mut outline), outline.finish(path)) {
        (_, Err(error)) => return Err(error),
        (makes, Ok(())) => makes?,
    };
    let mut trailer = Trailer::empty();
    let give = || {
        let mut stream = MakesFirst::begin(&mut sending, makes)?;
        loop {
            let piece = stream.piece(PIECE)?;
            trailer.add(&piece);
            if piece.is_empty() || sender.blocking_send(Ok(piece)).is_err() {
                return Ok(());
            }
        }
    };
    match (give(), sending.finish(path)) {
        (_, Err(error)) | (Err(error), _) => return Err(error),
        _ => {}
    }
    // An empty piece tells the end from a thread that broke off.
    for last in [trailer.to_bytes(), Vec::new()] {
        let _ = sender.blocking_send(Ok(last));
    }
    Ok(())
}

struct Exported {
    receiver: Receiver<Result<Vec<u8>>>,
    ended: bool,
}

#[async_trait]
impl ByteStream for Exported {
    async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        if self.ended {
            return Ok(None);
        }
        let piece =
            self.receiver.recv().await.unwrap_or_else(|| {
                Err(Error::new(ErrorKind::Internal, "the thread that sends a subvolume broke off"))
            })?;
        self.ended = piece.is_empty();
        Ok((!self.ended).then_some(piece))
    }
}
