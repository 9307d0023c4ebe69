//! The figures of an evaluation.

use std::time::Duration;

use crab_examples::percentile::percentile;
use crab_examples::service::TurnReport;
use serde_json::{Map, Value, json};

use crate::results::{Cell, Results, RunRecord, SessionRecord};
use crate::scheme;

/// What a turn's checkpoint holds.
pub(crate) const CLASSES: [&str; 4] = ["skip", "fs", "process", "full"];

/// All figures, by their names.
pub(crate) fn of(results: &Results) -> Map<String, Value> {
    let mut figures = Map::new();
    let mut add = |name: &str, value: Value| _ = figures.insert(name.to_owned(), value);
    let sessions = || results.sessions.values();
    add("seed", json!(results.seed));
    add("sessions_scale", json!(results.scale));
    add("sessions", json!(results.sessions.len()));
    add("sessions_shipped", json!(sessions().filter(|session| session.own).count()));
    add("sessions_recorded", json!(sessions().filter(|session| !session.own).count()));
    add("left_out", json!(results.left_out.len()));
    for scheme in scheme::ALL.iter().filter(|scheme| scheme.recovery.is_some()) {
        let (right, all) = correct(sessions(), scheme.name);
        if all > 0 {
            add(&format!("{}_correct", scheme.name), json!(right as f64 / all as f64));
            add(&format!("{}_runs", scheme.name), json!(all));
        }
    }
    let turns = calm_turns(sessions(), "crab");
    add("turns", json!(turns.len()));
    for (class, share) in CLASSES.iter().zip(shares(&turns)) {
        add(&format!("crab_{class}_share"), json!(share));
    }
    let shell = calm_turns(sessions().filter(|session| session.agent == "claude-code"), "crab");
    if !shell.is_empty() {
        add("crab_skip_share_claude_code", json!(shares(&shell)[0]));
    }
    for scheme in ["strict", "touched"] {
        let turns = all_turns(sessions(), scheme);
        if !turns.is_empty() {
            add(&format!("{scheme}_skip_share"), json!(shares(&turns)[0]));
        }
    }
    if let Some(ratio) = traffic(sessions()) {
        add("traffic_ratio", json!(ratio));
    }
    if let Some(ratio) = traffic_in_the_same_store(sessions()) {
        add("traffic_in_the_same_store_ratio", json!(ratio));
    }
    for class in CLASSES {
        let mut exposed: Vec<f64> = turns.iter().filter(|turn| turn.captured == class).map(|t| ms(t.exposed)).collect();
        let mut whole: Vec<f64> =
            turns.iter().filter(|turn| turn.captured == class).map(|t| ms(t.exposed + t.hidden)).collect();
        if !whole.is_empty() {
            for percent in [50.0, 95.0] {
                add(&format!("{class}_ms_p{percent}"), json!(percentile(&mut whole, percent)));
                add(&format!("{class}_exposed_ms_p{percent}"), json!(percentile(&mut exposed, percent)));
            }
        }
    }
    let mut restores = restores(results);
    if !restores.is_empty() {
        add("restores", json!(restores.len()));
        add("restore_s_p50", json!(percentile(&mut restores, 50.0)));
        add("restore_s_p95", json!(percentile(&mut restores, 95.0)));
    }
    let mut moves: Vec<f64> =
        runs(sessions(), "crab").filter_map(|run| run.evacuation.map(|moved| moved.whole_s)).collect();
    if !moves.is_empty() {
        add("evacuation_s_p50", json!(percentile(&mut moves, 50.0)));
        add("evacuation_s_most", json!(percentile(&mut moves, 100.0)));
    }
    for (count, cells) in &results.density {
        for scheme in ["crab", "full", "in_order"] {
            let mut slower = slowdowns(cells, scheme);
            if !slower.is_empty() {
                // The density at which the bound is asked for has the plain name.
                let at = if *count == 16 { String::new() } else { format!("_{count}") };
                add(&format!("{scheme}_overhead{at}_p50"), json!(percentile(&mut slower, 50.0)));
                add(&format!("{scheme}_overhead{at}_p95"), json!(percentile(&mut slower, 95.0)));
            }
        }
        let failures: usize = cells.iter().map(|cell| cell.failures.len()).sum();
        add(&format!("failures_at_{count}"), json!(failures));
    }
    for name in ["fs_accuracy", "fs_fpr", "fs_fnr", "process_accuracy", "process_fpr", "process_fnr"] {
        if let Some(value) = results.accuracy.as_ref().and_then(|accuracy| accuracy.get(name)) {
            add(&format!("inspector_{name}"), value.clone());
        }
    }
    figures
}

/// Of the runs that something befell, how many ended as the truth, and how many there were.
pub(crate) fn correct<'a>(sessions: impl Iterator<Item = &'a SessionRecord>, scheme: &'a str) -> (usize, usize) {
    let (mut right, mut all) = (0, 0);
    for run in runs(sessions, scheme).filter(|run| !run.fault.is_empty()) {
        all += 1;
        right += usize::from(run.differences.is_empty());
    }
    (right, all)
}

