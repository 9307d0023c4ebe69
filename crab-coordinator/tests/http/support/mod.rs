//! A scripted model server, a client that speaks raw HTTP, and an engine that decides gates as told. None of them uses
//! an HTTP library, so that what is on the wire is seen as it is.

pub mod wire;

use std::future::Future;
use std::net::SocketAddr;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crab_coordinator::resolve::OneSandbox;
use crab_coordinator::{Boundaries, Builder, Coordinator, Listen};
use crab_core::{Boundary, SandboxId, TurnBoundary, Verdict, VersionId};
use parking_lot::Mutex;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};

pub use wire::{Message, read_message};

/// Long enough for anything on this machine; a test that waits so long has failed.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub type Reply = Pin<Box<dyn Future<Output = bool> + Send>>;

/// A model server whose answers are a function of the request. The function writes to the connection what it likes, and
/// says whether the connection may be used again.
pub struct Model {
    pub address: SocketAddr,
    /// Requests that arrived whole.
    pub seen: Arc<Mutex<Vec<Message>>>,
    /// Connections that the coordinator closed.
    pub closed: Arc<Mutex<usize>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Model {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Model {
    pub async fn start<F>(answer: F) -> Self
    where
        F: Fn(Message, Arc<tokio::sync::Mutex<TcpStream>>) -> Reply + Send + Sync + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let closed = Arc::new(Mutex::new(0));
        let answer = Arc::new(answer);
        let task = tokio::spawn({
            let (seen, closed) = (seen.clone(), closed.clone());
            async move {
                let mut connections = tokio::task::JoinSet::new();
                loop {
                    let (mut stream, _) = listener.accept().await.unwrap();
                    let (seen, closed) = (seen.clone(), closed.clone());
                    let answer = answer.clone();
                    connections.spawn(async move {
                        let mut buffer = Vec::new();
                        loop {
                            let Some(message) = read_message(&mut stream, &mut buffer, None).await else {
                                *closed.lock() += 1;
                                return;
                            };
                            seen.lock().push(message.clone());
                            let shared = Arc::new(tokio::sync::Mutex::new(stream));
                            let keep = answer(message, shared.clone()).await;
                            if !keep {
                                return;
                            }
                            stream = Arc::into_inner(shared).unwrap().into_inner();
                        }
                    });
                }
            }
        });
        Self { address, seen, closed, task }
    }

    /// Always the same bytes.
    pub async fn saying(raw: impl Into<Vec<u8>>) -> Self {
        let raw: Arc<[u8]> = raw.into().into();
        Self::start(move |_, stream| {
            let raw = raw.clone();
            Box::pin(async move { stream.lock().await.write_all(&raw).await.is_ok() })
        })
        .await
    }

    /// Each answer tells its number: `answer 1`, `answer 2`.
    pub async fn counting() -> Self {
        let count = Arc::new(Mutex::new(0));
        Self::start(move |_, stream| {
            let number = {
                let mut count = count.lock();
                *count += 1;
                *count
            };
            let raw = ok_json(&format!("{{\"answer\":{number}}}"));
            Box::pin(async move { stream.lock().await.write_all(raw.as_bytes()).await.is_ok() })
        })
        .await
    }

    pub fn asked(&self) -> usize {
        self.seen.lock().len()
    }
}

pub fn ok_json(body: &str) -> String {
    format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}", body.len())
}

pub const SSE_HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\nx-request-id: r1\r\ntransfer-encoding: chunked\r\n\r\n";

pub fn chunk(data: &[u8]) -> Vec<u8> {
    let mut chunk = format!("{:x}\r\n", data.len()).into_bytes();
    chunk.extend_from_slice(data);
    chunk.extend_from_slice(b"\r\n");
    chunk
}

pub const LAST_CHUNK: &[u8] = b"0\r\n\r\n";

/// A whole Anthropic stream that says this.
pub fn anthropic_events(text: &str) -> Vec<Vec<u8>> {
    [
        "event: message_start\ndata: {\"type\":\"message_start\"}\n\n".to_owned(),
        format!("event: content_block_delta\ndata: {{\"type\":\"content_block_delta\",\"delta\":{{\"text\":\"{text}\"}}}}\n\n"),
        "event: message_stop\ndata: {\"type\":\"message_stop\"}\n\n".to_owned(),
    ]
    .map(String::into_bytes)
    .to_vec()
}

