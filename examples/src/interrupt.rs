//! Being told to stop: by Ctrl-C, or by whoever started us.

use crab_core::{Error, Result};
use tokio::signal::unix::{SignalKind, signal};

/// Waits until this process is told to stop. From the first call on the signals do not end it any more: the caller
/// cleans up and ends.
///
/// # Errors
/// Where the signals cannot be had.
pub async fn interrupted() -> Result<()> {
    let had = |kind| signal(kind).map_err(|e| Error::io("wait for a signal", e));
    let (mut interrupt, mut terminate) = (had(SignalKind::interrupt())?, had(SignalKind::terminate())?);
    tokio::select! {
        _ = interrupt.recv() => {}
        _ = terminate.recv() => {}
    }
    Ok(())
}
