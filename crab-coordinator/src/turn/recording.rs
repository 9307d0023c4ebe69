//! An answer on its way: one driver writes it, any number of clients read it, each at its own pace.
//!
//! Memory is bounded: what all readers have read is dropped once more than `limit` bytes are kept, and the driver waits
//! while the slowest reader is `limit` bytes behind. As long as the beginning is kept, further readers may join. A small
//! piece is kept as a copy, since it is a part of a buffer that a whole read went into, which it would keep.

use std::collections::{BTreeMap, VecDeque};
use std::future::poll_fn;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::HeaderMap;
use http_body::Frame;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::body::owned;
use crate::journal::Head;
use crate::provider::Failure;

/// How an answer ended.
#[derive(Clone, Debug)]
pub(crate) enum End {
    /// As it should.
    Whole(Option<HeaderMap>),
    /// After its head, before its end.
    Broken(Arc<str>),
    /// Before its head: there is no answer.
    Failed(Failure),
}

#[derive(Debug)]
pub(crate) struct Recording {
    inner: Mutex<Inner>,
    readers_left: Notify,
    ended: Notify,
    keep: AtomicBool,
    limit: u64,
}

#[derive(Debug, Default)]
struct Inner {
    head: Option<Arc<Head>>,
    frames: VecDeque<Bytes>,
    /// How many frames and bytes were dropped from the front of `frames`.
    dropped: Position,
    total: u64,
    end: Option<End>,
    readers: BTreeMap<u64, Reader>,
    next_reader: u64,
    driver: Option<Waker>,
}

#[derive(Clone, Copy, Debug, Default)]
struct Position {
    frames: usize,
    bytes: u64,
}

#[derive(Debug, Default)]
struct Reader {
    at: Position,
    waker: Option<Waker>,
}

impl Inner {
    fn wake_readers(&mut self) {
        for reader in self.readers.values_mut() {
            if let Some(waker) = reader.waker.take() {
                waker.wake();
            }
        }
    }

    /// Drops what everybody has read, where more than `limit` bytes are kept.
    fn trim(&mut self, limit: u64) {
        let read = self.readers.values().map(|reader| reader.at.frames).min().unwrap_or(usize::MAX);
        while self.total - self.dropped.bytes > limit && self.dropped.frames < read {
            let Some(frame) = self.frames.pop_front() else {
                break;
            };
            self.dropped.frames += 1;
            self.dropped.bytes += frame.len() as u64;
        }
    }

    fn unread(&self) -> u64 {
        let slowest = self.readers.values().map(|reader| reader.at.bytes).min();
        slowest.map_or(0, |at| self.total - at)
    }
}

impl Recording {
    /// An answer of which nothing is known yet.
    pub(crate) fn new(limit: usize) -> Arc<Self> {
        Arc::new(Self {
            inner: Mutex::default(),
            readers_left: Notify::new(),
            ended: Notify::new(),
            keep: AtomicBool::new(false),
            limit: limit.max(1) as u64,
        })
    }

    /// The driver has the head.
    pub(crate) fn set_head(&self, head: Head) {
        let mut inner = self.inner.lock();
        inner.head = Some(Arc::new(head));
        inner.wake_readers();
    }

    /// The driver has a piece of the body. Waits while the slowest reader is too far behind.
    pub(crate) async fn push(&self, piece: Bytes) {
        poll_fn(|cx| {
            let mut inner = self.inner.lock();
            if inner.unread() < self.limit {
                return Poll::Ready(());
            }
            inner.driver = Some(cx.waker().clone());
            Poll::Pending
        })
        .await;
        let mut inner = self.inner.lock();
        inner.total += piece.len() as u64;
        inner.frames.push_back(owned(piece));
        inner.trim(self.limit);
        inner.wake_readers();
    }

    /// The driver is done. Only the first end counts.
    pub(crate) fn finish(&self, end: End) {
        let mut inner = self.inner.lock();
        if inner.end.is_none() {
            inner.end = Some(end);
        }
        inner.wake_readers();
        drop(inner);
        self.ended.notify_waiters();
    }

    /// Resolves when the driver is done.
    pub(crate) async fn ended(&self) {
        loop {
            let mut notified = pin!(self.ended.notified());
            notified.as_mut().enable();
            if self.inner.lock().end.is_some() {
                return;
            }
            notified.await;
        }
    }

    /// The answer is wanted also when nobody reads: somebody will ask for it again.
    pub(crate) fn keep(&self) {
        self.keep.store(true, Ordering::Relaxed);
    }

    /// Resolves when nobody has wanted the answer for `grace`, or for `kept_grace` where it is to be kept.
    pub(crate) async fn abandoned(&self, grace: Duration, kept_grace: Duration) {
        loop {
            while !self.inner.lock().readers.is_empty() {
                self.readers_left.notified().await;
            }
            let keep = self.keep.load(Ordering::Relaxed);
            let wait = if keep { kept_grace } else { grace };
            if !wait.is_zero() {
                tokio::time::sleep(wait).await;
            }
            if self.inner.lock().readers.is_empty() {
                return;
            }
        }
    }

