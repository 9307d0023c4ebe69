//! Decides, captures, persists, pairs and restores the savepoints of a host's sandboxes.
//!
//! An orchestrator gives an [`Engine`] the parts that know its sandboxes: a [`SandboxHost`](crab_core::SandboxHost), a
//! [`StateDelta`](crab_core::StateDelta), a [`CheckpointBackend`](crab_core::CheckpointBackend) for files and one for
//! processes. It attaches sandboxes, lets the engine [`drive`](Engine::drive) a source of turn boundaries, and calls
//! [`restore`](Engine::restore) when something died.
//!
//! What a turn does, in order:
//!
//! 1. At the boundary the delta is taken. Nothing changed: the gate opens with the standing version, and nothing is
//!    written.
//! 2. Else the turn is queued. Turns of one sandbox that arrive before its capture begins share it. When the model's
//!    answer waits, the job becomes urgent.
//! 3. The cut. Where processes are to be saved the sandbox is frozen and the delta taken again: that look decides.
//!    Files are snapshotted at the cut of the process dump. Where files alone are to be saved nothing is frozen, and
//!    the delta is taken again after the snapshot; if processes have begun to matter, the snapshot is discarded and
//!    everything captured.
//! 4. The sandbox runs again, whatever happened: by a guard, also after an error, a panic or a hang.
//! 5. Both halves are made durable, then the manifest. Now the version exists, the delta is re-based, the gate opens.
//!
//! A failed checkpoint is tried once more, urgent; then the [`FailurePolicy`] decides about the answer. It leaves the
//! delta, the standing version and the store as they were.
//!
//! The parts that can be thought about alone are modules of their own: [`scheduler`], [`policy`] and [`retention`] are
//! pure, [`store`] documents the files on disk.

mod cgroup;
mod engine;
mod nonce;
mod pace;
mod report;
mod steps;

pub mod policy;
pub mod retention;
pub mod scheduler;
pub mod store;

pub use cgroup::CgroupV2;
pub use engine::{
    Deadlines, Engine, EngineBuilder, Event, EventKind, Events, FailurePolicy, ForkOptions, Lagged, OpenReport,
    ProcessChange, ProcessChangeKind, ProcessDiff, PruneReport, RestoreOptions, SandboxSummary, Select, Unfinished,
    VersionDiff, VersionInfo,
};
pub use report::{KeptEffect, LostTurns, PassedOver, ProcessOutcome, RestoreReport};
#[cfg(feature = "failpoints")]
pub use steps::StepHook;
