//! A root that is no btrfs subvolume: a folder of ext4, xfs, tmpfs or btrfs, or an overlay of such.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, StatxFlags};

use crate::bpf::{FileSystem, Place};
use crate::btrfs;
use crate::mounts::unescape;
use crate::net::Limits;
use crate::tree::{Directory, Most, TreeDigest};

const BTRFS: i64 = 0x9123_683e;
const EXT4: i64 = 0xef53;
const OVERLAY: i64 = 0x794c_7630;
const TMPFS: i64 = 0x0102_1994;
const XFS: i64 = 0x5846_5342;

/// The root of a sandbox.
#[derive(Debug)]
pub(crate) struct Folder {
    /// What the sandbox sees.
    pub(crate) top: Directory,
    /// Where an overlay puts what changes.
    upper: Option<Directory>,
    /// By what the kernel tells of changes to it.
    pub(crate) place: Place,
}

impl Folder {
    /// Opens a root. `Err` inside: what it is, and why nothing can be told about it.
    pub(crate) fn open(path: &Path) -> io::Result<Result<Self, String>> {
        let top = Directory::open(path)?;
        let kind = kind_of(&top)?;
        let upper = match kind {
            OVERLAY => match upper_of(&top)? {
                Some(path) => match Directory::open(&path) {
                    Ok(upper) => Some(upper),
                    Err(error) => return Ok(Err(format!("cannot open the overlay's {}: {error}", path.display()))),
                },
                None => return Ok(Err("it cannot be told where the overlay keeps what changes".to_owned())),
            },
            _ => None,
        };
        let below = upper.as_ref().unwrap_or(&top);
        let place = match kind_of(below)? {
            BTRFS => Place::Subvolume(btrfs::number_of(below.fd())?),
            EXT4 => Place::Device(FileSystem::Ext4, device(below)?),
            XFS => Place::Device(FileSystem::Xfs, device(below)?),
            TMPFS => Place::Nowhere,
            other => {
                let what = if upper.is_some() { "the overlay keeps what changes" } else { "the root lies" };
                return Ok(Err(format!("{what} on a file system of type {other:#x}")));
            }
        };
        Ok(Ok(Self { top, upper, place }))
    }

    /// Whether a file's device number is no sign of the file system: an overlay shows those of its parts.
    pub(crate) fn is_overlay(&self) -> bool {
        self.upper.is_some()
    }

    /// A digest of all that can change.
    pub(crate) fn digest(&self, limits: Limits) -> io::Result<[u8; 32]> {
        let mut digest = TreeDigest::default();
        let most = Most { names: limits.inodes, bytes: limits.bytes };
        digest.tree(b"", self.upper.as_ref().unwrap_or(&self.top), None, most)?;
        Ok(digest.finish())
    }
}

#[allow(clippy::unnecessary_cast, reason = "its type differs between architectures")]
fn kind_of(folder: &Directory) -> io::Result<i64> {
    Ok(rustix::fs::fstatfs(folder.fd())?.f_type as i64)
}

/// A device number as the kernel has it.
fn device(folder: &Directory) -> io::Result<u64> {
    let number = folder.stat()?.st_dev;
    Ok(u64::from(rustix::fs::major(number)) << 20 | u64::from(rustix::fs::minor(number)))
}

/// The upper folder of the overlay that a folder lies on, as its mount options say.
fn upper_of(folder: &Directory) -> io::Result<Option<PathBuf>> {
    let mount = rustix::fs::statx(folder.fd(), c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)?.stx_mnt_id;
    Ok(upper_in(&fs::read("/proc/self/mountinfo")?, mount))
}

fn upper_in(table: &[u8], mount: u64) -> Option<PathBuf> {
    let start = format!("{mount} ");
    let line = table.split(|b| *b == b'\n').find(|line| line.starts_with(start.as_bytes()))?;
    let options = line.split(|b| *b == b' ').skip_while(|field| *field != b"-").nth(3)?;
    let upper = options.split(|b| *b == b',').find_map(|option| option.strip_prefix(b"upperdir="))?;
    let path = PathBuf::from(OsString::from_vec(unescape(upper)));
    path.is_absolute().then_some(path)
}

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn read_any(data: &[u8]) {
    for mount in 0..12 {
        let _ = upper_in(data, mount);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn an_upper_folder_is_found() {
        let table = b"36 1 0:4 / /a rw - overlay none rw,lowerdir=/l,upperdir=/x,workdir=/w\n\
            361 1 0:5 / /b rw shared:7 - overlay overlay rw,lowerdir=/l,upperdir=/u\\054p\\040per,workdir=/w\n";
        assert_eq!(upper_in(table, 361), Some("/u,p per".into()));
        assert_eq!(upper_in(table, 36), Some("/x".into()));
        assert_eq!(upper_in(table, 3), None);
        assert_eq!(upper_in(b"5 1 0:4 / /a rw - overlay none rw,upperdir=relative", 5), None);
    }

    proptest! {
        #[test]
        fn any_table_is_read_without_panic(table in proptest::collection::vec(any::<u8>(), 0..300), mount in 0u64..12) {
            let _ = upper_in(&table, mount);
        }
    }
}
