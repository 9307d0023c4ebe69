//! What is written down before a restore begins, so that a later process can tell how far it came.
//!
//! It says what was meant, not how far it came: that is read off the subvolumes themselves, whose uuids say which is
//! which. So no step of a restore has to write here.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::{Path, PathBuf};

use crab_core::{ArtifactId, Error, ErrorKind, OperationId, Result};

use crate::subvolume::Uuid;
use crate::versions::write_whole;

const HEAD: &str = "crab-btrfs-restore 1";
const TAIL: &str = "end";

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
    /// Writes the record; durable after the next commit.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        write_whole(path, &self.to_text())
    }

    /// Reads the record, where there is one.
    pub(crate) fn read(path: &Path) -> Result<Option<Self>> {
        let text = match fs::read_to_string(path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io(format_args!("read {}", path.display()), error)),
        };
        match Self::from_text(&text) {
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
