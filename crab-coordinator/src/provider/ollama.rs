//! Ollama's own API. (Its OpenAI-compatible one is [`OpenAiChat`](super::OpenAiChat).)

use bytes::Bytes;
use http::{HeaderMap, Method};

use super::{ErrorAnswer, EventMark, Failure, Provider, RequestKind, json_string};
use crate::digest::ConversationShape;
use crate::sse::SseEvent;

/// `POST /api/chat` and `/api/generate`.
#[derive(Clone, Copy, Debug)]
pub struct Ollama;

impl Provider for Ollama {
    fn name(&self) -> &'static str {
        "ollama"
    }

    fn classify(&self, method: &Method, path: &str) -> Option<RequestKind> {
        if path.ends_with("/api/chat") || path.ends_with("/api/generate") {
            Some(if method == Method::POST { RequestKind::Turn } else { RequestKind::Auxiliary })
        } else if ["/api/embed", "/api/embeddings", "/api/tags", "/api/show", "/api/ps", "/api/version"]
            .iter()
            .any(|known| path.ends_with(known))
        {
            Some(RequestKind::Auxiliary)
        } else {
            None
        }
    }

    fn conversation(&self) -> ConversationShape {
        ConversationShape { history: &["messages"], ignored: &["keep_alive"] }
    }

    fn error(&self, failure: &Failure) -> ErrorAnswer {
        ErrorAnswer {
            status: failure.status(),
            body: format!(r#"{{"error":{}}}"#, json_string(&failure.message)).into(),
        }
    }

    fn stream_error(&self, failure: &Failure) -> Bytes {
        format!("{{\"error\":{}}}\n", json_string(&failure.message)).into()
    }

    fn keep_alive(&self, _request: &HeaderMap) -> Option<Bytes> {
        // Its streams are lines of JSON, and its clients parse every line: nothing can be put between.
        None
    }

    fn mark(&self, event: SseEvent<'_>) -> EventMark {
        let holds = |needle: &[u8]| event.data.windows(needle.len()).any(|part| part == needle);
        if !holds(b"\"done\"") && !holds(b"\"error\"") {
            return EventMark::Ordinary;
        }
        #[derive(serde::Deserialize)]
        struct Line {
            done: Option<bool>,
            error: Option<serde::de::IgnoredAny>,
        }
        match serde_json::from_slice(event.data) {
            Ok(Line { error: Some(_), .. }) => EventMark::Error,
            Ok(Line { done: Some(true), .. }) => EventMark::Last,
            _ => EventMark::Ordinary,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_say_when_it_is_done() {
        let mark = |data: &str| Ollama.mark(SseEvent { name: b"", data: data.as_bytes() });
        assert_eq!(mark(r#"{"message":{"content":"\"done\""},"done":false}"#), EventMark::Ordinary);
        assert_eq!(mark(r#"{"done":true,"eval_count":3}"#), EventMark::Last);
        assert_eq!(mark(r#"{"error":"out of memory"}"#), EventMark::Error);
    }
}
