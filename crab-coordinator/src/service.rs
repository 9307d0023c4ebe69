//! One request: what it is, and who answers it.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use crab_core::SandboxId;
use futures_util::FutureExt as _;
use http::header::{self, HeaderValue};
use http::request::Parts;
use http::{Method, Request, Response, StatusCode, Version};
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Incoming};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::body::{BoxError, OutBody};
use crate::digest::{RequestDigest, RequestHasher, request_key};
use crate::headers::{strip_hop_by_hop, upgrade_wanted};
use crate::intake::{Intake, Promise};
use crate::names;
use crate::patience::{Bounds, OutOfBounds, Patient};
use crate::provider::{self, Failure, FailureKind, Provider, RequestKind, plain_error};
use crate::resolve::{Peer, SandboxResolver};
use crate::respond::{KeepAlive, error_response, is_plain, respond};
use crate::server::told;
use crate::turn::driver::{Driver, Grace};
use crate::turn::{Admitted, Asked, Ticket, Turns, Work};
use crate::upstream::{DownBody, UpBody, Upstream, ask_for};

/// What all connections share.
pub(crate) struct Shared {
    pub(crate) turns: Arc<Turns>,
    pub(crate) upstream: Arc<Upstream>,
    pub(crate) providers: Vec<Arc<dyn Provider>>,
    /// Models whose requests are no turns.
    pub(crate) helpers: Vec<String>,
    pub(crate) keep_alive: KeepAlive,
    pub(crate) grace: Grace,
    /// How much of a turn's request is read before it is forwarded.
    pub(crate) request_buffer: u64,
    pub(crate) draining: AtomicBool,
    pub(crate) limits: Limits,
    pub(crate) stopped: watch::Receiver<bool>,
}

impl Shared {
    /// Answers one request, and writes a line about it. Never fails: what goes wrong is an answer.
    pub(crate) async fn serve(
        self: Arc<Self>,
        resolver: Arc<dyn SandboxResolver>,
        peer: Peer,
        request: Request<Incoming>,
    ) -> Response<OutBody> {
        let started = Instant::now();
        let bounds = self.limits.bounds(started);
        let (mut parts, body) = request.into_parts();
        let sandbox = resolver.resolve(peer, &mut parts);
        let method = parts.method.clone();
        // Without its query, which may hold a key.
        let path = parts.uri.path().to_owned();
        // Some ask for a WebSocket, with GET, where their turns go.
        let upgrades = upgrade_wanted(&parts.headers).is_some();
        let asks = if upgrades { &Method::POST } else { &method };
        let known =
            provider::classify(&self.providers, asks, &path).map(|(provider, kind)| (Arc::clone(provider), kind));
        let fits = body.size_hint().lower() <= bounds.bytes;
        let (kind, response) = match known {
            Some((provider, RequestKind::Turn)) => match self.turn_of(&parts, sandbox.clone()) {
                Ok(sandbox) if fits => ("turn", self.turn(sandbox, provider, parts, body, bounds).await),
                Ok(_) => ("refused", refuse(&*provider, OutOfBounds::Long(bounds.bytes).failure())),
                Err(failure) => ("refused", refuse(&*provider, failure)),
            },
            _ if !fits => {
                let failure = OutOfBounds::Long(bounds.bytes).failure();
                ("refused", error_response(plain_error(&failure), &failure))
            }
            Some((_, RequestKind::Auxiliary)) => ("auxiliary", self.pass(parts, body, bounds).await),
            None => ("other", self.pass(parts, body, bounds).await),
        };
        metrics::counter!(names::REQUESTS, "kind" => kind).increment(1);
        tracing::info!(
            target: "crab_coordinator::access",
            sandbox = sandbox.as_ref().map(tracing::field::display),
            kind,
            %method,
            path,
            status = response.status().as_u16(),
            head_us = started.elapsed().as_micros() as u64,
        );
        response
    }

