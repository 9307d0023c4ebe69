//! The durable artifacts: one directory for each, whole or not there.
//!
//! ```text
//! <images>/<sandbox>/<artifact>/manifest.json, pack-*     an artifact: the name is given last
//! <images>/<sandbox>/.tmp-<artifact>/                     one that is being written
//! <images>/<sandbox>/.trash-<artifact>-<n>/               one that is being removed
//! <images>/.failed/                                       logs of CRIU runs that failed
//! ```
//!
//! **An artifact's directory holds all that it needs.** Pages that an earlier artifact has are in packs that both have:
//! each has a hard link of its own, and the file system counts them. So artifacts may go in any order, at any moment,
//! and a pack goes with the last artifact that needs it.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crab_core::{Artifact, ArtifactId, Digest, Domain, Error, ErrorKind, External, Result, SandboxId};
use rustix::fs::AtFlags;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::deposit::{Deposit, Part, deposit};
use crate::pack::{BLOCK_PAGES, PAGE, Pack, PackName, Room};
use crate::rebuild::{Suspects, Whole, corrupt};
use crate::{files, recipe};

/// The file that says what an artifact is made of.
const MANIFEST: &str = "manifest.json";
/// It is small; a larger one is none.
const MANIFEST_LIMIT: u64 = 16 << 20;
const FORMAT: u32 = 2;
const TEMPORARY: &str = ".tmp-";
const TRASH: &str = ".trash-";
const FAILED: &str = ".failed";
/// So many logs of failures are kept.
const LOGS_KEPT: usize = 32;
/// The fact that ties an artifact to its manifest.
pub(crate) const FACT_MANIFEST: &str = "manifest-sha256";

/// What is stored beside the packs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Body {
    format: u32,
    pub(crate) sandbox: SandboxId,
    pub(crate) artifact: ArtifactId,
    pub(crate) external: Vec<External>,
    pub(crate) facts: BTreeMap<String, String>,
    /// Its own first.
    packs: Vec<PackName>,
    /// Where the list of images lies in its own pack: the first page, and how many bytes.
    recipe: (u32, u64),
    /// What was written for it.
    bytes: u64,
    /// Of all images together.
    size: u64,
}

/// The file: the body and the digest of the body as JSON without spaces.
#[derive(Debug, Serialize, Deserialize)]
struct Signed {
    sha256: Digest,
    body: Body,
}

/// The directory of images.
#[derive(Debug)]
pub(crate) struct Store {
    root: PathBuf,
    /// The level of zstd.
    level: i32,
    /// Names that captures of this process have taken and not given back.
    reserved: Mutex<HashSet<(SandboxId, ArtifactId)>>,
    suspects: Suspects,
}

/// A name that is taken for as long as this value lives.
#[derive(Debug)]
pub(crate) struct Reservation {
    store: Arc<Store>,
    sandbox: SandboxId,
    artifact: ArtifactId,
}

impl Drop for Reservation {
    fn drop(&mut self) {
        self.store.names().remove(&(self.sandbox.clone(), self.artifact.clone()));
    }
}

/// A durable artifact that its caller has not taken yet. Dropping it removes the artifact: nobody knows of it.
#[derive(Debug)]
pub(crate) struct Persisted {
    artifact: Artifact,
    taken: bool,
    name: Reservation,
}

impl Persisted {
    /// The caller has it.
    pub(crate) fn keep(mut self) -> Artifact {
        self.taken = true;
        self.artifact.clone()
    }
}

impl Drop for Persisted {
    fn drop(&mut self) {
        if !self.taken
            && let Err(error) = self.name.store.remove(&self.name.sandbox, &self.name.artifact)
        {
            tracing::warn!(%error, "an artifact that nobody took is left behind");
        }
    }
}

/// What is to be stored.
#[derive(Debug)]
pub(crate) struct Dump<'a> {
    /// The directory of its images.
    pub(crate) images: &'a Path,
    /// Those of them that are put together from parts of files.
    pub(crate) united: HashMap<String, Vec<Part>>,
    /// The artifact whose pages it is likely to have; without one it is the newest of the sandbox.
    pub(crate) like: Option<(SandboxId, ArtifactId)>,
    pub(crate) external: Vec<External>,
    pub(crate) facts: BTreeMap<String, String>,
}

/// An artifact that was looked at: what it says of itself, and its images. Its blocks are checked when they are read.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) body: Body,
    pub(crate) whole: Whole,
}

impl Store {
    /// Opens the directory. `level` is that of zstd for what is stored from now on.
    pub(crate) fn open(root: &Path, level: i32) -> Result<Arc<Self>> {
        files::private_directory(root)?;
        let suspects = Suspects::default();
        Ok(Arc::new(Self { root: root.to_owned(), level, reserved: Mutex::default(), suspects }))
    }

