//! The store: what an engine knows durably. One directory, owned by one engine at a time.
//!
//! Directories are 0700 and files 0600: what versions hold may be secret. Every `.json` file is an
//! envelope with a format number and a SHA-256 over the exact text of its body; see below for the rule.
//!
//! | file | what it holds | made | removed | can it be rebuilt |
//! |---|---|---|---|---|
//! | `FORMAT` | `crab-store 1` | with the store | never | yes, by hand |
//! | `LOCK` | the owner's pid, for people; the lock is the kernel's (`flock`) and ends with the owner | with the store | never | yes, it may be deleted while no engine runs |
//! | `sandboxes/ID/sandbox.json` | the highest version number ever given away, what the last restore went back to, where it was forked from, whether somebody detached it | before the first checkpoint | when the sandbox is forgotten | partly: without it the newest manifest counts as the standing one |
//! | `sandboxes/ID/versions/vN.json` | the manifest of version N. **The version exists while this file does.** | as the last step of a checkpoint | as the first step of removing the version | no |
//! | `sandboxes/ID/versions/vN.removed` | version N is gone, its number is taken; the disk was too full to write that into the record | by a removal on a full disk | when the store is opened and there is room | yes, it may be deleted |
//! | `sandboxes/ID/marks.json` | pins and labels of versions | with the first of them | when the sandbox is forgotten | no: while it cannot be read every version counts as pinned |
//! | `sandboxes/ID/*.json.damaged-*` | a record or marks that could not be read, moved aside | when the file is written next | by hand | no |
//! | `operations/OP.json` | a restore or fork: what was asked, and its report once it has ended | before the operation touches anything | when newer operations of the sandbox have ended | no: a second attempt would not be known as one |
//! | `.crab-tmp-*` | an unfinished write | | when the store is opened | it is of no use |
//!
//! Anything else in these directories is *alien*: it is reported and left alone. So are torn records, records with a
//! wrong checksum, records of another sandbox or number, and records of a newer format. Nothing that a person may
//! still need is ever deleted because it could not be read, nor are artifacts that it may name.
//!
//! **Formats.** The store's format number in `FORMAT` covers the layout; each kind of record has its own number. A
//! number grows when an older reader would be wrong about the content. A reader reads all numbers up to its own. A
//! newer `FORMAT` refuses to open; a newer record is reported and stepped over.

mod durable;
mod envelope;
mod lock;
mod records;
mod scan;

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crab_core::{Error, ErrorKind, Manifest, OperationId, Result, SandboxId, VersionId};
use parking_lot::Mutex;

use crate::steps::Steps;
use durable::Writer;
use envelope::Kind;
use lock::Lock;
use records::MarksFile;

use durable::TEMPORARY;
pub(crate) use records::{ForkedFrom, Mark, Marks, Operation, OperationKind, Outcome, Restored, SandboxRecord};

/// The layout's format number that this library writes.
pub const STORE_FORMAT: u32 = 1;

/// In which way a file of the store is not what belongs there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DamageKind {
    /// It ends too early, as a write that was cut off.
    Torn,
    /// Its checksum does not fit its content.
    Checksum,
    /// It is no file of Crab's, or none that belongs in this place.
    Alien,
    /// It was written by a newer Crab.
    Newer,
    /// It is a record of another sandbox, version or operation than its name says.
    Misplaced,
    /// It cannot be read.
    Unreadable,
}

/// A file in the store that was stepped over.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Damaged {
    /// Which file.
    pub path: PathBuf,
    /// In whose directory, where it is in one.
    pub sandbox: Option<SandboxId>,
    /// Which version's manifest it would be by its name.
    pub version: Option<VersionId>,
    /// What is wrong.
    pub kind: DamageKind,
    /// More words for people.
    pub detail: String,
}

impl fmt::Display for Damaged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            DamageKind::Torn => "is torn",
            DamageKind::Checksum => "is damaged",
            DamageKind::Alien => "does not belong here",
            DamageKind::Newer => "was written by a newer Crab",
            DamageKind::Misplaced => "is the record of something else",
            DamageKind::Unreadable => "cannot be read",
        };
        write!(f, "{} {what}: {}", self.path.display(), self.detail)
    }
}

/// An error of the operating system in the store, with what can be done about it.
fn io_error(what: impl fmt::Display, source: std::io::Error) -> Error {
    let kind = source.kind();
    let error = Error::io(what, source);
    match kind {
        std::io::ErrorKind::ReadOnlyFilesystem => error.fix("mount the file system of the store writable"),
        std::io::ErrorKind::PermissionDenied => error.fix("give this user the store's directory"),
        _ => error,
    }
}

