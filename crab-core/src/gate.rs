//! The gate: holds the model's answer until the turn's version is durable.
//!
//! It speaks both ways. The source of the boundary keeps the [`GateHold`]: it says that the answer is waiting, and
//! waits for the verdict. The engine keeps the [`Gate`]: it learns that its work has become exposed, and gives the
//! verdict. A gate that is dropped without a verdict has failed.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;

use futures_channel::oneshot;

use crate::error::{Error, ErrorKind};
use crate::id::VersionId;

/// What the engine decided about a turn.
#[derive(Clone, Debug)]
pub enum Verdict {
    /// The turn is covered by this durable version: the answer may go out.
    Durable(VersionId),
    /// The turn could not be covered, and the policy is to go on without: the answer may go out.
    Unprotected(Arc<Error>),
    /// The turn could not be covered, and the policy is to refuse: the agent gets a retryable error.
    Failed(Arc<Error>),
}

/// What became of the answer that a gate holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposure {
    /// The answer is there and waits: from now on the checkpoint costs the agent time.
    Waiting,
    /// Nobody waits any more: the client went away. The version is still wanted.
    Abandoned,
}

/// The engine's side of a gate.
#[derive(Debug)]
pub struct Gate {
    exposed: oneshot::Receiver<()>,
    verdict: oneshot::Sender<Verdict>,
}

/// The boundary source's side of a gate.
#[derive(Debug)]
pub struct GateHold {
    waiting: Option<oneshot::Sender<()>>,
    verdict: oneshot::Receiver<Verdict>,
}

impl Gate {
    /// A closed gate and the hold on it.
    #[must_use]
    #[allow(clippy::new_ret_no_self, reason = "the two halves are made together, as channels are")]
    pub fn new() -> (Self, GateHold) {
        let (waiting, exposed) = oneshot::channel();
        let (sender, verdict) = oneshot::channel();
        (Self { exposed, verdict: sender }, GateHold { waiting: Some(waiting), verdict })
    }

    /// Waits until the answer waits at the gate or nobody wants it any more. May be dropped and called again until it
    /// has returned once; later calls return [`Exposure::Abandoned`].
    pub async fn exposed(&mut self) -> Exposure {
        match poll_fn(|cx| Future::poll(Pin::new(&mut self.exposed), cx)).await {
            Ok(()) => Exposure::Waiting,
            Err(oneshot::Canceled) => Exposure::Abandoned,
        }
    }

    /// Takes the gate apart, so that one task may wait for the exposure while another gives the verdict.
    #[must_use]
    pub fn split(self) -> (GateExposure, GateOpener) {
        (GateExposure(self.exposed), GateOpener(self.verdict))
    }

    /// Gives the verdict. Has no effect where nobody holds the gate any more.
    pub fn decide(self, verdict: Verdict) {
        let _ = self.verdict.send(verdict);
    }
}

/// The half of a [`Gate`] that tells when the answer waits.
#[derive(Debug)]
pub struct GateExposure(oneshot::Receiver<()>);

impl GateExposure {
    /// Waits until the answer waits at the gate or nobody wants it any more.
    pub async fn wait(self) -> Exposure {
        match self.0.await {
            Ok(()) => Exposure::Waiting,
            Err(oneshot::Canceled) => Exposure::Abandoned,
        }
    }
}

/// The half of a [`Gate`] that gives the verdict. Dropped without one, the gate has failed.
#[derive(Debug)]
pub struct GateOpener(oneshot::Sender<Verdict>);

impl GateOpener {
    /// Gives the verdict. Has no effect where nobody holds the gate any more.
    pub fn decide(self, verdict: Verdict) {
        let _ = self.0.send(verdict);
    }
}

impl GateHold {
    /// Says that the answer is there and waits. Further calls do nothing.
    pub fn answer_waiting(&mut self) {
        if let Some(waiting) = self.waiting.take() {
            let _ = waiting.send(());
        }
    }

    /// Waits for the verdict. May be dropped and called again until it has returned once; then, and where the engine
    /// dropped its side, the answer is [`Verdict::Failed`].
    pub async fn verdict(&mut self) -> Verdict {
        match poll_fn(|cx| Future::poll(Pin::new(&mut self.verdict), cx)).await {
            Ok(verdict) => verdict,
            Err(oneshot::Canceled) => Verdict::Failed(Arc::new(
                Error::new(ErrorKind::Cancelled, "the gate was dropped before the turn's version was durable").retry(),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::Future;
    use std::task::{Context, Poll, Waker};

    fn now<F: Future>(future: F) -> Option<F::Output> {
        let mut future = std::pin::pin!(future);
        match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
            Poll::Ready(output) => Some(output),
            Poll::Pending => None,
        }
    }

    #[test]
    fn a_closed_gate_holds_and_an_opened_one_releases() {
        let (gate, mut hold) = Gate::new();
        assert!(now(hold.verdict()).is_none());
        gate.decide(Verdict::Durable(VersionId(3)));
        assert!(matches!(now(hold.verdict()), Some(Verdict::Durable(VersionId(3)))));
    }

    #[test]
    fn dropping_a_gate_is_a_failure_and_never_a_release() {
        let (gate, mut hold) = Gate::new();
        drop(gate);
        assert!(matches!(now(hold.verdict()), Some(Verdict::Failed(_))));
        let (gate, mut hold) = Gate::new();
        drop(gate.split());
        assert!(matches!(now(hold.verdict()), Some(Verdict::Failed(_))));
    }

    #[test]
    fn the_engine_learns_when_the_answer_waits_and_when_the_client_is_gone() {
        let (mut gate, mut hold) = Gate::new();
        assert!(now(gate.exposed()).is_none());
        hold.answer_waiting();
        hold.answer_waiting();
        assert_eq!(now(gate.exposed()), Some(Exposure::Waiting));

        let (gate, hold) = Gate::new();
        let (exposure, opener) = gate.split();
        drop(hold);
        assert_eq!(now(exposure.wait()), Some(Exposure::Abandoned));
        opener.decide(Verdict::Durable(VersionId(1)));
    }
}
