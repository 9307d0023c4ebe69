//! What the tasks of a sandbox did in the intervals between looks. Pure.
//!
//! A version is taken at the beginning of an interval. Which tasks it holds is told by when they started, so one number
//! per interval says for every possible version whether a task of it did something: when the oldest task that did
//! started.

use std::collections::VecDeque;

use crate::bpf::layout::{Destination, NOBODY, Slot, left, pipe_bits};

/// So many intervals are kept apart. Beyond, the oldest are joined: what they hold then counts for all of them.
const KEPT: usize = 64;

/// Pipes that were used, as a filter: one that was used is always found, one that was not hardly ever.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Pipes(Vec<u64>);

impl Pipes {
    fn new(words: &[u64]) -> Self {
        if words.iter().all(|word| *word == 0) { Self::default() } else { Self(words.to_vec()) }
    }

    fn join(&mut self, other: &Self) {
        if self.0.is_empty() {
            self.0.clone_from(&other.0);
        }
        for (word, more) in self.0.iter_mut().zip(&other.0) {
            *word |= more;
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Whether a pipe may have been used.
    pub(crate) fn may_hold(&self, inode: u64) -> bool {
        pipe_bits(inode).iter().all(|bit| self.0.get(bit / 64).is_some_and(|word| word >> (bit % 64) & 1 == 1))
    }
}

/// What happened in one or more intervals that follow each other.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Interval {
    /// The first of the intervals.
    pub(crate) epoch: u64,
    /// When the oldest task that did something, that ran, started.
    pub(crate) oldest_actor: u64,
    pub(crate) oldest_runner: u64,
    /// CPU time of tasks older than the interval that they ran in.
    pub(crate) cpu: u64,
    /// A task may have come on a CPU or left it without a report.
    pub(crate) unreported: bool,
    /// Numbers of the tasks that came, less those of the ones that ended, modulo 2^64.
    pub(crate) tasks: u64,
    /// Of the oldest actor: its id, and the system call or the negated signal.
    pub(crate) actor: u32,
    pub(crate) act: i32,
    pub(crate) left: u32,
    pub(crate) left_act: i32,
    /// What may have changed a file: the system call, or 0.
    pub(crate) files_act: i32,
    pub(crate) pipes: Pipes,
    pub(crate) destinations: Vec<Destination>,
}

impl Interval {
    pub(crate) fn quiet(epoch: u64) -> Self {
        Self::from(&Slot::empty(epoch, 0))
    }

    /// Whether it is known that no task ran.
    pub(crate) fn nobody_ran(&self) -> bool {
        self.oldest_runner == NOBODY && !self.unreported
    }

    /// Takes in what another one holds. The same interval read twice counts once.
    fn join(&mut self, other: &Self) {
        if other.oldest_actor < self.oldest_actor {
            self.oldest_actor = other.oldest_actor;
            self.actor = other.actor;
            self.act = other.act;
        }
        self.oldest_runner = self.oldest_runner.min(other.oldest_runner);
        self.cpu = if self.epoch == other.epoch { self.cpu.max(other.cpu) } else { self.cpu.saturating_add(other.cpu) };
        self.unreported |= other.unreported;
        // Of an interval that was read before, the later reading holds all.
        self.tasks = if self.epoch == other.epoch { other.tasks } else { self.tasks.wrapping_add(other.tasks) };
        self.left |= other.left;
        if other.left & left::KERNEL != 0 {
            self.left_act = other.left_act;
        }
        self.pipes.join(&other.pipes);
        if other.left & left::FILES != 0 {
            self.files_act = other.files_act;
        }
        for to in &other.destinations {
            if !self.destinations.contains(to) {
                self.destinations.push(*to);
            }
        }
    }
}

impl From<&Slot> for Interval {
    fn from(slot: &Slot) -> Self {
        let destinations = slot.destinations.len().min(slot.destination_count as usize);
        Self {
            epoch: slot.epoch,
            oldest_actor: slot.oldest_actor,
            oldest_runner: slot.oldest_runner,
            cpu: slot.cpu,
            unreported: false,
            tasks: slot.tasks,
            actor: slot.actor,
            act: slot.act,
            left: slot.left,
            left_act: slot.left_act,
            files_act: slot.files_act,
            pipes: Pipes::new(&slot.pipes),
            destinations: slot.destinations[..destinations].to_vec(),
        }
    }
}

/// The intervals of a sandbox, the oldest first.
#[derive(Clone, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct History {
    intervals: VecDeque<Interval>,
    /// What is older is of no interest any more.
    first: u64,
    /// Intervals up to this one are no longer kept apart.
    joined: u64,
}

