//! The directory of all versions: what stands where in it, and what of it is ours.
//!
//! ```text
//! VERSIONS/                   0700
//!   .crab-btrfs               the mark: this directory is this backend's
//!   SANDBOX/                  0700, one for each sandbox
//!     ARTIFACT/               a read-only snapshot
//!     .capture-ARTIFACT/      a snapshot that is not persisted yet
//!     .import-ARTIFACT/       a subvolume that is being imported
//!     .restore                the journal of the last restore into this sandbox
//! ```
//!
//! What may be deleted is told by where it stands: a directory that carries the mark holds nothing but what this backend
//! put there, under names that begin with a dot or are artifact ids. A mark on each snapshot would need a moment in
//! which the snapshot exists without it, since nothing can be written into a read-only one. Outside of this directory
//! the only things ever deleted are subvolumes whose uuid or parent the journal of a restore names.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs;
use std::io::{self, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use crab_backend_files::{Locked, Locks, artifacts};
use crab_core::{Artifact, ArtifactId, Error, ErrorKind, Result, SandboxId, keep_house};
use rustix::io::Errno;

use crate::failure;
use crate::ioctl;
use crate::subvolume::{self, Info, Uuid};

/// The backend's name, stored with every artifact.
pub(crate) const NAME: &str = "btrfs";

const MARK: &str = ".crab-btrfs";
/// Says what wrote the directory, and in which format.
const MARK_TEXT: &str = "crab-backend-btrfs 1\n";
const CAPTURE: &str = ".capture-";
const IMPORT: &str = ".import-";
const JOURNAL: &str = ".restore";

const FACT_UUID: &str = "subvolume-uuid";
const FACT_CHANGED: &str = "subvolume-changed";
const FACT_ROOT: &str = "root-uuid";
const FACT_FILESYSTEM: &str = "filesystem-uuid";

/// The directory of all versions.
#[derive(Debug)]
pub(crate) struct Versions {
    base: PathBuf,
    filesystem: Uuid,
    locks: Locks,
}

impl Versions {
    /// Opens or makes the directory. Blocks.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let path = std::path::absolute(path).map_err(|error| Error::io("read the working directory", error))?;
        let missing = matches!(fs::symlink_metadata(&path), Err(error) if error.kind() == io::ErrorKind::NotFound);
        if missing {
            // Looked at before anything is made on a filesystem where it is of no use.
            let parent = path.parent().unwrap_or(Path::new("/"));
            let fd = subvolume::open_directory(parent).map_err(failure::at("open", parent))?;
            require_btrfs(&fd, parent)?;
            require_privilege(&fd)?;
            make_directory(&path)?;
        }
        let fd = subvolume::open_directory(&path).map_err(failure::at("open", &path))?;
        require_btrfs(&fd, &path)?;
        require_privilege(&fd)?;
        require_mark(&path)?;
        fs::set_permissions(&path, fs::Permissions::from_mode(0o700))
            .map_err(|error| Error::io(format_args!("make {} private", path.display()), error))?;
        let base = path.canonicalize().map_err(|error| Error::io(format_args!("resolve {}", path.display()), error))?;
        let filesystem = Uuid(ioctl::filesystem_id(&fd).map_err(failure::at("look at the filesystem of", &base))?);
        Ok(Self { base, filesystem, locks: Locks::default() })
    }

    pub(crate) fn base(&self) -> &Path {
        &self.base
    }

    /// Waits until nobody else changes the sandbox's versions. Blocks.
    pub(crate) fn lock(&self, id: &SandboxId) -> Locked<'_> {
        self.locks.lock(id)
    }

    /// Where a sandbox's versions stand.
    pub(crate) fn directory(&self, id: &SandboxId) -> PathBuf {
        self.base.join(id.as_str())
    }

    /// Where an artifact stands.
    pub(crate) fn path(&self, sandbox: &SandboxId, id: &ArtifactId) -> PathBuf {
        self.directory(sandbox).join(id.as_str())
    }

    /// Where the journal of a sandbox's restores stands.
    pub(crate) fn journal(&self, id: &SandboxId) -> PathBuf {
        self.directory(id).join(JOURNAL)
    }

    /// Opens a sandbox's directory, making it where it is missing.
    pub(crate) fn make(&self, id: &SandboxId) -> Result<OwnedFd> {
        let path = self.directory(id);
        make_directory(&path)?;
        subvolume::open_directory(&path).map_err(failure::at("open", &path))
    }

    /// Opens a sandbox's directory, where there is one.
    pub(crate) fn open_sandbox(&self, id: &SandboxId) -> Result<Option<OwnedFd>> {
        let path = self.directory(id);
        match subvolume::open_directory(&path) {
            Ok(fd) => Ok(Some(fd)),
            Err(Errno::NOENT) => Ok(None),
            Err(errno) => Err(failure::at("open", &path)(errno)),
        }
    }

    /// Removes a sandbox's directory where it is empty.
    pub(crate) fn tidy(&self, id: &SandboxId) {
        // Not being empty is the usual reason, and no other does harm.
        let _ = keep_house(|| fs::remove_dir(self.directory(id)));
    }

    /// Refuses a name under which something is stored or in the making.
    pub(crate) fn require_free(&self, sandbox: &SandboxId, id: &ArtifactId) -> Result<()> {
        for path in [self.path(sandbox, id), self.directory(sandbox).join(capture_name(id))] {
            match fs::symlink_metadata(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => {}
                Err(error) => return Err(Error::io(format_args!("look at {}", path.display()), error)),
                Ok(_) => {
                    return Err(artifacts::taken(sandbox, id));
                }
            }
        }
        Ok(())
    }

    /// Refuses a directory on another filesystem, from or to which nothing can be snapshotted.
    pub(crate) fn require_same_filesystem(&self, fd: impl AsFd, path: &Path) -> Result<()> {
        let id = match ioctl::filesystem_id(fd) {
            Ok(id) => Some(Uuid(id)),
            Err(Errno::NOTTY | Errno::INVAL) => None,
            Err(errno) => return Err(failure::at("look at the filesystem of", path)(errno)),
        };
        if id == Some(self.filesystem) {
            return Ok(());
        }
        let message = format!("{} is not on the btrfs filesystem that holds {}", path.display(), self.base.display());
        Err(Error::new(ErrorKind::InvalidInput, message).fix("keep sandboxes and versions on one btrfs filesystem"))
    }

    /// Refuses a root that holds the versions: each version would hold the ones before.
    pub(crate) fn require_outside(&self, root: &Path) -> Result<()> {
        let real = root.canonicalize().map_err(|error| Error::io(format_args!("resolve {}", root.display()), error))?;
        if self.base.starts_with(&real) {
            let message = format!("the versions in {} are inside the root {}", self.base.display(), root.display());
            return Err(Error::new(ErrorKind::InvalidInput, message).fix("keep the versions outside of every sandbox"));
        }
        Ok(())
    }

    /// Refuses an artifact that another backend made.
    pub(crate) fn require_ours(&self, artifact: &Artifact) -> Result<()> {
        artifacts::require_of(NAME, artifact)
    }

    /// Describes a snapshot as an artifact. `root` is the subvolume that it was taken of.
    pub(crate) fn describe(&self, sandbox: &SandboxId, id: &ArtifactId, info: &Info, root: Option<Uuid>) -> Artifact {
        let mut facts = BTreeMap::new();
        if let Some(uuid) = info.uuid {
            facts.insert(FACT_UUID.to_owned(), uuid.to_string());
        }
        facts.insert(FACT_CHANGED.to_owned(), info.changed.to_string());
        if let Some(root) = root {
            facts.insert(FACT_ROOT.to_owned(), root.to_string());
        }
        facts.insert(FACT_FILESYSTEM.to_owned(), self.filesystem.to_string());
        Artifact { facts, ..artifacts::bare(NAME, sandbox, id) }
    }

    /// Opens an artifact and checks that it is what it was: a read-only subvolume, and the one whose identity the
    /// artifact's facts record. Blocks.
    pub(crate) fn open_whole(&self, artifact: &Artifact) -> Result<(OwnedFd, Info)> {
        self.require_ours(artifact)?;
        let Some((fd, info)) = self.look(artifact)? else {
            return Err(artifacts::missing(artifact));
        };
        require_identity(artifact, &info)?;
        let damaged = |why: &str| Error::new(ErrorKind::Corrupt, format!("artifact {} {why}", artifact.id));
        if !info.read_only {
            return Err(damaged("is not read-only, so its files may have changed"));
        }
        // The generation would be raised by a balance of the filesystem; this number only by a change of files.
        match artifact.facts.get(FACT_CHANGED) {
            Some(recorded) if *recorded != info.changed.to_string() => Err(damaged("was changed after it was made")),
            _ => Ok((fd, info)),
        }
    }

    /// Opens what stands at an artifact's place, where there is something.
    pub(crate) fn look(&self, artifact: &Artifact) -> Result<Option<(OwnedFd, Info)>> {
        let path = self.path(&artifact.sandbox, &artifact.id);
        let alien =
            || Error::new(ErrorKind::Corrupt, format!("{} is not a subvolume, as artifacts are", path.display()));
        let fd = match subvolume::open_directory(&path) {
            Ok(fd) => fd,
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::NOTDIR | Errno::LOOP) => return Err(alien()),
            Err(errno) => return Err(failure::at("open", &path)(errno)),
        };
        if !subvolume::is_root(&fd).map_err(failure::at("look at", &path))? {
            return Err(alien());
        }
        let info = subvolume::info_of(&fd, &path)?;
        Ok(Some((fd, info)))
    }

    /// The names in a sandbox's directory; empty where there is none.
    pub(crate) fn names(&self, id: &SandboxId) -> Result<Vec<OsString>> {
        names_in(&self.directory(id))
    }

    /// The sandboxes that have a directory here.
    pub(crate) fn sandboxes(&self) -> Result<Vec<SandboxId>> {
        Ok(names_in(&self.base)?.iter().filter_map(|name| SandboxId::new(name.to_str()?).ok()).collect())
    }
}

