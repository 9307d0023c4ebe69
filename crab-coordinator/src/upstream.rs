//! The model's server.

use std::error::Error as StdError;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use crab_core::{Error, ErrorKind, Result};
use http::header::{self, HeaderMap, HeaderValue};
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{Request, Response, Uri, Version};
use http_body::{Body, Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;
use hyper::body::Incoming;
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};
use parking_lot::RwLock;

use crate::body::BoxError;
use crate::headers::strip_hop_by_hop;
use crate::line::{LineBody, Lines, Unsent};
use crate::patience::OutOfBounds;
use crate::provider::{Failure, FailureKind};
use crate::tls;

/// The body of a request on its way to the model.
pub(crate) type UpBody = UnsyncBoxBody<Bytes, BoxError>;

/// The body of the model's answer.
pub(crate) enum DownBody {
    Line(LineBody),
    Pooled(Incoming),
}

impl Body for DownBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        match &mut *self {
            Self::Line(body) => Pin::new(body).poll_frame(cx),
            Self::Pooled(body) => Pin::new(body).poll_frame(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Line(body) => body.is_end_stream(),
            Self::Pooled(body) => body.is_end_stream(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Line(body) => body.size_hint(),
            Self::Pooled(body) => body.size_hint(),
        }
    }
}

/// Where requests go.
#[derive(Debug)]
struct Base {
    scheme: Scheme,
    /// Whether the server is known to speak HTTP/2 without TLS.
    http2: bool,
    authority: Authority,
    /// The same as a header.
    host: HeaderValue,
    /// Without a trailing slash.
    path: String,
}

impl Base {
    fn parse(url: &str) -> Result<Self> {
        let refuse = |why: &str| {
            Error::new(ErrorKind::InvalidInput, format!("the upstream \"{url}\" {why}"))
                .fix("give it as http://host:port, https://host, h2c://host:port or with a path behind")
        };
        let plain = url.strip_prefix("h2c://").map(|rest| format!("http://{rest}"));
        let http2 = plain.is_some();
        let uri: Uri = plain.as_deref().unwrap_or(url).parse().map_err(|_| refuse("is not a URL"))?;
        let parts = uri.into_parts();
        let (Some(scheme), Some(authority)) = (parts.scheme, parts.authority) else {
            return Err(refuse("names no scheme or no host"));
        };
        if scheme != Scheme::HTTP && scheme != Scheme::HTTPS {
            return Err(refuse("has a scheme that is not supported"));
        }
        if authority.as_str().contains('@') {
            return Err(refuse("holds credentials; those belong into the agent's requests"));
        }
        let path_and_query = parts.path_and_query;
        if path_and_query.as_ref().is_some_and(|path| path.query().is_some()) {
            return Err(refuse("holds a query"));
        }
        let path = path_and_query.map_or(String::new(), |path| path.path().trim_end_matches('/').to_owned());
        let host = HeaderValue::from_str(authority.as_str()).map_err(|_| refuse("has a host that is none"))?;
        Ok(Self { scheme, http2, authority, host, path })
    }

    fn path_and_query(&self, request: &Uri) -> Option<PathAndQuery> {
        let path_and_query = request.path_and_query()?;
        if self.path.is_empty() {
            return Some(path_and_query.clone());
        }
        PathAndQuery::try_from(format!("{}{path_and_query}", self.path)).ok()
    }

    fn uri(&self, path_and_query: PathAndQuery) -> Option<Uri> {
        let builder = Uri::builder().scheme(self.scheme.clone()).authority(self.authority.clone());
        builder.path_and_query(path_and_query).build().ok()
    }
}

/// How the model's server is reached.
#[derive(Clone, Debug)]
pub(crate) struct UpstreamOptions {
    pub(crate) connect_timeout: Duration,
    /// How long until an answer's head, from the request's beginning.
    pub(crate) answer_timeout: Duration,
    /// Certificates in PEM that are trusted besides the system's.
    pub(crate) extra_roots: Vec<Vec<u8>>,
}

