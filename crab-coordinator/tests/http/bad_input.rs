//! What is not as it should be, from either side: each ends in a correct error or in the model's own bytes, and leaves
//! nothing behind: no connection, no task, no closed gate.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use metrics::{Counter, CounterFn, Gauge, Histogram, Key, KeyName, Metadata, Recorder, SharedString, Unit};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::*;

/// Sends this and says what comes until the connection ends.
async fn said(address: std::net::SocketAddr, raw: impl AsRef<[u8]>) -> String {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let _ = stream.write_all(raw.as_ref()).await;
    let mut rest = Vec::new();
    let _ = within(stream.read_to_end(&mut rest)).await;
    String::from_utf8_lossy(&rest).into_owned()
}

#[tokio::test]
async fn malformed_heads_are_refused_before_the_model_hears_of_them() {
    let model = Model::saying(ok_json("{}")).await;
    let (_coordinator, boundaries, address) = start_with(builder(model.address)).await;
    open_all(boundaries);
    for raw in [
        "\r\n\r\nNOT HTTP\r\n\r\n",
        "POST\r\n\r\n",
        "POST  /v1/messages HTTP/1.1\r\nhost: h\r\n\r\n",
        "POST /v1/messages HTTP/9.9\r\nhost: h\r\n\r\n",
        "POST /v1/mess ages HTTP/1.1\r\nhost: h\r\n\r\n",
        "POST /v1/messages HTTP/1.1\r\nno colon\r\n\r\n",
        "POST /v1/messages HTTP/1.1\r\nna me: x\r\n\r\n",
        "POST /v1/messages HTTP/1.1\r\nx: a\0b\r\n\r\n",
        "\0\0\0\0\0\0\0\0\r\n\r\n",
        "\u{16}\u{3}\u{1}\u{2}\u{0}\u{1}\u{0}\u{1}\u{fc}\u{3}\u{3}\r\n\r\n",
    ] {
        let said = said(address, raw).await;
        assert!(said.is_empty() || said.starts_with("HTTP/1.1 400"), "{raw:?}: {said}");
    }
    assert_eq!(model.asked(), 0);
    assert_eq!(ask_once(address, ask("x")).await.status(), 200);
}

#[tokio::test]
async fn endless_headers_are_cut_off() {
    let model = Model::saying(ok_json("{}")).await;
    let (_coordinator, boundaries, address) = start_with(builder(model.address).max_head(16 * 1024)).await;
    open_all(boundaries);
    let one = format!("POST /v1/messages HTTP/1.1\r\nx: {}\r\n\r\n", "a".repeat(20_000));
    let many: String = (0..5_000).map(|n| format!("x-{n}: y\r\n")).collect();
    let many = format!("POST /v1/messages HTTP/1.1\r\n{many}\r\n");
    for raw in [one, many] {
        let said = said(address, raw).await;
        assert!(said.is_empty() || said.starts_with("HTTP/1.1 431"), "{said}");
    }
    assert_eq!(model.asked(), 0);
    let fits = ask("x").replacen("\r\n", &format!("\r\nx-long: {}\r\n", "a".repeat(8_000)), 1);
    assert_eq!(ask_once(address, fits).await.status(), 200);
}

#[tokio::test]
async fn who_trickles_bytes_is_let_go_when_the_time_for_a_request_is_over() {
    let model = Model::start(|message, stream| {
        Box::pin(async move {
            if message.target() == "/slow-answer" {
                let mut stream = stream.lock().await;
                let _ = stream.write_all(SSE_HEAD.as_bytes()).await;
                while stream.write_all(&chunk(b": still here\n\n")).await.is_ok() {
                    tokio::time::sleep(Duration::from_millis(10)).await;
                }
            }
            false
        })
    })
    .await;
    let short = Duration::from_millis(300);
    let builder = builder(model.address).header_timeout(short).request_timeout(short);
    let (_coordinator, boundaries, address) = start_with(builder).await;
    open_all(boundaries);
    let length = "content-length: 100000\r\n\r\n";
    for begin in [
        "POST /v1/messages HTTP/1.1\r\nx: ".to_owned(),
        format!("POST /v1/messages HTTP/1.1\r\nhost: h\r\n{length}"),
        format!("POST /x HTTP/1.1\r\nhost: h\r\n{length}"),
    ] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(begin.as_bytes()).await.unwrap();
        let (mut read, mut write) = stream.into_split();
        let trickling = tokio::spawn(async move {
            while write.write_all(b"a").await.is_ok() {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        });
        let mut rest = Vec::new();
        let _ = within(read.read_to_end(&mut rest)).await;
        let rest = String::from_utf8_lossy(&rest);
        assert!(rest.is_empty() || rest.starts_with("HTTP/1.1 4"), "{rest}");
        trickling.abort();
    }
    // A model may trickle as well.
    let mut agent = Agent::connect(address).await;
    agent.send(post("/slow-answer", "{}")).await;
    assert!(agent.receive().await.is_none());
}

