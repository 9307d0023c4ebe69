//! What the coordinator knows of each model provider: which requests are turns, how an error looks that its clients
//! try again, how a held stream is kept alive, how an answer ends.
//!
//! Adding one is one file that implements [`Provider`] and one line: [`Builder::provider`](crate::Builder::provider),
//! or a line in [`known`] for those that come with the crate. The example `add_provider` shows it.

mod anthropic;
mod bedrock;
mod gemini;
mod ollama;
mod openai_chat;
mod openai_responses;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode};

pub use anthropic::AnthropicMessages;
pub use bedrock::Bedrock;
pub use gemini::Gemini;
pub use ollama::Ollama;
pub use openai_chat::OpenAiChat;
pub use openai_responses::OpenAiResponses;

use crate::digest::ConversationShape;
use crate::sse::SseEvent;

/// What a request is to a provider.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RequestKind {
    /// Ends a turn of the agent.
    Turn,
    /// Belongs to the provider's API, but the agent's turn goes on: counting tokens, listing models.
    Auxiliary,
}

/// What an event says about the answer it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventMark {
    /// Neither of the others.
    Ordinary,
    /// The answer is complete, though events may follow (usage figures).
    Complete,
    /// The answer is complete and nothing follows.
    Last,
    /// The answer failed on its way: the agent will ask again.
    Error,
}

/// Why the coordinator answers in the model's place.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FailureKind {
    /// The turn's version could not be made durable.
    GateFailed,
    /// The model's server could not be reached or broke off before it answered.
    UpstreamUnreachable,
    /// The model's server did not answer in time.
    UpstreamTimedOut,
    /// The request names no sandbox that the coordinator serves.
    UnknownSandbox,
    /// The request asks for another protocol, such as WebSocket, where turns are HTTP.
    UpgradeRefused,
    /// The coordinator is shutting down.
    Draining,
    /// The request broke off or is not HTTP as it should be.
    BadRequest,
    /// The request is longer than the coordinator takes.
    TooLong,
}

/// An answer in the model's place: why, and in words what to do.
#[derive(Clone, Debug)]
pub struct Failure {
    /// Why.
    pub kind: FailureKind,
    /// For a person: what happened and what to do. One or two sentences.
    pub message: String,
}

impl Failure {
    pub(crate) fn new(kind: FailureKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }

    /// A stable word for programs.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self.kind {
            FailureKind::GateFailed => "crab_checkpoint_failed",
            FailureKind::UpstreamUnreachable => "crab_upstream_unreachable",
            FailureKind::UpstreamTimedOut => "crab_upstream_timed_out",
            FailureKind::UnknownSandbox => "crab_unknown_sandbox",
            FailureKind::UpgradeRefused => "crab_use_http",
            FailureKind::Draining => "crab_shutting_down",
            FailureKind::BadRequest => "crab_bad_request",
            FailureKind::TooLong => "crab_too_long",
        }
    }

    /// The status for a provider that has no own one for it.
    #[must_use]
    pub fn status(&self) -> StatusCode {
        match self.kind {
            FailureKind::GateFailed | FailureKind::Draining => StatusCode::SERVICE_UNAVAILABLE,
            FailureKind::UpstreamUnreachable => StatusCode::BAD_GATEWAY,
            FailureKind::UpstreamTimedOut => StatusCode::GATEWAY_TIMEOUT,
            FailureKind::UnknownSandbox => StatusCode::NOT_FOUND,
            FailureKind::UpgradeRefused => StatusCode::UPGRADE_REQUIRED,
            FailureKind::BadRequest => StatusCode::BAD_REQUEST,
            FailureKind::TooLong => StatusCode::PAYLOAD_TOO_LARGE,
        }
    }

    /// How long a client should wait before it asks again; `None` where asking again does not help.
    #[must_use]
    pub fn retry_after(&self) -> Option<Duration> {
        match self.kind {
            FailureKind::GateFailed
            | FailureKind::Draining
            | FailureKind::UpstreamUnreachable
            | FailureKind::UpstreamTimedOut => Some(Duration::from_secs(1)),
            FailureKind::UnknownSandbox
            | FailureKind::UpgradeRefused
            | FailureKind::BadRequest
            | FailureKind::TooLong => None,
        }
    }
}

/// An error answer in a provider's own form. `Retry-After` and the content type (JSON) are added by the coordinator.
#[derive(Clone, Debug)]
pub struct ErrorAnswer {
    /// The status.
    pub status: StatusCode,
    /// The body, JSON.
    pub body: Bytes,
}

/// One provider's API. Everything here is pure: no method may block.
pub trait Provider: Send + Sync + 'static {
    /// A short stable name, for metrics, the log and the journal.
    fn name(&self) -> &'static str;

    /// What a request to this path is; `None` where it is not of this provider. The path is given percent-decoded,
    /// without its query, without repeated or trailing slashes and without the sandbox's prefix.
    fn classify(&self, method: &Method, path: &str) -> Option<RequestKind>;

    /// Which part of a turn's body is the conversation.
    fn conversation(&self) -> ConversationShape;

    /// How an error answer looks. It must be one that the provider's clients try again where
    /// [`Failure::retry_after`] says so.
    fn error(&self, failure: &Failure) -> ErrorAnswer;

    /// The same inside of a stream whose head is already sent.
    fn stream_error(&self, failure: &Failure) -> Bytes;

    /// Bytes that keep a held event stream alive and mean nothing; `None` where there are none. Asked with the headers
    /// of the request, since clients of one provider differ.
    fn keep_alive(&self, request: &HeaderMap) -> Option<Bytes>;

    /// What an event of a streamed answer says about the answer.
    fn mark(&self, event: SseEvent<'_>) -> EventMark;
}

