//! Benchmarks, as ratios measured in one run: `cargo xtask bench NAME [--json FILE]`.
//!
//! One module a part. A bench adds its figures to a [`Report`]; absolute times are printed for people, and only ratios
//! and percentiles measured side by side are worth comparing between machines.

mod coordinator;
mod criu;
mod engine;
mod filesystem;
mod inspector;
mod report;
mod zfs;

use std::path::PathBuf;
use std::process::ExitCode;

use report::Report;

/// One bench: measures, and fills the report.
type Bench = fn(&mut Report) -> Result<(), String>;

/// Every bench by its name; a new one adds its module and a line here.
const BENCHES: &[(&str, &str, Bench)] = &[
    ("coordinator", "what the coordinator adds to a request and to a stream, beside nginx", coordinator::run),
    ("criu", "process checkpoints beside plain criu", criu::bench),
    ("criu-incremental", "copies before the freeze beside full dumps (cargo xtask vm bench it)", criu::incremental),
    ("engine", "an idle turn, a decision of the scheduler, two queues against one, a commit", engine::run),
    ("filesystem", "captures, restores and differences, beside the tools of the file systems", filesystem::run),
    ("inspector", "how quickly turns are judged, and what being watched costs", inspector::run),
    ("zfs", "snapshots of a ZFS root beside the zfs tool (cargo xtask vm bench zfs)", zfs::run),
    ("report", "the cost of the bench's own clock", report::clock),
];

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("crab-bench: {message}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<(), String> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().unwrap_or_default();
    let mut json: Option<PathBuf> = None;
    while let Some(argument) = arguments.next() {
        match argument.as_str() {
            "--json" => json = Some(arguments.next().ok_or("--json needs a file")?.into()),
            other => return Err(format!("unknown option `{other}`")),
        }
    }
    let Some((name, _, bench)) = BENCHES.iter().find(|(known, ..)| *known == name) else {
        let known: Vec<String> = BENCHES.iter().map(|(name, what, _)| format!("  {name:<16} {what}")).collect();
        return Err(format!("which bench? They are:\n{}", known.join("\n")));
    };
    let mut report = Report::new(name);
    bench(&mut report)?;
    report.print();
    if let Some(path) = json {
        report.write(&path)?;
    }
    Ok(())
}
