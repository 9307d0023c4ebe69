//! Gets an answer, from the model or from the journal, into a recording and onto disk.
//!
//! A driver runs apart from the clients that wait, so that an answer is noticed, and journaled, while its gate is
//! closed. When nobody wants the answer any more, the driver lets go of the model's server.
//!
//! # The end of an answer is durable before it is given
//! Pieces are handed on as they come, since holding them for the disk would take the life out of a stream. Only the
//! last one waits until the answer is whole and durable in the journal. Which one is the last is known from the framing
//! (the declared length is reached, or the end follows at once), and for event streams from the event that ends an
//! answer: its piece is held for at most [`LAST_PATIENCE`] to see the end follow, those before it not at all. While a gate is closed all this costs
//! the agent nothing.

use std::future::{Future, poll_fn};
use std::path::PathBuf;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use crab_core::TurnNumber;
use futures_util::FutureExt as _;
use http::{HeaderMap, Response, header};
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Frame};

use super::gate::TurnGate;
use super::recording::{End, Recording};
use super::{Asked, Turns};
use crate::body::BoxError;
use crate::headers::strip_hop_by_hop;
use crate::journal::{AnswerName, AnswerReader, AnswerWriter, Head};
use crate::names;
use crate::patience::{Bounds, Patient};
use crate::provider::{EventMark, Failure, FailureKind, Provider};
use crate::respond::{content_type, is_plain};
use crate::sse::{LineSplitter, SseEvent, SseSplitter};
use crate::upstream::DownBody;

/// How long the piece that ends an answer is held for the end of its stream to follow.
const LAST_PATIENCE: Duration = Duration::from_millis(50);

/// How long an answer is wanted that nobody waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Grace {
    /// After its clients went away.
    pub(crate) abandoned: Duration,
    /// After its clients were told to try again.
    pub(crate) refused: Duration,
}

/// One attempt to get one turn's answer.
pub(crate) struct Driver {
    pub(crate) turns: Arc<Turns>,
    pub(crate) asked: Arc<Asked>,
    pub(crate) number: TurnNumber,
    pub(crate) attempt: u32,
    pub(crate) gate: Arc<TurnGate>,
    pub(crate) recording: Arc<Recording>,
    pub(crate) provider: Arc<dyn Provider>,
    pub(crate) grace: Grace,
    /// What the answer's body may cost.
    pub(crate) bounds: Bounds,
}

impl Driver {
    /// Has the model's answer, or its failure, come out of `response`.
    pub(crate) async fn ask<F>(self, response: F)
    where
        F: Future<Output = Result<Response<DownBody>, Failure>>,
    {
        let recording = Arc::clone(&self.recording);
        let mut abandoned = pin!(recording.abandoned(self.grace.abandoned, self.grace.refused));
        let response = tokio::select! {
            biased;
            response = response => response,
            () = &mut abandoned => return self.gone(nobody_waits()),
        };
        match response {
            Ok(response) => self.receive(response, abandoned).await,
            Err(failure) => {
                metrics::counter!(names::UPSTREAM_ERRORS, "code" => failure.code()).increment(1);
                self.gone(End::Failed(failure));
            }
        }
    }

    fn gone(&self, end: End) {
        // First the ledger, then the clients: one that tries again at once must find it settled.
        self.turns.answer_gone(&self.asked, self.number, self.attempt);
        self.recording.finish(end);
    }

