//! The words, types and traits of Crab: consistent savepoints for AI-agent sandboxes.
//!
//! An agent works in a *sandbox*: a cgroup v2 subtree, a root filesystem, namespaces. Between two requests to its
//! model it works a *turn*; the request that ends the turn is the *turn boundary*. What the turn changed is a
//! [`Delta`], one [`Change`] for each [`Domain`]. Where something changed, a checkpoint is taken: first the *capture*
//! (the consistent cut, short), then *persist* (making it durable). The pair of both domains' [`Artifact`]s is a
//! *version*, and it exists once its [`Manifest`] is durable. Until then a [`Gate`] holds the model's answer.
//!
//! This crate holds no I/O and no runtime. It is what an orchestrator implements against, and what every part of Crab
//! shares:
//!
//! | trait | who implements it |
//! |---|---|
//! | [`TurnBoundary`] | where turns come from: an HTTP proxy, an in-process runner, a recorded trace |
//! | [`StateDelta`] | who sees what a sandbox changed |
//! | [`CheckpointBackend`] | how one domain is saved and brought back |
//! | [`SandboxHost`] | what only the owner of the sandboxes can do: freeze, thaw, kill, relaunch |
//!
//! With the feature `conformance` the crate also gives the test suites that every implementation passes
//! (`crab_core::conformance`), and an in-memory world to try them on (`crab_core::memory`).
//!
//! All futures here may be dropped at any await point. What a dropped call leaves behind is stated where it matters.

mod artifact;
mod backend;
mod boundary;
mod delta;
mod error;
mod gate;
mod host;
mod housekeeping;
mod id;
mod manifest;
mod sandbox;
mod transfer;
mod turn;

#[cfg(feature = "conformance")]
pub mod conformance;
#[cfg(feature = "conformance")]
pub mod memory;

pub use artifact::{Artifact, Digest, Domain};
pub use backend::{
    AtCut, Capabilities, CaptureRequest, Captured, CheckpointBackend, NoCut, Prepared, RestoreTarget, Restored,
};
pub use boundary::{Boundary, TurnBoundary};
pub use delta::{Change, Delta, Effects, Evidence, Rebase, StateDelta, Token, Unknown};
pub use error::{Advice, Error, ErrorKind, Result};
pub use gate::{Exposure, Gate, GateExposure, GateHold, GateOpener, Verdict};
pub use host::{Condition, SandboxHost};
pub use housekeeping::{HOUSEKEEPER, keep_house};
pub use id::{ArtifactId, Label, OperationId, SandboxId, TurnNumber, VersionId};
pub use manifest::{Half, HostFacts, MANIFEST_FORMAT, Manifest, Origin, Timings};
pub use sandbox::{External, InheritedFd, Sandbox};
pub use transfer::{
    ByteStream, ExportRequest, FileChange, FileChangeKind, FileChanges, ImportRequest, ResumeToken, Space,
};
pub use turn::Turn;
