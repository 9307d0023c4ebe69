//! What the filesystem backends cost, beside the tools of the same file systems.

mod btrfs;
mod pool;
mod traced;

use crate::report::Report;

/// Runs what this machine can.
pub(crate) fn run(report: &mut Report) -> Result<(), String> {
    btrfs::run(report)
}
