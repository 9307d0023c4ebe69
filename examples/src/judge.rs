//! Compares the end of a run with the end of the fault-free run: the tree, the answers of live servers, the
//! conversation.

use std::collections::BTreeMap;
use std::ffi::{CStr, OsStr};
use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use crab_core::{Error, Result};
use parking_lot::Mutex;
use serde_json::Value;
use sha2::{Digest as _, Sha256};

use crate::sandbox::home;
use crate::session::Judge;

/// What a run ended with.
#[derive(Clone, Debug, Default)]
pub struct EndState {
    /// For each path its kind, mode, owner, extended attributes and a digest of its content or link target. Times are
    /// left out.
    pub tree: BTreeMap<PathBuf, String>,
    /// For each probe its output.
    pub probes: Vec<(String, String)>,
    /// The conversation.
    pub conversation: Vec<Value>,
}

impl EndState {
    /// What differs from the truth, one line for each difference, the first few of each kind.
    #[must_use]
    pub fn differences(&self, truth: &Self) -> Vec<String> {
        let mut all = Vec::new();
        for (probe, right) in &truth.probes {
            let got = self.probes.iter().find(|(name, _)| name == probe).map_or("(not asked)", |(_, text)| text);
            if got != right {
                all.push(format!("`{probe}` gives {:?}, not {:?}", first_line(got), first_line(right)));
            }
        }
        let paths: std::collections::BTreeSet<_> = self.tree.keys().chain(truth.tree.keys()).collect();
        let differ: Vec<_> = paths.into_iter().filter(|path| self.tree.get(*path) != truth.tree.get(*path)).collect();
        for path in differ.iter().take(5) {
            all.push(match (self.tree.get(*path), truth.tree.get(*path)) {
                (None, _) => format!("{} is missing", path.display()),
                (_, None) => format!("{} should not be there", path.display()),
                (Some(got), Some(right)) => format!("{} is {got}, not {right}", path.display()),
            });
        }
        if differ.len() > 5 {
            all.push(format!("... and {} more paths", differ.len() - 5));
        }
        let at = self.conversation.iter().zip(&truth.conversation).position(|(got, right)| got != right);
        if let Some(at) = at {
            let text = |message: &Value| message.to_string().chars().take(160).collect::<String>();
            let (got, right) = (text(&self.conversation[at]), text(&truth.conversation[at]));
            all.push(format!("message {at} of the conversation is {got}, not {right}"));
        } else if self.conversation.len() != truth.conversation.len() {
            all.push(format!(
                "the conversation has {} messages, not {}",
                self.conversation.len(),
                truth.conversation.len()
            ));
        }
        all
    }
}

impl Judge {
    /// What is compared of an output.
    #[must_use]
    pub fn comparable(&self, output: &str) -> String {
        let masked = self.volatile.mask(output);
        if !self.unordered {
            return masked.into_owned();
        }
        let mut lines: Vec<&str> = masked.lines().collect();
        lines.sort_unstable();
        lines.join("\n")
    }

    /// What is compared of a message of the conversation, or of a part of one.
    #[must_use]
    pub fn comparable_message(&self, message: &Value) -> Value {
        match message {
            Value::String(text) => Value::String(self.comparable(text)),
            Value::Array(items) => items.iter().map(|item| self.comparable_message(item)).collect(),
            Value::Object(fields) => {
                fields.iter().map(|(key, value)| (key.clone(), self.comparable_message(value))).collect()
            }
            other => other.clone(),
        }
    }
}

fn first_line(text: &str) -> &str {
    text.lines().next().unwrap_or("")
}