    fn names(&self) -> std::sync::MutexGuard<'_, HashSet<(SandboxId, ArtifactId)>> {
        // Only inserts and removes happen under the lock: a panic leaves it whole.
        self.reserved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn place(&self, sandbox: &SandboxId, artifact: &ArtifactId) -> PathBuf {
        self.root.join(sandbox.as_str()).join(artifact.as_str())
    }

    /// Takes a name.
    pub(crate) fn reserve(self: &Arc<Self>, sandbox: &SandboxId, artifact: &ArtifactId) -> Result<Reservation> {
        let free = std::fs::symlink_metadata(self.place(sandbox, artifact)).is_err()
            && self.names().insert((sandbox.clone(), artifact.clone()));
        if !free {
            return Err(Error::new(
                ErrorKind::AlreadyExists,
                format!("the sandbox {sandbox} has a process artifact {artifact} already"),
            )
            .fix("take another name, or remove that artifact"));
        }
        Ok(Reservation { store: Arc::clone(self), sandbox: sandbox.clone(), artifact: artifact.clone() })
    }

    /// Makes a dump durable under a reserved name.
    pub(crate) fn persist(&self, name: Reservation, dump: Dump<'_>) -> Result<Persisted> {
        let parent = self.root.join(name.sandbox.as_str());
        let temporary = parent.join(format!("{TEMPORARY}{}", name.artifact));
        files::private_directory(&parent)?;
        files::remove_all(&temporary)?;
        let done = self.fill(&temporary, &name, dump).and_then(|artifact| {
            let place = self.place(&name.sandbox, &name.artifact);
            std::fs::rename(&temporary, &place)
                .map_err(|e| Error::io(format!("name the artifact {}", place.display()), e))?;
            files::sync_directory(&parent).and_then(|()| files::sync_directory(&self.root)).inspect_err(|_| {
                // It may or may not be durable: then it must not be.
                let _ = std::fs::remove_dir_all(&place);
            })?;
            Ok(artifact)
        });
        match done {
            Ok(artifact) => Ok(Persisted { artifact, taken: false, name }),
            Err(error) => {
                let _ = std::fs::remove_dir_all(&temporary);
                Err(error)
            }
        }
    }

    fn fill(&self, temporary: &Path, name: &Reservation, dump: Dump<'_>) -> Result<Artifact> {
        let made = std::fs::DirBuilder::new().mode(0o700).create(temporary);
        made.map_err(|e| Error::io(format!("make {}", temporary.display()), e))?;
        let Dump { images, united, like, external, facts } = dump;
        let base = match like.or_else(|| self.newest(&name.sandbox)) {
            Some((sandbox, artifact)) => self.link_packs(&sandbox, &artifact, temporary),
            None => Vec::new(),
        };
        let Deposit { packs, recipe, recipe_size, written, size } =
            deposit(images, united, temporary, &base, self.level)?;
        drop(base);
        let (sandbox, artifact) = (name.sandbox.clone(), name.artifact.clone());
        let recipe = (recipe, recipe_size);
        let body = Body { format: FORMAT, sandbox, artifact, external, facts, packs, recipe, bytes: written, size };
        let (text, sha256) = sign(&body)?;
        let path = temporary.join(MANIFEST);
        let write = || {
            let mut file = files::create(&path)?;
            file.write_all(&text)?;
            file.sync_all()
        };
        write().map_err(|e| Error::io(format!("write {}", path.display()), e))?;
        files::sync_directory(temporary)?;
        let mut artifact = artifact_of(body, Some(sha256));
        artifact.bytes = Some(written.saturating_add(text.len() as u64));
        Ok(artifact)
    }

    /// The artifact of the sandbox that was stored last.
    fn newest(&self, sandbox: &SandboxId) -> Option<(SandboxId, ArtifactId)> {
        let parent = self.root.join(sandbox.as_str());
        let stored = |name: String| {
            let id = ArtifactId::new(&name).ok()?;
            let manifest = std::fs::symlink_metadata(parent.join(name).join(MANIFEST)).ok()?;
            Some((manifest.modified().ok()?, id))
        };
        let (_, id) = files::names(&parent).ok()?.into_iter().filter_map(stored).max()?;
        Some((sandbox.clone(), id))
    }

    /// Links the packs of an artifact into a directory and opens them there, where nobody removes them. What cannot be
    /// linked or is not whole is left out: its pages are written anew.
    fn link_packs(&self, sandbox: &SandboxId, artifact: &ArtifactId, target: &Path) -> Vec<Pack> {
        let name = format!("the process artifact {artifact} of the sandbox {sandbox}");
        let Ok(directory) = self.open_artifact(sandbox, artifact) else { return Vec::new() };
        let Ok(target) = files::open_directory(target) else { return Vec::new() };
        let Ok((body, _)) =
            owned(&directory, &name).map_err(drop).and_then(|()| read_manifest(&directory).map_err(drop))
        else {
            return Vec::new();
        };
        let suspects = self.suspects.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let link = |pack: PackName| {
            let file = pack.file();
            rustix::fs::linkat(&directory, &file, &target, &file, AtFlags::empty()).ok()?;
            let opened = Pack::open(&target, pack);
            if let Err(what) = &opened {
                tracing::warn!(%name, what, "a pack is damaged, and its pages are stored anew");
                let _ = rustix::fs::unlinkat(&target, &file, AtFlags::empty());
            }
            opened.ok()
        };
        body.packs.into_iter().filter(|pack| !suspects.contains(pack)).filter_map(link).collect()
    }

