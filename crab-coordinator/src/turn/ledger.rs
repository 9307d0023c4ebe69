//! What is known of a sandbox's turns, and what a request is to them. Pure: no clock, no I/O.
//!
//! # When is the same question the same turn?
//! A request is *the same* as an earlier one if its key is equal: same endpoint, same body up to key order and
//! whitespace. Of the turns with that key the newest counts, and:
//!
//! 1. Its answer is **still coming** or held at its gate: the request joins it, whoever else waits.
//! 2. It is the sandbox's **newest turn**: nothing happened in between, so this is a client that tries again. The turn
//!    stays the same. The answer comes from the journal where it is whole, else from the model (after an error, a
//!    broken stream, a client that went away). An answer that was given [`MAX_REPLAYS`] times and is asked for yet
//!    again does not please its client: the model is asked.
//! 3. **Other turns came after it.** If its answer never reached a client whole, the client (one of several that share
//!    the sandbox) tries again: a new turn with the journal's answer. If the answer was delivered, the agent asks the
//!    same thing anew: a new turn, and the model is asked.
//! 4. Its **gate failed**: a new turn, so that the checkpoint is tried again, with the answer that is here already.
//! 5. The sandbox was **restored** since: a new turn, because what the agent does now has to be saved again, with the
//!    journal's answer. So a restored agent walks through what it had heard until its conversation parts from the old
//!    one, which changes the key.
//!
//! A new turn where the same would have done costs a checkpoint that finds nothing changed; the same turn where the
//! agent worked in between would leave that work uncovered. In doubt it is a new turn.

use std::collections::{BTreeMap, HashMap};

use crab_core::{Digest, TurnNumber, VersionId};

use crate::journal::{Event, Found};

/// How often one turn's answer is given from the journal before the model is asked again.
pub(crate) const MAX_REPLAYS: u32 = 3;

/// How a turn's gate stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Gating {
    Closed,
    Open(Option<VersionId>),
    Failed,
}

/// Where a turn's answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Answer {
    /// Being received.
    Coming,
    /// In the journal.
    Whole,
    /// Nowhere: it failed, broke off, or is forgotten.
    None,
}

#[derive(Clone, Debug)]
pub(crate) struct Known {
    pub(crate) key: Option<Digest>,
    pub(crate) conversation: Option<Digest>,
    pub(crate) gating: Gating,
    pub(crate) answer: Answer,
    pub(crate) attempt: u32,
    pub(crate) bytes: u64,
    pub(crate) delivered: bool,
    replays: u32,
    rewound: bool,
}

/// What a request is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Admission {
    /// A new turn: ask the model.
    New,
    /// A new turn, answered as this one was.
    NewFrom(TurnNumber),
    /// This turn, whose answer is coming or held at its gate.
    Join(TurnNumber),
    /// This turn, answered from the journal.
    Replay(TurnNumber),
    /// This turn: ask the model again.
    AskAgain(TurnNumber),
}

/// What must go because of the limits.
pub(crate) type Dropped = Vec<(TurnNumber, u32)>;

#[derive(Debug, Default)]
pub(crate) struct Ledger {
    turns: BTreeMap<TurnNumber, Known>,
    by_key: HashMap<Digest, TurnNumber>,
    /// The highest number given, 0 before the first.
    highest: u64,
    bytes: u64,
}

impl Ledger {
    /// What a journal held.
    pub(crate) fn load(found: &Found) -> Self {
        let mut ledger = Self::default();
        for event in &found.events {
            match event {
                Event::Opened { turn, key, conversation } => ledger.insert(*turn, *key, *conversation),
                Event::Released { turn, version } => {
                    ledger.set_gating(*turn, Gating::Open(*version));
                }
                Event::Refused { turn } => ledger.set_gating(*turn, Gating::Failed),
                Event::Delivered { turn } => ledger.set_delivered(*turn),
                Event::Rewound { replay } => ledger.rewind(*replay),
                Event::Floor { turn } => ledger.floor(*turn),
                Event::Forgotten { before } => {
                    ledger.forget_before(*before);
                }
            }
        }
        for &(turn, attempt, bytes) in &found.answers {
            ledger.floor(turn);
            ledger.set_whole(turn, attempt, bytes);
        }
        for known in ledger.turns.values_mut() {
            if known.answer == Answer::Coming {
                known.answer = Answer::None;
            }
            if known.gating == Gating::Closed {
                // Whoever was to give the verdict died with the process.
                known.gating = Gating::Failed;
            }
        }
        ledger
    }

