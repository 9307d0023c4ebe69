//! The figures of an evaluation.

use std::time::Duration;

use crab_examples::run::Outcome;
use crab_examples::service::TurnReport;
use serde_json::{Value, json};

use crate::study::{Results, SessionResult};

/// All figures, by their names.
pub(crate) fn of(results: &Results) -> Value {
    let sessions = &results.sessions;
    let calm = |scheme| sessions.iter().filter_map(move |session| calm_run(session, scheme));
    let turns: Vec<&TurnReport> = calm("crab").flat_map(|outcome| &outcome.told.covered).collect();
    let share = |captured: &str| {
        turns.iter().filter(|turn| turn.captured == captured).count() as f64 / turns.len().max(1) as f64
    };
    let strict: Vec<&TurnReport> = calm("strict").flat_map(|outcome| &outcome.told.covered).collect();
    let strict_skips = strict.iter().filter(|turn| turn.captured == "skip").count();
    let overhead = |scheme: &'static str| {
        let ratios = sessions.iter().filter_map(|session| {
            let took = calm_run(session, scheme)?.took.as_secs_f64();
            Some(took / session.truth.took.as_secs_f64().max(1e-3))
        });
        ratios.collect::<Vec<f64>>()
    };
    let bytes = |scheme: &'static str| -> u64 {
        calm(scheme).flat_map(|outcome| &outcome.told.covered).filter_map(|turn| turn.bytes).sum()
    };
    let exposed: Vec<f64> = turns.iter().map(|turn| ms(turn.exposed)).collect();
    let restores: Vec<f64> = sessions
        .iter()
        .flat_map(|session| &session.crashed)
        .filter(|(scheme, ..)| scheme.name == "crab")
        .flat_map(|(_, outcome, _)| outcome.restores.iter().map(|restored| restored.took.as_secs_f64()))
        .collect();
    json!({
        "sessions": sessions.len(),
        "left_out": results.left_out.len(),
        "seed": results.seed,
        "scale": results.scale,
        "turns": turns.len(),
        "crab_correct": correct(sessions, "crab"),
        "full_correct": correct(sessions, "full"),
        "chat_fs_correct": correct(sessions, "chat_fs"),
        "chat_only_correct": correct(sessions, "chat_only"),
        "crab_skip_share": share("skip"),
        "crab_fs_share": share("fs"),
        "crab_process_share": share("process"),
        "crab_full_share": share("full"),
        "strict_skip_share": strict_skips as f64 / strict.len().max(1) as f64,
        "crab_overhead_p50": percentile(overhead("crab"), 50.0),
        "crab_overhead_p95": percentile(overhead("crab"), 95.0),
        "full_overhead_p50": percentile(overhead("full"), 50.0),
        "full_overhead_p95": percentile(overhead("full"), 95.0),
        "traffic_ratio": bytes("crab") as f64 / bytes("full").max(1) as f64,
        "exposed_ms_p50": percentile(exposed.clone(), 50.0),
        "exposed_ms_p95": percentile(exposed, 95.0),
        "restore_s_p50": percentile(restores.clone(), 50.0),
        "restore_s_p95": percentile(restores, 95.0),
    })
}

/// A session's run without a crash.
pub(crate) fn calm_run<'a>(session: &'a SessionResult, scheme: &str) -> Option<&'a Outcome> {
    session.calm.iter().find(|(known, _)| known.name == scheme).map(|(_, outcome)| outcome)
}

/// The share of crashed runs that ended as the truth.
fn correct(sessions: &[SessionResult], scheme: &str) -> f64 {
    let runs = sessions.iter().flat_map(|session| &session.crashed).filter(|(known, ..)| known.name == scheme);
    let (mut all, mut right) = (0_usize, 0_usize);
    for (_, outcome, differences) in runs {
        all += 1;
        right += usize::from(outcome.crashed && differences.is_empty());
    }
    right as f64 / all.max(1) as f64
}

fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Nearest rank; zero of nothing.
fn percentile(mut values: Vec<f64>, percent: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let rank = (values.len() as f64 * percent / 100.0).ceil() as usize;
    values.get(rank.saturating_sub(1)).copied().unwrap_or(0.0)
}

/// For people.
pub(crate) fn print(results: &Results, figures: &Value) {
    println!("{:<74} {:>6} {:>5} {:>5} {:>5}", "session", "crab", "full", "files", "chat");
    for session in &results.sessions {
        let cells: Vec<&str> = session
            .crashed
            .iter()
            .map(|(_, _, differences)| if differences.is_empty() { "equal" } else { "-" })
            .collect();
        println!("{:<74} {:>6} {:>5} {:>5} {:>5}", session.name, cells[0], cells[1], cells[2], cells[3]);
        for (scheme, _, differences) in &session.crashed {
            if scheme.name == "crab" && !differences.is_empty() {
                println!("    {:?}: {}", session.crash, differences.join("; "));
            }
        }
    }
    for (name, why) in &results.left_out {
        println!("{name:<74} left out: {}", why.chars().take(120).collect::<String>());
    }
    println!();
    for (name, value) in figures.as_object().into_iter().flatten() {
        println!("  {name:<24} {value}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_percentile_is_a_value_that_was_there() {
        assert_eq!(percentile(vec![3.0, 1.0, 2.0], 50.0), 2.0);
        assert_eq!(percentile(vec![3.0, 1.0, 2.0], 95.0), 3.0);
        assert_eq!(percentile(Vec::new(), 50.0), 0.0);
    }
}
