//! Crab as a process of its own: an engine, a coordinator, an inspector and both backends around one sandbox, told what
//! to do by JSON lines on its standard input and telling what happens by JSON lines on its standard output.
//!
//! An orchestrator that embeds Crab writes what [`serve`] does, with its own way of giving orders. It is a process of
//! its own here so that it can be killed on purpose: [`Service`] is its other side, which starts it, and starts it
//! again on the same store, journal and port.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use crab_backend_btrfs::BtrfsBackend;
use crab_backend_criu::CriuBackend;
use crab_coordinator::resolve::ByPath;
use crab_coordinator::{AfterRestore, Coordinator, GateRecord, Listen};
use crab_core::{Digest, Error, ErrorKind, OperationId, Result, SandboxHost, SandboxId, StateDelta, TurnNumber};
use crab_engine::policy::{Plan, Policy, View};
use crab_engine::{Engine, EventKind, ProcessOutcome, RestoreOptions, Select};
use crab_inspector::{Inspector, PollingInspector, ProcessRule};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::sync::mpsc;

use crate::sandbox::{ExampleHost, Sandbox, criu_binary};

/// What a service is to look after.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServiceConfig {
    /// The sandbox. It must have been launched.
    pub sandbox: SandboxId,
    /// Where the store, the process images and the journal lie.
    pub directory: PathBuf,
    /// Where the versions of the files lie: on the btrfs of the sandbox's root.
    pub versions: PathBuf,
    /// The model.
    pub upstream: String,
    /// Where to listen for the agent. Port 0 takes a free one.
    pub listen: SocketAddr,
    /// Whether processes are saved too. Without, a restore brings the files back and starts the sandbox afresh.
    pub processes: bool,
    /// Which turns are saved.
    pub saving: Saving,
}

/// Which turns are saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Saving {
    /// What has changed, as Crab does it.
    #[default]
    Changed,
    /// The same, but processes that ran at all count as changed.
    Strict,
    /// Files and processes at every turn, whatever has changed: what Crab is compared with.
    Everything,
}

/// [`Saving::Everything`].
struct Everything;

impl Policy for Everything {
    fn decide(&self, _view: &View<'_>) -> Plan {
        Plan::FULL
    }
}

/// An order to the service.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "order")]
pub enum Order {
    /// Bring the sandbox back to its newest version.
    Restore {
        /// Names the restore: the same name again finishes one that was cut off.
        operation: OperationId,
    },
}

/// What a turn came to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TurnReport {
    /// The turn.
    pub turn: u64,
    /// The version that covers it.
    pub version: u64,
    /// What was captured for it: `skip`, `fs`, `process` or `full`.
    pub captured: String,
    /// What had changed, in words.
    pub delta: String,
    /// Checkpoint time behind the model's answer.
    pub hidden: Duration,
    /// Checkpoint time in which the agent waited.
    pub exposed: Duration,
    /// For how long the sandbox stood still.
    pub frozen: Duration,
    /// Bytes written, where known.
    pub bytes: Option<u64>,
}

/// What a restore came to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Restored {
    /// The version that is back.
    pub version: u64,
    /// The newest turn that this version covers. The agent goes on from its boundary.
    pub turn: u64,
    /// The digest of the conversation at that boundary.
    pub conversation: Option<Digest>,
    /// Whether the processes run on from where they were saved.
    pub processes: bool,
    /// How long it took.
    pub took: Duration,
}

/// What the service tells.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "message")]
pub enum Message {
    /// It works.
    Ready {
        /// Where the agent posts to.
        address: SocketAddr,
        /// Whether the inspector sees kernel events. Without, it is coarser.
        bpf: bool,
    },
    /// A turn is covered.
    Turn(TurnReport),
    /// A turn is not covered.
    Uncovered {
        /// Which.
        turn: u64,
        /// Why.
        error: String,
    },
    /// A restore has ended.
    Restored(Restored),
    /// An order could not be carried out.
    Failed {
        /// Why.
        error: String,
    },
}

