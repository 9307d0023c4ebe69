//! What differs between two versions.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crab_core::{Artifact, Error, ErrorKind, FileChange, FileChanges, Half, Manifest, Result, SandboxId, VersionId};
use parking_lot::Mutex;

use super::calls::call;
use super::{Engine, Inner};

/// A version by whose and which it is.
type Name = (SandboxId, VersionId);

/// How a process differs between two versions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum ProcessChangeKind {
    /// Only the newer version holds it.
    Started,
    /// Only the older version holds it.
    Ended,
    /// Both hold it. Its memory may differ: nobody compared it.
    Lives,
}

/// A process that differs, or may differ, between two versions.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub struct ProcessChange {
    /// Its number inside the sandbox.
    pub pid: u32,
    /// Its name.
    pub name: String,
    /// How it differs.
    pub kind: ProcessChangeKind,
}

/// What is known of the processes of two versions.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProcessDiff {
    /// Both versions hold the same image, or none.
    Unchanged,
    /// The images are two. In order of the process numbers.
    Changed(Vec<ProcessChange>),
    /// The images are two, or one is missing, and the processes are not named: why.
    Unknown(String),
}

/// What differs between two versions. Neither can be removed while this lives.
pub struct VersionDiff {
    files: Option<Box<dyn FileChanges>>,
    processes: ProcessDiff,
    _reading: Reading,
}

impl VersionDiff {
    /// The next path that differs, each once, in no order; `None` when all were given. Dropping the future loses
    /// nothing.
    ///
    /// # Errors
    /// Where the difference cannot be told to its end; what was given until then is right.
    pub async fn next_file(&mut self) -> Result<Option<FileChange>> {
        match &mut self.files {
            Some(files) => files.next().await,
            None => Ok(None),
        }
    }

    /// The processes that differ or may differ.
    #[must_use]
    pub fn processes(&self) -> &ProcessDiff {
        &self.processes
    }
}

impl std::fmt::Debug for VersionDiff {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VersionDiff").field("processes", &self.processes).finish_non_exhaustive()
    }
}

impl Engine {
    /// What differs between two versions, of one sandbox or of two. The files are compared by their backend and come as
    /// a stream; the processes by what their images name.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] where a version does not exist; [`ErrorKind::Unsupported`] where the backend of the files
    /// cannot compare, or the versions were made by different ones; [`ErrorKind::Corrupt`] where one is damaged;
    /// [`ErrorKind::TimedOut`].
    pub async fn diff(
        &self,
        (from_id, from): (&SandboxId, VersionId),
        (to_id, to): (&SandboxId, VersionId),
    ) -> Result<VersionDiff> {
        let inner = &self.0;
        inner.check_open()?;
        let reading = inner.read([(from_id.clone(), from), (to_id.clone(), to)])?;
        let [from, to] = [inner.version(from_id, from)?, inner.version(to_id, to)?];
        let processes = compare_processes(&from, &to);
        let files = match (from.filesystem.artifact(), to.filesystem.artifact()) {
            (Some(from), Some(to)) if from == to => None,
            (Some(from), Some(to)) => {
                let (backend, same) = (inner.backend_of(from)?, inner.backend_of(to)?);
                if !Arc::ptr_eq(&backend, &same) {
                    return Err(Error::new(ErrorKind::Unsupported, "the versions were made by different backends"));
                }
                let (from, to) = (from.clone(), to.clone());
                let limit = inner.options.deadlines.restore;
                Some(call("compare the files", limit, async move { backend.diff(&from, &to).await }).await?)
            }
            _ => return Err(Error::new(ErrorKind::Corrupt, "a version holds no files")),
        };
        Ok(VersionDiff { files, processes, _reading: reading })
    }
}

