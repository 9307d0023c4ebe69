//! Sending a subvolume: the kernel writes into a pipe, on a thread of its own.

pub(crate) mod makes_first;
pub(crate) mod stream;

use std::fs;
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::thread::{self, JoinHandle};

use crab_core::{Error, ErrorKind, Result};
use rustix::io::Errno;

use crate::failure;
use crate::ioctl::{self, SendOptions};

/// Room in the pipe, so that the kernel need not wait for each piece to be read.
const PIPE: usize = 1 << 20;

/// A subvolume that is being sent. Reading it blocks. Dropping it ends the work behind it.
#[derive(Debug)]
pub(crate) struct Sending {
    pipe: io::PipeReader,
    thread: Option<JoinHandle<Result<(), Errno>>>,
}

impl Sending {
    /// Begins to send the read-only subvolume whose root `snapshot` is.
    pub(crate) fn start(snapshot: OwnedFd, options: SendOptions) -> Result<Self> {
        let failed = |error| Error::io("make a pipe to send a subvolume through", error);
        let (reader, writer) = io::pipe().map_err(failed)?;
        // A smaller one does too.
        let _ = rustix::pipe::fcntl_setpipe_size(&writer, PIPE);
        let send = move || ioctl::send(snapshot, writer.as_fd(), options);
        let thread = thread::Builder::new()
            .name("crab-btrfs-send".to_owned())
            .spawn(send)
            .map_err(|error| Error::io("start a thread to send a subvolume", error))?;
        Ok(Self { pipe: reader, thread: Some(thread) })
    }

    /// To be called when the stream was read to its end, or an error ended the reading: gives the reason that the
    /// kernel has, which is better than that the stream ends early.
    pub(crate) fn finish(mut self, path: &Path) -> Result<()> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        drop(self.pipe);
        match thread.join() {
            // Nobody wanted the rest.
            Ok(Ok(()) | Err(Errno::PIPE)) => Ok(()),
            Ok(Err(Errno::PERM | Errno::ROFS)) => {
                let message = format!("{} cannot be sent: it must be read-only", path.display());
                Err(Error::new(ErrorKind::Corrupt, message))
            }
            Ok(Err(errno)) => Err(failure::at("send the subvolume", path)(errno)),
            Err(_) => Err(Error::new(ErrorKind::Internal, "the thread that sends a subvolume panicked")),
        }
    }
}

impl Read for Sending {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.pipe.read(buffer)
    }
}

/// The newest version of the stream that both the kernel and this crate know.
pub(crate) fn version() -> u32 {
    // A kernel that does not say knows the first one only.
    let text = fs::read_to_string("/sys/fs/btrfs/features/send_stream_version").unwrap_or_default();
    text.trim().parse().unwrap_or(1).clamp(1, stream::NEWEST)
}
