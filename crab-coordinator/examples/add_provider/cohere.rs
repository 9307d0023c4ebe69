//! All that the coordinator has to know of one more provider: Cohere's chat API.

use bytes::Bytes;
use crab_coordinator::digest::ConversationShape;
use crab_coordinator::provider::{ErrorAnswer, EventMark, Failure, Provider, RequestKind};
use crab_coordinator::sse::SseEvent;
use http::{HeaderMap, Method};

/// `POST …/v2/chat`.
#[derive(Clone, Copy, Debug)]
pub struct Cohere;

impl Cohere {
    fn body(failure: &Failure) -> String {
        serde_json::json!({ "id": failure.code(), "message": failure.message }).to_string()
    }
}

impl Provider for Cohere {
    fn name(&self) -> &'static str {
        "cohere"
    }

    // What ends a turn, what belongs to the API and does not, and what is not known here.
    fn classify(&self, method: &Method, path: &str) -> Option<RequestKind> {
        if path.ends_with("/v2/chat") {
            Some(if method == Method::POST { RequestKind::Turn } else { RequestKind::Auxiliary })
        } else if ["/v2/embed", "/v2/rerank", "/v1/tokenize"].iter().any(|known| path.ends_with(known)) {
            Some(RequestKind::Auxiliary)
        } else {
            None
        }
    }

    // Where the history is in a request: of it the conversation's digest is taken.
    fn conversation(&self) -> ConversationShape {
        ConversationShape { history: &["messages"], ignored: &[] }
    }

    // An error that the provider's clients try again.
    fn error(&self, failure: &Failure) -> ErrorAnswer {
        ErrorAnswer { status: failure.status(), body: Self::body(failure).into() }
    }

    // The same where the stream has begun.
    fn stream_error(&self, failure: &Failure) -> Bytes {
        format!(
            "event: message-end\ndata: {{\"type\":\"message-end\",\"delta\":{{\"finish_reason\":\"ERROR\",\"error\":{}}}}}\n\n",
            serde_json::Value::from(failure.message.as_str())
        )
        .into()
    }

    // What keeps a held stream alive: a comment, which clients of event streams pass over.
    fn keep_alive(&self, _request: &HeaderMap) -> Option<Bytes> {
        Some(Bytes::from_static(b": waiting\n\n"))
    }

    // By what an answer is known to be whole.
    fn mark(&self, event: SseEvent<'_>) -> EventMark {
        let failed = event.data.windows(7).any(|part| part == b"\"ERROR\"");
        match event.name {
            b"message-end" if failed => EventMark::Error,
            b"message-end" => EventMark::Last,
            _ => EventMark::Ordinary,
        }
    }
}
