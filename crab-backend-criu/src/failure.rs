//! Why CRIU failed, from its log.

use std::fmt;
use std::path::{Path, PathBuf};

use crab_core::{Error, ErrorKind};

/// Why CRIU failed, as far as its log tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Cause {
    /// A live TCP connection, and connections are refused.
    Connection,
    /// A socket whose other end is outside the sandbox.
    ExternalSocket,
    /// A file that is deleted, open and too large to be put into the image.
    DeletedFile,
    /// A file that is open under a name that it no longer has.
    RenamedFile,
    /// A file lock, and locks are refused.
    FileLock,
    /// A kind of descriptor, socket, device or mount that CRIU cannot save.
    Unsupported,
    /// A terminal or mount that belongs to the host.
    HostResource,
    /// A file is not as it was when the image was made: the filesystem of another moment.
    FileChanged,
    /// A number or name that the image needs is taken, such as an address.
    Taken,
    /// No space was left for the images.
    NoSpace,
    /// A right is missing.
    Permission,
    /// Something else: the message is CRIU's own.
    Other,
}

impl Cause {
    /// What an operator or the sandbox's user can do, where something can be done.
    fn remedy(self) -> Option<&'static str> {
        match self {
            Self::Connection => Some("close the connection, or let the backend keep connections"),
            Self::ExternalSocket => Some("give the sandbox no sockets of the host"),
            Self::DeletedFile => Some("close the deleted file in the sandbox"),
            Self::FileLock => Some("release the lock, or let the backend keep locks"),
            Self::RenamedFile => Some("close the renamed or unlinked file in the sandbox"),
            Self::HostResource => Some("give the sandbox its own terminals and mounts"),
            Self::FileChanged => Some("restore the filesystem of the same version first"),
            Self::NoSpace => Some("free space where captures and images go"),
            Self::Permission => Some("run as root"),
            Self::Unsupported | Self::Taken | Self::Other => None,
        }
    }
}

/// Texts that tell a cause, in lower case, the more particular first.
const TELLING: &[(&str, Cause)] = &[
    ("no space left on device", Cause::NoSpace),
    ("consider using --tcp-established", Cause::Connection),
    ("connected tcp socket", Cause::Connection),
    ("external socket is used", Cause::ExternalSocket),
    ("unix socket with external peer", Cause::ExternalSocket),
    ("external stream not supported", Cause::ExternalSocket),
    ("consider increasing the limit (--ghost-limit", Cause::DeletedFile),
    ("can't dump ghost file", Cause::DeletedFile),
    ("--link-remap", Cause::RenamedFile),
    ("--file-locks", Cause::FileLock),
    ("has bad size", Cause::FileChanged),
    ("has bad mode", Cause::FileChanged),
    ("has bad build-id", Cause::FileChanged),
    ("build-id", Cause::FileChanged),
    ("can't open file", Cause::FileChanged),
    ("address already in use", Cause::Taken),
    ("pid mismatch", Cause::Taken),
    ("file exists", Cause::Taken),
    ("--shell-job", Cause::HostResource),
    ("stdin/stdout/stderr is a tty", Cause::HostResource),
    ("doesn't have a proper root mount", Cause::HostResource),
    ("mount is unreachable", Cause::HostResource),
    ("unsupported", Cause::Unsupported),
    ("not supported", Cause::Unsupported),
    ("can't dump", Cause::Unsupported),
    ("can't lookup mount", Cause::HostResource),
    ("don't know how to dump", Cause::Unsupported),
    ("unknown file descriptor", Cause::Unsupported),
    ("operation not permitted", Cause::Permission),
];

/// Lines that stand in the log of successful runs too, or only say that something failed before.
const NOISE: &[&str] = &[
    "iptables-save",
    "ip6tables-save",
    "iptables-restore",
    "nftables",
    "rlimit_nofile",
    "rlim_nofile",
    "dumping failed",
    "restoring failed",
    "rpc client reported script error",
    "dump files (pid:",
    "collect mappings (pid:",
    "can't keep kdat cache",
    "kerndat_save_cache",
];

/// CRIU failed. The source of the [`crab_core::Error`] that a call returned, for a program to match on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CriuFailure {
    cause: Cause,
    message: String,
    log: Option<PathBuf>,
}

