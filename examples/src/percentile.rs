//! Percentiles by nearest rank: values that were there.

/// The value at or below which `percent` of the samples lie; 0 without samples. Sorts them.
pub fn percentile(samples: &mut [f64], percent: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    let rank = (percent / 100.0 * samples.len() as f64).ceil() as usize;
    samples.get(rank.saturating_sub(1)).or(samples.last()).copied().unwrap_or(0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_a_value_that_was_there() {
        let mut samples = [3.0, 1.0, 2.0];
        assert_eq!([0.0, 50.0, 95.0, 100.0].map(|percent| percentile(&mut samples, percent)), [1.0, 2.0, 3.0, 3.0]);
        assert_eq!(percentile(&mut [], 50.0), 0.0);
    }
}
