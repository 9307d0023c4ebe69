//! Export and import by `zfs send` and `zfs receive`, without their tools.
//!
//! What is received stands in a dataset that has a name for the artifact's. Where the stream breaks off, or the process
//! ends, ZFS keeps in it what came through, and another stream can go [on](crate::resume) from there. Such a dataset is
//! destroyed when the artifact is removed or is imported from the beginning, when ZFS refuses what comes, and by the
//! recovery after a week.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, SystemTime};

use async_trait::async_trait;
use crab_backend_files::blocking;
use crab_core::{
    Artifact, ArtifactId, ByteStream, Error, ErrorKind, ExportRequest, ImportRequest, Result, ResumeToken, SandboxId,
};
use rustix::pipe::PipeFlags;
use tokio::sync::mpsc;

use crate::failure;
use crate::frames::{Beginning, Reader, Writer, corrupt};
use crate::pool::{Dataset, Finish, Found, number_for};
use crate::resume::Point;
use crate::sys::{Failed, Map, Value};
use crate::versions::Versions;

/// How much is read from ZFS at once.
const PIECE: usize = 1 << 20;
/// How many pieces may wait for the reader.
const WAITING: usize = 2;
/// How long what came through of a stream that broke off is kept, at least.
pub(crate) const KEPT: Duration = Duration::from_secs(7 * 24 * 60 * 60);