    /// Whose turn a request ends, or why it may not.
    fn turn_of(&self, parts: &Parts, sandbox: Option<SandboxId>) -> Result<SandboxId, Failure> {
        if self.draining.load(Ordering::Relaxed) {
            return Err(Failure::new(FailureKind::Draining, "The coordinator is shutting down. Try again."));
        }
        if upgrade_wanted(&parts.headers).is_some() {
            return Err(Failure::new(
                FailureKind::UpgradeRefused,
                "Turns are served by HTTP here, not by another protocol: send the request as a plain POST.",
            ));
        }
        sandbox.ok_or_else(|| {
            Failure::new(
                FailureKind::UnknownSandbox,
                "The request names no sandbox that this coordinator serves, so its turn cannot be protected. Use the base URL that was given for the sandbox.",
            )
        })
    }

    /// A request that is no turn: forwarded as it is, ungated.
    async fn pass(&self, parts: Parts, body: Incoming, bounds: Bounds) -> Response<OutBody> {
        let body = Patient::new(body, bounds).boxed_unsync();
        let upgrade = upgrade_wanted(&parts.headers);
        self.forward(Request::from_parts(parts, body), upgrade, bounds).await
    }

    async fn forward(
        &self,
        mut request: Request<UpBody>,
        upgrade: Option<HeaderValue>,
        bounds: Bounds,
    ) -> Response<OutBody> {
        // The agent's connection, should the model's server agree to change the protocol.
        let agent = upgrade.is_some().then(|| hyper::upgrade::on(&mut request));
        match self.upstream.send_with(request, upgrade).await {
            Ok(response) => {
                if response.status() == StatusCode::SWITCHING_PROTOCOLS {
                    return self.switch(response, agent);
                }
                let bounds = Bounds { bytes: u64::MAX, ..bounds };
                let mut response = response.map(|body| OutBody::Upstream(Patient::new(body, bounds)));
                *response.version_mut() = Version::HTTP_11;
                strip_hop_by_hop(response.headers_mut());
                response
            }
            Err(failure) => {
                metrics::counter!(names::UPSTREAM_ERRORS, "code" => failure.code()).increment(1);
                error_response(plain_error(&failure), &failure)
            }
        }
    }

    fn is_helper(&self, digest: Option<&RequestDigest>) -> bool {
        let model = digest.and_then(|digest| digest.model.as_deref());
        model.is_some_and(|model| self.helpers.iter().any(|name| matches(name, model)))
    }

    /// From here on bytes are carried both ways until either side ends, or the coordinator does.
    fn switch(&self, mut response: Response<DownBody>, agent: Option<OnUpgrade>) -> Response<OutBody> {
        let model = hyper::upgrade::on(&mut response);
        let protocol = response.headers().get(header::UPGRADE).cloned();
        let (Some(agent), Some(protocol)) = (agent, protocol) else {
            let failure = Failure::new(
                FailureKind::UpstreamUnreachable,
                "The model's server changed the protocol without being asked.",
            );
            return error_response(plain_error(&failure), &failure);
        };
        let mut stopped = self.stopped.clone();
        tokio::spawn(async move {
            let carry = async {
                let (agent, model) = tokio::try_join!(agent, model)?;
                let (mut agent, mut model) = (TokioIo::new(agent), TokioIo::new(model));
                tokio::io::copy_bidirectional(&mut agent, &mut model)
                    .await
                    .map_err(|error| -> BoxError { error.into() })
            };
            tokio::select! {
                carried = carry => {
                    if let Err(error) = carried {
                        tracing::debug!(error, "a changed connection ended early");
                    }
                }
                () = told(&mut stopped) => {}
            }
        });
        let mut response = response.map(|_| OutBody::Full(None));
        strip_hop_by_hop(response.headers_mut());
        ask_for(response.headers_mut(), protocol);
        response
    }

