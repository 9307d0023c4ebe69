//! A limit of bytes a second, as a debt that is paid off by time. Pure.

use std::time::{Duration, Instant};

/// What was written runs ahead of the rate by at most what it is allowed to save up in a second; when it ran further
/// ahead, the next write waits until time has caught up. A write that has begun is not slowed down.
#[derive(Debug)]
pub(crate) struct Pace {
    /// Bytes a second, at least 1.
    rate: f64,
    /// When time will have caught up with what was written. In the past: nothing is owed.
    even: Instant,
}

/// How much may be saved up.
const BURST: Duration = Duration::from_secs(1);

impl Pace {
    pub(crate) fn new(bytes_per_second: u64, now: Instant) -> Self {
        #[allow(clippy::cast_precision_loss, reason = "a rate need not be exact")]
        let rate = bytes_per_second.max(1) as f64;
        Self { rate, even: now }
    }

    /// So much was written.
    pub(crate) fn wrote(&mut self, bytes: u64, now: Instant) {
        #[allow(clippy::cast_precision_loss, reason = "a rate need not be exact")]
        let takes = Duration::try_from_secs_f64(bytes as f64 / self.rate).unwrap_or(Duration::from_secs(3600));
        let saved = now.checked_sub(BURST).unwrap_or(now);
        self.even = self.even.max(saved).checked_add(takes).unwrap_or(self.even);
    }

    /// How long the next write must wait.
    pub(crate) fn wait(&self, now: Instant) -> Duration {
        self.even.saturating_duration_since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn on_average_no_more_is_written_than_the_rate_allows(
            rate in 1..1_000_000u64, writes in prop::collection::vec((0..5_000_000u64, 0..5_000u64), 1..50),
        ) {
            let start = Instant::now();
            let mut pace = Pace::new(rate, start);
            let (mut now, mut written, mut last) = (start, 0u64, 0u64);
            for (bytes, idle_ms) in writes {
                now += Duration::from_millis(idle_ms);
                now += pace.wait(now);
                prop_assert_eq!(pace.wait(now), Duration::ZERO, "time alone pays it off");
                // What was written before this moment fits the time, the saved second, and the last write.
                let allowed = (now - start + BURST).as_secs_f64() * rate as f64 + last as f64;
                prop_assert!(written as f64 <= allowed + 1.0, "{} of {}", written, allowed);
                pace.wrote(bytes, now);
                written += bytes;
                last = bytes;
            }
        }
    }

    #[test]
    fn nothing_waits_below_the_rate_and_a_large_write_is_paid_off() {
        let start = Instant::now();
        let mut pace = Pace::new(1000, start);
        for second in 1..10 {
            let now = start + Duration::from_secs(second);
            assert_eq!(pace.wait(now), Duration::ZERO);
            pace.wrote(1000, now);
        }
        let now = start + Duration::from_secs(20);
        pace.wrote(5000, now);
        assert_eq!(pace.wait(now), Duration::from_secs(4));
    }
}
