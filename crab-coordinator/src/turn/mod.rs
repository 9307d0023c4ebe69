//! The turns of all sandboxes: who asks what, which turn that is, and where its answer comes from.

pub(crate) mod driver;
pub(crate) mod gate;
pub(crate) mod ledger;
pub(crate) mod recording;
mod undone;

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

use crab_core::{Boundary, Digest, Error, Gate, GateHold, SandboxId, Turn, TurnNumber, Verdict};
use parking_lot::Mutex;
use tokio::sync::{broadcast, mpsc};
use tokio::task::JoinSet;

use crate::event;
use crate::journal::{Event, Found, Journal};
use crate::names;
use gate::{GatePolicy, TurnGate};
use ledger::{Admission, Answer, Gating, Known, Ledger};
use recording::{Recording, Subscription};
use undone::Undone;

/// A request on a turn path.
#[derive(Clone, Debug)]
pub(crate) struct Asked {
    pub(crate) sandbox: SandboxId,
    pub(crate) provider: &'static str,
    pub(crate) key: Option<Digest>,
    pub(crate) conversation: Option<Digest>,
    /// The conversation's digests after each of its elements.
    pub(crate) prefixes: Vec<Digest>,
}

/// What became of a request.
pub(crate) enum Admitted {
    /// It has its turn.
    Turn(Box<Ticket>),
    /// Its turn's answer is under way and too far gone to be joined: ask again when it has ended.
    Wait(Arc<Recording>),
}

/// A client's share in a turn.
pub(crate) struct Ticket {
    pub(crate) asked: Arc<Asked>,
    pub(crate) number: TurnNumber,
    pub(crate) attempt: u32,
    pub(crate) gate: Arc<TurnGate>,
    pub(crate) recording: Arc<Recording>,
    pub(crate) subscription: Subscription,
    pub(crate) work: Work,
    /// Of a new turn: to be run beside the work, by the same task.
    pub(crate) hold: Option<GateHold>,
}

/// What the holder of a ticket has to get going.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// Somebody else is at it.
    Nothing,
    /// Ask the model.
    Ask,
    /// Give what the journal has in this file, and keep it as `link` as well.
    Replay { from: PathBuf, link: Option<PathBuf> },
}

/// One sandbox's turns.
#[derive(Default)]
struct Desk {
    ledger: Ledger,
    /// Turns whose answer is coming or whose gate is closed.
    live: HashMap<TurnNumber, Live>,
    /// What the last restore undid, as long as a request may speak of it.
    undone: Option<Undone>,
    /// Turns that went since the index was written anew.
    trimmed: usize,
}

struct Live {
    gate: Arc<TurnGate>,
    recording: Arc<Recording>,
}

/// The turns of all sandboxes.
pub(crate) struct Turns {
    desks: Mutex<HashMap<SandboxId, Arc<Mutex<Desk>>>>,
    pub(crate) journal: Option<Journal>,
    boundaries: Mutex<Option<mpsc::UnboundedSender<Boundary>>>,
    events: broadcast::Sender<event::Event>,
    policy: GatePolicy,
    window: usize,
    /// Drivers. They hold this, so whoever is done with it must call `close`.
    tasks: Mutex<JoinSet<()>>,
}

impl Turns {
    pub(crate) fn new(
        journal: Option<(Journal, HashMap<SandboxId, Found>)>,
        boundaries: mpsc::UnboundedSender<Boundary>,
        policy: GatePolicy,
        window: usize,
    ) -> Self {
        let (journal, found) = journal.unzip();
        let mut desks = HashMap::new();
        for (sandbox, found) in found.unwrap_or_default() {
            let ledger = Ledger::load(&found);
            if let Some(journal) = &journal {
                tidy(journal, &sandbox, &found, &ledger);
            }
            let desk = Desk { ledger, ..Desk::default() };
            desks.insert(sandbox, Arc::new(Mutex::new(desk)));
        }
        Self {
            desks: Mutex::new(desks),
            journal,
            boundaries: Mutex::new(Some(boundaries)),
            events: broadcast::Sender::new(256),
            policy,
            window,
            tasks: Mutex::new(JoinSet::new()),
        }
    }

