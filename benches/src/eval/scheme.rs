//! The ways to recover that are compared. They share all code; what differs is what is saved, and what a dead sandbox
//! is brought back from.

use crab_examples::run::Recovery;
use crab_examples::service::Saving;

/// A way to recover, and what it saves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scheme {
    /// In figures.
    pub(crate) name: &'static str,
    /// For people.
    pub(crate) label: &'static str,
    /// None where nothing is saved and a dead sandbox is the end.
    pub(crate) recovery: Option<Recovery>,
    pub(crate) saving: Saving,
}

const fn scheme(name: &'static str, label: &'static str, recovery: Option<Recovery>, saving: Saving) -> Scheme {
    Scheme { name, label, recovery, saving }
}

pub(crate) const NONE: Scheme = scheme("none", "no checkpoints", None, Saving::Changed);
pub(crate) const RESTART: Scheme = scheme("restart", "start over", Some(Recovery::Restart), Saving::Changed);
pub(crate) const CHAT_ONLY: Scheme =
    scheme("chat_only", "chat history alone", Some(Recovery::ChatOnly), Saving::Changed);
pub(crate) const CHAT_FS: Scheme =
    scheme("chat_fs", "chat history and files", Some(Recovery::ChatAndFiles), Saving::Changed);
pub(crate) const FULL: Scheme =
    scheme("full", "files and processes at every turn", Some(Recovery::Crab), Saving::Everything);
pub(crate) const CRAB: Scheme = scheme("crab", "Crab", Some(Recovery::Crab), Saving::Changed);
pub(crate) const STRICT: Scheme = scheme("strict", "Crab, all that ran counts", Some(Recovery::Crab), Saving::Strict);
pub(crate) const TOUCHED: Scheme =
    scheme("touched", "Crab, all that was touched counts", Some(Recovery::Crab), Saving::Touched);
pub(crate) const IN_ORDER: Scheme =
    scheme("in_order", "Crab without the urgent queue", Some(Recovery::Crab), Saving::InOrder);

/// All of them, in the order in which they are shown.
pub(crate) const ALL: [Scheme; 9] = [NONE, RESTART, CHAT_ONLY, CHAT_FS, FULL, CRAB, STRICT, TOUCHED, IN_ORDER];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn labels_fit_beside_the_bars() {
        for scheme in ALL {
            assert!(scheme.label.len() <= 36, "{}", scheme.label);
        }
    }
}
