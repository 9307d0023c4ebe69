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
/// is held for long, its head, with `sign` as its sign of life.
pub(crate) async fn respond(
    gate: Arc<TurnGate>,
    mut subscription: Subscription,
    provider: Arc<dyn Provider>,
    sign: Option<Bytes>,
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
    let sign = sign.filter(|_| can_be_kept_alive(&head));
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
    head.status == StatusCode::OK && is_plain(&head.headers) && content_type(&head.headers) == Some("text/event-stream")
}

/// Whether a body is as it was written, not compressed.
pub(crate) fn is_plain(headers: &HeaderMap) -> bool {
    headers.get(header::CONTENT_ENCODING).is_none_or(|encoding| encoding == "identity")
}

/// The type of a body, without parameters, where it is one that matters here.
pub(crate) fn content_type(headers: &HeaderMap) -> Option<&'static str> {
    let value = headers.get(header::CONTENT_TYPE)?.to_str().ok()?;
    let kind = value.split(';').next()?.trim();
    ["text/event-stream", "application/x-ndjson"].into_iter().find(|known| kind.eq_ignore_ascii_case(known))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::provider::{AnthropicMessages, Ollama, OpenAiChat, OpenAiResponses};
    use crate::turn::gate::GatePolicy;
    use crate::turn::recording::{End, Recording};
    use crab_core::{Gate, VersionId};
    use futures_util::FutureExt as _;
    use http_body_util::BodyExt as _;
    use tokio::time::{Instant, sleep};

    const EVERY: KeepAlive = KeepAlive { after: Duration::from_secs(4), every: Duration::from_secs(3) };

    struct Held {
        engine: Option<Gate>,
        recording: Arc<Recording>,
        answer: tokio::task::JoinHandle<Response<OutBody>>,
    }

    /// An answer of one piece that waits at its gate.
    fn hold(provider: Arc<dyn Provider>, status: StatusCode, headers: &[(&'static str, &'static str)]) -> Held {
        let (engine, hold) = Gate::new();
        let gate = TurnGate::closed();
        let recording = Recording::new(1000);
        let subscription = recording.subscribe().unwrap();
        let head = Head {
            status,
            headers: headers
                .iter()
                .map(|&(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value)))
                .collect(),
        };
        recording.set_head(head);
        recording.push(Bytes::from_static(b"real")).now_or_never().unwrap();
        recording.finish(End::Whole(None));
        gate.answer_arrived();
        tokio::spawn({
            let gate = Arc::clone(&gate);
            async move { gate.attend(hold, GatePolicy::default(), |_, _| ()).await }
        });
        let answer = tokio::spawn(async move {
            let sign = provider.keep_alive(&HeaderMap::new());
            respond(gate, subscription, provider, sign, EVERY, Box::new(|| ())).await
        });
        Held { engine: Some(engine), recording, answer }
    }

    async fn rest(response: Response<OutBody>) -> String {
        let body = response.into_body().collect().await.unwrap().to_bytes();
        String::from_utf8(body.to_vec()).unwrap()
    }

    const STREAM: &[(&str, &str)] = &[("content-type", "text/event-stream; charset=utf-8"), ("content-length", "4")];

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_is_held_short_is_not_touched() {
        let mut held = hold(Arc::new(AnthropicMessages), StatusCode::OK, STREAM);
        sleep(Duration::from_millis(3900)).await;
        assert!(!held.answer.is_finished());
        held.engine.take().unwrap().decide(Verdict::Durable(VersionId(1)));
        let response = held.answer.await.unwrap();
        assert_eq!(response.headers()["content-length"], "4");
        assert_eq!(rest(response).await, "real");
    }

    #[tokio::test(start_paused = true)]
    async fn a_stream_that_is_held_long_gets_signs_of_life_on_time_and_nothing_else() {
        let started = Instant::now();
        let providers: [(Arc<dyn Provider>, &str); 3] = [
            (Arc::new(AnthropicMessages), "event: ping\ndata: {\"type\": \"ping\"}\n\n"),
            (Arc::new(OpenAiChat), ": waiting\n\n"),
            (Arc::new(OpenAiResponses), ": waiting\n\n"),
        ];
        for (provider, sign) in providers {
            let begun = started.elapsed();
            let mut held = hold(provider, StatusCode::OK, STREAM);
            let mut response = held.answer.await.unwrap();
            assert_eq!(started.elapsed() - begun, Duration::from_secs(4));
            assert_eq!(response.status(), StatusCode::OK);
            assert!(!response.headers().contains_key("content-length"));
            for n in 0..14 {
                let frame = response.body_mut().frame().await.unwrap().unwrap();
                assert_eq!(frame.into_data().unwrap(), sign);
                assert_eq!(started.elapsed() - begun, Duration::from_secs(4 + 3 * n));
            }
            held.engine.take().unwrap().decide(Verdict::Durable(VersionId(1)));
            assert_eq!(rest(response).await, "real");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_gate_that_fails_after_signs_of_life_ends_the_stream_with_an_error_that_clients_know() {
        let providers: [(Arc<dyn Provider>, &str); 3] = [
            (
                Arc::new(AnthropicMessages),
                "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"",
            ),
            (Arc::new(OpenAiChat), "data: {\"error\":{\"message\":"),
            (Arc::new(OpenAiResponses), "event: response.failed\ndata: "),
        ];
        for (provider, begin) in providers {
            let mut held = hold(provider, StatusCode::OK, STREAM);
            let mut response = held.answer.await.unwrap();
            let _sign = response.body_mut().frame().await.unwrap().unwrap();
            drop(held.engine.take());
            let text = rest(response).await;
            assert!(text.starts_with(begin), "{text}");
            assert!(text.ends_with("\n\n") && !text.contains("real"), "{text}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn what_cannot_take_signs_of_life_waits_in_silence() {
        let compressed = &[("content-type", "text/event-stream"), ("content-encoding", "gzip")][..];
        let cases: [(Arc<dyn Provider>, StatusCode, &[_]); 4] = [
            (Arc::new(AnthropicMessages), StatusCode::OK, compressed),
            (Arc::new(AnthropicMessages), StatusCode::OK, &[("content-type", "application/json")]),
            (Arc::new(AnthropicMessages), StatusCode::BAD_REQUEST, STREAM),
            (Arc::new(Ollama), StatusCode::OK, &[("content-type", "application/x-ndjson")]),
        ];
        for (provider, status, headers) in cases {
            for opens in [true, false] {
                let mut held = hold(Arc::clone(&provider), status, headers);
                sleep(Duration::from_secs(300)).await;
                assert!(!held.answer.is_finished());
                let engine = held.engine.take().unwrap();
                if opens {
                    engine.decide(Verdict::Durable(VersionId(1)));
                    let response = held.answer.await.unwrap();
                    assert_eq!(response.status(), status);
                    assert_eq!(rest(response).await, "real");
                } else {
                    drop(engine);
                    let response = held.answer.await.unwrap();
                    assert!(response.status().is_server_error());
                    assert!(!rest(response).await.contains("real"));
                }
            }
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_leaves_while_it_is_kept_alive_is_noticed() {
        let held = hold(Arc::new(AnthropicMessages), StatusCode::OK, STREAM);
        let response = held.answer.await.unwrap();
        let abandoned = held.recording.abandoned(Duration::ZERO, Duration::ZERO);
        drop(response);
        abandoned.await;
    }
}
