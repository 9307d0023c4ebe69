//! The programs to read do what they say.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::process::Command;

use crab_examples::sandbox::{criu_binary, home, left_for_good};

/// Runs an example to its end, and returns what it printed.
fn run(name: &str) -> Option<String> {
    if !home().join("pool/base/sbin/crab-init").exists() || !criu_binary().exists() {
        println!("skipped: sandboxes (root and `cargo xtask setup` are needed)");
        return None;
    }
    // `cargo test` puts them beside the programs.
    let program = Path::new(env!("CARGO_BIN_EXE_demo")).with_file_name("examples").join(name);
    assert!(program.exists(), "build it first: cargo build -p crab-examples --examples");
    // One that waits for ever is to fail by itself.
    let output = Command::new("timeout").args(["--kill-after=10", "300"]).arg(program).output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{said}\n{}", String::from_utf8_lossy(&output.stderr));
    assert_eq!(left_for_good(&format!("{name}-")), Vec::<String>::new());
    Some(said)
}

#[test]
fn the_quickstart_brings_files_and_memory_back() {
    let Some(said) = run("quickstart") else { return };
    assert!(said.ends_with("the server counts to 7, and its program is there: server.py\n"), "{said}");
}

#[test]
fn branches_go_on_from_the_same_moment_and_apart() {
    let Some(said) = run("branching") else { return };
    for line in ["adding 2: 42\n", "adding 100: 142\n", "adding 200: 242\n", "adding 1: 43\n"] {
        assert!(said.contains(line), "{said}");
    }
}
