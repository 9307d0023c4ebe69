//! Health and metrics, on a listener that agents do not see.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{Method, Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::task::JoinSet;

use crate::body::OutBody;
use crate::patience::Taken;
use crate::server::{Accepted, Listener, accept, told};
use crate::service::{Limits, Shared};

/// Gives the metrics' text.
pub(crate) type Render = Arc<dyn Fn() -> String + Send + Sync>;

/// So many may look at once.
const MAX_CONNECTIONS: usize = 32;

/// Serves until told to stop; then what is open is closed.
pub(crate) async fn serve(listener: Listener, shared: Arc<Shared>, render: Render, limits: Limits) {
    let mut stopped = shared.stopped.clone();
    let mut connections = JoinSet::new();
    loop {
        let accepted = tokio::select! {
            biased;
            () = told(&mut stopped) => return,
            Some(_) = connections.join_next(), if connections.len() >= MAX_CONNECTIONS => continue,
            accepted = accept(&listener), if connections.len() < MAX_CONNECTIONS => accepted,
        };
        while connections.try_join_next().is_some() {}
        match accepted {
            Ok(Accepted::Tcp(stream, _)) => {
                connections.spawn(connection(stream, Arc::clone(&shared), Arc::clone(&render), limits));
            }
            Ok(Accepted::Unix(stream)) => {
                connections.spawn(connection(stream, Arc::clone(&shared), Arc::clone(&render), limits));
            }
            Err(_) => tokio::time::sleep(std::time::Duration::from_millis(20)).await,
        }
    }
}

async fn connection<S>(stream: S, shared: Arc<Shared>, render: Render, limits: Limits)
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let service = service_fn(move |request| {
        let response = answer(&request, &shared, &render);
        async move { Ok::<_, Infallible>(response) }
    });
    let served = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(limits.header_timeout)
        .serve_connection(TokioIo::new(Taken::new(stream, limits.header_timeout)), service);
    if let Err(error) = served.await {
        tracing::debug!(%error, "an admin connection ended early");
    }
}

fn answer(request: &Request<Incoming>, shared: &Shared, render: &Render) -> Response<OutBody> {
    let (status, text) = match (request.method(), request.uri().path()) {
        (&Method::GET | &Method::HEAD, "/healthz") if shared.draining.load(Ordering::Relaxed) => {
            (StatusCode::SERVICE_UNAVAILABLE, "shutting down\n".into())
        }
        (&Method::GET | &Method::HEAD, "/healthz") => (StatusCode::OK, "ok\n".into()),
        (&Method::GET, "/metrics") => (StatusCode::OK, render()),
        _ => (StatusCode::NOT_FOUND, "there are /healthz and /metrics\n".into()),
    };
    let mut response = Response::new(OutBody::Full(Some(Bytes::from(text))));
    *response.status_mut() = status;
    let plain = HeaderValue::from_static("text/plain; version=0.0.4; charset=utf-8");
    response.headers_mut().insert(header::CONTENT_TYPE, plain);
    response
}
