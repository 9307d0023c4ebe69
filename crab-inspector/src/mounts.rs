//! What a sandbox's processes see mounted, and what lies in the tmpfs among it.

use std::collections::BTreeSet;
use std::ffi::{CString, OsString};
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::tree::{Directory, Most, TreeDigest};

/// Kinds that hold no files of the sandbox's own: what they show is the kernel's, or is judged elsewhere.
const OF_THE_KERNEL: &[&str] = &[
    "proc",
    "sysfs",
    "devpts",
    "cgroup",
    "cgroup2",
    "mqueue",
    "securityfs",
    "debugfs",
    "tracefs",
    "bpf",
    "binfmt_misc",
    "pstore",
    "nsfs",
    "fusectl",
    "configfs",
];

/// One mount, as `/proc/PID/mountinfo` says.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Mount {
    device: String,
    at: PathBuf,
    writable: bool,
    kind: String,
}

/// What was found.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Mounts {
    /// A writable file system besides the root, whose changes nobody looks at.
    pub(crate) alien: Option<String>,
    /// A digest of all that lies in tmpfs. `Err`: why there is none.
    pub(crate) tmpfs: Result<[u8; 32], String>,
}

/// What is looked at in tmpfs.
const MOST: Most = Most { names: 4096, bytes: 16 << 20 };

/// Looks at what processes see mounted, one of each mount namespace. `root` is the device of the root file system.
pub(crate) fn look(processes: &BTreeSet<u32>, root: Option<u64>) -> io::Result<Mounts> {
    let mut namespaces = BTreeSet::new();
    let mut devices = BTreeSet::new();
    let mut digest = Walk::default();
    let mut alien = None;
    for process in processes {
        let folder = Path::new("/proc").join(process.to_string());
        let namespace = match fs::read_link(folder.join("ns/mnt")) {
            Ok(namespace) => namespace,
            Err(error) if crate::cgroup::gone(&error) => continue,
            Err(error) => return Err(error),
        };
        if !namespaces.insert(namespace.clone()) {
            continue;
        }
        let table = match fs::read(folder.join("mountinfo")) {
            Ok(table) => table,
            Err(error) if crate::cgroup::gone(&error) => continue,
            Err(error) => return Err(error),
        };
        let own = fs::read_link("/proc/self/ns/mnt")?;
        let seen_from = folder.join("root");
        for mount in parse(&table) {
            if OF_THE_KERNEL.contains(&mount.kind.as_str()) {
                continue;
            }
            // A process without a mount namespace of its own sees what the host sees: only its root is the sandbox's.
            if namespace == own {
                continue;
            }
            let path = seen_from.join(mount.at.strip_prefix("/").unwrap_or(&mount.at));
            if matches!(mount.kind.as_str(), "tmpfs" | "ramfs") {
                if devices.insert(mount.device.clone()) && mount.writable {
                    digest.mount(&path, &mount);
                }
            } else if mount.writable && alien.is_none() {
                let covered = fs::symlink_metadata(&path).is_ok_and(|meta| Some(meta.dev()) == root);
                if !covered {
                    alien = Some(format!("{} at {}", mount.kind, mount.at.display()));
                }
            }
        }
    }
    Ok(Mounts { alien, tmpfs: digest.finish() })
}

fn parse(table: &[u8]) -> Vec<Mount> {
    table
        .split(|b| *b == b'\n')
        .filter_map(|line| {
            let mut fields = line.split(|b| *b == b' ');
            let device = String::from_utf8_lossy(fields.nth(2)?).into_owned();
            let at = unescape(fields.nth(1)?);
            let options = fields.next()?;
            let writable = options.split(|b| *b == b',').any(|option| option == b"rw");
            let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
            Some(Mount {
                device,
                at: PathBuf::from(OsString::from_vec(at)),
                writable,
                kind: String::from_utf8_lossy(kind).into_owned(),
            })
        })
        .collect()
}

/// Spaces and the like are written as a backslash and three octal digits.
pub(crate) fn unescape(mut text: &[u8]) -> Vec<u8> {
    let mut plain = Vec::with_capacity(text.len());
    while let Some((&first, rest)) = text.split_first() {
        let code = (first == b'\\')
            .then(|| std::str::from_utf8(rest.get(..3)?).ok())
            .flatten()
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                plain.push(code);
                text = &rest[3..];
            }
            None => {
                plain.push(first);
                text = rest;
            }
        }
    }
    plain
}

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn read_any(data: &[u8]) {
    let _ = parse(data);
}

/// All tmpfs that were looked at.
#[derive(Default)]
struct Walk {
    digest: TreeDigest,
    failed: Option<String>,
}

impl Walk {
    fn mount(&mut self, path: &Path, mount: &Mount) {
        if self.failed.is_some() {
            return;
        }
        if let Err(error) = self.tree(path, mount) {
            self.failed = Some(format!("{}: {error}", mount.at.display()));
        }
    }

    fn tree(&mut self, path: &Path, mount: &Mount) -> io::Result<()> {
        let (top, name) = match Directory::open(path) {
            Ok(top) => (top, None),
            // A file can be mounted alone.
            Err(error) if error.kind() == io::ErrorKind::NotADirectory => {
                let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Err(error) };
                (Directory::open(parent)?, Some(CString::new(name.as_bytes()).map_err(io::Error::other)?))
            }
            Err(error) => return Err(error),
        };
        let device = top.stat_of(name.as_deref())?.st_dev;
        if format!("{}:{}", rustix::fs::major(device), rustix::fs::minor(device)) != mount.device {
            return Err(io::Error::other("something is mounted over it"));
        }
        self.digest.tree(mount.at.as_os_str().as_bytes(), &top, name.as_deref(), MOST)
    }

    fn finish(self) -> Result<[u8; 32], String> {
        match self.failed {
            Some(why) => Err(why),
            None => Ok(self.digest.finish()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_table_is_read() {
        let table = b"36 35 98:0 /mnt1 /mnt\\040two rw,noatime master:1 - ext3 /dev/root ro,errors=continue\nodd\n";
        let mounts = parse(table);
        assert_eq!(mounts.len(), 1);
        assert_eq!(mounts[0].at, Path::new("/mnt two"));
        assert_eq!((mounts[0].kind.as_str(), mounts[0].writable), ("ext3", true));
    }

    proptest! {
        #[test]
        fn any_table_is_read_without_panic(table in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&table);
        }
    }
}
