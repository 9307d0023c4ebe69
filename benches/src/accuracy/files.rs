//! The oracle for files: what `btrfs send` lists between two snapshots, each path compared in both.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const SIGPIPE: i32 = 13;

/// The paths that differ in what a restore would bring back, relative to the root.
pub(crate) fn differing(old: &Path, new: &Path) -> Result<BTreeSet<PathBuf>, String> {
    let listed = listed(old, new)?;
    let mut differ = BTreeSet::new();
    for (path, rewritten) in listed {
        if differs(&old.join(&path), &new.join(&path), rewritten)? {
            differ.insert(path);
        }
    }
    Ok(differ)
}

/// Every path that the stream names, and whether its bytes or the file behind it were written anew.
fn listed(old: &Path, new: &Path) -> Result<BTreeMap<PathBuf, bool>, String> {
    let mut send = Command::new("btrfs")
        .args(["-q", "send", "--no-data", "-p"])
        .args([old, new])
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .map_err(|error| format!("run btrfs send: {error}"))?;
    let stream = send.stdout.take().ok_or("btrfs send has no output")?;
    let dump = Command::new("btrfs")
        .args(["receive", "--dump"])
        .stdin(Stdio::from(stream))
        .output()
        .map_err(|error| format!("run btrfs receive: {error}"))?;
    // The reader may be gone before the last bytes are written.
    let sent = send.wait().map_err(|error| format!("lost btrfs send: {error}"))?;
    if !(sent.success() || sent.signal() == Some(SIGPIPE)) || !dump.status.success() {
        return Err(format!(
            "btrfs cannot tell the snapshots apart: {sent}, {}, {}",
            dump.status,
            String::from_utf8_lossy(&dump.stderr)
        ));
    }
    let mut listed = BTreeMap::new();
    // New files go by a number until they are renamed: what is said of one belongs to the final path.
    let mut renamed: BTreeMap<PathBuf, PathBuf> = BTreeMap::new();
    let mut said = Vec::new();
    for line in String::from_utf8_lossy(&dump.stdout).lines() {
        let mut words = words(line).into_iter();
        let (Some(what), Some(path)) = (words.next(), words.next()) else { continue };
        let path = below(&path);
        let to = words.find_map(|word| word.strip_prefix("dest=").map(below));
        if let (true, Some(to)) = (what == "rename", &to) {
            renamed.insert(path.clone(), to.clone());
        }
        // The target of a link that is made is a path in the tree only for hard links, and both ends may differ.
        if let (true, Some(to)) = (what == "link", to) {
            said.push((to, false));
        }
        let rewritten =
            matches!(what.as_str(), "update_extent" | "write" | "clone" | "truncate" | "mkfile" | "symlink");
        said.push((path, rewritten));
    }
    for (path, rewritten) in said {
        let mut all = vec![path.clone()];
        let mut at = path;
        while let Some(next) = renamed.get(&at).filter(|next| !all.contains(next)) {
            at = next.clone();
            all.push(at.clone());
        }
        for path in all {
            *listed.entry(path).or_insert(false) |= rewritten;
        }
    }
    // Where a directory was renamed, what is in it has another path.
    let folders: Vec<(PathBuf, PathBuf)> = renamed.into_iter().collect();
    for (from, to) in folders {
        listed.entry(from).or_insert(false);
        listed.entry(to).or_insert(false);
    }
    Ok(listed)
}

/// Splits a line of the dump at spaces that no backslash protects.
fn words(line: &str) -> Vec<String> {
    let mut words = vec![String::new()];
    let mut letters = line.chars();
    while let Some(letter) = letters.next() {
        match letter {
            '\\' => {
                let next = letters.next().unwrap_or('\\');
                if let Some(word) = words.last_mut() {
                    word.push(next);
                }
            }
            ' ' => {
                if words.last().is_some_and(|word| !word.is_empty()) {
                    words.push(String::new());
                }
            }
            other => {
                if let Some(word) = words.last_mut() {
                    word.push(other);
                }
            }
        }
    }
    words
}

/// A path of the dump without the snapshot's own name.
fn below(path: &str) -> PathBuf {
    let path = path.strip_prefix("./").unwrap_or(path);
    PathBuf::from(path.split_once('/').map_or("", |(_, rest)| rest))
}

fn differs(old: &Path, new: &Path, rewritten: bool) -> Result<bool, String> {
    let (was, is) = match (fs::symlink_metadata(old), fs::symlink_metadata(new)) {
        (Err(_), Err(_)) => return Ok(false),
        (Ok(was), Ok(is)) => (was, is),
        _ => return Ok(true),
    };
    let facts = |of: &fs::Metadata| (of.mode(), of.uid(), of.gid(), of.rdev());
    if facts(&was) != facts(&is) || was.file_type() != is.file_type() || attributes(old) != attributes(new) {
        return Ok(true);
    }
    if is.is_dir() {
        // Its time follows from the names in it, and those are listed themselves.
        return Ok(false);
    }
    let time = |of: &fs::Metadata| (of.mtime(), of.mtime_nsec());
    if was.nlink() != is.nlink() || (time(&was) != time(&is) && !rewritten) {
        return Ok(true);
    }
    if is.is_symlink() {
        return Ok(fs::read_link(old).ok() != fs::read_link(new).ok());
    }
    if is.is_file() {
        return Ok(was.len() != is.len() || bytes(old)? != bytes(new)?);
    }
    Ok(false)
}

fn attributes(path: &Path) -> Vec<u8> {
    let mut names = vec![0; 64 * 1024];
    let length = rustix::fs::llistxattr(path, &mut names[..]).unwrap_or(0);
    names.truncate(length);
    let mut all = names.clone();
    for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        let mut value = vec![0; 64 * 1024];
        let length = rustix::fs::lgetxattr(path, name, &mut value[..]).unwrap_or(0);
        all.extend_from_slice(&value[..length]);
    }
    all
}

fn bytes(path: &Path) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    let read = fs::File::open(path).and_then(|file| file.take(256 << 20).read_to_end(&mut bytes));
    read.map_err(|error| format!("read {}: {error}", path.display()))?;
    Ok(bytes)
}