type Connector = HttpsConnector<HttpConnector>;

/// The model's server, with connections that are kept. A request is sent once: where a connection breaks after any byte
/// of it may have been sent, the agent gets an error and decides itself.
#[derive(Debug)]
pub(crate) struct Upstream {
    /// For servers without TLS.
    lines: Arc<Lines>,
    /// For those with it, which say themselves whether they speak HTTP/2.
    client: Client<Connector, UpBody>,
    /// For servers that speak HTTP/2 without TLS.
    prior: Client<Connector, UpBody>,
    /// HTTP/1.1 alone knows how to change to another protocol.
    upgrading: Client<Connector, UpBody>,
    base: RwLock<Arc<Base>>,
    answer_timeout: Duration,
}

impl Upstream {
    /// Blocks where the upstream is `https`: the system's certificates are read.
    pub(crate) fn new(url: &str, options: &UpstreamOptions) -> Result<Self> {
        let base = Base::parse(url)?;
        let tls = tls::config(&options.extra_roots)?;
        let mut http = HttpConnector::new();
        http.set_nodelay(true);
        http.set_connect_timeout(Some(options.connect_timeout));
        http.set_keepalive(Some(Duration::from_secs(60)));
        let lines = Lines::new(http.clone());
        http.enforce_http(false);
        let connector = |http2: bool| {
            let builder = HttpsConnectorBuilder::new().with_tls_config(tls.clone()).https_or_http();
            if http2 {
                builder.enable_all_versions().wrap_connector(http.clone())
            } else {
                builder.enable_http1().wrap_connector(http.clone())
            }
        };
        let mut builder = Client::builder(TokioExecutor::new());
        builder
            .pool_timer(TokioTimer::new())
            .timer(TokioTimer::new())
            .pool_idle_timeout(Duration::from_secs(60))
            .http1_max_buf_size(64 * 1024)
            .http2_keep_alive_interval(Duration::from_secs(30));
        Ok(Self {
            lines,
            client: builder.build(connector(true)),
            upgrading: builder.build(connector(false)),
            prior: builder.http2_only(true).build(connector(true)),
            base: RwLock::new(Arc::new(base)),
            answer_timeout: options.answer_timeout,
        })
    }

    /// Sends requests elsewhere from now on.
    pub(crate) fn set(&self, url: &str) -> Result<()> {
        *self.base.write() = Arc::new(Base::parse(url)?);
        Ok(())
    }

    /// Closes connections that are of no use any more, as long as it is polled.
    pub(crate) async fn tidy(&self) {
        self.lines.tidy().await;
    }

    /// Sends a request. Dropping the future or the response's body closes the connection or resets the stream, which
    /// cancels the request.
    pub(crate) async fn send(&self, request: Request<UpBody>) -> Result<Response<DownBody>, Failure> {
        self.send_with(request, None).await
    }

    /// Sends a request that asks for another protocol.
    pub(crate) async fn send_with(
        &self,
        request: Request<UpBody>,
        upgrade: Option<HeaderValue>,
    ) -> Result<Response<DownBody>, Failure> {
        let base = Arc::clone(&self.base.read());
        // In place: a future that is handed on is there twice.
        let answer = pin!(self.answer(&base, request, upgrade));
        match tokio::time::timeout(self.answer_timeout, answer).await {
            Ok(answer) => answer,
            Err(_) => Err(Failure::new(
                FailureKind::UpstreamTimedOut,
                format!(
                    "The model's server at {} did not begin to answer within {} s. The request was cancelled. Try again.",
                    base.authority,
                    self.answer_timeout.as_secs_f32()
                ),
            )),
        }
    }