pub fn sse(events: &[Vec<u8>]) -> Vec<u8> {
    let mut raw = SSE_HEAD.as_bytes().to_vec();
    for event in events {
        raw.extend(chunk(event));
    }
    raw.extend_from_slice(LAST_CHUNK);
    raw
}

pub fn id(name: &str) -> SandboxId {
    SandboxId::new(name).unwrap()
}

pub fn builder(model: SocketAddr) -> Builder {
    Coordinator::builder().upstream(format!("http://{model}"))
}

/// One sandbox named `box`, with a journal.
pub async fn start(model: &Model, journal: &Path) -> (Coordinator, Boundaries, SocketAddr) {
    start_with(builder(model.address).journal(journal)).await
}

pub async fn start_with(builder: Builder) -> (Coordinator, Boundaries, SocketAddr) {
    let (coordinator, boundaries) = builder.listen(Listen::loopback(), OneSandbox(id("box"))).start().await.unwrap();
    let address = coordinator.address().unwrap();
    (coordinator, boundaries, address)
}

/// Opens every gate at once and remembers the turns.
pub fn open_all(mut boundaries: Boundaries) -> Arc<Mutex<Vec<u64>>> {
    let turns = Arc::new(Mutex::new(Vec::new()));
    let seen = turns.clone();
    tokio::spawn(async move {
        while let Some(boundary) = boundaries.next().await {
            seen.lock().push(boundary.turn.number.0);
            boundary.gate.decide(durable());
        }
    });
    turns
}

pub fn durable() -> Verdict {
    Verdict::Durable(VersionId(1))
}

pub async fn next(boundaries: &mut Boundaries) -> Boundary {
    within(boundaries.next()).await.expect("a boundary")
}

pub async fn within<F: Future>(future: F) -> F::Output {
    tokio::time::timeout(PATIENCE, future).await.expect("it took too long")
}

/// Waits until something is so.
pub async fn until(mut is: impl FnMut() -> bool) {
    within(async {
        while !is() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    })
    .await;
}

pub fn post(path: &str, body: &str) -> String {
    format!(
        "POST {path} HTTP/1.1\r\nhost: model\r\nx-api-key: sk-secret-1234\r\nauthorization: Bearer sk-secret-1234\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    )
}

/// A question of an Anthropic agent.
pub fn ask(text: &str) -> String {
    post(
        "/v1/messages?beta=true",
        &format!("{{\"model\":\"m\",\"messages\":[{{\"role\":\"user\",\"content\":\"{text}\"}}]}}"),
    )
}

/// A connection of an agent.
pub struct Agent {
    pub stream: TcpStream,
    pub buffer: Vec<u8>,
}

impl Agent {
    pub async fn connect(address: SocketAddr) -> Self {
        let stream = TcpStream::connect(address).await.unwrap();
        stream.set_nodelay(true).unwrap();
        Self { stream, buffer: Vec::new() }
    }

    pub async fn send(&mut self, raw: impl AsRef<[u8]>) {
        self.stream.write_all(raw.as_ref()).await.unwrap();
    }

    /// The next response; `None` where the connection ended before it was whole.
    pub async fn receive(&mut self) -> Option<Message> {
        within(read_message(&mut self.stream, &mut self.buffer, Some("GET"))).await
    }

    pub async fn ask(&mut self, raw: impl AsRef<[u8]>) -> Message {
        self.send(raw).await;
        self.receive().await.expect("a whole response")
    }

    /// Whether not a byte arrives for a moment.
    pub async fn hears_nothing(&mut self) -> bool {
        assert!(self.buffer.is_empty());
        let quiet = Duration::from_millis(100);
        tokio::time::timeout(quiet, self.stream.readable()).await.is_err()
    }
}

pub async fn ask_once(address: SocketAddr, raw: impl AsRef<[u8]>) -> Message {
    Agent::connect(address).await.ask(raw).await
}
