//! Filesystem checkpoints for Crab by ZFS datasets: **not usable yet**. This crate holds no code.
//!
//! It is to become a [`CheckpointBackend`](crab_core::CheckpointBackend) for sandboxes whose root is a ZFS dataset:
//!
//! - a capture is a snapshot of the dataset, which ZFS takes atomically and makes durable with the pool's next
//!   transaction group; persist waits for that group;
//! - a restore clones the snapshot beside the dataset and puts it in the dataset's place by renames, which recovery finishes or undoes. `zfs rollback` will not be used: it
//!   destroys the newer snapshots, and a restore must leave newer versions in place;
//! - an artifact that a clone was made from cannot be destroyed before the clone is promoted or gone, so artifacts here
//!   will depend on each other where those of other backends do not;
//! - the library `libzfs_core.so.3` is to be opened at run time, so that everything builds where there is no ZFS.
//!
//! Until then use the backend for btrfs, or implement the trait for what you have.