/// Runs the service until its standard input ends.
///
/// # Errors
/// Where a part cannot be had: what to do is said.
pub async fn serve(config: ServiceConfig) -> Result<()> {
    let host = Arc::new(ExampleHost::new());
    let sandbox = host.keep(Sandbox::attach(&config.sandbox)?);
    let (delta, bpf) = delta(config.saving);
    let mut builder = Engine::builder(config.directory.join("store"))
        .filesystem(Arc::new(BtrfsBackend::open(&config.versions)?))
        .host(Arc::clone(&host) as Arc<dyn SandboxHost>)
        .delta(delta);
    if config.processes {
        let images = config.directory.join("images");
        let processes = CriuBackend::builder().images(images).binary(criu_binary()).open().await?;
        builder = builder.process(Arc::new(processes));
    }
    if config.saving == Saving::Everything {
        builder = builder.policy(Arc::new(Everything));
    }
    let engine = builder.open().await?;
    let id = &config.sandbox;
    // A sandbox that died while nobody looked after it waits for the order to restore it.
    if sandbox.init().is_some() && engine.opened().unfinished.is_empty() {
        engine.attach(id).await?;
    }
    let mut events = engine.events();
    let (coordinator, boundaries) = Coordinator::builder()
        .upstream(&config.upstream)
        .listen(Listen::Tcp(config.listen), ByPath::default())
        .journal(config.directory.join("journal"))
        .start()
        .await?;
    if let Some(newest) = engine.versions(id).last() {
        coordinator.set_floor(id, newest.turn);
    }
    let address = coordinator.address().ok_or_else(|| Error::new(ErrorKind::Internal, "no address"))?;
    let driver = tokio::spawn({
        let engine = engine.clone();
        async move { engine.drive(boundaries).await }
    });
    tell(&Message::Ready { address, bpf }).await?;
    let telling = tokio::spawn(async move {
        while let Some(event) = events.next().await {
            if let Ok(event) = event
                && let Some(message) = message(event.kind)
            {
                tell(&message).await?;
            }
        }
        Ok::<_, Error>(())
    });
    let mut orders = BufReader::new(tokio::io::stdin()).lines();
    while let Ok(Some(line)) = orders.next_line().await {
        let answer = match serde_json::from_str(&line) {
            Ok(Order::Restore { operation }) => restore(&engine, &coordinator, id, operation).await,
            Err(error) => Err(Error::new(ErrorKind::InvalidInput, "not an order").caused_by(error)),
        };
        tell(&match answer {
            Ok(restored) => Message::Restored(restored),
            Err(error) => Message::Failed { error: error.to_string() },
        })
        .await?;
    }
    coordinator.shutdown(Duration::from_secs(1)).await;
    let _ = driver.await;
    engine.close().await;
    drop(engine);
    // It ends when the last event is told, now that the engine is gone.
    let _ = telling.await;
    Ok(())
}

/// The one with BPF where the kernel allows it.
fn delta(saving: Saving) -> (Arc<dyn StateDelta>, bool) {
    let rule = match saving {
        Saving::Strict => ProcessRule::Strict,
        Saving::Changed | Saving::Everything => ProcessRule::default(),
    };
    match Inspector::builder().process_rule(rule).load() {
        Ok(inspector) => (Arc::new(inspector), true),
        Err(error) => {
            eprintln!("without BPF, so with more checkpoints than needed: {error}");
            (Arc::new(PollingInspector::new()), false)
        }
    }
}

async fn restore(
    engine: &Engine,
    coordinator: &Coordinator,
    id: &SandboxId,
    operation: OperationId,
) -> Result<Restored> {
    let begun = std::time::Instant::now();
    let options = RestoreOptions { operation: Some(operation), ..RestoreOptions::default() };
    let report = engine.restore(id, Select::Latest, options).await?;
    // Turns that changed nothing ride on an older turn's version; the newest of them is where the agent goes on.
    let covered = coordinator.turns(id).into_iter().rev();
    let newest = covered.into_iter().find(|turn| turn.gate == GateRecord::Durable(report.version));
    let (turn, conversation) = match newest {
        Some(turn) if turn.number >= report.turn => (turn.number, turn.conversation),
        _ => (report.turn, report.conversation),
    };
    coordinator.rewind(id, turn, AfterRestore::Replay);
    Ok(Restored {
        version: report.version.0,
        turn: turn.0,
        conversation,
        processes: matches!(report.process, ProcessOutcome::Restored { .. }),
        took: begun.elapsed(),
    })
}

