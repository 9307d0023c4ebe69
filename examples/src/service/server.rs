//! The service itself.

use std::sync::Arc;
use std::time::{Duration, Instant};

use crab_backend_criu::CriuBackend;
use crab_coordinator::resolve::ByPath;
use crab_coordinator::{AfterRestore, Coordinator, GateRecord, Listen};
use crab_core::{Error, ErrorKind, Result, SandboxHost, SandboxId, StateDelta, TurnNumber};
use crab_engine::policy::{Plan, Policy, View};
use crab_engine::scheduler::Limits;
use crab_engine::{
    Engine, Event, EventKind, Events, ForkOptions, ProcessOutcome, RestoreOptions, RestoreReport, Select,
};
use crab_inspector::{Inspector, PollingInspector, ProcessRule};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::sync::mpsc;

use super::parcel::Parcels;
use super::{Answer, Message, Numbered, Order, Restored, Saving, ServiceConfig, TurnReport, spans};
use crate::sandbox::{ExampleHost, Sandbox, criu_binary, open_files};

/// Where the process images lie, in the service's directory.
const IMAGES: &str = "images";

/// [`Saving::Everything`].
struct Everything;

impl Policy for Everything {
    fn decide(&self, _view: &View<'_>) -> Plan {
        Plan::FULL
    }
}

/// All parts, put together.
struct Crab {
    host: Arc<ExampleHost>,
    parcels: Parcels,
    engine: Engine,
    coordinator: Coordinator,
}

/// Runs the service until its standard input ends.
///
/// # Errors
/// Where a part cannot be had: what to do is said.
pub async fn serve(config: ServiceConfig) -> Result<()> {
    if let Some(path) = &config.spans {
        spans::record(path)?;
    }
    let host = Arc::new(ExampleHost::new());
    let files = open_files(&config.versions)?;
    let (delta, bpf) = delta(config.saving);
    let mut builder = Engine::builder(config.directory.join("store"))
        .filesystem(Arc::clone(&files))
        .host(Arc::clone(&host) as Arc<dyn SandboxHost>)
        .delta(delta);
    // Those that live belong to the host before the engine looks for what a dead one left frozen.
    for id in &config.sandboxes {
        host.keep(Sandbox::attach(id)?);
    }
    if config.processes {
        let images = config.directory.join(IMAGES);
        let processes = CriuBackend::builder().images(images).binary(criu_binary()).open().await?;
        builder = builder.process(Arc::new(processes));
    }
    match config.saving {
        Saving::Everything => builder = builder.policy(Arc::new(Everything)),
        Saving::InOrder => builder = builder.limits(Limits { urgent_burst: 0, ..Limits::default() }),
        Saving::Changed | Saving::Strict | Saving::Touched => {}
    }
    let engine = builder.open().await?;
    let events = engine.events();
    let (coordinator, boundaries) = Coordinator::builder()
        .upstream(&config.upstream)
        .listen(Listen::Tcp(config.listen), ByPath::default())
        .journal(config.directory.join("journal"))
        .start()
        .await?;
    let parcels = Parcels { files, images: config.directory.join(IMAGES) };
    let crab = Arc::new(Crab { host, parcels, engine, coordinator });
    let attached: Vec<_> = config.sandboxes.iter().map(|id| crab.attach(id)).collect();
    futures_util::future::try_join_all(attached).await?;
    let driver = tokio::spawn({
        let engine = crab.engine.clone();
        async move { engine.drive(boundaries).await }
    });
    let address = crab.coordinator.address().ok_or_else(|| Error::new(ErrorKind::Internal, "no address"))?;
    let (answers, answered) = mpsc::unbounded_channel();
    let telling = tokio::spawn(tell_all(Message::Ready { address, bpf }, events, answered));
    let mut orders = BufReader::new(tokio::io::stdin()).lines();
    let mut working = tokio::task::JoinSet::new();
    while let Ok(Some(line)) = orders.next_line().await {
        let Numbered { number, order } = serde_json::from_str(&line)
            .map_err(|e| Error::new(ErrorKind::InvalidInput, "not an order").caused_by(e))?;
        let (crab, answers) = (Arc::clone(&crab), answers.clone());
        working.spawn(async move {
            let message = match crab.carry_out(order).await {
                Ok(answer) => Message::Answered { number, answer },
                Err(error) => Message::Failed { number, error: error.to_string() },
            };
            // Nobody to tell: the service ends.
            let _ = answers.send(message);
        });
        while working.try_join_next().is_some() {}
    }
    while working.join_next().await.is_some() {}
    drop(answers);
    let Some(Crab { engine, coordinator, .. }) = Arc::into_inner(crab) else {
        return Err(Error::new(ErrorKind::Internal, "an order is still being carried out"));
    };
    coordinator.shutdown(Duration::from_secs(1)).await;
    let _ = driver.await;
    engine.close().await;
    drop(engine);
    // It ends when the last event is told, now that the engine is gone.
    let _ = telling.await;
    Ok(())
}

