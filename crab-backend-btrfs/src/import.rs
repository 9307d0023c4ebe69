//! Making an artifact of a stream.
//!
//! ```text
//! 1  an empty subvolume, or a clone of the base         .import-ARTIFACT
//! 2  every command of the stream is done in it; what is made gets the inode number that it had
//! 3  the end of the stream is checked
//! 4  a read-only snapshot of it, under the name of a capture
//! 5  that is persisted as a capture is, and the subvolume is removed
//! ```
//!
//! Nothing before the last step is an artifact, and what is left after a crash is removed by its name.

#[cfg(test)]
mod tests;

use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::sync::{Arc, Weak};

use crab_backend_files::Snapshot;
use crab_core::{Artifact, ArtifactId, Error, ErrorKind, Result, SandboxId};
use tokio::sync::mpsc::Receiver;

use crate::capture::{Staged, Unfinished};
use crate::export::Trailer;
use crate::receive::Receiving;
use crate::send::stream::{self, Command, Commands};
use crate::subvolume::{self, Uuid};
use crate::versions::{Versions, capture_name, import_name};
use crate::{failure, ioctl};

/// A part of a stream on its way to the thread that works it off.
pub(crate) enum Part {
    Piece(Vec<u8>),
    /// All of it was given.
    End,
}

/// The stream as it comes in, with the checksum of what was read of it.
struct Incoming {
    parts: Receiver<Part>,
    piece: Vec<u8>,
    at: usize,
    ended: bool,
    sum: Trailer,
}

impl Read for Incoming {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.at == self.piece.len() && !self.ended {
            match self.parts.blocking_recv() {
                Some(Part::Piece(piece)) => (self.piece, self.at) = (piece, 0),
                Some(Part::End) => self.ended = true,
                None => return Err(io::Error::other("the import was given up")),
            }
        }
        let rest = &self.piece[self.at..];
        let count = rest.len().min(buffer.len());
        buffer[..count].copy_from_slice(&rest[..count]);
        self.sum.add(&rest[..count]);
        self.at += count;
        Ok(count)
    }
}

/// Makes the artifact. Blocks until the stream has ended and all is durable, or `wanted` is gone.
pub(crate) fn run(
    versions: &Arc<Versions>,
    sandbox: &SandboxId,
    artifact: ArtifactId,
    base: Option<&Artifact>,
    parts: Receiver<Part>,
    wanted: Weak<()>,
) -> Result<Artifact> {
    versions.require_free(sandbox, &artifact)?;
    let incoming = Incoming { parts, piece: Vec::new(), at: 0, ended: false, sum: Trailer::empty() };
    let mut commands = Commands::begin(incoming)?;
    let (uuid, transaction, base) = match commands.next()? {
        Command::Subvolume { uuid, transaction } => (uuid, transaction, None),
        Command::Snapshot { uuid, transaction, base: wanted } => {
            (uuid, transaction, Some((wanted, open_base(versions, base, wanted)?)))
        }
        _ => return Err(stream::damaged("does not begin with a subvolume")),
    };

    let (directory, staging) = stage(versions, sandbox, &artifact, base.as_ref().map(|(_, root)| root))?;
    let path = versions.directory(sandbox).join(import_name(&artifact));
    let root = subvolume::open(&path)?;
    let receive = || {
        let mut receiving = Receiving::new(&root, &path, uuid, base.as_ref().map(|(uuid, root)| (*uuid, root)), wanted);
        loop {
            match commands.next()? {
                Command::End => break,
                command => receiving.apply(&command)?,
            }
        }
        drop(receiving);
        check_end(commands.into_input())?;
        ioctl::set_received(&root, uuid.0, transaction).map_err(failure::at("mark what was received in", &path))?;

        let _locked = versions.lock(sandbox);
        versions.require_free(sandbox, &artifact)?;
        let name = capture_name(&artifact);
        // This writes out what the subvolume holds, and nothing of others.
        ioctl::create_snapshot(&directory, &name, &root, true).map_err(failure::at("take a snapshot of", &path))?;
        let info_path = versions.directory(sandbox).join(&name);
        let snapshot = Unfinished::new(versions, sandbox, name);
        let info = subvolume::info(&info_path)?;
        Ok(Staged::new(snapshot, artifact.clone(), info, None))
    };
    let received = receive().and_then(Staged::persist);
    drop(staging);
    if received.is_err() {
        let _locked = versions.lock(sandbox);
        versions.tidy(sandbox);
    }
    received
}

/// Opens the subvolume on which an incremental stream builds.
fn open_base(versions: &Versions, base: Option<&Artifact>, wanted: Uuid) -> Result<OwnedFd> {
    let bad = |message: String| Error::new(ErrorKind::InvalidInput, message).fix("name the artifact that it builds on");
    let Some(base) = base else {
        return Err(bad("the stream builds on another artifact, and none was named".to_owned()));
    };
    let (root, info) = versions.open_whole(base)?;
    if info.received_uuid.or(info.uuid) != Some(wanted) {
        return Err(bad(format!("the stream does not build on the artifact {}", base.id)));
    }
    Ok(root)
}

/// Makes the subvolume in which the commands are done.
fn stage(
    versions: &Arc<Versions>,
    sandbox: &SandboxId,
    artifact: &ArtifactId,
    base: Option<&OwnedFd>,
) -> Result<(OwnedFd, Unfinished)> {
    let _locked = versions.lock(sandbox);
    versions.require_free(sandbox, artifact)?;
    let directory = versions.make(sandbox)?;
    let name = import_name(artifact);
    let path = versions.directory(sandbox).join(&name);
    let made = match base {
        Some(base) => ioctl::create_snapshot(&directory, &name, base, false),
        None => ioctl::create_subvolume(&directory, &name),
    };
    if let Err(errno) = made {
        versions.tidy(sandbox);
        return Err(failure::at("create the subvolume", &path)(errno));
    }
    Ok((directory, Unfinished::new(versions, sandbox, name)))
}

/// Refuses a stream that lacks something, or holds more.
fn check_end(mut input: Incoming) -> Result<()> {
    let expected = input.sum.to_bytes();
    let mut trailer = [0; Trailer::LENGTH];
    match input.read_exact(&mut trailer) {
        Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Err(stream::damaged("ends early")),
        Err(error) => return Err(Error::io("read the end of a stream", error)),
        Ok(()) if trailer[..] != expected => return Err(stream::damaged("is not whole")),
        Ok(()) => {}
    }
    match input.read(&mut [0]) {
        Ok(0) => Ok(()),
        Ok(_) => Err(stream::damaged("goes on after its end")),
        Err(error) => Err(Error::io("read the end of a stream", error)),
    }
}
