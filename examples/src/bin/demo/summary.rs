//! What the demo found: tables for people, figures for programs.

use std::time::Duration;

use crab_examples::crash::Crash;
use crab_examples::percentile::percentile;
use crab_examples::run::Outcome;
use crab_examples::service::TurnReport;
use crab_examples::session::Session;

use crate::picture::{self, milliseconds};

/// A run with a crash, compared with the truth.
pub(crate) struct CrashRun {
    crash: Crash,
    what: String,
    outcome: Outcome,
    differences: Vec<String>,
}

impl CrashRun {
    pub(crate) fn new(crash: Crash, what: String, outcome: Outcome, truth: &Outcome) -> Self {
        let differences = outcome.end.differences(&truth.end);
        Self { crash, what, outcome, differences }
    }

    fn is_equal(&self) -> bool {
        self.differences.is_empty()
    }
}

/// All runs of the demo.
pub(crate) struct Summary {
    /// With Crab and without a crash.
    calm: Outcome,
    calm_differences: Vec<String>,
    /// With Crab and with a crash.
    pub(crate) crashes: Vec<CrashRun>,
    /// The first crash again, with the chat history alone.
    pub(crate) chat_only: Option<CrashRun>,
    /// The first crash again, with the chat history and the files.
    pub(crate) chat_and_files: Option<CrashRun>,
}

impl Summary {
    pub(crate) fn new(truth: &Outcome, calm: Outcome) -> Self {
        let calm_differences = calm.end.differences(&truth.end);
        Self { calm, calm_differences, crashes: Vec::new(), chat_only: None, chat_and_files: None }
    }

    /// Whether every run with Crab ended as the fault-free run.
    pub(crate) fn is_good(&self) -> bool {
        self.calm_differences.is_empty() && self.crashes.iter().all(|run| run.is_equal() && run.outcome.crashed)
    }

    fn count(&self, captured: &str) -> usize {
        self.calm.told.covered.iter().filter(|turn| turn.captured == captured).count()
    }

    /// In milliseconds, as all times here.
    fn exposed(&self) -> Vec<f64> {
        let runs = std::iter::once(&self.calm).chain(self.crashes.iter().map(|run| &run.outcome));
        runs.flat_map(|run| run.told.covered.iter().map(|turn| milliseconds(turn.exposed))).collect()
    }

    fn restores(&self) -> Vec<f64> {
        self.crashes
            .iter()
            .flat_map(|run| run.outcome.restores.iter().map(|restored| milliseconds(restored.took)))
            .collect()
    }

    /// The figures.
    pub(crate) fn json(&self) -> serde_json::Value {
        let equal = |run: &Option<CrashRun>| run.as_ref().is_some_and(CrashRun::is_equal);
        serde_json::json!({
            "turns": self.calm.told.covered.len(),
            "skip": self.count("skip"),
            "fs": self.count("fs"),
            "process": self.count("process"),
            "full": self.count("full"),
            "crashes": self.crashes.iter().filter(|run| run.outcome.crashed).count(),
            "recovered": self.crashes.iter().filter(|run| run.outcome.crashed && run.is_equal()).count(),
            "equal": self.is_good(),
            "chat_only_equal": equal(&self.chat_only),
            "chat_fs_equal": equal(&self.chat_and_files),
            "exposed_ms_p50": percentile(&mut self.exposed(), 50.0),
            "exposed_ms_p95": percentile(&mut self.exposed(), 95.0),
            "restore_ms_p50": percentile(&mut self.restores(), 50.0),
        })
    }

