//! Tells what a turn really changed in a sandbox, from kernel evidence
