//! What a request asks, in 32 bytes.
//!
//! Two digests are taken while the body streams through, with memory that depends on its nesting and not on its size:
//! the **request key**, over everything the request says, by which a retry is known, and the **conversation**, a chain
//! over the elements of the history, by which a version says what its agent had heard.

mod hash;
mod json;

use crab_core::Digest;

use hash::Hasher;
use json::JsonDigest;

/// Which members of a request's body are its history, and which say nothing about the question.
#[derive(Clone, Copy, Debug, Default)]
pub struct ConversationShape {
    /// The names of the top-level member whose elements are the history, such as `messages`.
    pub history: &'static [&'static str],
    /// Members that are left out of both digests wherever they stand: hints that clients move about between requests,
    /// such as `cache_control`.
    pub ignored: &'static [&'static str],
}

/// What was read out of a request's body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestDigest {
    /// Over the whole body, stable under key order and whitespace.
    pub body: Digest,
    /// Over the history alone: `None` where the body has none.
    pub conversation: Option<Digest>,
    /// The chain's value after each element of the history; the last is `conversation`.
    pub prefixes: Vec<Digest>,
    /// The top-level member `model`, where it is a string of at most 128 bytes.
    pub model: Option<String>,
}

/// Takes the digest of a body that arrives in pieces.
#[derive(Debug)]
pub struct RequestHasher(Kind);

#[derive(Debug)]
enum Kind {
    Json(Box<JsonDigest>),
    Opaque(Box<Hasher>),
}

impl RequestHasher {
    /// For bodies of this shape.
    #[must_use]
    pub fn new(shape: ConversationShape) -> Self {
        Self(Kind::Json(Box::new(JsonDigest::new(shape))))
    }

    /// For bodies that cannot be looked into, such as compressed ones: the same bytes have the same digest, and the
    /// conversation is unknown.
    #[must_use]
    pub fn opaque() -> Self {
        Self(Kind::Opaque(Box::new(Hasher::new(b'o'))))
    }

    /// Takes the next piece, of any size.
    pub fn update(&mut self, piece: &[u8]) {
        match &mut self.0 {
            Kind::Json(json) => json.update(piece),
            Kind::Opaque(hasher) => hasher.update(piece),
        }
    }

    /// The digest; `None` where the body is not JSON, or nested or wide beyond the bounds (512 levels, a million
    /// members open at once).
    #[must_use]
    pub fn finish(self) -> Option<RequestDigest> {
        let (root, history, model) = match self.0 {
            Kind::Json(json) => json.finish()?,
            Kind::Opaque(hasher) => (hasher.finish(), Vec::new(), None),
        };
        let mut prefixes = Vec::with_capacity(history.len());
        let mut chain = [0; 32];
        for element in &history {
            let mut hasher = Hasher::new(b'c');
            hasher.update(&chain);
            hasher.update(element);
            chain = hasher.finish();
            prefixes.push(Digest(chain));
        }
        Some(RequestDigest { body: Digest(root), conversation: prefixes.last().copied(), prefixes, model })
    }
}

/// The key under which a turn's answer is journaled: the same question to the same endpoint.
pub(crate) fn request_key(provider: &str, path: &str, body: Digest) -> Digest {
    let mut hasher = Hasher::new(b'k');
    for part in [provider, path] {
        hasher.update(&(part.len() as u64).to_le_bytes());
        hasher.update(part.as_bytes());
    }
    hasher.update(&body.0);
    Digest(hasher.finish())
}
