//! The evaluation in its short form: whatever the machine, some of what it finds must hold.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::process::Command;

use crab_examples::sandbox::{criu_binary, home};

#[test]
fn the_short_evaluation_finds_every_run_right_and_leaves_nothing() {
    if !home().join("pool/base/sbin/crab-init").exists() || !criu_binary().exists() {
        println!("skipped: sandboxes (root and `cargo xtask setup` are needed)");
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let file = |name: &str| directory.path().join(name);
    // It fails by itself where a run ends wrong or something is left behind.
    let output = Command::new(env!("CARGO_BIN_EXE_crab-eval"))
        .args(["--quick", "--json"])
        .arg(file("figures.json"))
        .arg("--html")
        .arg(file("page.html"))
        .arg("--timeline")
        .arg(file("timeline.json"))
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let read = |name: &str| -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(file(name)).unwrap()).expect("it is JSON")
    };
    let figures = read("figures.json");
    assert_eq!((&figures["crab_correct"], &figures["restart_correct"]), (&1.0.into(), &1.0.into()));
    assert_eq!(figures["failures_at_6"], 0);
    // One that needs more than this machine gives it, in time or in luck, is named and left out.
    assert!(figures["sessions"].as_u64().unwrap() >= 12, "{figures:#}");
    assert!(figures["crab_skip_share"].as_f64().unwrap() > 0.0, "{}", figures["crab_skip_share"]);
    let page = std::fs::read_to_string(file("page.html")).unwrap();
    assert!(page.contains("<svg ") && page.ends_with("</html>\n"));
    let timeline = read("timeline.json");
    let events = timeline["traceEvents"].as_array().unwrap();
    for name in ["model", "commands", "turn", "frozen", "persist"] {
        assert!(events.iter().any(|event| event["ph"] == "X" && event["name"] == name), "no {name} in the timeline");
    }
}
