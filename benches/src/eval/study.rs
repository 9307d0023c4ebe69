//! What is run: for each session a truth, the same once more to know whether it is one, then each scheme with a crash
//! and, for the costs, without.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crab_core::{Error, Result};
use crab_examples::crash::{Crash, Moment, Numbers};
use crab_examples::run::{Outcome, Recovery, Runner};
use crab_examples::service::Saving;
use crab_examples::session::Session;

/// Sessions of more responses are left out: they take long, and are the same in kind.
const MOST_RESPONSES: usize = 60;

/// A way to recover, and what it saves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scheme {
    /// For people and for figures.
    pub(crate) name: &'static str,
    recovery: Recovery,
    saving: Saving,
}

const fn scheme(name: &'static str, recovery: Recovery, saving: Saving) -> Scheme {
    Scheme { name, recovery, saving }
}

/// Those that are crashed.
const CRASHED: [Scheme; 4] = [
    scheme("crab", Recovery::Crab, Saving::Changed),
    scheme("full", Recovery::Crab, Saving::Everything),
    scheme("chat_fs", Recovery::ChatAndFiles, Saving::Changed),
    scheme("chat_only", Recovery::ChatOnly, Saving::Changed),
];

/// Those whose cost is measured.
const CALM: [Scheme; 3] = [
    scheme("crab", Recovery::Crab, Saving::Changed),
    scheme("strict", Recovery::Crab, Saving::Strict),
    scheme("full", Recovery::Crab, Saving::Everything),
];

/// What is to be run.
pub(crate) struct Study {
    program: PathBuf,
    sessions: Vec<(Session, bool)>,
    scale: f64,
    /// Where the crashes come from.
    pub(crate) seed: u64,
}

/// All that was found.
pub(crate) struct Results {
    /// The seed.
    pub(crate) seed: u64,
    /// What the recorded delays were multiplied by.
    pub(crate) scale: f64,
    /// The sessions that were studied.
    pub(crate) sessions: Vec<SessionResult>,
    /// Those that were left out, and why.
    pub(crate) left_out: Vec<(String, String)>,
}

/// What was found with one session.
pub(crate) struct SessionResult {
    /// Its name.
    pub(crate) name: String,
    /// Without a fault and without Crab.
    pub(crate) truth: Outcome,
    /// The crash.
    pub(crate) crash: Crash,
    /// For each scheme the crashed run and how it differs from the truth.
    pub(crate) crashed: Vec<(Scheme, Outcome, Vec<String>)>,
    /// For each scheme the run without a crash.
    pub(crate) calm: Vec<(Scheme, Outcome)>,
}

impl Study {
    /// The project's own sessions, with a fifth of the recorded delays.
    pub(crate) fn new(program: PathBuf) -> Self {
        let own = Session::ticket_desk().into_iter().map(|session| (session, false)).collect();
        Self { program, sessions: own, scale: 0.2, seed: 1 }
    }

    /// Shorter delays, and of the recorded sessions only the short ones.
    pub(crate) fn quick(&mut self) {
        self.scale = 0.02;
        self.sessions.retain(|(session, _)| session.responses.len() <= MOST_RESPONSES / 2);
    }

    /// Adds all sessions below a directory.
    pub(crate) fn add_traces(&mut self, directory: &Path) -> Result<()> {
        let io = |e| Error::io(format!("read {}", directory.display()), e);
        let mut paths = Vec::new();
        for entry in std::fs::read_dir(directory).map_err(io)? {
            let path = entry.map_err(io)?.path();
            if path.is_dir() {
                self.add_traces(&path)?;
            } else if path.extension().is_some_and(|extension| extension == "jsonl") {
                paths.push(path);
            }
        }
        paths.sort();
        for path in paths {
            let mut session = Session::load(&path)?;
            // It holds the times of the files.
            session.judge.ignore.push(format!("{}/.git/index", session.cwd));
            self.sessions.push((session, true));
        }
        Ok(())
    }

    /// Runs it all.
    pub(crate) async fn run(self) -> Result<Results> {
        let mut results = Results { seed: self.seed, scale: self.scale, sessions: Vec::new(), left_out: Vec::new() };
        let mut numbers = Numbers(self.seed);
        let count = self.sessions.len();
        for (at, (session, recorded)) in self.sessions.into_iter().enumerate() {
            let name = session.name.clone();
            if session.responses.is_empty() || session.responses.len() > MOST_RESPONSES {
                results.left_out.push((name, format!("{} responses", session.responses.len())));
                continue;
            }
            eprintln!("[{}/{count}] {name}", at + 1);
            let moments = [Moment::Command, Moment::AfterCommand, Moment::Answer, Moment::CrabAndSandbox];
            let moment = moments[numbers.below(moments.len())];
            let crash = Crash::at(numbers.below(session.responses.len()), moment, &mut numbers);
            let session = Arc::new(session);
            let mut runner = match recorded {
                true => Runner::on_stand_in(session, &self.program),
                false => Runner::new(session, &self.program),
            };
            runner.scale = self.scale;
            match one(runner, &name, crash).await? {
                Ok(result) => results.sessions.push(result),
                Err(why) => results.left_out.push((name, why)),
            }
        }
        Ok(results)
    }
}

/// Runs one session under all schemes; the inner error says why it is left out.
async fn one(mut runner: Runner, name: &str, crash: Crash) -> Result<std::result::Result<SessionResult, String>> {
    let truth = runner.truth("eval-truth").await?;
    let again = runner.truth("eval-again").await?;
    if let Some(difference) = again.end.differences(&truth.end).first() {
        return Ok(Err(format!("ends differently without any fault: {difference}")));
    }
    runner.command_times = truth.command_times.clone();
    let (mut crashed, mut calm) = (Vec::new(), Vec::new());
    for scheme in CRASHED {
        runner.saving = scheme.saving;
        let outcome = runner.run(&format!("eval-{}", scheme.name), scheme.recovery, Some(crash)).await?;
        let differences = outcome.end.differences(&truth.end);
        crashed.push((scheme, outcome, differences));
    }
    for scheme in CALM {
        runner.saving = scheme.saving;
        calm.push((scheme, runner.run(&format!("eval-{}", scheme.name), scheme.recovery, None).await?));
    }
    Ok(Ok(SessionResult { name: name.to_owned(), truth, crash, crashed, calm }))
}