pub(crate) fn runs<'a>(
    sessions: impl Iterator<Item = &'a SessionRecord>,
    scheme: &'a str,
) -> impl Iterator<Item = &'a RunRecord> {
    sessions.flat_map(|session| &session.runs).filter(move |run| run.scheme == scheme)
}

/// The turns of the runs that nothing befell.
pub(crate) fn calm_turns<'a>(
    sessions: impl Iterator<Item = &'a SessionRecord>,
    scheme: &'a str,
) -> Vec<&'a TurnReport> {
    runs(sessions, scheme).filter(|run| run.fault.is_empty()).flat_map(|run| &run.turns).collect()
}

/// The turns of all runs.
pub(crate) fn all_turns<'a>(sessions: impl Iterator<Item = &'a SessionRecord>, scheme: &'a str) -> Vec<&'a TurnReport> {
    runs(sessions, scheme).flat_map(|run| &run.turns).collect()
}

/// The share of each of the classes.
pub(crate) fn shares(turns: &[&TurnReport]) -> [f64; 4] {
    CLASSES.map(|class| turns.iter().filter(|turn| turn.captured == class).count() as f64 / turns.len().max(1) as f64)
}

pub(crate) fn bytes(turns: &[&TurnReport]) -> u64 {
    turns.iter().filter_map(|turn| turn.bytes).sum()
}

/// What whole copies of what was captured take.
pub(crate) fn whole_bytes(turns: &[&TurnReport]) -> u64 {
    turns.iter().filter_map(|turn| turn.size).sum()
}

/// What Crab persisted, as a share of what a full checkpoint at every turn holds: the images of CRIU as they come, each
/// turn's by itself.
pub(crate) fn traffic<'a>(sessions: impl Iterator<Item = &'a SessionRecord> + Clone) -> Option<f64> {
    let full = whole_bytes(&calm_turns(sessions.clone(), "full"));
    (full > 0).then(|| bytes(&calm_turns(sessions, "crab")) as f64 / full as f64)
}

/// The same against full checkpoints that go into the same store, which keeps each page once.
pub(crate) fn traffic_in_the_same_store<'a>(sessions: impl Iterator<Item = &'a SessionRecord> + Clone) -> Option<f64> {
    let full = bytes(&calm_turns(sessions.clone(), "full"));
    (full > 0).then(|| bytes(&calm_turns(sessions, "crab")) as f64 / full as f64)
}

/// How long restores took, in seconds.
pub(crate) fn restores(results: &Results) -> Vec<f64> {
    runs(results.sessions.values(), "crab").flat_map(|run| run.restores_s.iter().copied()).collect()
}

/// How many times as long as without checkpoints each sandbox's work took.
pub(crate) fn slowdowns(cells: &[Cell], scheme: &str) -> Vec<f64> {
    let of = |name: &str| cells.iter().find(|cell| cell.scheme == name);
    let (Some(base), Some(other)) = (of("none"), of(scheme)) else { return Vec::new() };
    base.took_s.iter().zip(&other.took_s).filter_map(|(base, other)| Some(other.as_ref()? / base.as_ref()?)).collect()
}

pub(crate) fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// What a short evaluation must show whatever the machine: the first that does not hold.
pub(crate) fn invariants(figures: &Map<String, Value>) -> Result<(), String> {
    for name in ["crab_correct", "restart_correct"] {
        match figures.get(name).map(|value| value == &json!(1.0)) {
            Some(true) => {}
            Some(false) => return Err(format!("{name} is {}, not 1", figures[name])),
            None => return Err(format!("{name} was not found out")),
        }
    }
    let failed = figures.iter().find(|(name, value)| name.starts_with("failures_at_") && **value != json!(0));
    failed.map_or(Ok(()), |(name, value)| Err(format!("{name}: {value} turns or sandboxes failed")))
}

/// For people.
pub(crate) fn print(results: &Results, figures: &Map<String, Value>) {
    for (name, session) in &results.sessions {
        for run in session.runs.iter().filter(|run| run.scheme == "crab" && !run.differences.is_empty()) {
            println!("{name}: {}, turn {}: {}", run.fault, run.response, run.differences.join("; "));
        }
    }
    for (name, why) in &results.left_out {
        println!("{name} was left out: {}", why.chars().take(160).collect::<String>());
    }
    println!();
    for (name, value) in figures {
        match value.as_f64().filter(|_| value.is_f64()) {
            Some(number) => println!("  {name:<34} {number:.4}"),
            None => println!("  {name:<34} {value}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wrong_end_and_a_failed_turn_break_the_invariants() {
        let figures = |crab: f64, failures: u32| {
            let value = json!({"crab_correct": crab, "restart_correct": 1.0, "failures_at_6": failures});
            value.as_object().cloned().unwrap()
        };
        assert_eq!(invariants(&figures(1.0, 0)), Ok(()));
        assert!(invariants(&figures(0.9, 0)).unwrap_err().contains("crab_correct"));
        assert!(invariants(&figures(1.0, 2)).unwrap_err().contains("failures_at_6"));
        assert!(invariants(&Map::new()).is_err());
    }
}