/// What the store knows of one sandbox.
#[derive(Clone, Debug, Default)]
pub(crate) struct SandboxIndex {
    pub(crate) record: SandboxRecord,
    /// The record file is there and whole.
    pub(crate) recorded: bool,
    /// What is wrong with the record file, where one is there that is not whole.
    pub(crate) record_damage: Option<DamageKind>,
    pub(crate) marks: Marks,
    /// What is wrong with the file of the marks, where one is there that is not whole.
    pub(crate) marks_damage: Option<DamageKind>,
    /// Versions that were removed while the disk was too full to write their number down.
    pub(crate) tombstones: Vec<VersionId>,
    pub(crate) versions: BTreeMap<VersionId, Arc<Manifest>>,
    /// Version numbers whose manifest stands under its name but cannot be used.
    pub(crate) damaged: Vec<Damaged>,
}

impl SandboxIndex {
    /// The number for the next version: higher than any that was ever given away.
    pub(crate) fn next_version(&self) -> VersionId {
        let newest = self.versions.last_key_value().map(|(version, _)| *version);
        let damaged = self.damaged.iter().filter_map(|damaged| damaged.version).max();
        newest.max(damaged).max(Some(self.record.highest)).unwrap_or(VersionId(0)).next()
    }

    /// Whether a version number is in use, whole or damaged.
    pub(crate) fn uses(&self, version: VersionId) -> bool {
        self.versions.contains_key(&version) || self.damaged.iter().any(|damaged| damaged.version == Some(version))
    }
}

#[derive(Debug, Default)]
pub(crate) struct Index {
    pub(crate) sandboxes: BTreeMap<SandboxId, SandboxIndex>,
    pub(crate) operations: BTreeMap<OperationId, Operation>,
    /// Operations whose record stands under its name but cannot be used.
    pub(crate) damaged_operations: BTreeSet<OperationId>,
    /// Everything that was stepped over when the store was opened.
    pub(crate) damaged: Vec<Damaged>,
}

/// The open store. All calls that write block; they are made off the runtime's own threads.
#[derive(Debug)]
pub(crate) struct Store {
    root: PathBuf,
    writer: Writer,
    index: Mutex<Index>,
    _lock: Lock,
}

impl Store {
    /// Takes and reads the store, making it where `root` does not exist or is empty.
    pub(crate) fn open(root: &Path, steps: Steps) -> Result<Self> {
        let writer = Writer::new(steps);
        Self::prepare(root)?;
        let lock = Lock::take(root)?;
        Self::check_format(root, &writer)?;
        for name in ["sandboxes", "operations"] {
            writer.make_dir(root, name)?;
        }
        let index = scan::scan(root)?;
        let store = Self { root: root.to_owned(), writer, index: Mutex::new(index), _lock: lock };
        store.bury();
        Ok(store)
    }

    /// Writes down the numbers that tombstones stand for, and removes them. They stay while the disk is full.
    fn bury(&self) {
        let waiting: Vec<(SandboxId, SandboxRecord, Vec<VersionId>)> = self.with(|index| {
            let with = index.sandboxes.iter().filter(|(_, sandbox)| !sandbox.tombstones.is_empty());
            with.map(|(id, sandbox)| (id.clone(), sandbox.record.clone(), sandbox.tombstones.clone())).collect()
        });
        for (id, record, tombstones) in waiting {
            let versions = self.sandbox_dir(&id).join("versions");
            let buried = self.put_sandbox(&id, record).and_then(|()| {
                tombstones.iter().try_for_each(|version| self.writer.remove(&versions, &tombstone_name(*version)))
            });
            match buried {
                Ok(()) => {
                    if let Some(sandbox) = self.index.lock().sandboxes.get_mut(&id) {
                        sandbox.tombstones.clear();
                    }
                }
                Err(error) => tracing::debug!(sandbox = %id, "tombstones stay for now: {error}"),
            }
        }
    }

