//! Tells what a turn really changed in a sandbox, from kernel evidence.
//!
//! [`PollingInspector`] implements [`crab_core::StateDelta`] by looking at the sandbox when it is asked. What it cannot
//! prove unchanged is changed or unknown, never the reverse.

mod btrfs;
mod cgroup;
mod filesystem;
mod ledger;
mod net;
mod offload;
mod polling;
mod report;
mod tasks;

pub use polling::PollingInspector;
