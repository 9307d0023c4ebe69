//! Connections to a server that speaks HTTP/1.1 without TLS, each driven by whoever uses it.
//!
//! A pool that runs its connections in tasks of their own passes every request, head and piece of a body from task to
//! task. Servers reached in the plain are near, and there that is much of the time a request takes. Here the future that
//! waits for an answer, and after it the answer's body, drive the connection themselves; between two requests nobody
//! does, and a connection is looked at before it is used again.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Request, Response, Uri};
use http_body::{Body, Frame, SizeHint};
use hyper::body::Incoming;
use hyper::client::conn::{TrySendError, http1};
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::net::TcpStream;
use tokio::time::Instant;
use tower_service::Service as _;

use crate::body::BoxError;
use crate::upstream::UpBody;

/// A connection that is not used for so long is closed.
const IDLE: Duration = Duration::from_secs(60);
/// So many unused ones are kept.
const MAX_IDLE: usize = 256;

/// One connection.
#[derive(Debug)]
struct Line {
    to: Authority,
    sender: http1::SendRequest<UpBody>,
    connection: Option<http1::Connection<TokioIo<TcpStream>, UpBody>>,
    /// Since when it is not used, if it is not.
    since: Instant,
}

impl Line {
    /// Does what can be done at once. An error ends the request under way, or else the connection alone.
    fn drive(&mut self, cx: &mut Context<'_>) {
        if let Some(connection) = &mut self.connection
            && let Poll::Ready(ended) = Pin::new(connection).poll(cx)
        {
            self.connection = None;
            if let Err(error) = ended {
                tracing::debug!(%error, "a connection to the model's server ended early");
            }
        }
    }

    /// Whether a request may be sent. Looks at what the server did meanwhile.
    fn is_ready(&mut self) -> bool {
        self.drive(&mut Context::from_waker(Waker::noop()));
        self.connection.is_some() && self.sender.is_ready()
    }

    async fn exchange(
        &mut self,
        request: Request<UpBody>,
    ) -> Result<Response<Incoming>, TrySendError<Request<UpBody>>> {
        let mut answer = std::pin::pin!(self.sender.try_send_request(request));
        std::future::poll_fn(|cx| {
            // What the connection brings is there at once when it was driven.
            if let Some(connection) = &mut self.connection
                && Pin::new(connection).poll(cx).is_ready()
            {
                self.connection = None;
            }
            answer.as_mut().poll(cx)
        })
        .await
    }
}

/// Why there is no answer.
#[derive(Debug)]
pub(crate) enum Unsent {
    /// Nobody is there.
    Unreachable(BoxError),
    /// The connection broke; the request may have arrived.
    Broken(hyper::Error),
}

/// The connections that are not in use, and the way to more.
pub(crate) struct Lines {
    connector: HttpConnector,
    #[expect(clippy::vec_box, reason = "a connection goes from here into bodies and back, and is large")]
    idle: Mutex<Vec<Box<Line>>>,
}

impl std::fmt::Debug for Lines {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Lines").field("idle", &self.idle.lock().len()).finish_non_exhaustive()
    }
}

impl Lines {
    pub(crate) fn new(connector: HttpConnector) -> Arc<Self> {
        Arc::new(Self { connector, idle: Mutex::default() })
    }

    /// Sends a request, in origin form and with its `Host`. It is sent again only where not a byte of it has left.
    /// Dropping the future or the answer's body closes the connection.
    pub(crate) async fn send(
        self: &Arc<Self>,
        to: &Authority,
        mut request: Request<UpBody>,
    ) -> Result<Response<LineBody>, Unsent> {
        loop {
            let (mut line, is_new) = match self.take(to) {
                Some(line) => (line, false),
                None => (self.connect(to).await?, true),
            };
            match line.exchange(request).await {
                Ok(response) => {
                    let home = Some((line, Arc::clone(self)));
                    return Ok(response.map(|incoming| LineBody { incoming, home }.settled()));
                }
                Err(mut error) => match error.take_message() {
                    Some(back) if !is_new => request = back,
                    _ => return Err(Unsent::Broken(error.into_error())),
                },
            }
        }
    }

    fn take(&self, to: &Authority) -> Option<Box<Line>> {
        loop {
            let mut line = self.idle.lock().pop()?;
            // Others belong to a server that requests went to before.
            if line.to == *to && line.is_ready() {
                return Some(line);
            }
        }
    }

    async fn connect(&self, to: &Authority) -> Result<Box<Line>, Unsent> {
        let unreachable = |error: BoxError| Unsent::Unreachable(error);
        let uri = Uri::builder()
            .scheme(Scheme::HTTP)
            .authority(to.clone())
            .path_and_query(PathAndQuery::from_static("/"))
            .build()
            .map_err(|error| unreachable(error.into()))?;
        let stream = self.connector.clone().call(uri).await.map_err(|error| unreachable(error.into()))?;
        let (sender, connection) =
            http1::Builder::new().max_buf_size(64 * 1024).handshake(stream).await.map_err(Unsent::Broken)?;
        Ok(Box::new(Line { to: to.clone(), sender, connection: Some(connection), since: Instant::now() }))
    }

    fn put(&self, mut line: Box<Line>) {
        line.since = Instant::now();
        let mut idle = self.idle.lock();
        if idle.len() < MAX_IDLE {
            idle.push(line);
        }
    }

    /// Closes, again and again, what was not used for long or was closed by the server.
    pub(crate) async fn tidy(&self) {
        loop {
            tokio::time::sleep(IDLE / 4).await;
            self.idle.lock().retain_mut(|line| line.since.elapsed() < IDLE && line.is_ready());
        }
    }
}

/// An answer's body, which drives its connection and gives it back at its end.
pub(crate) struct LineBody {
    incoming: Incoming,
    home: Option<(Box<Line>, Arc<Lines>)>,
}

impl LineBody {
    /// Gives the connection back where the body has ended. One that is still busy with the request is closed.
    fn settled(mut self) -> Self {
        if self.incoming.is_end_stream() {
            self.settle();
        }
        self
    }

    fn settle(&mut self) {
        if let Some((mut line, lines)) = self.home.take()
            && line.is_ready()
        {
            lines.put(line);
        }
    }
}

impl Body for LineBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        // Asking is what lets the connection read on.
        let mut polled = Pin::new(&mut self.incoming).poll_frame(cx);
        if polled.is_pending()
            && let Some((line, ..)) = &mut self.home
        {
            line.drive(cx);
            polled = Pin::new(&mut self.incoming).poll_frame(cx);
        }
        match &polled {
            Poll::Ready(None) => self.settle(),
            Poll::Ready(Some(Ok(_))) if self.incoming.is_end_stream() => self.settle(),
            Poll::Ready(Some(Err(_))) => self.home = None,
            Poll::Ready(Some(Ok(_))) | Poll::Pending => {}
        }
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.incoming.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.incoming.size_hint()
    }
}