    /// A reader from the beginning; `None` where the beginning is gone.
    pub(crate) fn subscribe(self: &Arc<Self>) -> Option<Subscription> {
        let mut inner = self.inner.lock();
        if inner.dropped.frames > 0 {
            return None;
        }
        let id = inner.next_reader;
        inner.next_reader += 1;
        inner.readers.insert(id, Reader::default());
        Some(Subscription { recording: Arc::clone(self), id })
    }

    #[cfg(test)]
    pub(crate) fn retained(&self) -> u64 {
        let inner = self.inner.lock();
        inner.total - inner.dropped.bytes
    }
}

/// One client's place in an answer. Dropping it says that the client wants no more.
#[derive(Debug)]
pub(crate) struct Subscription {
    recording: Arc<Recording>,
    id: u64,
}

impl Subscription {
    /// The head, when it is there.
    pub(crate) async fn head(&mut self) -> Result<Arc<Head>, Failure> {
        poll_fn(|cx| {
            let mut inner = self.recording.inner.lock();
            if let Some(head) = &inner.head {
                return Poll::Ready(Ok(Arc::clone(head)));
            }
            match &inner.end {
                Some(End::Failed(failure)) => return Poll::Ready(Err(failure.clone())),
                Some(End::Broken(why)) => {
                    return Poll::Ready(Err(Failure::new(
                        crate::provider::FailureKind::UpstreamUnreachable,
                        why.to_string(),
                    )));
                }
                Some(End::Whole(_)) | None => {}
            }
            self.park(&mut inner, cx);
            Poll::Pending
        })
        .await
    }

    fn park(&self, inner: &mut Inner, cx: &Context<'_>) {
        if let Some(reader) = inner.readers.get_mut(&self.id) {
            reader.waker = Some(cx.waker().clone());
        }
    }

    /// The next frame; `None` after the end; an error where the answer broke off.
    pub(crate) fn poll_frame(&mut self, cx: &Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BrokenOff>>> {
        let mut inner = self.recording.inner.lock();
        let dropped = inner.dropped.frames;
        let Some(reader) = inner.readers.get(&self.id) else {
            return Poll::Ready(None);
        };
        let at = reader.at;
        if let Some(frame) = inner.frames.get(at.frames - dropped).cloned() {
            if let Some(reader) = inner.readers.get_mut(&self.id) {
                reader.at.frames += 1;
                reader.at.bytes += frame.len() as u64;
            }
            inner.trim(self.recording.limit);
            if let Some(driver) = inner.driver.take() {
                driver.wake();
            }
            return Poll::Ready(Some(Ok(Frame::data(frame))));
        }
        match &inner.end {
            None => {
                self.park(&mut inner, cx);
                Poll::Pending
            }
            Some(End::Whole(trailers)) => {
                let trailers = trailers.clone();
                inner.readers.remove(&self.id);
                drop(inner);
                self.recording.readers_left.notify_one();
                Poll::Ready(trailers.map(|trailers| Ok(Frame::trailers(trailers))))
            }
            Some(End::Broken(why)) => Poll::Ready(Some(Err(BrokenOff(Arc::clone(why))))),
            Some(End::Failed(failure)) => {
                let why = failure.message.as_str().into();
                Poll::Ready(Some(Err(BrokenOff(why))))
            }
        }
    }

    /// Whether all of a whole answer was read.
    pub(crate) fn is_read(&self) -> bool {
        let inner = self.recording.inner.lock();
        let all = inner.dropped.frames + inner.frames.len();
        match (&inner.end, inner.readers.get(&self.id)) {
            (Some(End::Whole(_)), None) => true,
            (Some(End::Whole(None)), Some(reader)) => reader.at.frames == all,
            _ => false,
        }
    }

    #[cfg(test)]
    pub(crate) async fn frame(&mut self) -> Option<Result<Frame<Bytes>, BrokenOff>> {
        poll_fn(|cx| pin!(&mut *self).poll_frame(cx)).await
    }
}

impl Drop for Subscription {
    fn drop(&mut self) {
        let mut inner = self.recording.inner.lock();
        inner.readers.remove(&self.id);
        inner.trim(self.recording.limit);
        if let Some(driver) = inner.driver.take() {
            driver.wake();
        }
        let gone = inner.readers.is_empty();
        drop(inner);
        if gone {
            self.recording.readers_left.notify_one();
        }
    }
}

/// The answer broke off.
#[derive(Clone, Debug)]
pub(crate) struct BrokenOff(Arc<str>);

impl std::fmt::Display for BrokenOff {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "the model's answer broke off: {}", self.0)
    }
}

