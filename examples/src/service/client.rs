//! A service, seen from the process that started it.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crab_core::{Error, ErrorKind, OperationId, Result, SandboxId};
use parking_lot::Mutex;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::process::{Child, ChildStdin, ChildStdout};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;

use super::{Answer, Message, Numbered, Order, Restored, ServiceConfig, Told};

/// A service that runs, or that was killed and is to run again. Dropping it kills it.
pub struct Service {
    program: PathBuf,
    config: Mutex<ServiceConfig>,
    bpf: bool,
    told: Arc<Mutex<HashMap<SandboxId, Told>>>,
    next: AtomicU64,
    life: Mutex<Life>,
    /// Held while it is started again, so that only one does it.
    reviving: tokio::sync::Mutex<()>,
}

/// One process of the service.
struct Life {
    child: Child,
    orders: Option<mpsc::UnboundedSender<Vec<u8>>>,
    waiting: Arc<Mutex<Waiting>>,
    reader: Option<JoinHandle<()>>,
}

/// Orders that wait for their answers. `None` when nobody will answer any more.
type Waiting = Option<HashMap<u64, oneshot::Sender<std::result::Result<Answer, String>>>>;

impl Service {
    /// Starts `program serve CONFIG`, which must call [`serve`](super::serve), and waits until it is ready.
    ///
    /// # Errors
    /// Where it does not start; it has said why on standard error.
    pub async fn start(program: &Path, mut config: ServiceConfig) -> Result<Self> {
        let told = Arc::default();
        let (life, address, bpf) = launch(program, &config, &told).await?;
        // Whoever restarts it finds the same port, so that the agents do.
        config.listen = address;
        Ok(Self {
            program: program.to_owned(),
            config: Mutex::new(config),
            bpf,
            told,
            next: AtomicU64::new(1),
            life: Mutex::new(life),
            reviving: tokio::sync::Mutex::default(),
        })
    }

    /// Where the agents post to.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.config.lock().listen
    }

    /// Whether its inspector sees kernel events.
    #[must_use]
    pub fn bpf(&self) -> bool {
        self.bpf
    }

    /// Its process; none when it has ended.
    #[must_use]
    pub fn pid(&self) -> Option<u32> {
        self.life.lock().child.id()
    }

    /// Whether it has ended, by itself or by being killed.
    #[must_use]
    pub fn has_ended(&self) -> bool {
        !matches!(self.life.lock().child.try_wait(), Ok(None))
    }

    /// Starts it again if it has ended. Says whether it had.
    ///
    /// # Errors
    /// As [`start`](Self::start).
    pub async fn revive(&self) -> Result<bool> {
        let _only = self.reviving.lock().await;
        if !self.has_ended() {
            return Ok(false);
        }
        // What it told before its end counts.
        let reader = self.life.lock().reader.take();
        if let Some(reader) = reader {
            let _ = reader.await;
        }
        let config = self.config.lock().clone();
        let (life, ..) = launch(&self.program, &config, &self.told).await?;
        *self.life.lock() = life;
        Ok(true)
    }

    /// Has it look after one more sandbox.
    ///
    /// # Errors
    /// Why it does not.
    pub async fn attach(&self, sandbox: &SandboxId) -> Result<()> {
        self.config.lock().sandboxes.push(sandbox.clone());
        self.order(Order::Attach { sandbox: sandbox.clone() }).await.map(drop)
    }

    /// Has it look after a sandbox no longer. Returns what it told of it in all its lives.
    ///
    /// # Errors
    /// Where it has ended.
    pub async fn release(&self, sandbox: &SandboxId) -> Result<Told> {
        self.order(Order::Release { sandbox: sandbox.clone() }).await?;
        self.config.lock().sandboxes.retain(|id| id != sandbox);
        Ok(self.told.lock().remove(sandbox).unwrap_or_default())
    }

    /// Has a sandbox restored to the version that covers a turn, or to the newest.
    ///
    /// # Errors
    /// Why it was not. Where the service [has ended](Self::has_ended) in between, [revive](Self::revive) it and ask for
    /// the same operation again.
    pub async fn restore(&self, id: &SandboxId, operation: &OperationId, turn: Option<u64>) -> Result<Restored> {
        let order = Order::Restore { sandbox: id.clone(), operation: operation.clone(), turn };
        self.restored(order).await
    }

    /// Has another sandbox made of the version that covers a turn, or of the newest, and looks after it as well.
    ///
    /// # Errors
    /// Why it was not.
    pub async fn fork(&self, from: &SandboxId, turn: Option<u64>, into: &SandboxId) -> Result<Restored> {
        let restored = self.restored(Order::Fork { from: from.clone(), turn, into: into.clone() }).await?;
        self.config.lock().sandboxes.push(into.clone());
        Ok(restored)
    }

    /// Has a sandbox's newest version written to a directory, which is made.
    ///
    /// # Errors
    /// Why it was not.
    pub async fn export(&self, sandbox: &SandboxId, parcel: &Path) -> Result<()> {
        self.order(Order::Export { sandbox: sandbox.clone(), parcel: parcel.to_owned() }).await.map(drop)
    }

    /// Has it take over a sandbox that another service has exported, to restore it next.
    ///
    /// # Errors
    /// Why it does not.
    pub async fn import(&self, sandbox: &SandboxId, parcel: &Path) -> Result<()> {
        self.order(Order::Import { sandbox: sandbox.clone(), parcel: parcel.to_owned() }).await?;
        self.config.lock().sandboxes.push(sandbox.clone());
        Ok(())
    }

    async fn restored(&self, order: Order) -> Result<Restored> {
        match self.order(order).await? {
            Answer::Restored(restored) => Ok(restored),
            Answer::Done => Err(Error::new(ErrorKind::Internal, "the service answered another order")),
        }
    }

    async fn order(&self, order: Order) -> Result<Answer> {
        let ended = || Error::new(ErrorKind::Io, "the service ended before the order was carried out").retry();
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        let mut line = serde_json::to_vec(&Numbered { number, order })
            .map_err(|e| Error::new(ErrorKind::Internal, "cannot write an order as JSON").caused_by(e))?;
        line.push(b'\n');
        let answer = {
            let life = self.life.lock();
            let mut waiting = life.waiting.lock();
            waiting.as_mut().zip(life.orders.as_ref()).map(|(waiting, orders)| {
                let (sender, answer) = oneshot::channel();
                waiting.insert(number, sender);
                // Where it takes no orders any more, its messages end as well, and with them the wait.
                let _ = orders.send(line);
                answer
            })
        };
        let answer = match answer {
            Some(answer) => answer.await.ok(),
            None => None,
        };
        match answer {
            Some(answer) => answer.map_err(|error| Error::new(ErrorKind::Io, error)),
            None => {
                // Its output is closed a moment before it is dead.
                while !self.has_ended() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                Err(ended())
            }
        }
    }

    /// Ends it in order. Returns what it told of each sandbox in all its lives.
    ///
    /// # Errors
    /// Where it ended in error.
    pub async fn stop(&self) -> Result<HashMap<SandboxId, Told>> {
        let reader = {
            let mut life = self.life.lock();
            life.orders = None;
            life.reader.take()
        };
        if let Some(reader) = reader {
            let _ = reader.await;
        }
        let status = loop {
            let status = self.life.lock().child.try_wait().map_err(|e| Error::io("wait for the service", e))?;
            match status {
                Some(status) => break status,
                None => tokio::time::sleep(Duration::from_millis(5)).await,
            }
        };
        match status.success() {
            true => Ok(std::mem::take(&mut *self.told.lock())),
            false => Err(Error::new(ErrorKind::Io, format!("the service ended with {status}"))),
        }
    }
}