    /// A request that ends a turn.
    async fn turn(
        self: &Arc<Self>,
        sandbox: SandboxId,
        provider: Arc<dyn Provider>,
        parts: Parts,
        body: Incoming,
        bounds: Bounds,
    ) -> Response<OutBody> {
        let hasher = if is_plain(&parts.headers) {
            RequestHasher::new(provider.conversation())
        } else {
            RequestHasher::opaque()
        };
        let path = parts.uri.path().to_owned();
        let asked = |digest: Option<RequestDigest>| {
            if digest.is_none() {
                metrics::counter!(names::NO_DIGEST).increment(1);
            }
            Arc::new(Asked {
                sandbox: sandbox.clone(),
                provider: provider.name(),
                key: digest.as_ref().map(|digest| request_key(provider.name(), &path, digest.body)),
                conversation: digest.as_ref().and_then(|digest| digest.conversation),
                prefixes: digest.map_or_else(Vec::new, |digest| digest.prefixes),
            })
        };
        let sign = provider.keep_alive(&parts.headers);
        let body = Patient::new(body, bounds);
        let intake = match Intake::read(body, hasher, self.request_buffer).await {
            Ok(intake) => intake,
            Err(error) => {
                let failure = match error.downcast_ref::<OutOfBounds>() {
                    Some(bound) => bound.failure(),
                    None => Failure::new(FailureKind::BadRequest, format!("The request's body broke off: {error}.")),
                };
                return refuse(&*provider, failure);
            }
        };
        let ticket = match intake {
            Intake::Whole { body, digest } if self.is_helper(digest.as_ref()) => {
                return self.forward(Request::from_parts(parts, body.boxed_unsync()), None, bounds).await;
            }
            Intake::Whole { body, digest } => {
                let mut ticket = self.admit(&asked(digest)).await;
                let request = Request::from_parts(parts, body.boxed_unsync());
                let upstream = Arc::clone(&self.upstream);
                let answer = Box::pin(async move { upstream.send(request).await });
                self.work(&mut ticket, &provider, bounds, answer);
                ticket
            }
            Intake::Long(body, promise) => {
                let request = Request::from_parts(parts, body.boxed_unsync());
                self.long(request, promise, asked, &provider, bounds).await
            }
        };
        let delivered = {
            let turns = Arc::clone(&self.turns);
            let sandbox = sandbox.clone();
            Box::new(move || turns.delivered(&sandbox, ticket.number))
        };
        respond(ticket.gate, ticket.subscription, provider, sign, self.keep_alive, delivered).await
    }

    /// A long request is on its way to the model while its digest is still being taken.
    async fn long(
        self: &Arc<Self>,
        request: Request<UpBody>,
        mut promise: Promise,
        asked: impl Fn(Option<RequestDigest>) -> Arc<Asked>,
        provider: &Arc<dyn Provider>,
        bounds: Bounds,
    ) -> Ticket {
        let upstream = Arc::clone(&self.upstream);
        let mut sending = AbortOnDrop(tokio::spawn(async move { upstream.send(request).await }));
        // An upstream that answers before the end, such as with "too large", answers a request that has no digest.
        let (digest, early) = tokio::select! {
            biased;
            digest = &mut promise.digest => (digest.ok().flatten(), None),
            response = &mut sending.0 => (None, Some(response)),
        };
        let mut ticket = self.admit(&asked(digest)).await;
        if ticket.work == Work::Ask {
            let _ = promise.proceed.send(());
        }
        let answer = Box::pin(async move {
            let response = match early {
                Some(response) => response,
                None => (&mut sending.0).await,
            };
            response.unwrap_or_else(|error| {
                Err(Failure::new(
                    FailureKind::UpstreamUnreachable,
                    format!("The request could not be sent: {error}. Try again."),
                ))
            })
        });
        self.work(&mut ticket, provider, bounds, answer);
        ticket
    }

    async fn admit(&self, asked: &Arc<Asked>) -> Ticket {
        loop {
            match self.turns.admit(asked, self.turns.new_recording()) {
                Admitted::Turn(ticket) => return *ticket,
                Admitted::Wait(recording) => recording.ended().await,
            }
        }
    }

