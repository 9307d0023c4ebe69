//! A frozen sandbox, and the promise that it runs again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crab_core::{Condition, Result, SandboxHost, SandboxId};

use super::calls::call;

/// How often a thaw is tried before the sandbox is reported as frozen.
const THAW_TRIES: u32 = 3;
/// How long a drop may wait for the thaw.
const DROP_PATIENCE: Duration = Duration::from_secs(5);

/// A sandbox that is frozen while this lives. [`thaw`](Self::thaw) ends it in order; a drop, by an error, a panic or a
/// cancelled task, thaws all the same.
pub(super) struct Frozen {
    host: Arc<dyn SandboxHost>,
    id: SandboxId,
    since: Instant,
    limit: Duration,
    armed: bool,
}

impl Frozen {
    /// Freezes. An error means that the sandbox runs, or says otherwise.
    pub(super) async fn freeze(host: &Arc<dyn SandboxHost>, id: &SandboxId, limit: Duration) -> Result<Self> {
        // Armed before the call: one that is cut off may have frozen it all the same.
        let frozen = Self { host: host.clone(), id: id.clone(), since: Instant::now(), limit, armed: true };
        let (host, id) = (host.clone(), id.clone());
        match call("freeze", limit, async move { host.freeze(&id).await }).await {
            Ok(()) => Ok(frozen),
            Err(error) => Err(match frozen.thaw().await {
                Ok(_) => error,
                Err(_) => error.condition(Condition::Frozen),
            }),
        }
    }

    /// Thaws, and tells how long the tasks were stopped at most.
    pub(super) async fn thaw(mut self) -> Result<Duration> {
        let mut tries = 0;
        loop {
            tries += 1;
            let (host, id) = (self.host.clone(), self.id.clone());
            match call("thaw", self.limit, async move { host.thaw(&id).await }).await {
                Ok(()) => {
                    self.armed = false;
                    return Ok(self.since.elapsed());
                }
                // A sandbox that is gone is not frozen.
                Err(error) if error.kind() == crab_core::ErrorKind::NotFound => {
                    self.armed = false;
                    return Err(error.condition(Condition::Stopped));
                }
                Err(error) if tries == THAW_TRIES => {
                    self.armed = false;
                    tracing::error!(sandbox = %self.id, "the sandbox may still be frozen: {error}");
                    return Err(error.condition(Condition::Frozen).fix("thaw its cgroup"));
                }
                Err(_) => tokio::time::sleep(Duration::from_millis(10) * tries).await,
            }
        }
    }
}

impl Drop for Frozen {
    fn drop(&mut self) {
        if !self.armed {
            return;
        }
        // The runtime may be shutting down, so the thaw gets one of its own.
        let (host, id) = (self.host.clone(), self.id.clone());
        let (done, thawed) = std::sync::mpsc::channel();
        let thread = std::thread::Builder::new().name("crab-thaw".to_owned()).spawn(move || {
            let result = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()
                .map_err(|source| crab_core::Error::io("make a runtime", source))
                .and_then(|runtime| runtime.block_on(host.thaw(&id)));
            let _ = done.send(result);
        });
        let outcome = match thread {
            Ok(_) => thawed.recv_timeout(DROP_PATIENCE).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        match outcome {
            Ok(Ok(())) => tracing::warn!(sandbox = %self.id, "thawed after a capture that was cut off"),
            Ok(Err(error)) => tracing::error!(sandbox = %self.id, "the sandbox may still be frozen: {error}"),
            Err(error) => tracing::error!(sandbox = %self.id, "the sandbox may still be frozen: {error}"),
        }
    }
}