    /// The tables and the picture.
    pub(crate) fn print(&self, session: &Session) {
        println!("\nThe calm run with Crab, turn by turn\n");
        println!(
            "  {:>4}  {:<34} {:<34} {:<8} {:>9} {:>10} {:>9} {:>9}",
            "turn",
            "what the agent had done",
            "what had changed",
            "captured",
            "hidden ms",
            "exposed ms",
            "frozen ms",
            "written"
        );
        for turn in &self.calm.told.covered {
            println!(
                "  {:>4}  {:<34} {:<34} {:<8} {:>9.1} {:>10.1} {:>9.1} {:>9}",
                turn.turn,
                short(&done_before(session, turn), 34),
                short(&turn.delta, 34),
                turn.captured,
                milliseconds(turn.hidden),
                milliseconds(turn.exposed),
                milliseconds(turn.frozen),
                turn.bytes.map_or_else(String::new, bytes),
            );
        }
        if !self.calm.bpf {
            println!("\n  (without BPF on this kernel: the inspector is coarser, and more turns are captured)");
        }
        let crashed: Vec<usize> = self.crashes.iter().map(|run| run.crash.response + 1).collect();
        println!("\n{}", picture::draw(&self.calm.told.covered, &crashed));

        println!("How the runs ended, compared with the run without a fault and without Crab\n");
        let line = |what: &str, recovered: &str, took: &str, differences: &[String]| {
            let equal = if differences.is_empty() { "equal" } else { "DIFFERENT" };
            println!("  {what:<48} {recovered:<34} {took:>8}  {equal}");
            for difference in differences.iter().take(4) {
                println!("      {}", short(difference, 130));
            }
        };
        line("no crash", "", "", &self.calm_differences);
        for run in &self.crashes {
            let took: Duration = run.outcome.restores.iter().map(|restored| restored.took).sum();
            let took = if took.is_zero() { String::new() } else { format!("{:.0} ms", milliseconds(took)) };
            line(&run.what, &recovery(&run.outcome), &took, &run.differences);
        }
        println!("\nFor contrast, the first of these crashes with less to recover from\n");
        for run in [&self.chat_only, &self.chat_and_files].into_iter().flatten() {
            line(&run.what, "", "", &run.differences);
        }
        let mut exposed = self.exposed();
        println!(
            "\n{} of {} turns needed no checkpoint. The agent waited {:.1} ms a turn in the middle, {:.1} ms at the 95th\n\
             percentile; a restore took {:.0} ms in the middle.",
            self.count("skip"),
            self.calm.told.covered.len(),
            percentile(&mut exposed, 50.0),
            percentile(&mut exposed, 95.0),
            percentile(&mut self.restores(), 50.0),
        );
    }
}

/// The commands whose effect the turn holds: those of the response before its request.
fn done_before(session: &Session, turn: &TurnReport) -> String {
    let response = usize::try_from(turn.turn).ok().and_then(|turn| turn.checked_sub(2));
    let Some(response) = response.and_then(|at| session.responses.get(at)) else {
        return "(the task)".to_owned();
    };
    let first = response.calls.first().map(|call| match call.input.get("path").and_then(|path| path.as_str()) {
        Some(path) if !path.is_empty() => format!("{} {path}", call.tool),
        _ => call.shell(),
    });
    let more = response.calls.len().saturating_sub(1);
    let first = first.unwrap_or_default();
    let first = first.strip_prefix("cd /srv/desk && ").unwrap_or(&first).to_owned();
    if more == 0 { first } else { format!("({} calls) {first}", more + 1) }
}

fn recovery(outcome: &Outcome) -> String {
    let mut words = Vec::new();
    if outcome.restarts > 0 {
        words.push("Crab started again".to_owned());
    }
    if let Some(restored) = outcome.restores.last() {
        let what = if restored.processes { "files and processes" } else { "files" };
        words.push(format!("{what} of turn {}", restored.turn));
    }
    words.join(", ")
}

fn bytes(count: u64) -> String {
    match count {
        0..10_000 => format!("{count} B"),
        10_000..10_000_000 => format!("{:.0} kB", count as f64 / 1e3),
        _ => format!("{:.0} MB", count as f64 / 1e6),
    }
}

fn short(text: &str, most: usize) -> String {
    let flat: String = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match flat.char_indices().nth(most) {
        Some(_) => flat.chars().take(most - 1).chain(['…']).collect(),
        None => flat,
    }
}
