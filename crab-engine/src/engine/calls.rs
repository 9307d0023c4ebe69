//! Calls into code that is not ours: each with a deadline, and none takes the engine down with it.

use std::any::Any;
use std::future::Future;
use std::time::Duration;

use crab_core::{Error, ErrorKind, Result};
use tokio::task::JoinHandle;
use tracing::Instrument;

/// Ends the task when the caller stops waiting for it.
struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Runs a call as a task of its own, so that it may even block its thread without holding up the deadline. A panic
/// becomes an error. When the deadline passes the call is dropped, at the latest when it next waits for something.
pub(super) async fn call<T: Send + 'static>(
    what: &str,
    limit: Duration,
    future: impl Future<Output = Result<T>> + Send + 'static,
) -> Result<T> {
    let mut task = AbortOnDrop(tokio::spawn(future.in_current_span()));
    match tokio::time::timeout(limit, &mut task.0).await {
        Ok(Ok(result)) => result.map_err(|error| error.while_doing(what)),
        Ok(Err(failed)) if failed.is_panic() => Err(panicked(what, &*failed.into_panic())),
        Ok(Err(_)) => Err(Error::new(ErrorKind::Cancelled, format!("{what}: the runtime shuts down"))),
        Err(_) => Err(Error::new(ErrorKind::TimedOut, format!("{what}: no answer within {limit:?}"))),
    }
}

/// Runs what blocks on a thread for that.
pub(super) async fn blocking<T: Send + 'static>(what: &str, work: impl FnOnce() -> T + Send + 'static) -> Result<T> {
    let span = tracing::Span::current();
    match tokio::task::spawn_blocking(move || span.in_scope(work)).await {
        Ok(result) => Ok(result),
        Err(failed) if failed.is_panic() => Err(panicked(what, &*failed.into_panic())),
        Err(_) => Err(Error::new(ErrorKind::Cancelled, format!("{what}: the runtime shuts down"))),
    }
}

/// The error of a panic.
pub(super) fn panicked(what: &str, payload: &(dyn Any + Send)) -> Error {
    let text = payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("no message");
    tracing::error!("{what}: panic: {text}");
    Error::new(ErrorKind::Internal, format!("{what}: panic: {text}"))
}