    /// Opens an artifact: all but its blocks is checked.
    pub(crate) fn open_whole(&self, artifact: &Artifact) -> Result<Opened> {
        let name = format!("the process artifact {} of the sandbox {}", artifact.id, artifact.sandbox);
        let directory = self.open_artifact(&artifact.sandbox, &artifact.id).map_err(|e| match e.kind() {
            std::io::ErrorKind::NotFound => Error::new(ErrorKind::NotFound, format!("{name} is not there")),
            _ => corrupt(&name, &format!("its directory cannot be opened: {e}")),
        })?;
        let bad = |what: String| corrupt(&name, &what);
        owned(&directory, &name)?;
        let (body, sha256) = read_manifest(&directory).map_err(bad)?;
        if body.sandbox != artifact.sandbox || body.artifact != artifact.id {
            return Err(bad(format!("its manifest is that of {} of {}", body.artifact, body.sandbox)));
        }
        if artifact.facts.get(FACT_MANIFEST).is_some_and(|expected| *expected != sha256.to_string()) {
            return Err(bad("its manifest is not the one that was stored".into()));
        }
        check_names(&directory, &body).map_err(bad)?;
        let packs: Vec<Pack> =
            body.packs.iter().map(|pack| Pack::open(&directory, *pack)).collect::<Result<_, _>>().map_err(bad)?;
        let images = read_recipe(&packs, body.recipe).map_err(bad)?;
        let whole = Whole { name, packs, images, suspects: Arc::clone(&self.suspects) };
        Ok(Opened { body, whole })
    }

    fn open_artifact(&self, sandbox: &SandboxId, artifact: &ArtifactId) -> std::io::Result<OwnedFd> {
        let root = files::open_directory(&self.root)?;
        let parent = files::open_directory_at(root, sandbox.as_str())?;
        files::open_directory_at(parent, artifact.as_str())
    }

    /// All artifacts of a sandbox. One whose manifest is damaged is named without what it says.
    pub(crate) fn list(&self, sandbox: &SandboxId) -> Result<Vec<Artifact>> {
        let mut found = Vec::new();
        for name in files::names(&self.root.join(sandbox.as_str()))? {
            let Ok(id) = ArtifactId::new(&name) else { continue };
            let Ok(directory) = self.open_artifact(sandbox, &id) else { continue };
            let (body, sha256) = match read_manifest(&directory) {
                Ok((body, sha256)) if body.sandbox == *sandbox && body.artifact == id => (body, Some(sha256)),
                _ => (Body::nameless(sandbox, &id), None),
            };
            found.push(artifact_of(body, sha256));
        }
        Ok(found)
    }

    /// Removes an artifact: the name first, so that a half-removed one is never taken for a whole one.
    pub(crate) fn remove(&self, sandbox: &SandboxId, artifact: &ArtifactId) -> Result<()> {
        let parent = self.root.join(sandbox.as_str());
        let place = self.place(sandbox, artifact);
        let prefix = format!("{TRASH}{artifact}-");
        let mut trash: BTreeSet<String> =
            files::names(&parent)?.into_iter().filter(|name| name.starts_with(&prefix)).collect();
        if std::fs::symlink_metadata(&place).is_ok() {
            let free = (0_u32..).map(|n| format!("{prefix}{n}")).find(|name| !trash.contains(name));
            // Counting does not end before a free name is found.
            let name = free.unwrap_or(prefix);
            std::fs::rename(&place, parent.join(&name))
                .map_err(|e| Error::io(format!("remove the artifact {}", place.display()), e))?;
            files::sync_directory(&parent)?;
            trash.insert(name);
        }
        trash.iter().try_for_each(|name| remove_any(&parent.join(name)))
    }

    /// Removes what was being written or removed when a process died.
    pub(crate) fn recover(&self) -> Result<()> {
        for sandbox in files::names(&self.root)? {
            let Ok(sandbox) = SandboxId::new(&sandbox) else { continue };
            let parent = self.root.join(sandbox.as_str());
            if !std::fs::symlink_metadata(&parent).is_ok_and(|metadata| metadata.is_dir()) {
                continue;
            }
            for name in files::names(&parent)? {
                let in_work = name.strip_prefix(TEMPORARY).and_then(|id| ArtifactId::new(id).ok());
                let in_work = in_work.is_some_and(|id| self.names().contains(&(sandbox.clone(), id)));
                if (name.starts_with(TEMPORARY) && !in_work) || name.starts_with(TRASH) {
                    remove_any(&parent.join(&name))?;
                }
            }
            // Goes where it is empty.
            if !self.names().iter().any(|(id, _)| *id == sandbox) {
                let _ = std::fs::remove_dir(&parent);
            }
        }
        Ok(())
    }

