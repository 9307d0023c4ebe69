//! The coordinator, as an embedding sees it.

use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use async_trait::async_trait;
use crab_core::{Boundary, Digest, Error, ErrorKind, Result, SandboxId, TurnBoundary, TurnNumber, VersionId};
use parking_lot::Mutex;
use tokio::sync::{Semaphore, mpsc, watch};
use tokio::task::JoinSet;

use crate::admin::{self, Render};
use crate::event::Events;
use crate::journal::{Journal, JournalLimits};
use crate::provider::{self, Provider};
use crate::resolve::SandboxResolver;
use crate::respond::KeepAlive;
use crate::server::{Listen, Listener, Serving, told};
use crate::service::{Limits, Shared};
use crate::turn::Turns;
use crate::turn::driver::Grace;
use crate::turn::gate::GatePolicy;
use crate::turn::ledger::{Answer, Gating};
use crate::upstream::{Upstream, UpstreamOptions};

async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        Err(Error::new(ErrorKind::Internal, "starting the coordinator broke off").caused_by(error))
    })
}

/// Sets a [`Coordinator`] up. Every setting but the upstream and one listener has a default.
pub struct Builder {
    upstream: Option<String>,
    listeners: Vec<(Listen, Arc<dyn SandboxResolver>)>,
    providers: Vec<Arc<dyn Provider>>,
    helpers: Vec<String>,
    journal: Option<(PathBuf, JournalLimits)>,
    policy: GatePolicy,
    keep_alive: KeepAlive,
    grace: Grace,
    limits: Limits,
    window: usize,
    request_buffer: u64,
    upstream_options: UpstreamOptions,
    admin: Option<(Listen, Render)>,
    beyond_loopback: bool,
}

impl Default for Builder {
    fn default() -> Self {
        Self {
            upstream: None,
            listeners: Vec::new(),
            providers: provider::known(),
            helpers: Vec::new(),
            journal: None,
            policy: GatePolicy::default(),
            keep_alive: KeepAlive { after: Duration::from_secs(4), every: Duration::from_secs(4) },
            grace: Grace { abandoned: Duration::ZERO, refused: Duration::from_secs(60) },
            limits: Limits {
                header_timeout: Duration::from_secs(30),
                silence: Duration::from_secs(600),
                request: Duration::from_secs(6 * 3600),
                connections: 4096,
                head_bytes: 256 * 1024,
                body_bytes: 4 << 30,
            },
            window: 256 * 1024,
            request_buffer: 1024 * 1024,
            upstream_options: UpstreamOptions {
                connect_timeout: Duration::from_secs(10),
                answer_timeout: Duration::from_secs(30 * 60),
                extra_roots: Vec::new(),
            },
            admin: None,
            beyond_loopback: false,
        }
    }
}

impl Builder {
    /// The model's server, such as `https://host`, `http://127.0.0.1:8080/base/path`, or `h2c://127.0.0.1:8080` where it
    /// speaks HTTP/2 without TLS. Required.
    #[must_use]
    pub fn upstream(mut self, url: impl Into<String>) -> Self {
        self.upstream = Some(url.into());
        self
    }

    /// Listens here; `resolver` says which sandbox each request comes from. At least one listener is required.
    #[must_use]
    pub fn listen(mut self, listen: Listen, resolver: impl SandboxResolver) -> Self {
        self.listeners.push((listen, Arc::new(resolver)));
        self
    }

    /// Keeps turns and answers in this directory, which is made where it is missing. Without a journal turn numbers
    /// begin anew with each start (see [`Coordinator::set_floor`]), and answers are not given again.
    #[must_use]
    pub fn journal(self, dir: impl Into<PathBuf>) -> Self {
        self.journal_with(dir, JournalLimits::default())
    }

    /// The same with limits.
    #[must_use]
    pub fn journal_with(mut self, dir: impl Into<PathBuf>, limits: JournalLimits) -> Self {
        self.journal = Some((dir.into(), limits));
        self
    }

