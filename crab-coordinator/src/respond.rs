//! What a client of a turn gets, and when.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use crab_core::Verdict;
use futures_util::stream;
use http::header::{self, HeaderMap, HeaderValue};
use http::{Response, StatusCode};
use http_body::Frame;
use tokio::time::timeout;

use crate::body::{BoxError, OnDelivered, OutBody, Reading};
use crate::journal::Head;
use crate::names;
use crate::provider::{ErrorAnswer, Failure, FailureKind, Provider};
use crate::turn::gate::TurnGate;
use crate::turn::recording::Subscription;

/// When a held stream is kept alive.
#[derive(Clone, Copy, Debug)]
pub(crate) struct KeepAlive {
    /// After the answer has been held so long, its head goes out with a first sign of life.
    pub(crate) after: Duration,
    /// Then one follows after each such time.
    pub(crate) every: Duration,
}

/// Answers a client of a turn. Until the gate opens, nothing of the model's answer goes out but, where an event stream
/// is held for long, its head.
pub(crate) async fn respond(
    gate: Arc<TurnGate>,
    mut subscription: Subscription,
    provider: Arc<dyn Provider>,
    request: &HeaderMap,
    keep_alive: KeepAlive,
    on_delivered: OnDelivered,
) -> Response<OutBody> {
    let head = tokio::select! {
        biased;
        head = subscription.head() => head,
        failure = failed(&gate) => Err(failure),
    };
    let head = match head {
        Ok(head) => head,
        Err(failure) => return error_response(provider.error(&failure), &failure),
    };
    let reading = Reading { subscription, on_delivered: Some(on_delivered) };
    let sign = can_be_kept_alive(&head).then(|| provider.keep_alive(request)).flatten();
    let verdict = match sign {
        None => gate.verdict().await,
        Some(sign) => match timeout(keep_alive.after, gate.verdict()).await {
            Ok(verdict) => verdict,
            Err(_) => {
                let body = held(gate, reading, provider, sign, keep_alive.every);
                let mut response = response(&head, body);
                // What is put in front makes it longer than the model's server said.
                response.headers_mut().remove(header::CONTENT_LENGTH);
                return response;
            }
        },
    };
    match verdict {
        Verdict::Durable(_) | Verdict::Unprotected(_) => response(&head, OutBody::Reading(reading)),
        Verdict::Failed(error) => {
            let failure = gate_failure(&error);
            error_response(provider.error(&failure), &failure)
        }
    }
}

/// Resolves where the gate fails, and else never.
async fn failed(gate: &TurnGate) -> Failure {
    match gate.verdict().await {
        Verdict::Durable(_) | Verdict::Unprotected(_) => std::future::pending().await,
        Verdict::Failed(error) => gate_failure(&error),
    }
}

fn response(head: &Head, body: OutBody) -> Response<OutBody> {
    let mut response = Response::new(body);
    *response.status_mut() = head.status;
    *response.headers_mut() = head.headers.clone();
    response
}

/// Only into a plain event stream that succeeds may something be put.
fn can_be_kept_alive(head: &Head) -> bool {
    let plain = head.headers.get(header::CONTENT_ENCODING).is_none_or(|encoding| encoding == "identity");
    head.status == StatusCode::OK && plain && is_event_stream(&head.headers)
}

pub(crate) fn is_event_stream(headers: &HeaderMap) -> bool {
    headers
        .get(header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok())
        .and_then(|value| value.split(';').next())
        .is_some_and(|kind| kind.trim().eq_ignore_ascii_case("text/event-stream"))
}

enum HeldState {
    Closed { first: bool },
    Open,
    Over,
}

/// The body of a stream that is held: signs of life, then all of the answer, or an error in the stream's own form.
fn held(gate: Arc<TurnGate>, reading: Reading, provider: Arc<dyn Provider>, sign: Bytes, every: Duration) -> OutBody {
    let state = (HeldState::Closed { first: true }, reading);
    OutBody::Held(Box::pin(stream::unfold(state, move |(state, mut reading)| {
        let (gate, provider, sign) = (Arc::clone(&gate), Arc::clone(&provider), sign.clone());
        async move {
            let alive = |sign| {
                metrics::counter!(names::KEEP_ALIVES).increment(1);
                Some(Ok(Frame::data(sign)))
            };
            let (item, state): (Option<Result<_, BoxError>>, _) = match state {
                HeldState::Over => (None, HeldState::Over),
                HeldState::Open => (next(&mut reading).await, HeldState::Open),
                HeldState::Closed { first: true } => (alive(sign), HeldState::Closed { first: false }),
                HeldState::Closed { first: false } => match timeout(every, gate.verdict()).await {
                    Err(_) => (alive(sign), HeldState::Closed { first: false }),
                    Ok(Verdict::Failed(error)) => {
                        let event = provider.stream_error(&gate_failure(&error));
                        (Some(Ok(Frame::data(event))), HeldState::Over)
                    }
                    Ok(Verdict::Durable(_) | Verdict::Unprotected(_)) => (next(&mut reading).await, HeldState::Open),
                },
            };
            item.map(|item| (item, (state, reading)))
        }
    })))
}

async fn next(reading: &mut Reading) -> Option<Result<Frame<Bytes>, BoxError>> {
    std::future::poll_fn(|cx| reading.poll_frame(cx)).await
}

fn gate_failure(error: &crab_core::Error) -> Failure {
    Failure::new(
        FailureKind::GateFailed,
        format!("The sandbox could not be checkpointed, so the model's answer is held back: {error}. Try again."),
    )
}

/// An error answer with the headers that tell a client whether and when to try again.
pub(crate) fn error_response(answer: ErrorAnswer, failure: &Failure) -> Response<OutBody> {
    let mut response = Response::new(OutBody::Full(Some(answer.body)));
    *response.status_mut() = answer.status;
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    headers.insert("x-crab-error", HeaderValue::from_static(failure.code()));
    // The SDKs of Anthropic and OpenAI obey this one.
    let retry = failure.retry_after();
    let should = if retry.is_some() { "true" } else { "false" };
    headers.insert("x-should-retry", HeaderValue::from_static(should));
    if let Some(after) = retry {
        headers.insert(header::RETRY_AFTER, after.as_secs().max(1).into());
    }
    if failure.kind == FailureKind::UpgradeRefused {
        headers.insert(header::UPGRADE, HeaderValue::from_static("HTTP/1.1"));
        headers.insert(header::CONNECTION, HeaderValue::from_static("upgrade"));
    }
    response
}