    /// Runs something until it is over or this is closed.
    pub(crate) fn spawn(&self, work: impl Future<Output = ()> + Send + 'static) {
        let mut tasks = self.tasks.lock();
        while tasks.try_join_next().is_some() {}
        tasks.spawn(work);
    }

    fn desk(&self, sandbox: &SandboxId) -> Arc<Mutex<Desk>> {
        let mut desks = self.desks.lock();
        if let Some(desk) = desks.get(sandbox) {
            return Arc::clone(desk);
        }
        Arc::clone(desks.entry(sandbox.clone()).or_default())
    }

    /// A recording for an answer that is about to be asked for.
    pub(crate) fn new_recording(&self) -> Arc<Recording> {
        Recording::new(self.window)
    }

    /// Gives a request its turn. Where the model has to be asked, the answer goes to `recording`, which is new.
    pub(crate) fn admit(&self, asked: &Arc<Asked>, recording: Arc<Recording>) -> Admitted {
        let desk = self.desk(&asked.sandbox);
        let mut desk = desk.lock();
        let admission = desk.ledger.admit(asked.key);
        let how = match admission {
            Admission::New => None,
            Admission::Join(_) => Some("joined"),
            Admission::NewFrom(_) | Admission::Replay(_) => Some("journal"),
            Admission::AskAgain(_) => Some("model"),
        };
        if let Some(how) = how {
            metrics::counter!(names::RETRIES, "how" => how).increment(1);
        }
        match admission {
            Admission::New => self.open(&mut desk, asked, recording, Work::Ask),
            Admission::NewFrom(old) => {
                let coming = desk.live.get(&old).map(|live| Arc::clone(&live.recording));
                let whole = desk.ledger.get(old).filter(|old| old.answer == Answer::Whole);
                match (whole, coming) {
                    (Some(known), _) => {
                        let work = self.replay(&asked.sandbox, old, known, true);
                        self.open(&mut desk, asked, recording, work)
                    }
                    // Its gate failed while the answer was still coming: the new turn takes the answer over when it is
                    // whole.
                    (None, Some(coming)) => Admitted::Wait(coming),
                    (None, None) => self.open(&mut desk, asked, recording, Work::Ask),
                }
            }
            Admission::Join(number) => {
                let joined = desk.live.get(&number).and_then(|live| {
                    let subscription = live.recording.subscribe()?;
                    Some((Arc::clone(&live.gate), Arc::clone(&live.recording), subscription))
                });
                let known = desk.ledger.get(number).cloned();
                match (joined, known, desk.live.get(&number)) {
                    (Some((gate, recording, subscription)), known, _) => {
                        let attempt = known.map_or(1, |known| known.attempt);
                        ticket(asked, number, attempt, gate, recording, subscription, Work::Nothing, None)
                    }
                    (None, Some(known), Some(live)) if known.answer == Answer::Whole => {
                        let gate = Arc::clone(&live.gate);
                        let work = self.replay(&asked.sandbox, number, &known, false);
                        self.again(asked, number, known.attempt, gate, recording, work)
                    }
                    (None, _, Some(live)) => Admitted::Wait(Arc::clone(&live.recording)),
                    (None, ..) => self.open(&mut desk, asked, recording, Work::Ask),
                }
            }
            Admission::Replay(number) => {
                desk.ledger.replayed(number);
                match desk.ledger.get(number).cloned() {
                    Some(known) => {
                        let work = self.replay(&asked.sandbox, number, &known, false);
                        let gate = desk.gate(number, &known);
                        self.again(asked, number, known.attempt, gate, recording, work)
                    }
                    None => self.open(&mut desk, asked, recording, Work::Ask),
                }
            }
            Admission::AskAgain(number) => {
                if let (Some(journal), Some(known)) = (&self.journal, desk.ledger.get(number)) {
                    journal.remove_answer(&asked.sandbox, number, known.attempt);
                }
                let attempt = desk.ledger.ask_again(number);
                match desk.ledger.get(number).cloned() {
                    Some(known) => {
                        let gate = desk.gate(number, &known);
                        desk.live.insert(number, Live { gate: Arc::clone(&gate), recording: Arc::clone(&recording) });
                        self.again(asked, number, attempt, gate, recording, Work::Ask)
                    }
                    None => self.open(&mut desk, asked, recording, Work::Ask),
                }
            }
        }
    }