    /// Knows one more provider, asked before those that come with the crate.
    #[must_use]
    pub fn provider(mut self, provider: impl Provider) -> Self {
        self.providers.insert(0, Arc::new(provider));
        self
    }

    /// Takes requests to these models for helpers and no turns: they pass ungated. Agents ask small models for titles and
    /// summaries, on the same path as their turns. Each `*` in a name stands for any text, as in `*haiku*`.
    /// Default: none.
    #[must_use]
    pub fn helper_models<S: Into<String>>(mut self, names: impl IntoIterator<Item = S>) -> Self {
        self.helpers.extend(names.into_iter().map(Into::into));
        self
    }

    /// What happens to an answer whose version does not become durable in time. The engine's own verdicts are always
    /// obeyed; this bounds how long the coordinator waits for one. Default: strict, ten minutes.
    #[must_use]
    pub fn gate(mut self, policy: GatePolicy) -> Self {
        self.policy = policy;
        self
    }

    /// A streamed answer that is held longer than `after` gets its head and a first sign of life, then one more each
    /// `every`. Default: 4 s both.
    #[must_use]
    pub fn keep_alive(mut self, after: Duration, every: Duration) -> Self {
        self.keep_alive = KeepAlive { after, every };
        self
    }

    /// Goes on receiving an answer for so long after its last client went away, so that the client's next try finds
    /// it. Zero, the default, cancels the request at once; more costs tokens where nobody comes back.
    #[must_use]
    pub fn abandoned_grace(mut self, grace: Duration) -> Self {
        self.grace.abandoned = grace;
        self
    }

    /// Goes on receiving an answer for so long after its gate failed. Default 60 s.
    #[must_use]
    pub fn refused_grace(mut self, grace: Duration) -> Self {
        self.grace.refused = grace;
        self
    }

    /// How many bytes of one answer are kept in memory: while its gate is closed, for slow clients, and for clients
    /// that join. Default 256 KiB. An answer that is longer waits at its server.
    #[must_use]
    pub fn answer_window(mut self, bytes: usize) -> Self {
        self.window = bytes;
        self
    }

    /// How many bytes of one request are read before it is forwarded. Default 1 MiB.
    #[must_use]
    pub fn request_buffer(mut self, bytes: u64) -> Self {
        self.request_buffer = bytes;
        self
    }

    /// How long a connection to the model's server may take. Default 10 s.
    #[must_use]
    pub fn connect_timeout(mut self, timeout: Duration) -> Self {
        self.upstream_options.connect_timeout = timeout;
        self
    }

    /// How long the model's server may take until its answer's head, from the request's beginning. Default 30 minutes.
    #[must_use]
    pub fn answer_timeout(mut self, timeout: Duration) -> Self {
        self.upstream_options.answer_timeout = timeout;
        self
    }

    /// How long either side may be silent within a body, and how long a client may leave what is sent to it untaken.
    /// Default 10 minutes.
    #[must_use]
    pub fn silence_timeout(mut self, timeout: Duration) -> Self {
        self.limits.silence = timeout;
        self
    }

    /// How long a request may take in all, from its head's arrival to its answer's end, the gate's time included.
    /// Default 6 hours.
    #[must_use]
    pub fn request_timeout(mut self, timeout: Duration) -> Self {
        self.limits.request = timeout;
        self
    }

    /// How many bytes a request's head may have, at least 8 KiB. Default 256 KiB, and in HTTP/1.1 at most 100 headers.
    #[must_use]
    pub fn max_head(mut self, bytes: usize) -> Self {
        self.limits.head_bytes = bytes.max(8192);
        self
    }

    /// How many bytes a request's body may have. Default 4 GiB.
    #[must_use]
    pub fn max_body(mut self, bytes: u64) -> Self {
        self.limits.body_bytes = bytes;
        self
    }

