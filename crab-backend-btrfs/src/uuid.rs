//! The identity of a subvolume.

use std::fmt;
use std::str::FromStr;

use crab_core::{Error, ErrorKind};

/// The identity of a subvolume, made anew for every subvolume and snapshot and never used twice. Shown and read as 32
/// hexadecimal digits in groups of 8-4-4-4-12.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Uuid(pub [u8; 16]);

impl Uuid {
    /// The same, or `None` for the all-zero one, by which btrfs says that there is none.
    #[must_use]
    pub fn known(bytes: [u8; 16]) -> Option<Self> {
        (bytes != [0; 16]).then_some(Self(bytes))
    }
}

impl fmt::Display for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, byte) in self.0.iter().enumerate() {
            if matches!(i, 4 | 6 | 8 | 10) {
                f.write_str("-")?;
            }
            write!(f, "{byte:02x}")?;
        }
        Ok(())
    }
}

impl fmt::Debug for Uuid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl FromStr for Uuid {
    type Err = Error;
    fn from_str(text: &str) -> Result<Self, Error> {
        let bad = || Error::new(ErrorKind::Corrupt, "a subvolume uuid is not 32 hexadecimal digits in five groups");
        let digits: Vec<u8> = text.bytes().filter(|b| *b != b'-').collect();
        if digits.len() != 32 {
            return Err(bad());
        }
        let mut bytes = [0; 16];
        for (byte, pair) in bytes.iter_mut().zip(digits.chunks_exact(2)) {
            let digit = |d: u8| char::from(d).to_digit(16).and_then(|d| u8::try_from(d).ok()).ok_or_else(bad);
            *byte = digit(pair[0])? << 4 | digit(pair[1])?;
        }
        let uuid = Self(bytes);
        // One way of writing it only, so that equal text and equal uuid are the same.
        if uuid.to_string() == text { Ok(uuid) } else { Err(bad()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn uuids_survive_text(bytes: [u8; 16]) {
            let uuid = Uuid(bytes);
            prop_assert_eq!(uuid.to_string().parse::<Uuid>().unwrap(), uuid);
        }

        #[test]
        fn no_text_makes_the_reader_panic(text in "\\PC{0,40}") {
            let _ = text.parse::<Uuid>();
        }
    }
}