/// Makes durable what was done to the subvolumes in a directory: made, removed or renamed. Blocks.
///
/// The kernel commits the filesystem for that, on this thread, without the dirty data of others' files. (To start a
/// commit and wait for it are two calls of btrfs, between which the one who is to do it may fall asleep for half a
/// minute.)
pub(crate) fn commit(directory: impl AsFd, path: &Path) -> Result<()> {
    rustix::fs::fsync(directory).map_err(failure::at("commit the changes in", path))
}

/// Refuses a subvolume that is not the one that the artifact's facts record.
pub(crate) fn require_identity(artifact: &Artifact, info: &Info) -> Result<()> {
    match artifact.facts.get(FACT_UUID) {
        Some(recorded) if info.uuid.map(|uuid| uuid.to_string()).as_ref() != Some(recorded) => {
            let message = format!("another subvolume stands in the place of artifact {}", artifact.id);
            Err(Error::new(ErrorKind::Corrupt, message))
        }
        _ => Ok(()),
    }
}

/// The name of a capture that is not persisted yet.
pub(crate) fn capture_name(id: &ArtifactId) -> OsString {
    format!("{CAPTURE}{id}").into()
}

/// The name of a subvolume that is being imported.
pub(crate) fn import_name(id: &ArtifactId) -> OsString {
    format!("{IMPORT}{id}").into()
}

