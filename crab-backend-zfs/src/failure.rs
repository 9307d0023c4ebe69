//! How the errors of ZFS and of the operating system become Crab's.

use std::fmt;
use std::io;

use crab_core::{Error, ErrorKind};
use rustix::io::Errno;

use crate::sys::Failed;

/// The remedy for every lack of privilege.
const PRIVILEGE: &str = "run as root of the host";

/// An error of a system call while doing `what`: an infinitive with its object.
pub(crate) fn system(what: impl fmt::Display, errno: Errno) -> Error {
    let source = io::Error::from(errno);
    match errno {
        Errno::PERM | Errno::ACCESS => {
            Error::new(ErrorKind::Unsupported, format!("cannot {what}")).caused_by(source).fix(PRIVILEGE)
        }
        Errno::NODEV | Errno::NOSYS | Errno::OPNOTSUPP => {
            Error::new(ErrorKind::Unsupported, format!("cannot {what}")).caused_by(source)
        }
        Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG => {
            Error::new(ErrorKind::InvalidInput, format!("cannot {what}")).caused_by(source)
        }
        _ => Error::io(what, source),
    }
}

/// An error of a call of ZFS's library while doing `what`.
pub(crate) fn zfs(what: impl fmt::Display, failed: Failed) -> Error {
    let Failed { errno, said } = failed;
    let what = match said {
        Some(said) => format!("{what} ({})", said.lines().next().unwrap_or_default()),
        None => what.to_string(),
    };
    // Numbers above those of the operating system are ZFS's own.
    if !(1..1024).contains(&errno) {
        let message = format!("cannot {what}: ZFS gave its own error {errno}");
        return Error::new(ErrorKind::Io, message);
    }
    match Errno::from_raw_os_error(errno) {
        Errno::XDEV => Error::new(ErrorKind::InvalidInput, format!("cannot {what}"))
            .caused_by(io::Error::from_raw_os_error(errno))
            .fix("keep sandboxes and versions in one pool"),
        // Nothing here is refused for want of a privilege after /dev/zfs was opened, but by encryption.
        Errno::ACCESS => Error::new(ErrorKind::InvalidInput, format!("cannot {what}"))
            .caused_by(io::Error::from_raw_os_error(errno))
            .fix("load the key, and keep sandboxes and versions below one encryption root"),
        errno => system(what, errno),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_kinds_that_callers_tell_apart() {
        let kind = |errno| zfs("do it", Failed { errno, said: None }).kind();
        assert_eq!(kind(2), ErrorKind::NotFound);
        assert_eq!(kind(16), ErrorKind::Busy);
        assert_eq!(kind(17), ErrorKind::AlreadyExists);
        assert_eq!(kind(18), ErrorKind::InvalidInput);
        assert_eq!(kind(28), ErrorKind::Full);
        assert_eq!(kind(122), ErrorKind::OverQuota);
        assert_eq!(kind(1030), ErrorKind::Io);
        let error = zfs("run it", Failed { errno: 44, said: Some("line one\nline two".to_owned()) });
        assert!(error.to_string().contains("run it (line one)"), "{error}");
    }
}
