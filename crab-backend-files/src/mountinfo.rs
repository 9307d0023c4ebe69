//! The kernel's table of mounts.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt;
use std::path::PathBuf;

use crab_core::{Error, Result};

/// One mount that this process sees.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The kernel's number for it.
    pub id: u64,
    /// The mount that it lies on.
    pub parent: u64,
    /// Major and minor number of the filesystem, as the table has it.
    pub device: Vec<u8>,
    /// What of the filesystem is mounted.
    pub tree: PathBuf,
    /// Where it is mounted.
    pub point: PathBuf,
    /// The options of this mount, with commas between them.
    pub options: Vec<u8>,
    /// The kind of filesystem.
    pub kind: Vec<u8>,
    /// What the filesystem is of: a device, a dataset.
    pub source: PathBuf,
}

/// All mounts at this moment, in the order of the table. Blocks for a moment.
///
/// # Errors
/// Where the table cannot be read.
pub fn read() -> Result<Vec<Mount>> {
    let text = fs::read("/proc/self/mountinfo").map_err(|error| Error::io("read /proc/self/mountinfo", error))?;
    Ok(parse(&text))
}

/// Reads a table. Lines that are none are passed over.
#[must_use]
pub fn parse(text: &[u8]) -> Vec<Mount> {
    text.split(|byte| *byte == b'\n').filter_map(line).collect()
}

fn line(line: &[u8]) -> Option<Mount> {
    let fields: Vec<&[u8]> = line.split(|byte| *byte == b' ').collect();
    let number = |field: usize| std::str::from_utf8(fields.get(field)?).ok()?.parse().ok();
    let (device, tree, point, options) = (fields.get(2)?, fields.get(3)?, fields.get(4)?, fields.get(5)?);
    // Any number of optional fields ends with a dash.
    let dash = fields.iter().skip(6).position(|field| *field == b"-")? + 6;
    let (kind, source) = (fields.get(dash + 1)?, fields.get(dash + 2)?);
    Some(Mount {
        id: number(0)?,
        parent: number(1)?,
        device: device.to_vec(),
        tree: unescape(tree),
        point: unescape(point),
        options: options.to_vec(),
        kind: kind.to_vec(),
        source: unescape(source),
    })
}

/// Undoes the octal escapes.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((byte, after)) = rest.split_first() {
        if let [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..] = rest {
            bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
            rest = after;
        } else {
            bytes.push(*byte);
            rest = after;
        }
    }
    OsString::from_vec(bytes).into()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "these are tests")]
mod tests {
    use std::os::unix::ffi::OsStrExt;
    use std::path::Path;

    use super::*;

    #[test]
    fn a_line_is_read_with_any_number_of_optional_fields() {
        for optional in ["", "shared:1 ", "shared:2 master:3 "] {
            let text = format!("42 41 0:37 /a /tank/my\\040box rw,noatime {optional}- zfs tank/one rw,xattr\n");
            let [mount] = &parse(text.as_bytes())[..] else { panic!("one line") };
            assert_eq!(
                (mount.id, mount.parent, &mount.device[..], &mount.kind[..]),
                (42, 41, &b"0:37"[..], &b"zfs"[..])
            );
            assert_eq!((mount.tree.as_path(), mount.point.as_path()), (Path::new("/a"), Path::new("/tank/my box")));
            assert_eq!((&mount.options[..], mount.source.as_path()), (&b"rw,noatime"[..], Path::new("tank/one")));
        }
    }

    #[test]
    fn no_line_makes_the_reader_panic() {
        for line in ["", " ", "1 2 3", "1 2 3:4 / /a rw -", "1 2 3:4 / /a rw - zfs", "- - - - - - -"] {
            assert_eq!(parse(line.as_bytes()), []);
        }
        assert!(!read().unwrap().is_empty());
    }

    #[test]
    fn bytes_that_are_not_escapes_stay() {
        for (text, bytes) in [("a\\040b", "a b"), ("a\\", "a\\"), ("\\9", "\\9"), ("\\134x", "\\x"), ("\\777", "\\777")]
        {
            assert_eq!(unescape(text.as_bytes()).as_os_str().as_bytes(), bytes.as_bytes());
        }
    }
}
