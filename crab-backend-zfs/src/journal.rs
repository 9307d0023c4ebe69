//! What is written down before a restore begins, so that a later process can tell how far it came.
//!
//! It says what was meant, not how far it came: that is read off the datasets themselves, whose guids and marks say which
//! is which. It is one property of the sandbox's own dataset, so that it is written whole or not at all.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crab_core::{ArtifactId, Error, ErrorKind, OperationId, Result};

/// The first word, which says what wrote it.
const HEAD: &str = "1";
/// The last word, without which it is torn.
const TAIL: &str = "end";
/// The longest value that ZFS gives to a property.
const LONGEST: usize = 8191;

/// What is done with the state that a restore replaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Keep {
    /// It is removed.
    No,
    /// This restore makes an artifact of it.
    New(ArtifactId),
    /// An earlier attempt of the same operation made an artifact of it, which stays.
    Held(ArtifactId),
    /// It would have become this artifact, but there was no state to replace.
    Nothing(ArtifactId),
}

impl Keep {
    /// The name that the caller gave.
    pub(crate) fn name(&self) -> Option<&ArtifactId> {
        match self {
            Self::No => None,
            Self::New(id) | Self::Held(id) | Self::Nothing(id) => Some(id),
        }
    }
}

/// One restore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// Names the restore.
    pub(crate) operation: OperationId,
    /// Where the restored tree will stand.
    pub(crate) root: PathBuf,
    /// The dataset that is mounted there, before and after.
    pub(crate) dataset: String,
    /// The mark of the clone that takes the root's place.
    pub(crate) clone: String,
    /// The guid of the dataset that was the root before, where there was one.
    pub(crate) replaced: Option<u64>,
    /// What is done with it.
    pub(crate) keep: Keep,
}

impl Record {
    /// The record as one line.
    ///
    /// # Errors
    /// Where it is too long for a property.
    pub(crate) fn to_text(&self) -> Result<String> {
        let replaced = self.replaced.map_or_else(|| "-".to_owned(), |guid| format!("{guid:016x}"));
        let (keep, name) = match &self.keep {
            Keep::No => ("no", None),
            Keep::New(id) => ("new", Some(id)),
            Keep::Held(id) => ("held", Some(id)),
            Keep::Nothing(id) => ("nothing", Some(id)),
        };
        let text = format!(
            "{HEAD} {} {} {} {} {replaced} {keep} {} {TAIL}",
            self.operation,
            escape(self.root.as_os_str().as_bytes()),
            escape(self.dataset.as_bytes()),
            escape(self.clone.as_bytes()),
            name.map_or("-", |id| id.as_str()),
        );
        if text.len() <= LONGEST {
            return Ok(text);
        }
        let message = format!("the path of the root {} is too long to be written down", self.root.display());
        Err(Error::new(ErrorKind::InvalidInput, message).fix("use a shorter path"))
    }

    /// Reads what [`to_text`](Self::to_text) wrote; `None` where it is not whole.
    pub(crate) fn from_text(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.split(' ').collect();
        let [HEAD, operation, root, dataset, clone, replaced, keep, name, TAIL] = words[..] else { return None };
        let root = PathBuf::from(OsString::from_vec(unescape(root)?));
        let text = |word: &str| String::from_utf8(unescape(word)?).ok();
        let replaced = match replaced {
            "-" => None,
            guid => Some(u64::from_str_radix(guid, 16).ok()?),
        };
        let keep = match (keep, name) {
            ("no", "-") => Keep::No,
            ("new", id) => Keep::New(id.parse().ok()?),
            ("held", id) => Keep::Held(id.parse().ok()?),
            ("nothing", id) => Keep::Nothing(id.parse().ok()?),
            _ => return None,
        };
        let record = Self {
            operation: operation.parse().ok()?,
            root,
            dataset: text(dataset)?,
            clone: text(clone)?,
            replaced,
            keep,
        };
        Path::new(&record.root).is_absolute().then_some(record)
    }
}

/// Bytes as one word of ASCII: what is not plain is written as `%` and two hexadecimal digits.
fn escape(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        match byte {
            b'!'..=b'~' if *byte != b'%' => text.push(char::from(*byte)),
            _ => text.push_str(&format!("%{byte:02x}")),
        }
    }
    text
}

fn unescape(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let mut digit = || char::from(rest.next()?).to_digit(16);
                let (high, low) = (digit()?, digit()?);
                u8::try_from(high << 4 | low).ok()?
            }
            _ => byte,
        });
    }
    Some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id() -> impl Strategy<Value = String> {
        "[a-z0-9][a-z0-9._-]{0,40}"
    }

    proptest! {
        #[test]
        fn a_record_survives_being_written(
            operation in id(), kept in id(), root: Vec<u8>, dataset in "[a-z/ :]{1,30}", clone in "[a-z0-9-]{1,30}",
            replaced: Option<u64>, keep in 0..4,
        ) {
            let root = [b"/".to_vec(), root].concat();
            let kept = ArtifactId::new(kept).unwrap();
            let record = Record {
                operation: OperationId::new(operation).unwrap(),
                root: OsString::from_vec(root).into(),
                dataset,
                clone,
                replaced,
                keep: match keep {
                    0 => Keep::No,
                    1 => Keep::New(kept),
                    2 => Keep::Held(kept),
                    _ => Keep::Nothing(kept),
                },
            };
            let text = record.to_text().unwrap();
            prop_assert_eq!(Record::from_text(&text), Some(record));
            // A torn journal is told from a whole one.
            for end in 0..text.len() {
                prop_assert_eq!(Record::from_text(&text[..end]), None);
            }
        }

        #[test]
        fn no_text_makes_the_reader_panic(text in "\\PC{0,200}") {
            let _ = Record::from_text(&text);
            let _ = Record::from_text(&format!("{HEAD} {text} {TAIL}"));
            let _ = unescape(&text);
        }
    }

    #[test]
    fn a_path_that_zfs_cannot_keep_is_refused() {
        let record = Record {
            operation: OperationId::new("op").unwrap(),
            root: format!("/{}", "\u{1}".repeat(3000)).into(),
            dataset: "tank/one".to_owned(),
            clone: "c".to_owned(),
            replaced: None,
            keep: Keep::No,
        };
        assert_eq!(record.to_text().unwrap_err().kind(), ErrorKind::InvalidInput);
    }
}
