//! Filesystem checkpoints for Crab by btrfs subvolume snapshots
