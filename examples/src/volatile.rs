//! Text that is known not to be the same twice, such as times and names of temporary files: a session declares it, and
//! the judge compares what is left.

use std::borrow::Cow;

use regex_lite::Regex;
use serde::Deserialize;

/// What stands for it in what is compared.
const MASK: &str = "<volatile>";

/// What recorded sessions declare, since nobody wrote them to be repeated.
const RECORDED: [&str; 10] = [
    // Times of day, as in `ls -l` and in time stamps, and seconds, milliseconds or nanoseconds since 1970.
    r"(\b|T)\d\d?:\d\d(:\d\d)?([.,]\d+)?Z?\b",
    r"\b1[78]\d{8}(\d{3}|\d{6}|\d{9}|\.\d+)?\b",
    r"\b20\d{6}-?T?\d{6}Z?\b",
    // How long something took.
    r"\d+(\.\d+)?\s?(ns|us|µs|ms|s|sec|secs|seconds)\b",
    // What `mktemp` and Python's `tempfile` make up.
    r"\btmp\.[0-9A-Za-z]{6,10}\b",
    r"\btmp[a-z0-9_]{8}\b",
    r"/tmp/[\w.-]*[.-][0-9A-Za-z]{6,10}\b",
    r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b",
    // Numbers of processes, and addresses in their memory.
    r"(?i)(\bpid[ =:]*|\[\d+\] )\d+\b",
    r"\b0x[0-9a-f]{6,16}\b",
];

/// Regular expressions: what they match counts as equal to all else that they match.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(try_from = "Vec<String>")]
pub struct Volatile(Vec<Regex>);

impl TryFrom<Vec<String>> for Volatile {
    type Error = regex_lite::Error;

    fn try_from(patterns: Vec<String>) -> Result<Self, Self::Error> {
        Ok(Self(patterns.iter().map(|pattern| Regex::new(pattern)).collect::<Result<_, _>>()?))
    }
}

impl Volatile {
    /// What recorded sessions declare: times, durations, made-up names, numbers of processes, addresses.
    #[must_use]
    pub fn recorded() -> Self {
        // Each of them is compiled by a test.
        Self(RECORDED.iter().filter_map(|pattern| Regex::new(pattern).ok()).collect())
    }

    /// The text without it.
    #[must_use]
    pub fn mask<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let mut masked = Cow::Borrowed(text);
        for pattern in &self.0 {
            if let Cow::Owned(next) = pattern.replace_all(&masked, MASK) {
                masked = Cow::Owned(next);
            }
        }
        masked
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn what_recorded_sessions_declare_is_masked_and_nothing_else() {
        let volatile = Volatile::recorded();
        assert_eq!(volatile.0.len(), RECORDED.len(), "one of them does not compile");
        for (one, other) in [
            ("-rw-r--r-- 1 root root 858 Nov 30 19:08 a", "-rw-r--r-- 1 root root 858 Nov 30 19:07 a"),
            ("at 2026-11-30T19:08:48Z", "at 2026-11-30T19:08:35.123Z"),
            ("1796065728", "1796065731.25"),
            ("20261130T193455Z", "20261130T193431Z"),
            ("Ran 3 tests in 0.003s", "Ran 3 tests in 1.2s"),
            ("real\t0m0.003s", "real\t0m0.004s"),
            ("/tmp/tmp.5QcAVBKSfu/x", "/tmp/tmp.0aAVBKSfuQ/x"),
            ("cat /tmp/pr-body.G5yxHK", "cat /tmp/pr-body.aaaaa1"),
            ("/tmp/tmpab_cd12e", "/tmp/tmpzb_cd12e"),
            ("[1] 4711", "[1] 815"),
            ("<f at 0x7f12aa90>", "<f at 0x7f12aa91>"),
        ] {
            assert_eq!(volatile.mask(one), volatile.mask(other));
        }
        for kept in ["858 bytes", "version 1.2.3", "3 tests passed", "/tmp/a", "deadbeef", "line 12: x"] {
            assert_eq!(volatile.mask(kept), kept);
        }
    }

    #[test]
    fn what_is_no_regular_expression_is_refused() {
        assert!(serde_json::from_str::<Volatile>(r#"["(("]"#).is_err());
        assert!(serde_json::from_str::<Volatile>(r#"["a+"]"#).is_ok());
    }
}
