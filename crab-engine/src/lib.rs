//! Decides, captures, persists, pairs and restores the savepoints of a host's sandboxes.

mod report;
mod steps;

pub mod policy;
pub mod scheduler;
pub mod store;

pub use report::{KeptEffect, LostTurns, PassedOver, ProcessOutcome, RestoreReport};