/// The same as a program's whole work, with its configuration as JSON.
///
/// # Errors
/// As [`serve`], and where `config` is no configuration.
pub fn serve_as_program(config: &str) -> Result<()> {
    let config = serde_json::from_str(config)
        .map_err(|e| Error::new(ErrorKind::InvalidInput, "not a service's configuration").caused_by(e))?;
    let runtime = tokio::runtime::Runtime::new().map_err(|e| Error::io("start the runtime", e))?;
    runtime.block_on(serve(config))
}

/// The one with BPF where the kernel allows it.
fn delta(saving: Saving) -> (Arc<dyn StateDelta>, bool) {
    let mut builder = Inspector::builder();
    match saving {
        Saving::Strict => builder = builder.process_rule(ProcessRule::Strict),
        Saving::Touched => builder = builder.limits(0, 0),
        Saving::Changed | Saving::InOrder | Saving::Everything => {}
    }
    match builder.load() {
        Ok(inspector) => (Arc::new(inspector), true),
        Err(error) => {
            eprintln!("without BPF, so with more checkpoints than needed: {error}");
            (Arc::new(PollingInspector::new()), false)
        }
    }
}

impl Crab {
    async fn carry_out(&self, order: Order) -> Result<Answer> {
        match order {
            Order::Attach { sandbox } => {
                self.host.keep(Sandbox::attach(&sandbox)?);
                self.attach(&sandbox).await?;
            }
            Order::Restore { sandbox, operation, turn } => {
                let select = turn.map_or(Select::Latest, |turn| Select::Turn(TurnNumber(turn)));
                let begun = Instant::now();
                let options = RestoreOptions { operation: Some(operation), ..RestoreOptions::default() };
                let report = self.engine.restore(&sandbox, select, options).await?;
                let restored = self.restored(&sandbox, &report, turn, begun);
                self.coordinator.rewind(&sandbox, TurnNumber(restored.turn), AfterRestore::Replay);
                return Ok(Answer::Restored(restored));
            }
            Order::Fork { from, turn, into } => {
                self.host.keep(Sandbox::attach(&into)?);
                let begun = Instant::now();
                let versions = self.engine.versions(&from);
                let covering = versions.iter().rev().find(|version| turn.is_none_or(|turn| version.turn.0 <= turn));
                let version = covering.ok_or_else(|| Error::new(ErrorKind::NotFound, "no version covers that turn"))?;
                let report = self.engine.fork(&from, version.version, &into, ForkOptions::default()).await?;
                self.set_floor(&into);
                return Ok(Answer::Restored(self.restored(&from, &report, turn, begun)));
            }
            Order::Export { sandbox, parcel } => self.parcels.export(&self.engine, &sandbox, &parcel).await?,
            Order::Import { sandbox, parcel } => {
                self.host.keep(Sandbox::attach(&sandbox)?);
                self.parcels.import(&self.engine, &sandbox, &parcel).await?;
                self.set_floor(&sandbox);
            }
            Order::Release { sandbox } => {
                self.engine.detach(&sandbox).await?;
                self.host.forget(&sandbox);
            }
        }
        Ok(Answer::Done)
    }

