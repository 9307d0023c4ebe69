//! The one error type: its kind, what to do about it, what condition the sandbox is in, and where it came from.

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use crate::host::Condition;

/// The result of every fallible call of Crab.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// What went wrong, for a program to match on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// A name, number or option that was given is not acceptable.
    InvalidInput,
    /// The named sandbox, version or artifact does not exist.
    NotFound,
    /// Something of that name exists already and is not ours to replace.
    AlreadyExists,
    /// Something holds the object: a running task, a mount, another engine.
    Busy,
    /// This host cannot do it: a tool, a kernel feature, a privilege is missing.
    Unsupported,
    /// The sandbox holds something that cannot be saved, such as an io_uring.
    NotCheckpointable,
    /// The sandbox has died: it had tasks and has none any more. Its state is that of its versions.
    Died,
    /// Stored data is not what was stored: a torn file, a wrong checksum, a missing part.
    Corrupt,
    /// A disk, a pool or a queue is full.
    Full,
    /// A quota is used up, while the disk may have room.
    OverQuota,
    /// A deadline passed.
    TimedOut,
    /// The call was cancelled before it had an effect.
    Cancelled,
    /// The store took a failed write to stable storage and accepts no more until it is opened anew.
    Poisoned,
    /// The operating system refused or failed.
    Io,
    /// A part of Crab or of a backend broke a rule of its contract.
    Internal,
}

impl ErrorKind {
    /// Whether there was no room: on the disk, or within a quota. Renaming and removing may still work.
    #[must_use]
    pub fn is_full(self) -> bool {
        matches!(self, Self::Full | Self::OverQuota)
    }
}

/// What the caller can do about an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Advice {
    /// The same call may succeed later.
    Retry,
    /// Somebody must change something first; the message says what.
    Fix,
    /// It will not succeed; carry on without.
    GiveUp,
}

