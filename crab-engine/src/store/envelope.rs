//! The form of every record: a JSON envelope with a checksum over the exact text of its body. Pure.
//!
//! ```json
//! {
//! "crab": "manifest",
//! "format": 1,
//! "sha256": "…64 digits…",
//! "body": { … }
//! }
//! ```
//!
//! The checksum covers the body's bytes as they stand in the file, white space included, so it does not depend on how
//! a JSON library orders or prints. **Compatibility:** within one format number fields are only ever added, always
//! optional, and unknown ones are ignored; everything else takes a new number. A reader reads every number up to its
//! own and refuses newer ones without touching them.

use crab_core::{Digest, Error, ErrorKind, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use sha2::{Digest as _, Sha256};

use super::DamageKind;

/// Records are small; whatever is longer is not one of ours.
pub(super) const MAX_RECORD: u64 = 4 << 20;

/// Which kind of record a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Manifest,
    Sandbox,
    Operation,
    Marks,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Manifest => "manifest",
            Self::Sandbox => "sandbox",
            Self::Operation => "operation",
            Self::Marks => "marks",
        }
    }

    fn format(self) -> u32 {
        match self {
            Self::Manifest => crab_core::MANIFEST_FORMAT,
            Self::Sandbox | Self::Operation | Self::Marks => 1,
        }
    }
}

#[derive(Deserialize)]
struct Envelope<'a> {
    crab: String,
    format: u32,
    // Read by hand, so that a record of a newer format may change the form of everything else.
    sha256: Option<String>,
    #[serde(borrow)]
    body: Option<&'a RawValue>,
}

fn digest(text: &str) -> Digest {
    Digest(Sha256::digest(text.as_bytes()).into())
}

/// The record's text.
pub(super) fn encode(kind: Kind, body: &impl Serialize) -> Result<String> {
    let body = serde_json::to_string_pretty(body)
        .map_err(|source| Error::new(ErrorKind::Internal, "a record cannot be written as JSON").caused_by(source))?;
    Ok(format!(
        "{{\n\"crab\": \"{}\",\n\"format\": {},\n\"sha256\": \"{}\",\n\"body\": {body}\n}}\n",
        kind.name(),
        kind.format(),
        digest(&body),
    ))
}

/// Reads a record, or says in which way the text is not one.
pub(super) fn decode<T: DeserializeOwned>(kind: Kind, text: &[u8]) -> std::result::Result<T, (DamageKind, String)> {
    let envelope: Envelope<'_> = match serde_json::from_slice(text) {
        Ok(envelope) => envelope,
        Err(error) => {
            // Our records begin like this; what does not was never ours.
            let ours = b"{\n\"crab\": \"";
            let prefix = ours.len().min(text.len());
            let torn = text.is_empty() || text.iter().all(|byte| *byte == 0) || text[..prefix] == ours[..prefix];
            let what = if torn { DamageKind::Torn } else { DamageKind::Alien };
            return Err((what, error.to_string()));
        }
    };
    if envelope.crab != kind.name() {
        return Err((DamageKind::Alien, format!("it is a record of kind {:?}", shorten(&envelope.crab))));
    }
    if envelope.format > kind.format() {
        let detail = format!("its format is {}, this library reads up to {}", envelope.format, kind.format());
        return Err((DamageKind::Newer, detail));
    }
    let (Some(sha256), Some(body)) = (envelope.sha256, envelope.body) else {
        return Err((DamageKind::Torn, "its checksum or body is missing".to_owned()));
    };
    if digest(body.get()).to_string() != sha256 {
        return Err((DamageKind::Checksum, "its checksum is wrong".to_owned()));
    }
    serde_json::from_str(body.get()).map_err(|error| (DamageKind::Alien, error.to_string()))
}

fn shorten(text: &str) -> String {
    text.chars().take(40).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn record() -> String {
        encode(Kind::Sandbox, &serde_json::json!({"name": "box", "n": [1, 2, 3]})).unwrap()
    }

    #[test]
    fn a_record_survives_and_its_kind_and_format_are_checked() {
        let read: serde_json::Value = decode(Kind::Sandbox, record().as_bytes()).unwrap();
        assert_eq!(read["n"][2], 3);
        let (kind, _) = decode::<serde_json::Value>(Kind::Operation, record().as_bytes()).unwrap_err();
        assert_eq!(kind, DamageKind::Alien);
        // A newer format may look quite different.
        let newer = "{\"crab\": \"sandbox\", \"format\": 2, \"blake3\": true}";
        let (kind, detail) = decode::<serde_json::Value>(Kind::Sandbox, newer.as_bytes()).unwrap_err();
        assert_eq!(kind, DamageKind::Newer);
        assert!(detail.contains("format is 2"));
    }

    proptest! {
        #[test]
        fn a_torn_record_is_never_read(cut in 0..1000usize) {
            let text = record();
            // The last line break is the one byte that a record does not need.
            let cut = cut % (text.len() - 1);
            let (kind, _) = decode::<serde_json::Value>(Kind::Sandbox, &text.as_bytes()[..cut]).unwrap_err();
            prop_assert_eq!(kind, DamageKind::Torn);
        }

        #[test]
        fn a_flipped_bit_is_noticed_or_without_effect(at in 0..1000usize, bit in 0..8u8) {
            let mut bytes = record().into_bytes();
            let at = at % bytes.len();
            bytes[at] ^= 1 << bit;
            let truth: serde_json::Value = decode(Kind::Sandbox, record().as_bytes()).unwrap();
            if let Ok(read) = decode::<serde_json::Value>(Kind::Sandbox, &bytes) {
                prop_assert_eq!(read, truth);
            }
        }

        #[test]
        fn no_bytes_make_the_reader_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            prop_assert!(decode::<serde_json::Value>(Kind::Manifest, &bytes).is_err());
        }
    }
}
