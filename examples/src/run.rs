//! One run of a session: the model, the agent, its sandbox, a way to recover, and a crash on purpose. Runs that share a
//! host are in [`crowd`](crate::crowd).

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use crab_core::{Condition, Error, ErrorKind, Result, SandboxId};
use serde_json::Value;
use tokio::task::JoinHandle;

use crate::agent::{Agent, Asked};
use crate::crash::{Crash, Moment};
use crate::judge::{EndState, describe_tree};
use crate::model::ModelServer;
use crate::sandbox::{Config, ExecOptions, Sandbox, ScratchArea, delete_root, snapshot_root};
use crate::service::{Restored, Saving, Service, ServiceConfig, Told};
use crate::session::Session;
use crate::stand_in::{environment, stand_in};

/// What is there to recover a dead sandbox.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Recovery {
    /// Nothing: the work begins anew.
    Restart,
    /// The chat history alone: a fresh sandbox, and the conversation goes on.
    ChatOnly,
    /// The chat history and the files: Crab without a process backend.
    ChatAndFiles,
    /// Files and live processes: Crab.
    Crab,
}

/// What runs of one session have in common.
pub struct Runner {
    /// The session.
    pub session: Arc<Session>,
    /// A program that calls [`serve`](crate::service::serve) for the arguments `serve CONFIG`.
    pub program: PathBuf,
    /// The model's recorded delays are multiplied by this.
    pub scale: f64,
    /// How long each response's commands take, from a run before. Crashes in the middle of them are placed by it.
    pub command_times: Vec<Duration>,
    /// Make a fresh sandbox's files what the session starts from.
    pub start: Vec<String>,
    /// How the session's commands are run.
    pub commands: ExecOptions,
    /// Which turns Crab saves.
    pub saving: Saving,
    /// Where Crab writes what it does, as [`ServiceConfig::spans`].
    pub spans: Option<PathBuf>,
    /// Hears how the run goes.
    pub progress: Box<dyn Fn(&Progress) + Send + Sync>,
}

/// How a run goes.
#[derive(Clone, Debug)]
pub enum Progress {
    /// So many of the session's responses have been worked through.
    Responses(usize),
    /// The crash has happened.
    Crashed,
    /// Crab's process runs again.
    CrabRestarted,
    /// The sandbox is back.
    Recovered,
}

/// How a run ended.
#[derive(Clone, Debug, Default)]
pub struct Outcome {
    /// What it left.
    pub end: EndState,
    /// What Crab told of the turns.
    pub told: Told,
    /// Whether the crash happened.
    pub crashed: bool,
    /// How often Crab's process was started again.
    pub restarts: usize,
    /// Each restore of the sandbox.
    pub restores: Vec<Restored>,
    /// How long the work took, without what comes before and after it.
    pub took: Duration,
    /// How long each response's commands took, the last time they ran.
    pub command_times: Vec<Duration>,
    /// Whether Crab saw kernel events.
    pub bpf: bool,
    /// What was done when: the requests to the model and the commands.
    pub stretches: Vec<Stretch>,
    /// The move to another store, where there was one.
    pub evacuation: Option<Evacuation>,
}

/// How a move to another store went.
#[derive(Clone, Copy, Debug)]
pub struct Evacuation {
    /// From the notice until nothing that is needed is left behind.
    pub left: Duration,
    /// From the notice until the sandbox runs again.
    pub whole: Duration,
    /// How much had to be sent.
    pub bytes: u64,
}

/// A time in which one thing was done.
#[derive(Clone, Debug)]
pub struct Stretch {
    /// `model` or `commands`.
    pub what: &'static str,
    /// When it began.
    pub start: SystemTime,
    /// How long it took.
    pub took: Duration,
}

/// A command that takes longer is ended. What a session's commands wait for may be gone for good, where less than all of
/// it came back.
const LIMIT: Duration = Duration::from_secs(60);