    /// Trusts these certificates, in PEM, besides the system's, where the model's server is reached by TLS.
    #[must_use]
    pub fn extra_roots(mut self, pem: impl Into<Vec<u8>>) -> Self {
        self.upstream_options.extra_roots.push(pem.into());
        self
    }

    /// Serves `/healthz`, and with `render` `/metrics`, on a listener of its own. `/healthz` is 200 while turns are
    /// taken, 503 while the coordinator shuts down. `render` gives the metrics' text, such as
    /// `PrometheusHandle::render`; it must not block for long.
    #[must_use]
    pub fn admin(mut self, listen: Listen, render: impl Fn() -> String + Send + Sync + 'static) -> Self {
        self.admin = Some((listen, Arc::new(render)));
        self
    }

    /// How long a client may take to send a request's head. Default 30 s.
    #[must_use]
    pub fn header_timeout(mut self, timeout: Duration) -> Self {
        self.limits.header_timeout = timeout;
        self
    }

    /// How many connections are served at once; more wait. Default 4,096.
    #[must_use]
    pub fn max_connections(mut self, connections: usize) -> Self {
        self.limits.connections = connections.max(1);
        self
    }

    /// Allows listening on addresses that other machines can reach. The coordinator itself does not authenticate.
    #[must_use]
    pub fn beyond_loopback(mut self) -> Self {
        self.beyond_loopback = true;
        self
    }

    /// Opens the journal, listens, and serves from then on, in tasks of the current tokio runtime.
    ///
    /// Opening the journal reads it in the blocking pool. Dropped before it returns, nothing is left.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] for a setting that is missing or wrong; [`ErrorKind::Busy`] where the journal or the
    /// address is in use; errors of the operating system.
    pub async fn start(self) -> Result<(Coordinator, Boundaries)> {
        let missing = |what: &str| {
            Error::new(ErrorKind::InvalidInput, format!("the coordinator has no {what}"))
                .fix(format!("give one with `Builder::{what}`"))
        };
        let url = self.upstream.ok_or_else(|| missing("upstream"))?;
        if self.listeners.is_empty() {
            return Err(missing("listen"));
        }
        let options = self.upstream_options;
        let upstream = blocking(move || Upstream::new(&url, &options)).await?;
        let journal = match self.journal {
            None => None,
            Some((dir, limits)) => Some(blocking(move || Journal::open(&dir, limits)).await?),
        };
        let (sender, receiver) = mpsc::unbounded_channel();
        let (stop, stopped) = watch::channel(false);
        let turns = Arc::new(Turns::new(journal, sender, self.policy, self.window));
        let shared = Arc::new(Shared {
            turns,
            upstream: Arc::new(upstream),
            providers: self.providers,
            helpers: self.helpers,
            keep_alive: self.keep_alive,
            grace: self.grace,
            request_buffer: self.request_buffer,
            draining: AtomicBool::new(false),
            limits: self.limits,
            stopped: stopped.clone(),
        });
        let coordinator = Coordinator {
            shared,
            addresses: Mutex::new(Vec::new()),
            tasks: Mutex::new(JoinSet::new()),
            slots: Arc::new(Semaphore::new(self.limits.connections)),
            limits: self.limits,
            stop,
            stopped,
            beyond_loopback: self.beyond_loopback,
            admin: Mutex::new(None),
        };
        let upstream = Arc::clone(&coordinator.shared.upstream);
        let mut stop = coordinator.stopped.clone();
        coordinator.tasks.lock().spawn(async move {
            tokio::select! {
                () = upstream.tidy() => {}
                () = told(&mut stop) => {}
            }
        });
        for (listen, resolver) in self.listeners {
            coordinator.add(&listen, resolver).await?;
        }
        if let Some((listen, render)) = self.admin {
            let (listener, bound) = Listener::bind(&listen, self.beyond_loopback).await?;
            let admin = admin::serve(listener, Arc::clone(&coordinator.shared), render, coordinator.limits);
            coordinator.tasks.lock().spawn(admin);
            *coordinator.admin.lock() = Some(bound);
        }
        Ok((coordinator, Boundaries(receiver)))
    }
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder")
            .field("upstream", &self.upstream)
            .field("listeners", &self.listeners)
            .field("journal", &self.journal)
            .field("gate", &self.policy)
            .finish_non_exhaustive()
    }
}