    /// Gets the answer going, where nobody else does, and attends to the gate of a new turn.
    fn work(&self, ticket: &mut Ticket, provider: &Arc<dyn Provider>, bounds: Bounds, response: Answer) {
        let driver = Driver {
            turns: Arc::clone(&self.turns),
            asked: Arc::clone(&ticket.asked),
            number: ticket.number,
            attempt: ticket.attempt,
            gate: Arc::clone(&ticket.gate),
            recording: Arc::clone(&ticket.recording),
            provider: Arc::clone(provider),
            grace: self.grace,
            bounds: Bounds { bytes: u64::MAX, ..bounds },
        };
        let (turns, asked, number, gate) =
            (Arc::clone(&self.turns), Arc::clone(&ticket.asked), ticket.number, Arc::clone(&ticket.gate));
        let hold = ticket.hold.take();
        let attend = async move {
            if let Some(hold) = hold {
                turns.attend(&asked.sandbox, number, &gate, hold).await;
            }
        };
        // First the work: the request goes to the model before anything else is done.
        let mut work: Pin<Box<dyn Future<Output = ()> + Send>> = match ticket.work.clone() {
            Work::Nothing => return,
            Work::Ask => Box::pin(async move {
                let ask = pin!(driver.ask(response));
                tokio::join!(biased; ask, attend);
            }),
            Work::Replay { from, link } => Box::pin(async move {
                let replay = pin!(driver.replay(from, link));
                tokio::join!(biased; replay, attend);
            }),
        };
        // Here and now as far as it gets, so that the request is on its way before a task is made.
        if work.as_mut().now_or_never().is_none() {
            self.turns.spawn(work);
        }
    }
}

/// The model's answer, or why there is none. In a box: what holds a future by value holds it several times over.
type Answer = Pin<Box<dyn Future<Output = Result<Response<DownBody>, Failure>> + Send>>;

fn refuse(provider: &dyn Provider, failure: Failure) -> Response<OutBody> {
    error_response(provider.error(&failure), &failure)
}

/// A task that ends with its owner.
struct AbortOnDrop<T>(tokio::task::JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

/// Whether a text is as a pattern says, in which `*` stands for any text.
fn matches(pattern: &str, text: &str) -> bool {
    let Some((first, rest)) = pattern.split_once('*') else {
        return pattern == text;
    };
    let Some(text) = text.strip_prefix(first) else {
        return false;
    };
    // The rest may begin anywhere.
    (0..=text.len()).filter(|&at| text.is_char_boundary(at)).any(|at| matches(rest, &text[at..]))
}

/// How long waits may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    pub(crate) header_timeout: Duration,
    /// How long either side may be silent within a body.
    pub(crate) silence: Duration,
    /// How long a request may take in all.
    pub(crate) request: Duration,
    pub(crate) connections: usize,
    pub(crate) head_bytes: usize,
    pub(crate) body_bytes: u64,
}

impl Limits {
    /// For the bodies of a request that began then.
    fn bounds(&self, began: Instant) -> Bounds {
        Bounds { silence: self.silence, deadline: began + self.request, bytes: self.body_bytes }
    }
}

#[cfg(test)]
mod tests {
    use super::matches;

    #[test]
    fn stars_stand_for_any_text() {
        for (pattern, text, expected) in [
            ("a", "a", true),
            ("a", "ab", false),
            ("a*", "ab", true),
            ("*haiku*", "claude-haiku-4", true),
            ("*haiku*", "claude-opus-4", false),
            ("*-mini", "gpt-mini-x", false),
            ("*-mini", "gpt-x-mini", true),
            ("*", "", true),
            ("*\u{e4}", "\u{e4}\u{e4}", true),
        ] {
            assert_eq!(matches(pattern, text), expected, "{pattern} {text}");
        }
    }
}
