//! The list of a sandbox's turns on disk: one JSON line for each thing that happened.

use crab_core::{Digest, TurnNumber, VersionId};
use serde::{Deserialize, Serialize};

/// What happened to a turn.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub(crate) enum Event {
    /// A request ended the turn before and opened this one.
    Opened {
        turn: TurnNumber,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        key: Option<Digest>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        conversation: Option<Digest>,
    },
    /// The gate opened: the turn is covered by this version, or by none.
    Released {
        turn: TurnNumber,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        version: Option<VersionId>,
    },
    /// The gate failed.
    Refused { turn: TurnNumber },
    /// A whole answer was handed to a client.
    Delivered { turn: TurnNumber },
    /// The sandbox was restored, and all answers may be given again (or none).
    Rewound { replay: bool },
    /// No number up to this one is given again.
    Floor { turn: TurnNumber },
    /// Turns before this one are forgotten.
    Forgotten { before: TurnNumber },
}

impl Event {
    /// As a line with its line feed.
    pub(crate) fn line(&self) -> Vec<u8> {
        // The type holds nothing that JSON cannot: the default is for the type checker.
        let mut line = serde_json::to_vec(self).unwrap_or_default();
        line.push(b'\n');
        line
    }
}

/// All events of an index. A line that is torn or alien is stepped over, and counted.
pub(crate) fn parse(text: &[u8]) -> (Vec<Event>, usize) {
    let mut alien = 0;
    let events = text
        .split(|&byte| byte == b'\n')
        .filter(|line| !line.is_empty())
        .filter_map(|line| {
            let event = serde_json::from_slice(line).ok();
            alien += usize::from(event.is_none());
            event
        })
        .collect();
    (events, alien)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_torn_line_costs_only_itself() {
        let events = [
            Event::Opened { turn: TurnNumber(1), key: Some(Digest([7; 32])), conversation: None },
            Event::Released { turn: TurnNumber(1), version: Some(VersionId(4)) },
            Event::Delivered { turn: TurnNumber(1) },
        ];
        let mut text = events[0].line();
        text.extend(events[1].line());
        let torn = text.len();
        text.extend(&events[2].line()[..9]);
        assert_eq!(parse(&text), (events[..2].to_vec(), 1));
        // What is written after a crash begins on its own line.
        text.push(b'\n');
        text.extend(events[2].line());
        assert_eq!(parse(&text), (events.to_vec(), 1));
        assert_eq!(parse(&text[..torn]).1, 0);
    }
}
