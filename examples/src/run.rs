//! One run of a session: the model, the agent, its sandbox, a way to recover, and a crash on purpose.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crab_core::{Condition, Error, ErrorKind, Result, SandboxId};
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
}

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
            commands: ExecOptions::default(),
            saving: Saving::default(),
            progress: Box::new(|_| {}),
        }
    }

    /// Works through the session without a fault and without Crab: what every other run is compared with.
    ///
    /// # Errors
    /// Where a part of the machinery fails. Nothing is left behind, also when the future is dropped.
    pub async fn truth(&self, name: &str) -> Result<Outcome> {
        Run::new(self, name, None, None).await?.work().await
    }

    /// Works through the session with a way to recover and, where one is given, a crash.
    ///
    /// # Errors
    /// As [`truth`](Self::truth), and where Crab could not recover.
    pub async fn run(&self, name: &str, recovery: Recovery, crash: Option<Crash>) -> Result<Outcome> {
        Run::new(self, name, Some(recovery), crash).await?.work().await
    }
}

struct Run<'a> {
    runner: &'a Runner,
    // Dropped in this order: whoever acts on the sandbox, the sandbox, its files.
    killer: Option<Killer>,
    service: Option<Service>,
    sandbox: Arc<Sandbox>,
    area: ScratchArea,
    agent: Agent,
    model: ModelServer,
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

impl<'a> Run<'a> {
    async fn new(runner: &'a Runner, name: &str, recovery: Option<Recovery>, crash: Option<Crash>) -> Result<Self> {
        let id: SandboxId = format!("{name}-{}", std::process::id()).parse()?;
        let model = ModelServer::start(Arc::clone(&runner.session), runner.scale).await?;
        let area = ScratchArea::new(name)?;
        let root = area.path().join("root");
        snapshot_root(&root)?;
        let sandbox = Arc::new(Sandbox::launch(Config::new(id.clone(), root))?);
        let mut run = Self {
            agent: Agent::new(model.address(), "/v1/messages", &runner.session.task),
            runner,
            killer: None,
            service: None,
            sandbox,
            area,
            model,
            armed: crash,
            outcome: Outcome::default(),
        };
        run.prepare().await?;
        if let Some(recovery @ (Recovery::Crab | Recovery::ChatAndFiles)) = recovery {
            let config = ServiceConfig {
                sandbox: id.clone(),
                directory: run.area.path().join("crab"),
                versions: run.area.path().join("versions"),
                upstream: format!("http://{}", run.model.address()),
                listen: ([127, 0, 0, 1], 0).into(),
                processes: recovery == Recovery::Crab,
                saving: runner.saving,
            };
            let service = Service::start(&runner.program, config).await?;
            run.outcome.bpf = service.bpf();
            run.agent.post_to(service.address(), &format!("/sandbox/{id}/v1/messages"));
            run.service = Some(service);
        }
        Ok(run)
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

    async fn work(mut self) -> Result<Outcome> {
        let begun = Instant::now();
        loop {
            (self.runner.progress)(&Progress::Responses(self.agent.responses()));
            let results = match self.ask().await? {
                None => None,
                Some(asked) if asked.is_empty() && self.killer.is_none() => break,
                // The checkpoint in which the crash was to come did not come: it comes at the end.
                Some(asked) if asked.is_empty() => {
                    self.killer = None;
                    kill_sandbox(self.sandbox.cgroup());
                    self.note_crash();
                    None
                }
                Some(asked) => self.perform(asked).await?,
            };
            match results {
                Some(results) => self.agent.give(results),
                None => self.recover().await?,
            }
        }
        self.outcome.took = begun.elapsed();
        self.finish().await
    }

    /// Asks the model until it answers. `None` where the sandbox is dead.
    async fn ask(&mut self) -> Result<Option<Vec<Asked>>> {
        if let Some(crash) = self.due(|moment| moment.is_while_asking()) {
            self.kill_later(crash);
        }
        let mut attempts = 0;
        loop {
            let answer = self.agent.ask().await;
            self.await_killer().await;
            let error = match answer {
                Ok(asked) => return Ok(Some(asked)),
                Err(error) => error,
            };
            if let Some(service) = &mut self.service
                && service.has_ended()
            {
                service.restart().await?;
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
        let begun = Instant::now();
        let mut results = Some(Vec::with_capacity(asked.len()));
        for asked in asked {
            let Some(given) = &mut results else { break };
            match self.exec(asked.call.shell(), self.runner.commands.clone()).await? {
                Some(text) => given.push((asked.id, text)),
                None => results = None,
            }
        }
        let took = begun.elapsed();
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

    /// Brings the sandbox back and the agent to where the sandbox is.
    async fn recover(&mut self) -> Result<()> {
        let Some(service) = &mut self.service else {
            self.sandbox.kill()?;
            delete_root(&self.sandbox.root())?;
            snapshot_root(&self.sandbox.root())?;
            self.sandbox.relaunch()?;
            self.agent.ask_again();
            self.prepare().await?;
            (self.runner.progress)(&Progress::Recovered);
            return Ok(());
        };
        // Takes the exit status of a dead init that this process launched; nobody else can.
        self.sandbox.kill()?;
        let operation = format!("recovery-{}", self.outcome.restores.len() + 1).parse()?;
        let restored = loop {
            match service.restore(&operation).await {
                Ok(restored) => break restored,
                Err(_) if service.has_ended() => {
                    service.restart().await?;
                    self.outcome.restarts += 1;
                }
                Err(error) => return Err(error),
            }
        };
        let known = restored.conversation.is_some_and(|boundary| self.agent.rewind_to(&boundary));
        if !known {
            return Err(Error::new(ErrorKind::Internal, "the restored turn's conversation was never the agent's"));
        }
        self.outcome.restores.push(restored);
        (self.runner.progress)(&Progress::Recovered);
        Ok(())
    }

    async fn finish(mut self) -> Result<Outcome> {
        let mut probes = Vec::new();
        for probe in &self.runner.session.judge.probes {
            let options = self.runner.commands.clone();
            let answer = self.exec(probe.clone(), options).await?.unwrap_or_else(|| "(the sandbox is dead)".to_owned());
            probes.push((probe.clone(), answer));
        }
        if let Some(service) = self.service.take() {
            self.outcome.told = service.stop().await?;
        }
        self.sandbox.kill()?;
        let (root, ignore) = (self.sandbox.root(), self.runner.session.judge.ignore.clone());
        let tree = tokio::task::spawn_blocking(move || describe_tree(&root, &ignore))
            .await
            .map_err(|e| Error::new(ErrorKind::Internal, "the judge broke off").caused_by(e))??;
        self.outcome.end = EndState { tree, probes, conversation: self.agent.messages().to_vec() };
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
        let crab = self.service.as_ref().and_then(Service::pid).filter(|_| crash.moment.ends_crab());
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

    fn note_crash(&mut self) {
        self.outcome.crashed = true;
        (self.runner.progress)(&Progress::Crashed);
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
            Ok(output) => Ok(output.code.map(|_| output.text())),
            Err(error) if error.sandbox_condition() == Some(Condition::Stopped) => Ok(None),
            Err(_) if self.is_dead() => Ok(None),
            Err(error) => Err(error),
        }
    }
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