fn message(event: EventKind) -> Option<Message> {
    let number = |turn: TurnNumber| turn.0;
    Some(match event {
        EventKind::Durable { turn, version, plan, delta, hidden, exposed, frozen, bytes } => {
            Message::Turn(TurnReport {
                turn: number(turn),
                version: version.0,
                captured: plan.label().to_owned(),
                delta,
                hidden,
                exposed,
                frozen,
                bytes,
            })
        }
        EventKind::Skipped { turn, version, hidden, exposed } => Message::Turn(TurnReport {
            turn: number(turn),
            version: version.0,
            captured: "skip".to_owned(),
            delta: "nothing".to_owned(),
            hidden,
            exposed,
            frozen: Duration::ZERO,
            bytes: None,
        }),
        EventKind::Failed { turn, error, .. } => Message::Uncovered { turn: number(turn), error: error.to_string() },
        _ => return None,
    })
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

/// A service that runs, seen from the process that started it. Dropping it kills it.
pub struct Service {
    program: PathBuf,
    config: ServiceConfig,
    running: Running,
    bpf: bool,
    told: Told,
}

/// What a service told of its turns.
#[derive(Clone, Debug, Default)]
pub struct Told {
    /// Turns that are covered by a version.
    pub covered: Vec<TurnReport>,
    /// Turns that are not, and why.
    pub uncovered: Vec<(u64, String)>,
}

struct Running {
    child: Child,
    orders: ChildStdin,
    messages: mpsc::UnboundedReceiver<Message>,
}

impl Service {
    /// Starts `program serve CONFIG`, which must call [`serve`], and waits until it is ready.
    ///
    /// # Errors
    /// Where it does not start; it has said why on standard error.
    pub async fn start(program: &Path, mut config: ServiceConfig) -> Result<Self> {
        let (running, address, bpf) = launch(program, &config).await?;
        // Whoever restarts it finds the same port, so that the agent does.
        config.listen = address;
        Ok(Self { program: program.to_owned(), config, running, bpf, told: Told::default() })
    }

    /// Where the agent posts to.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.config.listen
    }

    /// Whether its inspector sees kernel events.
    #[must_use]
    pub fn bpf(&self) -> bool {
        self.bpf
    }

    /// Its process; none when it has ended.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.running.child.id()
    }

    /// Whether it has ended, by itself or by being killed.
    pub fn has_ended(&mut self) -> bool {
        !matches!(self.running.child.try_wait(), Ok(None))
    }

    /// Starts it again after its end.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub async fn restart(&mut self) -> Result<()> {
        // What it told before its end counts.
        while self.next().await.is_some() {}
        (self.running, ..) = launch(&self.program, &self.config).await?;
        Ok(())
    }

    /// Has the sandbox restored to its newest version.
    ///
    /// # Errors
    /// Why it was not. Where the service [has ended](Self::has_ended) in between, restart it and ask for the same
    /// operation again.
    pub async fn restore(&mut self, operation: &OperationId) -> Result<Restored> {
        let ended = || Error::new(ErrorKind::Io, "the service ended before the restore did").retry();
        let mut order = serde_json::to_vec(&Order::Restore { operation: operation.clone() })
            .map_err(|e| Error::new(ErrorKind::Internal, "cannot write an order as JSON").caused_by(e))?;
        order.push(b'\n');
        // Where it takes no orders any more, its messages end as well.
        let _ = self.running.orders.write_all(&order).await;
        loop {
            match self.next().await {
                Some(Message::Restored(restored)) => return Ok(restored),
                Some(Message::Failed { error }) => return Err(Error::new(ErrorKind::Io, error)),
                Some(_) => {}
                None => {
                    // Its output is closed a moment before it is dead.
                    let _ = self.running.child.wait().await;
                    return Err(ended());
                }
            }
        }
    }

    /// Ends it in order. Returns what it told in all its lives.
    ///
    /// # Errors
    /// Where it ended in error.
    pub async fn stop(mut self) -> Result<Told> {
        let Running { mut child, orders, mut messages } = self.running;
        drop(orders);
        while let Some(message) = messages.recv().await {
            self.told.note(&message);
        }
        let status = child.wait().await.map_err(|e| Error::io("wait for the service", e))?;
        match status.success() {
            true => Ok(self.told),
            false => Err(Error::new(ErrorKind::Io, format!("the service ended with {status}"))),
        }
    }

    /// The next message; `None` when it has ended.
    async fn next(&mut self) -> Option<Message> {
        let message = self.running.messages.recv().await?;
        self.told.note(&message);
        Some(message)
    }
}

impl Told {
    fn note(&mut self, message: &Message) {
        match message {
            Message::Turn(turn) => self.covered.push(turn.clone()),
            Message::Uncovered { turn, error } => self.uncovered.push((*turn, error.clone())),
            _ => {}
        }
    }
}

async fn launch(program: &Path, config: &ServiceConfig) -> Result<(Running, SocketAddr, bool)> {
    let cannot = |e| Error::io(format!("start {}", program.display()), e);
    let text = serde_json::to_string(config)
        .map_err(|e| Error::new(ErrorKind::Internal, "cannot write a configuration as JSON").caused_by(e))?;
    let mut child = tokio::process::Command::new(program)
        .args(["serve", &text])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .map_err(cannot)?;
    let missing = || cannot(std::io::Error::other("a pipe is missing"));
    let orders = child.stdin.take().ok_or_else(missing)?;
    let stdout = child.stdout.take().ok_or_else(missing)?;
    let (sender, mut messages) = mpsc::unbounded_channel();
    // Read as it comes, so that the service never waits for us.
    tokio::spawn(read(stdout, sender));
    match messages.recv().await {
        Some(Message::Ready { address, bpf }) => Ok((Running { child, orders, messages }, address, bpf)),
        _ => Err(Error::new(ErrorKind::Io, "the service did not start; it says why above")),
    }
}

async fn read(stdout: ChildStdout, messages: mpsc::UnboundedSender<Message>) {
    let mut lines = BufReader::new(stdout).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        // A line that was torn by the service's end is no message.
        if let Ok(message) = serde_json::from_str(&line)
            && messages.send(message).is_err()
        {
            return;
        }
    }
}
