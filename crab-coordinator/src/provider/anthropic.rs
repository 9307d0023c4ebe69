//! Anthropic's Messages API.

use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode};

use super::{ErrorAnswer, EventMark, Failure, FailureKind, Provider, RequestKind, json_string};
use crate::digest::ConversationShape;
use crate::sse::SseEvent;

/// `POST …/v1/messages`, and the same on Vertex (`…/models/M:rawPredict` and `:streamRawPredict`).
#[derive(Clone, Copy, Debug)]
pub struct AnthropicMessages;

impl AnthropicMessages {
    fn body(failure: &Failure) -> String {
        format!(
            r#"{{"type":"error","error":{{"type":"{}","message":{}}}}}"#,
            match failure.kind {
                FailureKind::GateFailed | FailureKind::Draining => "overloaded_error",
                FailureKind::UnknownSandbox => "not_found_error",
                FailureKind::UpgradeRefused | FailureKind::BadRequest => "invalid_request_error",
                FailureKind::TooLong => "request_too_large",
                _ => "api_error",
            },
            json_string(&failure.message)
        )
    }
}

impl Provider for AnthropicMessages {
    fn name(&self) -> &'static str {
        "anthropic_messages"
    }

    fn classify(&self, method: &Method, path: &str) -> Option<RequestKind> {
        let vertex = path.ends_with(":rawPredict") || path.ends_with(":streamRawPredict");
        if vertex || path.ends_with("/v1/messages") {
            Some(if method == Method::POST { RequestKind::Turn } else { RequestKind::Auxiliary })
        } else if path.ends_with("/v1/messages/count_tokens") || path.contains("/v1/messages/batches") {
            Some(RequestKind::Auxiliary)
        } else {
            None
        }
    }

    fn conversation(&self) -> ConversationShape {
        ConversationShape {
            history: &["messages"],
            // Clients move their cache breakpoints from message to message.
            ignored: &["cache_control"],
        }
    }

    fn error(&self, failure: &Failure) -> ErrorAnswer {
        let status = match failure.kind {
            // Anthropic's own status for "overloaded, ask again"; not in the registry, but within range.
            FailureKind::GateFailed => StatusCode::from_u16(529).unwrap_or(StatusCode::SERVICE_UNAVAILABLE),
            _ => failure.status(),
        };
        ErrorAnswer { status, body: Self::body(failure).into() }
    }

    fn stream_error(&self, failure: &Failure) -> Bytes {
        format!("event: error\ndata: {}\n\n", Self::body(failure)).into()
    }

    fn keep_alive(&self, _request: &HeaderMap) -> Option<Bytes> {
        Some(Bytes::from_static(b"event: ping\ndata: {\"type\": \"ping\"}\n\n"))
    }

    fn mark(&self, event: SseEvent<'_>) -> EventMark {
        match event.name {
            b"message_stop" => EventMark::Last,
            b"error" => EventMark::Error,
            _ => EventMark::Ordinary,
        }
    }
}
