//! The durable images: one directory for each artifact, whole or not there.
//!
//! ```text
//! <images>/<sandbox>/<artifact>/*.img, manifest.json     an artifact: the name is given last
//! <images>/<sandbox>/.tmp-<artifact>/                     one that is being written
//! <images>/<sandbox>/.trash-<artifact>-<n>/               one that is being removed
//! <images>/.failed/                                       logs of CRIU runs that failed
//! ```

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use crab_core::{Artifact, ArtifactId, Digest, Domain, Error, ErrorKind, External, Result, SandboxId};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::files;

/// The file that says what an artifact is made of.
const MANIFEST: &str = "manifest.json";
/// It is small; a larger one is none.
const MANIFEST_LIMIT: u64 = 16 << 20;
const FORMAT: u32 = 1;
const TEMPORARY: &str = ".tmp-";
const TRASH: &str = ".trash-";
const FAILED: &str = ".failed";
/// So many logs of failures are kept.
const LOGS_KEPT: usize = 32;
/// So many images are written at once.
const WRITERS: usize = 4;
/// The fact that ties an artifact to its manifest.
pub(crate) const FACT_MANIFEST: &str = "manifest-sha256";

/// What is stored beside the images.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Body {
    format: u32,
    pub(crate) sandbox: SandboxId,
    pub(crate) artifact: ArtifactId,
    pub(crate) external: Vec<External>,
    pub(crate) facts: BTreeMap<String, String>,
    files: BTreeMap<String, Entry>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Entry {
    size: u64,
    sha256: Digest,
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
    /// Names that captures of this process have taken and not given back.
    reserved: Mutex<HashSet<(SandboxId, ArtifactId)>>,
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

/// An artifact that was looked at: its directory, held open, and what it says of itself.
#[derive(Debug)]
pub(crate) struct Opened {
    pub(crate) directory: OwnedFd,
    pub(crate) body: Body,
}

impl Store {
    pub(crate) fn open(root: &Path) -> Result<Arc<Self>> {
        files::private_directory(root)?;
        Ok(Arc::new(Self { root: root.to_owned(), reserved: Mutex::default() }))
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

    /// Makes the images in `source` durable under a reserved name.
    pub(crate) fn persist(
        &self,
        name: Reservation,
        source: &Path,
        external: Vec<External>,
        facts: BTreeMap<String, String>,
    ) -> Result<Persisted> {
        let parent = self.root.join(name.sandbox.as_str());
        let temporary = parent.join(format!("{TEMPORARY}{}", name.artifact));
        files::private_directory(&parent)?;
        files::remove_all(&temporary)?;
        let body = Body {
            format: FORMAT,
            sandbox: name.sandbox.clone(),
            artifact: name.artifact.clone(),
            external,
            facts,
            files: BTreeMap::new(),
        };
        let done = self.fill(&temporary, source, body).and_then(|artifact| {
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

    fn fill(&self, temporary: &Path, source: &Path, mut body: Body) -> Result<Artifact> {
        let made = std::fs::DirBuilder::new().mode(0o700).create(temporary);
        made.map_err(|e| Error::io(format!("make {}", temporary.display()), e))?;
        let mut bytes = 0_u64;
        for (file, entry) in copy_all(source, temporary, files::names(source)?)? {
            bytes = bytes.saturating_add(entry.size);
            body.files.insert(file, entry);
        }
        let (text, sha256) = sign(&body)?;
        let path = temporary.join(MANIFEST);
        let write = || {
            let mut file = create(&path)?;
            file.write_all(&text)?;
            file.sync_all()
        };
        write().map_err(|e| Error::io(format!("write {}", path.display()), e))?;
        files::sync_directory(temporary)?;
        let mut artifact = artifact_of(body, Some(sha256));
        artifact.bytes = Some(bytes.saturating_add(text.len() as u64));
        Ok(artifact)
    }

    /// Opens an artifact and checks all of it.
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
        for (file, entry) in &body.files {
            check_file(&directory, file, entry).map_err(bad)?;
        }
        Ok(Opened { directory, body })
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
            let mut kept = create(&path).map_err(io)?;
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
            files: BTreeMap::new(),
        }
    }
}

fn artifact_of(body: Body, manifest: Option<Digest>) -> Artifact {
    let bytes = body.files.values().map(|entry| entry.size).sum();
    let mut facts = body.facts;
    if let Some(sha256) = manifest {
        facts.insert(FACT_MANIFEST.to_owned(), sha256.to_string());
    }
    Artifact {
        id: body.artifact,
        sandbox: body.sandbox,
        domain: Domain::Process,
        backend: crate::NAME.to_owned(),
        bytes: Some(bytes),
        depends_on: Vec::new(),
        external: body.external,
        facts,
    }
}

fn corrupt(name: &str, what: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("{name} is damaged: {what}"))
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
    if signed.body.format > FORMAT {
        return Err(format!("{MANIFEST} has format {}, and this version reads up to {FORMAT}", signed.body.format));
    }
    if let Some(name) = signed.body.files.keys().find(|name| !is_image_name(name)) {
        return Err(format!("{MANIFEST} names a file {name:?}"));
    }
    Ok((signed.body, signed.sha256))
}

/// CRIU's own names for images are of this kind; nothing else goes in, and nothing else is read.
fn is_image_name(name: &str) -> bool {
    !name.starts_with('.')
        && (1..=128).contains(&name.len())
        && name != MANIFEST
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'-'))
}