    fn replay(&self, sandbox: &SandboxId, number: TurnNumber, known: &Known, link: bool) -> Work {
        match &self.journal {
            Some(journal) => Work::Replay {
                from: journal.answer_path(sandbox, number, known.attempt),
                // Filled in when the new turn has its number.
                link: link.then(PathBuf::new),
            },
            None => Work::Ask,
        }
    }

    /// The same turn with a recording of its own.
    fn again(
        &self,
        asked: &Arc<Asked>,
        number: TurnNumber,
        attempt: u32,
        gate: Arc<TurnGate>,
        recording: Arc<Recording>,
        work: Work,
    ) -> Admitted {
        match recording.subscribe() {
            Some(subscription) => ticket(asked, number, attempt, gate, recording, subscription, work, None),
            // It is new, so its beginning is there; waiting for it is right in any case.
            None => Admitted::Wait(recording),
        }
    }

    /// Opens a new turn and gives its boundary out.
    fn open(&self, desk: &mut Desk, asked: &Arc<Asked>, recording: Arc<Recording>, mut work: Work) -> Admitted {
        let Some(subscription) = recording.subscribe() else {
            return Admitted::Wait(recording);
        };
        let number = desk.ledger.open(asked.key, asked.conversation);
        metrics::counter!(names::TURNS, "provider" => asked.provider).increment(1);
        self.hear(desk, asked, number);
        if let (Some(journal), Work::Replay { link: Some(link), .. }) = (&self.journal, &mut work) {
            *link = journal.answer_path(&asked.sandbox, number, 1);
        }
        let gate = TurnGate::closed();
        desk.live.insert(number, Live { gate: Arc::clone(&gate), recording: Arc::clone(&recording) });
        let mut turn = Turn::new(asked.sandbox.clone(), number);
        if let Some(conversation) = asked.conversation {
            turn = turn.with_conversation(conversation);
        }
        let (engine_side, hold) = Gate::new();
        let boundary = Boundary { turn, gate: engine_side };
        // A gate that finds nobody is dropped, which is a failed gate, not an open one.
        let sender = self.boundaries.lock().clone();
        let give_out = move || {
            if let Some(sender) = sender {
                let _ = sender.send(boundary);
            }
        };
        match &self.journal {
            // In the order of their numbers, each after its number is written.
            Some(journal) => journal.append(
                &asked.sandbox,
                &Event::Opened { turn: number, key: asked.key, conversation: asked.conversation },
                Some(Box::new(give_out)),
            ),
            None => give_out(),
        }
        self.trim(desk, &asked.sandbox);
        ticket(asked, number, 1, gate, recording, subscription, work, Some(hold))
    }

    fn trim(&self, desk: &mut Desk, sandbox: &SandboxId) {
        let Some(journal) = &self.journal else {
            desk.ledger.trim(1024, u64::MAX);
            return;
        };
        let limits = &journal.limits;
        for (turn, attempt) in desk.ledger.trim(limits.turns, limits.sandbox_bytes) {
            journal.remove_answer(sandbox, turn, attempt);
            desk.trimmed += 1;
        }
        // Each turn leaves a few lines; those of turns that are gone must not pile up.
        if desk.trimmed > limits.turns + 64 {
            desk.trimmed = 0;
            journal.rewrite(sandbox, &desk.ledger.events());
        }
    }

    /// Waits for the verdict on a turn and gives it to all who wait for it.
    pub(crate) async fn attend(&self, sandbox: &SandboxId, number: TurnNumber, gate: &TurnGate, hold: GateHold) {
        gate.attend(hold, self.policy, |verdict, held| {
            self.decided(sandbox, number, verdict);
            metrics::histogram!(names::HELD).record(held.as_secs_f64());
        })
        .await;
    }

