//! A model server that plays a recorded session over HTTP in the Anthropic Messages form, with streaming and delays.
//!
//! It keeps no state: which response it gives depends on how many the request's conversation holds already, as with a
//! real model. A session that is asked again gives the same answer.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use crab_core::{Error, Result};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::session::Session;

/// A running model server. Stops when it is dropped.
pub struct ModelServer {
    address: SocketAddr,
    requests: Arc<AtomicU64>,
    task: JoinHandle<()>,
}

impl ModelServer {
    /// Plays `session` on a loopback port of its own, with the recorded delays times `scale`.
    ///
    /// # Errors
    /// Where no port can be had.
    pub async fn start(session: Arc<Session>, scale: f64) -> Result<Self> {
        Self::start_all(vec![session], scale).await
    }

    /// Plays several sessions: a request's `model` is the name of the one that it wants. The first where there is none of
    /// that name.
    ///
    /// # Errors
    /// Where no port can be had.
    pub async fn start_all(sessions: Vec<Arc<Session>>, scale: f64) -> Result<Self> {
        let sessions: Arc<[Arc<Session>]> = sessions.into();
        let io = |e| Error::io("listen on a loopback port", e);
        let listener = TcpListener::bind("127.0.0.1:0").await.map_err(io)?;
        let address = listener.local_addr().map_err(io)?;
        let requests = Arc::new(AtomicU64::new(0));
        let counter = Arc::clone(&requests);
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (sessions, counter) = (Arc::clone(&sessions), Arc::clone(&counter));
                let service = hyper::service::service_fn(move |request| {
                    let (sessions, counter) = (Arc::clone(&sessions), Arc::clone(&counter));
                    async move { Ok::<_, Infallible>(answer(&sessions, scale, &counter, request).await) }
                });
                tokio::spawn(async move {
                    // A client that goes away ends its own connection only.
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Ok(Self { address, requests, task })
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many requests for a response it has seen.
    #[must_use]
    pub fn requests(&self) -> u64 {
        self.requests.load(Ordering::Relaxed)
    }
}

impl Drop for ModelServer {
    fn drop(&mut self) {
        self.task.abort();
    }
}

type Body = UnsyncBoxBody<Bytes, Infallible>;

fn plain(status: StatusCode, value: &Value) -> Response<Body> {
    let mut response = Response::new(Full::new(Bytes::from(value.to_string())).boxed_unsync());
    *response.status_mut() = status;
    response.headers_mut().insert("content-type", http::HeaderValue::from_static("application/json"));
    response
}

async fn answer(
    sessions: &[Arc<Session>],
    scale: f64,
    counter: &AtomicU64,
    request: Request<Incoming>,
) -> Response<Body> {
    let error = |status, kind: &str, message: &str| {
        plain(status, &json!({"type": "error", "error": {"type": kind, "message": message}}))
    };
    if request.uri().path() != "/v1/messages" {
        return error(StatusCode::NOT_FOUND, "not_found_error", "only /v1/messages is played");
    }
    let Ok(body) = request.into_body().collect().await else {
        return error(StatusCode::BAD_REQUEST, "invalid_request_error", "the body broke off");
    };
    let Ok(body) = serde_json::from_slice::<Value>(&body.to_bytes()) else {
        return error(StatusCode::BAD_REQUEST, "invalid_request_error", "the body is not JSON");
    };
    let named = sessions.iter().find(|session| body["model"] == *session.name);
    let Some(session) = named.or(sessions.first()) else {
        return error(StatusCode::NOT_FOUND, "not_found_error", "no session is played");
    };
    counter.fetch_add(1, Ordering::Relaxed);
    let said = body["messages"]
        .as_array()
        .map_or(0, |messages| messages.iter().filter(|message| message["role"] == "assistant").count());
    let (delay, events) = events(session, said);
    let delay = delay.mul_f64(scale);
    // Two thirds of a model's time go by before its first byte; the rest is spread over the stream.
    let first = delay.mul_f64(0.66);
    let step = delay.mul_f64(0.34).checked_div(u32::try_from(events.len()).unwrap_or(1)).unwrap_or(Duration::ZERO);
    tokio::time::sleep(first).await;
    let stream = futures_util::stream::unfold(events.into_iter(), move |mut events| async move {
        let event = events.next()?;
        tokio::time::sleep(step).await;
        Some((Ok::<_, Infallible>(Frame::data(event)), events))
    });
    let mut response = Response::new(BodyExt::boxed_unsync(StreamBody::new(stream)));
    response.headers_mut().insert("content-type", http::HeaderValue::from_static("text/event-stream"));
    response
}

fn events(session: &Session, said: usize) -> (Duration, Vec<Bytes>) {
    let event = |value: Value| {
        let name = value["type"].as_str().unwrap_or("ping").to_owned();
        Bytes::from(format!("event: {name}\ndata: {value}\n\n"))
    };
    let mut blocks = Vec::new();
    let (delay, stop) = match session.responses.get(said) {
        Some(response) => {
            for (at, call) in response.calls.iter().enumerate() {
                let id = format!("call_{said}_{at}");
                blocks.push((
                    json!({"type": "tool_use", "id": id, "name": call.tool, "input": {}}),
                    json!({"type": "input_json_delta", "partial_json": Value::Object(call.input.clone()).to_string()}),
                ));
            }
            (response.delay, "tool_use")
        }
        None => {
            blocks.push((json!({"type": "text", "text": ""}), json!({"type": "text_delta", "text": "Done."})));
            (Duration::from_secs(1), "end_turn")
        }
    };
    let mut events = vec![event(json!({"type": "message_start", "message": {
        "id": format!("msg_{said}"), "type": "message", "role": "assistant", "model": "scripted", "content": [],
        "stop_reason": null, "usage": {"input_tokens": 1, "output_tokens": 1}}}))];
    for (index, (block, delta)) in blocks.into_iter().enumerate() {
        events.push(event(json!({"type": "content_block_start", "index": index, "content_block": block})));
        events.push(event(json!({"type": "content_block_delta", "index": index, "delta": delta})));
        events.push(event(json!({"type": "content_block_stop", "index": index})));
    }
    events.push(event(json!({"type": "message_delta", "delta": {"stop_reason": stop}, "usage": {"output_tokens": 9}})));
    events.push(event(json!({"type": "message_stop"})));
    (delay, events)
}