type AllTold = Arc<Mutex<HashMap<SandboxId, Told>>>;

async fn launch(program: &Path, config: &ServiceConfig, told: &AllTold) -> Result<(Life, SocketAddr, bool)> {
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
    let stdin = child.stdin.take().ok_or_else(missing)?;
    let stdout = child.stdout.take().ok_or_else(missing)?;
    let (orders, given) = mpsc::unbounded_channel();
    tokio::spawn(write(stdin, given));
    let waiting: Arc<Mutex<Waiting>> = Arc::new(Mutex::new(Some(HashMap::new())));
    let (ready, is_ready) = oneshot::channel();
    // Read as it comes, so that the service never waits for us.
    let reader = tokio::spawn(read(stdout, ready, Arc::clone(told), Arc::clone(&waiting)));
    match is_ready.await {
        Ok((address, bpf)) => Ok((Life { child, orders: Some(orders), waiting, reader: Some(reader) }, address, bpf)),
        Err(_) => Err(Error::new(ErrorKind::Io, "the service did not start; it says why above")),
    }
}

async fn write(mut stdin: ChildStdin, mut orders: mpsc::UnboundedReceiver<Vec<u8>>) {
    while let Some(order) = orders.recv().await {
        if stdin.write_all(&order).await.is_err() {
            return;
        }
    }
}

async fn read(
    stdout: ChildStdout,
    ready: oneshot::Sender<(SocketAddr, bool)>,
    told: AllTold,
    waiting: Arc<Mutex<Waiting>>,
) {
    let mut ready = Some(ready);
    let answer = |number, answer| {
        let sender = waiting.lock().as_mut().and_then(|waiting| waiting.remove(&number));
        if let Some(sender) = sender {
            // Whoever asked may have gone.
            let _ = sender.send(answer);
        }
    };
    let mut lines = BufReader::new(stdout).lines();
    while let Ok(Some(line)) = lines.next_line().await {
        // A line that was torn by the service's end is no message.
        let Ok(message) = serde_json::from_str(&line) else { continue };
        match message {
            Message::Ready { address, bpf } => {
                if let Some(ready) = ready.take() {
                    let _ = ready.send((address, bpf));
                }
            }
            Message::Turn { sandbox, report } => told.lock().entry(sandbox).or_default().covered.push(report),
            Message::Uncovered { sandbox, turn, error } => {
                told.lock().entry(sandbox).or_default().uncovered.push((turn, error));
            }
            Message::Answered { number, answer: given } => answer(number, Ok(given)),
            Message::Failed { number, error } => answer(number, Err(error)),
        }
    }
    // Nobody answers any more.
    *waiting.lock() = None;
}
