//! Any sequence of changes, captures, restores, forks and removals does what the simplest model of it does.
#![allow(clippy::unwrap_used, reason = "these are tests")]

mod support;

use crab_core::conformance::disk::DiskWorld;
use crab_core::conformance::model::{acts, play};
use proptest::prelude::*;
use support::Pool;

#[test]
fn any_sequence_does_what_the_model_does() {
    let Some(pool) = Pool::new() else { return };
    let world = DiskWorld::new(pool);
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    proptest!(ProptestConfig { cases: 4, failure_persistence: None, ..ProptestConfig::default() }, |(acts in acts())| {
        runtime.block_on(play(&world, &acts));
    });
}