    fn decided(&self, sandbox: &SandboxId, number: TurnNumber, verdict: &Verdict) {
        let (name, gating, event) = match verdict {
            Verdict::Durable(version) => {
                ("durable", Gating::Open(Some(*version)), Event::Released { turn: number, version: Some(*version) })
            }
            Verdict::Unprotected(error) => {
                tracing::warn!(%sandbox, turn = %number, %error, "an answer goes out unprotected");
                let event = Event::Released { turn: number, version: None };
                ("unprotected", Gating::Open(None), event)
            }
            Verdict::Failed(error) => {
                tracing::warn!(%sandbox, turn = %number, %error, "a gate failed: the agent is asked to try again");
                ("failed", Gating::Failed, Event::Refused { turn: number })
            }
        };
        metrics::counter!(names::VERDICTS, "verdict" => name).increment(1);
        match gating {
            Gating::Open(None) => self.tell(event::Event::Unprotected { sandbox: sandbox.clone(), turn: number }),
            Gating::Failed => self.tell(event::Event::GateFailed { sandbox: sandbox.clone(), turn: number }),
            Gating::Open(Some(_)) | Gating::Closed => {}
        }
        let desk = self.desk(sandbox);
        let mut desk = desk.lock();
        desk.ledger.set_gating(number, gating);
        if gating == Gating::Failed
            && let Some(live) = desk.live.get(&number)
        {
            live.recording.keep();
        }
        desk.retire(number);
        drop(desk);
        if let Some(journal) = &self.journal {
            journal.append(sandbox, &event, None);
        }
    }

    /// An attempt's answer is whole in the journal.
    pub(crate) fn answer_whole(&self, asked: &Asked, number: TurnNumber, attempt: u32, bytes: u64) {
        metrics::counter!(names::JOURNALED).increment(1);
        let desk = self.desk(&asked.sandbox);
        let mut desk = desk.lock();
        desk.ledger.set_whole(number, attempt, bytes);
        desk.retire(number);
    }

    /// An attempt's answer will not be had again.
    pub(crate) fn answer_gone(&self, asked: &Asked, number: TurnNumber, attempt: u32) {
        let desk = self.desk(&asked.sandbox);
        let mut desk = desk.lock();
        desk.ledger.set_gone(number, attempt);
        desk.retire(number);
    }

    /// A whole answer was handed to a client.
    pub(crate) fn delivered(&self, sandbox: &SandboxId, number: TurnNumber) {
        self.desk(sandbox).lock().ledger.set_delivered(number);
        if let Some(journal) = &self.journal {
            journal.append(sandbox, &Event::Delivered { turn: number }, None);
        }
    }

    /// The sandbox was restored to the version of this turn.
    pub(crate) fn rewind(&self, sandbox: &SandboxId, to: TurnNumber, replay: bool) {
        let desk = self.desk(sandbox);
        let mut desk = desk.lock();
        desk.ledger.rewind(replay);
        let undone = Undone::new(to, desk.ledger.iter().map(|(turn, known)| (turn, known.conversation)));
        desk.undone = Some(undone).filter(|undone| !undone.is_over());
        drop(desk);
        if let Some(journal) = &self.journal {
            journal.append(sandbox, &Event::Rewound { replay }, None);
        }
    }

    pub(crate) fn subscribe(&self) -> broadcast::Receiver<event::Event> {
        self.events.subscribe()
    }

    fn tell(&self, event: event::Event) {
        // Nobody need listen.
        let _ = self.events.send(event);
    }

    /// Says so where a new turn's request speaks of turns that a restore has undone.
    fn hear(&self, desk: &mut Desk, asked: &Asked, turn: TurnNumber) {
        let Some(undone) = &mut desk.undone else {
            return;
        };
        if let Some((restored_to, speaks_of)) = undone.hear(&asked.prefixes) {
            let sandbox = asked.sandbox.clone();
            tracing::warn!(%sandbox, %turn, %restored_to, %speaks_of, "a request speaks of turns that were undone: its conversation was not restored with the sandbox");
            metrics::counter!(names::DIVERGED).increment(1);
            self.tell(event::Event::Diverged { sandbox, turn, restored_to, speaks_of });
        }
        if undone.is_over() {
            desk.undone = None;
        }
    }