#[tokio::test]
async fn chunks_that_lie_are_refused() {
    let model = Model::saying(ok_json("{}")).await;
    let (_coordinator, boundaries, address) = start_with(builder(model.address)).await;
    open_all(boundaries);
    for path in ["/v1/messages", "/x"] {
        for chunks in [
            "fffffffffffffffff\r\n",
            "-2\r\n{}\r\n0\r\n\r\n",
            "0x2\r\n{}\r\n0\r\n\r\n",
            "2\r\n{}x\r\n0\r\n\r\n",
            "g\r\n",
            "\r\n",
        ] {
            let raw = format!("POST {path} HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n{chunks}");
            let said = said(address, raw).await;
            assert!(
                said.is_empty() || said.starts_with("HTTP/1.1 4") || said.starts_with("HTTP/1.1 502"),
                "{chunks:?}: {said}"
            );
        }
    }
    assert_eq!(model.asked(), 0, "no such request arrives whole");
}

#[tokio::test]
async fn bodies_beyond_the_limit_are_refused() {
    let model = Model::saying(ok_json("{}")).await;
    let (_coordinator, boundaries, address) = start_with(builder(model.address).max_body(1000)).await;
    open_all(boundaries);
    for path in ["/v1/messages", "/x"] {
        assert_eq!(ask_once(address, post(path, &"1".repeat(1000))).await.status(), 200);
        let response = ask_once(address, post(path, &"1".repeat(1001))).await;
        assert_eq!(response.status(), 413);
        assert!(response.text().contains("1000 bytes"), "{}", response.text());
        let mut raw = format!("POST {path} HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n").into_bytes();
        raw.extend(chunk(&[b'1'; 1001]));
        raw.extend_from_slice(LAST_CHUNK);
        let response = ask_once(address, raw).await;
        assert_eq!(response.status(), 413);
        assert!(response.text().contains("1000 bytes"), "{}", response.text());
    }
    assert_eq!(model.asked(), 2);
}

/// Counts what is recorded, by name.
#[derive(Clone, Default)]
struct Counts(Arc<Mutex<BTreeMap<String, u64>>>);

struct Count(Counts, String);

impl CounterFn for Count {
    fn increment(&self, value: u64) {
        *self.0.0.lock().entry(self.1.clone()).or_default() += value;
    }

    fn absolute(&self, value: u64) {
        self.0.0.lock().insert(self.1.clone(), value);
    }
}

impl Recorder for Counts {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(Arc::new(Count(self.clone(), key.name().to_owned())))
    }
    fn register_gauge(&self, _: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::noop()
    }
    fn register_histogram(&self, _: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::noop()
    }
}

#[tokio::test]
async fn invalid_json_on_a_turn_path_passes_gated_is_counted_and_has_no_digest() {
    let counts = Counts::default();
    let _recording = metrics::set_default_local_recorder(&counts);
    let model = Model::counting().await;
    let dir = tempfile::tempdir().unwrap();
    let (_coordinator, mut boundaries, address) = start(&model, dir.path()).await;
    let bodies = ["{\"messages\":[", "", "\u{feff}{}", "{\"a\":1}{\"a\":1}", "nonsense"];
    for (n, body) in bodies.into_iter().enumerate() {
        // The same again is no retry: what is not understood is not compared.
        let mut agent = Agent::connect(address).await;
        agent.send(post("/v1/messages", body)).await;
        let boundary = next(&mut boundaries).await;
        assert_eq!(boundary.turn.conversation, None);
        assert!(agent.hears_nothing().await);
        boundary.gate.decide(durable());
        assert_eq!(agent.receive().await.unwrap().status(), 200);
        assert_eq!(model.seen.lock()[n].text(), body);
    }
    assert_eq!(counts.0.lock()[crab_coordinator::names::NO_DIGEST], bodies.len() as u64);
}

