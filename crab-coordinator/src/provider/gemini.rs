//! Google's Gemini API, on its own host and on Vertex.

use bytes::Bytes;
use http::{HeaderMap, Method};

use super::{ErrorAnswer, EventMark, Failure, Provider, RequestKind, json_string};
use crate::digest::ConversationShape;
use crate::sse::SseEvent;

/// `POST …/models/M:generateContent` and `…:streamGenerateContent`.
#[derive(Clone, Copy, Debug)]
pub struct Gemini;

impl Gemini {
    fn body(failure: &Failure) -> String {
        let status = failure.status();
        let name = match status.as_u16() {
            400 | 413 | 426 => "INVALID_ARGUMENT",
            404 => "NOT_FOUND",
            504 => "DEADLINE_EXCEEDED",
            _ => "UNAVAILABLE",
        };
        format!(
            r#"{{"error":{{"code":{},"message":{},"status":"{name}"}}}}"#,
            status.as_u16(),
            json_string(&failure.message)
        )
    }
}

impl Provider for Gemini {
    fn name(&self) -> &'static str {
        "gemini"
    }

    fn classify(&self, method: &Method, path: &str) -> Option<RequestKind> {
        let (_, verb) = path.rsplit_once('/')?.1.split_once(':')?;
        match verb {
            "generateContent" | "streamGenerateContent" if method == Method::POST => Some(RequestKind::Turn),
            "generateContent" | "streamGenerateContent" | "countTokens" | "embedContent" | "batchEmbedContents" => {
                Some(RequestKind::Auxiliary)
            }
            _ => None,
        }
    }

    fn conversation(&self) -> ConversationShape {
        ConversationShape { history: &["contents"], ignored: &[] }
    }

    fn error(&self, failure: &Failure) -> ErrorAnswer {
        ErrorAnswer { status: failure.status(), body: Self::body(failure).into() }
    }

    fn stream_error(&self, failure: &Failure) -> Bytes {
        format!("data: {}\r\n\r\n", Self::body(failure)).into()
    }

    fn keep_alive(&self, _request: &HeaderMap) -> Option<Bytes> {
        Some(Bytes::from_static(b": waiting\r\n\r\n"))
    }

    fn mark(&self, event: SseEvent<'_>) -> EventMark {
        let holds = |needle: &[u8]| event.data.windows(needle.len()).any(|part| part == needle);
        if !holds(b"\"finishReason\"") && !holds(b"\"error\"") {
            return EventMark::Ordinary;
        }
        // A long last piece is cut and no JSON: its answer is then not taken for whole, and will be asked for again.
        let Ok(json) = serde_json::from_slice::<serde_json::Value>(event.data) else {
            return EventMark::Ordinary;
        };
        if json.get("error").is_some() {
            return EventMark::Error;
        }
        let candidates = json["candidates"].as_array();
        if candidates.is_some_and(|all| all.iter().any(|one| one["finishReason"].is_string())) {
            EventMark::Complete
        } else {
            EventMark::Ordinary
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn verbs_decide() {
        let kind = |path| Gemini.classify(&Method::POST, path);
        assert_eq!(kind("/v1beta/models/gemini-3:streamGenerateContent"), Some(RequestKind::Turn));
        assert_eq!(
            kind("/v1/projects/p/locations/l/publishers/google/models/g:generateContent"),
            Some(RequestKind::Turn)
        );
        assert_eq!(kind("/v1beta/models/g:countTokens"), Some(RequestKind::Auxiliary));
        assert_eq!(kind("/v1beta/models/g"), None);
        assert_eq!(kind("/x:generateContent/y"), None);
    }

    #[test]
    fn the_last_piece_is_known_by_its_reason() {
        let mark = |data: &str| Gemini.mark(SseEvent { name: b"", data: data.as_bytes() });
        assert_eq!(mark(r#"{"candidates":[{"content":{}}]}"#), EventMark::Ordinary);
        assert_eq!(mark(r#"{"candidates":[{"finishReason":"STOP"}]}"#), EventMark::Complete);
        assert_eq!(mark(r#"{"error":{"code":503}}"#), EventMark::Error);
    }
}