    pub(crate) fn set_floor(&self, sandbox: &SandboxId, turn: TurnNumber) {
        self.desk(sandbox).lock().ledger.floor(turn);
        if let Some(journal) = &self.journal {
            journal.append(sandbox, &Event::Floor { turn }, None);
        }
    }

    pub(crate) fn forget_before(&self, sandbox: &SandboxId, before: TurnNumber) {
        let dropped = self.desk(sandbox).lock().ledger.forget_before(before);
        if let Some(journal) = &self.journal {
            for (turn, attempt) in dropped {
                journal.remove_answer(sandbox, turn, attempt);
            }
            journal.append(sandbox, &Event::Forgotten { before }, None);
        }
    }

    pub(crate) fn forget(&self, sandbox: &SandboxId) {
        self.desks.lock().remove(sandbox);
        if let Some(journal) = &self.journal {
            journal.remove_sandbox(sandbox);
        }
    }

    /// What is known of a sandbox's turns, oldest first.
    pub(crate) fn list(&self, sandbox: &SandboxId) -> Vec<(TurnNumber, Known)> {
        let desk = self.desks.lock().get(sandbox).cloned();
        desk.map_or_else(Vec::new, |desk| {
            let desk = desk.lock();
            desk.ledger.iter().map(|(number, known)| (number, known.clone())).collect()
        })
    }

    pub(crate) fn newest(&self, sandbox: &SandboxId) -> Option<TurnNumber> {
        let desk = self.desks.lock().get(sandbox).cloned()?;
        desk.lock().ledger.newest()
    }

    /// No more boundaries will come. Ends all that runs; the engine sees gates abandoned.
    pub(crate) fn close(&self) -> JoinSet<()> {
        self.boundaries.lock().take();
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        tasks.abort_all();
        tasks
    }
}

impl Desk {
    fn gate(&self, number: TurnNumber, known: &Known) -> Arc<TurnGate> {
        if let Some(live) = self.live.get(&number) {
            return Arc::clone(&live.gate);
        }
        TurnGate::decided(match known.gating {
            Gating::Open(Some(version)) => Verdict::Durable(version),
            Gating::Open(None) => Verdict::Unprotected(Arc::new(Error::new(
                crab_core::ErrorKind::Cancelled,
                "the turn went on unprotected",
            ))),
            // Turns with such gates are live, or are asked anew under a new gate.
            Gating::Closed | Gating::Failed => {
                Verdict::Failed(Arc::new(Error::new(crab_core::ErrorKind::Internal, "the turn has no gate")))
            }
        })
    }

    fn retire(&mut self, number: TurnNumber) {
        let done = self
            .ledger
            .get(number)
            .is_none_or(|known| known.answer != Answer::Coming && known.gating != Gating::Closed);
        if done {
            self.live.remove(&number);
        }
    }
}

#[allow(clippy::too_many_arguments, reason = "they are the ticket's fields")]
fn ticket(
    asked: &Arc<Asked>,
    number: TurnNumber,
    attempt: u32,
    gate: Arc<TurnGate>,
    recording: Arc<Recording>,
    subscription: Subscription,
    work: Work,
    hold: Option<GateHold>,
) -> Admitted {
    let asked = Arc::clone(asked);
    Admitted::Turn(Box::new(Ticket { asked, number, attempt, gate, recording, subscription, work, hold }))
}

/// Removes answers that no turn refers to, and writes an index anew that has grown far beyond what it says.
fn tidy(journal: &Journal, sandbox: &SandboxId, found: &Found, ledger: &Ledger) {
    for &(turn, attempt, _) in &found.answers {
        if ledger.get(turn).is_none_or(|known| known.attempt != attempt) {
            journal.remove_answer(sandbox, turn, attempt);
        }
    }
    let events = ledger.events();
    if found.events.len() > 2 * events.len() + 64 {
        journal.rewrite(sandbox, &events);
    }
}
