//! One CRIU process and the conversation with it: `criu swrk FD` over a SEQPACKET socket pair.

use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crab_core::{Error, ErrorKind, Result};
use prost::Message;
use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType};
use rustix::process::{Pid, PidfdFlags};

use crate::cgroup::timespec;
use crate::program::PATH;
use crate::proto::{Kind, Options, Request, Response};
use crate::sys::{self, Surroundings};

/// CRIU gets this long to end by itself after its last word.
const GRACE: Duration = Duration::from_secs(10);

/// How the conversation broke off.
#[derive(Debug)]
pub(crate) enum Broken {
    /// The deadline passed.
    TimedOut,
    /// CRIU ended without an answer.
    Ended,
    /// The socket or the message.
    Io(std::io::Error),
}

impl Broken {
    /// An error of Crab; `what` was being done.
    pub(crate) fn into_error(self, what: &str) -> Error {
        match self {
            Self::TimedOut => Error::new(ErrorKind::TimedOut, format!("{what}: CRIU was not done by the deadline")),
            Self::Ended => Error::new(ErrorKind::Io, format!("{what}: CRIU ended in the middle")),
            Self::Io(source) => Error::io("talk to CRIU", source).while_doing(what),
        }
    }
}

/// A running CRIU. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Swrk {
    child: Child,
    /// Tells when it has ended. The socket does not: tasks that it was restoring may hold that too.
    end: OwnedFd,
    socket: OwnedFd,
    deadline: Option<Instant>,
}

impl Swrk {
    /// Starts CRIU; it waits for a request.
    pub(crate) fn start(binary: &Path, mut surroundings: Surroundings, deadline: Option<Instant>) -> Result<Self> {
        let failed = |e: std::io::Error| Error::io(format!("start {}", binary.display()), e);
        let (socket, theirs) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
                .map_err(|e| failed(e.into()))?;
        let mut command = Command::new(binary);
        command
            .arg("swrk")
            .arg(theirs.as_raw_fd().to_string())
            // Its configuration files and variables are for its command line; here every option is given.
            .env_clear()
            .env("PATH", PATH)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        surroundings.keep.push(theirs);
        let mut child = sys::spawn(command, surroundings).map_err(failed)?;
        let end = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH);
        match end.and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty())) {
            Ok(end) => Ok(Self { child, end, socket, deadline }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(failed(error.into()))
            }
        }
    }

    /// CRIU's process.
    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Asks for something.
    pub(crate) fn ask(&self, kind: Kind, opts: Option<Options>) -> Result<(), Broken> {
        self.send(&Request { kind: kind.into(), opts, notify_success: None })
    }

    /// Answers a notification. On a failure CRIU cleans up by itself, and gets time for that.
    pub(crate) fn answer(&mut self, success: bool) -> Result<(), Broken> {
        if !success {
            self.give_grace();
        }
        self.send(&Request { kind: Kind::Notify.into(), opts: None, notify_success: Some(success) })
    }

    /// Gives CRIU time to clean up, where the deadline does not.
    pub(crate) fn give_grace(&mut self) {
        self.deadline = self.deadline.map(|deadline| deadline.max(Instant::now() + GRACE));
    }

    /// Keeps the kernel from ending it where memory is short.
    pub(crate) fn shield_from_oom(&self) {
        // Without the right to it the kernel's choice stays as it is.
        let _ = std::fs::write(format!("/proc/{}/oom_score_adj", self.pid()), "-1000");
    }

    fn send(&self, request: &Request) -> Result<(), Broken> {
        match rustix::net::send(&self.socket, &request.encode_to_vec(), SendFlags::NOSIGNAL) {
            Ok(_) => Ok(()),
            Err(Errno::PIPE | Errno::CONNRESET) => Err(Broken::Ended),
            Err(error) => Err(Broken::Io(error.into())),
        }
    }

    /// Waits for the next message, until the deadline.
    pub(crate) fn hear(&self) -> Result<Response, Broken> {
        loop {
            let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Err(Broken::TimedOut);
            }
            let mut wanted = [PollFd::new(&self.socket, PollFlags::IN), PollFd::new(&self.end, PollFlags::IN)];
            match rustix::event::poll(&mut wanted, left.map(timespec).as_ref()) {
                Ok(0) | Err(Errno::INTR) => continue,
                // Its last word first.
                Ok(_) if wanted[0].revents().is_empty() => return Err(Broken::Ended),
                Ok(_) => {}
                Err(error) => return Err(Broken::Io(error.into())),
            }
            let mut buffer = vec![0_u8; 64 << 10];
            return match rustix::net::recv(&self.socket, &mut buffer[..], RecvFlags::TRUNC) {
                Ok((_, 0)) | Err(Errno::CONNRESET) => Err(Broken::Ended),
                Ok((_, length)) => {
                    let bytes = buffer.get(..length).ok_or_else(|| invalid("a message of CRIU is too long"))?;
                    Response::decode(bytes).map_err(|e| invalid(&format!("a message of CRIU cannot be read: {e}")))
                }
                Err(Errno::INTR) => continue,
                Err(error) => Err(Broken::Io(error.into())),
            };
        }
    }

    /// Waits until CRIU has ended after its last word; kills it where it does not.
    pub(crate) fn finish(mut self) -> std::io::Result<ExitStatus> {
        let end = Instant::now() + GRACE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let mut wanted = [PollFd::new(&self.end, PollFlags::IN)];
            match rustix::event::poll(&mut wanted, Some(&timespec(left))) {
                Err(Errno::INTR) => continue,
                Ok(0) | Err(_) => self.child.kill()?,
                Ok(_) => {}
            }
            return self.child.wait();
        }
    }
}

impl Drop for Swrk {
    fn drop(&mut self) {
        // Both do nothing to a child that was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn invalid(what: &str) -> Broken {
    Broken::Io(std::io::Error::new(std::io::ErrorKind::InvalidData, what))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_program_that_ends_is_told_from_one_that_is_slow() {
        let ended = Swrk::start(Path::new("/bin/true"), Surroundings::default(), None).unwrap();
        assert!(matches!(ended.hear(), Err(Broken::Ended)));
        let missing = Swrk::start(Path::new("/no/such/criu"), Surroundings::default(), None).unwrap_err();
        assert_eq!(missing.kind(), ErrorKind::NotFound);
    }
}
