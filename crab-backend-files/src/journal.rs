//! What a restore writes down before it begins, so that a later process can tell how far it came: one line of words.
//! What else belongs in it, and where it is kept, depends on the file system.

use crab_core::{ArtifactId, Result};

/// The last word, without which a line is torn.
const TAIL: &str = "end";

/// What is done with the state that a restore replaces.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Keep {
    /// It is removed.
    No,
    /// This restore makes an artifact of it.
    New(ArtifactId),
    /// An earlier attempt of the same operation made an artifact of it, which stays.
    Held(ArtifactId),
    /// It would have become this artifact, but there was no state to replace.
    Nothing(ArtifactId),
}

impl Keep {
    /// Decides it. `asked` is the name that the caller gives, `earlier` what an earlier attempt of the same operation
    /// wrote down, and `exists` says whether there is a state to replace; `require_free` refuses a name that is taken.
    ///
    /// # Errors
    /// Those of `require_free`.
    pub fn plan(
        asked: Option<&ArtifactId>,
        earlier: Option<&Self>,
        exists: bool,
        require_free: impl FnOnce(&ArtifactId) -> Result<()>,
    ) -> Result<Self> {
        let Some(name) = asked else { return Ok(Self::No) };
        match earlier.filter(|keep| keep.name() == Some(name)) {
            // A second attempt. What stands at the root now is what the first one put there, not what it replaced.
            Some(Self::New(_) | Self::Held(_)) => Ok(Self::Held(name.clone())),
            Some(Self::Nothing(_)) => Ok(Self::Nothing(name.clone())),
            _ if exists => {
                require_free(name)?;
                Ok(Self::New(name.clone()))
            }
            _ => Ok(Self::Nothing(name.clone())),
        }
    }

    /// The name that the caller gave.
    #[must_use]
    pub fn name(&self) -> Option<&ArtifactId> {
        match self {
            Self::No => None,
            Self::New(id) | Self::Held(id) | Self::Nothing(id) => Some(id),
        }
    }

    /// It as two words of a line.
    #[must_use]
    pub fn to_words(&self) -> [&[u8]; 2] {
        let word: &[u8] = match self {
            Self::No => b"no",
            Self::New(_) => b"new",
            Self::Held(_) => b"held",
            Self::Nothing(_) => b"nothing",
        };
        [word, self.name().map_or(b"-", |id| id.as_str().as_bytes())]
    }

    /// Reads the two words.
    #[must_use]
    pub fn from_words(word: &[u8], name: &[u8]) -> Option<Self> {
        let name = || std::str::from_utf8(name).ok()?.parse().ok();
        Some(match word {
            b"no" => Self::No,
            b"new" => Self::New(name()?),
            b"held" => Self::Held(name()?),
            b"nothing" => Self::Nothing(name()?),
            _ => return None,
        })
    }
}

/// Words of any bytes as one line of plain ASCII. `head` is the first word and says what wrote it.
#[must_use]
pub fn to_line(head: &str, words: &[&[u8]]) -> String {
    let words: Vec<String> = words.iter().map(|word| escape(word)).collect();
    format!("{head} {} {TAIL}", words.join(" "))
}

/// The words of a line that [`to_line`] wrote with the same head; `None` where it is not whole.
#[must_use]
pub fn from_line(head: &str, line: &str) -> Option<Vec<Vec<u8>>> {
    let mut words = line.strip_prefix(head)?.strip_prefix(' ')?.split(' ').map(unescape);
    let words: Vec<Vec<u8>> = words.by_ref().collect::<Option<_>>()?;
    let (last, words) = words.split_last()?;
    (last == TAIL.as_bytes()).then(|| words.to_vec())
}

/// What is not plain is written as `%` and two hexadecimal digits.
fn escape(bytes: &[u8]) -> String {
    let mut text = String::new();
    for byte in bytes {
        match byte {
            b'!'..=b'~' if *byte != b'%' => text.push(char::from(*byte)),
            _ => text.push_str(&format!("%{byte:02x}")),
        }
    }
    text
}

fn unescape(text: &str) -> Option<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'%' => {
                let mut digit = || char::from(rest.next()?).to_digit(16);
                let (high, low) = (digit()?, digit()?);
                u8::try_from(high << 4 | low).ok()?
            }
            _ => byte,
        });
    }
    Some(bytes)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "these are tests")]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn words_survive_being_written_and_a_torn_line_is_told(
            words in vec(vec(any::<u8>(), 0..20), 1..6),
        ) {
            let line = to_line("head 1", &words.iter().map(Vec::as_slice).collect::<Vec<_>>());
            prop_assert!(line.is_ascii() && !line.contains('\n'));
            prop_assert_eq!(from_line("head 2", &line), None);
            prop_assert_eq!(from_line("head 1", &line), Some(words));
            for end in 0..line.len() {
                prop_assert_eq!(from_line("head 1", &line[..end]), None);
            }
        }

        #[test]
        fn no_text_makes_the_reader_panic(text in "\\PC{0,200}") {
            let _ = from_line("head", &text);
            let _ = from_line("head", &format!("head {text} {TAIL}"));
        }

        #[test]
        fn what_is_kept_survives_being_written(name in "[a-z0-9][a-z0-9._-]{0,40}", which in 0..4) {
            let name = ArtifactId::new(name).unwrap();
            let keep = [Keep::No, Keep::New(name.clone()), Keep::Held(name.clone()), Keep::Nothing(name)][which as usize].clone();
            let [word, name] = keep.to_words();
            prop_assert_eq!(Keep::from_words(word, name), Some(keep));
        }
    }

    #[test]
    fn a_second_attempt_keeps_what_the_first_one_replaced() {
        let (one, two) = (ArtifactId::new("one").unwrap(), ArtifactId::new("two").unwrap());
        let plan =
            |asked, earlier: Option<Keep>, exists| Keep::plan(asked, earlier.as_ref(), exists, |_| Ok(())).unwrap();
        assert_eq!(plan(None, Some(Keep::New(one.clone())), true), Keep::No);
        assert_eq!(plan(Some(&one), None, true), Keep::New(one.clone()));
        assert_eq!(plan(Some(&one), None, false), Keep::Nothing(one.clone()));
        assert_eq!(plan(Some(&one), Some(Keep::New(one.clone())), true), Keep::Held(one.clone()));
        assert_eq!(plan(Some(&one), Some(Keep::Held(one.clone())), false), Keep::Held(one.clone()));
        assert_eq!(plan(Some(&one), Some(Keep::Nothing(one.clone())), true), Keep::Nothing(one.clone()));
        assert_eq!(
            plan(Some(&two), Some(Keep::New(one.clone())), true),
            Keep::New(two.clone()),
            "another name is another state"
        );
        let taken = |id: &ArtifactId| Err(crate::artifacts::taken(&"box".parse().unwrap(), id));
        assert!(Keep::plan(Some(&two), None, true, taken).is_err());
        assert!(Keep::plan(Some(&two), None, false, taken).is_ok(), "nothing gets the name");
    }
}
