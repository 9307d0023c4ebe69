//! One line for each request, of which an operator can see who asked what, and nobody what was said.

use std::fmt::Write as _;
use std::sync::Arc;

use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Metadata, Subscriber};

use crate::support::*;

/// Keeps all that is logged: the target, then `name=value` for each field.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<String>>>);

struct Line(String);

impl Visit for Line {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        write!(self.0, " {}={value:?}", field.name()).unwrap();
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        write!(self.0, " {}={value}", field.name()).unwrap();
    }
}

impl Subscriber for Log {
    fn enabled(&self, _: &Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, span: &Attributes<'_>) -> Id {
        let mut line = Line(span.metadata().target().to_owned());
        span.record(&mut line);
        self.0.lock().push(line.0);
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}
    fn record_follows_from(&self, _: &Id, _: &Id) {}
    fn enter(&self, _: &Id) {}
    fn exit(&self, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        let mut line = Line(event.metadata().target().to_owned());
        event.record(&mut line);
        self.0.lock().push(line.0);
    }
}

#[tokio::test]
async fn each_request_leaves_one_line_and_no_line_holds_a_body_or_a_credential() {
    let log = Log::default();
    let _logging = tracing::subscriber::set_default(log.clone());
    let model = Model::saying(ok_json("{\"said\":\"of-the-answer\"}")).await;
    let dir = tempfile::tempdir().unwrap();
    let (_coordinator, boundaries, address) =
        start_with(builder(model.address).journal(dir.path()).max_body(500)).await;
    open_all(boundaries);
    // Another test may just have been the first to log something, and have been told that nobody listens.
    tracing::callsite::rebuild_interest_cache();
    let mut agent = Agent::connect(address).await;
    let gemini = "/v1beta/models/g:generateContent?key=sk-secret-1234";
    let body = "{\"contents\":[\"of-the-question\"]}";
    for (request, status) in [
        (ask("of-the-question"), 200),
        (post(gemini, body), 200),
        (post("/v1/messages/count_tokens", body), 200),
        (post("/elsewhere?token=sk-secret-1234", body), 200),
        (post("/v1/messages", &"of-the-question".repeat(100)), 413),
    ] {
        assert_eq!(Agent::connect(address).await.ask(request).await.status(), status);
    }
    // A model that breaks off, and one that is not there, are told of as well.
    drop(model);
    assert_eq!(agent.ask(ask("of-the-question again")).await.status(), 502);

    let lines = log.0.lock().clone();
    let access: Vec<&str> = lines.iter().filter_map(|line| line.strip_prefix("crab_coordinator::access ")).collect();
    let expected = [
        "sandbox=box kind=turn method=POST path=/v1/messages status=200 head_us=",
        "sandbox=box kind=turn method=POST path=/v1beta/models/g:generateContent status=200 head_us=",
        "sandbox=box kind=auxiliary method=POST path=/v1/messages/count_tokens status=200 head_us=",
        "sandbox=box kind=other method=POST path=/elsewhere status=200 head_us=",
        "sandbox=box kind=refused method=POST path=/v1/messages status=413 head_us=",
        "sandbox=box kind=turn method=POST path=/v1/messages status=502 head_us=",
    ];
    assert_eq!(access.len(), expected.len(), "{access:#?}");
    for (line, expected) in access.iter().zip(expected) {
        assert!(line.starts_with(expected), "{line}");
    }
    for line in lines.iter().filter(|line| line.starts_with("crab_coordinator")) {
        for secret in ["sk-secret", "of-the-question", "of-the-answer"] {
            assert!(!line.contains(secret), "{line}");
        }
    }
}