impl fmt::Debug for dyn Provider {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The providers that come with the crate, in the order in which they are asked.
#[must_use]
pub fn known() -> Vec<Arc<dyn Provider>> {
    vec![
        Arc::new(AnthropicMessages),
        Arc::new(OpenAiResponses),
        Arc::new(OpenAiChat),
        Arc::new(Gemini),
        Arc::new(Bedrock),
        Arc::new(Ollama),
    ]
}

/// The first provider that knows this request.
pub(crate) fn classify<'a>(
    providers: &'a [Arc<dyn Provider>],
    method: &Method,
    path: &str,
) -> Option<(&'a Arc<dyn Provider>, RequestKind)> {
    let path = normalized(path);
    providers.iter().find_map(|provider| Some((provider, provider.classify(method, &path)?)))
}

/// The path as a server would read it, so that no spelling of a turn's path slips past the gate.
fn normalized(path: &str) -> String {
    let mut decoded = Vec::with_capacity(path.len());
    let mut bytes = path.bytes();
    while let Some(byte) = bytes.next() {
        let digits = hex_ahead(&bytes);
        match (byte, digits) {
            (b'%', Some(value)) => {
                decoded.push(value);
                bytes.nth(1);
            }
            (b'/', _) if decoded.last() == Some(&b'/') => {}
            _ => decoded.push(byte),
        }
    }
    while decoded.len() > 1 && decoded.last() == Some(&b'/') {
        decoded.pop();
    }
    String::from_utf8_lossy(&decoded).into_owned()
}

/// The byte that the next two characters spell in hexadecimal.
fn hex_ahead(bytes: &std::str::Bytes<'_>) -> Option<u8> {
    let mut ahead = bytes.clone();
    let mut digit = || (ahead.next()? as char).to_digit(16);
    let (high, low) = (digit()?, digit()?);
    u8::try_from(high << 4 | low).ok()
}

/// `text` as a JSON string, with its quotes.
pub(crate) fn json_string(text: &str) -> String {
    serde_json::Value::from(text).to_string()
}

/// The form used where no provider is known.
pub(crate) fn plain_error(failure: &Failure) -> ErrorAnswer {
    ErrorAnswer {
        status: failure.status(),
        body: format!(r#"{{"error":{{"type":"{}","message":{}}}}}"#, failure.code(), json_string(&failure.message))
            .into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(method: &Method, path: &str) -> Option<(&'static str, RequestKind)> {
        let known = known();
        classify(&known, method, path).map(|(provider, kind)| (provider.name(), kind))
    }

    #[test]
    fn turns_are_known_however_their_path_is_written() {
        for path in [
            "/v1/messages",
            "/v1/messages/",
            "//v1//messages",
            "/v1/%6dessages",
            "/v1%2Fmessages",
            "/anthropic/v1/messages",
        ] {
            let expected = Some(("anthropic_messages", RequestKind::Turn));
            assert_eq!(kind(&Method::POST, path), expected, "{path}");
        }
        let chat = Some(("openai_chat", RequestKind::Turn));
        for path in [
            "/v1/chat/completions",
            "/chat/completions",
            "/api/v1/chat/completions",
            "/openai/deployments/x/chat/completions",
        ] {
            assert_eq!(kind(&Method::POST, path), chat, "{path}");
        }
    }

    #[test]
    fn helpers_and_strangers_are_no_turns() {
        let auxiliary = Some(("anthropic_messages", RequestKind::Auxiliary));
        assert_eq!(kind(&Method::POST, "/v1/messages/count_tokens"), auxiliary);
        for (method, path) in [
            (&Method::GET, "/v1/messages"),
            (&Method::HEAD, "/"),
            (&Method::POST, "/v1/messagesx"),
            (&Method::POST, "/v1/embeddings"),
            (&Method::POST, "/%"),
            (&Method::POST, "/%zz"),
        ] {
            assert!(!matches!(kind(method, path), Some((_, RequestKind::Turn))), "{method} {path}");
        }
    }

    #[test]
    fn every_error_is_json_and_every_provider_has_its_own() {
        let kinds = [
            FailureKind::GateFailed,
            FailureKind::UpstreamUnreachable,
            FailureKind::UpstreamTimedOut,
            FailureKind::UnknownSandbox,
            FailureKind::UpgradeRefused,
            FailureKind::Draining,
            FailureKind::BadRequest,
            FailureKind::TooLong,
        ];
        for failure in kinds.map(|kind| Failure::new(kind, "it \"broke\"\n")) {
            let answers = known().into_iter().map(|provider| provider.error(&failure));
            for answer in answers.chain([plain_error(&failure)]) {
                let json: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
                let said = [&json["error"]["message"], &json["error"], &json["message"]];
                assert!(said.contains(&&"it \"broke\"\n".into()), "{json}");
                assert!(answer.status.is_client_error() || answer.status.is_server_error());
            }
        }
    }
}
