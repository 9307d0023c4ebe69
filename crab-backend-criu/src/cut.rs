//! The bridge between the thread that talks to CRIU and the caller's code at the cut, which is asynchronous.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use crab_core::{AtCut, Error, ErrorKind, Result};
use tokio::sync::oneshot;

/// The caller's side keeps the deadline; this is for one that does not come round to it.
const LATE: Duration = Duration::from_secs(1);

/// The thread's side.
#[derive(Debug)]
pub(crate) struct Cut(oneshot::Sender<mpsc::Sender<bool>>);

/// The caller's side.
#[derive(Debug)]
pub(crate) struct Reached(oneshot::Receiver<mpsc::Sender<bool>>);

/// Both sides.
pub(crate) fn bridge() -> (Cut, Reached) {
    let (sender, receiver) = oneshot::channel();
    (Cut(sender), Reached(receiver))
}

impl Cut {
    /// Has the caller's code run, and says whether it succeeded. It did not where the caller has gone.
    pub(crate) fn run(self, deadline: Option<Instant>) -> bool {
        let (answer, answered) = mpsc::channel();
        if self.0.send(answer).is_err() {
            return false;
        }
        match deadline {
            Some(deadline) => {
                let left = deadline.saturating_duration_since(Instant::now()) + LATE;
                answered.recv_timeout(left).unwrap_or(false)
            }
            None => answered.recv().unwrap_or(false),
        }
    }
}

impl Reached {
    /// Waits for the cut and runs the caller's code at it. Returns without where the capture ends before.
    pub(crate) async fn attend(self, at_cut: &mut dyn AtCut, deadline: Option<Instant>) -> Result<()> {
        let Ok(answer) = self.0.await else { return Ok(()) };
        let outcome = match deadline {
            Some(deadline) => tokio::time::timeout_at(deadline.into(), at_cut.run()).await.unwrap_or_else(|_| {
                Err(Error::new(ErrorKind::TimedOut, "what is done at the cut was not done by the deadline"))
            }),
            None => at_cut.run().await,
        };
        // A thread that stopped waiting has given the capture up.
        let heard = answer.send(outcome.is_ok()).is_ok();
        match outcome {
            Ok(()) if !heard => Err(Error::new(ErrorKind::TimedOut, "the capture was given up during the cut")),
            outcome => outcome,
        }
    }
}