    /// Keeps a log, and the newest ones before it. `None` where that fails: it is not what the caller is about.
    pub(crate) fn keep_log(&self, name: &str, log: &Path) -> Option<PathBuf> {
        let keep = || {
            let directory = self.root.join(FAILED);
            files::private_directory(&directory)?;
            let io = |e| Error::io("keep the log", e);
            let stamp = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |t| t.as_millis());
            // The time first, in as many digits as it will have for 300 years, so that names sort by age.
            let path = directory.join(format!("{stamp:013}-{name}"));
            let mut kept = files::create(&path).map_err(io)?;
            std::io::copy(&mut File::open(log).map_err(io)?.take(4 << 20), &mut kept).map_err(io)?;
            let mut logs = files::names(&directory)?;
            logs.sort_unstable();
            for old in logs.iter().rev().skip(LOGS_KEPT) {
                let _ = std::fs::remove_file(directory.join(old));
            }
            Ok::<_, Error>(path)
        };
        keep().ok()
    }
}

impl Body {
    /// What is known of an artifact whose manifest cannot be read.
    fn nameless(sandbox: &SandboxId, artifact: &ArtifactId) -> Self {
        Self {
            format: FORMAT,
            sandbox: sandbox.clone(),
            artifact: artifact.clone(),
            external: Vec::new(),
            facts: BTreeMap::new(),
            packs: Vec::new(),
            recipe: (0, 0),
            bytes: 0,
            size: 0,
        }
    }
}

fn artifact_of(body: Body, manifest: Option<Digest>) -> Artifact {
    let mut facts = body.facts;
    if let Some(sha256) = manifest {
        facts.insert(FACT_MANIFEST.to_owned(), sha256.to_string());
    }
    Artifact {
        id: body.artifact,
        sandbox: body.sandbox,
        domain: Domain::Process,
        backend: crate::NAME.to_owned(),
        bytes: Some(body.bytes),
        size: Some(body.size),
        depends_on: Vec::new(),
        external: body.external,
        facts,
    }
}

/// A directory that another user may have filled is not read.
fn owned(directory: &OwnedFd, name: &str) -> Result<()> {
    let stat = rustix::fs::fstat(directory).map_err(|e| Error::io("look at an artifact", e.into()))?;
    if stat.st_uid == rustix::process::geteuid().as_raw() && stat.st_mode & 0o022 == 0 {
        return Ok(());
    }
    Err(corrupt(name, "others than this user may write to its directory"))
}

fn sign(body: &Body) -> Result<(Vec<u8>, Digest)> {
    let json = |e| Error::new(ErrorKind::Internal, "an artifact's manifest cannot be written").caused_by(e);
    let sha256 = Digest(Sha256::digest(serde_json::to_vec(body).map_err(json)?).into());
    let text = serde_json::to_vec_pretty(&Signed { sha256, body: body.clone() }).map_err(json)?;
    Ok((text, sha256))
}

fn read_manifest(directory: &OwnedFd) -> Result<(Body, Digest), String> {
    let file = files::open_file_at(directory, MANIFEST).map_err(|e| format!("{MANIFEST} cannot be opened: {e}"))?;
    let metadata = file.metadata().map_err(|e| format!("{MANIFEST} cannot be read: {e}"))?;
    if !metadata.is_file() || metadata.len() > MANIFEST_LIMIT {
        return Err(format!("{MANIFEST} is no manifest"));
    }
    let mut text = Vec::new();
    file.take(MANIFEST_LIMIT).read_to_end(&mut text).map_err(|e| format!("{MANIFEST} cannot be read: {e}"))?;
    parse_manifest(&text)
}

fn parse_manifest(text: &[u8]) -> Result<(Body, Digest), String> {
    let signed: Signed = serde_json::from_slice(text).map_err(|e| format!("{MANIFEST} cannot be read: {e}"))?;
    let body = serde_json::to_vec(&signed.body).map_err(|e| format!("{MANIFEST} cannot be read: {e}"))?;
    if Digest(Sha256::digest(body).into()) != signed.sha256 {
        return Err(format!("{MANIFEST} does not match its checksum"));
    }
    if signed.body.format != FORMAT {
        return Err(format!("{MANIFEST} has format {}, and this version reads {FORMAT}", signed.body.format));
    }
    Ok((signed.body, signed.sha256))
}