/// The directory holds what the manifest names and nothing else: CRIU opens images by name.
fn check_names(directory: &OwnedFd, body: &Body) -> Result<(), String> {
    let entries = rustix::fs::Dir::read_from(directory).map_err(|e| format!("its directory cannot be read: {e}"))?;
    for entry in entries {
        let entry = entry.map_err(|e| format!("its directory cannot be read: {e}"))?;
        let name = entry.file_name().to_string_lossy();
        if !matches!(&*name, "." | ".." | MANIFEST) && !body.files.contains_key(&*name) {
            return Err(format!("it holds an unexpected {name:?}"));
        }
    }
    Ok(())
}

fn check_file(directory: &OwnedFd, name: &str, entry: &Entry) -> Result<(), String> {
    let unreadable = |e: std::io::Error| format!("{name} cannot be read: {e}");
    let file = files::open_file_at(directory, name).map_err(unreadable)?;
    let metadata = file.metadata().map_err(unreadable)?;
    if !metadata.is_file() || metadata.uid() != rustix::process::geteuid().as_raw() {
        return Err(format!("{name} is no file of this user"));
    }
    if metadata.len() != entry.size {
        return Err(format!("{name} has {} bytes instead of {}", metadata.len(), entry.size));
    }
    let mut hashing = Hashing { sink: std::io::sink(), hasher: Sha256::new(), size: 0 };
    std::io::copy(&mut file.take(entry.size), &mut hashing).map_err(unreadable)?;
    if hashing.entry() != *entry {
        return Err(format!("{name} does not match its checksum"));
    }
    Ok(())
}

/// A writer that takes the checksum of what goes through.
struct Hashing<W> {
    sink: W,
    hasher: Sha256,
    size: u64,
}

impl<W> Hashing<W> {
    fn entry(self) -> Entry {
        Entry { size: self.size, sha256: Digest(self.hasher.finalize().into()) }
    }
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        let count = self.sink.write(bytes)?;
        self.hasher.update(bytes.get(..count).unwrap_or_default());
        self.size = self.size.saturating_add(count as u64);
        Ok(count)
    }
    fn flush(&mut self) -> std::io::Result<()> {
        self.sink.flush()
    }
}

fn create(path: &Path) -> std::io::Result<File> {
    File::options().write(true).create_new(true).mode(0o600).open(path)
}

/// Copies images to stable storage. A dump has dozens of small ones, and file systems make writes durable that wait
/// together for little more than one that waits alone.
fn copy_all(source: &Path, target: &Path, names: Vec<String>) -> Result<Vec<(String, Entry)>> {
    let names = Mutex::new(names.into_iter());
    let next = || names.lock().unwrap_or_else(PoisonError::into_inner).next();
    let work = || {
        let mut done = Vec::new();
        while let Some(name) = next() {
            let entry = copy(&source.join(&name), &target.join(&name))
                .map_err(|e| Error::io(format!("store the image {name}"), e))?;
            done.push((name, entry));
        }
        Ok(done)
    };
    std::thread::scope(|scope| {
        let writers: Vec<_> = (0..WRITERS).map(|_| scope.spawn(work)).collect();
        let mut done = Vec::new();
        for writer in writers {
            let written: Result<Vec<_>> = writer
                .join()
                .unwrap_or_else(|_| Err(Error::new(ErrorKind::Internal, "a thread that stored images ended")));
            done.extend(written?);
        }
        Ok(done)
    })
}

/// Copies one image to stable storage.
fn copy(from: &Path, to: &Path) -> std::io::Result<Entry> {
    let name = to.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let mut source = File::options().read(true).custom_flags(NOFOLLOW).open(from)?;
    if !is_image_name(name) || !source.metadata()?.is_file() {
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, "CRIU wrote something that is no image"));
    }
    let mut target = Hashing { sink: create(to)?, hasher: Sha256::new(), size: 0 };
    let mut buffer = vec![0; 1 << 20];
    loop {
        match source.read(&mut buffer)? {
            0 => break,
            count => target.write_all(buffer.get(..count).unwrap_or_default())?,
        }
    }
    target.sink.sync_all()?;
    Ok(target.entry())
}