/// An error of Crab: kind, message, advice, the condition that the sandbox was left in, and the source.
///
/// ```
/// use crab_core::{Advice, Condition, Error, ErrorKind};
///
/// let error = Error::new(ErrorKind::Unsupported, "no usable CRIU was found")
///     .fix("run `cargo xtask setup`")
///     .condition(Condition::Running);
/// assert_eq!(error.advice(), Advice::Fix);
/// assert_eq!(error.to_string(), "no usable CRIU was found; run `cargo xtask setup` (the sandbox is running)");
/// ```
///
/// Clones are cheap enough to give one failure to everybody who waited for the same work; they share the source.
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    message: String,
    advice: Option<Advice>,
    fix: Option<String>,
    condition: Option<Condition>,
    source: Option<Arc<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error of this kind. The advice is the kind's own until [`retry`](Self::retry), [`fix`](Self::fix) or
    /// [`give_up`](Self::give_up) says otherwise.
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self(Box::new(Inner { kind, message: message.into(), advice: None, fix: None, condition: None, source: None }))
    }

    /// An error of the operating system while doing `what`, for example `"open /x/y"`. A full disk becomes
    /// [`ErrorKind::Full`], a used-up quota [`ErrorKind::OverQuota`], a missing file [`ErrorKind::NotFound`], and so on.
    pub fn io(what: impl fmt::Display, source: std::io::Error) -> Self {
        use std::io::ErrorKind as Io;
        let kind = match source.kind() {
            Io::NotFound => ErrorKind::NotFound,
            Io::AlreadyExists => ErrorKind::AlreadyExists,
            Io::StorageFull => ErrorKind::Full,
            Io::QuotaExceeded => ErrorKind::OverQuota,
            Io::ResourceBusy => ErrorKind::Busy,
            Io::TimedOut => ErrorKind::TimedOut,
            Io::Unsupported => ErrorKind::Unsupported,
            _ => ErrorKind::Io,
        };
        let error = Self::new(kind, format!("cannot {what}")).caused_by(source);
        match kind {
            ErrorKind::Full => error.fix("free space; versions that exist are kept"),
            ErrorKind::OverQuota => error.fix("raise the quota or remove versions; those that exist are kept"),
            _ => error,
        }
    }

    /// Says that somebody must change something, and what: an imperative clause.
    #[must_use]
    pub fn fix(mut self, what: impl Into<String>) -> Self {
        self.0.advice = Some(Advice::Fix);
        self.0.fix = Some(what.into());
        self
    }

    /// Says that the same call may succeed later.
    #[must_use]
    pub fn retry(mut self) -> Self {
        self.0.advice = Some(Advice::Retry);
        self
    }

    /// Says that it will not succeed.
    #[must_use]
    pub fn give_up(mut self) -> Self {
        self.0.advice = Some(Advice::GiveUp);
        self
    }

    /// Says what condition the sandbox is in now.
    #[must_use]
    pub fn condition(mut self, condition: Condition) -> Self {
        self.0.condition = Some(condition);
        self
    }

    /// Names the cause.
    #[must_use]
    pub fn caused_by(mut self, source: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        self.0.source = Some(Arc::from(source.into()));
        self
    }

    /// Puts what was being done in front of the message.
    #[must_use]
    pub fn while_doing(mut self, what: impl fmt::Display) -> Self {
        self.0.message = format!("{what}: {}", self.0.message);
        self
    }

    /// What went wrong.
    #[must_use]
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What went wrong in words, without the cause, the remedy and the condition, which are told apart.
    #[must_use]
    pub fn message(&self) -> &str {
        &self.0.message
    }

    /// What the caller can do.
    #[must_use]
    pub fn advice(&self) -> Advice {
        self.0.advice.unwrap_or(match self.0.kind {
            ErrorKind::Busy | ErrorKind::TimedOut | ErrorKind::Cancelled | ErrorKind::Io => Advice::Retry,
            ErrorKind::InvalidInput
            | ErrorKind::AlreadyExists
            | ErrorKind::Unsupported
            | ErrorKind::Died
            | ErrorKind::Full
            | ErrorKind::OverQuota
            | ErrorKind::Poisoned => Advice::Fix,
            ErrorKind::NotFound | ErrorKind::NotCheckpointable | ErrorKind::Corrupt | ErrorKind::Internal => {
                Advice::GiveUp
            }
        })
    }

    /// What to change, where that is known.
    #[must_use]
    pub fn remedy(&self) -> Option<&str> {
        self.0.fix.as_deref()
    }

    /// The condition that the sandbox was left in, where the call concerned one and it is known.
    #[must_use]
    pub fn sandbox_condition(&self) -> Option<Condition> {
        self.0.condition
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.message)?;
        // The innermost reason is what a person needs; the chain stays available through `source`.
        let mut cause = self.0.source.as_deref().map(|s| s as &dyn StdError);
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            // Our own errors print their causes themselves.
            cause = if error.is::<Error>() { None } else { error.source() };
        }
        if let Some(fix) = &self.0.fix {
            write!(f, "; {fix}")?;
        }
        if let Some(condition) = self.0.condition {
            write!(f, " (the sandbox is {condition})")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}/{:?}: {self}", self.0.kind, self.advice())
    }
}

impl StdError for Error {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        self.0.source.as_deref().map(|s| s as &(dyn StdError + 'static))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_disk_is_told_apart_and_says_what_to_do() {
        let source = std::io::Error::from_raw_os_error(28);
        let error = Error::io("write the manifest", source);
        assert_eq!(error.kind(), ErrorKind::Full);
        assert_eq!(error.advice(), Advice::Fix);
        let text = error.to_string();
        assert!(text.contains("cannot write the manifest") && text.contains("free space"), "{text}");
    }

    #[test]
    fn a_clone_says_everything_that_the_error_says() {
        let source = std::io::Error::from_raw_os_error(28);
        let error = Error::io("write x", source).condition(Condition::Frozen).while_doing("capture");
        let copy = error.clone();
        assert_eq!((copy.to_string(), copy.kind(), copy.advice()), (error.to_string(), error.kind(), error.advice()));
        assert_eq!(copy.message(), "capture: cannot write x");
        assert_eq!(copy.sandbox_condition(), Some(Condition::Frozen));
        assert!(copy.source().unwrap().downcast_ref::<std::io::Error>().is_some());
    }

    #[test]
    fn a_quota_is_told_from_a_full_disk() {
        let error = Error::io("write the manifest", std::io::Error::from_raw_os_error(122));
        assert_eq!((error.kind(), error.advice()), (ErrorKind::OverQuota, Advice::Fix));
        assert!(error.kind().is_full() && error.to_string().contains("raise the quota"), "{error}");
    }

    #[test]
    fn causes_are_printed_once() {
        let inner = Error::new(ErrorKind::Io, "inner").caused_by(std::io::Error::other("root cause"));
        let outer = Error::new(ErrorKind::Internal, "outer").caused_by(inner);
        assert_eq!(outer.to_string(), "outer: inner: root cause");
    }
}
