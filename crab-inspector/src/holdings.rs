//! What the processes of a sandbox hold: open and mapped files, pipes, sockets, shared memory.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::cgroup::gone;
use crate::net::Difference;

/// What processes hold.
#[derive(Clone, Debug, Default)]
pub(crate) struct Holdings {
    /// Files of the root file system: by which process, under which name in its root, and the inode.
    files: BTreeSet<(u32, PathBuf, u64)>,
    pub(crate) pipes: BTreeSet<u64>,
    pub(crate) sockets: BTreeSet<u64>,
    /// The other end of a terminal.
    pub(crate) terminal: bool,
    /// Something is told of changes to files.
    pub(crate) watches: bool,
    /// Memory that may be stored to and is seen by others, by a name to show.
    pub(crate) shared_memory: Option<String>,
    /// A held file has no name.
    nameless: Option<String>,
}

/// So many descriptors and mappings are looked at.
const MOST: usize = 100_000;

impl Holdings {
    /// Looks at processes. `root` is the device of the root file system; without one, everything with a path counts.
    pub(crate) fn look(processes: &BTreeSet<u32>, root: Option<u64>) -> io::Result<Self> {
        let mut held = Self::default();
        let mut left = MOST;
        for &process in processes {
            match held.process(process, root, &mut left) {
                Err(error) if gone(&error) => {}
                other => other?,
            }
        }
        Ok(held)
    }

    fn process(&mut self, process: u32, root: Option<u64>, left: &mut usize) -> io::Result<()> {
        let folder = Path::new("/proc").join(process.to_string());
        for link in ["cwd", "root", "exe"] {
            self.link(process, &folder.join(link), root)?;
        }
        for entry in fs::read_dir(folder.join("fd"))? {
            *left = left.checked_sub(1).ok_or_else(too_many)?;
            self.link(process, &entry?.path(), root)?;
        }
        let maps = fs::read(folder.join("maps"))?;
        let mut seen = BTreeSet::new();
        for line in maps.split(|b| *b == b'\n') {
            *left = left.checked_sub(1).ok_or_else(too_many)?;
            let Some(mapping) = Mapping::parse(line) else {
                continue;
            };
            if mapping.shared && mapping.writable {
                self.shared_memory.get_or_insert_with(|| format!("{} of process {process}", mapping.name()));
            }
            if mapping.inode != 0 && seen.insert((mapping.inode, mapping.path.to_vec())) {
                self.mapped(process, &folder, root, &mapping)?;
            }
        }
        Ok(())
    }

