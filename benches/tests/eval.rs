//! The evaluation in its short form: whatever the machine, some of what it finds must hold.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::path::Path;
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
    for dark in [false, true] {
        let Some(seen) = seen_in_browser(&page, directory.path(), dark) else {
            println!("skipped: the page in a browser (cargo xtask setup --browser)");
            break;
        };
        assert_eq!((&seen["dark"], &seen["faults"]), (&dark.into(), &serde_json::json!([])), "{seen:#}");
        assert!(seen["read"].as_u64().unwrap() > 100, "{seen:#}");
    }
    let timeline = read("timeline.json");
    let events = timeline["traceEvents"].as_array().unwrap();
    for name in ["model", "commands", "turn", "frozen", "persist"] {
        assert!(events.iter().any(|event| event["ph"] == "X" && event["name"] == name), "no {name} in the timeline");
    }
}

/// What `page.js` finds in the page where a browser is there to show it.
fn seen_in_browser(page: &str, directory: &Path, dark: bool) -> Option<serde_json::Value> {
    let path = directory.join("judged.html");
    let script = format!("<script>{}</script></body>", include_str!("page.js"));
    std::fs::write(&path, page.replace("</body>", &script)).unwrap();
    let output = Command::new("chromium-headless-shell")
        .args(["--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,900", "--dump-dom"])
        .arg(format!("--blink-settings=preferredColorScheme={}", if dark { 0 } else { 1 }))
        .arg(format!("--user-data-dir={}", directory.join("browser").display()))
        .arg(format!("file://{}", path.display()))
        .output();
    let output = match output {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return None,
        output => output.unwrap(),
    };
    let shown = String::from_utf8_lossy(&output.stdout).into_owned();
    let found = shown.split_once("FOUND ").and_then(|(_, rest)| rest.split_once(" END"));
    let Some((found, _)) = found else {
        panic!("the page's script said nothing: {shown}\n{}", String::from_utf8_lossy(&output.stderr))
    };
    let plain = found.replace("&lt;", "<").replace("&gt;", ">").replace("&amp;", "&");
    Some(serde_json::from_str(&plain).unwrap())
}

#[test]
fn a_page_that_cannot_be_read_is_noticed() {
    let page = "<html><head><style>:root { color-scheme: light dark } body { color: #777; background: #888 }</style></head>\
        <body><p>words</p><svg viewBox=\"0 0 100 100\" width=\"200\"><text x=\"90\" y=\"50\">long words</text></svg></body></html>";
    let directory = tempfile::tempdir().unwrap();
    let Some(seen) = seen_in_browser(page, directory.path(), true) else {
        println!("skipped: the page in a browser (cargo xtask setup --browser)");
        return;
    };
    let faults = seen["faults"].to_string();
    assert!(faults.contains("hard to read") && faults.contains("outside of its plot"), "{seen:#}");
}
