//! OpenAI's Responses API.

use bytes::Bytes;
use http::{HeaderMap, Method};

use super::openai_chat::openai_error;
use super::{ErrorAnswer, EventMark, Failure, Provider, RequestKind, json_string};
use crate::digest::ConversationShape;
use crate::sse::SseEvent;

/// `POST …/responses`.
#[derive(Clone, Copy, Debug)]
pub struct OpenAiResponses;

impl Provider for OpenAiResponses {
    fn name(&self) -> &'static str {
        "openai_responses"
    }

    fn classify(&self, method: &Method, path: &str) -> Option<RequestKind> {
        if path.ends_with("/responses") {
            Some(if method == Method::POST { RequestKind::Turn } else { RequestKind::Auxiliary })
        } else if path.contains("/v1/responses/") {
            // Reading, cancelling or deleting an earlier one; counting its tokens.
            Some(RequestKind::Auxiliary)
        } else {
            None
        }
    }

    fn conversation(&self) -> ConversationShape {
        ConversationShape { history: &["input"], ignored: &[] }
    }

    fn error(&self, failure: &Failure) -> ErrorAnswer {
        ErrorAnswer { status: failure.status(), body: openai_error(failure).into() }
    }

    fn stream_error(&self, failure: &Failure) -> Bytes {
        // Some clients look for the failed response, others for the error event.
        let message = json_string(&failure.message);
        let code = failure.code();
        format!(
            "event: response.failed\ndata: {{\"type\":\"response.failed\",\"sequence_number\":0,\"response\":{{\"id\":\"resp_{code}\",\"object\":\"response\",\"status\":\"failed\",\"output\":[],\"error\":{{\"code\":\"server_error\",\"message\":{message}}}}}}}\n\nevent: error\ndata: {{\"type\":\"error\",\"sequence_number\":1,\"code\":\"{code}\",\"message\":{message},\"param\":null}}\n\n"
        )
        .into()
    }

    fn keep_alive(&self, _request: &HeaderMap) -> Option<Bytes> {
        Some(Bytes::from_static(b": waiting\n\n"))
    }

    fn mark(&self, event: SseEvent<'_>) -> EventMark {
        // Servers that leave the event's name out say it at the beginning of the data.
        let is =
            |name: &str| event.name == name.as_bytes() || (event.name.is_empty() && starts_with_type(event.data, name));
        if is("response.completed") || is("response.incomplete") {
            EventMark::Last
        } else if is("response.failed") || is("error") {
            EventMark::Error
        } else {
            EventMark::Ordinary
        }
    }
}

fn starts_with_type(data: &[u8], name: &str) -> bool {
    let head = &data[..data.len().min(256)];
    let text: String = String::from_utf8_lossy(head).chars().filter(|c| !c.is_whitespace()).collect();
    text.starts_with(&format!("{{\"type\":\"{name}\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_is_found_by_name_or_by_type() {
        let mark =
            |name: &str, data: &str| OpenAiResponses.mark(SseEvent { name: name.as_bytes(), data: data.as_bytes() });
        assert_eq!(mark("response.completed", "{}"), EventMark::Last);
        assert_eq!(mark("", "{ \"type\": \"response.completed\"}"), EventMark::Last);
        assert_eq!(mark("", "{\"type\":\"response.completed.x\"}"), EventMark::Ordinary);
        assert_eq!(mark("response.output_text.delta", "{\"type\":\"error\"}"), EventMark::Ordinary);
        assert_eq!(mark("response.failed", ""), EventMark::Error);
    }
}