    /// The same as events, to write the journal's index anew.
    pub(crate) fn events(&self) -> Vec<Event> {
        let mut events = Vec::new();
        // Those that a restore marked are all older than those it did not.
        let mut rewound = false;
        for (&turn, known) in &self.turns {
            if rewound && !known.rewound {
                events.push(Event::Rewound { replay: true });
            }
            rewound = known.rewound;
            events.push(Event::Opened { turn, key: known.key, conversation: known.conversation });
            match known.gating {
                Gating::Open(version) => events.push(Event::Released { turn, version }),
                Gating::Failed => events.push(Event::Refused { turn }),
                Gating::Closed => {}
            }
            if known.delivered {
                events.push(Event::Delivered { turn });
            }
        }
        if rewound {
            events.push(Event::Rewound { replay: true });
        }
        events.push(Event::Floor { turn: TurnNumber(self.highest) });
        events
    }

    /// What a request with this key is.
    pub(crate) fn admit(&self, key: Option<Digest>) -> Admission {
        let Some(&number) = key.as_ref().and_then(|key| self.by_key.get(key)) else {
            return Admission::New;
        };
        let Some(known) = self.turns.get(&number) else {
            return Admission::New;
        };
        let here = known.answer != Answer::None;
        if known.rewound || known.gating == Gating::Failed {
            return if here { Admission::NewFrom(number) } else { Admission::New };
        }
        let held = known.answer == Answer::Whole && known.gating == Gating::Closed;
        if known.answer == Answer::Coming || held {
            return Admission::Join(number);
        }
        let newest = number.0 == self.highest;
        match known.answer {
            Answer::Whole if newest && known.replays < MAX_REPLAYS => Admission::Replay(number),
            Answer::Whole if !newest && !known.delivered => Admission::NewFrom(number),
            _ if newest => Admission::AskAgain(number),
            _ => Admission::New,
        }
    }

    /// Opens a new turn.
    pub(crate) fn open(&mut self, key: Option<Digest>, conversation: Option<Digest>) -> TurnNumber {
        let number = TurnNumber(self.highest).next();
        self.insert(number, key, conversation);
        number
    }

    fn insert(&mut self, number: TurnNumber, key: Option<Digest>, conversation: Option<Digest>) {
        self.floor(number);
        self.turns.insert(
            number,
            Known {
                key,
                conversation,
                gating: Gating::Closed,
                answer: Answer::Coming,
                attempt: 1,
                bytes: 0,
                delivered: false,
                replays: 0,
                rewound: false,
            },
        );
        if let Some(key) = key {
            self.by_key.insert(key, number);
        }
    }

    /// The turn is asked again: the attempt's number.
    pub(crate) fn ask_again(&mut self, number: TurnNumber) -> u32 {
        let Some(known) = self.turns.get_mut(&number) else {
            return 1;
        };
        known.answer = Answer::Coming;
        known.replays = 0;
        known.attempt += 1;
        self.bytes -= std::mem::take(&mut known.bytes);
        known.attempt
    }

    /// An answer is given from the journal.
    pub(crate) fn replayed(&mut self, number: TurnNumber) {
        if let Some(known) = self.turns.get_mut(&number) {
            known.replays += 1;
        }
    }

    /// An attempt's answer is in the journal.
    pub(crate) fn set_whole(&mut self, number: TurnNumber, attempt: u32, bytes: u64) {
        if let Some(known) = self.turns.get_mut(&number)
            && attempt >= known.attempt
        {
            known.answer = Answer::Whole;
            known.attempt = attempt;
            self.bytes = self.bytes - known.bytes + bytes;
            known.bytes = bytes;
        }
    }

    /// An attempt's answer will not be had.
    pub(crate) fn set_gone(&mut self, number: TurnNumber, attempt: u32) {
        if let Some(known) = self.turns.get_mut(&number)
            && attempt == known.attempt
        {
            known.answer = Answer::None;
            self.bytes -= std::mem::take(&mut known.bytes);
        }
    }

    pub(crate) fn set_gating(&mut self, number: TurnNumber, gating: Gating) {
        if let Some(known) = self.turns.get_mut(&number) {
            known.gating = gating;
        }
    }

