//! Filesystem checkpoints for Crab by ZFS datasets (not usable yet)
