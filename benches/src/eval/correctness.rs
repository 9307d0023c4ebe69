//! Each session by itself: a truth, the same once more to know whether it is one, then each scheme with a crash, Crab
//! with other faults, and Crab and a full checkpoint at every turn with none.

use std::path::Path;
use std::sync::Arc;

use crab_core::Result;
use crab_examples::crash::{Crash, Moment, Numbers};
use crab_examples::run::{Outcome, Recovery, Runner};

use crate::material::Material;
use crate::results::{Moved, RunRecord, SessionRecord};
use crate::scheme::{self, Scheme};

/// How much is done with a session.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Extent {
    /// The schemes with the crash.
    pub(crate) crashed: &'static [Scheme],
    /// The schemes without any fault.
    pub(crate) calm: &'static [Scheme],
    /// Turns taken back, a move to another store, branches, and crashes of Crab's own process.
    pub(crate) other_faults: bool,
    /// A crash at every boundary.
    pub(crate) every_boundary: bool,
}

/// Everything, for the project's sessions.
pub(crate) const WHOLE: Extent = Extent {
    crashed: &[
        scheme::CRAB,
        scheme::FULL,
        scheme::CHAT_FS,
        scheme::CHAT_ONLY,
        scheme::RESTART,
        scheme::STRICT,
        scheme::TOUCHED,
        scheme::IN_ORDER,
    ],
    calm: &[scheme::CRAB, scheme::FULL],
    other_faults: true,
    every_boundary: false,
};

/// For recorded sessions.
pub(crate) const RECORDED: Extent = Extent {
    crashed: &[scheme::CRAB, scheme::CHAT_FS, scheme::CHAT_ONLY, scheme::RESTART],
    calm: &[scheme::CRAB, scheme::FULL],
    other_faults: false,
    every_boundary: false,
};

/// For a short evaluation.
pub(crate) const SHORT: Extent =
    Extent { crashed: &[scheme::CRAB], calm: &[], other_faults: false, every_boundary: false };

/// The same with what it is compared with, and a cheap one of the other faults.
pub(crate) const SHORT_WITH_CONTRAST: Extent = Extent {
    crashed: &[scheme::CRAB, scheme::RESTART, scheme::CHAT_ONLY],
    calm: &[scheme::CRAB, scheme::FULL],
    other_faults: false,
    every_boundary: false,
};

/// The crash of a session: of the sandbox, alone or with Crab's process, at any point of any turn.
fn crash(name: &str, responses: usize, seed: u64) -> (Crash, Numbers) {
    let mut numbers = Numbers(seed);
    for byte in name.bytes() {
        numbers = Numbers(numbers.any() ^ u64::from(byte));
    }
    let moments = [Moment::Command, Moment::AfterCommand, Moment::Answer, Moment::CrabAndSandbox];
    let moment = moments[numbers.below(moments.len())];
    (Crash::at(numbers.below(responses), moment, &mut numbers), numbers)
}

/// Works through one session as far as wanted. `place` is a short name that no other session has. The inner error says
/// why the session cannot be judged.
pub(crate) async fn study(
    material: &Material,
    place: &str,
    program: &Path,
    (scale, seed): (f64, u64),
    extent: Extent,
) -> Result<std::result::Result<SessionRecord, String>> {
    let mut runner = material.runner(program, scale);
    let (name, responses) = (material.session.name.clone(), material.session.responses.len());
    let truth = runner.truth(&format!("{place}-truth")).await?;
    let again = runner.truth(&format!("{place}-again")).await?;
    if let Some(difference) = again.end.differences(&truth.end).first() {
        return Ok(Err(format!("ends differently without any fault: {difference}")));
    }
    runner.command_times = truth.command_times.clone();
    let mut study = Study { place, truth, runs: Vec::new() };
    study.runs.push(study.record(scheme::NONE, "", 0, Ok(again)));
    let (crash, mut numbers) = crash(&name, responses, seed);
    for &scheme in extent.crashed {
        study.crashed(&mut runner, scheme, crash, false).await;
    }
    for &scheme in extent.calm {
        runner.saving = scheme.saving;
        let outcome = runner.run(&format!("{place}-calm"), Recovery::Crab, None).await;
        study.runs.push(study.record(scheme, "", 0, outcome));
    }
    if extent.other_faults {
        for moment in [Moment::Crab, Moment::Checkpoint] {
            let crash = Crash::at(numbers.below(responses), moment, &mut numbers);
            study.crashed(&mut runner, scheme::CRAB, crash, false).await;
        }
        study.others(&mut runner, 1 + numbers.below(responses - 1)).await;
    }
    if extent.every_boundary {
        for response in 0..responses {
            let crash = Crash { response, moment: Moment::AfterCommand, fraction: 0.0 };
            study.crashed(&mut runner, scheme::CRAB, crash, true).await;
        }
    }
    let Study { runs, .. } = study;
    Ok(Ok(SessionRecord { own: material.own, agent: material.agent.clone(), responses, runs }))
}

