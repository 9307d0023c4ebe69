//! The report: one page that needs nothing else, readable in light and dark.

use std::fmt::Write as _;

use serde_json::Value;

use crate::figures::calm_run;
use crate::study::Results;

const STYLE: &str = "
:root { color-scheme: light dark; --ink: light-dark(#1a1a1a, #e8e8e8); --soft: light-dark(#666, #aaa);
  --paper: light-dark(#fff, #161616); --skip: light-dark(#c9d6df, #35424d); --fs: #4c9f70; --process: #e09f3e;
  --full: #c8553d; }
body { font: 16px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 60rem;
  margin: 2rem auto; padding: 0 1rem; }
table { border-collapse: collapse; width: 100%; } td, th { text-align: left; padding: .2rem .6rem; }
th { border-bottom: 1px solid var(--soft); } td.number { text-align: right; font-variant-numeric: tabular-nums; }
svg text { fill: var(--ink); font: 12px system-ui, sans-serif; } .soft { color: var(--soft); }
";

/// The page.
pub(crate) fn page(results: &Results, figures: &Value) -> String {
    let mut page = format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><title>Crab: the evaluation</title>\
         <meta name=\"viewport\" content=\"width=device-width\"><style>{STYLE}</style>\
         <h1>Crab: the evaluation</h1><p>{} sessions, {} turns, one crash in each session under each scheme. \
         Seed {}; the recorded model delays times {}.</p>",
        results.sessions.len(),
        figures["turns"],
        results.seed,
        results.scale,
    );
    // Writing to a string cannot fail.
    let _ = write!(
        page,
        "<h2>Ends as the run without a fault</h2>{}",
        bars(&[
            ("Crab", number(figures, "crab_correct")),
            ("everything at every turn", number(figures, "full_correct")),
            ("chat history and files", number(figures, "chat_fs_correct")),
            ("chat history", number(figures, "chat_only_correct")),
        ])
    );
    let _ = write!(
        page,
        "<h2>What turns needed</h2>{}<p class=\"soft\">skip: nothing had changed. With every process that ran counted \
         as changed, {:.0} % would be skips.</p>",
        stacked(&[
            ("skip", number(figures, "crab_skip_share")),
            ("fs", number(figures, "crab_fs_share")),
            ("process", number(figures, "crab_process_share")),
            ("full", number(figures, "crab_full_share")),
        ]),
        100.0 * number(figures, "strict_skip_share"),
    );
    page.push_str("<h2>By session</h2><table><tr><th>session<th>turns<th>skips<th>crash<th>Crab<th>files<th>chat");
    for session in &results.sessions {
        let turns = calm_run(session, "crab").map(|outcome| &outcome.told.covered[..]).unwrap_or_default();
        let skips = turns.iter().filter(|turn| turn.captured == "skip").count();
        let ended = |scheme: &str| {
            let run = session.crashed.iter().find(|(known, ..)| known.name == scheme);
            match run.map(|(_, _, differences)| differences.is_empty()) {
                Some(true) => "equal",
                Some(false) => "different",
                None => "",
            }
        };
        let _ = write!(
            page,
            "<tr><td>{}<td class=number>{}<td class=number>{skips}<td>{}, turn {}<td>{}<td>{}<td>{}",
            escaped(&session.name),
            turns.len(),
            session.crash.moment.label(),
            session.crash.response + 1,
            ended("crab"),
            ended("chat_fs"),
            ended("chat_only"),
        );
    }
    page.push_str("</table><h2>All figures</h2><table>");
    for (name, value) in figures.as_object().into_iter().flatten() {
        let _ = write!(page, "<tr><td>{name}<td class=number>{value}");
    }
    page.push_str("</table>");
    if !results.left_out.is_empty() {
        page.push_str("<h2>Left out</h2><ul>");
        for (name, why) in &results.left_out {
            let _ = write!(page, "<li>{}: <span class=soft>{}</span>", escaped(name), escaped(why));
        }
        page.push_str("</ul>");
    }
    page.push_str("</html>\n");
    page
}

fn number(figures: &Value, name: &str) -> f64 {
    figures[name].as_f64().unwrap_or(0.0)
}

fn bars(rows: &[(&str, f64)]) -> String {
    let mut svg = format!("<svg viewBox=\"0 0 640 {}\" role=img width=640>", rows.len() * 26);
    for (at, (name, share)) in rows.iter().enumerate() {
        let y = at * 26;
        let _ = write!(
            svg,
            "<text x=0 y={}>{name}</text><rect x=180 y={} width={:.1} height=16 fill=\"var(--fs)\"/>\
             <text x={:.1} y={}>{:.0} %</text>",
            y + 16,
            y + 4,
            share * 400.0,
            186.0 + share * 400.0,
            y + 16,
            share * 100.0,
        );
    }
    svg + "</svg>"
}

fn stacked(parts: &[(&str, f64)]) -> String {
    let mut svg = "<svg viewBox=\"0 0 640 60\" role=img width=640>".to_owned();
    let mut x = 0.0;
    for (name, share) in parts {
        let width = share * 640.0;
        let _ = write!(svg, "<rect x={x:.1} y=0 width={width:.1} height=24 fill=\"var(--{name})\"/>");
        if *share > 0.04 {
            let _ = write!(svg, "<text x={x:.1} y=42>{name} {:.0} %</text>", share * 100.0);
        }
        x += width;
    }
    svg + "</svg>"
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;")
}