/// A running coordinator. Dropping it closes all connections at once; see [`shutdown`](Self::shutdown).
pub struct Coordinator {
    shared: Arc<Shared>,
    addresses: Mutex<Vec<Listen>>,
    tasks: Mutex<JoinSet<()>>,
    slots: Arc<Semaphore>,
    limits: Limits,
    stop: watch::Sender<bool>,
    stopped: watch::Receiver<bool>,
    beyond_loopback: bool,
    admin: Mutex<Option<Listen>>,
}

impl fmt::Debug for Coordinator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Coordinator").field("addresses", &*self.addresses.lock()).finish_non_exhaustive()
    }
}

/// What a restored sandbox's requests get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AfterRestore {
    /// A request that was asked before gets the answer it got then, under a new turn and a new gate. So an agent that
    /// was restored with its memory walks through what it had heard, until its conversation parts from the old one.
    Replay,
    /// Every request goes to the model.
    AskModel,
}

/// What is known of a turn.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TurnRecord {
    /// Which turn.
    pub number: TurnNumber,
    /// The digest of the conversation that its request carried.
    pub conversation: Option<Digest>,
    /// How its gate stands.
    pub gate: GateRecord,
    /// Whether its answer is whole in the journal.
    pub journaled: bool,
    /// Whether a whole answer was handed to a client's connection.
    pub delivered: bool,
}

/// How a turn's gate stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GateRecord {
    /// No verdict yet.
    Closed,
    /// The turn is covered by this version.
    Durable(VersionId),
    /// The answer went out unprotected.
    Unprotected,
    /// The turn could not be covered, and its answer was held back.
    Failed,
}

impl Coordinator {
    /// Sets one up.
    #[must_use]
    pub fn builder() -> Builder {
        Builder::default()
    }

    /// Where it listens, with real ports, in the order in which the listeners were given.
    #[must_use]
    pub fn addresses(&self) -> Vec<Listen> {
        self.addresses.lock().clone()
    }

    /// The first TCP address, where there is one.
    #[must_use]
    pub fn address(&self) -> Option<SocketAddr> {
        self.addresses.lock().iter().find_map(|listen| match listen {
            Listen::Tcp(address) => Some(*address),
            Listen::Unix(_) => None,
        })
    }

    /// Where the admin listener is, where there is one.
    #[must_use]
    pub fn admin_address(&self) -> Option<Listen> {
        self.admin.lock().clone()
    }

    /// Listens at one more place: for example a port of its own for a new sandbox. Returns where.
    ///
    /// # Errors
    /// As for [`Builder::start`].
    pub async fn listen(&self, listen: &Listen, resolver: impl SandboxResolver) -> Result<Listen> {
        self.add(listen, Arc::new(resolver)).await
    }

    async fn add(&self, listen: &Listen, resolver: Arc<dyn SandboxResolver>) -> Result<Listen> {
        let (listener, bound) = Listener::bind(listen, self.beyond_loopback).await?;
        let serving = Serving {
            shared: Arc::clone(&self.shared),
            resolver,
            limits: self.limits,
            slots: Arc::clone(&self.slots),
            stop: self.stopped.clone(),
        };
        self.tasks.lock().spawn(serving.run(listener));
        self.addresses.lock().push(bound.clone());
        tracing::info!(address = %bound, "the coordinator listens");
        Ok(bound)
    }

    /// Sends requests to another server from now on. Those under way are not touched.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where the URL is not one; the old one stays.
    pub fn set_upstream(&self, url: &str) -> Result<()> {
        self.shared.upstream.set(url)
    }

