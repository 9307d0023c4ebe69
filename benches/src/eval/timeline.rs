//! One run with Crab as a trace that Perfetto (ui.perfetto.dev) and Chrome show: the agent's requests and commands above,
//! what the engine did below.

use std::path::Path;
use std::time::UNIX_EPOCH;

use crab_core::{Error, ErrorKind, Result};
use crab_examples::run::{Outcome, Recovery};
use crab_examples::service::Span;
use serde_json::{Value, json};

use crate::material::Material;
use crate::scheme;

/// Works through the session and gives the trace's JSON.
pub(crate) async fn record(material: &Material, scale: f64, program: &Path) -> Result<Value> {
    let file = tempfile::NamedTempFile::new().map_err(|e| Error::io("make a file for spans", e))?;
    let mut runner = material.runner(program, scale);
    runner.saving = scheme::CRAB.saving;
    runner.spans = Some(file.path().to_owned());
    let outcome = runner.run("eval-timeline", Recovery::Crab, None).await?;
    let text = std::fs::read_to_string(file.path()).map_err(|e| Error::io("read the spans", e))?;
    let spans: std::result::Result<Vec<Span>, _> = text.lines().map(serde_json::from_str).collect();
    let spans = spans.map_err(|e| Error::new(ErrorKind::Internal, "a span that cannot be read").caused_by(e))?;
    Ok(trace(&material.session.name, &outcome, &spans))
}

fn trace(session: &str, outcome: &Outcome, spans: &[Span]) -> Value {
    let mut events = Vec::new();
    let mut name = |process: u32, thread: u32, what: &str, name: &str| {
        events.push(json!({"ph": "M", "pid": process, "tid": thread, "name": what, "args": {"name": name}}));
    };
    name(1, 0, "process_name", &format!("agent: {session}"));
    name(1, 1, "thread_name", "model");
    name(1, 2, "thread_name", "commands");
    name(2, 0, "process_name", "Crab");
    // Steps that overlap need rows of their own.
    let rows =
        ["turn", "decide", "queued", "checkpoint", "frozen", "capture_files", "capture_processes", "persist", "commit"];
    let row = |span: &str| rows.iter().position(|row| *row == span).map_or(rows.len(), |at| at) as u32 + 1;
    for (at, row) in rows.iter().chain([&"other"]).enumerate() {
        name(2, at as u32 + 1, "thread_name", row);
    }
    let complete = |process: u32, thread: u32, name: &str, start_us: u64, took_us: u64| json!({"ph": "X", "pid": process, "tid": thread, "name": name, "cat": "crab", "ts": start_us, "dur": took_us});
    for stretch in &outcome.stretches {
        let start = stretch.start.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros() as u64);
        let thread = if stretch.what == "model" { 1 } else { 2 };
        events.push(complete(1, thread, stretch.what, start, stretch.took.as_micros() as u64));
    }
    events.extend(spans.iter().map(|span| complete(2, row(&span.name), &span.name, span.start_us, span.took_us)));
    json!({"displayTimeUnit": "ms", "traceEvents": events})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_span_and_stretch_has_a_place() {
        let span = |name: &str| Span { name: name.into(), sandbox: "a".into(), start_us: 5, took_us: 2 };
        let trace = trace("x", &Outcome::default(), &[span("persist"), span("something new")]);
        let events = trace["traceEvents"].as_array().unwrap();
        let complete: Vec<_> = events.iter().filter(|event| event["ph"] == "X").collect();
        assert_eq!(complete.len(), 2);
        for event in complete {
            let named = events.iter().any(|e| e["ph"] == "M" && e["pid"] == event["pid"] && e["tid"] == event["tid"]);
            assert!(named, "{event}");
        }
    }
}
