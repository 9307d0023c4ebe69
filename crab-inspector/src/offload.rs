//! Blocking work, away from the caller's executor and without a runtime of our own.

use std::thread;

use futures_channel::oneshot;

/// Runs blocking work on a thread of its own. `None` where no thread could be made or the work panicked.
pub(crate) async fn offload<T: Send + 'static>(name: &str, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
    let (answer, wait) = oneshot::channel();
    let made = thread::Builder::new().name(name.to_owned()).spawn(move || {
        // Nobody waits where the caller dropped its future.
        let _ = answer.send(work());
    });
    made.ok()?;
    wait.await.ok()
}