    /// Says that a sandbox was restored to the version of turn `to` (its manifest names the turn). Call it after the
    /// sandbox has been stopped and before it runs again, so that no request falls in between. A later request that
    /// speaks of turns after `to` raises [`Event::Diverged`](crate::Event::Diverged).
    pub fn rewind(&self, sandbox: &SandboxId, to: TurnNumber, then: AfterRestore) {
        self.shared.turns.rewind(sandbox, to, then == AfterRestore::Replay);
    }

    /// What the host should hear of besides turns, from now on.
    #[must_use]
    pub fn events(&self) -> Events {
        Events::new(self.shared.turns.subscribe())
    }

    /// Gives no number up to this one to a turn of the sandbox. A host calls it with the newest turn that its store
    /// knows: after a power failure the journal may have lost the last few.
    pub fn set_floor(&self, sandbox: &SandboxId, turn: TurnNumber) {
        self.shared.turns.set_floor(sandbox, turn);
    }

    /// Forgets the sandbox's turns before this one and removes their answers: for turns whose versions are pruned.
    pub fn forget_before(&self, sandbox: &SandboxId, turn: TurnNumber) {
        self.shared.turns.forget_before(sandbox, turn);
    }

    /// Forgets a sandbox that is gone, with all its turns and answers. Should one of that name come again, its turns
    /// begin at 1.
    pub fn forget(&self, sandbox: &SandboxId) {
        self.shared.turns.forget(sandbox);
    }

    /// What is known of a sandbox's turns, oldest first.
    #[must_use]
    pub fn turns(&self, sandbox: &SandboxId) -> Vec<TurnRecord> {
        let known = self.shared.turns.list(sandbox).into_iter();
        known
            .map(|(number, known)| TurnRecord {
                number,
                conversation: known.conversation,
                gate: match known.gating {
                    Gating::Closed => GateRecord::Closed,
                    Gating::Open(Some(version)) => GateRecord::Durable(version),
                    Gating::Open(None) => GateRecord::Unprotected,
                    Gating::Failed => GateRecord::Failed,
                },
                journaled: known.answer == Answer::Whole,
                delivered: known.delivered,
            })
            .collect()
    }

    /// The newest turn of a sandbox; `None` before its first.
    #[must_use]
    pub fn newest_turn(&self, sandbox: &SandboxId) -> Option<TurnNumber> {
        self.shared.turns.newest(sandbox)
    }

    /// Shuts down: accepts nothing more, refuses new turns in a way that makes clients try again, waits up to
    /// `patience` for the answers that are under way, then closes what is left. [`Boundaries`] ends. When it returns,
    /// the addresses and the journal are free.
    pub async fn shutdown(self, patience: Duration) {
        self.shared.draining.store(true, Ordering::Relaxed);
        self.stop.send_replace(true);
        let mut tasks = std::mem::take(&mut *self.tasks.lock());
        let drained = tokio::time::timeout(patience, async { while tasks.join_next().await.is_some() {} }).await;
        if drained.is_err() {
            tracing::warn!("connections were closed before their answers were over");
        }
        tasks.shutdown().await;
        self.shared.turns.close().shutdown().await;
    }
}

impl Drop for Coordinator {
    fn drop(&mut self) {
        // Dropping them ends them.
        drop(self.shared.turns.close());
    }
}

/// The turn boundaries that the coordinator sees, of all sandboxes; of one sandbox in the order of their numbers.
///
/// They must be taken: a boundary that nobody takes holds its answer until the gate's patience ends. Dropped, all gates
/// fail.
#[derive(Debug)]
pub struct Boundaries(mpsc::UnboundedReceiver<Boundary>);

#[async_trait]
impl TurnBoundary for Boundaries {
    async fn next(&mut self) -> Option<Boundary> {
        self.0.recv().await
    }
}
