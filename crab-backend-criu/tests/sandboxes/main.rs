//! The backend against real sandboxes on the real kernel: it needs root and what `cargo xtask setup` makes. Where that
//! is missing every test says that it was skipped.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "these are tests")]

mod breaking;
mod conforming;
mod containers;
mod contents;
mod dying;
mod externals;
mod files_of_the_cut;
mod finding;
mod incremental;
mod kinds;
mod refusing;
mod storing;
mod support;
mod trees;
mod without_fuse;
