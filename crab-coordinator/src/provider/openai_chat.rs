//! OpenAI's Chat Completions API, spoken by many servers besides OpenAI's.

use bytes::Bytes;
use http::{HeaderMap, Method};

use super::{ErrorAnswer, EventMark, Failure, FailureKind, Provider, RequestKind, json_string};
use crate::digest::ConversationShape;
use crate::sse::SseEvent;

/// `POST …/chat/completions`.
#[derive(Clone, Copy, Debug)]
pub struct OpenAiChat;

/// An error object as OpenAI's APIs give it.
pub(super) fn openai_error(failure: &Failure) -> String {
    format!(
        r#"{{"error":{{"message":{},"type":"{}","param":null,"code":"{}"}}}}"#,
        json_string(&failure.message),
        match failure.kind {
            FailureKind::UnknownSandbox | FailureKind::UpgradeRefused | FailureKind::BadRequest =>
                "invalid_request_error",
            _ => "server_error",
        },
        failure.code(),
    )
}

impl Provider for OpenAiChat {
    fn name(&self) -> &'static str {
        "openai_chat"
    }

    fn classify(&self, method: &Method, path: &str) -> Option<RequestKind> {
        path.ends_with("/chat/completions")
            .then(|| if method == Method::POST { RequestKind::Turn } else { RequestKind::Auxiliary })
    }

    fn conversation(&self) -> ConversationShape {
        ConversationShape {
            history: &["messages"],
            // Sent by some to servers that pass it on to Anthropic.
            ignored: &["cache_control"],
        }
    }

    fn error(&self, failure: &Failure) -> ErrorAnswer {
        ErrorAnswer { status: failure.status(), body: openai_error(failure).into() }
    }

    fn stream_error(&self, failure: &Failure) -> Bytes {
        format!("data: {}\n\n", openai_error(failure)).into()
    }

    fn keep_alive(&self, _request: &HeaderMap) -> Option<Bytes> {
        // Clients parse every data line as a chunk, so only a comment means nothing to them.
        Some(Bytes::from_static(b": waiting\n\n"))
    }

    fn mark(&self, event: SseEvent<'_>) -> EventMark {
        let data = event.data.trim_ascii();
        if data == b"[DONE]" {
            return EventMark::Last;
        }
        // Deltas come in hundreds: look into those alone that can matter.
        let holds = |needle: &[u8]| data.windows(needle.len()).any(|part| part == needle);
        if !holds(b"\"finish_reason\"") && !holds(b"\"error\"") {
            return EventMark::Ordinary;
        }
        let Ok(json) = serde_json::from_slice::<serde_json::Value>(data) else {
            return EventMark::Ordinary;
        };
        if json.get("error").is_some_and(|error| !error.is_null()) {
            return EventMark::Error;
        }
        let finished = json["choices"]
            .as_array()
            .is_some_and(|choices| !choices.is_empty() && choices.iter().all(|c| c["finish_reason"].is_string()));
        if finished { EventMark::Complete } else { EventMark::Ordinary }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(data: &str) -> EventMark {
        OpenAiChat.mark(SseEvent { name: b"", data: data.as_bytes() })
    }

    #[test]
    fn the_end_and_errors_are_found() {
        assert_eq!(mark("[DONE]"), EventMark::Last);
        assert_eq!(mark(r#"{"choices":[{"finish_reason":null,"delta":{"content":"[DONE]"}}]}"#), EventMark::Ordinary);
        assert_eq!(mark(r#"{"choices":[{"finish_reason":"stop"}]}"#), EventMark::Complete);
        assert_eq!(mark(r#"{"error":{"message":"x"}}"#), EventMark::Error);
        assert_eq!(mark(r#"{"choices":[{"delta":{"content":"\"error\""}}]}"#), EventMark::Ordinary);
    }
}
