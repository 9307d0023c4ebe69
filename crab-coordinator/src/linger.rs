//! A connection's last moments.
//!
//! Whoever closes a TCP connection while bytes of the other side are unread, or still come, resets it, and a reset can
//! take the answer away from the client before it was read: an upload that the model refuses early would look like a
//! broken network. So the sending half is closed first, and what still comes is read for a while (RFC 9112, 9.6).

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf};
use tokio::sync::oneshot;

/// So long the client may take to notice that the connection is over.
const LINGER: Duration = Duration::from_secs(2);

/// A connection that comes back when its user drops it after closing the sending half, before the client closed its own.
#[derive(Debug)]
pub(crate) struct Returned<S> {
    /// Taken when this is dropped.
    stream: Option<S>,
    back: Option<oneshot::Sender<S>>,
    shut: bool,
}

impl<S> Returned<S> {
    pub(crate) fn new(stream: S) -> (Self, oneshot::Receiver<S>) {
        let (back, returned) = oneshot::channel();
        (Self { stream: Some(stream), back: Some(back), shut: false }, returned)
    }

    fn stream(&mut self) -> io::Result<Pin<&mut S>>
    where
        S: Unpin,
    {
        self.stream.as_mut().map(Pin::new).ok_or_else(|| io::ErrorKind::NotConnected.into())
    }
}

impl<S> Drop for Returned<S> {
    fn drop(&mut self) {
        if let (true, Some(stream), Some(back)) = (self.shut, self.stream.take(), self.back.take()) {
            let _ = back.send(stream);
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Returned<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        let polled = self.stream()?.poll_read(cx, buf);
        if let Poll::Ready(outcome) = &polled
            && (outcome.is_err() || buf.filled().len() == before)
        {
            // The client is done: there is nothing to wait for.
            self.back = None;
        }
        polled
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Returned<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.stream()?.poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.stream()?.poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.as_ref().is_some_and(AsyncWrite::is_write_vectored)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.stream()?.poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let polled = self.stream()?.poll_shutdown(cx);
        self.shut |= matches!(polled, Poll::Ready(Ok(())));
        polled
    }
}

/// Reads what still comes, until the client is done or the time is over.
pub(crate) async fn linger(mut stream: impl AsyncRead + Unpin) {
    let mut rest = vec![0; 16 * 1024];
    let read = async { while matches!(stream.read(&mut rest).await, Ok(1..)) {} };
    let _ = tokio::time::timeout(LINGER, read).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncWriteExt as _;

    #[tokio::test]
    async fn a_connection_comes_back_only_where_the_client_may_still_send() {
        let (ours, mut theirs) = tokio::io::duplex(64);
        let (mut stream, mut back) = Returned::new(ours);
        stream.shutdown().await.unwrap();
        drop(stream);
        theirs.write_all(b"more").await.unwrap();
        drop(theirs);
        linger(back.try_recv().unwrap()).await;

        let (ours, theirs) = tokio::io::duplex(64);
        let (mut stream, mut back) = Returned::new(ours);
        drop(theirs);
        assert_eq!(stream.read(&mut [0; 4]).await.unwrap(), 0);
        stream.shutdown().await.unwrap();
        drop(stream);
        assert!(back.try_recv().is_err());

        let (ours, _theirs) = tokio::io::duplex(64);
        let (stream, mut back) = Returned::new(ours);
        drop(stream);
        assert!(back.try_recv().is_err(), "what was not closed with care is cut");
    }

    #[tokio::test(start_paused = true)]
    async fn a_client_that_never_closes_is_not_waited_for_long() {
        let (ours, theirs) = tokio::io::duplex(64);
        let started = tokio::time::Instant::now();
        linger(ours).await;
        assert_eq!(started.elapsed(), LINGER);
        drop(theirs);
    }
}
