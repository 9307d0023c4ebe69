//! What is written down before a restore begins, so that a later process can tell how far it came.
//!
//! It says what was meant, not how far it came: that is read off the datasets themselves, whose guids and marks say which
//! is which. It is one property of the sandbox's own dataset, so that it is written whole or not at all.

use std::ffi::OsString;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::PathBuf;

use crab_backend_files::{Keep, journal};
use crab_core::{Error, ErrorKind, OperationId, Result};

/// Says what wrote it.
const HEAD: &str = "1";
/// The longest value that ZFS gives to a property.
const LONGEST: usize = 8191;

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
        let replaced = self.replaced.map(|guid| format!("{guid:016x}"));
        let [keep, name] = self.keep.to_words();
        let text = journal::to_line(
            HEAD,
            &[
                self.operation.as_str().as_bytes(),
                self.root.as_os_str().as_bytes(),
                self.dataset.as_bytes(),
                self.clone.as_bytes(),
                replaced.as_ref().map_or(b"-", |guid| guid.as_bytes()),
                keep,
                name,
            ],
        );
        if text.len() <= LONGEST {
            return Ok(text);
        }
        let message = format!("the path of the root {} is too long to be written down", self.root.display());
        Err(Error::new(ErrorKind::InvalidInput, message).fix("use a shorter path"))
    }

    /// Reads what [`to_text`](Self::to_text) wrote; `None` where it is not whole.
    pub(crate) fn from_text(text: &str) -> Option<Self> {
        let [operation, root, dataset, clone, replaced, keep, name]: [Vec<u8>; 7] =
            journal::from_line(HEAD, text)?.try_into().ok()?;
        let text = |word: Vec<u8>| String::from_utf8(word).ok();
        let record = Self {
            operation: text(operation)?.parse().ok()?,
            root: PathBuf::from(OsString::from_vec(root)),
            dataset: text(dataset)?,
            clone: text(clone)?,
            replaced: match text(replaced)?.as_str() {
                "-" => None,
                guid => Some(u64::from_str_radix(guid, 16).ok()?),
            },
            keep: Keep::from_words(&keep, &name)?,
        };
        record.root.is_absolute().then_some(record)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crab_core::ArtifactId;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_record_survives_being_written(
            operation in "[a-z0-9][a-z0-9._-]{0,40}", root: Vec<u8>, dataset in "[a-z/ :]{1,30}",
            clone in "[a-z0-9-]{1,30}", replaced: Option<u64>, kept: bool,
        ) {
            let record = Record {
                operation: OperationId::new(operation).unwrap(),
                root: OsString::from_vec([b"/".to_vec(), root].concat()).into(),
                dataset,
                clone,
                replaced,
                keep: if kept { Keep::New(ArtifactId::new("kept").unwrap()) } else { Keep::No },
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
            let _ = Record::from_text(&format!("{HEAD} {text} end"));
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