impl Runner {
    /// A runner of a session whose start state is not at hand, on a [stand-in](crate::stand_in) for it.
    #[must_use]
    pub fn on_stand_in(session: Arc<Session>, program: &Path) -> Self {
        let commands = ExecOptions {
            cwd: session.cwd.clone().into(),
            timeout: Some(Duration::from_secs(20)),
            env: environment(),
            ..ExecOptions::default()
        };
        Self { start: stand_in(&session), commands, ..Self::new(session, program) }
    }

    /// A runner of this session with this program, that prints nothing.
    #[must_use]
    pub fn new(session: Arc<Session>, program: &Path) -> Self {
        Self {
            session,
            program: program.to_owned(),
            scale: 0.0,
            command_times: Vec::new(),
            start: Vec::new(),
            commands: ExecOptions { timeout: Some(LIMIT), ..ExecOptions::default() },
            saving: Saving::default(),
            spans: None,
            progress: Box::new(|_| {}),
        }
    }

    /// Works through the session without a fault and without Crab: what every other run is compared with.
    ///
    /// # Errors
    /// Where a part of the machinery fails. Nothing is left behind, also when the future is dropped.
    pub async fn truth(&self, name: &str) -> Result<Outcome> {
        Run::alone(self, name, None, None).await?.work().await
    }

    /// Works through the session with a way to recover and, where one is given, a crash.
    ///
    /// # Errors
    /// As [`truth`](Self::truth), and where Crab could not recover.
    pub async fn run(&self, name: &str, recovery: Recovery, crash: Option<Crash>) -> Result<Outcome> {
        Run::alone(self, name, Some(recovery), crash).await?.work().await
    }

    /// Works through the session with Crab; in the turn after this response, counted from 0, the agent takes back its
    /// last `turns` turns and does them again.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub async fn take_back(&self, name: &str, response: usize, turns: u64) -> Result<Outcome> {
        let mut run = Run::alone(self, name, Some(Recovery::Crab), None).await?;
        let begun = Instant::now();
        run.go_on(Some(response)).await?;
        let now = run.agent.responses() as u64;
        run.bring_back(Some(now.saturating_sub(turns).max(1))).await?;
        run.go_on(None).await?;
        run.outcome.took = begun.elapsed();
        run.finish().await
    }

    /// Works through the session with Crab; in the turn after this response, counted from 0, notice comes that the host
    /// goes: what is stored is sent to another store, and sandbox and service go on from there.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub async fn evacuate(&self, name: &str, response: usize) -> Result<Outcome> {
        let mut run = Run::alone(self, name, Some(Recovery::Crab), None).await?;
        let begun = Instant::now();
        run.go_on(Some(response)).await?;
        run.leave().await?;
        run.go_on(None).await?;
        run.outcome.took = begun.elapsed();
        run.finish().await
    }

    /// Works through the session with Crab; in the turn after this response, counted from 0, `branches` more sandboxes
    /// are made of its newest version, and all go on to the end at once. The first outcome is the trunk's.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub async fn branch(&self, name: &str, response: usize, branches: usize) -> Result<Vec<Outcome>> {
        let mut trunk = Run::alone(self, name, Some(Recovery::Crab), None).await?;
        trunk.go_on(Some(response)).await?;
        let mut runs = Vec::new();
        for number in 1..=branches {
            runs.push(trunk.fork(&format!("{name}-branch{number}")).await?);
        }
        // The response is asked for once more, and is the same.
        trunk.agent.ask_again();
        runs.insert(0, trunk);
        let ends = runs.into_iter().map(|mut run| async move {
            let begun = Instant::now();
            run.go_on(None).await?;
            run.outcome.took = begun.elapsed();
            Ok::<_, Error>(run)
        });
        let mut outcomes = Vec::new();
        // The service ends with the last of them.
        for run in futures_util::future::try_join_all(ends).await? {
            outcomes.push(run.finish().await?);
        }
        Ok(outcomes)
    }
}