impl CriuFailure {
    /// Reads a log.
    pub(crate) fn from_log(text: &str) -> Self {
        let lines: Vec<&str> = text.lines().filter_map(error_text).collect();
        let told = lines.iter().find_map(|line| {
            let lower = line.to_ascii_lowercase();
            TELLING.iter().find(|(sign, _)| lower.contains(sign)).map(|(_, cause)| (*cause, *line))
        });
        match (told, lines.first()) {
            (Some((cause, line)), Some(first)) if line == *first => Self::new(cause, line.to_owned()),
            (Some((cause, line)), Some(first)) => Self::new(cause, format!("{first}; {line}")),
            (None, Some(first)) => Self::new(Cause::Other, (*first).to_owned()),
            (_, None) => Self::new(Cause::Other, "CRIU gave no reason".to_owned()),
        }
    }

    fn new(cause: Cause, mut message: String) -> Self {
        // Process names and paths of the sandbox stand in it.
        message.retain(|c| !c.is_control());
        if let Some((end, _)) = message.char_indices().nth(400) {
            message.truncate(end);
        }
        Self { cause, message, log: None }
    }

    /// Says where the whole log is kept.
    pub(crate) fn kept_at(mut self, log: Option<PathBuf>) -> Self {
        self.log = log;
        self
    }

    /// The cause.
    #[must_use]
    pub fn cause(&self) -> Cause {
        self.cause
    }

    /// CRIU's first telling message.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.message
    }

    /// Where the whole log is kept.
    #[must_use]
    pub fn log(&self) -> Option<&Path> {
        self.log.as_deref()
    }

    /// An error of Crab that says what failed.
    pub(crate) fn into_error(self, what: &str, otherwise: ErrorKind) -> Error {
        let kind = match self.cause {
            Cause::NoSpace => ErrorKind::Full,
            Cause::Permission => ErrorKind::Unsupported,
            Cause::FileChanged => ErrorKind::Corrupt,
            Cause::Taken => ErrorKind::Busy,
            Cause::Other => otherwise,
            Cause::Connection
            | Cause::ExternalSocket
            | Cause::DeletedFile
            | Cause::RenamedFile
            | Cause::FileLock
            | Cause::Unsupported
            | Cause::HostResource => ErrorKind::NotCheckpointable,
        };
        let remedy = self.cause.remedy();
        let error = Error::new(kind, what).caused_by(self);
        match remedy {
            Some(remedy) => error.fix(remedy),
            None => error,
        }
    }
}

impl fmt::Display for CriuFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)?;
        match &self.log {
            Some(log) => write!(f, " [log: {}]", log.display()),
            None => Ok(()),
        }
    }
}

impl std::error::Error for CriuFailure {}

/// The text of an error line that may tell something: `(00.123)    12: Error (criu/files.c:1): text`.
fn error_text(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once("Error (")?;
    let (_, text) = rest.split_once("): ")?;
    let text = text.trim();
    let lower = text.to_ascii_lowercase();
    (!text.is_empty() && !NOISE.iter().any(|noise| lower.contains(noise))).then_some(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_telling_line_is_found_behind_noise() {
        let log = "(00.01) Error (criu/util.c:1): execvp(\"iptables-save\", ...) failed: No such file\n\
                   (00.02) Warn  (criu/x.c:1): something\n\
                   (00.03) Error (criu/sk-inet.c:188): inet: Connected TCP socket, consider using --tcp-established option.\n\
                   (00.04) Error (criu/cr-dump.c:1781): Dump files (pid: 7) failed with -1\n\
                   (00.05) Error (criu/cr-dump.c:2128): Dumping FAILED.\n";
        let failure = CriuFailure::from_log(log);
        assert_eq!(failure.cause(), Cause::Connection);
        assert!(failure.message().starts_with("inet: Connected TCP socket"), "{failure}");
        let error = failure.into_error("the dump failed", ErrorKind::Io);
        assert_eq!(error.kind(), ErrorKind::NotCheckpointable);
    }

    #[test]
    fn the_first_line_stands_beside_the_telling_one() {
        let log =
            "(00.03) 1: Error (criu/a.c:1): first\n(00.04) Error (criu/b.c:2): Can't write: No space left on device\n";
        let failure = CriuFailure::from_log(log);
        assert_eq!(failure.cause(), Cause::NoSpace);
        assert_eq!(failure.message(), "first; Can't write: No space left on device");
        assert_eq!(CriuFailure::from_log("").cause(), Cause::Other);
    }

    proptest! {
        #[test]
        fn no_log_makes_the_reader_panic(text in "(Error \\(|\\): |no space left|\\PC|\n){0,40}") {
            let failure = CriuFailure::from_log(&text);
            prop_assert!(failure.message().chars().count() <= 400);
        }
    }
}
