//! What could not be told is told: a counter and a line in the log.

use crab_core::{Change, Delta, Domain, Effects, SandboxId, Token, Unknown};

/// A delta of which nothing is known.
pub(crate) fn both(reason: Unknown, token: u64) -> Delta {
    Delta {
        filesystem: Change::Unknown(reason.clone()),
        process: Change::Unknown(reason),
        effects: Effects::default(),
        token: Token(token),
    }
}

/// Counts and logs what a delta does not know. That there is no base yet is in the nature of things, and only counted.
pub(crate) fn unknowns(id: &SandboxId, delta: &Delta) {
    for domain in [Domain::Filesystem, Domain::Process] {
        let Change::Unknown(reason) = delta.of(domain) else {
            continue;
        };
        metrics::counter!("crab_inspector_unknown_total", "reason" => reason.label()).increment(1);
        if !matches!(reason, Unknown::NoBase | Unknown::NotAttached) {
            tracing::warn!(sandbox = %id, ?domain, %reason, "a change could not be ruled out");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicU64, Ordering};

    use metrics::{Counter, CounterFn, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
    use parking_lot::Mutex;

    use super::*;

    #[derive(Default)]
    struct Count(AtomicU64);

    impl CounterFn for Count {
        fn increment(&self, value: u64) {
            self.0.fetch_add(value, Ordering::Relaxed);
        }
        fn absolute(&self, value: u64) {
            self.0.store(value, Ordering::Relaxed);
        }
    }

    #[derive(Default)]
    struct Counts(Mutex<Vec<(Key, Arc<Count>)>>);

    impl Counts {
        fn of(&self, reason: &str) -> u64 {
            let all = self.0.lock();
            let of = all.iter().filter(|(key, _)| key.labels().any(|label| label.value() == reason));
            of.map(|(_, count)| count.0.load(Ordering::Relaxed)).sum()
        }
    }

    impl Recorder for Counts {
        fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
        fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
            let count = Arc::new(Count::default());
            self.0.lock().push((key.clone(), count.clone()));
            Counter::from_arc(count)
        }
        fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
            Gauge::noop()
        }
        fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
            Histogram::noop()
        }
    }

    #[test]
    fn what_is_not_known_is_counted_by_its_reason() {
        let counts = Counts::default();
        metrics::with_local_recorder(&counts, || {
            let id = "box".parse().unwrap();
            unknowns(&id, &both(Unknown::Failed("x".into()), 1));
            unknowns(&id, &both(Unknown::NoBase, 2));
            let mut delta = both(Unknown::Overflow("x".into()), 3);
            delta.filesystem = Change::Unchanged;
            unknowns(&id, &delta);
        });
        let found = ["failed", "no_base", "overflow", "unobservable"].map(|reason| counts.of(reason));
        assert_eq!(found, [2, 2, 1, 0]);
    }
}
