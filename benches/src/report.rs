//! What a bench found: named figures, printed as a table and written as JSON.

use std::path::Path;
use std::time::Instant;

pub(crate) use crab_examples::percentile::percentile;

/// Figures in the order in which they were added, some with the bound that they should keep.
pub(crate) struct Report {
    name: String,
    figures: Vec<(String, f64, Option<f64>)>,
}

impl Report {
    pub(crate) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), figures: Vec::new() }
    }

    /// Adds a figure; its name carries its unit, as in `commit_ms_p50`.
    pub(crate) fn add(&mut self, name: &str, value: f64) {
        self.figures.push((name.to_owned(), value, None));
    }

    /// Adds a figure that should be at most `bound`. A miss is shown; it is no error, since machines are noisy.
    pub(crate) fn add_bounded(&mut self, name: &str, value: f64, bound: f64) {
        self.figures.push((name.to_owned(), value, Some(bound)));
    }

    pub(crate) fn print(&self) {
        println!("{:<44} {:>14} {:>10}", self.name, "measured", "at most");
        for (name, value, bound) in &self.figures {
            let shown = match bound {
                Some(bound) if value > bound => format!("{bound:>10.3}  missed"),
                Some(bound) => format!("{bound:>10.3}"),
                None => String::new(),
            };
            println!("  {name:<42} {value:>14.3} {shown}");
        }
    }

    pub(crate) fn write(&self, path: &Path) -> Result<(), String> {
        let figures: serde_json::Map<String, serde_json::Value> =
            self.figures.iter().map(|(name, value, _)| (name.clone(), serde_json::json!(value))).collect();
        let text = format!("{:#}\n", serde_json::Value::Object(figures));
        std::fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))
    }
}

/// What two reads of the clock cost: the floor under every other figure.
pub(crate) fn clock(report: &mut Report) -> Result<(), String> {
    let mut samples: Vec<f64> = (0..10_000).map(|_| Instant::now().elapsed().as_nanos() as f64).collect();
    report.add("clock_ns_p50", percentile(&mut samples, 50.0));
    report.add("clock_ns_p99", percentile(&mut samples, 99.0));
    Ok(())
}
