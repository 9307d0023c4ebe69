//! Filesystem checkpoints for [Crab](crab_core) by btrfs subvolume snapshots.
//!
//! [`BtrfsBackend`] is a [`CheckpointBackend`](crab_core::CheckpointBackend) for sandboxes whose root is a btrfs
//! subvolume. It speaks to the kernel by ioctl alone and needs no btrfs tools. [`subvolume`] is for hosts: it makes,
//! clones, removes and describes subvolumes.
//!
//! ```no_run
//! use std::path::Path;
//! use crab_backend_btrfs::subvolume::{self, Access};
//! use crab_backend_btrfs::BtrfsBackend;
//!
//! # fn main() -> crab_core::Result<()> {
//! // A new sandbox's root, cloned from an image that is a subvolume itself.
//! subvolume::snapshot(Path::new("/pool/images/debian"), Path::new("/pool/boxes/box-1"), Access::Writable)?;
//! // Where the versions of all sandboxes stand: on the same filesystem, outside of every root.
//! let backend = BtrfsBackend::open("/pool/versions")?;
//! # drop(backend);
//! # Ok(())
//! # }
//! ```
//!
//! # Limits
//! - Subvolumes inside a root are refused, by name: a snapshot does not reach into them.
//! - Mounts in the sandbox (tmpfs, bind mounts) are not part of the root and are not saved here.
//! - A restore asks the cgroup whether tasks live, and this process's own mount namespace whether the root is mounted.
//!   Mounts in a foreign namespace that outlived its tasks are not seen.
//! - Where the quota of the subvolume in which the versions stand is used up, btrfs refuses removals too, until the
//!   quota is raised. A sandbox's own quota stops only the sandbox; the root that a restore makes has none.
//! - An import that was cut short is begun anew. The kernel sends a subvolume only from its beginning, so the sending host
//!   would read all of it again; and the receiving one would have to know which command was the last that reached the
//!   disk, since most (rename, link, unlink) cannot be done twice, and btrfs keeps no such note. Incremental exports keep
//!   the streams short.

mod backend;
mod busy;
mod capture;
mod crc32c;
mod diff;
mod export;
mod failure;
mod import;
mod ioctl;
mod journal;
mod receive;
mod restore;
#[cfg(test)]
mod restore_cut_short;
mod send;
mod space;
pub mod subvolume;
mod uuid;
mod versions;

pub use backend::BtrfsBackend;

// The tests' support is shared with the tests outside of the crate, which know it by this name.
#[cfg(test)]
extern crate self as crab_backend_btrfs;
#[cfg(test)]
#[path = "../tests/support/mod.rs"]
mod support;
