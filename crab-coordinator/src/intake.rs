//! Takes a turn's request in, so that it is known which turn it is before the model is asked.
//!
//! A request that fits into a buffer, as nearly all do, is read, digested, and forwarded at once when its end has come.
//! A longer one streams through; only its last piece waits until the digest says whether the model is to be asked at
//! all. If not, the request is withdrawn before it was complete, so the model never sees a request twice.

use std::collections::VecDeque;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use http_body_util::BodyExt as _;
use hyper::body::Incoming;
use tokio::sync::oneshot;

use crate::body::{BoxError, SMALL};
use crate::digest::{RequestDigest, RequestHasher};
use crate::patience::Patient;

/// A request's body.
pub(crate) enum Intake {
    /// All of it is here.
    Whole { body: Collected, digest: Option<RequestDigest> },
    /// More will come.
    Long(LongBody, Promise),
}

/// The coordinator's side of a long body.
pub(crate) struct Promise {
    /// Resolves at the body's end.
    pub(crate) digest: oneshot::Receiver<Option<RequestDigest>>,
    /// Lets the last piece go.
    pub(crate) proceed: oneshot::Sender<()>,
}

/// A body in memory.
#[derive(Debug, Default)]
pub(crate) struct Collected {
    pieces: VecDeque<Bytes>,
    /// Small pieces that came after those. Each by itself would keep the buffer that it was read into.
    small: BytesMut,
    trailers: Option<HeaderMap>,
    left: u64,
    /// Whether the length was declared; else the body is sent in chunks, as it came.
    sized: bool,
}

impl Intake {
    /// Reads a body up to `limit` bytes.
    ///
    /// # Errors
    /// Where the client broke off.
    pub(crate) async fn read(
        mut body: Patient<Incoming>,
        mut hasher: RequestHasher,
        limit: u64,
    ) -> Result<Self, BoxError> {
        let mut collected = Collected { sized: body.size_hint().exact().is_some(), ..Collected::default() };
        let declared = body.size_hint().exact();
        while collected.left <= limit {
            match body.frame().await {
                None => {
                    collected.gather();
                    return Ok(Self::Whole { body: collected, digest: hasher.finish() });
                }
                Some(frame) => match frame?.into_data() {
                    Ok(data) => {
                        hasher.update(&data);
                        collected.push(data);
                    }
                    Err(frame) => collected.trailers = frame.into_trailers().ok(),
                },
            }
        }
        collected.gather();
        let (digest_sender, digest) = oneshot::channel();
        let (proceed, may_proceed) = oneshot::channel();
        let long = LongBody {
            held: collected.pieces.pop_back().map(Frame::data),
            pieces: collected.pieces,
            rest: body,
            hasher: Some((hasher, digest_sender)),
            proceed: may_proceed,
            declared,
        };
        Ok(Self::Long(long, Promise { digest, proceed }))
    }
}

impl Collected {
    fn push(&mut self, piece: Bytes) {
        self.left += piece.len() as u64;
        if piece.len() < SMALL {
            self.small.extend_from_slice(&piece);
        } else {
            self.gather();
            self.pieces.push_back(piece);
        }
    }

    fn gather(&mut self) {
        if !self.small.is_empty() {
            self.pieces.push_back(std::mem::take(&mut self.small).freeze());
        }
    }
}

impl Body for Collected {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, _cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if let Some(piece) = self.pieces.pop_front() {
            self.left -= piece.len() as u64;
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        Poll::Ready(self.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.pieces.is_empty() && self.trailers.is_none()
    }

    fn size_hint(&self) -> SizeHint {
        if self.sized { SizeHint::with_exact(self.left) } else { SizeHint::default() }
    }
}

/// A body that streams through and whose last piece waits for leave.
pub(crate) struct LongBody {
    pieces: VecDeque<Bytes>,
    held: Option<Frame<Bytes>>,
    rest: Patient<Incoming>,
    /// Until the end has come.
    hasher: Option<(RequestHasher, oneshot::Sender<Option<RequestDigest>>)>,
    proceed: oneshot::Receiver<()>,
    declared: Option<u64>,
}

/// The request was withdrawn: it need not be asked.
#[derive(Debug)]
struct Withdrawn;

impl std::fmt::Display for Withdrawn {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the request was withdrawn")
    }
}

impl std::error::Error for Withdrawn {}

impl Body for LongBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        if let Some(piece) = this.pieces.pop_front() {
            return Poll::Ready(Some(Ok(Frame::data(piece))));
        }
        while let Some((hasher, _)) = &mut this.hasher {
            match std::task::ready!(Pin::new(&mut this.rest).poll_frame(cx)) {
                Some(Ok(frame)) => {
                    if let Some(data) = frame.data_ref() {
                        hasher.update(data);
                    }
                    if let Some(before) = this.held.replace(frame) {
                        return Poll::Ready(Some(Ok(before)));
                    }
                }
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                None => {
                    if let Some((hasher, sender)) = this.hasher.take() {
                        let _ = sender.send(hasher.finish());
                    }
                }
            }
        }
        let Some(last) = this.held.take() else {
            return Poll::Ready(None);
        };
        match Pin::new(&mut this.proceed).poll(cx) {
            Poll::Ready(Ok(())) => Poll::Ready(Some(Ok(last))),
            Poll::Ready(Err(_)) => Poll::Ready(Some(Err(Withdrawn.into()))),
            Poll::Pending => {
                this.held = Some(last);
                Poll::Pending
            }
        }
    }

    fn size_hint(&self) -> SizeHint {
        // Asked once, before the first frame.
        self.declared.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}
