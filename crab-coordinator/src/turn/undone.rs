//! Which turns a restore has undone, and whether a request speaks of them. Pure.

use std::collections::HashMap;

use crab_core::{Digest, TurnNumber};

/// The turns that a sandbox's last restore undid.
#[derive(Debug)]
pub(crate) struct Undone {
    restored_to: TurnNumber,
    conversations: HashMap<Digest, TurnNumber>,
}

impl Undone {
    /// A restore to `restored_to`, in a sandbox that has had turns with these conversations.
    pub(crate) fn new(restored_to: TurnNumber, turns: impl Iterator<Item = (TurnNumber, Option<Digest>)>) -> Self {
        let mut conversations = HashMap::new();
        let mut lived = Vec::new();
        for (turn, conversation) in turns {
            match conversation {
                Some(digest) if turn > restored_to => {
                    conversations.insert(digest, turn);
                }
                Some(digest) => lived.push(digest),
                None => {}
            }
        }
        // The same conversation may have been there before: then the version knows it.
        lived.iter().for_each(|digest| {
            conversations.remove(digest);
        });
        Self { restored_to, conversations }
    }

    /// A request with this history arrives: the digests after each element of it. Returns the newest undone turn that
    /// it has lived through. To ask what was asked in an undone turn is no sign of that: whoever does the same work
    /// again comes by the same questions; from then on that turn is lived again.
    pub(crate) fn hear(&mut self, prefixes: &[Digest]) -> Option<(TurnNumber, TurnNumber)> {
        let (now, before) = prefixes.split_last()?;
        let spoken = before.iter().filter_map(|digest| self.conversations.get(digest)).max().copied();
        self.conversations.remove(now);
        if spoken.is_some() {
            // Said once; the host knows now.
            self.conversations.clear();
        }
        spoken.map(|turn| (self.restored_to, turn))
    }

    pub(crate) fn is_over(&self) -> bool {
        self.conversations.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digests(n: u8) -> Vec<Digest> {
        (1..=n).map(|n| Digest([n; 32])).collect()
    }

    /// Turn `n` asked with a history of `2n - 1` elements.
    fn undone(restored_to: u64) -> Undone {
        let turns = (1..=5).map(|n| (TurnNumber(n), Some(Digest([2 * n as u8 - 1; 32]))));
        Undone::new(TurnNumber(restored_to), turns)
    }

    #[test]
    fn whoever_was_restored_too_is_not_suspected() {
        let mut undone = undone(2);
        // Asks again, walks through the old turns, then parts from them.
        for length in [3, 5, 7, 9] {
            assert_eq!(undone.hear(&digests(length)), None);
        }
        let mut parted = digests(9);
        parted.push(Digest([99; 32]));
        assert_eq!(undone.hear(&parted), None);
        assert!(undone.is_over());
    }

    #[test]
    fn whoever_remembers_what_was_undone_is_told_once() {
        let mut undone = undone(2);
        assert_eq!(undone.hear(&digests(11)), Some((TurnNumber(2), TurnNumber(5))));
        assert_eq!(undone.hear(&digests(13)), None);
    }

    #[test]
    fn a_runner_that_carries_on_with_the_turn_after_is_not_suspected() {
        assert_eq!(undone(2).hear(&digests(5)), None);
        assert_eq!(undone(2).hear(&digests(7)), Some((TurnNumber(2), TurnNumber(3))));
        assert_eq!(undone(2).hear(&[]), None);
    }
}