    pub(crate) fn set_delivered(&mut self, number: TurnNumber) {
        if let Some(known) = self.turns.get_mut(&number) {
            known.delivered = true;
        }
    }

    /// The sandbox was restored: every answer may be given again (`replay`), or none.
    pub(crate) fn rewind(&mut self, replay: bool) {
        for known in self.turns.values_mut() {
            known.rewound = true;
            if !replay {
                known.key = None;
            }
        }
        if !replay {
            self.by_key.clear();
        }
    }

    /// No number up to this one will be given.
    pub(crate) fn floor(&mut self, number: TurnNumber) {
        self.highest = self.highest.max(number.0);
    }

    /// Forgets all turns before this one, except those whose answer is coming.
    pub(crate) fn forget_before(&mut self, before: TurnNumber) -> Dropped {
        let old: Vec<TurnNumber> = self.turns.range(..before).map(|(&turn, _)| turn).collect();
        old.into_iter().filter_map(|turn| self.forget(turn)).collect()
    }

    /// Forgets the oldest turns until the limits are kept.
    pub(crate) fn trim(&mut self, turns: usize, bytes: u64) -> Dropped {
        let mut dropped = Vec::new();
        while self.turns.len() > turns.max(1) || (self.bytes > bytes && self.turns.len() > 1) {
            let Some(&oldest) = self.turns.keys().next() else {
                break;
            };
            match self.forget(oldest) {
                Some(gone) => dropped.push(gone),
                None => break,
            }
        }
        dropped
    }

    fn forget(&mut self, number: TurnNumber) -> Option<(TurnNumber, u32)> {
        let known = self.turns.get(&number)?;
        if known.answer == Answer::Coming {
            return None;
        }
        let known = self.turns.remove(&number)?;
        self.bytes -= known.bytes;
        if let Some(key) = known.key
            && self.by_key.get(&key) == Some(&number)
        {
            self.by_key.remove(&key);
        }
        Some((number, known.attempt))
    }

