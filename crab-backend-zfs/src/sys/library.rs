//! Finding and opening the library, once for a process.
#![allow(unsafe_code, reason = "a library is opened and its functions are called")]

use std::fs;
use std::sync::OnceLock;

use crab_core::{Error, ErrorKind, Result};

use super::bindings::LibZfsCore;

/// The library's name, with the number that its interface has had since OpenZFS 2.0.
const NAME: &str = "libzfs_core.so.3";
/// Where the kernel says which release of ZFS it runs.
const MODULE: &str = "/sys/module/zfs/version";
/// What the kernel's ZFS must be: the releases that this crate was tried with.
const RELEASES: [&str; 3] = ["2.2", "2.3", "2.4"];

/// The library, with `/dev/zfs` open. Opened by the first call; a failure is tried again.
pub(crate) fn load() -> Result<&'static LibZfsCore> {
    static LIBRARY: OnceLock<LibZfsCore> = OnceLock::new();
    if let Some(library) = LIBRARY.get() {
        return Ok(library);
    }
    let library = open()?;
    // Where another thread was quicker, this one's is closed again; the library counts its users.
    Ok(LIBRARY.get_or_init(|| library))
}

fn open() -> Result<LibZfsCore> {
    // SAFETY: opening it runs the initialisers of libzfs_core and of what it links, which touch nothing of ours.
    let library = unsafe { LibZfsCore::new(NAME) }.map_err(|error| {
        Error::new(ErrorKind::Unsupported, format!("ZFS cannot be used: {NAME} could not be opened"))
            .caused_by(error)
            .fix("install OpenZFS 2.2, 2.3 or 2.4 (on Debian: zfsutils-linux and zfs-dkms)")
    })?;
    let release = fs::read_to_string(MODULE).map_err(|error| {
        Error::new(ErrorKind::Unsupported, "ZFS cannot be used: the kernel has no ZFS loaded")
            .caused_by(error)
            .fix("run `modprobe zfs`")
    })?;
    check_release(&release)?;
    // SAFETY: takes nothing; opens /dev/zfs, or counts one more user of it.
    match unsafe { library.libzfs_core_init() } {
        0 => Ok(library),
        errno => Err(Error::new(ErrorKind::Unsupported, "ZFS cannot be used: /dev/zfs could not be opened")
            .caused_by(std::io::Error::from_raw_os_error(errno))
            .fix("run as root, and where /dev/zfs is")),
    }
}

/// Refuses a release of ZFS that is not known to behave as this crate expects.
fn check_release(release: &str) -> Result<()> {
    let release = release.trim();
    // The second number ends at whatever is no digit: 2.3.9-1, 2.4-rc1.
    let known = RELEASES.iter().any(|known| {
        release.strip_prefix(known).is_some_and(|rest| !rest.starts_with(|next: char| next.is_ascii_digit()))
    });
    if known {
        return Ok(());
    }
    let message = format!("the kernel runs ZFS {release}, which this backend was not tried with");
    Err(Error::new(ErrorKind::Unsupported, message).fix(format!("use a release of {}", RELEASES.join(", "))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_that_were_tried_are_accepted_and_others_refused() {
        for release in ["2.2.0", "2.2.7-2", "2.3.9-0+deb13u1\n", "2.4.0", "2.4-rc1", "2.3"] {
            check_release(release).unwrap();
        }
        for release in ["2.1.11", "2.5.0", "2.30.1", "0.8.6", "3.0", "", "zfs"] {
            let error = check_release(release).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Unsupported, "{release}");
            assert!(error.remedy().unwrap().contains("2.3"), "{error}");
        }
    }

    #[test]
    fn a_machine_without_the_library_gets_one_clear_error() {
        match load() {
            Ok(_) => println!("skipped: a machine without ZFS"),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::Unsupported);
                let text = error.to_string();
                assert!(text.starts_with("ZFS cannot be used: ") && error.remedy().is_some(), "{text}");
            }
        }
    }
}
