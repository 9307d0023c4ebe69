//! Bounds on silence: a body whose sender falls silent, a peer that does not read.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

use crate::body::BoxError;

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
    fn poll_late(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        let patience = self.patience;
        let sleep = self.sleep.get_or_insert_with(|| Box::pin(sleep(patience)));
        if !std::mem::replace(&mut self.running, true) {
            sleep.as_mut().reset(Instant::now() + patience);
        }
        sleep.as_mut().poll(cx)
    }
}

/// The other side was silent for too long.
#[derive(Debug)]
pub(crate) struct Silent(Duration);

impl fmt::Display for Silent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "nothing came for {} s", self.0.as_secs_f32())
    }
}

impl std::error::Error for Silent {}

/// A body that fails where nothing comes for too long.
#[derive(Debug)]
pub(crate) struct Patient<B> {
    body: B,
    clock: Clock,
}

impl<B> Patient<B> {
    pub(crate) fn new(body: B, patience: Duration) -> Self {
        Self { body, clock: Clock::new(patience) }
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
        if let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) {
            this.clock.stop();
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        ready!(this.clock.poll_late(cx));
        Poll::Ready(Some(Err(Silent(this.clock.patience).into())))
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
        ready!(self.clock.poll_late(cx));
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

    #[tokio::test(start_paused = true)]
    async fn silence_is_an_error_and_slowness_is_not() {
        let pauses = stream::iter([9, 9, 11]).then(|seconds| async move {
            tokio::time::sleep(Duration::from_secs(seconds)).await;
            Ok::<_, BoxError>(Frame::data(Bytes::from_static(b"x")))
        });
        let mut body = Patient::new(StreamBody::new(Box::pin(pauses)), Duration::from_secs(10));
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
