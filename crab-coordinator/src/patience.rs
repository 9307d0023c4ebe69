//! Bounds on waiting: a body whose sender falls silent, takes too long in all or sends too much; a peer that does not
//! read.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep_until};

use crate::body::BoxError;
use crate::provider::{Failure, FailureKind};

/// A clock that runs only while something is waited for.
#[derive(Debug)]
struct Clock {
    patience: Duration,
    running: bool,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl Clock {
    fn new(patience: Duration) -> Self {
        Self { patience, running: false, sleep: None }
    }

    /// Something happened.
    fn stop(&mut self) {
        self.running = false;
    }

    /// Nothing has happened yet: whether it is too late now.
    fn poll_late(&mut self, cx: &mut Context<'_>, deadline: Option<Instant>) -> Poll<()> {
        let patience = self.patience;
        if !std::mem::replace(&mut self.running, true) {
            let late = Instant::now() + patience;
            let late = deadline.map_or(late, |deadline| late.min(deadline));
            match &mut self.sleep {
                Some(sleep) => sleep.as_mut().reset(late),
                None => self.sleep = Some(Box::pin(sleep_until(late))),
            }
        }
        match &mut self.sleep {
            Some(sleep) => sleep.as_mut().poll(cx),
            None => Poll::Pending,
        }
    }
}

/// What a body may cost.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// How long its sender may be silent.
    pub(crate) silence: Duration,
    /// When it must have ended.
    pub(crate) deadline: Instant,
    /// How long it may be.
    pub(crate) bytes: u64,
}

/// Why a body was cut off.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum OutOfBounds {
    /// Nothing came for so long.
    Silent(Duration),
    /// It did not end in time.
    Slow,
    /// It is longer than so many bytes.
    Long(u64),
}

impl OutOfBounds {
    /// What an agent hears whose request's body it was.
    pub(crate) fn failure(self) -> Failure {
        match self {
            Self::Long(limit) => Failure::new(
                FailureKind::TooLong,
                format!("The request's body is longer than the {limit} bytes that the coordinator takes."),
            ),
            Self::Silent(_) | Self::Slow => {
                Failure::new(FailureKind::BadRequest, format!("The request's body broke off: {self}."))
            }
        }
    }
}

impl fmt::Display for OutOfBounds {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Silent(patience) => write!(f, "nothing came for {} s", patience.as_secs_f32()),
            Self::Slow => f.write_str("it did not end within the time for a request"),
            Self::Long(bytes) => write!(f, "it is longer than {bytes} bytes"),
        }
    }
}

impl std::error::Error for OutOfBounds {}

/// A body that fails where its bounds are passed.
#[derive(Debug)]
pub(crate) struct Patient<B> {
    body: B,
    clock: Clock,
    bounds: Bounds,
    taken: u64,
}

impl<B> Patient<B> {
    pub(crate) fn new(body: B, bounds: Bounds) -> Self {
        Self { body, clock: Clock::new(bounds.silence), bounds, taken: 0 }
    }
}

impl<B> Body for Patient<B>
where
    B: Body<Data = Bytes> + Unpin,
    B::Error: Into<BoxError>,
{
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let this = &mut *self;
        let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) else {
            ready!(this.clock.poll_late(cx, Some(this.bounds.deadline)));
            let why = if Instant::now() >= this.bounds.deadline {
                OutOfBounds::Slow
            } else {
                OutOfBounds::Silent(this.bounds.silence)
            };
            return Poll::Ready(Some(Err(why.into())));
        };
        this.clock.stop();
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            this.taken += data.len() as u64;
            if this.taken > this.bounds.bytes {
                return Poll::Ready(Some(Err(OutOfBounds::Long(this.bounds.bytes).into())));
            }
            if Instant::now() >= this.bounds.deadline {
                return Poll::Ready(Some(Err(OutOfBounds::Slow.into())));
            }
        }
        Poll::Ready(frame.map(|frame| frame.map_err(Into::into)))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// A connection that fails where the other side does not take what is written for too long. Reading may take as long as
