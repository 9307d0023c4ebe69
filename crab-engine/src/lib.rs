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
//! # What an operator sees
//!
//! [`Engine::events`] tells what happens to each sandbox. By [`metrics`], under names that stay, times in seconds:
//!
//! | name | kind | labels |
//! |---|---|---|
//! | `crab_turns_total` | counter | `outcome`: `skip`, `durable`, `failed`, `unprotected`, `deferred` |
//! | `crab_checkpoints_total` | counter | `plan`: `fs`, `process`, `full` |
//! | `crab_checkpoint_failures_total` | counter | `kind`: the error's kind |
//! | `crab_unknown_deltas_total` | counter | `domain`, `reason` |
//! | `crab_frozen_seconds`, `crab_capture_seconds`, `crab_persist_seconds` | histogram | |
//! | `crab_hidden_seconds`, `crab_exposed_seconds` | histogram | |
//! | `crab_restore_seconds` | histogram | |
//! | `crab_pruned_versions_total`, `crab_pruned_bytes_total` | counter | `rule`: `not_kept`, `sandbox_quota`, `store_quota` |
//! | `crab_waiting_requests` | gauge | |
//! | `crab_store_damaged_files`, `crab_orphans_removed_total` | gauge, counter | |
//!
//! By [`tracing`] each turn is one tree of spans, which a layer that writes a Chrome trace can show as it is:
//!
//! | span | from, to | fields |
//! |---|---|---|
//! | `turn` | the boundary, the verdict | `sandbox`, `turn`, `plan` (`skip`, `fs`, `process`, `full`), `outcome` as in `crab_turns_total`, `version` |
//! | `turn/decide` | taking the delta | |
//! | `turn/hidden`, `turn/exposed` | the model works; its answer waits for the verdict | |
//! | `turn/queued` | waiting for a worker | |
//! | `turn/checkpoint` | the job, below the first turn that it serves; the others are linked | `sandbox`, `plan`, `version` |
//! | `checkpoint/prepare` | what is done beforehand so that the freeze is short, where the process backend does that | |
//! | `checkpoint/frozen` | the sandbox's tasks are stopped | |
//! | `frozen/capture_processes`, `capture_files` | the captures; without a freeze the latter is below `checkpoint` | |
//! | `checkpoint/queued`, `persist`, `commit` | after the thaw: waiting, artifacts to disk, the manifest | |
//!
//! # Parts
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