/// What a run shares with others, or has alone.
pub(crate) struct Place {
    pub(crate) service: Option<Arc<Service>>,
    pub(crate) model: Arc<ModelServer>,
    pub(crate) area: Arc<ScratchArea>,
}

pub(crate) struct Run<'a> {
    runner: &'a Runner,
    id: SandboxId,
    recovery: Option<Recovery>,
    // Dropped in this order: whoever acts on the sandbox, the sandbox, its files.
    killer: Option<Killer>,
    service: Option<Arc<Service>>,
    sandbox: Arc<Sandbox>,
    area: Arc<ScratchArea>,
    agent: Agent,
    model: Arc<ModelServer>,
    /// The crash that is still to come.
    armed: Option<Crash>,
    outcome: Outcome,
}

/// Kills at its moment, while the run goes on.
struct Killer {
    task: JoinHandle<()>,
    /// It waits for a checkpoint, perhaps for many turns.
    patient: bool,
}

impl Drop for Killer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// Calls that run one after the other, the path that they act on, and their places among all calls of the response.
type Row = (Option<Value>, Vec<(usize, Asked)>);

/// The name of a run's sandbox: it tells which process made it.
pub(crate) fn sandbox_id(name: &str) -> Result<SandboxId> {
    format!("{name}-{}", std::process::id()).parse()
}

impl Runner {
    /// What Crab is told when it begins to look after sandboxes in an area.
    pub(crate) fn config(&self, recovery: Recovery, directory: &Path, model: &ModelServer) -> ServiceConfig {
        ServiceConfig {
            sandboxes: Vec::new(),
            directory: directory.join("crab"),
            versions: directory.join("versions"),
            upstream: format!("http://{}", model.address()),
            listen: ([127, 0, 0, 1], 0).into(),
            processes: recovery == Recovery::Crab,
            saving: self.saving,
            spans: self.spans.clone(),
        }
    }
}

impl Recovery {
    pub(crate) fn needs_crab(self) -> bool {
        matches!(self, Self::Crab | Self::ChatAndFiles)
    }
}

impl<'a> Run<'a> {
    /// With a host of its own.
    async fn alone(runner: &'a Runner, name: &str, recovery: Option<Recovery>, crash: Option<Crash>) -> Result<Self> {
        let model = Arc::new(ModelServer::start(Arc::clone(&runner.session), runner.scale).await?);
        let area = Arc::new(ScratchArea::new(name)?);
        let mut run = Self::new(runner, name, recovery, Place { service: None, model, area }).await?;
        if let Some(recovery) = recovery.filter(|recovery| recovery.needs_crab()) {
            let mut config = runner.config(recovery, run.area.path(), &run.model);
            config.sandboxes.push(run.id.clone());
            run.looked_after_by(Arc::new(Service::start(&runner.program, config).await?));
        }
        run.armed = crash;
        Ok(run)
    }

    /// A sandbox in which the session can begin.
    pub(crate) async fn new(runner: &'a Runner, name: &str, recovery: Option<Recovery>, place: Place) -> Result<Self> {
        let id = sandbox_id(name)?;
        let root = place.area.path().join(format!("root-{name}"));
        snapshot_root(&root)?;
        let sandbox = Arc::new(Sandbox::launch(Config::new(id.clone(), root))?);
        let agent = Agent::new(place.model.address(), "/v1/messages", &runner.session.task);
        let mut run = Self {
            agent: agent.of_model(&runner.session.name),
            runner,
            id,
            recovery,
            killer: None,
            service: None,
            sandbox,
            area: place.area,
            model: place.model,
            armed: None,
            outcome: Outcome::default(),
        };
        run.prepare().await?;
        if let Some(service) = place.service {
            service.attach(&run.id).await?;
            run.looked_after_by(service);
        }
        Ok(run)
    }

