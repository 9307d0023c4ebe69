//! Listeners and connections.

use std::convert::Infallible;
use std::fmt;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crab_core::{Error, ErrorKind, Result};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use hyper_util::server::conn::auto;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, UnixListener};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::JoinSet;

use crate::linger::{Returned, linger};
use crate::names;
use crate::patience::Taken;
use crate::resolve::{Peer, SandboxResolver};
use crate::service::{Limits, Shared};

/// Where the coordinator listens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Listen {
    /// A TCP address. Port 0 takes a free port.
    Tcp(SocketAddr),
    /// A unix socket. A socket that nobody listens on any more is replaced; any other file is left alone.
    Unix(PathBuf),
}

impl Listen {
    /// A free port of 127.0.0.1.
    #[must_use]
    pub fn loopback() -> Self {
        Self::Tcp(SocketAddr::from(([127, 0, 0, 1], 0)))
    }
}

impl fmt::Display for Listen {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => write!(f, "{address}"),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

pub(crate) enum Listener {
    Tcp(TcpListener),
    Unix { listener: UnixListener, _file: SocketFile },
}

/// Removes a unix socket when the listener is gone.
pub(crate) struct SocketFile(PathBuf);

impl Drop for SocketFile {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

impl Listener {
    /// Binds, and says where.
    pub(crate) async fn bind(listen: &Listen, beyond_loopback: bool) -> Result<(Self, Listen)> {
        match listen {
            Listen::Tcp(address) => {
                if !address.ip().is_loopback() && !beyond_loopback {
                    return Err(Error::new(
                        ErrorKind::InvalidInput,
                        format!("{address} can be reached from other machines"),
                    )
                    .fix("listen on a loopback address or a unix socket, or allow others with `beyond_loopback`"));
                }
                let error = |error| Error::io(format_args!("listen on {address}"), error);
                let listener = TcpListener::bind(address).await.map_err(error)?;
                let bound = listener.local_addr().map_err(error)?;
                Ok((Self::Tcp(listener), Listen::Tcp(bound)))
            }
            Listen::Unix(path) => {
                let error = |error| Error::io(format_args!("listen on {}", path.display()), error);
                let listener = match UnixListener::bind(path) {
                    Err(in_use) if in_use.kind() == std::io::ErrorKind::AddrInUse => {
                        replace_dead_socket(path)?;
                        UnixListener::bind(path)
                    }
                    bound => bound,
                }
                .map_err(error)?;
                // Who may connect is decided by the directory and by this: the owner.
                std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o600)).map_err(error)?;
                Ok((Self::Unix { listener, _file: SocketFile(path.clone()) }, listen.clone()))
            }
        }
    }
}

fn replace_dead_socket(path: &Path) -> Result<()> {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|file| file.file_type().is_socket());
    if !is_socket || std::os::unix::net::UnixStream::connect(path).is_ok() {
        return Err(Error::new(ErrorKind::Busy, format!("{} is in use", path.display()))
            .fix("choose another path, or stop what listens there"));
    }
    std::fs::remove_file(path).map_err(|error| Error::io(format_args!("replace {}", path.display()), error))
}

/// A listener with all that its connections need.
pub(crate) struct Serving {
    pub(crate) shared: Arc<Shared>,
    pub(crate) resolver: Arc<dyn SandboxResolver>,
    pub(crate) limits: Limits,
    pub(crate) slots: Arc<Semaphore>,
    pub(crate) stop: watch::Receiver<bool>,
}

