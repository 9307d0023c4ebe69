//! What the demo is called with.

use std::path::PathBuf;

use crab_core::{Error, ErrorKind, Result};

/// The demo's options.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Arguments {
    /// Where the crashes come from.
    pub(crate) seed: u64,
    /// The turn in which all crashes come, counted from 1; none for random ones.
    pub(crate) crash_at: Option<usize>,
    /// Where the figures go.
    pub(crate) json: Option<PathBuf>,
    /// A recorded session to play instead of the demo's own.
    pub(crate) session: Option<PathBuf>,
}

const USAGE: &str = "cargo xtask demo [--seed N] [--crash-at TURN|random] [--json FILE] [--session FILE]";

impl Arguments {
    pub(crate) fn parse(words: &[String]) -> Result<Self> {
        let wrong = |why: String| Error::new(ErrorKind::InvalidInput, why).fix(USAGE);
        let mut arguments = Self { seed: 1, crash_at: None, json: None, session: None };
        let mut words = words.iter();
        while let Some(option) = words.next() {
            let mut value = || words.next().ok_or_else(|| wrong(format!("{option} needs a value")));
            match option.as_str() {
                "--seed" => {
                    let text = value()?;
                    arguments.seed = text.parse().map_err(|_| wrong(format!("{text} is no seed: give a number")))?;
                }
                "--crash-at" => {
                    let text = value()?;
                    arguments.crash_at = match (text.as_str(), text.parse()) {
                        ("random", _) => None,
                        (_, Ok(turn)) if turn > 0 => Some(turn),
                        _ => return Err(wrong(format!("{text} is no turn: give a number from 1 on, or `random`"))),
                    };
                }
                "--json" => arguments.json = Some(value()?.into()),
                "--session" => arguments.session = Some(value()?.into()),
                _ => return Err(wrong(format!("there is no option {option}"))),
            }
        }
        Ok(arguments)
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    fn parse(line: &str) -> Result<Arguments> {
        Arguments::parse(&line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
    }

    #[test]
    fn options_are_read() {
        let arguments = parse("--seed 7 --crash-at 12 --json out.json").unwrap();
        assert_eq!((arguments.seed, arguments.crash_at, arguments.json), (7, Some(12), Some("out.json".into())));
        assert_eq!(parse("--crash-at random").unwrap().crash_at, None);
    }

    #[test]
    fn a_wrong_option_is_refused_with_the_usage() {
        for line in ["--seed", "--seed x", "--crash-at 0", "--crash-at soon", "--crash"] {
            let error = parse(line).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{line}");
            assert!(error.remedy().is_some_and(|fix| fix.contains("--crash-at")), "{line}");
        }
    }
}
