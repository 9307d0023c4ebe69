//! What a filesystem backend can tell about its artifacts, and how an artifact leaves its host.

use std::fmt;

use async_trait::async_trait;

use crate::artifact::Artifact;
use crate::error::Result;
use crate::id::{ArtifactId, SandboxId};

/// How a path differs between two states.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum FileChangeKind {
    /// Only the new state has it. Everything below a new directory is named too.
    Added,
    /// Only the old state has it. Everything below a directory that is gone is named too.
    Removed,
    /// What it holds differs: a file's bytes, a link's target, a device's number, or what kind of thing it is. Its
    /// metadata may differ too.
    Content,
    /// Only mode, owner, group, extended attributes or the time of modification differ. A directory's time of
    /// modification does not count: it follows from what is made and removed in it.
    Metadata,
}

impl fmt::Display for FileChangeKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Added => "added",
            Self::Removed => "removed",
            Self::Content => "content",
            Self::Metadata => "metadata",
        })
    }
}

/// One path that differs between two artifacts. A file that was moved is one path removed and one added; each name of
/// a file with several is a path of its own.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FileChange {
    /// The path below the root, without a slash at either end; empty for the root itself. Any bytes but NUL.
    pub path: Vec<u8>,
    /// How it differs.
    pub kind: FileChangeKind,
}

/// The paths that differ, each once, in no order. Dropping it ends the work behind it.
#[async_trait]
pub trait FileChanges: Send {
    /// The next one; `None` when all were given.
    ///
    /// Dropping the future loses nothing.
    ///
    /// # Errors
    /// Where the difference cannot be told to its end; what was given until then is right.
    async fn next(&mut self) -> Result<Option<FileChange>>;
}

/// What an artifact takes of its disk, in bytes of file content as stored (after compression, without redundancy).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Space {
    /// What it refers to, shared with others or not.
    pub referenced: u64,
    /// What no other artifact, and no sandbox, refers to: what its removal alone would free.
    pub exclusive: u64,
}

/// A stream of bytes in pieces of at most a few MiB, so that neither end holds more. Dropping it ends the work behind
/// it.
#[async_trait]
pub trait ByteStream: Send {
    /// The next piece, never empty; `None` at the end.
    ///
    /// Dropping the future loses nothing.
    ///
    /// # Errors
    /// Where the stream breaks off. It must not be read on.
    async fn next(&mut self) -> Result<Option<Vec<u8>>>;
}

/// From where an [import](crate::CheckpointBackend::import) that was cut short can be continued. Text of the backend's
/// own, fit to be sent to the exporting host.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct ResumeToken(pub String);

/// What is to be exported.
#[derive(Clone, Copy, Debug)]
pub struct ExportRequest<'a> {
    /// The artifact.
    pub artifact: &'a Artifact,
    /// Send only what differs from this artifact, which the importer must have.
    pub base: Option<&'a Artifact>,
    /// Send only what the importer lacks still. `artifact` and `base` must be those of the first attempt.
    pub resume: Option<&'a ResumeToken>,
}

impl<'a> ExportRequest<'a> {
    /// All of an artifact.
    #[must_use]
    pub fn full(artifact: &'a Artifact) -> Self {
        Self { artifact, base: None, resume: None }
    }

    /// What differs from `base`.
    #[must_use]
    pub fn since(base: &'a Artifact, artifact: &'a Artifact) -> Self {
        Self { artifact, base: Some(base), resume: None }
    }
}

/// What is to be imported.
pub struct ImportRequest<'a> {
    /// Whose artifact it becomes. The sandbox need not exist.
    pub sandbox: &'a SandboxId,
    /// The name that it gets.
    pub artifact: ArtifactId,
    /// For an incremental stream: the artifact here that is the export's `base`, or that was imported from it.
    pub base: Option<&'a Artifact>,
    /// What [`export`](crate::CheckpointBackend::export) gave.
    pub stream: &'a mut dyn ByteStream,
}