/// Describes every file below `root`, which is a path of the host, but for what the session declares not to be the same
/// twice: paths to ignore (as seen inside) are described by their kind only, and volatile text is left out of names and
/// contents.
///
/// # Errors
/// Where something cannot be read; the tree must be at rest.
pub fn describe_tree(root: &Path, judge: &Judge) -> Result<BTreeMap<PathBuf, String>> {
    let mut tree: BTreeMap<PathBuf, Vec<String>> = BTreeMap::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        let io = |e| Error::io(format!("read {}", folder.display()), e);
        for entry in fs::read_dir(&folder).map_err(io)? {
            let path = entry.map_err(io)?.path();
            let inside = Path::new("/").join(path.strip_prefix(root).unwrap_or(&path));
            let metadata = fs::symlink_metadata(&path).map_err(|e| Error::io(format!("stat {}", path.display()), e))?;
            let described = describe(&path, &inside, &metadata, judge)?;
            let name = match inside.to_str() {
                Some(inside) => judge.volatile.mask(inside).into_owned().into(),
                None => inside,
            };
            tree.entry(name).or_default().push(described);
            if metadata.is_dir() {
                folders.push(path);
            }
        }
    }
    // Several where only volatile text tells their names apart.
    let joined = tree.into_iter().map(|(path, mut described)| {
        described.sort();
        (path, described.join(", "))
    });
    Ok(joined.collect())
}

fn describe(path: &Path, inside: &Path, metadata: &fs::Metadata, judge: &Judge) -> Result<String> {
    let ignored = judge.ignore.iter().any(|ignored| inside.starts_with(ignored));
    let io = |e| Error::io(format!("read {}", path.display()), e);
    let kind = metadata.file_type();
    let (kind, content) = if kind.is_dir() {
        ("directory", String::new())
    } else if kind.is_symlink() {
        ("link", fs::read_link(path).map_err(io)?.to_string_lossy().into_owned())
    } else if kind.is_file() {
        ("file", if ignored { String::new() } else { hash_file(path, inside, metadata, judge).map_err(io)? })
    } else if kind.is_fifo() {
        ("fifo", String::new())
    } else if kind.is_socket() {
        ("socket", String::new())
    } else {
        ("device", metadata.rdev().to_string())
    };
    if ignored {
        return Ok(kind.to_owned());
    }
    let attributes = attributes(path)?;
    Ok(format!("{kind} {:o} {}:{} {content}{attributes}", metadata.mode() & 0o7777, metadata.uid(), metadata.gid()))
}

/// Volatile text is looked for in files of at most so many bytes.
const MOST_TEXT: usize = 1 << 20;

/// The base's files by inode number, since each run looks at all of them. A snapshot's file with the inode number and the
/// time of change that the base's has is that file: nobody can set that time.
static BASE: Mutex<BTreeMap<u64, Known>> = Mutex::new(BTreeMap::new());

/// A file's time of change, in seconds and nanoseconds, and the digest of its content.
type Known = (i64, i64, String);

fn hash_file(path: &Path, inside: &Path, metadata: &fs::Metadata, judge: &Judge) -> std::io::Result<String> {
    let in_base = home().join("pool/base").join(inside.strip_prefix("/").unwrap_or(inside));
    let key = |metadata: &fs::Metadata| (metadata.ino(), metadata.ctime(), metadata.ctime_nsec());
    let (number, seconds, nanoseconds) = key(metadata);
    if !fs::symlink_metadata(in_base).is_ok_and(|base| key(&base) == key(metadata)) {
        let content = fs::read(path)?;
        return Ok(match std::str::from_utf8(&content) {
            Ok(text) if content.len() <= MOST_TEXT => hash(judge.volatile.mask(text).as_bytes()),
            _ => hash(&content),
        });
    }
    let known = BASE.lock().get(&number).cloned();
    if let Some((_, _, hash)) = known.filter(|(s, ns, _)| (*s, *ns) == (seconds, nanoseconds)) {
        return Ok(hash);
    }
    let hash = hash(&fs::read(path)?);
    BASE.lock().insert(number, (seconds, nanoseconds, hash.clone()));
    Ok(hash)
}

