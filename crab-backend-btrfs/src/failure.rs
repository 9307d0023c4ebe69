//! How the operating system's errors become Crab's.

use std::fmt;
use std::io;
use std::path::Path;

use crab_core::{Error, ErrorKind};
use rustix::io::Errno;

/// The remedy for every lack of privilege.
pub(crate) const PRIVILEGE: &str = "run with CAP_SYS_ADMIN in the host's first user namespace";

/// An error of a btrfs call while doing `what`: an infinitive with its object.
pub(crate) fn os(what: impl fmt::Display, errno: Errno) -> Error {
    let source = io::Error::from(errno);
    match errno {
        Errno::PERM | Errno::ACCESS => {
            Error::new(ErrorKind::Unsupported, format!("cannot {what}")).caused_by(source).fix(PRIVILEGE)
        }
        Errno::XDEV => Error::new(ErrorKind::InvalidInput, format!("cannot {what}"))
            .caused_by(source)
            .fix("keep sandboxes and versions on one btrfs filesystem"),
        Errno::NOTTY | Errno::OPNOTSUPP => {
            Error::new(ErrorKind::Unsupported, format!("cannot {what}")).caused_by(source)
        }
        Errno::NOTDIR | Errno::LOOP | Errno::NAMETOOLONG => {
            Error::new(ErrorKind::InvalidInput, format!("cannot {what}")).caused_by(source)
        }
        _ => Error::io(what, source),
    }
}

/// As [`os`] for a call on one path.
pub(crate) fn at<'a>(what: &'static str, path: &'a Path) -> impl FnOnce(Errno) -> Error + 'a {
    move |errno| os(format_args!("{what} {}", path.display()), errno)
}
