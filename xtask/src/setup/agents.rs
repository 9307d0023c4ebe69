//! Real agents and the SDKs of their models, for the tests that drive them: `setup --agents`. They need no account,
//! since the tests are their model.

use std::path::PathBuf;
use std::process::{Command, Stdio};

use super::{Found, Home, Report, remove_tree, write};
use crate::command;

/// With their versions: what agents do on the wire changes from one to the next.
const NPM: &[&str] = &["@anthropic-ai/claude-code@2.1.197", "@openai/codex@0.171.0"];
const PYPI: &[&str] = &["mini-swe-agent==2.4.6", "anthropic==2.14.0", "openai==3.57.0", "h2==4.4.1"];
/// What must be there afterwards.
const PROGRAMS: &[&str] = &["node_modules/.bin/claude", "node_modules/.bin/codex", "venv/bin/mini", "venv/bin/python"];

fn recipe() -> String {
    [NPM, PYPI].concat().join("\n")
}

fn dir(home: &Home) -> PathBuf {
    home.path().join("agents")
}

pub(super) fn look(home: &Home) -> Result<Found, String> {
    let dir = dir(home);
    let what = format!("real agents at {}", dir.display());
    let stamped = std::fs::read_to_string(dir.join("recipe")).is_ok_and(|stamp| stamp == recipe());
    Ok(if stamped && PROGRAMS.iter().all(|program| dir.join(program).exists()) {
        Found::Ready(what)
    } else {
        Found::Absent(format!("{what} (1.5 GB, two minutes)"))
    })
}

pub(super) fn make(home: &Home, report: &Report) -> Result<(), String> {
    let dir = dir(home);
    remove_tree(&dir)?;
    super::make_private_directory(&dir)?;
    report.note(&format!("npm install {}", NPM.join(" ")));
    run(
        Command::new("npm")
            .args(["install", "--no-audit", "--no-fund", "--no-save", "--loglevel=error", "--prefix"])
            .arg(&dir)
            .args(NPM),
        "nodejs and npm",
    )?;
    report.note(&format!("pip install {}", PYPI.join(" ")));
    let venv = dir.join("venv");
    run(Command::new("python3").args(["-m", "venv"]).arg(&venv), "python3-venv")?;
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile"];
    run(Command::new(venv.join("bin/python")).args(pip).args(PYPI), "python3-pip")?;
    // Last: without it, what is here is unfinished.
    write(&dir.join("recipe"), &recipe())
}

/// By the caller's own PATH: these tools often are not the system's.
fn run(command: &mut Command, packages: &str) -> Result<(), String> {
    command::run(command.stdin(Stdio::null()))
        .map_err(|message| format!("{message}\nReal agents need {packages}, and the npm and PyPI registries"))
}
