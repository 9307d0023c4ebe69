//! A session file of Claude Code or Codex, as a session for `cargo xtask eval` and `cargo xtask demo`:
//! `cargo run -p crab-examples --bin import FILE >SESSION.jsonl`

use std::process::ExitCode;

use crab_core::Error;
use crab_examples::import::import;

fn main() -> ExitCode {
    let Some(path) = std::env::args_os().nth(1) else {
        eprintln!("usage: import FILE >SESSION.jsonl (a session file of Claude Code or Codex)");
        return ExitCode::FAILURE;
    };
    let text = std::fs::read_to_string(&path).map_err(|e| Error::io(format!("read {}", path.display()), e));
    match text.and_then(|text| import(&text)) {
        Ok(session) => {
            print!("{session}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("import: {error}");
            ExitCode::FAILURE
        }
    }
}
