//! What is written down before a restore begins, so that a later process can tell how far it came.
//!
//! It says what was meant, not how far it came: that is read off the subvolumes themselves, whose uuids say which is
//! which. So no step of a restore has to write here.
//!
//! A journal is the target of a symbolic link that leads nowhere. Unlike a file's content, that is a part of the tree: it
//! reaches the disk with the commit that everything else of its moment reaches it with, neither earlier nor later, and
//! nothing has to be waited for.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

use crab_backend_files::{Keep, journal};
use crab_core::{Error, ErrorKind, OperationId, Result};

use crate::subvolume::Uuid;
use crate::versions::temporary;

const HEAD: &str = "crab-btrfs-restore 2";
/// What the target of a link can hold.
const LONGEST: usize = 4000;

/// One restore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// Names the restore.
    pub(crate) operation: OperationId,
    /// Where the restored tree will stand.
    pub(crate) root: PathBuf,
    /// The snapshot that is restored.
    pub(crate) source: Uuid,
    /// The subvolume that stood at the root before, where one did.
    pub(crate) replaced: Option<Uuid>,
    /// What is done with it.
    pub(crate) keep: Keep,
}

impl Record {
    /// Writes the record; durable with all that was done before when the filesystem is committed next.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        let (text, temporary) = (self.to_text(), temporary(path));
        if text.len() > LONGEST {
            let message = format!("the path of the root {} is too long", self.root.display());
            return Err(Error::new(ErrorKind::InvalidInput, message).fix("use a shorter one"));
        }
        let write = || -> io::Result<()> {
            match fs::remove_file(&temporary) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                _ => symlink(&text, &temporary)?,
            }
            fs::rename(&temporary, path)
        };
        write().map_err(|error| {
            let _ = fs::remove_file(&temporary);
            Error::io(format_args!("write {}", path.display()), error)
        })
    }

    /// Reads the record, where there is one.
    pub(crate) fn read(path: &Path) -> Result<Option<Self>> {
        let text = match fs::read_link(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            // Something that is no link.
            Err(error) if error.kind() == io::ErrorKind::InvalidInput => PathBuf::new(),
            Err(error) => return Err(Error::io(format_args!("read {}", path.display()), error)),
        };
        match text.to_str().and_then(Self::from_text) {
            Some(record) => Ok(Some(record)),
            None => Err(Error::new(ErrorKind::Corrupt, format!("{} is not a whole journal", path.display()))
                .fix("see whether a \".crab-restore\" stands beside the sandbox's root, then remove the file")),
        }
    }

    fn to_text(&self) -> String {
        let (source, replaced) = (self.source.to_string(), self.replaced.map(|uuid| uuid.to_string()));
        let [keep, name] = self.keep.to_words();
        journal::to_line(
            HEAD,
            &[
                self.operation.as_str().as_bytes(),
                self.root.as_os_str().as_bytes(),
                source.as_bytes(),
                replaced.as_ref().map_or(b"-", |uuid| uuid.as_bytes()),
                keep,
                name,
            ],
        )
    }

    fn from_text(text: &str) -> Option<Self> {
        let [operation, root, source, replaced, keep, name]: [Vec<u8>; 6] =
            journal::from_line(HEAD, text)?.try_into().ok()?;
        let uuid = |word: &[u8]| std::str::from_utf8(word).ok()?.parse().ok();
        let record = Self {
            operation: std::str::from_utf8(&operation).ok()?.parse().ok()?,
            root: OsString::from_vec(root).into(),
            source: uuid(&source)?,
            replaced: if replaced == b"-" { None } else { Some(uuid(&replaced)?) },
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
            operation in "[a-z0-9][a-z0-9._-]{0,40}", root: Vec<u8>, source: [u8; 16], replaced: Option<[u8; 16]>,
            kept: bool,
        ) {
            let record = Record {
                operation: OperationId::new(operation).unwrap(),
                root: OsString::from_vec([b"/".to_vec(), root].concat()).into(),
                source: Uuid(source),
                replaced: replaced.map(Uuid),
                keep: if kept { Keep::New(ArtifactId::new("kept").unwrap()) } else { Keep::No },
            };
            let text = record.to_text();
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
}
