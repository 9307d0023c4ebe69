//! The picture of a run: one column a turn.

use std::fmt::Write as _;
use std::time::Duration;

use crab_examples::service::TurnReport;

/// Draws the turns of a run, with what was captured and how long it took, and marks the turns in which others crashed.
pub(crate) fn draw(turns: &[TurnReport], crashed: &[usize]) -> String {
    let mut picture = String::new();
    let mut row = |name: &str, cells: &mut dyn Iterator<Item = char>, legend: &str| {
        let cells: String = cells.flat_map(|cell| [cell, ' ']).collect();
        // Writing to a string cannot fail.
        let _ = writeln!(picture, "  {name:<9} {cells} {legend}");
    };
    row("turn", &mut (1..=turns.len()).map(decade), "");
    row("captured", &mut turns.iter().map(mark), "B both, F files, P processes, · nothing had changed");
    let most = turns.iter().flat_map(|turn| [turn.hidden, turn.exposed]).max().unwrap_or_default();
    let legend = format!("checkpoint time behind the model's answer, full height {:.0} ms", milliseconds(most));
    row("hidden", &mut turns.iter().map(|turn| bar(shown(turn, turn.hidden), most)), &legend);
    row("exposed", &mut turns.iter().map(|turn| bar(shown(turn, turn.exposed), most)), "time that the agent waited");
    // Turn t ends with the request after response t - 1.
    let mut crashes = (0..turns.len()).map(|turn| if crashed.contains(&turn) { 'x' } else { ' ' });
    row("crashes", &mut crashes, "x one of the crashes above");
    picture
}

fn decade(turn: usize) -> char {
    match turn % 10 {
        0 => char::from_digit((turn / 10 % 10) as u32, 10).unwrap_or('0'),
        5 => '+',
        _ => '.',
    }
}

fn mark(turn: &TurnReport) -> char {
    match turn.captured.as_str() {
        "full" => 'B',
        "fs" => 'F',
        "process" => 'P',
        _ => '·',
    }
}

/// A skipped turn has no checkpoint, only the look that showed it.
fn shown(turn: &TurnReport, time: Duration) -> Duration {
    if turn.captured == "skip" { Duration::ZERO } else { time }
}

fn bar(time: Duration, most: Duration) -> char {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    if time.is_zero() || most.is_zero() {
        return ' ';
    }
    let step = (time.as_secs_f64() / most.as_secs_f64() * 8.0).ceil() as usize;
    BARS[step.clamp(1, 8) - 1]
}

/// For people and for JSON.
pub(crate) fn milliseconds(time: Duration) -> f64 {
    (time.as_secs_f64() * 1e5).round() / 100.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_turn_has_a_column_and_times_have_heights() {
        let turn = |captured: &str, hidden| TurnReport {
            turn: 1,
            version: 1,
            captured: captured.into(),
            delta: String::new(),
            hidden: Duration::from_millis(hidden),
            exposed: Duration::ZERO,
            frozen: Duration::ZERO,
            bytes: None,
            size: None,
        };
        let picture = draw(&[turn("full", 80), turn("skip", 9), turn("fs", 10)], &[2]);
        let lines: Vec<&str> = picture.lines().collect();
        assert!(lines[1].starts_with("  captured  B · F "), "{picture}");
        assert!(lines[2].starts_with("  hidden    █   ▁ "), "{picture}");
        assert!(lines[4].starts_with("  crashes       x "), "{picture}");
    }
}
