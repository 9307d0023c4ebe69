//! What artifacts take of the disk: as their backends told when they stored them, or as measured.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use crab_core::{Domain, SandboxId};
use parking_lot::Mutex;

use super::Inner;
use super::artifacts::{self, Key};
use super::calls::call;

/// Measuring at times takes at most one part in so many of the time.
const SHARE: u32 = 10;

/// Whether artifacts are measured whose backend did not tell what it wrote, such as snapshots that share blocks. That
/// may cost a walk over their files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Measure {
    Never,
    /// Where the last time is long enough ago for what it took; else what was measured then counts.
    AtTimes,
    Now,
}

/// What was measured last.
#[derive(Debug, Default)]
pub(super) struct Measured(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    sizes: BTreeMap<Key, u64>,
    measuring: bool,
    rests_until: Option<Instant>,
}

impl Measured {
    /// Whether it is time to measure. Who is told so says when it [ended](Self::ended).
    fn begins(&self, how: Measure) -> bool {
        let mut state = self.0.lock();
        let rests = state.measuring || state.rests_until.is_some_and(|until| Instant::now() < until);
        let begins = match how {
            Measure::Never => false,
            Measure::AtTimes => !rests,
            Measure::Now => true,
        };
        state.measuring |= begins;
        begins
    }

    fn ended(&self, sizes: BTreeMap<Key, u64>, took: Duration) {
        let rest = took.saturating_mul(SHARE - 1);
        *self.0.lock() = State { sizes, measuring: false, rests_until: Instant::now().checked_add(rest) };
    }
}

impl Inner {
    /// The sizes of all artifacts that versions need, where they are known: what was written for each, or, measured,
    /// what it holds alone.
    pub(super) async fn sizes(&self, measure: Measure) -> BTreeMap<Key, u64> {
        let needed = self.store.with(|index| artifacts::needed(artifacts::all_manifests(index)));
        // What an artifact depends on may outlive its own manifest; then its backend alone knows its size.
        let unknown = needed.iter().filter(|(_, artifact)| artifact.bytes.is_none());
        let unknown: BTreeSet<(Domain, SandboxId)> =
            unknown.map(|(_, artifact)| (artifact.domain, artifact.sandbox.clone())).collect();
        let mut sizes: BTreeMap<Key, u64> = BTreeMap::new();
        for (domain, id) in unknown {
            let Some(backend) = self.backends().find(|backend| backend.domain() == domain) else { continue };
            if !backend.capabilities().incremental {
                continue;
            }
            let backend = backend.clone();
            let listed = call("list artifacts", self.options.deadlines.host, async move { backend.list(&id).await });
            match listed.await {
                Ok(listed) => {
                    let known =
                        listed.into_iter().filter_map(|artifact| Some((artifacts::key(&artifact), artifact.bytes?)));
                    sizes.extend(known);
                }
                Err(error) => tracing::debug!("some sizes are not known: {error}"),
            }
        }
        let told = needed.iter().filter_map(|(key, artifact)| Some((key.clone(), artifact.bytes?)));
        sizes.extend(told);
        if self.measured.begins(measure) {
            let begun = Instant::now();
            let mut measured = BTreeMap::new();
            for (key, artifact) in needed.into_iter().filter(|(key, _)| !sizes.contains_key(key)) {
                let Ok(backend) = self.backend_of(&artifact) else { continue };
                if !backend.capabilities().accounts {
                    continue;
                }
                let limit = self.options.deadlines.host;
                match call("measure an artifact", limit, async move { backend.space(&artifact).await }).await {
                    Ok(space) => _ = measured.insert(key, space.exclusive),
                    Err(error) => tracing::debug!("a size is not known: {error}"),
                }
            }
            sizes.extend(measured.clone());
            self.measured.ended(measured, begun.elapsed());
        } else if measure == Measure::AtTimes {
            let state = self.measured.0.lock();
            let known = state.sizes.iter().filter(|(key, _)| needed.contains_key(key));
            known.for_each(|(key, bytes)| _ = sizes.entry(key.clone()).or_insert(*bytes));
        }
        sizes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn measuring_at_times_rests_for_as_long_as_it_takes_a_multiple_of() {
        let measured = Measured::default();
        assert!(!measured.begins(Measure::Never));
        assert!(measured.begins(Measure::AtTimes));
        assert!(!measured.begins(Measure::AtTimes), "somebody measures already");
        measured.ended(BTreeMap::new(), Duration::from_secs(3600));
        assert!(!measured.begins(Measure::AtTimes), "it rests");
        assert!(measured.begins(Measure::Now), "whoever asks gets an answer");
        measured.ended(BTreeMap::new(), Duration::ZERO);
        assert!(measured.begins(Measure::AtTimes));
    }
}
