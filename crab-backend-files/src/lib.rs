//! What [Crab](crab_core)'s filesystem backends share: it is the same whether the files are on btrfs or on ZFS. A backend
//! of another file system may use it too, but nothing here is a promise to others than Crab's own backends.
//!
//! - [`blocking`]: work that waits for a disk, away from the threads that run futures.
//! - [`Locks`]: one caller at a time for each sandbox.
//! - [`Capture`]: the two halves of a checkpoint, by a snapshot that undoes itself.
//! - [`tasks`] and [`mountinfo`]: who holds a root.
//! - [`journal`]: what a restore writes down before it begins.
//! - [`Steps`]: where tests cut a restore short.
//! - [`artifacts`]: whose artifact it is.

pub mod artifacts;
pub mod blocking;
mod capture;
pub mod journal;
mod locks;
pub mod mountinfo;
mod steps;
pub mod tasks;

pub use capture::{Capture, Snapshot, at_cut, refuse_late};
pub use journal::Keep;
pub use locks::{Locked, Locks};
pub use steps::{Steps, Straight};