    fn mapped(&mut self, process: u32, folder: &Path, root: Option<u64>, mapping: &Mapping<'_>) -> io::Result<()> {
        // Named memory that has no file (memfd, SysV) shows as deleted; private mappings of it are private.
        let path = Path::new(std::ffi::OsStr::from_bytes(mapping.path));
        let meta = match fs::symlink_metadata(folder.join("root").join(relative(path))) {
            Ok(meta) => meta,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                if !is_memory(mapping.path) {
                    self.nameless.get_or_insert_with(|| mapping.name());
                }
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        if meta.ino() != mapping.inode {
            self.nameless.get_or_insert_with(|| mapping.name());
        } else if root.is_none_or(|root| meta.dev() == root) {
            self.files.insert((process, path.to_owned(), mapping.inode));
        }
        Ok(())
    }

    fn link(&mut self, process: u32, link: &Path, root: Option<u64>) -> io::Result<()> {
        let to = match fs::read_link(link) {
            Err(error) if gone(&error) => return Ok(()),
            other => other?,
        };
        let text = to.as_os_str().as_bytes();
        if let Some(inode) = number(text, b"pipe:[") {
            self.pipes.insert(inode);
        } else if let Some(inode) = number(text, b"socket:[") {
            self.sockets.insert(inode);
        } else if text.starts_with(b"anon_inode:") {
            self.watches |= text.ends_with(b"inotify") || text.ends_with(b"[fanotify]");
        } else if text.ends_with(b"/ptmx") {
            self.terminal = true;
        } else if text.starts_with(b"/") {
            // Follows the link to the file itself, whatever the name says.
            let meta = match fs::metadata(link) {
                Err(error) if gone(&error) => return Ok(()),
                other => other?,
            };
            if root.is_none_or(|root| meta.dev() == root) {
                if meta.nlink() == 0 || text.ends_with(b" (deleted)") {
                    self.nameless.get_or_insert_with(|| to.display().to_string());
                }
                self.files.insert((process, to, meta.ino()));
            }
            if meta.mode() & 0o170_000 == 0o010_000 {
                self.pipes.insert(meta.ino());
            }
        }
        Ok(())
    }

    /// Whether anything of the root file system is held.
    pub(crate) fn holds_files(&self) -> bool {
        !self.files.is_empty() || self.nameless.is_some()
    }

    /// The first held file that a difference touches, itself or by the path that leads to it.
    pub(crate) fn touched_by(&self, difference: &Difference, root: Option<u64>) -> Option<String> {
        if let Some(name) = &self.nameless {
            return Some(name.clone());
        }
        let differs = |inode: &u64| difference.old_inodes.contains(inode) || difference.new_inodes.contains(inode);
        for (process, path, inode) in &self.files {
            if differs(inode) {
                return Some(path.display().to_string());
            }
            let top = Path::new("/proc").join(process.to_string()).join("root");
            for (i, at) in relative(path).ancestors().enumerate() {
                let Ok(meta) = fs::symlink_metadata(top.join(at)) else {
                    return Some(path.display().to_string());
                };
                let own = root.is_none_or(|root| meta.dev() == root);
                let moved = i == 0 && !(own && meta.ino() == *inode);
                if moved || own && differs(&meta.ino()) {
                    return Some(path.display().to_string());
                }
            }
        }
        None
    }

    /// Whether one of the held sockets is a unix socket.
    pub(crate) fn holds_unix_sockets(&self, processes: &BTreeSet<u32>) -> io::Result<bool> {
        if self.sockets.is_empty() {
            return Ok(false);
        }
        let mut namespaces = BTreeSet::new();
        for process in processes {
            let folder = Path::new("/proc").join(process.to_string());
            match fs::read_link(folder.join("ns/net")) {
                Ok(namespace) if namespaces.insert(namespace.clone()) => {}
                Ok(_) => continue,
                Err(error) if gone(&error) => continue,
                Err(error) => return Err(error),
            }
            // Paths in it need not be text.
            let table = fs::read(folder.join("net/unix"))?;
            for line in table.split(|b| *b == b'\n').skip(1) {
                let inode =
                    String::from_utf8_lossy(line).split_ascii_whitespace().nth(6).and_then(|inode| inode.parse().ok());
                if inode.is_some_and(|inode: u64| self.sockets.contains(&inode)) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Whether data waits in an internet socket that one of the processes holds, told by the tables of their network
    /// namespaces.
    pub(crate) fn data_waits(&self, processes: &BTreeSet<u32>) -> io::Result<bool> {
        let mut namespaces = BTreeSet::new();
        for process in processes {
            let folder = Path::new("/proc").join(process.to_string());
            match fs::read_link(folder.join("ns/net")) {
                Ok(namespace) if namespaces.insert(namespace.clone()) => {}
                Ok(_) => continue,
                Err(error) if gone(&error) => continue,
                Err(error) => return Err(error),
            }
            for table in ["tcp", "tcp6", "udp", "udp6", "raw", "raw6"] {
                let table = match fs::read_to_string(folder.join("net").join(table)) {
                    Ok(table) => table,
                    // Not every kernel has all of them.
                    Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                    Err(error) => return Err(error),
                };
                for line in table.lines().skip(1) {
                    let waits = waiting(line).ok_or_else(|| io::Error::other("a socket table cannot be understood"))?;
                    if waits.0 > 0 && self.sockets.contains(&waits.1) {
                        return Ok(true);
                    }
                }
            }
        }
        Ok(false)
    }
}

/// Whether a process has a file mapped in a way by which it may be changed, now or after a change of protection.
pub(crate) fn maps_files(processes: &BTreeSet<u32>) -> io::Result<bool> {
    for process in processes {
        let folder = Path::new("/proc").join(process.to_string());
        let maps = match fs::read(folder.join("maps")) {
            Err(error) if gone(&error) => continue,
            other => other?,
        };
        let mut shared = maps.split(|b| *b == b'\n').filter_map(Mapping::parse).filter(Mapping::is_shared_file);
        // Many map a table of character sets for reading, from a descriptor that does not allow more.
        let Some(first) = shared.next() else { continue };
        if first.writable || shared.any(|mapping| mapping.writable) {
            return Ok(true);
        }
        match fs::read(folder.join("smaps")) {
            Err(error) if gone(&error) => {}
            Err(error) => return Err(error),
            Ok(smaps) if may_become_writable(&smaps) => return Ok(true),
            Ok(_) => {}
        }
    }
    Ok(false)
}

/// Whether `/proc/PID/smaps` has a shared mapping of a file that may be made writable.
fn may_become_writable(smaps: &[u8]) -> bool {
    let mut shared = false;
    smaps.split(|b| *b == b'\n').any(|line| {
        if let Some(flags) = line.strip_prefix(b"VmFlags:") {
            return shared && flags.split(|b| *b == b' ').any(|flag| flag == b"mw");
        }
        // The head of a mapping begins with its addresses, other lines with a name.
        if line.split(|b| *b == b' ').next().is_some_and(|word| word.contains(&b'-')) {
            shared = Mapping::parse(line).is_none_or(|mapping| mapping.is_shared_file());
        }
        false
    })
}

fn too_many() -> io::Error {
    io::Error::other("the processes hold too many files to look at")
}

/// Memory that `maps` gives a name and an inode number, but that is no file of a file system.
fn is_memory(path: &[u8]) -> bool {
    [&b"/memfd:"[..], b"/SYSV", b"/dev/zero", b"/anon_hugepage", b"anon_inode:", b"["]
        .iter()
        .any(|start| path.starts_with(start))
}

fn relative(path: &Path) -> &Path {
    path.strip_prefix("/").unwrap_or(path)
}

fn number(text: &[u8], before: &[u8]) -> Option<u64> {
    let digits = text.strip_prefix(before)?.strip_suffix(b"]")?;
    std::str::from_utf8(digits).ok()?.parse().ok()
}

/// The bytes that wait to be read and the inode of a line of `/proc/net/tcp` or its like. For a socket that listens
/// it is connections that wait.
fn waiting(line: &str) -> Option<(u64, u64)> {
    let mut fields = line.split_ascii_whitespace();
    let (_, waits) = fields.nth(4)?.split_once(':')?;
    let inode = fields.nth(4)?;
    Some((u64::from_str_radix(waits, 16).ok()?, inode.parse().ok()?))
}

/// A line of `/proc/PID/maps`.
struct Mapping<'a> {
    writable: bool,
    shared: bool,
    inode: u64,
    path: &'a [u8],
}

impl<'a> Mapping<'a> {
    fn parse(line: &'a [u8]) -> Option<Self> {
        let mut rest = line;
        let mut field = || {
            let start = rest.iter().position(|b| *b != b' ')?;
            let end = rest[start..].iter().position(|b| *b == b' ').map_or(rest.len(), |end| start + end);
            let (field, after) = (&rest[start..end], &rest[end..]);
            rest = after;
            Some(field)
        };
        field()?;
        let rights = field()?;
        field()?;
        field()?;
        let inode = std::str::from_utf8(field()?).ok()?.parse().ok()?;
        let path = rest.trim_ascii_start();
        Some(Self { writable: rights.get(1) == Some(&b'w'), shared: rights.get(3) == Some(&b's'), inode, path })
    }

    /// Whether stores to it would change a file, if they were allowed.
    fn is_shared_file(&self) -> bool {
        self.shared && self.inode != 0 && !is_memory(self.path)
    }

    fn name(&self) -> String {
        if self.path.is_empty() { "shared memory".to_owned() } else { String::from_utf8_lossy(self.path).into_owned() }
    }
}

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn read_any(data: &[u8]) {
    let _ = (Mapping::parse(data), may_become_writable(data), number(data, b"pipe:["));
    let _ = waiting(&String::from_utf8_lossy(data));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_mapping_is_read() {
        let line = b"7f5c-7f5d rw-s 00000000 00:01 1025 /dev/zero (deleted)";
        let mapping = Mapping::parse(line).unwrap();
        assert!(mapping.writable && mapping.shared);
        assert_eq!((mapping.inode, mapping.path), (1025, &b"/dev/zero (deleted)"[..]));
        assert!(Mapping::parse(b"").is_none());
    }

    #[test]
    fn a_shared_mapping_counts_only_where_it_may_be_written() {
        let smaps = |flags: &str| {
            format!(
                "7f5c-7f5d r--s 00000000 00:01 1025 /usr/lib/cache\nSize: 4 kB\nVmFlags: {flags}\n\
                 7f5d-7f5e rw-p 00000000 00:01 1025 /usr/lib/cache\nVmFlags: rd wr mr mw me ac \n"
            )
        };
        assert!(!may_become_writable(smaps("rd mr me ms").as_bytes()));
        assert!(may_become_writable(smaps("rd sh mr mw me ms").as_bytes()));
    }

    #[test]
    fn waiting_data_is_read() {
        let line =
            "   0: 0100007F:1F90 00000000:0000 0A 00000000:00000003 00:00000000 00000000     0        0 4711 1 0 100";
        assert_eq!(waiting(line), Some((3, 4711)));
    }

    proptest! {
        #[test]
        fn any_line_is_read_without_panic(bytes in proptest::collection::vec(any::<u8>(), 0..120), text in ".{0,120}") {
            let _ = Mapping::parse(&bytes);
            let _ = may_become_writable(&bytes);
            let _ = waiting(&text);
            let _ = number(&bytes, b"pipe:[");
        }
    }

    #[test]
    fn this_process_is_seen() {
        let me = BTreeSet::from([std::process::id()]);
        let exe = fs::metadata("/proc/self/exe").unwrap();
        let held = Holdings::look(&me, Some(exe.dev())).unwrap();
        assert!(held.holds_files());
        assert!(held.files.iter().any(|(_, _, inode)| *inode == exe.ino()));
    }
}
