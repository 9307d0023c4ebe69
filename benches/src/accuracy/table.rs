//! What was counted, and the rates that come of it.

use std::collections::BTreeMap;
use std::path::Path;

/// One domain's verdicts against the oracle's.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    true_changed: u64,
    true_unchanged: u64,
    false_changed: u64,
    false_unchanged: u64,
}

impl Counts {
    pub(crate) fn add(&mut self, said_changed: bool, is_changed: bool) {
        *match (said_changed, is_changed) {
            (true, true) => &mut self.true_changed,
            (false, false) => &mut self.true_unchanged,
            (true, false) => &mut self.false_changed,
            (false, true) => &mut self.false_unchanged,
        } += 1;
    }

    fn rate(part: u64, rest: u64) -> f64 {
        if part == 0 { 0.0 } else { part as f64 / (part + rest) as f64 }
    }

    /// Of the changed turns those that were called unchanged.
    fn false_negative(&self) -> f64 {
        Self::rate(self.false_unchanged, self.true_changed)
    }

    /// Of the unchanged turns those that were called changed.
    fn false_positive(&self) -> f64 {
        Self::rate(self.false_changed, self.true_unchanged)
    }

    fn accuracy(&self) -> f64 {
        Self::rate(self.true_changed + self.true_unchanged, self.false_changed + self.false_unchanged)
    }
}

/// All of it.
#[derive(Debug, Default)]
pub(crate) struct Table {
    pub(crate) sessions: u64,
    pub(crate) sessions_cut_short: u64,
    /// How many sessions are of which agent.
    pub(crate) agents: BTreeMap<String, u64>,
    pub(crate) turns: u64,
    pub(crate) skipped: u64,
    pub(crate) files: Counts,
    pub(crate) processes: Counts,
    /// Each wrong verdict, with its cause.
    pub(crate) wrong: Vec<String>,
}

impl Table {
    fn figures(&self) -> Vec<(&'static str, f64)> {
        vec![
            ("sessions", self.sessions as f64),
            ("sessions_cut_short", self.sessions_cut_short as f64),
            ("turns", self.turns as f64),
            ("turns_without_a_checkpoint", self.skipped as f64),
            ("fs_changed", (self.files.true_changed + self.files.false_unchanged) as f64),
            ("fs_accuracy", self.files.accuracy()),
            ("fs_fpr", self.files.false_positive()),
            ("fs_fnr", self.files.false_negative()),
            ("process_changed", (self.processes.true_changed + self.processes.false_unchanged) as f64),
            ("process_accuracy", self.processes.accuracy()),
            ("process_fpr", self.processes.false_positive()),
            ("process_fnr", self.processes.false_negative()),
        ]
    }

    pub(crate) fn print(&self) {
        println!(
            "\n{:<12} {:>9} {:>10} {:>16} {:>16}",
            "domain", "turns", "accuracy", "false positives", "false negatives"
        );
        for (name, counts) in [("filesystem", &self.files), ("process", &self.processes)] {
            println!(
                "{name:<12} {:>9} {:>10.4} {:>16.4} {:>16.4}",
                self.turns,
                counts.accuracy(),
                counts.false_positive(),
                counts.false_negative()
            );
        }
        println!("{} of {} turns needed no checkpoint", self.skipped, self.turns);
        let agents: Vec<String> = self.agents.iter().map(|(agent, count)| format!("{agent} {count}")).collect();
        println!("sessions: {}", agents.join(", "));
        for line in &self.wrong {
            println!("  {line}");
        }
    }

    /// Whether the rates are within their bounds.
    pub(crate) fn check(&self) -> Result<(), String> {
        let bounds = [
            ("fs_fnr", self.files.false_negative(), 0.0),
            ("fs_fpr", self.files.false_positive(), 0.01),
            ("process_fnr", self.processes.false_negative(), 0.0),
            ("process_fpr", self.processes.false_positive(), 0.02),
        ];
        match bounds.iter().find(|(_, rate, bound)| rate > bound) {
            Some((name, rate, bound)) => Err(format!("{name} is {rate:.4}, and at most {bound} is allowed")),
            None => Ok(()),
        }
    }

    pub(crate) fn write(&self, path: &Path) -> Result<(), String> {
        let mut figures: serde_json::Map<String, serde_json::Value> =
            self.figures().into_iter().map(|(name, value)| (name.to_owned(), serde_json::json!(value))).collect();
        figures.insert("agents".to_owned(), serde_json::json!(self.agents));
        figures.insert("wrong".to_owned(), serde_json::json!(self.wrong));
        let text = format!("{:#}\n", serde_json::Value::Object(figures));
        std::fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))
    }
}