fn attributes(path: &Path) -> Result<String> {
    use std::fmt::Write as _;
    let io = |e: rustix::io::Errno| Error::io(format!("read the attributes of {}", path.display()), e.into());
    let mut names = vec![0_u8; 64 * 1024];
    let length = rustix::fs::llistxattr(path, &mut names).map_err(io)?;
    let mut text = String::new();
    for name in names[..length].split_inclusive(|byte| *byte == 0) {
        let Ok(name) = CStr::from_bytes_with_nul(name) else { continue };
        let mut value = vec![0_u8; 64 * 1024];
        let length = rustix::fs::lgetxattr(path, name, &mut value).map_err(io)?;
        let name = OsStr::from_bytes(name.to_bytes()).to_string_lossy();
        // Writing to a string cannot fail.
        let _ = write!(text, " {name}={}", hash(&value[..length]));
    }
    Ok(text)
}

fn hash(bytes: &[u8]) -> String {
    Sha256::digest(bytes)[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::volatile::Volatile;

    #[test]
    fn every_kind_of_difference_is_seen() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        let judge = Judge { ignore: vec!["/log".to_owned()], ..Judge::default() };
        let see = || describe_tree(root, &judge).unwrap();
        fs::write(root.join("file"), "one").unwrap();
        fs::write(root.join("log"), "10:00").unwrap();
        let before = see();
        fs::write(root.join("log"), "11:00").unwrap();
        assert_eq!(see(), before, "an ignored path may differ in content");
        fs::write(root.join("file"), "two").unwrap();
        assert_ne!(see(), before, "content");
        fs::write(root.join("file"), "one").unwrap();
        assert_eq!(see(), before);
        fs::set_permissions(root.join("file"), std::os::unix::fs::PermissionsExt::from_mode(0o600)).unwrap();
        assert_ne!(see(), before, "mode");
    }

    #[test]
    fn declared_volatile_text_may_differ_in_names_and_contents() {
        let judge = Judge { volatile: vec![r"tmp\.\w+".to_owned()].try_into().unwrap(), ..Judge::default() };
        let see = |names: [&str; 2], content: &str| {
            let directory = tempfile::tempdir().unwrap();
            for name in names {
                fs::write(directory.path().join(name), content).unwrap();
            }
            describe_tree(directory.path(), &judge).unwrap()
        };
        let first = see(["tmp.a", "tmp.b"], "made tmp.a");
        assert_eq!(first, see(["tmp.c", "tmp.d"], "made tmp.c"));
        assert_ne!(first, see(["tmp.c", "d"], "made tmp.c"), "another name");
        assert_ne!(first, see(["tmp.c", "tmp.d"], "took tmp.c"), "another content");
    }

    #[test]
    fn outputs_are_compared_without_what_is_declared_of_them() {
        let strict = Judge::default();
        let value = serde_json::json!({"content": ["b at 10:11\na", 1]});
        assert_eq!(strict.comparable_message(&value), value);
        let loose = Judge { volatile: Volatile::recorded(), unordered: true, ..Judge::default() };
        let other = serde_json::json!({"content": ["a\nb at 12:13", 1]});
        assert_eq!(loose.comparable_message(&value), loose.comparable_message(&other));
        let another = serde_json::json!({"content": ["a\nc at 12:13", 1]});
        assert_ne!(loose.comparable_message(&value), loose.comparable_message(&another));
    }

    #[test]
    fn equal_states_have_no_differences_and_others_have_one_of_each_kind() {
        let truth = EndState {
            tree: BTreeMap::from([("/a".into(), "file".into())]),
            probes: vec![("ask".into(), "12".into())],
            conversation: vec![Value::from("hi")],
        };
        assert!(truth.differences(&truth).is_empty());
        let other = EndState { conversation: vec![Value::from("ho")], ..EndState::default() };
        assert_eq!(other.differences(&truth).len(), 3);
    }
}
