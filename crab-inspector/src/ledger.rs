//! What was seen at each take, and which of it became the base. Pure.

use std::collections::VecDeque;

use crab_core::Token;

/// So many takes are remembered. A rebase onto an older one drops the base, since what it held is forgotten.
const KEPT: usize = 256;

/// The marks of one sandbox in two domains, by the token of the take that made them.
#[derive(Debug)]
pub(crate) struct Ledger<F, P> {
    /// Tokens up to this one are from before the attach.
    attached: u64,
    seen: VecDeque<(u64, F, P)>,
    pub(crate) filesystem: Slot<F>,
    pub(crate) process: Slot<P>,
}

/// One domain's base.
#[derive(Debug)]
pub(crate) struct Slot<T> {
    token: u64,
    pub(crate) mark: Option<T>,
}

impl<T> Slot<T> {
    fn set(&mut self, token: u64, mark: Option<T>) -> bool {
        if token <= self.token {
            return false;
        }
        *self = Self { token, mark };
        true
    }
}

impl<F: Clone, P: Clone> Ledger<F, P> {
    /// A ledger without a base. Tokens up to `attached` mean nothing to it.
    pub(crate) fn new(attached: u64) -> Self {
        let empty = |token| Slot { token, mark: None };
        Self {
            attached,
            seen: VecDeque::new(),
            filesystem: empty(attached),
            process: Slot { token: attached, mark: None },
        }
    }

    /// A ledger that goes on with a base of an earlier one.
    pub(crate) fn resumed(attached: u64, filesystem: F, process: P) -> Self {
        let mut ledger = Self::new(attached);
        ledger.filesystem.mark = Some(filesystem);
        ledger.process.mark = Some(process);
        ledger
    }

    /// Remembers what a take saw.
    pub(crate) fn record(&mut self, token: u64, filesystem: F, process: P) {
        if self.seen.len() == KEPT {
            self.seen.pop_front();
        }
        self.seen.push_back((token, filesystem, process));
    }

    /// Makes what a take saw the base of the domains that are named. Tells which of them moved.
    pub(crate) fn rebase(&mut self, token: Token, filesystem: bool, process: bool) -> (bool, bool) {
        let Token(token) = token;
        if token <= self.attached {
            return (false, false);
        }
        let found = self.seen.iter().find(|(seen, ..)| *seen == token);
        let (f, p) = match found {
            Some((_, f, p)) => (Some(f.clone()), Some(p.clone())),
            None => (None, None),
        };
        let moved = (filesystem && self.filesystem.set(token, f), process && self.process.set(token, p));
        let oldest = self.filesystem.token.min(self.process.token);
        self.seen.retain(|(seen, ..)| *seen >= oldest);
        moved
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn domains_move_apart_and_never_back() {
        let mut ledger = Ledger::new(10);
        for token in 11..=14 {
            ledger.record(token, token, token);
        }
        assert_eq!(ledger.rebase(Token(12), true, true), (true, true));
        assert_eq!(ledger.rebase(Token(14), true, false), (true, false));
        assert_eq!(ledger.rebase(Token(13), true, true), (false, true));
        assert_eq!((ledger.filesystem.mark, ledger.process.mark), (Some(14), Some(13)));
        assert_eq!(ledger.rebase(Token(9), true, true), (false, false));
    }

    #[test]
    fn a_forgotten_take_is_no_base() {
        let mut ledger = Ledger::new(0);
        for token in 1..=1000 {
            ledger.record(token, (), ());
        }
        assert!(ledger.seen.len() <= KEPT);
        ledger.rebase(Token(1), true, false);
        assert_eq!(ledger.filesystem.mark, None);
    }

    proptest! {
        /// Whatever is called in whatever order, a base is what the take of its token saw.
        #[test]
        fn a_base_is_what_its_token_saw(steps in proptest::collection::vec((any::<bool>(), 0u64..400, any::<bool>(), any::<bool>()), 0..800)) {
            let mut ledger = Ledger::new(0);
            let mut next = 1;
            let mut last = (0, 0);
            for (take, token, f, p) in steps {
                if take {
                    ledger.record(next, next, next);
                    next += 1;
                } else if token < next {
                    ledger.rebase(Token(token), f, p);
                    prop_assert!(ledger.filesystem.mark.is_none_or(|mark| mark == ledger.filesystem.token));
                    prop_assert!(ledger.process.mark.is_none_or(|mark| mark == ledger.process.token));
                    let now = (ledger.filesystem.token, ledger.process.token);
                    prop_assert!(now.0 >= last.0 && now.1 >= last.1);
                    last = now;
                }
            }
        }
    }
}