struct Study<'a> {
    place: &'a str,
    truth: Outcome,
    runs: Vec<RunRecord>,
}

impl Study<'_> {
    async fn crashed(&mut self, runner: &mut Runner, scheme: Scheme, crash: Crash, one_of_many: bool) {
        let Some(recovery) = scheme.recovery else { return };
        runner.saving = scheme.saving;
        let outcome = runner.run(&format!("{}-crash", self.place), recovery, Some(crash)).await;
        let mut record = self.record(scheme, crash.moment.label(), crash.response + 1, outcome);
        record.one_of_many = one_of_many;
        self.runs.push(record);
    }

    /// What else than a crash can befall.
    async fn others(&mut self, runner: &mut Runner, response: usize) {
        runner.saving = scheme::CRAB.saving;
        let place = self.place;
        let outcome = runner.take_back(&format!("{place}-back"), response, 3).await;
        self.runs.push(self.record(scheme::CRAB, "three turns taken back", response + 1, outcome));
        let outcome = runner.evacuate(&format!("{place}-leave"), response).await;
        self.runs.push(self.record(scheme::CRAB, "host left for another store", response + 1, outcome));
        match runner.branch(&format!("{place}-tree"), response, 2).await {
            Ok(outcomes) => {
                for (number, outcome) in outcomes.into_iter().enumerate() {
                    let what = if number == 0 { "branched from" } else { "branch" };
                    self.runs.push(self.record(scheme::CRAB, what, response + 1, Ok(outcome)));
                }
            }
            Err(error) => self.runs.push(self.record(scheme::CRAB, "branch", response + 1, Err(error))),
        }
    }

    fn record(&self, scheme: Scheme, fault: &str, response: usize, outcome: Result<Outcome>) -> RunRecord {
        let mut record = RunRecord {
            scheme: scheme.name.to_owned(),
            fault: fault.to_owned(),
            response,
            one_of_many: false,
            differences: Vec::new(),
            took_s: 0.0,
            restores_s: Vec::new(),
            turns: Vec::new(),
            evacuation: None,
        };
        match outcome {
            Ok(outcome) => {
                record.differences = outcome.end.differences(&self.truth.end);
                let killed = fault.contains("killed");
                if killed && !outcome.crashed {
                    record.differences.push("the crash did not come".to_owned());
                }
                let unsaved = outcome.told.uncovered.iter().map(|(turn, error)| format!("turn {turn}: {error}"));
                if !killed {
                    // A turn that a killed sandbox was in cannot be saved.
                    record.differences.extend(unsaved);
                }
                record.took_s = outcome.took.as_secs_f64();
                record.restores_s = outcome.restores.iter().map(|restored| restored.took.as_secs_f64()).collect();
                record.turns = outcome.told.covered;
                record.evacuation = outcome.evacuation.map(|moved| Moved {
                    left_s: moved.left.as_secs_f64(),
                    whole_s: moved.whole.as_secs_f64(),
                    bytes: moved.bytes,
                });
            }
            Err(error) => record.differences.push(format!("the run failed: {error}")),
        }
        record
    }
}

/// All sessions, some at a time; `done` is called with each as it ends.
pub(crate) async fn all(
    materials: Vec<(Material, Extent)>,
    program: &Path,
    (scale, seed): (f64, u64),
    at_once: usize,
    mut done: impl FnMut(String, std::result::Result<SessionRecord, String>) -> Result<()>,
) -> Result<()> {
    let places = Arc::new(tokio::sync::Semaphore::new(at_once));
    let mut studies = tokio::task::JoinSet::new();
    for (at, (material, extent)) in materials.into_iter().enumerate() {
        let (places, program) = (Arc::clone(&places), program.to_owned());
        studies.spawn(async move {
            // Nobody closes it.
            let _place = places.acquire().await;
            let record = study(&material, &format!("eval{at}"), &program, (scale, seed), extent).await;
            (material.session.name.clone(), record)
        });
    }
    let (mut ended, all) = (0, studies.len());
    while let Some(joined) = studies.join_next().await {
        let Ok((name, record)) = joined else {
            return Err(crab_core::Error::new(crab_core::ErrorKind::Internal, "a session's study broke off"));
        };
        ended += 1;
        let said = match &record {
            Ok(Ok(record)) => {
                let runs = record.runs.iter().filter(|run| run.scheme == scheme::CRAB.name);
                let (right, wrong) = runs.partition::<Vec<_>, _>(|run| run.differences.is_empty());
                for run in &wrong {
                    eprintln!("    {name}, {}, turn {}: {}", run.fault, run.response, run.differences.join("; "));
                }
                format!("{} runs with Crab ended as the truth, {} did not", right.len(), wrong.len())
            }
            Ok(Err(why)) => format!("left out: {why}"),
            Err(error) => format!("left out: {error}"),
        };
        eprintln!("[{ended}/{all}] {name}: {said}");
        done(name, record.unwrap_or_else(|error| Err(error.to_string())))?;
    }
    Ok(())
}