impl Serving {
    /// Accepts until told to stop, then waits for the connections that are left. Dropped, it closes them.
    pub(crate) async fn run(mut self, listener: Listener) {
        let mut connections = JoinSet::new();
        loop {
            // Connections beyond the limit wait in the kernel's queue.
            let slot = tokio::select! {
                biased;
                () = told(&mut self.stop) => break,
                slot = Arc::clone(&self.slots).acquire_owned() => slot,
            };
            let Ok(slot) = slot else { break };
            let accepted = tokio::select! {
                biased;
                () = told(&mut self.stop) => break,
                accepted = accept(&listener) => accepted,
            };
            while connections.try_join_next().is_some() {}
            match accepted {
                Ok(Accepted::Tcp(stream, peer)) => {
                    let _ = stream.set_nodelay(true);
                    self.spawn(&mut connections, stream, Peer::Ip(peer.ip()), slot);
                }
                Ok(Accepted::Unix(stream)) => {
                    self.spawn(&mut connections, stream, Peer::Unix, slot);
                }
                Err(error) => {
                    // The client is gone already, or this process has no descriptor left: the latter passes when
                    // connections end.
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(20)).await;
                }
            }
        }
        drop(listener);
        while connections.join_next().await.is_some() {}
    }

    fn spawn<S>(&self, connections: &mut JoinSet<()>, stream: S, peer: Peer, slot: OwnedSemaphorePermit)
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let shared = Arc::clone(&self.shared);
        let resolver = Arc::clone(&self.resolver);
        // Until the first request is there it is not even known which protocol the client speaks, and the protocols' own
        // timeouts do not run yet.
        let spoke = Arc::new(Notify::new());
        let first = Arc::clone(&spoke);
        let service = service_fn(move |request| {
            first.notify_one();
            let serving = Arc::clone(&shared).serve(Arc::clone(&resolver), peer, request);
            async move { Ok::<_, Infallible>(serving.await) }
        });
        let limits = self.limits;
        let mut stop = self.stop.clone();
        connections.spawn(async move {
            let _slot = slot;
            let _counted = Counted::new();
            let builder = protocols(&limits);
            let (stream, mut returned) = Returned::new(stream);
            let stream = TokioIo::new(Taken::new(stream, limits.silence));
            {
                let mut connection = std::pin::pin!(builder.serve_connection_with_upgrades(stream, service));
                let silent = async {
                    if tokio::time::timeout(limits.header_timeout, spoke.notified()).await.is_ok() {
                        std::future::pending::<()>().await;
                    }
                };
                let outcome = tokio::select! {
                    outcome = &mut connection => outcome,
                    () = silent => return,
                    () = told(&mut stop) => {
                        connection.as_mut().graceful_shutdown();
                        connection.await
                    }
                };
                if let Err(error) = outcome {
                    tracing::debug!(error, "a connection ended early");
                }
            }
            if let Ok(stream) = returned.try_recv() {
                tokio::select! {
                    () = linger(stream) => {}
                    () = told(&mut stop) => {}
                }
            }
        });
    }
}

/// HTTP/1.1, and HTTP/2 for clients that begin with its preface.
fn protocols(limits: &Limits) -> auto::Builder<TokioExecutor> {
    let mut builder = auto::Builder::new(TokioExecutor::new());
    builder.http1().timer(TokioTimer::new()).header_read_timeout(limits.header_timeout).max_buf_size(limits.head_bytes);
    builder
        .http2()
        .timer(TokioTimer::new())
        .max_header_list_size(u32::try_from(limits.head_bytes).unwrap_or(u32::MAX))
        .max_concurrent_streams(256)
        .keep_alive_interval(Some(Duration::from_secs(30)))
        .keep_alive_timeout(limits.header_timeout);
    builder
}

/// Counts a connection while it lives.
struct Counted;

impl Counted {
    fn new() -> Self {
        metrics::gauge!(names::CONNECTIONS).increment(1.0);
        Self
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        metrics::gauge!(names::CONNECTIONS).decrement(1.0);
    }
}

/// Resolves when told to stop, or when nobody is left who could tell.
pub(crate) async fn told(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|stop| *stop).await;
}

pub(crate) enum Accepted {
    Tcp(tokio::net::TcpStream, SocketAddr),
    Unix(tokio::net::UnixStream),
}

pub(crate) async fn accept(listener: &Listener) -> std::io::Result<Accepted> {
    match listener {
        Listener::Tcp(listener) => {
            let (stream, peer) = listener.accept().await?;
            Ok(Accepted::Tcp(stream, peer))
        }
        Listener::Unix { listener, .. } => Ok(Accepted::Unix(listener.accept().await?.0)),
    }
}
