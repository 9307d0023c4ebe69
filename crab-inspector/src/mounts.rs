//! What a sandbox's processes see mounted, and what lies in the tmpfs among it.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

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
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mounts {
    /// A writable file system besides the root, whose changes nobody looks at.
    pub(crate) alien: Option<String>,
    /// A digest of all that lies in tmpfs. `Err`: why there is none.
    pub(crate) tmpfs: Result<[u8; 32], String>,
}

/// Entries and bytes in tmpfs that are looked at.
const MOST_ENTRIES: usize = 4096;
const MOST_BYTES: u64 = 16 << 20;

/// Looks at what processes see mounted, one of each mount namespace. `root` is the device of the root file system.
pub(crate) fn look(processes: &BTreeSet<u32>, root: u64) -> io::Result<Mounts> {
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
                let covered = fs::symlink_metadata(&path).is_ok_and(|meta| meta.dev() == root);
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
fn unescape(mut text: &[u8]) -> Vec<u8> {
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

#[derive(Default)]
struct Walk {
    digest: Sha256,
    entries: usize,
    bytes: u64,
    failed: Option<String>,
}

impl Walk {
    fn mount(&mut self, path: &Path, mount: &Mount) {
        let top = match fs::symlink_metadata(path) {
            Ok(top) => top,
            Err(error) => return self.fail(&mount.at, &error),
        };
        let device = format!("{}:{}", rustix::fs::major(top.dev()), rustix::fs::minor(top.dev()));
        if device != mount.device {
            self.failed.get_or_insert_with(|| format!("{} is hidden", mount.at.display()));
            return;
        }
        self.digest.update(mount.at.as_os_str().as_bytes());
        self.entry(path, top.dev());
    }

    fn fail(&mut self, path: &Path, error: &io::Error) {
        self.failed.get_or_insert_with(|| format!("{}: {error}", path.display()));
    }

    fn entry(&mut self, path: &Path, device: u64) {
        if self.failed.is_some() {
            return;
        }
        self.entries += 1;
        if let Err(error) = self.look(path, device) {
            self.fail(path, &error);
        }
    }

    fn look(&mut self, path: &Path, device: u64) -> io::Result<()> {
        let meta = fs::symlink_metadata(path)?;
        self.number(u64::from(meta.mode()));
        self.number(u64::from(meta.uid()));
        self.number(u64::from(meta.gid()));
        if meta.dev() != device {
            // Something else is mounted here, and has its own turn.
            return Ok(());
        }
        let kind = meta.file_type();
        let mut names = vec![0; 64 * 1024];
        let length = rustix::fs::llistxattr(path, &mut names[..]).unwrap_or(0);
        for name in names[..length].split_inclusive(|b| *b == 0) {
            let mut value = vec![0; 64 * 1024];
            let name = std::ffi::CStr::from_bytes_with_nul(name).map_err(io::Error::other)?;
            let length = rustix::fs::lgetxattr(path, name, &mut value[..])?;
            self.bytes(name.to_bytes());
            self.bytes(&value[..length]);
        }
        if kind.is_dir() {
            let mut names = fs::read_dir(path)?
                .map(|entry| entry.map(|entry| entry.file_name()))
                .collect::<io::Result<Vec<_>>>()?;
            if self.entries + names.len() > MOST_ENTRIES {
                return Err(io::Error::other("too many files to compare"));
            }
            names.sort();
            self.number(names.len() as u64);
            for name in names {
                self.bytes(name.as_bytes());
                self.entry(&path.join(&name), device);
            }
            return Ok(());
        }
        self.number(meta.nlink());
        self.number(meta.rdev());
        self.number(meta.mtime().cast_unsigned());
        self.number(meta.mtime_nsec().cast_unsigned());
        if kind.is_symlink() {
            self.bytes(fs::read_link(path)?.as_os_str().as_bytes());
        } else if kind.is_file() {
            self.bytes += meta.size();
            if self.bytes > MOST_BYTES {
                return Err(io::Error::other("too much to compare"));
            }
            let mut content = Vec::new();
            File::open(path)?.take(MOST_BYTES).read_to_end(&mut content)?;
            self.bytes(&content);
        }
        Ok(())
    }

    fn number(&mut self, number: u64) {
        self.digest.update(number.to_le_bytes());
    }

    fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.digest.update(bytes);
    }

    fn finish(self) -> Result<[u8; 32], String> {
        match self.failed {
            Some(why) => Err(why),
            None => Ok(self.digest.finalize().into()),
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
