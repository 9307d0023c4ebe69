//! The evaluation: sessions of agents are worked through on real sandboxes under several ways to recover, crashed, moved,
//! branched, and judged; then many at once are timed.
//! `cargo xtask eval [--traces DIR] [--quick] [--seed N] [--json FILE] [--html FILE] [--timeline FILE] [--keep FILE]
//! [--only PART]...`
//!
//! Called with `serve` this program is Crab's own process, which it starts beside the sandboxes.

mod correctness;
mod density;
mod figures;
mod machine;
mod material;
mod page;
mod results;
mod scheme;
mod svg;
mod timeline;
mod usage;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use crab_core::{Error, ErrorKind, Result};
use crab_examples::interrupt::interrupted;
use crab_examples::sandbox::{left_for_good, sweep};
use crab_examples::service;

use correctness::Extent;
use material::Material;
use results::Results;

const USAGE: &str = "cargo xtask eval [--traces DIR] [--quick] [--seed N] [--json FILE] [--html FILE] \
     [--timeline FILE] [--keep FILE] [--at-once N] [--only sessions|accuracy|density|density=N]...";

/// Sandboxes at once.
const DENSITIES: [usize; 5] = [1, 16, 32, 64, 96];

/// What the model's recorded delays are multiplied by where only the ends are judged.
const SCALE_OF_SESSIONS: f64 = 0.05;

/// The same where time is measured: no less than a fifth.
const SCALE_OF_DENSITY: f64 = 0.5;

/// The shipped sessions that the short form runs under other schemes too, to compare.
const CONTRASTED: [&str; 3] = ["night-watch", "interval-repair", "job-queue"];

