//! Filesystem checkpoints for [Crab](crab_core) by ZFS datasets.
//!
//! [`ZfsBackend`] is a [`CheckpointBackend`](crab_core::CheckpointBackend) for sandboxes whose root is a ZFS dataset. It
//! speaks to ZFS by `libzfs_core` alone, which it opens at run time, and needs no ZFS tools: the crate builds anywhere,
//! and where the library is missing, [`ZfsBackend::open`] says so. OpenZFS 2.2, 2.3 and 2.4 are accepted. [`dataset`] is
//! for hosts: it makes and clones datasets.
//!
//! ```no_run
//! use std::path::Path;
//! use crab_backend_zfs::{ZfsBackend, dataset};
//!
//! # fn main() -> crab_core::Result<()> {
//! // A new sandbox's root: the dataset tank/boxes/box-1, where tank/boxes is mounted at /tank/boxes.
//! dataset::create(Path::new("/tank/boxes/box-1"))?;
//! // Where the backend keeps what belongs to no root: in the same pool.
//! let backend = ZfsBackend::open("tank/crab")?;
//! # drop(backend);
//! # Ok(())
//! # }
//! ```
//!
//! # Limits
//! - Datasets inside a root are refused, by name: a snapshot does not reach into them.
//! - Mounts in the sandbox (tmpfs, bind mounts) are not part of the root and are not saved here.
//! - Of what was set on a root itself, the common properties go with it at a restore (quotas, reservations, record size,
//!   mount point, compression and access); others should be set above it, where they are inherited.
//! - A version is readable as a path only while the dataset that it is on is mounted.
//! - A root that is an encryption root of its own can be captured and not restored: ZFS does not let its clone leave it.
//!   Roots and versions belong below one encryption root.
//! - A host deletes a root by [`ZfsBackend::delete_root`], since versions are snapshots of it.

mod backend;
mod batch;
mod busy;
mod capture;
pub mod dataset;
mod diff;
mod failure;
mod frames;
mod journal;
mod mounts;
mod place;
mod pool;
mod properties;
mod reserve;
mod restore;
#[cfg(test)]
mod restore_cut_short;
mod resume;
mod sys;
mod transfer;
mod versions;

pub use backend::ZfsBackend;

// The tests' support is shared with the tests outside of the crate, which know it by this name.
#[cfg(test)]
extern crate self as crab_backend_zfs;
#[cfg(test)]
#[path = "../tests/support/mod.rs"]
mod support;