    pub(crate) fn get(&self, number: TurnNumber) -> Option<&Known> {
        self.turns.get(&number)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (TurnNumber, &Known)> {
        self.turns.iter().map(|(&number, known)| (number, known))
    }

    /// The highest number given; `None` before the first.
    pub(crate) fn newest(&self) -> Option<TurnNumber> {
        (self.highest > 0).then_some(TurnNumber(self.highest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn key(n: u8) -> Option<Digest> {
        Some(Digest([n; 32]))
    }

    fn done(ledger: &mut Ledger, n: u8) -> TurnNumber {
        let turn = ledger.open(key(n), None);
        ledger.set_whole(turn, 1, 10);
        ledger.set_gating(turn, Gating::Open(Some(VersionId(1))));
        ledger.set_delivered(turn);
        turn
    }

    #[test]
    fn a_retry_of_the_newest_turn_is_that_turn() {
        let mut ledger = Ledger::default();
        assert_eq!(ledger.admit(key(1)), Admission::New);
        let turn = ledger.open(key(1), None);
        assert_eq!(turn, TurnNumber(1));
        assert_eq!(ledger.admit(key(1)), Admission::Join(turn));
        assert_eq!(ledger.admit(key(2)), Admission::New);
        assert_eq!(ledger.admit(None), Admission::New);
        ledger.set_gone(turn, 1);
        assert_eq!(ledger.admit(key(1)), Admission::AskAgain(turn));
        assert_eq!(ledger.ask_again(turn), 2);
        assert_eq!(ledger.admit(key(1)), Admission::Join(turn));
        // Late news of the first attempt change nothing.
        ledger.set_gone(turn, 1);
        assert_eq!(ledger.admit(key(1)), Admission::Join(turn));
        ledger.set_whole(turn, 2, 5);
        assert_eq!(ledger.admit(key(1)), Admission::Join(turn));
        ledger.set_gating(turn, Gating::Open(None));
        assert_eq!(ledger.admit(key(1)), Admission::Replay(turn));
    }

    #[test]
    fn an_answer_that_does_not_please_is_not_given_for_ever() {
        let mut ledger = Ledger::default();
        let turn = done(&mut ledger, 1);
        for _ in 0..MAX_REPLAYS {
            assert_eq!(ledger.admit(key(1)), Admission::Replay(turn));
            ledger.replayed(turn);
        }
        assert_eq!(ledger.admit(key(1)), Admission::AskAgain(turn));
    }

    #[test]
    fn the_same_question_after_another_one_is_a_new_turn() {
        let mut ledger = Ledger::default();
        done(&mut ledger, 1);
        done(&mut ledger, 2);
        assert_eq!(ledger.admit(key(1)), Admission::New);
    }

    #[test]
    fn an_answer_that_never_arrived_is_given_after_another_turn_under_a_new_gate() {
        let mut ledger = Ledger::default();
        let turn = ledger.open(key(1), None);
        ledger.set_whole(turn, 1, 10);
        ledger.set_gating(turn, Gating::Open(None));
        done(&mut ledger, 2);
        assert_eq!(ledger.admit(key(1)), Admission::NewFrom(turn));
    }

    #[test]
    fn after_a_failed_gate_the_answer_waits_for_a_new_turn() {
        let mut ledger = Ledger::default();
        let turn = ledger.open(key(1), None);
        ledger.set_gating(turn, Gating::Failed);
        assert_eq!(ledger.admit(key(1)), Admission::NewFrom(turn));
        ledger.set_whole(turn, 1, 3);
        assert_eq!(ledger.admit(key(1)), Admission::NewFrom(turn));
        ledger.set_gone(turn, 1);
        assert_eq!(ledger.admit(key(1)), Admission::New);
    }

    #[test]
    fn after_a_restore_the_journal_answers_until_the_conversation_parts() {
        let mut ledger = Ledger::default();
        let first = done(&mut ledger, 1);
        let second = done(&mut ledger, 2);
        done(&mut ledger, 3);
        ledger.rewind(true);
        assert_eq!(ledger.admit(key(1)), Admission::NewFrom(first));
        let again = ledger.open(key(1), None);
        assert_eq!(again, TurnNumber(4));
        ledger.set_whole(again, 1, 10);
        ledger.set_gating(again, Gating::Open(None));
        assert_eq!(ledger.admit(key(1)), Admission::Replay(again));
        assert_eq!(ledger.admit(key(2)), Admission::NewFrom(second));
        assert_eq!(ledger.admit(key(9)), Admission::New);
        ledger.rewind(false);
        assert_eq!(ledger.admit(key(2)), Admission::New);
    }

    #[test]
    fn limits_drop_the_oldest() {
        let mut ledger = Ledger::default();
        for n in 1..=5 {
            done(&mut ledger, n);
        }
        assert_eq!(ledger.trim(3, 1000), [(TurnNumber(1), 1), (TurnNumber(2), 1)]);
        assert_eq!(ledger.trim(3, 15), [(TurnNumber(3), 1), (TurnNumber(4), 1)]);
        assert_eq!(ledger.admit(key(4)), Admission::New);
        assert_eq!(ledger.newest(), Some(TurnNumber(5)));
        assert_eq!(ledger.trim(0, 0), []);
    }

    proptest! {
        /// Numbers only grow, also over restarts; and a restart forgets no answer.
        #[test]
        fn numbers_survive_restarts(steps in prop::collection::vec(0u8..8, 1..60)) {
            let (mut ledger, mut events, mut answers) = (Ledger::default(), Vec::new(), Vec::new());
            let mut last = TurnNumber(0);
            for step in steps {
                match step {
                    0..5 => {
                        let turn = ledger.open(key(step), None);
                        prop_assert!(turn > last);
                        last = turn;
                        events.push(Event::Opened { turn, key: key(step), conversation: None });
                        if step % 2 == 0 {
                            ledger.set_whole(turn, 1, 1);
                            answers.push((turn, 1, 1));
                        }
                    }
                    5 => {
                        ledger.rewind(true);
                        events.push(Event::Rewound { replay: true });
                    }
                    _ => {
                        ledger = Ledger::load(&Found { events: events.clone(), answers: answers.clone() });
                        prop_assert_eq!(ledger.newest().unwrap_or(TurnNumber(0)), last);
                        let again = Ledger::load(&Found { events: ledger.events(), answers: answers.clone() });
                        for n in 0..5 {
                            prop_assert_eq!(again.admit(key(n)), ledger.admit(key(n)));
                        }
                    }
                }
            }
        }
    }
}