impl History {
    /// Takes in an interval, or more of one that is known.
    pub(crate) fn add(&mut self, interval: Interval) {
        if interval.epoch < self.first {
            return;
        }
        // An old one may have been joined into one that bears a later number.
        let at = self.intervals.partition_point(|known| known.epoch < interval.epoch);
        match self.intervals.get_mut(at) {
            Some(known) if known.epoch == interval.epoch || interval.epoch <= self.joined => known.join(&interval),
            // Nothing that happened adds nothing: most intervals are so.
            _ if interval == Interval::quiet(interval.epoch) => {}
            _ => self.intervals.insert(at, interval),
        }
        while self.intervals.len() > KEPT {
            let (Some(mut first), Some(second)) = (self.intervals.pop_front(), self.intervals.pop_front()) else {
                break;
            };
            first.join(&second);
            // Versions between the two see both: they may see too much, never too little.
            first.epoch = second.epoch;
            self.joined = second.epoch;
            self.intervals.push_front(first);
        }
    }

    /// What happened from the beginning of an interval on.
    pub(crate) fn since(&self, epoch: u64) -> Interval {
        let mut all = Interval::quiet(0);
        for interval in self.intervals.iter().filter(|known| known.epoch >= epoch) {
            all.join(interval);
        }
        all
    }

    /// Whether nothing that happened from the beginning of an interval on was dropped.
    pub(crate) fn is_whole_since(&self, epoch: u64) -> bool {
        epoch >= self.first
    }

    /// Drops what happened before an interval.
    pub(crate) fn forget_before(&mut self, epoch: u64) {
        self.first = self.first.max(epoch);
        while self.intervals.front().is_some_and(|first| first.epoch < epoch) {
            self.intervals.pop_front();
        }
    }
}

/// Whether nobody is older than a moment.
pub(crate) fn nobody_before(oldest: u64, moment: u64) -> bool {
    oldest == NOBODY || oldest >= moment
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn interval(epoch: u64, oldest: u64, cpu: u64) -> Interval {
        Interval { oldest_actor: oldest, oldest_runner: oldest, cpu, ..Interval::quiet(epoch) }
    }

    #[test]
    fn read_twice_counts_once() {
        let mut history = History::default();
        history.add(interval(1, 50, 10));
        history.add(interval(1, 40, 12));
        history.add(interval(2, NOBODY, 5));
        let all = history.since(1);
        assert_eq!((all.oldest_actor, all.cpu), (40, 17));
        assert_eq!(history.since(2).cpu, 5);
    }

    #[test]
    fn who_came_and_went_in_different_intervals_cancels_out() {
        let mut history = History::default();
        let with = |epoch, tasks| Interval { tasks, ..Interval::quiet(epoch) };
        history.add(with(1, 77));
        history.add(with(2, 5));
        assert_ne!(history.since(1).tasks, 0);
        // Read again after more had been noted.
        history.add(with(2, 0u64.wrapping_sub(77)));
        assert_eq!(history.since(1).tasks, 0);
        assert_ne!(history.since(2).tasks, 0);
    }

    #[test]
    fn what_is_forgotten_stays_so() {
        let mut history = History::default();
        history.add(interval(1, 40, 10));
        history.add(interval(2, NOBODY, 0));
        history.forget_before(2);
        history.add(interval(1, 40, 10));
        assert_eq!(history.since(0).oldest_actor, NOBODY);
    }

    #[test]
    fn a_pipe_that_was_used_is_found() {
        let mut words = [0u64; 128];
        for bit in pipe_bits(4711) {
            words[bit / 64] |= 1 << (bit % 64);
        }
        let mut pipes = Pipes::default();
        assert!(!pipes.may_hold(4711));
        pipes.join(&Pipes::new(&words));
        pipes.join(&Pipes::new(&[0; 128]));
        assert!(pipes.may_hold(4711) && !pipes.may_hold(4712));
    }

    proptest! {
        /// However many intervals there were, a version sees at least what happened since it, and at most what happened.
        #[test]
        fn nothing_after_a_version_is_lost(events in proptest::collection::vec((0u64..1000, 0u64..10), 1..1500), base in 0usize..1500) {
            let mut history = History::default();
            for (epoch, (oldest, cpu)) in events.iter().enumerate() {
                history.add(interval(epoch as u64 + 1, *oldest, *cpu));
            }
            let since = history.since(base as u64 + 1);
            let truth = events.iter().skip(base).map(|(oldest, _)| *oldest).min().unwrap_or(NOBODY);
            let cpu: u64 = events.iter().skip(base).map(|(_, cpu)| cpu).sum();
            prop_assert!(since.oldest_actor <= truth);
            prop_assert!(since.cpu >= cpu);
            if events.len() <= KEPT {
                prop_assert_eq!((since.oldest_actor, since.cpu), (truth, cpu));
            }
        }
    }
}