/// Whether a name in a sandbox's directory is that of a subvolume that is not an artifact yet.
pub(crate) fn is_unfinished(name: &OsStr) -> bool {
    [CAPTURE, IMPORT].iter().any(|begin| name.as_encoded_bytes().starts_with(begin.as_bytes()))
}

fn make_directory(path: &Path) -> Result<()> {
    match keep_house(|| fs::DirBuilder::new().mode(0o700).create(path)) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(Error::io(format_args!("create the directory {}", path.display()), error))
        }
        _ => Ok(()),
    }
}

fn require_btrfs(fd: impl AsFd, path: &Path) -> Result<()> {
    if subvolume::on_btrfs(fd).map_err(failure::at("look at the filesystem of", path))? {
        return Ok(());
    }
    Err(Error::new(ErrorKind::InvalidInput, format!("{} is not on a btrfs filesystem", path.display()))
        .fix("name a directory on btrfs, or use another filesystem backend"))
}

fn require_privilege(fd: impl AsFd) -> Result<()> {
    match ioctl::check_privilege(fd) {
        Ok(()) => Ok(()),
        Err(Errno::PERM | Errno::ACCESS) => {
            let message = "this process may not remove btrfs subvolumes";
            Err(Error::new(ErrorKind::Unsupported, message).fix(failure::PRIVILEGE))
        }
        Err(errno) => Err(failure::os("find out the privileges on btrfs", errno)),
    }
}

/// Marks an empty directory as ours, and refuses one that holds other things.
fn require_mark(path: &Path) -> Result<()> {
    let mark = path.join(MARK);
    match fs::read_to_string(&mark) {
        Ok(text) if text == MARK_TEXT => return Ok(()),
        Ok(_) => {
            let message = format!("{} was written by another release of this backend", path.display());
            return Err(Error::new(ErrorKind::Unsupported, message).fix("use that release, or a new directory"));
        }
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => return Err(Error::io(format_args!("read {}", mark.display()), error)),
    }
    if let Some(name) = names_in(path)?.into_iter().find(|name| name.as_encoded_bytes() != b".crab-btrfs.tmp") {
        let message = format!("{} holds other things, such as {}", path.display(), name.display());
        return Err(Error::new(ErrorKind::InvalidInput, message).fix("name a new or empty directory"));
    }
    write_whole(&mark, MARK_TEXT)
}

/// Puts a small file in place so that, after a crash too, the old content or the new one is there and nothing between.
fn write_whole(path: &Path, text: &str) -> Result<()> {
    let temporary = temporary(path);
    let write = || -> io::Result<()> {
        let mut file = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        fs::rename(&temporary, path)
    };
    write().map_err(|error| {
        let _ = fs::remove_file(&temporary);
        Error::io(format_args!("write {}", path.display()), error)
    })
}

/// The name under which a file is written before it is put in place.
pub(crate) fn temporary(path: &Path) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(".tmp");
    name.into()
}

fn names_in(path: &Path) -> Result<Vec<OsString>> {
    let failed = |error| Error::io(format_args!("list {}", path.display()), error);
    match fs::read_dir(path) {
        Ok(entries) => entries.map(|entry| entry.map(|e| e.file_name()).map_err(failed)).collect(),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(failed(error)),
    }
}
