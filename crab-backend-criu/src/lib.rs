//! Process checkpoints for Crab by CRIU