    fn prepare(root: &Path) -> Result<()> {
        let entries = match fs::read_dir(root) {
            Ok(entries) => entries,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return fs::DirBuilder::new()
                    .recursive(true)
                    .mode(0o700)
                    .create(root)
                    .map_err(|source| io_error(format!("make the store {}", root.display()), source));
            }
            Err(error) => return Err(io_error(format!("read the store {}", root.display()), error)),
        };
        if root.join("FORMAT").exists() {
            return Ok(());
        }
        for entry in entries {
            let name = entry.map_err(|source| io_error(format!("read {}", root.display()), source))?.file_name();
            let name = name.to_string_lossy();
            // A store whose making was cut off, and what every fresh ext4 holds.
            if name != "LOCK" && name != "lost+found" && !name.starts_with(TEMPORARY) {
                return Err(Error::new(
                    ErrorKind::InvalidInput,
                    format!("{} is not empty and no store of Crab's", root.display()),
                )
                .fix("name another directory"));
            }
        }
        fs::set_permissions(root, fs::Permissions::from_mode(0o700))
            .map_err(|source| io_error(format!("make {} the owner's alone", root.display()), source))
    }

    fn check_format(root: &Path, writer: &Writer) -> Result<()> {
        let path = root.join("FORMAT");
        let text = match fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(writer.write(root, "FORMAT", &format!("crab-store {STORE_FORMAT}\n"))?);
            }
            Err(error) => return Err(io_error(format!("read {}", path.display()), error)),
        };
        match text.strip_prefix("crab-store ").and_then(|number| number.trim_end().parse::<u32>().ok()) {
            Some(format) if format <= STORE_FORMAT => Ok(()),
            Some(format) => Err(Error::new(
                ErrorKind::Unsupported,
                format!("the store {} has format {format}, this library reads up to {STORE_FORMAT}", root.display()),
            )
            .fix("use the newer Crab that wrote it")),
            None => Err(Error::new(ErrorKind::Corrupt, format!("{} is not what Crab writes", path.display()))
                .fix(format!("if this is a store, put the line \"crab-store {STORE_FORMAT}\" into it"))),
        }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    pub(crate) fn is_poisoned(&self) -> bool {
        self.writer.is_poisoned()
    }

    pub(crate) fn steps(&self) -> &Steps {
        &self.writer.steps
    }

    /// Looks at the index. `look` must not call the store.
    pub(crate) fn with<T>(&self, look: impl FnOnce(&Index) -> T) -> T {
        look(&self.index.lock())
    }

    fn sandbox_dir(&self, id: &SandboxId) -> PathBuf {
        self.root.join("sandboxes").join(id.as_str())
    }

    /// Makes the sandbox's directories and writes its record.
    pub(crate) fn put_sandbox(&self, id: &SandboxId, record: SandboxRecord) -> Result<()> {
        let text = envelope::encode(Kind::Sandbox, &record.for_file(id))?;
        let damage = self.with(|index| index.sandboxes.get(id).and_then(|sandbox| sandbox.record_damage));
        self.make_way(&self.sandbox_dir(id).join("sandbox.json"), damage)?;
        self.writer.make_dir(&self.root.join("sandboxes"), id.as_str())?;
        let dir = self.sandbox_dir(id);
        self.writer.make_dir(&dir, "versions")?;
        self.writer.write(&dir, "sandbox.json", &text)?;
        let mut index = self.index.lock();
        let entry = index.sandboxes.entry(id.clone()).or_default();
        entry.record = record;
        entry.recorded = true;
        entry.record_damage = None;
        Ok(())
    }

    /// Moves a damaged file that is to be written out of the way: a person may still want it.
    fn make_way(&self, path: &Path, damage: Option<DamageKind>) -> Result<()> {
        match damage {
            None => Ok(()),
            Some(DamageKind::Newer) => {
                Err(Error::new(ErrorKind::Unsupported, format!("{} was written by a newer Crab", path.display()))
                    .fix("use that Crab for this sandbox"))
            }
            Some(_) => {
                let aside = path.with_extension(format!("json.damaged-{:016x}", crate::nonce::nonce()));
                fs::rename(path, aside).map_err(|source| io_error(format!("move {} aside", path.display()), source))
            }
        }
    }

    /// Writes the pins and labels of a sandbox that has a record. Takes the place of what could not be read.
    pub(crate) fn put_marks(&self, id: &SandboxId, marks: Marks) -> Result<()> {
        let text = envelope::encode(Kind::Marks, &MarksFile { sandbox: id.clone(), marks: marks.clone() })?;
        let dir = self.sandbox_dir(id);
        let damage = self.with(|index| index.sandboxes.get(id).and_then(|sandbox| sandbox.marks_damage));
        self.make_way(&dir.join("marks.json"), damage)?;
        self.writer.write(&dir, "marks.json", &text)?;
        if let Some(sandbox) = self.index.lock().sandboxes.get_mut(id) {
            sandbox.marks = marks;
            sandbox.marks_damage = None;
        }
        Ok(())
    }

    /// Makes a version exist. Returns when it is durable.
    ///
    /// The second part of an error says whether it may exist all the same, now or after a crash; its artifacts must
    /// then be kept.
    pub(crate) fn put_version(&self, manifest: Arc<Manifest>) -> std::result::Result<(), (Error, bool)> {
        let clean = |error| (error, false);
        if self.with(|index| index.sandboxes.get(&manifest.sandbox).is_some_and(|s| s.uses(manifest.version))) {
            return Err(clean(Error::new(
                ErrorKind::AlreadyExists,
                format!("{} has a version {} already", manifest.sandbox, manifest.version),
            )));
        }
        let text = envelope::encode(Kind::Manifest, &*manifest).map_err(clean)?;
        let dir = self.sandbox_dir(&manifest.sandbox).join("versions");
        self.writer
            .write(&dir, &file_name(manifest.version), &text)
            .map_err(|failed| (failed.error, failed.maybe_written))?;
        let mut index = self.index.lock();
        let entry = index.sandboxes.entry(manifest.sandbox.clone()).or_default();
        entry.versions.insert(manifest.version, manifest);
        Ok(())
    }

    /// Gives a number away for good: something may stand under it that the index does not know.
    pub(crate) fn burn(&self, id: &SandboxId, version: VersionId) {
        if let Some(sandbox) = self.index.lock().sandboxes.get_mut(id) {
            sandbox.record.highest = sandbox.record.highest.max(version);
        }
    }

    /// Makes a version cease to exist. Its artifacts are the caller's to remove afterwards.
    pub(crate) fn remove_version(&self, id: &SandboxId, version: VersionId) -> Result<()> {
        let dir = self.sandbox_dir(id).join("versions");
        // Its number must not be given away again.
        let newest = self.with(|index| {
            let sandbox = index.sandboxes.get(id)?;
            let newest = sandbox.next_version() == version.next() && sandbox.record.highest < version;
            newest.then(|| SandboxRecord { highest: version, ..sandbox.record.clone() })
        });
        let recorded = newest.map_or(Ok(()), |record| self.put_sandbox(id, record));
        match recorded {
            Ok(()) => self.writer.remove(&dir, &file_name(version))?,
            // A rename needs no room where a new file does.
            Err(error) if error.kind().is_full() => {
                self.writer.rename(&dir, &file_name(version), &tombstone_name(version))?;
                self.burn(id, version);
                if let Some(sandbox) = self.index.lock().sandboxes.get_mut(id) {
                    sandbox.tombstones.push(version);
                }
            }
            Err(error) => return Err(error),
        }
        if let Some(sandbox) = self.index.lock().sandboxes.get_mut(id) {
            sandbox.versions.remove(&version);
        }
        Ok(())
    }

    /// Removes what the store knows of a sandbox without versions. Files that are not ours stay, and with them the
    /// directory.
    pub(crate) fn remove_sandbox(&self, id: &SandboxId) -> Result<()> {
        let dir = self.sandbox_dir(id);
        let left = self.with(|index| index.sandboxes.get(id).map(|s| s.damaged.len()).unwrap_or_default());
        if left > 0 {
            return Err(Error::new(
                ErrorKind::Corrupt,
                format!("{left} files of {id} in {} could not be read and were left", dir.display()),
            )
            .fix("look at them and delete the directory by hand"));
        }
        let tombstones = self.with(|index| index.sandboxes.get(id).map(|s| s.tombstones.clone()).unwrap_or_default());
        for version in tombstones {
            self.writer.remove(&dir.join("versions"), &tombstone_name(version))?;
        }
        self.writer.remove(&dir, "marks.json")?;
        self.writer.remove(&dir, "sandbox.json")?;
        for path in [dir.join("versions"), dir.clone()] {
            match fs::remove_dir(&path) {
                Ok(()) => {}
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(io_error(format!("remove {}", path.display()), error)),
            }
        }
        self.index.lock().sandboxes.remove(id);
        Ok(())
    }

    /// Records an operation durably.
    pub(crate) fn put_operation(&self, operation: Operation) -> Result<()> {
        if self.with(|index| index.damaged_operations.contains(&operation.id)) {
            let message = format!("the record of operation {} cannot be read", operation.id);
            return Err(Error::new(ErrorKind::Corrupt, message).fix("use another name"));
        }
        let text = envelope::encode(Kind::Operation, &operation)?;
        self.writer.write(&self.root.join("operations"), &format!("{}.json", operation.id), &text)?;
        self.index.lock().operations.insert(operation.id.clone(), operation);
        Ok(())
    }

    /// Forgets an operation that has ended.
    pub(crate) fn remove_operation(&self, id: &OperationId) -> Result<()> {
        self.writer.remove(&self.root.join("operations"), &format!("{id}.json"))?;
        self.index.lock().operations.remove(id);
        Ok(())
    }
}

fn file_name(version: VersionId) -> String {
    format!("{version}.json")
}

fn tombstone_name(version: VersionId) -> String {
    format!("{version}.removed")
}

#[cfg(test)]
mod tests;