/// `O_NOFOLLOW` as the standard library takes it.
const NOFOLLOW: i32 = rustix::fs::OFlags::NOFOLLOW.bits().cast_signed();

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

    struct World {
        _directory: tempfile::TempDir,
        root: PathBuf,
        store: Arc<Store>,
        sandbox: SandboxId,
    }

    fn world() -> World {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("images");
        World { store: Store::open(&root).unwrap(), root, sandbox: "box".parse().unwrap(), _directory: directory }
    }

    impl World {
        fn put(&self, id: &str) -> Artifact {
            let source = tempfile::tempdir().unwrap();
            std::fs::write(source.path().join("core-1.img"), "core").unwrap();
            std::fs::write(source.path().join("pages-1.img"), vec![7; 3 << 20]).unwrap();
            let name = self.store.reserve(&self.sandbox, &id.parse().unwrap()).unwrap();
            let facts = BTreeMap::from([("tasks".to_owned(), "1".to_owned())]);
            let external = vec![External::Pipe { inode: 4 }];
            self.store.persist(name, source.path(), external, facts).unwrap().keep()
        }
        fn path(&self, id: &str, file: &str) -> PathBuf {
            self.root.join("box").join(id).join(file)
        }
        fn kind(&self, artifact: &Artifact) -> Option<ErrorKind> {
            self.store.open_whole(artifact).err().map(|e| e.kind())
        }
    }

    #[test]
    fn what_is_stored_is_found_whole_and_private() {
        let world = world();
        let artifact = world.put("a1");
        let opened = world.store.open_whole(&artifact).unwrap();
        assert_eq!(opened.body.facts["tasks"], "1");
        let listed = world.store.list(&world.sandbox).unwrap();
        assert_eq!(listed.len(), 1);
        assert_eq!(listed[0].facts, artifact.facts);
        assert_eq!(listed[0].external, [External::Pipe { inode: 4 }]);
        for (file, mode) in [("", 0o700), ("core-1.img", 0o600), (MANIFEST, 0o600)] {
            assert_eq!(std::fs::metadata(world.path("a1", file)).unwrap().mode() & 0o777, mode, "{file}");
        }
    }

    #[test]
    fn a_flipped_bit_anywhere_is_seen() {
        let world = world();
        let artifact = world.put("a1");
        for file in ["core-1.img", "pages-1.img", MANIFEST] {
            let path = world.path("a1", file);
            let whole = std::fs::read(&path).unwrap();
            let mut torn = whole.clone();
            let middle = torn.len() / 2;
            torn[middle] ^= 1;
            std::fs::write(&path, torn).unwrap();
            assert_eq!(world.kind(&artifact), Some(ErrorKind::Corrupt), "{file}");
            std::fs::write(&path, &whole[..whole.len() - 1]).unwrap();
            assert_eq!(world.kind(&artifact), Some(ErrorKind::Corrupt), "{file} cut short");
            std::fs::write(&path, whole).unwrap();
            assert_eq!(world.kind(&artifact), None);
        }
    }

    #[test]
    fn links_fifos_and_strangers_are_refused() {
        let world = world();
        let artifact = world.put("a1");
        let stranger = world.path("a1", "stranger.img");
        std::fs::write(&stranger, "x").unwrap();
        assert_eq!(world.kind(&artifact), Some(ErrorKind::Corrupt));
        std::fs::remove_file(&stranger).unwrap();

        let core = world.path("a1", "core-1.img");
        let aside = world.root.join("aside");
        std::fs::rename(&core, &aside).unwrap();
        assert_eq!(world.kind(&artifact), Some(ErrorKind::Corrupt), "missing");
        std::os::unix::fs::symlink(&aside, &core).unwrap();
        assert_eq!(world.kind(&artifact), Some(ErrorKind::Corrupt), "a link");
        std::fs::remove_file(&core).unwrap();
        rustix::fs::mknodat(rustix::fs::CWD, &core, rustix::fs::FileType::Fifo, 0o600.into(), 0).unwrap();
        assert_eq!(world.kind(&artifact), Some(ErrorKind::Corrupt), "a fifo");
        std::fs::remove_file(&core).unwrap();
        std::fs::rename(&aside, &core).unwrap();
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
        #[test]
        fn no_manifest_makes_the_reader_panic(text: Vec<u8>) {
            let _ = parse_manifest(&text);
        }

        #[test]
        fn an_image_name_is_one_normal_component(name in ".{0,20}") {
            if is_image_name(&name) {
                prop_assert_eq!(Path::new(&name).components().count(), 1);
                prop_assert!(!name.contains('/'));
            }
        }
    }
}