    fn looked_after_by(&mut self, service: Arc<Service>) {
        self.outcome.bpf = service.bpf();
        self.agent.post_to(service.address(), &format!("/sandbox/{}/v1/messages", self.id));
        self.service = Some(service);
    }

    /// Another run, of a sandbox that is made of this one's newest version.
    async fn fork(&mut self, name: &str) -> Result<Self> {
        let Some(service) = self.service.clone() else {
            return Err(Error::new(ErrorKind::InvalidInput, "nothing was saved to branch from"));
        };
        let id = sandbox_id(name)?;
        let root = self.area.path().join(format!("root-{name}"));
        let sandbox = Arc::new(Sandbox::prepare(Config::new(id.clone(), root))?);
        let restored = service.fork(&self.id, None, &id).await?;
        let mut branch = Self {
            runner: self.runner,
            id,
            recovery: self.recovery,
            killer: None,
            service: None,
            sandbox,
            area: Arc::clone(&self.area),
            agent: self.agent.clone(),
            model: Arc::clone(&self.model),
            armed: None,
            outcome: Outcome::default(),
        };
        branch.looked_after_by(service);
        branch.rewind(restored)?;
        Ok(branch)
    }

    /// Sends all that is stored elsewhere, ends everything here, and goes on there.
    async fn leave(&mut self) -> Result<()> {
        let Some(service) = self.service.clone() else {
            return Err(Error::new(ErrorKind::InvalidInput, "nothing was saved to take along"));
        };
        let notice = Instant::now();
        let (there, parcel) = (self.area.path().join("there"), self.area.path().join("parcel"));
        service.export(&self.id, &parcel).await?;
        let mut told = service.stop().await?;
        let bytes = size(&parcel)?;
        // The host is gone, with all that was on it.
        self.sandbox.kill()?;
        delete_root(&self.sandbox.root())?;
        let left = notice.elapsed();
        std::fs::create_dir_all(&there).map_err(|e| Error::io(format!("make {}", there.display()), e))?;
        let config = self.runner.config(Recovery::Crab, &there, &self.model);
        let service = Arc::new(Service::start(&self.runner.program, config).await?);
        service.import(&self.id, &parcel).await?;
        self.looked_after_by(service);
        self.bring_back(None).await?;
        self.outcome.evacuation = Some(Evacuation { left, whole: notice.elapsed(), bytes });
        self.outcome.told = told.remove(&self.id).unwrap_or_default();
        Ok(())
    }

    /// Makes a fresh root what the session starts from.
    async fn prepare(&mut self) -> Result<()> {
        for command in &self.runner.start {
            let options = ExecOptions { cwd: "/".into(), ..self.runner.commands.clone() };
            if self.exec(command.clone(), options).await?.is_none() {
                return Err(Error::new(ErrorKind::Io, "the sandbox ended while it was prepared"));
            }
        }
        Ok(())
    }

    async fn work(self) -> Result<Outcome> {
        self.work_through().await?.finish().await
    }

    /// Works through the whole session.
    pub(crate) async fn work_through(mut self) -> Result<Self> {
        let begun = Instant::now();
        self.go_on(None).await?;
        self.outcome.took = begun.elapsed();
        Ok(self)
    }

    /// Works until the model has given this response, counted from 0, whose calls are not begun; or to the end.
    async fn go_on(&mut self, until: Option<usize>) -> Result<()> {
        loop {
            (self.runner.progress)(&Progress::Responses(self.agent.responses()));
            let results = match self.ask().await? {
                None => None,
                // It died after its last command, and nobody has asked it for anything since.
                Some(asked) if asked.is_empty() && self.killer.is_none() && self.is_dead() => None,
                Some(asked) if asked.is_empty() && self.killer.is_none() => return Ok(()),
                // The checkpoint in which the crash was to come did not come: it comes at the end.
                Some(asked) if asked.is_empty() => {
                    self.killer = None;
                    kill_sandbox(self.sandbox.cgroup());
                    self.note_crash();
                    None
                }
                Some(_) if until.is_some_and(|until| self.agent.responses() > until) => return Ok(()),
                Some(asked) => self.perform(asked).await?,
            };
            match results {
                Some(results) => self.agent.give(results),
                None => self.recover().await?,
            }
        }
    }

