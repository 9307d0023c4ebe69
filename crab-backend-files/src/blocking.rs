//! Work that blocks on the disk, away from the threads that run futures.

use crab_core::{Error, ErrorKind, Result};
use tokio::runtime::Handle;

/// Runs `work` on a thread that may block. Dropping the future does not stop the work: it runs to its end and its
/// result is dropped there, so a result that has to be undone undoes itself on drop.
///
/// # Errors
/// Those of the work; [`InvalidInput`](ErrorKind::InvalidInput) outside of a tokio runtime,
/// [`Cancelled`](ErrorKind::Cancelled) while that shuts down.
pub async fn run<T, F>(work: F) -> Result<T>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    start(work)?.await
}

/// As [`run`], but the work begins at once and not when the future is polled.
///
/// # Errors
/// As [`run`].
pub fn start<T, F>(work: F) -> Result<impl Future<Output = Result<T>> + Send>
where
    T: Send + 'static,
    F: FnOnce() -> Result<T> + Send + 'static,
{
    let handle = Handle::try_current().map_err(|error| {
        Error::new(ErrorKind::InvalidInput, "a filesystem backend was called outside of a tokio runtime")
            .caused_by(error)
            .fix("call it from a task of a tokio runtime")
    })?;
    let work = handle.spawn_blocking(work);
    Ok(async {
        match work.await {
            Ok(result) => result,
            Err(error) if error.is_cancelled() => {
                Err(Error::new(ErrorKind::Cancelled, "the tokio runtime is shutting down").caused_by(error))
            }
            Err(error) => Err(Error::new(ErrorKind::Internal, "a call of a filesystem panicked").caused_by(error)),
        }
    })
}

/// Runs `work` at leisure: on a thread that may block where there is a runtime, else here and now.
pub fn later<F: FnOnce() + Send + 'static>(work: F) {
    match Handle::try_current() {
        Ok(handle) => drop(handle.spawn_blocking(work)),
        Err(_) => work(),
    }
}