    async fn attach(&self, id: &SandboxId) -> Result<()> {
        let unfinished = self.engine.opened().unfinished.iter().any(|unfinished| unfinished.sandbox == *id);
        // A sandbox that died while nobody looked after it waits for the order to restore it.
        if self.host.get(id)?.init().is_some() && !unfinished {
            match self.engine.attach(id).await {
                Err(error) if error.kind() != ErrorKind::Died => return Err(error),
                _ => {}
            }
        }
        self.set_floor(id);
        Ok(())
    }

    fn set_floor(&self, id: &SandboxId) {
        if let Some(newest) = self.engine.versions(id).last() {
            self.coordinator.set_floor(id, newest.turn);
        }
    }

    /// Where the agent goes on: turns that changed nothing ride on an older turn's version, and the newest of them, up
    /// to the wanted one, is its place.
    fn restored(&self, id: &SandboxId, report: &RestoreReport, wanted: Option<u64>, begun: Instant) -> Restored {
        let mut covered = self.coordinator.turns(id);
        covered.retain(|turn| wanted.is_none_or(|wanted| turn.number.0 <= wanted));
        let newest = covered.into_iter().rev().find(|turn| turn.gate == GateRecord::Durable(report.version));
        let (turn, conversation) = match newest {
            Some(turn) if turn.number >= report.turn => (turn.number, turn.conversation),
            _ => (report.turn, report.conversation),
        };
        Restored {
            version: report.version.0,
            turn: turn.0,
            conversation,
            processes: matches!(report.process, ProcessOutcome::Restored { .. }),
            took: begun.elapsed(),
        }
    }
}

/// Tells everything, each answer after what happened before it.
async fn tell_all(ready: Message, mut events: Events, mut answers: mpsc::UnboundedReceiver<Message>) -> Result<()> {
    tell(&ready).await?;
    let mut asked = true;
    loop {
        tokio::select! {
            biased;
            event = events.next() => match event {
                Some(Ok(event)) => tell_event(event).await?,
                Some(Err(lagged)) => eprintln!("{} events were lost", lagged.0),
                None => return Ok(()),
            },
            answer = answers.recv(), if asked => match answer {
                Some(answer) => {
                    while let Some(event) = events.try_next() {
                        if let Ok(event) = event {
                            tell_event(event).await?;
                        }
                    }
                    tell(&answer).await?;
                }
                None => asked = false,
            },
        }
    }
}

async fn tell_event(Event { sandbox, kind, .. }: Event) -> Result<()> {
    let report = |turn: TurnNumber, version: crab_core::VersionId, hidden, exposed| TurnReport {
        turn: turn.0,
        version: version.0,
        captured: "skip".to_owned(),
        delta: "nothing".to_owned(),
        hidden,
        exposed,
        frozen: Duration::ZERO,
        bytes: None,
        size: None,
    };
    let message = match kind {
        EventKind::Durable { turn, version, plan, delta, hidden, exposed, frozen, bytes, size } => {
            let report = TurnReport {
                captured: plan.label().to_owned(),
                delta,
                frozen,
                bytes,
                size,
                ..report(turn, version, hidden, exposed)
            };
            Message::Turn { sandbox, report }
        }
        EventKind::Skipped { turn, version, hidden, exposed } => {
            Message::Turn { sandbox, report: report(turn, version, hidden, exposed) }
        }
        EventKind::Failed { turn, error, .. } => Message::Uncovered { sandbox, turn: turn.0, error: error.to_string() },
        _ => return Ok(()),
    };
    tell(&message).await
}

async fn tell(message: &Message) -> Result<()> {
    let mut line = serde_json::to_vec(message)
        .map_err(|e| Error::new(ErrorKind::Internal, "cannot write a message as JSON").caused_by(e))?;
    line.push(b'\n');
    let mut out = tokio::io::stdout();
    let written = async {
        out.write_all(&line).await?;
        out.flush().await
    };
    written.await.map_err(|e| Error::io("tell what happened", e))
}
