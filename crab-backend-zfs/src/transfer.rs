//! Export and import by `zfs send` and `zfs receive`, without their tools.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;

use async_trait::async_trait;
use crab_backend_files::blocking;
use crab_core::{Artifact, ArtifactId, ByteStream, Error, ErrorKind, ExportRequest, ImportRequest, Result, SandboxId};
use rustix::pipe::PipeFlags;
use tokio::sync::mpsc;

use crate::failure;
use crate::frames::{Beginning, Reader, Writer, corrupt};
use crate::pool::{Finish, Found};
use crate::sys::{Failed, Map, Value};
use crate::versions::Versions;

/// How much is read from ZFS at once.
const PIECE: usize = 1 << 20;
/// How many pieces may wait for the reader.
const WAITING: usize = 2;

/// Begins to export. The work is done by threads that end when the stream is dropped.
pub(crate) async fn export(versions: &Arc<Versions>, request: ExportRequest<'_>) -> Result<Box<dyn ByteStream>> {
    if request.resume.is_some() {
        return Err(Error::new(ErrorKind::Unsupported, "imports of ZFS versions cannot be continued").give_up());
    }
    let (artifact, base) = (request.artifact.clone(), request.base.cloned());
    let versions = Arc::clone(versions);
    blocking::run(move || {
        let found = versions.find_whole(&artifact)?;
        let base = base.map(|base| versions.find_whole(&base)).transpose()?;
        let raw = versions.pool().look_at(found.dataset())?.is_some_and(|dataset| dataset.encrypted);
        let (reader, writer) =
            rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(|errno| failure::system("make a pipe", errno))?;
        let (sender, receiver) = mpsc::channel(WAITING);
        thread::spawn(move || {
            let beginning = Beginning { base: base.as_ref().map(|base| base.guid), version: found.guid, raw };
            let sending = {
                let (versions, found) = (Arc::clone(&versions), found.clone());
                thread::spawn(move || send(&versions, &found, base.as_ref(), raw, writer))
            };
            if let Some(writer) = frame(beginning, std::fs::File::from(reader), &sender) {
                let last = match sending.join() {
                    Ok(Ok(())) => Ok(writer.end()),
                    Ok(Err(error)) => Err(error),
                    Err(_) => Err(Error::new(ErrorKind::Internal, "a thread that sends a version panicked")),
                };
                let _ = sender.blocking_send(last);
            }
        });
        Ok(Box::new(Exported(receiver)) as Box<dyn ByteStream>)
    })
    .await
}

fn send(versions: &Versions, found: &Found, base: Option<&Found>, raw: bool, into: OwnedFd) -> Result<()> {
    let from = base.map(|base| base.name.as_str());
    versions.pool().calls().send(&found.name, from, into.as_fd(), raw).map_err(|failed| match failed {
        Failed { errno: 18, .. } => {
            let message = format!("{} is not a later state of its base", found.name);
            Error::new(ErrorKind::InvalidInput, message).fix("export it in full, or on top of an earlier version")
        }
        failed => failure::zfs(format_args!("send {}", found.name), failed),
    })
}

/// Passes on what ZFS sends. `None` where nobody reads it any more, or where it broke off.
fn frame(beginning: Beginning, mut from: std::fs::File, to: &mpsc::Sender<Result<Vec<u8>>>) -> Option<Writer> {
    let (mut writer, first) = Writer::begin(beginning);
    to.blocking_send(Ok(first)).ok()?;
    let mut buffer = vec![0; PIECE];
    loop {
        // Pipes give little at once; a frame holds as much as there is room for.
        let mut count = 0;
        while count < buffer.len() {
            match from.read(&mut buffer[count..]) {
                Ok(0) => break,
                Ok(more) => count += more,
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => {
                    let _ = to.blocking_send(Err(Error::io("read what ZFS sends", error)));
                    return None;
                }
            }
        }
        if count == 0 {
            return Some(writer);
        }
        to.blocking_send(Ok(writer.frame(&buffer[..count]))).ok()?;
    }
}