    async fn receive(self, response: Response<DownBody>, mut abandoned: Pin<&mut impl Future<Output = ()>>) {
        let (parts, body) = response.into_parts();
        let mut body = Patient::new(body, self.bounds);
        let framed = parts.version == http::Version::HTTP_2
            || parts.headers.contains_key(header::CONTENT_LENGTH)
            || parts.headers.contains_key(header::TRANSFER_ENCODING);
        let mut head = Head { status: parts.status, headers: parts.headers };
        strip_hop_by_hop(&mut head.headers);
        let mut scan = Scan::new(&head.headers, Arc::clone(&self.provider));
        let mut writer = self.begin(&head);
        self.recording.set_head(head);

        let mut held: Option<Bytes> = None;
        let mut trailers = None;
        loop {
            let next = if held.is_some() {
                ahead(&mut body, scan.is_last()).await
            } else {
                tokio::select! {
                    biased;
                    next = body.frame() => Some(next),
                    () = &mut abandoned => return self.gone(nobody_waits()),
                }
            };
            let Some(next) = next else {
                // The end does not follow at once, so what is held is not the last piece.
                self.release(&mut held).await;
                continue;
            };
            match next.map(|frame| frame.map(Frame::into_data)) {
                Some(Ok(Ok(data))) => {
                    self.gate.answer_arrived();
                    self.release(&mut held).await;
                    scan.update(&data);
                    self.append(&mut writer, &data).await;
                    held = Some(data);
                    if !scan.may_end() {
                        // Whatever follows, this is not the end of a whole answer.
                        self.release(&mut held).await;
                        give_way().await;
                    }
                }
                Some(Ok(Err(frame))) => trailers = frame.into_trailers().ok(),
                Some(Err(error)) => {
                    self.release(&mut held).await;
                    let why = crate::upstream::causes(error.as_ref());
                    tracing::info!(sandbox = %self.asked.sandbox, turn = %self.number, why, "the model's answer broke off");
                    return self.gone(End::Broken(why.into()));
                }
                None => break,
            }
        }
        self.gate.answer_arrived();
        let writer = writer.filter(|_| scan.is_whole(framed));
        let kept = match writer {
            Some(writer) => self.keep(writer, trailers.as_ref()).await,
            None => None,
        };
        match kept {
            Some(bytes) => {
                self.turns.answer_whole(&self.asked, self.number, self.attempt, bytes);
            }
            None => self.turns.answer_gone(&self.asked, self.number, self.attempt),
        }
        self.release(&mut held).await;
        self.recording.finish(End::Whole(trailers));
        give_way().await;
    }

    async fn release(&self, held: &mut Option<Bytes>) {
        if let Some(data) = held.take() {
            self.recording.push(data).await;
        }
    }

    /// Only an answer that the agent will accept is worth keeping.
    fn begin(&self, head: &Head) -> Option<AnswerWriter> {
        let journal = self.turns.journal.as_ref()?;
        if !head.status.is_success() {
            return None;
        }
        let name = AnswerName { sandbox: self.asked.sandbox.clone(), turn: self.number, key: self.asked.key };
        match journal.begin(&name, self.attempt, head) {
            Ok(writer) => Some(writer),
            Err(error) => {
                self.not_journaled(&error);
                None
            }
        }
    }

    async fn append(&self, writer: &mut Option<AnswerWriter>, data: &Bytes) {
        if let Some(open) = writer
            && let Err(error) = open.append(data).await
        {
            self.not_journaled(&error);
            *writer = None;
        }
    }

    async fn keep(&self, writer: AnswerWriter, trailers: Option<&HeaderMap>) -> Option<u64> {
        match writer.finish(trailers).await {
            Ok(bytes) => Some(bytes),
            Err(error) => {
                self.not_journaled(&error);
                None
            }
        }
    }

    /// The answer goes through nevertheless: the turn's version is what protects the sandbox. Without the journal the
    /// model is asked again after a crash.
    fn not_journaled(&self, error: &crab_core::Error) {
        metrics::counter!(names::JOURNAL_ERRORS).increment(1);
        tracing::error!(sandbox = %self.asked.sandbox, turn = %self.number, %error, "an answer is not in the journal");
    }

    /// Gives an answer from the journal. Where it belongs to an earlier turn, it is kept as this turn's too.
    pub(crate) async fn replay(self, from: PathBuf, link: Option<PathBuf>) {
        let recording = Arc::clone(&self.recording);
        let mut abandoned = pin!(recording.abandoned(self.grace.abandoned, self.grace.refused));
        let linked = link.is_some();
        let opened = blocking(move || {
            let reader = AnswerReader::open(&from)?;
            if let Some(link) = link {
                let _ = std::fs::remove_file(&link);
                std::fs::hard_link(&from, &link)
                    .map_err(|error| crab_core::Error::io(format_args!("link {}", link.display()), error))?;
            }
            let bytes = std::fs::metadata(&from).map_or(0, |metadata| metadata.len());
            Ok((reader, bytes))
        });
        let (mut reader, bytes) = match opened.await {
            Ok(opened) => opened,
            Err(error) => {
                tracing::error!(sandbox = %self.asked.sandbox, turn = %self.number, %error, "the journal cannot answer");
                metrics::counter!(names::JOURNAL_ERRORS).increment(1);
                // Now it is known, so the next try goes to the model.
                return self.gone(End::Failed(Failure::new(
                    FailureKind::UpstreamUnreachable,
                    "The journal's answer to this request cannot be read. Try again: the model will be asked.",
                )));
            }
        };
        if linked {
            self.turns.answer_whole(&self.asked, self.number, self.attempt, bytes);
        }
        self.recording.set_head(reader.head.clone());
        loop {
            let piece = blocking(move || reader.next_piece().map(|piece| (piece, reader)));
            let piece = tokio::select! {
                piece = piece => piece,
                () = &mut abandoned => return self.recording.finish(nobody_waits()),
            };
            self.gate.answer_arrived();
            match piece {
                Ok((Some(piece), back)) => {
                    reader = back;
                    self.recording.push(piece).await;
                }
                Ok((None, back)) => return self.recording.finish(End::Whole(back.trailers)),
                Err(error) => return self.gone(End::Broken(error.to_string().into())),
            }
        }
    }
}

