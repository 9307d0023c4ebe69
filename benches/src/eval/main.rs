//! The evaluation: sessions of agents are worked through on real sandboxes under several ways to recover, crashed, and
//! judged. `cargo xtask eval [--traces DIR] [--quick] [--seed N] [--json FILE] [--html FILE]`.
//!
//! Called with `serve` this program is Crab's own process, which it starts beside each sandbox.

mod figures;
mod page;
mod study;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crab_core::{Error, ErrorKind, Result};
use crab_examples::interrupt::interrupted;
use crab_examples::sandbox::{left_for_good, sweep};
use crab_examples::service;

use study::Study;

const USAGE: &str = "cargo xtask eval [--traces DIR] [--quick] [--seed N] [--json FILE] [--html FILE]";

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.split_first() {
        Some((first, [config])) if first == "serve" => serve(config),
        _ => evaluate(&arguments),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("crab: {error}");
            ExitCode::FAILURE
        }
    }
}

fn runtime() -> Result<tokio::runtime::Runtime> {
    tokio::runtime::Runtime::new().map_err(|e| Error::io("start the runtime", e))
}

fn serve(config: &str) -> Result<()> {
    let config = serde_json::from_str(config)
        .map_err(|e| Error::new(ErrorKind::InvalidInput, "not a service's configuration").caused_by(e))?;
    runtime()?.block_on(service::serve(config))
}

fn evaluate(words: &[String]) -> Result<()> {
    let wrong = |why: String| Error::new(ErrorKind::InvalidInput, why).fix(USAGE);
    let program = std::env::current_exe().map_err(|e| Error::io("find this program", e))?;
    let mut study = Study::new(program);
    let (mut json, mut html): (Option<PathBuf>, Option<PathBuf>) = (None, None);
    let mut words = words.iter();
    while let Some(option) = words.next() {
        let mut value = || words.next().ok_or_else(|| wrong(format!("{option} needs a value")));
        match option.as_str() {
            "--traces" => study.add_traces(Path::new(value()?))?,
            "--quick" => study.quick(),
            "--seed" => {
                let text = value()?;
                study.seed = text.parse().map_err(|_| wrong(format!("{text} is no seed: give a number")))?;
            }
            "--json" => json = Some(value()?.into()),
            "--html" => html = Some(value()?.into()),
            _ => return Err(wrong(format!("there is no option {option}"))),
        }
    }
    sweep()?;
    let runtime = runtime()?;
    let results = runtime.block_on(async {
        tokio::select! {
            results = study.run() => results,
            _ = interrupted() => Err(Error::new(ErrorKind::Cancelled, "interrupted; all is cleaned up")),
        }
    });
    drop(runtime);
    let left = left_for_good(&format!("-{}", std::process::id()));
    if !left.is_empty() {
        return Err(Error::new(ErrorKind::Internal, format!("left behind: {}", left.join(", "))));
    }
    let results = results?;
    let figures = figures::of(&results);
    figures::print(&results, &figures);
    let write = |path: PathBuf, text: String| {
        std::fs::write(&path, text).map_err(|e| Error::io(format!("write {}", path.display()), e))
    };
    if let Some(path) = html {
        write(path, page::page(&results, &figures))?;
    }
    if let Some(path) = json {
        write(path, format!("{figures:#}\n"))?;
    }
    match figures["crab_correct"] == 1.0 {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Internal, "a run with Crab did not end as the fault-free one; see above")),
    }
}