/// The list of images, from the artifact's own pack.
fn read_recipe(packs: &[Pack], (first, size): (u32, u64)) -> Result<Vec<recipe::Image>, String> {
    let own = packs.first().ok_or("it has no packs")?;
    let (first, mut list) = (first as usize, Vec::new());
    let pages = size.div_ceil(PAGE as u64);
    let last = u64::try_from(first).unwrap_or(u64::MAX).saturating_add(pages);
    if size > recipe::LIMIT || last > own.pages().len() as u64 {
        return Err("the list of its images lies outside of its pack".to_owned());
    }
    let size = usize::try_from(size).map_err(|e| e.to_string())?;
    let begin = first % BLOCK_PAGES * PAGE;
    let (mut room, mut pages) = (Room::default(), Vec::new());
    for block in first / BLOCK_PAGES.. {
        if list.len() >= begin + size {
            break;
        }
        own.read_block(block, &mut room, &mut pages)?;
        list.extend_from_slice(&pages);
    }
    let list = list.get(begin..begin + size).ok_or("the list of its images is cut short")?;
    let pages: Vec<usize> = packs.iter().map(|pack| pack.pages().len()).collect();
    recipe::decode(list, &pages)
}

/// The directory holds what the manifest names and nothing else: nothing of a stranger's is kept with it.
fn check_names(directory: &OwnedFd, body: &Body) -> Result<(), String> {
    let entries = rustix::fs::Dir::read_from(directory).map_err(|e| format!("its directory cannot be read: {e}"))?;
    for entry in entries {
        let entry = entry.map_err(|e| format!("its directory cannot be read: {e}"))?;
        let name = entry.file_name().to_string_lossy();
        let named = PackName::from_file(&name).is_some_and(|pack| body.packs.contains(&pack));
        if !matches!(&*name, "." | ".." | MANIFEST) && !named {
            return Err(format!("it holds an unexpected {name:?}"));
        }
    }
    Ok(())
}

