//! Names that nobody gave before.

use std::hash::{BuildHasher, RandomState};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

/// 64 bits that no other call, also in another process, gives again in practice.
pub(crate) fn nonce() -> u64 {
    static COUNTER: AtomicU64 = AtomicU64::new(0);
    let count = COUNTER.fetch_add(1, Ordering::Relaxed);
    RandomState::new().hash_one((count, std::process::id(), SystemTime::now()))
}