/// The small sessions in which a crash comes at every boundary.
const AT_EVERY_BOUNDARY: [&str; 2] = ["scratch-work", "repl-survey"];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let outcome = match arguments.split_first() {
        Some((first, [config])) if first == "serve" => service::serve_as_program(config),
        _ => Options::parse(&arguments).and_then(|options| evaluate(&options)),
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

struct Options {
    traces: Option<PathBuf>,
    quick: bool,
    seed: u64,
    at_once: usize,
    json: Option<PathBuf>,
    html: Option<PathBuf>,
    timeline: Option<PathBuf>,
    keep: Option<PathBuf>,
    /// The parts to run; all where none is named.
    only: Vec<String>,
}

impl Options {
    fn parse(words: &[String]) -> Result<Self> {
        let wrong = |why: String| Error::new(ErrorKind::InvalidInput, why).fix(USAGE);
        let mut options = Self {
            traces: None,
            quick: false,
            seed: 1,
            at_once: 2,
            json: None,
            html: None,
            timeline: None,
            keep: None,
            only: Vec::new(),
        };
        let mut words = words.iter();
        while let Some(option) = words.next() {
            let mut value = || words.next().ok_or_else(|| wrong(format!("{option} needs a value")));
            let number = |text: &String| text.parse().map_err(|_| wrong(format!("{text} is no number")));
            match option.as_str() {
                "--traces" => options.traces = Some(value()?.into()),
                "--quick" => options.quick = true,
                "--seed" => options.seed = number(value()?)?,
                "--at-once" => options.at_once = number(value()?)?.max(1) as usize,
                "--json" => options.json = Some(value()?.into()),
                "--html" => options.html = Some(value()?.into()),
                "--timeline" => options.timeline = Some(value()?.into()),
                "--keep" => options.keep = Some(value()?.into()),
                "--only" => {
                    let part = value()?;
                    let known = ["sessions", "accuracy", "density"].contains(&part.as_str());
                    if !known && part.strip_prefix("density=").is_none_or(|n| n.parse::<usize>().is_err()) {
                        return Err(wrong(format!("there is no part {part}")));
                    }
                    options.only.push(part.clone());
                }
                _ => return Err(wrong(format!("there is no option {option}"))),
            }
        }
        Ok(options)
    }

    fn wants(&self, part: &str) -> bool {
        self.only.is_empty() || self.only.iter().any(|only| only == part)
    }

    fn densities(&self) -> Vec<usize> {
        let named = self.only.iter().filter_map(|only| only.strip_prefix("density=")?.parse().ok());
        match (self.wants("density"), self.quick) {
            (true, true) => vec![6],
            (true, false) => DENSITIES.into(),
            (false, _) => named.collect(),
        }
    }
}

fn evaluate(options: &Options) -> Result<()> {
    let program = std::env::current_exe().map_err(|e| Error::io("find this program", e))?;
    sweep()?;
    let runtime = runtime()?;
    let results = runtime.block_on(async {
        tokio::select! {
            results = run(options, &program) => results,
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
    let write = |path: &Path, text: String| {
        std::fs::write(path, text).map_err(|e| Error::io(format!("write {}", path.display()), e))
    };
    if let Some(path) = &options.html {
        write(path, page::page(&results, &figures))?;
    }
    if let Some(path) = &options.json {
        write(path, format!("{:#}\n", serde_json::Value::Object(figures.clone())))?;
    }
    // A part of it need not show everything.
    if options.only.is_empty() {
        figures::invariants(&figures).map_err(|why| Error::new(ErrorKind::Internal, why))?;
    }
    Ok(())
}

async fn run(options: &Options, program: &Path) -> Result<Results> {
    let kept = options.keep.as_deref().map(Results::load).transpose()?.flatten();
    let mut results = kept.unwrap_or_else(|| Results {
        seed: options.seed,
        scale: SCALE_OF_SESSIONS,
        quick: options.quick,
        machine: machine::facts(),
        ..Results::default()
    });
    let keep = |results: &Results| options.keep.as_deref().map_or(Ok(()), |path| results.save(path));
    let own = material::own()?;
    let (recorded, not_taken) = options.traces.as_deref().map(material::recorded).transpose()?.unwrap_or_default();
    if options.traces.is_some() {
        results.not_taken = not_taken;
    }
    if options.wants("sessions") {
        let known = |name: &str| results.sessions.contains_key(name) || results.left_out.contains_key(name);
        let wanted: Vec<(Material, Extent)> = own
            .iter()
            .chain(&recorded)
            .filter(|material| !known(&material.session.name))
            .map(|material| (material.clone(), extent(options.quick, material)))
            .collect();
        let setting = (results.scale, results.seed);
        correctness::all(wanted, program, setting, options.at_once, |name, record| {
            match record {
                Ok(record) => _ = results.sessions.insert(name, record),
                Err(why) => _ = results.left_out.insert(name, why),
            }
            keep(&results)
        })
        .await?;
    }
    if options.wants("accuracy") && !options.quick && results.accuracy.is_none() {
        results.accuracy = accuracy(options, program).await?;
        keep(&results)?;
    }
    let sound: Vec<Material> =
        own.iter().chain(&recorded).filter(|m| !results.left_out.contains_key(&m.session.name)).cloned().collect();
    for count in options.densities() {
        for scheme in if options.quick { &density::SHORT[..] } else { &density::SCHEMES[..] } {
            let cells = results.density.entry(count).or_default();
            if cells.iter().any(|cell| cell.scheme == scheme.name) {
                continue;
            }
            eprintln!("{count} sandboxes at once, {}", scheme.label);
            let scale = if options.quick { SCALE_OF_SESSIONS } else { SCALE_OF_DENSITY };
            cells.push(density::cell(&sound, count, *scheme, (scale, options.seed), program).await?);
            keep(&results)?;
        }
    }
    if let Some(path) = &options.timeline {
        let first = own.first().ok_or_else(|| Error::new(ErrorKind::Internal, "no session is shipped"))?;
        let trace = timeline::record(first, SCALE_OF_DENSITY, program).await?;
        std::fs::write(path, trace.to_string()).map_err(|e| Error::io(format!("write {}", path.display()), e))?;
    }
    Ok(results)
}

fn extent(quick: bool, material: &Material) -> Extent {
    let is = |names: &[&str]| names.contains(&material.session.name.as_str());
    match (quick, material.own) {
        (true, _) if is(&CONTRASTED) => correctness::SHORT_WITH_CONTRAST,
        (true, _) => correctness::SHORT,
        (false, true) => Extent { every_boundary: is(&AT_EVERY_BOUNDARY), ..correctness::WHOLE },
        (false, false) => correctness::RECORDED,
    }
}

/// The inspector's verdicts beside the truth, by the program beside this one.
async fn accuracy(options: &Options, program: &Path) -> Result<Option<serde_json::Value>> {
    let accuracy = program.with_file_name("crab-accuracy");
    if !accuracy.exists() {
        eprintln!("{} is not there: the inspector's accuracy is left out", accuracy.display());
        return Ok(None);
    }
    let file = tempfile::NamedTempFile::new().map_err(|e| Error::io("make a file for figures", e))?;
    let mut command = tokio::process::Command::new(accuracy);
    command.args(["--count", "40", "--json"]).arg(file.path()).kill_on_drop(true);
    if let Some(traces) = &options.traces {
        let trajectories = traces.join("trajectories");
        command.arg("--traces").arg(if trajectories.is_dir() { &trajectories } else { traces });
    }
    let status = command.status().await.map_err(|e| Error::io("run crab-accuracy", e))?;
    let text = std::fs::read_to_string(file.path()).map_err(|e| Error::io("read its figures", e))?;
    match status.success() {
        true => Ok(serde_json::from_str(&text).ok()),
        false => Err(Error::new(ErrorKind::Internal, format!("crab-accuracy ended with {status}"))),
    }
}
