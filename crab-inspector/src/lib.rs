//! Tells what a turn really changed in a sandbox, from kernel evidence.
//!
//! [`Inspector`] implements [`crab_core::StateDelta`] with BPF programs that note what the tasks of each sandbox do.
//! [`PollingInspector`] needs no BPF, looks at the sandbox when it is asked, and is coarser where processes live. Both
//! compare files with the last version's snapshot. What they cannot prove unchanged is changed or unknown, never the
//! reverse.

mod bpf;
mod btrfs;
mod cgroup;
mod filesystem;
mod folder;
#[cfg(any(test, feature = "fuzzing"))]
#[doc(hidden)]
pub mod fuzzing;
mod history;
mod holdings;
mod inspector;
mod ledger;
mod mounts;
mod net;
mod offload;
mod polling;
mod probe;
mod registry;
mod report;
mod saved;
mod tasks;
mod tree;

pub use inspector::{Inspector, InspectorBuilder, ProcessRule};
pub use polling::PollingInspector;
pub use probe::{Check, Probe};
