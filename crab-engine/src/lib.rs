//! Decides, captures, persists, pairs and restores the savepoints of a host's sandboxes