    /// Asks the model until it answers. `None` where the sandbox is dead.
    async fn ask(&mut self) -> Result<Option<Vec<Asked>>> {
        if let Some(crash) = self.due(|moment| moment.is_while_asking()) {
            self.kill_later(crash);
        }
        let mut attempts = 0;
        loop {
            let start = SystemTime::now();
            let answer = self.agent.ask().await;
            self.note("model", start);
            self.await_killer().await;
            let error = match answer {
                Ok(asked) => return Ok(Some(asked)),
                Err(error) => error,
            };
            if let Some(service) = &self.service
                && service.revive().await?
            {
                self.outcome.restarts += 1;
                (self.runner.progress)(&Progress::CrabRestarted);
            }
            if self.is_dead() {
                return Ok(None);
            }
            attempts += 1;
            if attempts > 100 {
                return Err(error);
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    }

    /// Runs the calls. `None` where the sandbox is dead.
    async fn perform(&mut self, asked: Vec<Asked>) -> Result<Option<Vec<(String, String)>>> {
        let response = self.agent.responses().saturating_sub(1);
        let crash = self.due(|moment| !moment.is_while_asking());
        let mut killing = None;
        if let Some(crash) = crash.filter(|crash| crash.moment == Moment::Command) {
            let usual = self.runner.command_times.get(response).copied().unwrap_or(Duration::from_millis(100));
            let (delay, cgroup) = (crash.delay(usual), self.sandbox.cgroup().to_owned());
            killing = Some(tokio::spawn(async move {
                tokio::time::sleep(delay).await;
                kill_sandbox(&cgroup);
            }));
        }
        let begun = SystemTime::now();
        let results = self.run_calls(asked).await?;
        let took = self.note("commands", begun);
        if let Some(killing) = killing {
            let _ = killing.await;
            self.note_crash();
            return Ok(None);
        }
        self.outcome.command_times.resize(self.outcome.command_times.len().max(response + 1), Duration::ZERO);
        self.outcome.command_times[response] = took;
        if crash.is_some() && results.is_some() {
            kill_sandbox(self.sandbox.cgroup());
            self.note_crash();
        }
        Ok(results)
    }

    /// The results of a response's calls; `None` where the sandbox is dead.
    async fn run_calls(&self, asked: Vec<Asked>) -> Result<Option<Vec<(String, String)>>> {
        let response = self.agent.responses().saturating_sub(1);
        let parallel = self.runner.session.responses.get(response).is_some_and(|response| response.parallel);
        // Calls that run at once; those of one path one after the other, as an agent's tools see to.
        let mut rows: Vec<Row> = Vec::new();
        for (at, asked) in asked.into_iter().enumerate() {
            let path = asked.call.input.get("path").cloned();
            let row = match parallel {
                true => rows.iter_mut().find(|(known, _)| path.is_some() && *known == path),
                false => rows.first_mut(),
            };
            match row {
                Some((_, row)) => row.push((at, asked)),
                None => rows.push((path, vec![(at, asked)])),
            }
        }
        let rows = rows.into_iter().map(|(_, row)| async {
            let mut results = Vec::new();
            for (at, asked) in row {
                match self.exec(asked.call.shell(), self.runner.commands.clone()).await? {
                    Some(text) => results.push((at, (asked.id, text))),
                    None => return Ok(None),
                }
            }
            Ok::<_, Error>(Some(results))
        });
        let rows: Option<Vec<_>> = futures_util::future::try_join_all(rows).await?.into_iter().collect();
        Ok(rows.map(|rows| {
            let mut results: Vec<_> = rows.into_iter().flatten().collect();
            results.sort_by_key(|(at, _)| *at);
            results.into_iter().map(|(_, result)| result).collect()
        }))
    }

    /// Brings the sandbox back and the agent to where the sandbox is.
    async fn recover(&mut self) -> Result<()> {
        if self.service.is_none() {
            self.sandbox.kill()?;
            delete_root(&self.sandbox.root())?;
            snapshot_root(&self.sandbox.root())?;
            self.sandbox.relaunch()?;
            match self.recovery {
                Some(Recovery::Restart) => self.agent.rewind(0),
                _ => self.agent.ask_again(),
            }
            self.prepare().await?;
            (self.runner.progress)(&Progress::Recovered);
            return Ok(());
        }
        self.bring_back(None).await
    }

    /// Has Crab restore the sandbox to the version that covers a turn, or to the newest.
    async fn bring_back(&mut self, turn: Option<u64>) -> Result<()> {
        let Some(service) = self.service.clone() else {
            return Err(Error::new(ErrorKind::InvalidInput, "nothing was saved to restore"));
        };
        // Takes the exit status of a dead init that this process launched; nobody else can.
        self.sandbox.kill()?;
        let operation = format!("recovery-{}", self.outcome.restores.len() + 1).parse()?;
        let restored = loop {
            match service.restore(&self.id, &operation, turn).await {
                Ok(restored) => break restored,
                Err(_) if service.has_ended() => {
                    self.outcome.restarts += usize::from(service.revive().await?);
                }
                Err(error) => return Err(error),
            }
        };
        self.rewind(restored)?;
        (self.runner.progress)(&Progress::Recovered);
        Ok(())
    }

    /// Takes the agent to where its sandbox is.
    fn rewind(&mut self, restored: Restored) -> Result<()> {
        let known = restored.conversation.is_some_and(|boundary| self.agent.rewind_to(&boundary));
        if !known {
            return Err(Error::new(ErrorKind::Internal, "the restored turn's conversation was never the agent's"));
        }
        self.outcome.restores.push(restored);
        Ok(())
    }

    /// Looks at what the run left, and takes it down.
    pub(crate) async fn finish(mut self) -> Result<Outcome> {
        let mut probes = Vec::new();
        let judge = self.runner.session.judge.clone();
        for probe in &judge.probes {
            let options = self.runner.commands.clone();
            let answer = self.exec(probe.clone(), options).await?.unwrap_or_else(|| "(the sandbox is dead)".to_owned());
            probes.push((probe.clone(), judge.comparable(&answer)));
        }
        if let Some(service) = self.service.take() {
            let told = service.release(&self.id).await?;
            self.outcome.told.covered.extend(told.covered);
            self.outcome.told.uncovered.extend(told.uncovered);
            // The last to leave ends it.
            if let Some(service) = Arc::into_inner(service) {
                service.stop().await?;
            }
        }
        self.sandbox.kill()?;
        let (root, messages) = (self.sandbox.root(), self.agent.messages());
        let conversation = messages.iter().map(|message| judge.comparable_message(message)).collect();
        let tree = tokio::task::spawn_blocking(move || describe_tree(&root, &judge))
            .await
            .map_err(|e| Error::new(ErrorKind::Internal, "the judge broke off").caused_by(e))??;
        self.outcome.end = EndState { tree, probes, conversation };
        Ok(std::mem::take(&mut self.outcome))
    }

    /// The armed crash, if this is its turn and its moment is of the wanted kind.
    fn due(&mut self, wanted: impl Fn(Moment) -> bool) -> Option<Crash> {
        let response = self.agent.responses().checked_sub(1)?;
        self.armed.take_if(|crash| crash.response == response && wanted(crash.moment))
    }

    /// Kills at the crash's moment, while the model is asked.
    fn kill_later(&mut self, crash: Crash) {
        let coming = self.runner.session.responses.get(self.agent.responses());
        let usual = coming.map_or(Duration::ZERO, |response| response.delay.mul_f64(self.runner.scale));
        // A model without delays still takes some time.
        let delay = crash.delay(usual.max(Duration::from_millis(30)));
        let cgroup = self.sandbox.cgroup().to_owned();
        let crab = self.service.as_ref().and_then(|service| service.pid()).filter(|_| crash.moment.ends_crab());
        let patient = crash.moment == Moment::Checkpoint;
        let task = tokio::spawn(async move {
            match patient {
                true => until_frozen(&cgroup).await,
                false => tokio::time::sleep(delay).await,
            }
            if let Some(crab) = crab {
                kill_process(crab);
            }
            if crash.moment.ends_sandbox() {
                kill_sandbox(&cgroup);
            }
        });
        self.killer = Some(Killer { task, patient });
    }

    /// Waits for a crash that comes in this turn for certain.
    async fn await_killer(&mut self) {
        if let Some(mut killer) = self.killer.take_if(|killer| !killer.patient || killer.task.is_finished()) {
            let _ = (&mut killer.task).await;
            self.note_crash();
        }
    }

    /// Notes what was done from then until now.
    fn note(&mut self, what: &'static str, start: SystemTime) -> Duration {
        let took = start.elapsed().unwrap_or_default();
        self.outcome.stretches.push(Stretch { what, start, took });
        took
    }

    fn note_crash(&mut self) {
        self.outcome.crashed = true;
        (self.runner.progress)(&Progress::Crashed);
    }

    /// Whether the sandbox is dead, or about to be.
    async fn dies(&self) -> bool {
        for _ in 0..20 {
            if self.is_dead() {
                return true;
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        false
    }

    fn is_dead(&self) -> bool {
        self.sandbox.condition().is_ok_and(|condition| condition == Condition::Stopped)
    }

    /// Runs a command; `None` where the whole sandbox ended.
    async fn exec(&self, command: String, options: ExecOptions) -> Result<Option<String>> {
        let sandbox = Arc::clone(&self.sandbox);
        let output = tokio::task::spawn_blocking(move || sandbox.exec_with(&command, &options))
            .await
            .map_err(|e| Error::new(ErrorKind::Internal, "a command's runner broke off").caused_by(e))?;
        match output {
            Ok(output) if output.timed_out => Ok(Some("(the time was up)".to_owned())),
            Ok(output) if output.code.is_some() => Ok(Some(output.text())),
            // A signal ended it: alone, or with all others.
            Ok(output) => Ok((!self.dies().await).then(|| output.text())),
            Err(error) if error.sandbox_condition() == Some(Condition::Stopped) => Ok(None),
            Err(_) if self.is_dead() => Ok(None),
            Err(error) => Err(error),
        }
    }
}

/// The size of all files below a directory.
fn size(directory: &Path) -> Result<u64> {
    let io = |e| Error::io(format!("read {}", directory.display()), e);
    let mut bytes = 0;
    for entry in std::fs::read_dir(directory).map_err(io)? {
        let entry = entry.map_err(io)?;
        let metadata = entry.metadata().map_err(io)?;
        bytes += if metadata.is_dir() { size(&entry.path())? } else { metadata.len() };
    }
    Ok(bytes)
}

fn kill_sandbox(cgroup: &Path) {
    // A sandbox without a cgroup is dead already.
    let _ = std::fs::write(cgroup.join("cgroup.kill"), "1");
}

fn kill_process(pid: u32) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(rustix::process::Pid::from_raw) {
        // Our child, and nobody has waited for it: the pid is still its own.
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
    }
}

async fn until_frozen(cgroup: &Path) {
    loop {
        let events = std::fs::read_to_string(cgroup.join("cgroup.events")).unwrap_or_default();
        if events.lines().any(|line| line == "frozen 1") {
            return;
        }
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
