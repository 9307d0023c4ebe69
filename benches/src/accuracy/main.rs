//! How often the inspector is right on real work: `cargo xtask accuracy [--traces DIR] [--count N] [--json FILE]`.
//!
//! Recorded sessions are played in the example sandbox. At every turn boundary the inspector is asked, and two oracles
//! that share nothing with it: [`files`] has btrfs say what differs between snapshots, and [`processes`] has the
//! kernel's trace buffer say what the surviving processes did. What the inspector says decides what becomes the base of
//! the next turn, as in an engine.

mod files;
mod processes;
mod replay;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;

use crab_examples::session::Session;
use table::Table;

const USAGE: &str = "crab-accuracy [--traces DIR] [--count N] [--json FILE]
DIR holds recorded sessions (*.jsonl); CRAB_TRACES names it too. Of these COUNT are played, taken from all parts of the
list of their names, and the project's own sessions always.";

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("crab-accuracy: {message}");
            ExitCode::FAILURE
        }
    }
}

struct Options {
    traces: Option<PathBuf>,
    count: usize,
    json: Option<PathBuf>,
}

fn options() -> Result<Options, String> {
    let traces = std::env::var_os("CRAB_TRACES").filter(|path| !path.is_empty()).map(PathBuf::from);
    let mut options = Options { traces, count: usize::MAX, json: None };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or(format!("{argument} needs a value\n{USAGE}"));
        match argument.as_str() {
            "--traces" => options.traces = Some(value()?.into()),
            "--json" => options.json = Some(value()?.into()),
            "--count" => options.count = value()?.parse().map_err(|_| USAGE.to_owned())?,
            _ => return Err(USAGE.to_owned()),
        }
    }
    Ok(options)
}

fn run() -> Result<(), String> {
    let options = options()?;
    let mut sessions = Session::all().map_err(|error| error.to_string())?;
    if let Some(folder) = &options.traces {
        let mut paths: Vec<PathBuf> = std::fs::read_dir(folder)
            .map_err(|error| format!("read {}: {error}", folder.display()))?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.extension().is_some_and(|end| end == "jsonl"))
            .collect();
        paths.sort();
        let (all, count) = (paths.len(), options.count.min(paths.len()));
        for at in 0..count {
            sessions.push(Session::load(&paths[at * all / count]).map_err(|error| error.to_string())?);
        }
    }
    let mut table = Table::default();
    for (at, session) in sessions.iter().enumerate() {
        println!("{} of {}: {} ({} turns)", at + 1, sessions.len(), session.name, session.responses.len());
        if let Err(error) = replay::play(session, &mut table) {
            println!("  ended early: {error}");
            table.sessions_cut_short += 1;
        }
        table.sessions += 1;
        // Recorded ones are named AGENT__PROJECT__NUMBER.
        let agent = session.name.split_once("__").map_or("the project's own", |(agent, _)| agent);
        *table.agents.entry(agent.to_owned()).or_default() += 1;
        // A long run leaves what it has if it is stopped.
        if let Some(path) = &options.json {
            table.write(path)?;
        }
    }
    table.print();
    table.check()
}
