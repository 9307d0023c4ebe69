//! Crab's main job, to watch: a sandbox dies in the middle of an agent's work and comes back whole.
//!
//! `cargo xtask demo [--seed N] [--crash-at TURN|random] [--json FILE]`. One program in two parts: called with `serve` it
//! is Crab's own process, which the other part starts beside each sandbox and kills when the plan says so.

mod arguments;
mod picture;
mod summary;

use std::io::IsTerminal;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use crab_core::{Error, ErrorKind, Result};
use crab_examples::crash::{Crash, Moment, Numbers};
use crab_examples::interrupt::interrupted;
use crab_examples::run::{Outcome, Progress, Recovery, Runner};
use crab_examples::sandbox::{criu_binary, home, left_for_good, sweep};
use crab_examples::service;
use crab_examples::session::Session;
use indicatif::{ProgressBar, ProgressStyle};

use arguments::Arguments;
use summary::{CrashRun, Summary};

/// The model is so much faster than the recorded one, to keep the demo short.
const SCALE: f64 = 0.1;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let log = tracing_subscriber::EnvFilter::try_from_default_env();
    tracing_subscriber::fmt().with_env_filter(log.unwrap_or_else(|_| "off".into())).with_writer(std::io::stderr).init();
    let outcome = match arguments.split_first() {
        Some((first, [config])) if first == "serve" => service::serve_as_program(config),
        _ => Arguments::parse(&arguments).and_then(|arguments| demo(&arguments)),
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

/// What the demo needs of this machine; the first thing that is missing.
fn check_machine() -> Result<()> {
    let lacking = |what: String| Error::new(ErrorKind::Unsupported, what).fix("run `cargo xtask setup`");
    if !rustix::process::geteuid().is_root() {
        return Err(Error::new(ErrorKind::Unsupported, "sandboxes, snapshots and BPF need root").fix("run it as root"));
    }
    let root = home().join("pool/base/sbin/crab-init");
    if !root.exists() {
        return Err(lacking(format!("there is no root filesystem for sandboxes: {} is missing", root.display())));
    }
    if !criu_binary().exists() {
        return Err(lacking(format!("there is no CRIU at {}", criu_binary().display())));
    }
    Ok(())
}

fn demo(arguments: &Arguments) -> Result<()> {
    check_machine()?;
    // What a demo left that was killed itself.
    sweep()?;
    let program = std::env::current_exe().map_err(|e| Error::io("find this program", e))?;
    let session = Arc::new(match &arguments.session {
        Some(path) => Session::load(path)?,
        None => Session::ticket_desk()?,
    });
    let runtime = runtime()?;
    let summary = runtime.block_on(async {
        tokio::select! {
            summary = all_runs(arguments, &program, Arc::clone(&session)) => summary,
            // Dropping the runs ends their processes and removes what they made.
            _ = interrupted() => Err(Error::new(ErrorKind::Cancelled, "interrupted; all is cleaned up")),
        }
    });
    drop(runtime);
    let left = left_for_good(&suffix());
    if !left.is_empty() {
        return Err(Error::new(ErrorKind::Internal, format!("the demo left something behind: {}", left.join(", "))));
    }
    let summary = summary?;
    summary.print(&session);
    if let Some(path) = &arguments.json {
        let text = format!("{:#}\n", summary.json());
        std::fs::write(path, text).map_err(|e| Error::io(format!("write {}", path.display()), e))?;
    }
    match summary.is_good() {
        true => Ok(()),
        false => Err(Error::new(ErrorKind::Internal, "a run with Crab did not end as the fault-free run; see above")),
    }
}

/// What the names of this process's sandboxes and directories end with.
fn suffix() -> String {
    format!("-{}", std::process::id())
}

async fn all_runs(arguments: &Arguments, program: &Path, session: Arc<Session>) -> Result<Summary> {
    let turns = session.responses.len();
    let mut numbers = Numbers(arguments.seed);
    let crashes: Vec<Crash> = Moment::ALL
        .into_iter()
        .map(|moment| {
            let response = arguments.crash_at.map_or_else(|| numbers.below(turns), |turn| turn - 1);
            Crash::at(response.min(turns - 1), moment, &mut numbers)
        })
        .collect();
    println!(
        "An agent works through {turns} responses of a model ({}). First alone, then with Crab, then with Crab and\n\
         crashes. Seed {}.\n",
        session.name, arguments.seed
    );

    let mut runner = Runner::new(session, program);
    runner.scale = SCALE;
    let truth = shown(&mut runner, "no fault, no Crab", async |runner| runner.truth("demo-truth").await).await?;
    println!("        ends with {} files and {} answers of live servers: the truth", files(&truth), probes(&truth));
    runner.command_times = truth.command_times.clone();
    let calm = shown(&mut runner, "no fault, Crab", async |runner| runner.run("demo-calm", Recovery::Crab, None).await)
        .await?;
    let mut summary = Summary::new(&truth, calm);
    for (at, crash) in crashes.iter().enumerate() {
        let name = format!("demo-crash{at}");
        let what = format!("turn {:>2}: {}", crash.response + 1, crash.moment.label());
        let outcome =
            shown(&mut runner, &what, async |runner| runner.run(&name, Recovery::Crab, Some(*crash)).await).await?;
        summary.crashes.push(CrashRun::new(*crash, what, outcome, &truth));
    }
    // For contrast, the first crash of a sandbox once more, with less to recover from.
    let same = crashes.first().copied().ok_or_else(|| Error::new(ErrorKind::Internal, "no crash was planned"))?;
    for (recovery, words, name) in [
        (Recovery::ChatOnly, "chat history alone", "demo-chat"),
        (Recovery::ChatAndFiles, "chat history and files", "demo-files"),
    ] {
        let what = format!("turn {:>2}: the same, with {words}", same.response + 1);
        let outcome = shown(&mut runner, &what, async |runner| runner.run(name, recovery, Some(same)).await).await?;
        let run = CrashRun::new(same, words.to_owned(), outcome, &truth);
        match recovery {
            Recovery::ChatOnly => summary.chat_only = Some(run),
            _ => summary.chat_and_files = Some(run),
        }
    }
    Ok(summary)
}

fn files(outcome: &Outcome) -> usize {
    outcome.end.tree.len()
}

fn probes(outcome: &Outcome) -> usize {
    outcome.end.probes.len()
}

/// Shows how a run goes while it goes.
async fn shown(runner: &mut Runner, what: &str, run: impl AsyncFnOnce(&Runner) -> Result<Outcome>) -> Result<Outcome> {
    let total = runner.session.responses.len() as u64;
    let bar = ProgressBar::new(total);
    let template = "  {prefix:<48} [{bar:30}] {pos:>2}/{len} {elapsed:>4} {msg}";
    let style = ProgressStyle::with_template(template)
        .map_err(|e| Error::new(ErrorKind::Internal, "the progress bar's template").caused_by(e))?;
    bar.set_style(style.progress_chars("=> "));
    bar.set_prefix(what.to_owned());
    let terminal = std::io::stderr().is_terminal();
    if terminal {
        bar.enable_steady_tick(Duration::from_millis(200));
    } else {
        // In a log, the lines that the bar would show at its end are enough.
        println!("  {what} ...");
    }
    let seen = bar.clone();
    runner.progress = Box::new(move |progress| match progress {
        Progress::Responses(done) => seen.set_position((*done as u64).min(total)),
        Progress::Crashed => seen.set_message("crashed"),
        Progress::CrabRestarted => seen.set_message("crashed, Crab is back"),
        Progress::Recovered => seen.set_message("crashed, recovered"),
    });
    let outcome = run(runner).await;
    match &outcome {
        Ok(_) => bar.finish(),
        Err(_) => bar.abandon(),
    }
    outcome
}
