//! Trees of files for tests: [one for each number](set), and the plain way to tell [what differs](differences) between
//! two, which is to walk both and look at everything. That is the oracle for
//! [`CheckpointBackend::diff`](crate::CheckpointBackend::diff).

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{ErrorKind, Read};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{DirEntryExt, FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crate::FileChangeKind;

/// What differs, by path below the roots, as [`FileChange`](crate::FileChange) names it. Reads everything, and panics
/// where something cannot be read.
#[must_use]
pub fn differences(from: &Path, to: &Path) -> BTreeMap<Vec<u8>, FileChangeKind> {
    let mut found = BTreeMap::new();
    compare(Some(from), Some(to), b"", &mut found);
    found
}

/// Brings a tree to the state that `value` names: a few files in two directories, of which which exist, how long they are
/// and what they hold depends on it. Files that are right already are not touched.
pub fn set(root: &Path, value: u64) {
    let wanted = state(value);
    for name in files(root).into_keys().filter(|name| !wanted.contains_key(name)) {
        fs::remove_file(root.join(name)).unwrap();
    }
    fs::create_dir_all(root.join("deep")).unwrap();
    for (name, content) in wanted {
        let path = root.join(name);
        if fs::read(&path).ok().as_ref() != Some(&content) {
            fs::write(path, content).unwrap();
        }
    }
}

/// The value that a tree is at; `None` where it is at none, such as a mixture of two.
#[must_use]
pub fn get(root: &Path) -> Option<u64> {
    let value = fs::read_to_string(root.join("value")).ok()?.parse().ok()?;
    (files(root) == state(value)).then_some(value)
}

fn state(value: u64) -> BTreeMap<String, Vec<u8>> {
    let mut files = BTreeMap::from([("value".to_owned(), value.to_string().into_bytes())]);
    let mut mixed = value.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
    for name in ["a", "b", "deep/c", "deep/d"] {
        mixed = mixed.wrapping_mul(0x2545_f491_4f6c_dd1d).rotate_left(31) ^ value;
        if !mixed.is_multiple_of(4) {
            let size = [0, 100, 2500, 9000][usize::from(mixed.to_le_bytes()[2] % 4)];
            files.insert(name.to_owned(), vec![mixed.to_le_bytes()[1]; size]);
        }
    }
    files
}

/// All regular files of a tree, by path and content.
#[must_use]
pub fn files(tree: &Path) -> BTreeMap<String, Vec<u8>> {
    fn walk(base: &Path, at: &Path, found: &mut BTreeMap<String, Vec<u8>>) {
        for entry in fs::read_dir(at).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(base, &path, found);
            } else {
                let name = path.strip_prefix(base).unwrap().display().to_string();
                found.insert(name, fs::read(&path).unwrap());
            }
        }
    }
    let mut found = BTreeMap::new();
    walk(tree, tree, &mut found);
    found
}

/// The inode number of everything in a tree, by path.
#[must_use]
pub fn inodes(tree: &Path) -> BTreeMap<PathBuf, u64> {
    let (mut open, mut found) = (vec![tree.to_owned()], BTreeMap::new());
    while let Some(directory) = open.pop() {
        for entry in fs::read_dir(directory).unwrap().map(|entry| entry.unwrap()) {
            found.insert(entry.path().strip_prefix(tree).unwrap().to_owned(), entry.ino());
            if entry.file_type().unwrap().is_dir() {
                open.push(entry.path());
            }
        }
    }
    found
}

/// The names in a directory, sorted; none where it is not there.
#[must_use]
pub fn names_in(directory: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(directory) else { return Vec::new() };
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

/// Compares what stands at two places, of which one may be none: below what is no directory on that side.
fn compare(from: Option<&Path>, to: Option<&Path>, at: &[u8], found: &mut BTreeMap<Vec<u8>, FileChangeKind>) {
    let (a, b) = (from.unwrap_or(Path::new("")), to.unwrap_or(Path::new("")));
    let kind = match (from.and_then(look), to.and_then(look)) {
        (None, None) => return,
        (None, Some(_)) => Some(FileChangeKind::Added),
        (Some(_), None) => Some(FileChangeKind::Removed),
        (Some(old), Some(new)) if !same_content(a, &old, b, &new) => Some(FileChangeKind::Content),
        (Some(old), Some(new)) if !same_metadata(a, &old, b, &new) => Some(FileChangeKind::Metadata),
        _ => None,
    };
    if let Some(kind) = kind {
        found.insert(at.to_vec(), kind);
    }
    let (from, to) = (from.filter(|path| is_directory(path)), to.filter(|path| is_directory(path)));
    let names: BTreeSet<Vec<u8>> = from.iter().chain(&to).flat_map(|path| names(path)).collect();
    for name in names {
        let [a, b] = [from, to].map(|path| path.map(|path| path.join(OsStr::from_bytes(&name))));
        let below = if at.is_empty() { name } else { [at, b"/", &name].concat() };
        compare(a.as_deref(), b.as_deref(), &below, found);
    }
}

fn look(path: &Path) -> Option<fs::Metadata> {
    match fs::symlink_metadata(path) {
        Ok(metadata) => Some(metadata),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => panic!("look at {}: {error}", path.display()),
    }
}

fn is_directory(path: &Path) -> bool {
    look(path).is_some_and(|metadata| metadata.is_dir())
}

fn names(path: &Path) -> Vec<Vec<u8>> {
    fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().as_bytes().to_vec()).collect()
}

fn same_content(a: &Path, old: &fs::Metadata, b: &Path, new: &fs::Metadata) -> bool {
    if old.file_type() != new.file_type() {
        return false;
    }
    let kind = old.file_type();
    if kind.is_symlink() {
        fs::read_link(a).unwrap() == fs::read_link(b).unwrap()
    } else if kind.is_file() {
        old.len() == new.len() && same_bytes(a, b)
    } else if kind.is_char_device() || kind.is_block_device() {
        old.rdev() == new.rdev()
    } else {
        true
    }
}

fn same_bytes(a: &Path, b: &Path) -> bool {
    let (mut a, mut b) = (File::open(a).unwrap(), File::open(b).unwrap());
    let (mut old, mut new) = (vec![0; 1 << 16], vec![0; 1 << 16]);
    loop {
        let count = a.read(&mut old).unwrap();
        b.read_exact(&mut new[..count]).unwrap();
        if old[..count] != new[..count] {
            return false;
        }
        if count == 0 {
            return true;
        }
    }
}

fn same_metadata(a: &Path, old: &fs::Metadata, b: &Path, new: &fs::Metadata) -> bool {
    (old.mode(), old.uid(), old.gid()) == (new.mode(), new.uid(), new.gid())
        && (old.is_dir() || (old.mtime(), old.mtime_nsec()) == (new.mtime(), new.mtime_nsec()))
        && attributes(a) == attributes(b)
}

fn attributes(path: &Path) -> BTreeMap<Vec<u8>, Vec<u8>> {
    let mut names = vec![0; 1 << 16];
    let length = match rustix::fs::llistxattr(path, &mut names[..]) {
        Ok(length) => length,
        Err(rustix::io::Errno::OPNOTSUPP) => return BTreeMap::new(),
        Err(errno) => panic!("list the attributes of {}: {errno}", path.display()),
    };
    let names = names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty());
    names
        .map(|name| {
            let mut value = vec![0; 1 << 16];
            let length = rustix::fs::lgetxattr(path, OsStr::from_bytes(name), &mut value[..]).unwrap();
            value.truncate(length);
            (name.to_vec(), value)
        })
        .collect()
}
