//! The bodies that go to the agent.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::Stream;
use http_body::{Body, Frame, SizeHint};

use crate::patience::Patient;
use crate::turn::recording::Subscription;
use crate::upstream::DownBody;

pub(crate) type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// Less than this is a small part of the buffer that it was read into.
pub(crate) const SMALL: usize = 4096;

/// A piece of a body that keeps no more memory than its own, or twice as much.
pub(crate) fn owned(piece: Bytes) -> Bytes {
    if piece.len() < SMALL { Bytes::copy_from_slice(&piece) } else { piece }
}

/// Called once, when a whole answer has been handed to the client's connection.
pub(crate) type OnDelivered = Box<dyn FnOnce() + Send>;

/// A body that goes to the agent.
pub(crate) enum OutBody {
    /// In one piece.
    Full(Option<Bytes>),
    /// Straight from the model's server.
    Upstream(Patient<DownBody>),
    /// A turn's answer.
    Reading(Reading),
    /// A turn's answer that was held so long that the client had to be kept.
    Held(Pin<Box<dyn Stream<Item = Result<Frame<Bytes>, BoxError>> + Send>>),
}

/// A turn's answer.
pub(crate) struct Reading {
    pub(crate) subscription: Subscription,
    pub(crate) on_delivered: Option<OnDelivered>,
}

impl Reading {
    pub(crate) fn poll_frame(&mut self, cx: &Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let polled = self.subscription.poll_frame(cx);
        if polled.is_ready()
            && self.on_delivered.is_some()
            && self.subscription.is_read()
            && let Some(delivered) = self.on_delivered.take()
        {
            delivered();
        }
        polled.map(|frame| frame.map(|frame| frame.map_err(Into::into)))
    }
}

impl Body for OutBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        match &mut *self {
            Self::Full(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Upstream(body) => Pin::new(body).poll_frame(cx),
            Self::Reading(reading) => reading.poll_frame(cx),
            Self::Held(stream) => stream.as_mut().poll_next(cx),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Full(bytes) => bytes.is_none(),
            Self::Upstream(body) => body.is_end_stream(),
            Self::Reading(_) | Self::Held(_) => false,
        }
    }

    fn size_hint(&self) -> SizeHint {
        match self {
            Self::Full(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Self::Upstream(body) => body.size_hint(),
            Self::Reading(_) | Self::Held(_) => SizeHint::default(),
        }
    }
}
