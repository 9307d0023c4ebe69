//! Amazon Bedrock's runtime API.
//!
//! Requests must carry a bearer token: a signature (SigV4) covers the host name that the client connected to, which is
//! the coordinator's, so the model's server would refuse it.

use bytes::Bytes;
use http::{HeaderMap, Method};

use super::{ErrorAnswer, EventMark, Failure, Provider, RequestKind, json_string};
use crate::digest::ConversationShape;
use crate::sse::SseEvent;

/// `POST /model/M/invoke`, `/invoke-with-response-stream`, `/converse` and `/converse-stream`.
#[derive(Clone, Copy, Debug)]
pub struct Bedrock;

impl Provider for Bedrock {
    fn name(&self) -> &'static str {
        "bedrock"
    }

    fn classify(&self, method: &Method, path: &str) -> Option<RequestKind> {
        let (model, verb) = path.rsplit_once('/')?;
        let turn = matches!(verb, "invoke" | "invoke-with-response-stream" | "converse" | "converse-stream");
        if !model.contains("/model/") {
            None
        } else if turn && method == Method::POST {
            Some(RequestKind::Turn)
        } else if turn || verb == "count-tokens" {
            Some(RequestKind::Auxiliary)
        } else {
            None
        }
    }

    fn conversation(&self) -> ConversationShape {
        ConversationShape { history: &["messages"], ignored: &["cache_control", "cachePoint"] }
    }

    fn error(&self, failure: &Failure) -> ErrorAnswer {
        let status = failure.status();
        let name = match status.as_u16() {
            400 | 413 | 426 => "ValidationException",
            404 => "ResourceNotFoundException",
            504 => "ModelTimeoutException",
            _ => "ServiceUnavailableException",
        };
        ErrorAnswer {
            status,
            body: format!(r#"{{"__type":"{name}","message":{}}}"#, json_string(&failure.message)).into(),
        }
    }

    fn stream_error(&self, _failure: &Failure) -> Bytes {
        // Never asked for, since its streams are binary and cannot be kept alive.
        Bytes::new()
    }

    fn keep_alive(&self, _request: &HeaderMap) -> Option<Bytes> {
        None
    }

    fn mark(&self, _event: SseEvent<'_>) -> EventMark {
        EventMark::Ordinary
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn models_with_odd_names_are_found() {
        let kind = |path| Bedrock.classify(&Method::POST, path);
        assert_eq!(kind("/model/us.anthropic.claude-x-v1:0/converse-stream"), Some(RequestKind::Turn));
        assert_eq!(kind("/model/arn:aws:bedrock:eu:1:inference-profile/x/invoke"), Some(RequestKind::Turn));
        assert_eq!(kind("/model/x/count-tokens"), Some(RequestKind::Auxiliary));
        assert_eq!(kind("/functions/x/invoke"), None);
    }
}