impl std::error::Error for BrokenOff {}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::FutureExt as _;
    use proptest::prelude::*;

    fn piece(n: usize) -> Bytes {
        Bytes::from(vec![n as u8; n])
    }

    fn data(subscription: &mut Subscription) -> Option<Bytes> {
        let frame = subscription.frame().now_or_never()??;
        frame.unwrap().into_data().ok()
    }

    #[test]
    fn the_driver_waits_for_the_slowest_reader_and_memory_is_bounded() {
        let recording = Recording::new(100);
        let mut slow = recording.subscribe().unwrap();
        let mut fast = recording.subscribe().unwrap();
        for _ in 0..10 {
            assert!(recording.push(piece(10)).now_or_never().is_some());
            assert!(data(&mut fast).is_some());
        }
        assert!(recording.push(piece(10)).now_or_never().is_none());
        assert!(recording.retained() <= 100);
        assert_eq!(data(&mut slow).unwrap(), piece(10));
        assert!(recording.push(piece(10)).now_or_never().is_some());
        assert!(recording.subscribe().is_none(), "the beginning is gone");
        drop(slow);
        for _ in 0..1000 {
            assert!(recording.push(piece(10)).now_or_never().is_some());
            while data(&mut fast).is_some() {}
        }
        assert!(recording.retained() <= 110);
    }

    #[test]
    fn what_is_kept_of_a_stream_does_not_keep_the_buffers_it_was_read_into() {
        let recording = Recording::new(100);
        let _reader = recording.subscribe().unwrap();
        let buffers: Vec<Arc<[u8; 8192]>> = (0..8).map(|_| Arc::new([7; 8192])).collect();
        struct Buffer(Arc<[u8; 8192]>);
        impl AsRef<[u8]> for Buffer {
            fn as_ref(&self) -> &[u8] {
                &*self.0
            }
        }
        for buffer in &buffers {
            let piece = Bytes::from_owner(Buffer(Arc::clone(buffer))).slice(..10);
            recording.push(piece).now_or_never().unwrap();
        }
        assert!(buffers.iter().all(|buffer| Arc::strong_count(buffer) == 1));
    }

    #[test]
    fn readers_that_join_in_time_get_all_of_it() {
        let recording = Recording::new(100);
        let mut first = recording.subscribe().unwrap();
        recording.push(piece(3)).now_or_never().unwrap();
        assert_eq!(data(&mut first).unwrap(), piece(3));
        let mut second = recording.subscribe().unwrap();
        recording.push(piece(4)).now_or_never().unwrap();
        recording.finish(End::Whole(None));
        recording.finish(End::Broken("late".into()));
        for reader in [&mut first, &mut second] {
            let mut length = 0;
            while let Some(frame) = data(reader) {
                length += frame.len();
            }
            assert!(reader.is_read());
            assert!(length == 4 || length == 7);
        }
    }

    #[test]
    fn a_broken_answer_is_an_error_after_its_bytes() {
        let recording = Recording::new(100);
        let mut reader = recording.subscribe().unwrap();
        recording.push(piece(3)).now_or_never().unwrap();
        recording.finish(End::Broken("reset".into()));
        assert!(data(&mut reader).is_some());
        assert!(reader.frame().now_or_never().unwrap().unwrap().is_err());
        assert!(!reader.is_read());
    }

    #[tokio::test(start_paused = true)]
    async fn nobody_wants_it_only_after_the_grace() {
        let recording = Recording::new(100);
        let (grace, kept) = (Duration::from_secs(5), Duration::from_secs(50));
        let started = tokio::time::Instant::now();
        let first = recording.subscribe().unwrap();
        let waiting = tokio::spawn({
            let recording = Arc::clone(&recording);
            async move { recording.abandoned(grace, kept).await }
        });
        tokio::task::yield_now().await;
        drop(first);
        tokio::time::sleep(Duration::from_secs(3)).await;
        let second = recording.subscribe().unwrap();
        tokio::time::sleep(Duration::from_secs(30)).await;
        assert!(!waiting.is_finished());
        recording.keep();
        drop(second);
        waiting.await.unwrap();
        assert!(started.elapsed() >= Duration::from_secs(83));
    }

    proptest! {
        #[test]
        fn every_reader_reads_the_same_bytes(sizes in prop::collection::vec(1usize..40, 0..40), turns in prop::collection::vec(0u8..3, 0..200)) {
            let recording = Recording::new(64);
            let mut readers = [recording.subscribe().unwrap(), recording.subscribe().unwrap()];
            let (mut got, mut sent, mut rest) = ([Vec::new(), Vec::new()], Vec::new(), sizes.as_slice());
            for turn in turns.into_iter().chain((0..400).map(|n| (n % 3) as u8)) {
                match turn {
                    2 => match rest.split_first() {
                        Some((&n, after)) if recording.push(piece(n)).now_or_never().is_some() => {
                            sent.extend(piece(n));
                            rest = after;
                        }
                        Some(_) => {}
                        None => recording.finish(End::Whole(None)),
                    },
                    reader => {
                        if let Some(frame) = data(&mut readers[usize::from(reader)]) {
                            got[usize::from(reader)].extend(frame);
                        }
                    }
                }
                prop_assert!(recording.retained() <= 64 + 40);
            }
            prop_assert_eq!(&got[0], &sent);
            prop_assert_eq!(&got[1], &sent);
        }
    }
}
