//! Calls of a backend in few words.

use crate::{
    Artifact, ArtifactId, CaptureRequest, Captured, CheckpointBackend, NoCut, OperationId, RestoreTarget, Restored,
    Result, Sandbox,
};

/// An artifact's name.
#[must_use]
pub fn artifact_id(name: &str) -> ArtifactId {
    ArtifactId::new(name).unwrap()
}

/// A capture that is made durable.
///
/// # Errors
/// The backend's.
pub async fn checkpoint(backend: &dyn CheckpointBackend, sandbox: &Sandbox, name: &str) -> Result<Artifact> {
    capture(backend, sandbox, name).await?.persist().await
}

/// A capture.
///
/// # Errors
/// The backend's.
pub async fn capture(backend: &dyn CheckpointBackend, sandbox: &Sandbox, name: &str) -> Result<Box<dyn Captured>> {
    let artifact = artifact_id(name);
    let at_cut = &mut NoCut;
    backend.capture(CaptureRequest { sandbox, artifact, parent: None, frozen: false, deadline: None, at_cut }).await
}

/// A restore into a stopped sandbox.
///
/// # Errors
/// The backend's.
pub async fn restore(
    backend: &dyn CheckpointBackend,
    artifact: &Artifact,
    sandbox: &Sandbox,
    operation: &str,
    keep: Option<&str>,
) -> Result<Restored> {
    backend.restore(artifact, target(sandbox, operation, keep)).await
}

/// Where that goes.
#[must_use]
pub fn target(sandbox: &Sandbox, operation: &str, keep: Option<&str>) -> RestoreTarget {
    RestoreTarget {
        sandbox: sandbox.clone(),
        operation: OperationId::new(operation).unwrap(),
        keep_replaced: keep.map(artifact_id),
        inherited: Vec::new(),
        deadline: None,
    }
}

/// Waits for all of them at once.
pub async fn join_all<T>(futures: impl Iterator<Item = impl Future<Output = T>>) -> Vec<T> {
    let mut pending: Vec<_> = futures.map(|future| (Box::pin(future), None)).collect();
    std::future::poll_fn(|context| {
        let mut ready = true;
        for (future, done) in &mut pending {
            if done.is_none() {
                match future.as_mut().poll(context) {
                    std::task::Poll::Ready(value) => *done = Some(value),
                    std::task::Poll::Pending => ready = false,
                }
            }
        }
        if ready { std::task::Poll::Ready(()) } else { std::task::Poll::Pending }
    })
    .await;
    pending.into_iter().filter_map(|(_, done)| done).collect()
}