#[tokio::test]
async fn a_content_length_that_lies_is_noticed_whoever_says_it() {
    // Of the model: more is said than sent, by closing and by a reset.
    for reset in [false, true] {
        let model = Model::start(move |_, stream| {
            Box::pin(async move {
                let stream = &mut *stream.lock().await;
                let raw = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{\"cut\":";
                stream.write_all(raw).await.unwrap();
                tokio::time::sleep(Duration::from_millis(20)).await;
                if reset {
                    stream.set_zero_linger().unwrap();
                }
                false
            })
        })
        .await;
        let dir = tempfile::tempdir().unwrap();
        let (coordinator, boundaries, address) = start(&model, dir.path()).await;
        open_all(boundaries);
        for raw in [ask("x"), post("/x", "{}")] {
            let mut agent = Agent::connect(address).await;
            agent.send(raw).await;
            assert!(agent.receive().await.is_none(), "a cut answer must look cut");
        }
        assert!(!coordinator.turns(&id("box"))[0].journaled);
    }
    // Of the model: less is said than sent. What was said is the answer, and the connection is not used again.
    let model = Model::saying(
        "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}HTTP/1.1 200 OK\r\ncontent-length: 6\r\n\r\nforged",
    )
    .await;
    let (_coordinator, boundaries, address) = start_with(builder(model.address)).await;
    open_all(boundaries);
    let mut agent = Agent::connect(address).await;
    for raw in [ask("a"), post("/x", "{}"), ask("b"), post("/x", "{}")] {
        assert_eq!(agent.ask(raw).await.text(), "{}");
    }
    // Of the agent: less is said than sent. The rest is no request.
    let model = Model::saying(ok_json("{}")).await;
    let (_coordinator, boundaries, address) = start_with(builder(model.address)).await;
    open_all(boundaries);
    let said = said(address, post("/v1/messages", "{}") + "{\"more\":1}\r\n\r\n").await;
    assert_eq!(said.matches("HTTP/1.1 200").count(), 1);
    assert_eq!(model.asked(), 1);
    // Of the agent: more is said than sent.
    let mut agent = Agent::connect(address).await;
    agent.send("POST /v1/messages HTTP/1.1\r\nhost: h\r\ncontent-length: 10\r\n\r\n{").await;
    drop(agent);
    assert_eq!(ask_once(address, ask("x")).await.status(), 200);
    assert_eq!(model.asked(), 2);
}

#[tokio::test]
async fn whatever_goes_wrong_nothing_is_left_behind() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let model = listener.local_addr().unwrap();
    // Each answers wrongly in another way.
    let serving = tokio::spawn(async move {
        let mut n = 0;
        loop {
            let (mut stream, _) = listener.accept().await.unwrap();
            n += 1;
            let mut request = [0; 4096];
            let _ = stream.read(&mut request).await;
            let raw: &[u8] = match n % 6 {
                0 => b"",
                1 => b"garbage\r\n\r\n",
                2 => b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{",
                3 => b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
                4 => b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n5\r\ndata:\r\n",
                _ => b"HTTP/1.1 500 Oops\r\ncontent-length: 0\r\n\r\n",
            };
            let _ = stream.write_all(raw).await;
            if n % 2 == 0 {
                let _ = stream.set_zero_linger();
            }
        }
    });
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, boundaries, address) = start_with(builder(model).journal(dir.path())).await;
    open_all(boundaries);
    ask_once(address, ask("warm")).await;
    let tasks = || tokio::runtime::Handle::current().metrics().num_alive_tasks();
    // What the first request set up is there already; its connection is gone.
    tokio::time::sleep(Duration::from_millis(100)).await;
    let before = tasks();
    for n in 0..60 {
        let raw = match n % 4 {
            0 => ask(&format!("{n}")),
            1 => post("/x", "{}"),
            2 => "POST /v1/messages HTTP/1.1\r\nhost: h\r\ncontent-length: 100\r\n\r\n{".to_owned(),
            _ => "NOT HTTP\r\n\r\n".to_owned(),
        };
        let mut agent = Agent::connect(address).await;
        agent.send(raw).await;
        if n % 4 != 2 {
            let _ = agent.receive().await;
        }
    }
    until(|| tasks() <= before).await;
    use crab_coordinator::GateRecord;
    until(|| coordinator.turns(&id("box")).iter().all(|turn| turn.gate != GateRecord::Closed)).await;
    serving.abort();
}

#[tokio::test]
async fn compressed_bodies_pass_byte_for_byte_and_are_retries_when_they_are_equal() {
    let body: Vec<u8> = (0..2000).map(|n| (n * 7 % 256) as u8).collect();
    let mut raw = format!(
        "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: zstd\r\ncontent-length: {}\r\n\r\n",
        body.len()
    )
    .into_bytes();
    raw.extend(&body);
    let model = Model::saying(raw).await;
    let dir = tempfile::tempdir().unwrap();
    let (_coordinator, boundaries, address) = start(&model, dir.path()).await;
    let turns = open_all(boundaries);
    let mut ask = format!("POST /v1/messages HTTP/1.1\r\nhost: h\r\ncontent-encoding: gzip\r\naccept-encoding: zstd\r\ncontent-length: {}\r\n\r\n", body.len()).into_bytes();
    ask.extend(&body);
    for _ in 0..2 {
        let response = ask_once(address, &ask).await;
        assert_eq!(response.header("content-encoding"), Some("zstd"));
        assert_eq!(response.body, body);
    }
    let seen = model.seen.lock().clone();
    assert_eq!((seen.len(), turns.lock().len()), (1, 1));
    assert_eq!(seen[0].body, body);
    assert_eq!(seen[0].header("accept-encoding"), Some("zstd"));
}