fn compare_processes(from: &Manifest, to: &Manifest) -> ProcessDiff {
    let (from, to) = match (&from.process, &to.process) {
        (Half::Missing(why), _) | (_, Half::Missing(why)) => return ProcessDiff::Unknown(why.clone()),
        (from, to) if from == to => return ProcessDiff::Unchanged,
        (from, to) => (from.artifact(), to.artifact()),
    };
    let (Some(old), Some(new)) = (named(from), named(to)) else {
        return ProcessDiff::Unknown("the process backend does not name what it saves".to_owned());
    };
    let mut changes = Vec::new();
    for pid in old.keys().chain(new.keys()).copied().collect::<BTreeSet<u32>>() {
        let mut add = |name: &str, kind| changes.push(ProcessChange { pid, name: name.to_owned(), kind });
        match (old.get(&pid), new.get(&pid)) {
            // The same number, but another program: one ended and another took its place, or it called exec.
            (Some(before), Some(after)) if before == after => add(after, ProcessChangeKind::Lives),
            (before, after) => {
                before.into_iter().for_each(|name| add(name, ProcessChangeKind::Ended));
                after.into_iter().for_each(|name| add(name, ProcessChangeKind::Started));
            }
        }
    }
    ProcessDiff::Changed(changes)
}

/// The processes of an image, of which none lived where there is no image; `None` where it does not name them.
fn named(image: Option<&Artifact>) -> Option<BTreeMap<u32, &str>> {
    let Some(image) = image else { return Some(BTreeMap::new()) };
    Some(image.processes()).filter(|processes| !processes.is_empty())
}

/// Versions that are being read, and those that are being removed.
#[derive(Debug, Default)]
pub(super) struct Readers(Mutex<Uses>);

#[derive(Debug, Default)]
struct Uses {
    reading: BTreeMap<Name, usize>,
    removing: BTreeSet<Name>,
}

/// Keeps versions from being removed while it lives.
struct Reading {
    inner: Arc<Inner>,
    names: [Name; 2],
}

impl Drop for Reading {
    fn drop(&mut self) {
        let mut uses = self.inner.readers.0.lock();
        for name in &self.names {
            if let Some(count) = uses.reading.get_mut(name) {
                *count -= 1;
                if *count == 0 {
                    uses.reading.remove(name);
                }
            }
        }
    }
}

/// Keeps versions from being read while they are removed.
pub(super) struct Removing<'a> {
    readers: &'a Readers,
    names: Vec<Name>,
}

impl Drop for Removing<'_> {
    fn drop(&mut self) {
        let mut uses = self.readers.0.lock();
        self.names.iter().for_each(|name| _ = uses.removing.remove(name));
    }
}

impl Readers {
    /// Begins to remove versions, of which each has one remover at a time; `None` while one is being read.
    pub(super) fn remove(&self, names: Vec<Name>) -> Option<Removing<'_>> {
        let mut uses = self.0.lock();
        if names.iter().any(|name| uses.reading.contains_key(name)) {
            return None;
        }
        uses.removing.extend(names.iter().cloned());
        Some(Removing { readers: self, names })
    }

    pub(super) fn is_read(&self, id: &SandboxId, version: VersionId) -> bool {
        let uses = self.0.lock();
        !uses.reading.is_empty() && uses.reading.contains_key(&(id.clone(), version))
    }
}

impl Inner {
    fn read(self: &Arc<Self>, names: [Name; 2]) -> Result<Reading> {
        let mut uses = self.readers.0.lock();
        if let Some((id, version)) = names.iter().find(|name| uses.removing.contains(name)) {
            return Err(Error::new(ErrorKind::NotFound, format!("{version} of {id} is being removed")));
        }
        for name in &names {
            *uses.reading.entry(name.clone()).or_default() += 1;
        }
        Ok(Reading { inner: self.clone(), names })
    }

    fn version(&self, id: &SandboxId, version: VersionId) -> Result<Arc<Manifest>> {
        let found = self.store.with(|index| index.sandboxes.get(id)?.versions.get(&version).cloned());
        found.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("{id} has no version {version}")))
    }
}