struct Exported(mpsc::Receiver<Result<Vec<u8>>>);

#[async_trait]
impl ByteStream for Exported {
    async fn next(&mut self) -> Result<Option<Vec<u8>>> {
        self.0.recv().await.transpose()
    }
}

/// What the importing thread is told.
enum Told {
    Data(Vec<u8>),
    /// All of the stream came and was right.
    End,
}

/// Imports a stream as an artifact.
pub(crate) async fn import(versions: &Arc<Versions>, request: ImportRequest<'_>) -> Result<Artifact> {
    let ImportRequest { sandbox, artifact, base, stream } = request;
    let (mut reader, beginning) = Reader::begin(stream).await?;
    // With it the beginning is known to be right.
    let first = reader.frame().await?.ok_or_else(|| corrupt("is empty"))?;
    let incoming = {
        let (versions, sandbox, base) = (Arc::clone(versions), sandbox.clone(), base.cloned());
        blocking::run(move || Incoming::begin(&versions, &sandbox, &artifact, beginning, base.as_ref())).await?
    };
    let (sender, receiver) = mpsc::channel(WAITING);
    // Dropping this future drops the sender, at which the import is given up.
    let receiving = blocking::run(move || incoming.receive(receiver));
    let feeding = async move {
        let mut next = Some(first);
        while let Some(data) = next {
            if sender.send(Told::Data(data)).await.is_err() {
                // It failed, and says why.
                return Ok(());
            }
            next = reader.frame().await?;
        }
        let _ = sender.send(Told::End).await;
        Ok(())
    };
    let (received, fed) = futures_util::future::join(receiving, feeding).await;
    fed?;
    received
}

/// An import on its way. Where it is dropped before its end, nothing of it stays.
struct Incoming {
    versions: Arc<Versions>,
    sandbox: SandboxId,
    artifact: ArtifactId,
    version: u64,
    base: Option<String>,
    raw: bool,
    /// The dataset that receives; it gets another name at the end.
    dataset: Option<String>,
}

impl Incoming {
    fn begin(
        versions: &Arc<Versions>,
        sandbox: &SandboxId,
        artifact: &ArtifactId,
        beginning: Beginning,
        base: Option<&Artifact>,
    ) -> Result<Self> {
        let base = match (beginning.base, base) {
            (None, _) => None,
            (Some(_), None) => {
                let message = "the stream holds only what differs from a base, and none was named";
                return Err(Error::new(ErrorKind::InvalidInput, message).fix("name the base, or export in full"));
            }
            (Some(guid), Some(base)) => {
                let found = versions.find_whole(base)?;
                if found.guid != guid {
                    let message = format!("the stream belongs on top of another version than {}", base.id);
                    return Err(Error::new(ErrorKind::InvalidInput, message).fix("name the base that it was made with"));
                }
                Some(found.name)
            }
        };
        let _locked = versions.lock([sandbox]);
        versions.require_free(sandbox, artifact, None)?;
        let home = versions.make_home(sandbox)?;
        let dataset = format!("{home}/incoming-{:016x}", beginning.version);
        let exists = versions.pool().calls().exists(&dataset).map_err(|failed| failure::zfs("look", failed))?;
        if exists {
            let message = format!("the version is being imported for {sandbox} already");
            return Err(Error::new(ErrorKind::AlreadyExists, message));
        }
        // Refused now where the name would be too long.
        versions.wanted(&dataset, sandbox, artifact)?;
        versions.add_pending(&dataset);
        Ok(Self {
            versions: Arc::clone(versions),
            sandbox: sandbox.clone(),
            artifact: artifact.clone(),
            version: beginning.version,
            base,
            raw: beginning.raw,
            dataset: Some(dataset),
        })
    }