    async fn answer(
        &self,
        base: &Base,
        mut request: Request<UpBody>,
        upgrade: Option<HeaderValue>,
    ) -> Result<Response<DownBody>, Failure> {
        let unusable = || Failure::new(FailureKind::BadRequest, "The request's path cannot be forwarded.");
        let path_and_query = base.path_and_query(request.uri()).ok_or_else(unusable)?;
        *request.version_mut() = Version::HTTP_11;
        prepare(request.headers_mut());
        if base.scheme == Scheme::HTTP && !base.http2 && upgrade.is_none() {
            request.headers_mut().insert(header::HOST, base.host.clone());
            *request.uri_mut() = path_and_query.into();
            let answer = self.lines.send(&base.authority, request).await;
            return answer.map(|response| response.map(DownBody::Line)).map_err(|error| match error {
                Unsent::Unreachable(error) => unreachable(&base.authority, &*error),
                Unsent::Broken(error) => unanswered(&base.authority, &error),
            });
        }
        *request.uri_mut() = base.uri(path_and_query).ok_or_else(unusable)?;
        let client = match upgrade {
            None if base.http2 => &self.prior,
            None => &self.client,
            Some(protocol) => {
                ask_for(request.headers_mut(), protocol);
                &self.upgrading
            }
        };
        let answer = client.request(request).await;
        answer.map(|response| response.map(DownBody::Pooled)).map_err(|error| {
            if error.is_connect() { unreachable(&base.authority, &error) } else { unanswered(&base.authority, &error) }
        })
    }
}

fn unreachable(authority: &Authority, error: &(dyn StdError + 'static)) -> Failure {
    let why = causes(error);
    Failure::new(
        FailureKind::UpstreamUnreachable,
        format!(
            "The model's server at {authority} cannot be reached ({why}). Check that it runs and that the coordinator's upstream address is right, then try again."
        ),
    )
}

fn unanswered(authority: &Authority, error: &(dyn StdError + 'static)) -> Failure {
    if let Some(failure) = agents_fault(error) {
        return failure;
    }
    let why = causes(error);
    Failure::new(
        FailureKind::UpstreamUnreachable,
        format!(
            "The model's server at {authority} did not answer as it should ({why}). It may have seen the request, which was not sent a second time. Try again."
        ),
    )
}

/// What the agent did wrong, where that is why its request did not arrive whole.
fn agents_fault(error: &(dyn StdError + 'static)) -> Option<Failure> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(bound) = error.downcast_ref::<OutOfBounds>() {
            return Some(bound.failure());
        }
        cause = error.source();
    }
    None
}

/// Puts in what asks for, or agrees to, another protocol.
pub(crate) fn ask_for(headers: &mut HeaderMap, protocol: HeaderValue) {
    headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(header::UPGRADE, protocol);
}

/// Takes out what concerned the agent's connection.
fn prepare(headers: &mut HeaderMap) {
    strip_hop_by_hop(headers);
    // The upstream's own name is put in its place.
    headers.remove(header::HOST);
    // The expectation was met by this side already.
    headers.remove(header::EXPECT);
}

/// An error's causes, outermost first.
pub(crate) fn causes(error: &dyn StdError) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        if !text.contains(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_put_behind_the_base() {
        for (base, path, whole) in [
            ("http://h:1", "/v1/messages?beta=true", "http://h:1/v1/messages?beta=true"),
            ("http://h:1/", "/v1", "http://h:1/v1"),
            ("http://h/api/", "/v1?x=%2F", "http://h/api/v1?x=%2F"),
            ("h2c://h:1/api", "/v1", "http://h:1/api/v1"),
            ("http://h", "http://other/v1", "http://h/v1"),
        ] {
            let base = Base::parse(base).unwrap();
            let path = base.path_and_query(&path.parse().unwrap()).unwrap();
            assert_eq!(base.uri(path).unwrap().to_string(), whole);
        }
    }

    #[test]
    fn what_is_no_upstream_is_refused_with_what_to_do() {
        for bad in ["", "x", "/v1", "ftp://h", "http://", "http://u:p@h", "http://h/?q"] {
            let error = Base::parse(bad).unwrap_err();
            assert!(error.to_string().contains("give it as"), "{bad}: {error}");
        }
    }
}