/// Lets those go first that were woken: what they have to hand on is waited for, what follows here is not.
async fn give_way() {
    let mut gave_way = false;
    poll_fn(|cx| {
        if std::mem::replace(&mut gave_way, true) {
            return Poll::Ready(());
        }
        cx.waker().wake_by_ref();
        Poll::Pending
    })
    .await;
}

fn nobody_waits() -> End {
    End::Broken("nobody waited for it any more".into())
}

async fn blocking<T: Send + 'static>(
    work: impl FnOnce() -> crab_core::Result<T> + Send + 'static,
) -> crab_core::Result<T> {
    tokio::task::spawn_blocking(work).await.unwrap_or_else(|error| {
        Err(crab_core::Error::new(crab_core::ErrorKind::Internal, "the reader broke off").caused_by(error))
    })
}

type Next = Option<Result<Frame<Bytes>, BoxError>>;

/// What follows, if it follows at once; after the event that ends an answer, if it follows soon.
async fn ahead(body: &mut Patient<DownBody>, is_last: bool) -> Option<Next> {
    if body.is_end_stream() {
        return Some(None);
    }
    if let Some(next) = body.frame().now_or_never() {
        return Some(next);
    }
    if !is_last {
        return None;
    }
    tokio::time::timeout(LAST_PATIENCE, body.frame()).await.ok()
}

/// Watches an answer pass, to know whether it is one that may be given again.
struct Scan {
    events: Option<(Splitter, Arc<dyn Provider>)>,
    complete: bool,
    last: bool,
    error: bool,
}

/// How a plain stream is split into events. Others cannot be looked into.
enum Splitter {
    Sse(SseSplitter),
    Lines(LineSplitter),
}

impl Scan {
    fn new(headers: &HeaderMap, provider: Arc<dyn Provider>) -> Self {
        let splitter = match content_type(headers) {
            _ if !is_plain(headers) => None,
            Some("text/event-stream") => Some(Splitter::Sse(SseSplitter::default())),
            Some("application/x-ndjson") => Some(Splitter::Lines(LineSplitter::default())),
            _ => None,
        };
        Self { events: splitter.map(|splitter| (splitter, provider)), complete: false, last: false, error: false }
    }

    fn update(&mut self, data: &[u8]) {
        let Some((splitter, provider)) = &mut self.events else {
            return;
        };
        let mut each = |event: SseEvent<'_>| match provider.mark(event) {
            EventMark::Ordinary => {}
            EventMark::Complete => self.complete = true,
            EventMark::Last => (self.complete, self.last) = (true, true),
            EventMark::Error => self.error = true,
        };
        match splitter {
            Splitter::Sse(splitter) => splitter.update(data, each),
            Splitter::Lines(splitter) => splitter.update(data, |line| each(SseEvent { name: b"", data: line })),
        }
    }

    /// Whether a whole answer may end here.
    fn may_end(&self) -> bool {
        self.events.is_none() || self.complete
    }

    fn is_last(&self) -> bool {
        self.last
    }

    /// Whether the answer that has just ended is whole. A stream of events must have said so; of others the framing must
    /// have: a body that is ended by closing the connection may have been cut.
    fn is_whole(&self, framed: bool) -> bool {
        match self.events {
            Some(_) => self.complete && !self.error,
            None => framed,
        }
    }
}