    /// Receives until the end is told. Blocks.
    fn receive(mut self, mut told: mpsc::Receiver<Told>) -> Result<Artifact> {
        let versions = Arc::clone(&self.versions);
        let calls = versions.pool().calls();
        let dataset = self.dataset.clone().unwrap_or_default();
        let wanted = versions.wanted(&dataset, &self.sandbox, &self.artifact)?;
        let (reader, writer) =
            rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(|errno| failure::system("make a pipe", errno))?;
        let feeding = thread::spawn(move || {
            let mut pipe = std::fs::File::from(writer);
            let mut ended = false;
            while let Some(next) = told.blocking_recv() {
                match next {
                    Told::Data(data) => {
                        if pipe.write_all(&data).is_err() {
                            break;
                        }
                    }
                    Told::End => ended = true,
                }
            }
            ended
        });
        let properties = Map::from([("canmount".to_owned(), Value::U64(0))]);
        let received = calls.receive(&wanted.snapshot, &properties, self.base.as_deref(), self.raw, reader.as_fd());
        // Whatever is not read fails to be written, and the feeding thread ends.
        drop(reader);
        let ended = feeding.join().unwrap_or(false);
        received.map_err(|failed| match failed.errno {
            // What ZFS says of streams that it cannot make sense of.
            22 | 52 | 1025..=1060 => corrupt("was refused by ZFS").caused_by(failure::zfs("receive it", failed)),
            _ => failure::zfs(format_args!("receive a version of {}", self.sandbox), failed),
        })?;
        if !ended {
            return Err(corrupt("ends early"));
        }
        let _locked = versions.lock([&self.sandbox]);
        versions.require_free(&self.sandbox, &self.artifact, None)?;
        let home = versions.home(&self.sandbox);
        versions.pool().mark(&wanted)?;
        let branch = format!("{home}/in-{:016x}-{:x}", self.version, std::process::id());
        calls.rename(&dataset, &branch).map_err(|failed| failure::zfs("rename a dataset", failed))?;
        versions.remove_pending(&dataset);
        self.dataset = Some(branch.clone());
        let wanted = versions.wanted(&branch, &self.sandbox, &self.artifact)?;
        versions.hold(&wanted.snapshot)?;
        self.dataset = None;
        let found = versions.pool().find_one(&self.sandbox, &self.artifact, Some(&branch))?.ok_or_else(|| {
            Error::new(ErrorKind::Internal, format!("the imported artifact {} is not there", self.artifact))
        })?;
        tracing::debug!(sandbox = %self.sandbox, artifact = %self.artifact, "imported a version");
        Ok(versions.describe(&found))
    }
}

impl Drop for Incoming {
    fn drop(&mut self) {
        let Some(dataset) = self.dataset.take() else { return };
        self.versions.remove_pending(&dataset);
        let calls = self.versions.pool().calls();
        if let Ok(wanted) = self.versions.wanted(&dataset, &self.sandbox, &self.artifact) {
            let _ = calls.destroy_snapshots([wanted.snapshot.as_str()]);
        }
        if let Err(failed) = calls.destroy(&dataset)
            && failed.errno != crate::sys::NOT_FOUND
        {
            tracing::warn!(dataset, ?failed, "an import that failed was left behind");
        }
        let _locked = self.versions.lock([&self.sandbox]);
        let home = self.versions.home(&self.sandbox);
        if let Err(error) = self.versions.pool().finish(&Finish { home: &home, ..Finish::default() }) {
            tracing::debug!(%error, "not tidied");
        }
    }
}

/// Removes what imports of a dead process left behind. The sandbox must be locked.
pub(crate) fn give_up(versions: &Versions, sandbox: &SandboxId) -> Result<()> {
    let home = versions.home(sandbox);
    let Some(about) = versions.pool().look_at(&home)? else { return Ok(()) };
    for child in about.children {
        if child.starts_with(&format!("{home}/incoming-")) && !versions.is_pending(&child) {
            let snapshots = versions.pool().look_at(&child)?.unwrap_or_default().snapshots;
            let calls = versions.pool().calls();
            calls
                .destroy_snapshots(snapshots.iter().map(String::as_str))
                .and_then(|()| calls.destroy(&child))
                .map_err(|failed| failure::zfs(format_args!("destroy the dataset {child}"), failed))?;
        }
    }
    Ok(())
}