/// Removes a directory, or what a stranger put in its place.
fn remove_any(path: &Path) -> Result<()> {
    match std::fs::symlink_metadata(path) {
        Ok(metadata) if !metadata.is_dir() => {
            std::fs::remove_file(path).map_err(|e| Error::io(format!("remove {}", path.display()), e))
        }
        _ => files::remove_all(path),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::os::unix::fs::MetadataExt;

    struct World {
        _directory: tempfile::TempDir,
        root: PathBuf,
        store: Arc<Store>,
        sandbox: SandboxId,
    }

    fn world() -> World {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("images");
        World { store: Store::open(&root, 1).unwrap(), root, sandbox: "box".parse().unwrap(), _directory: directory }
    }

    /// Memory: a page for each number. Page 0 is zeros, even ones compress, and others do not.
    fn memory(pages: impl IntoIterator<Item = u64>) -> Vec<u8> {
        let page = |n: u64| {
            let mut page = vec![0; PAGE];
            match n {
                0 => {}
                n if n.is_multiple_of(2) => page[..8].copy_from_slice(&n.to_le_bytes()),
                n => blake3::Hasher::new().update(&n.to_le_bytes()).finalize_xof().fill(&mut page),
            }
            page
        };
        pages.into_iter().flat_map(page).collect()
    }

    impl World {
        fn persist(&self, id: &str, memory: &[u8], like: Option<&str>) -> Result<Artifact> {
            let source = tempfile::tempdir().unwrap();
            std::fs::write(source.path().join("core-1.img"), format!("the core of {id}")).unwrap();
            std::fs::write(source.path().join("empty.img"), "").unwrap();
            std::fs::write(source.path().join("pages-1.img"), memory).unwrap();
            let name = self.store.reserve(&self.sandbox, &id.parse().unwrap())?;
            let facts = BTreeMap::from([("tasks".to_owned(), "1".to_owned())]);
            let external = vec![External::Pipe { inode: 4 }];
            let like = like.map(|id| (self.sandbox.clone(), id.parse().unwrap()));
            let dump = Dump { images: source.path(), united: HashMap::new(), like, external, facts };
            self.store.persist(name, dump).map(Persisted::keep)
        }
        fn put(&self, id: &str) -> Artifact {
            self.persist(id, &memory(1..800), None).unwrap()
        }
        /// The memory that comes back.
        fn rebuilt(&self, artifact: &Artifact) -> Result<Vec<u8>> {
            let target = tempfile::tempdir().unwrap();
            self.store.open_whole(artifact)?.whole.rebuild(target.path(), |_| true, &|| Ok(()))?;
            let core = std::fs::read_to_string(target.path().join("core-1.img")).unwrap();
            assert_eq!(core, format!("the core of {}", artifact.id));
            assert_eq!(std::fs::read(target.path().join("empty.img")).unwrap(), b"");
            Ok(std::fs::read(target.path().join("pages-1.img")).unwrap())
        }
        fn path(&self, id: &str, file: &str) -> PathBuf {
            self.root.join("box").join(id).join(file)
        }
        fn packs(&self, id: &str) -> Vec<PathBuf> {
            let names = files::names(&self.path(id, "")).unwrap();
            names.into_iter().filter(|name| name.starts_with("pack-")).map(|name| self.path(id, &name)).collect()
        }
        fn kind(&self, artifact: &Artifact) -> Option<ErrorKind> {
            let checked = self.store.open_whole(artifact).and_then(|opened| opened.whole.check());
            let rebuilt = self.rebuilt(artifact).map(drop);
            assert_eq!(checked.is_ok(), rebuilt.is_ok(), "{checked:?} {rebuilt:?}");
            checked.err().map(|e| e.kind())
        }
    }

    #[test]
    fn an_artifact_tells_what_it_holds_and_what_was_written_for_it() {
        let world = world();
        let (first, second) = (world.put("a1"), world.put("a2"));
        let size = ("the core of a1".len() + memory(1..800).len()) as u64;
        assert_eq!((first.size, second.size), (Some(size), Some(size)));
        assert!(second.bytes.unwrap() < first.bytes.unwrap() / 10, "its pages are there already");
    }

    #[test]
    fn what_is_stored_is_found_whole_and_private() {
        let world = world();
        let artifact = world.put("a1");
        let opened = world.store.open_whole(&artifact).unwrap();
        assert_eq!(opened.body.facts["tasks"], "1");
        assert_eq!(world.rebuilt(&artifact).unwrap(), memory(1..800));
        let listed = world.store.list(&world.sandbox).unwrap();
        assert_eq!(listed.len(), 1);
        assert_eq!(listed[0].facts, artifact.facts);
        assert_eq!(listed[0].size, artifact.size);
        assert_eq!(listed[0].external, [External::Pipe { inode: 4 }]);
        let pack = world.packs("a1").pop().unwrap();
        for (path, mode) in [(world.path("a1", ""), 0o700), (pack, 0o600), (world.path("a1", MANIFEST), 0o600)] {
            assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, mode, "{}", path.display());
        }
    }

    #[test]
    fn only_pages_that_the_earlier_artifact_lacks_are_written() {
        let world = world();
        let first = world.put("a1");
        // A page in the middle, one moved, one of zeros, one twice.
        let pages = || (1..300).chain([9001, 7, 0, 9002, 9002]).chain(304..800);
        let second = world.persist("a2", &memory(pages()), Some("a1")).unwrap();
        assert_eq!(world.rebuilt(&second).unwrap(), memory(pages()));
        assert_eq!(world.rebuilt(&first).unwrap(), memory(1..800));
        assert!(first.bytes.unwrap() > 400 * PAGE as u64);
        assert!(second.bytes.unwrap() < 5 * PAGE as u64, "{:?}", second.bytes);
        assert_eq!(world.packs("a2").len(), 2);
        // Without being told which, it is the newest.
        let third = world.persist("a3", &memory(pages()), None).unwrap();
        assert!(third.bytes.unwrap() < 2 * PAGE as u64, "{:?}", third.bytes);
        assert_eq!(world.rebuilt(&third).unwrap(), memory(pages()));
    }

    #[test]
    fn pages_of_zeros_cost_nothing_and_come_back_as_holes() {
        let world = world();
        let artifact = world.persist("a1", &memory((0..4000).map(|n| n / 3999)), None).unwrap();
        assert!(artifact.bytes.unwrap() < 3 * PAGE as u64, "{:?}", artifact.bytes);
        let target = tempfile::tempdir().unwrap();
        world.store.open_whole(&artifact).unwrap().whole.rebuild(target.path(), |_| true, &|| Ok(())).unwrap();
        let pages = std::fs::metadata(target.path().join("pages-1.img")).unwrap();
        assert_eq!(pages.len(), 4000 * PAGE as u64);
        assert!(pages.blocks() * 512 < 1 << 20, "{}", pages.blocks());
    }

    #[test]
    fn artifacts_go_in_any_order_and_the_others_stay_whole() {
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [1, 3, 0, 2], [2, 0, 3, 1]] {
            let world = world();
            let content = |n: u64| memory((1..400 - n).chain(1000 * n..1000 * n + 40));
            let artifacts: Vec<Artifact> =
                (0..4).map(|n| world.persist(&format!("a{n}"), &content(n), None).unwrap()).collect();
            let mut left: BTreeSet<usize> = (0..4).collect();
            for gone in order {
                world.store.remove(&world.sandbox, &artifacts[gone].id).unwrap();
                left.remove(&gone);
                for n in &left {
                    assert_eq!(world.rebuilt(&artifacts[*n]).unwrap(), content(*n as u64), "{n} without {gone}");
                }
            }
            assert!(files::names(&world.root.join("box")).unwrap().is_empty());
        }
    }

    #[test]
    fn a_pack_that_is_mostly_dead_is_left_behind() {
        let world = world();
        world.put("a1");
        let second = world.persist("a2", &memory((1..300).chain(5000..5500)), None).unwrap();
        assert_eq!(world.packs("a2").len(), 1, "less than half of the first is needed");
        assert_eq!(world.rebuilt(&second).unwrap(), memory((1..300).chain(5000..5500)));
    }

    #[test]
    fn the_number_of_packs_stays_bounded() {
        let world = world();
        for n in 0..150_u64 {
            let id = format!("a{n}");
            let content = || (0..=n).flat_map(|n| 1000 * n + 2..1000 * n + 4);
            let artifact = world.persist(&id, &memory(content()), None).unwrap();
            assert!(world.packs(&id).len() <= 128, "{n}");
            if n > 120 {
                assert_eq!(world.rebuilt(&artifact).unwrap(), memory(content()));
            }
        }
    }

    #[test]
    fn nothing_new_refers_to_a_pack_that_is_damaged() {
        let world = world();
        let first = world.put("a1");
        let pack = world.packs("a1").pop().unwrap();
        let mut torn = std::fs::read(&pack).unwrap();
        torn[5000] ^= 1;
        std::fs::write(&pack, torn).unwrap();
        assert_eq!(world.kind(&first), Some(ErrorKind::Corrupt));
        let second = world.put("a2");
        assert_eq!(world.packs("a2").len(), 1);
        assert_eq!(world.rebuilt(&second).unwrap(), memory(1..800));
        // Nor to one whose table does not fit its name, also where nobody has looked at it before.
        let pack = world.packs("a2").pop().unwrap();
        let size = std::fs::metadata(&pack).unwrap().len();
        std::fs::File::options().write(true).open(&pack).unwrap().set_len(size - 20).unwrap();
        let third = world.put("a3");
        assert_eq!(world.rebuilt(&third).unwrap(), memory(1..800));
    }

    #[test]
    fn a_dump_that_holds_something_strange_leaves_nothing() {
        let world = world();
        let source = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/etc/passwd", source.path().join("core-1.img")).unwrap();
        let name = world.store.reserve(&world.sandbox, &"a1".parse().unwrap()).unwrap();
        let united = HashMap::new();
        let dump = Dump { images: source.path(), united, like: None, external: vec![], facts: BTreeMap::new() };
        world.store.persist(name, dump).unwrap_err();
        assert!(files::names(&world.root.join("box")).unwrap().is_empty());
    }

    #[test]
    fn a_rebuild_that_nobody_wants_any_more_ends() {
        let world = world();
        let artifact = world.put("a1");
        let target = tempfile::tempdir().unwrap();
        let gone = || Err(Error::new(ErrorKind::Cancelled, "gone"));
        let whole = world.store.open_whole(&artifact).unwrap().whole;
        assert_eq!(whole.rebuild(target.path(), |_| true, &gone).unwrap_err().kind(), ErrorKind::Cancelled);
    }

    #[test]
    fn a_flipped_bit_anywhere_is_seen() {
        let world = world();
        let artifact = world.put("a1");
        for path in [world.packs("a1").pop().unwrap(), world.path("a1", MANIFEST)] {
            let whole = std::fs::read(&path).unwrap();
            let mut torn = whole.clone();
            let middle = torn.len() / 2;
            torn[middle] ^= 1;
            std::fs::write(&path, torn).unwrap();
            assert_eq!(world.kind(&artifact), Some(ErrorKind::Corrupt), "{}", path.display());
            std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
            assert_eq!(world.kind(&artifact), Some(ErrorKind::Corrupt), "{} cut short", path.display());
            std::fs::write(&path, whole).unwrap();
            assert_eq!(world.kind(&artifact), None);
        }
    }

    #[test]
    fn links_fifos_and_strangers_are_refused() {
        let world = world();
        let artifact = world.put("a1");
        for name in ["stranger.img", "pack-00112233445566778899aabbccddeeff"] {
            let stranger = world.path("a1", name);
            std::fs::write(&stranger, "x").unwrap();
            assert_eq!(world.kind(&artifact), Some(ErrorKind::Corrupt));
            std::fs::remove_file(&stranger).unwrap();
        }

        let pack = world.packs("a1").pop().unwrap();
        let aside = world.root.join("aside");
        std::fs::rename(&pack, &aside).unwrap();
        assert_eq!(world.kind(&artifact), Some(ErrorKind::Corrupt), "missing");
        std::os::unix::fs::symlink(&aside, &pack).unwrap();
        assert_eq!(world.kind(&artifact), Some(ErrorKind::Corrupt), "a link");
        std::fs::remove_file(&pack).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &pack, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert_eq!(world.kind(&artifact), Some(ErrorKind::Corrupt), "a fifo");
        std::fs::remove_file(&pack).unwrap();
        std::fs::rename(&aside, &pack).unwrap();
        assert_eq!(world.kind(&artifact), None);

        let place = world.path("a1", "");
        let elsewhere = world.root.join("elsewhere");
        std::fs::rename(&place, &elsewhere).unwrap();
        std::os::unix::fs::symlink(&elsewhere, world.root.join("box/a1")).unwrap();
        assert_eq!(world.kind(&artifact), Some(ErrorKind::Corrupt), "the directory is a link");
    }

    #[test]
    fn another_artifact_under_the_name_is_refused() {
        let world = world();
        let (one, two) = (world.put("a1"), world.put("a2"));
        std::fs::remove_dir_all(world.path("a1", "")).unwrap();
        assert_eq!(world.kind(&one), Some(ErrorKind::NotFound));
        std::fs::rename(world.path("a2", ""), world.path("a1", "")).unwrap();
        assert_eq!(world.kind(&one), Some(ErrorKind::Corrupt));
        assert_eq!(world.kind(&two), Some(ErrorKind::NotFound));
    }

    #[test]
    fn a_name_is_taken_until_it_is_given_back() {
        let world = world();
        let id = "a1".parse().unwrap();
        let held = world.store.reserve(&world.sandbox, &id).unwrap();
        let taken = |world: &World| world.store.reserve(&world.sandbox, &id).err().map(|e| e.kind());
        assert_eq!(taken(&world), Some(ErrorKind::AlreadyExists));
        drop(held);
        let artifact = world.put("a1");
        assert_eq!(taken(&world), Some(ErrorKind::AlreadyExists));
        world.store.remove(&world.sandbox, &artifact.id).unwrap();
        assert_eq!(taken(&world), None);
    }

    #[test]
    fn leftovers_of_the_dead_go_and_work_of_the_living_stays() {
        let world = world();
        let artifact = world.put("a1");
        let parent = world.root.join("box");
        for left in [".tmp-a2", ".trash-a3-0", ".tmp-a4"] {
            std::fs::create_dir(parent.join(left)).unwrap();
            std::fs::write(parent.join(left).join("x.img"), "x").unwrap();
        }
        let _at_work = world.store.reserve(&world.sandbox, &"a4".parse().unwrap()).unwrap();
        std::fs::create_dir(world.root.join("empty")).unwrap();
        assert_eq!(world.store.list(&world.sandbox).unwrap().len(), 1);
        world.store.recover().unwrap();
        let mut left = files::names(&parent).unwrap();
        left.sort();
        assert_eq!(left, [".tmp-a4", "a1"]);
        assert!(!world.root.join("empty").exists());
        world.store.open_whole(&artifact).unwrap();
    }

    #[test]
    fn a_removal_that_was_broken_off_is_finished_by_the_next() {
        let world = world();
        let artifact = world.put("a1");
        let parent = world.root.join("box");
        std::fs::rename(world.path("a1", ""), parent.join(".trash-a1-0")).unwrap();
        world.put("a1");
        world.store.remove(&world.sandbox, &artifact.id).unwrap();
        assert!(files::names(&parent).unwrap().is_empty());
        world.store.remove(&world.sandbox, &artifact.id).unwrap();
    }

    #[test]
    fn a_damaged_artifact_is_listed_by_name() {
        let world = world();
        world.put("a1");
        std::fs::write(world.path("a1", MANIFEST), "{").unwrap();
        let listed = world.store.list(&world.sandbox).unwrap();
        assert_eq!(listed[0].id.as_str(), "a1");
        assert!(listed[0].facts.is_empty());
    }

    #[test]
    fn only_the_newest_logs_are_kept() {
        let world = world();
        let log = world.root.join("log");
        std::fs::write(&log, "Error").unwrap();
        for n in 0..LOGS_KEPT + 5 {
            assert!(world.store.keep_log(&format!("{n}.log"), &log).is_some());
        }
        assert_eq!(files::names(&world.root.join(FAILED)).unwrap().len(), LOGS_KEPT);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn any_memory_after_any_other_comes_back(
            versions in proptest::collection::vec(proptest::collection::vec(0_u64..60, 0..200), 1..5),
            cut in 0_usize..PAGE,
        ) {
            let world = world();
            let stored: Vec<_> = versions.into_iter().enumerate().map(|(n, pages)| {
                let mut bytes = memory(pages);
                bytes.truncate(bytes.len().saturating_sub(cut));
                (world.persist(&format!("a{n}"), &bytes, None).unwrap(), bytes)
            }).collect();
            for (artifact, bytes) in stored.into_iter().rev() {
                prop_assert!(world.rebuilt(&artifact).unwrap() == bytes);
                world.store.remove(&world.sandbox, &artifact.id).unwrap();
            }
        }

        #[test]
        fn no_manifest_makes_the_reader_panic(text: Vec<u8>) {
            let _ = parse_manifest(&text);
        }
    }
}
