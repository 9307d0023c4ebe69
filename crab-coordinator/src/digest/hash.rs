//! The hash behind the digests: HighwayHash, 256 bits, with a key that everybody knows.
//!
//! A digest is on the way of every request, before the model is asked, so what it costs is felt: HighwayHash takes six
//! times as many bytes a second as SHA-256 does with the processor's help. It is made to be strong under a secret key;
//! here it need only tell apart what nobody made to be alike. Who builds two requests with one digest gets an earlier
//! answer of his own sandbox again, which he could have kept: turns are looked up within a sandbox. What must be safe
//! from forgery, such as a stored answer, is checked by other means.

use highway::{HighwayHash as _, HighwayHasher, Key};

pub(super) type Hash = [u8; 32];

/// Hashes one thing, piece by piece.
#[derive(Debug)]
pub(super) struct Hasher(HighwayHasher);

impl Hasher {
    /// `kind` keeps things of different kinds apart.
    pub(super) fn new(kind: u8) -> Self {
        Self(HighwayHasher::new(Key([u64::from(kind), 0, 0, 0])))
    }

    pub(super) fn update(&mut self, bytes: &[u8]) {
        self.0.append(bytes);
    }

    pub(super) fn finish(self) -> Hash {
        let mut hash = [0; 32];
        for (bytes, word) in hash.chunks_exact_mut(8).zip(self.0.finalize256()) {
            bytes.copy_from_slice(&word.to_le_bytes());
        }
        hash
    }
}
