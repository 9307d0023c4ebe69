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

use crab_core::{ArtifactId, Error, ErrorKind, OperationId, Result};

use crate::subvolume::Uuid;
use crate::versions::temporary;

const HEAD: &str = "crab-btrfs-restore 1";
const TAIL: &str = "end";
/// What the target of a link can hold.
const LONGEST: usize = 4000;

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
        let replaced = self.replaced.map_or_else(|| "-".to_owned(), |uuid| uuid.to_string());
        let keep = match &self.keep {
            Keep::No => "no".to_owned(),
            Keep::New(id) => format!("new {id}"),
            Keep::Held(id) => format!("held {id}"),
            Keep::Nothing(id) => format!("nothing {id}"),
        };
        format!(
            "{HEAD}\noperation {}\nroot {}\nsource {}\nreplaced {replaced}\nkeep {keep}\n{TAIL}\n",
            self.operation,
            escape(&self.root),
            self.source,
        )
    }

    fn from_text(text: &str) -> Option<Self> {
        let mut lines = text.strip_suffix('\n')?.split('\n');
        if lines.next()? != HEAD {
            return None;
        }
        let mut field = |name: &str| lines.next()?.strip_prefix(name)?.strip_prefix(' ');
        let operation = field("operation")?.parse().ok()?;
        let root = unescape(field("root")?)?;
        let source = field("source")?.parse().ok()?;
        let replaced = match field("replaced")? {
            "-" => None,
            uuid => Some(uuid.parse().ok()?),
        };
        let keep = field("keep")?;
        let keep = match keep.split_once(' ').unwrap_or((keep, "")) {
            ("no", "") => Keep::No,
            ("new", id) => Keep::New(id.parse().ok()?),
            ("held", id) => Keep::Held(id.parse().ok()?),
            ("nothing", id) => Keep::Nothing(id.parse().ok()?),
            _ => return None,
        };
        let record = Self { operation, root, source, replaced, keep };
        (record.root.is_absolute() && lines.next()? == TAIL && lines.next().is_none()).then_some(record)
    }
}

/// A path as one line of ASCII: what is not plain is written as `%` and two hexadecimal digits.
fn escape(path: &Path) -> String {
    let mut text = String::new();
    for byte in path.as_os_str().as_bytes() {
        match byte {
            b'!'..=b'~' if *byte != b'%' => text.push(char::from(*byte)),
            _ => text.push_str(&format!("%{byte:02x}")),
        }
    }
    text
}

fn unescape(text: &str) -> Option<PathBuf> {
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
    Some(OsString::from_vec(bytes).into())
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
            operation in id(), kept in id(), root: Vec<u8>, source: [u8; 16], replaced: Option<[u8; 16]>, keep in 0..4,
        ) {
            let root = [b"/".to_vec(), root].concat();
            let kept = ArtifactId::new(kept).unwrap();
            let record = Record {
                operation: OperationId::new(operation).unwrap(),
                root: OsString::from_vec(root).into(),
                source: Uuid(source),
                replaced: replaced.map(Uuid),
                keep: match keep {
                    0 => Keep::No,
                    1 => Keep::New(kept),
                    2 => Keep::Held(kept),
                    _ => Keep::Nothing(kept),
                },
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
            let _ = Record::from_text(&format!("{HEAD}\n{text}\n{TAIL}\n"));
            let _ = unescape(&text);
        }
    }
}