/// it likes.
#[derive(Debug)]
pub(crate) struct Taken<S> {
    stream: S,
    clock: Clock,
}

impl<S: AsyncWrite + Unpin> Taken<S> {
    pub(crate) fn new(stream: S, patience: Duration) -> Self {
        Self { stream, clock: Clock::new(patience) }
    }

    fn poll<T>(
        &mut self,
        cx: &mut Context<'_>,
        poll: impl FnOnce(Pin<&mut S>, &mut Context<'_>) -> Poll<io::Result<T>>,
    ) -> Poll<io::Result<T>> {
        if let Poll::Ready(outcome) = poll(Pin::new(&mut self.stream), cx) {
            self.clock.stop();
            return Poll::Ready(outcome);
        }
        ready!(self.clock.poll_late(cx, None));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Taken<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buf)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Taken<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.poll(cx, |stream, cx| stream.poll_write(cx, buf))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll(cx, |stream, cx| stream.poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll(cx, |stream, cx| stream.poll_flush(cx))
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll(cx, |stream, cx| stream.poll_shutdown(cx))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::{StreamExt as _, stream};
    use http_body_util::{BodyExt as _, StreamBody};
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    type Pauses = StreamBody<Pin<Box<dyn futures_util::Stream<Item = Result<Frame<Bytes>, BoxError>> + Send>>>;

    /// A byte after each of these pauses, in seconds.
    fn pauses(pauses: &[u64]) -> Pauses {
        StreamBody::new(Box::pin(stream::iter(pauses.to_vec()).then(|seconds| async move {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            Ok(Frame::data(Bytes::from_static(b"x")))
        })))
    }

    fn bounds(seconds: u64, bytes: u64) -> Bounds {
        let deadline = Instant::now() + Duration::from_secs(seconds);
        Bounds { silence: Duration::from_secs(10), deadline, bytes }
    }

    #[tokio::test(start_paused = true)]
    async fn slowness_has_an_end_and_so_has_length() {
        for (bounds, why) in [(bounds(12, 100), OutOfBounds::Slow), (bounds(100, 2), OutOfBounds::Long(2))] {
            let mut body = Patient::new(pauses(&[5, 5, 5, 5]), bounds);
            assert!(body.frame().await.unwrap().is_ok());
            assert!(body.frame().await.unwrap().is_ok());
            let error = body.frame().await.unwrap().unwrap_err();
            assert_eq!(error.downcast_ref(), Some(&why));
        }
        // Whoever never pauses is stopped as well.
        let mut body = Patient::new(pauses(&[5, 0, 0]), bounds(6, 100));
        assert!(body.frame().await.unwrap().is_ok());
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(body.frame().await.unwrap().is_err());
    }

    #[tokio::test(start_paused = true)]
    async fn silence_is_an_error_and_slowness_is_not() {
        let mut body = Patient::new(pauses(&[9, 9, 11]), bounds(1000, 100));
        assert!(body.frame().await.unwrap().is_ok());
        // Whoever reads may take his time.
        tokio::time::sleep(Duration::from_secs(100)).await;
        assert!(body.frame().await.unwrap().is_ok());
        let error = body.frame().await.unwrap().unwrap_err();
        assert_eq!(error.to_string(), "nothing came for 10 s");
    }

    #[tokio::test(start_paused = true)]
    async fn a_peer_that_does_not_read_is_given_up() {
        let (ours, mut theirs) = tokio::io::duplex(4);
        let mut ours = Taken::new(ours, Duration::from_secs(10));
        ours.write_all(b"1234").await.unwrap();
        tokio::time::sleep(Duration::from_secs(100)).await;
        let mut read = [0; 4];
        theirs.read_exact(&mut read).await.unwrap();
        ours.write_all(b"1234").await.unwrap();
        let error = ours.write_all(b"5").await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }
}
