//! One turn's gate, seen from the clients' side.

use std::pin::pin;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use crab_core::{Error, ErrorKind, GateHold, Verdict};
use tokio::sync::Notify;
use tokio::time::Instant;

/// What happens to an answer whose version does not become durable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GatePolicy {
    /// No answer goes out unprotected. After `max_hold`, counted from the answer's arrival, the agent gets the
    /// provider's retryable error.
    Strict {
        /// How long an answer is held at the most.
        max_hold: Duration,
    },
    /// After `max_hold`, counted from the answer's arrival, it goes out although the turn is not protected.
    BestEffort {
        /// How long an answer is held at the most.
        max_hold: Duration,
    },
}

impl Default for GatePolicy {
    /// Strict, ten minutes: a bound on what waits, not a wish.
    fn default() -> Self {
        Self::Strict { max_hold: Duration::from_secs(600) }
    }
}

impl GatePolicy {
    fn max_hold(self) -> Duration {
        match self {
            Self::Strict { max_hold } | Self::BestEffort { max_hold } => max_hold,
        }
    }

    /// The verdict where the engine gave none in time.
    fn overdue(self) -> Verdict {
        let error = Arc::new(
            Error::new(
                ErrorKind::TimedOut,
                format!(
                    "the turn's version was not durable {} s after the answer had arrived",
                    self.max_hold().as_secs_f32()
                ),
            )
            .retry(),
        );
        match self {
            Self::Strict { .. } => Verdict::Failed(error),
            Self::BestEffort { .. } => Verdict::Unprotected(error),
        }
    }
}

/// The verdict on a turn, for all who wait for it.
#[derive(Debug)]
pub(crate) struct TurnGate {
    verdict: OnceLock<Verdict>,
    decided: Notify,
    arrived: Notify,
}

impl TurnGate {
    pub(crate) fn closed() -> Arc<Self> {
        Self::with(OnceLock::new())
    }

    pub(crate) fn decided(verdict: Verdict) -> Arc<Self> {
        Self::with(OnceLock::from(verdict))
    }

    fn with(verdict: OnceLock<Verdict>) -> Arc<Self> {
        Arc::new(Self { verdict, decided: Notify::new(), arrived: Notify::new() })
    }

    /// The answer is here.
    pub(crate) fn answer_arrived(&self) {
        self.arrived.notify_one();
    }

    /// The verdict, once there is one.
    pub(crate) async fn verdict(&self) -> Verdict {
        loop {
            // Heard of from here on, so that no verdict falls in between.
            let mut decided = pin!(self.decided.notified());
            decided.as_mut().enable();
            if let Some(verdict) = self.verdict.get() {
                return verdict.clone();
            }
            decided.await;
        }
    }

    /// Waits for the engine's verdict, or for the policy's patience to end, and gives it to all, after `first` has heard
    /// it and how long the answer was held. Where this is dropped, everybody is left waiting: the coordinator does so only when it
    /// shuts down.
    pub(crate) async fn attend(&self, mut hold: GateHold, policy: GatePolicy, first: impl FnOnce(&Verdict, Duration)) {
        let early = tokio::select! {
            biased;
            verdict = hold.verdict() => Some(verdict),
            () = self.arrived.notified() => None,
        };
        let (verdict, held) = match early {
            Some(verdict) => (verdict, Duration::ZERO),
            None => {
                let since = Instant::now();
                hold.answer_waiting();
                let verdict = tokio::select! {
                    biased;
                    verdict = hold.verdict() => verdict,
                    () = tokio::time::sleep(policy.max_hold()) => policy.overdue(),
                };
                (verdict, since.elapsed())
            }
        };
        first(&verdict, held);
        // Attended to once, so nobody was before.
        let _ = self.verdict.set(verdict);
        self.decided.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crab_core::{Exposure, Gate, VersionId};

    #[tokio::test(start_paused = true)]
    async fn the_engine_hears_of_the_answer_and_patience_ends() {
        for (policy, released) in [
            (GatePolicy::Strict { max_hold: Duration::from_secs(7) }, false),
            (GatePolicy::BestEffort { max_hold: Duration::from_secs(7) }, true),
        ] {
            let (mut engine, hold) = Gate::new();
            let gate = TurnGate::closed();
            let attending = tokio::spawn({
                let gate = Arc::clone(&gate);
                async move {
                    let mut heard = None;
                    gate.attend(hold, policy, |verdict, held| {
                        heard = Some((verdict.clone(), held));
                    })
                    .await;
                    heard
                }
            });
            // Before the answer is here, nothing runs out.
            tokio::time::sleep(Duration::from_secs(3600)).await;
            assert!(!attending.is_finished());
            gate.answer_arrived();
            assert_eq!(engine.exposed().await, Exposure::Waiting);
            let (verdict, held) = attending.await.unwrap().unwrap();
            assert_eq!(matches!(verdict, Verdict::Unprotected(_)), released);
            assert_eq!(matches!(gate.verdict().await, Verdict::Failed(_)), !released);
            assert_eq!(held, Duration::from_secs(7));
        }
    }

    #[tokio::test]
    async fn all_who_wait_get_the_verdict() {
        let (engine, hold) = Gate::new();
        let gate = TurnGate::closed();
        engine.decide(Verdict::Durable(VersionId(2)));
        let waiting = [(); 3].map(|()| {
            let gate = Arc::clone(&gate);
            tokio::spawn(async move { gate.verdict().await })
        });
        gate.attend(hold, GatePolicy::default(), |_, _| ()).await;
        for waiting in waiting {
            assert!(matches!(waiting.await.unwrap(), Verdict::Durable(VersionId(2))));
        }
    }
}