/// Begins to export. The work is done by threads that end when the stream is dropped.
pub(crate) async fn export(versions: &Arc<Versions>, request: ExportRequest<'_>) -> Result<Box<dyn ByteStream>> {
    let point = request.resume.map(Point::read).transpose()?;
    let (artifact, base) = (request.artifact.clone(), request.base.cloned());
    let versions = Arc::clone(versions);
    blocking::run(move || {
        let found = versions.find_whole(&artifact)?;
        let base = base.map(|base| versions.find_whole(&base)).transpose()?;
        let beginning = Beginning {
            base: base.as_ref().map(|base| base.guid),
            version: found.guid,
            raw: versions.pool().look_at(found.dataset())?.is_some_and(|dataset| dataset.encrypted),
            from: point.map(|point| point.place),
        };
        if point.is_some_and(|point| (point.version, point.base) != (beginning.version, beginning.base)) {
            let message = format!("what broke off was not an import of {} on this base", artifact.id);
            return Err(Error::new(ErrorKind::InvalidInput, message)
                .fix("name the artifact and the base of the first attempt, or export from the beginning"));
        }
        let (reader, writer) =
            rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(|errno| failure::system("make a pipe", errno))?;
        let (sender, receiver) = mpsc::channel(WAITING);
        thread::spawn(move || {
            let sending = {
                let (versions, found) = (Arc::clone(&versions), found.clone());
                thread::spawn(move || send(&versions, &found, base.as_ref(), beginning, writer))
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

fn send(
    versions: &Versions,
    found: &Found,
    base: Option<&Found>,
    Beginning { raw, from, .. }: Beginning,
    into: OwnedFd,
) -> Result<()> {
    let since = base.map(|base| base.name.as_str());
    let sent = versions.pool().calls().send(&found.name, since, into.as_fd(), raw, from.unwrap_or_default());
    sent.map_err(|failed| match failed {
        Failed { errno: 18, .. } => {
            let message = format!("{} is not a later state of its base", found.name);
            Error::new(ErrorKind::InvalidInput, message).fix("export it in full, or on top of an earlier version")
        }
        Failed { errno: 2 | 22, .. } if from.is_some() => {
            let message = format!("{} has no such place as it is to be continued from", found.name);
            Error::new(ErrorKind::InvalidInput, message).fix("export it from the beginning")
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
        let mut data = first;
        // Given only when the next one is there: where the end is missing ZFS must not have all, and can go on.
        while let Some(next) = reader.frame().await? {
            if sender.send(Told::Data(data)).await.is_err() {
                // It failed, and says why.
                return Ok(());
            }
            data = next;
        }
        if sender.send(Told::Data(data)).await.is_ok() {
            let _ = sender.send(Told::End).await;
        }
        Ok(())
    };
    let (received, fed) = futures_util::future::join(receiving, feeding).await;
    fed?;
    received
}

/// From where an import of an artifact that broke off can be continued. Blocks.
pub(crate) fn resume_token(
    versions: &Versions,
    sandbox: &SandboxId,
    artifact: &ArtifactId,
) -> Result<Option<ResumeToken>> {
    let dataset = incoming(versions, sandbox, artifact);
    let found = versions.pool().look_at(&dataset)?.filter(|_| !versions.is_pending(&dataset));
    Ok(found.and_then(|found| found.resume).map(|point| ResumeToken(point.to_string())))
}

/// The dataset that receives an artifact.
fn incoming(versions: &Versions, sandbox: &SandboxId, artifact: &ArtifactId) -> String {
    format!("{}/incoming-{:016x}", versions.home(sandbox), number_for(artifact.as_str().bytes()))
}

/// How the sender of the parts ended.
#[derive(PartialEq, Eq)]
enum Fed {
    Whole,
    /// The stream broke off.
    Part,
    /// ZFS did not want more.
    Refused,
}

/// An import on its way. Where it is dropped before its end, nothing of it stays but what can be continued.
struct Incoming {
    versions: Arc<Versions>,
    sandbox: SandboxId,
    artifact: ArtifactId,
    base: Option<String>,
    raw: bool,
    /// What receives; it gets another name at the end.
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
        let dataset = incoming(versions, sandbox, artifact);
        if versions.is_pending(&dataset) {
            let message = format!("the artifact {artifact} is being imported for {sandbox} already");
            return Err(Error::new(ErrorKind::AlreadyExists, message));
        }
        // Refused now where the name would be too long.
        versions.wanted(&dataset, sandbox, artifact)?;
        let there = versions.pool().look_at(&dataset)?;
        match (there, beginning.from) {
            (there, Some(place)) => {
                let point = Point { version: beginning.version, base: beginning.base, place };
                if there.and_then(|there| there.resume) != Some(point) {
                    let message = format!("the stream does not go on where the import of {artifact} broke off");
                    return Err(Error::new(ErrorKind::InvalidInput, message)
                        .fix("export from where it can be continued, or from the beginning"));
                }
            }
            (Some(there), None) => destroy(versions, &dataset, &there)?,
            (None, None) => drop(versions.make_home(sandbox)?),
        }
        versions.add_pending(&dataset);
        Ok(Self {
            versions: Arc::clone(versions),
            sandbox: sandbox.clone(),
            artifact: artifact.clone(),
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
            while let Some(next) = told.blocking_recv() {
                match next {
                    Told::Data(data) => {
                        if pipe.write_all(&data).is_err() {
                            return Fed::Refused;
                        }
                    }
                    Told::End => return Fed::Whole,
                }
            }
            Fed::Part
        });
        let properties = Map::from([("canmount".to_owned(), Value::U64(0))]);
        let received = calls.receive(&wanted.snapshot, &properties, self.base.as_deref(), self.raw, reader.as_fd());
        // Whatever is not read fails to be written, and the feeding thread ends.
        drop(reader);
        let fed = feeding.join().unwrap_or(Fed::Refused);
        if fed == Fed::Part {
            if versions.pool().look_at(&dataset)?.is_some_and(|there| there.resume.is_some()) {
                versions.remove_pending(&dataset);
                self.dataset = None;
            }
            return Err(corrupt("ends early").fix("continue it, or import it from the beginning"));
        }
        received.map_err(|failed| match failed.errno {
            // What ZFS says of streams that it cannot make sense of.
            22 | 52 | 1025..=1060 => corrupt("was refused by ZFS").caused_by(failure::zfs("receive it", failed)),
            _ => failure::zfs(format_args!("receive a version of {}", self.sandbox), failed),
        })?;
        let _locked = versions.lock([&self.sandbox]);
        versions.require_free(&self.sandbox, &self.artifact, None)?;
        versions.pool().mark(&wanted)?;
        let guid = versions.pool().look_at(&dataset)?.unwrap_or_default().guid;
        let branch = format!("{}/in-{guid:016x}", versions.home(&self.sandbox));
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
        let _locked = self.versions.lock([&self.sandbox]);
        self.versions.remove_pending(&dataset);
        let there = self.versions.pool().look_at(&dataset);
        if let Err(error) =
            there.and_then(|there| there.map_or(Ok(()), |there| destroy(&self.versions, &dataset, &there)))
        {
            tracing::warn!(dataset, %error, "an import that failed was left behind");
        }
        tidy(&self.versions, &self.sandbox);
    }
}

/// Destroys what was received. The sandbox must be locked.
fn destroy(versions: &Versions, dataset: &str, there: &Dataset) -> Result<()> {
    let calls = versions.pool().calls();
    calls
        .destroy_snapshots(there.snapshots.iter().map(String::as_str))
        .and_then(|()| calls.destroy(dataset))
        .map_err(|failed| failure::zfs(format_args!("destroy the dataset {dataset}"), failed))
}

fn tidy(versions: &Versions, sandbox: &SandboxId) {
    let home = versions.home(sandbox);
    if let Err(error) = versions.pool().finish(&Finish { home: &home, ..Finish::default() }) {
        tracing::debug!(%error, "not tidied");
    }
}

/// Gives up an import that broke off, where there is one. The sandbox must be locked.
pub(crate) fn give_up(versions: &Versions, sandbox: &SandboxId, artifact: &ArtifactId) -> Result<()> {
    let dataset = incoming(versions, sandbox, artifact);
    if let Some(there) = versions.pool().look_at(&dataset)?.filter(|_| !versions.is_pending(&dataset)) {
        destroy(versions, &dataset, &there)?;
        tidy(versions, sandbox);
    }
    Ok(())
}

/// Removes what imports left behind that cannot be continued, or could for so long. The sandbox must be locked.
pub(crate) fn recover(versions: &Versions, sandbox: &SandboxId, kept: Duration) -> Result<()> {
    let home = versions.home(sandbox);
    let Some(about) = versions.pool().look_at(&home)? else { return Ok(()) };
    let is_incoming = |child: &&String| child.starts_with(&format!("{home}/incoming-")) && !versions.is_pending(child);
    let names: Vec<&str> = about.children.iter().filter(is_incoming).map(String::as_str).collect();
    for (dataset, there) in versions.pool().look(names)? {
        let age = SystemTime::UNIX_EPOCH + Duration::from_secs(there.created);
        let is_old = SystemTime::now().duration_since(age).is_ok_and(|age| age >= kept);
        if there.resume.is_none() || is_old {
            destroy(versions, &dataset, &there)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ZfsBackend;
    use crate::support::{Disk, Pool, artifact_id, checkpoint};
    use crab_core::CheckpointBackend;

    /// The first half of a stream.
    struct Half(Box<dyn ByteStream>, usize);

    #[async_trait]
    impl ByteStream for Half {
        async fn next(&mut self) -> Result<Option<Vec<u8>>> {
            if self.1 == 0 {
                return Ok(None);
            }
            self.1 -= 1;
            self.0.next().await
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn what_is_not_continued_for_long_is_removed_by_a_recovery() {
        let Some(pool) = Pool::new() else { return };
        let (backend, sandbox): (ZfsBackend, _) = (pool.backend(), pool.sandbox("one"));
        std::fs::write(sandbox.root.join("file"), vec![1; 5 << 20]).unwrap();
        let one = checkpoint(&backend, &sandbox, "one").await.unwrap();
        let before = pool.all();
        let other: SandboxId = "other".parse().unwrap();
        let stream = backend.export(ExportRequest::full(&one)).await.unwrap();
        // The beginning, and four frames.
        let mut stream = Half(stream, 5);
        let request = ImportRequest { sandbox: &other, artifact: artifact_id("a"), base: None, stream: &mut stream };
        backend.import(request).await.unwrap_err();
        backend.recover().await.unwrap();
        assert!(backend.resume_token(&other, &artifact_id("a")).await.unwrap().is_some());
        let versions = Versions::open(&pool.base()).unwrap();
        recover(&versions, &other, Duration::ZERO).unwrap();
        tidy(&versions, &other);
        assert_eq!(pool.all(), before);
    }
}
