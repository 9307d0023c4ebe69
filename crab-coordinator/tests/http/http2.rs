//! HTTP/2 on either side, and the parts of HTTP that agents seldom use.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use hyper::client::conn::http2::SendRequest;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use parking_lot::Mutex;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::*;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

type Pieces = StreamBody<futures_util::stream::Iter<std::vec::IntoIter<Result<Frame<Bytes>, Infallible>>>>;

fn pieces(data: &[&[u8]], trailer: Option<(&'static str, &'static str)>) -> Pieces {
    let mut frames: Vec<_> = data.iter().map(|data| Ok(Frame::data(Bytes::copy_from_slice(data)))).collect();
    if let Some((name, value)) = trailer {
        frames.push(Ok(Frame::trailers([(name.parse().unwrap(), value.parse().unwrap())].into_iter().collect())));
    }
    StreamBody::new(futures_util::stream::iter(frames))
}

async fn connect(address: SocketAddr) -> SendRequest<Pieces> {
    let stream = TcpStream::connect(address).await.unwrap();
    let (sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    sender
}

fn request(address: SocketAddr, path: &str, body: Pieces) -> http::Request<Pieces> {
    http::Request::post(format!("http://{address}{path}")).header("te", "trailers").body(body).unwrap()
}

/// What a model was asked: target, body, trailers.
type Heard = Arc<Mutex<Vec<(String, Bytes, Option<http::HeaderMap>)>>>;

/// A model that speaks HTTP/2 and nothing else, without TLS.
async fn model(answer: &'static [&'static [u8]]) -> (SocketAddr, Heard) {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let heard = Heard::default();
    let hears = heard.clone();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let hears = hears.clone();
            let service = service_fn(move |request: http::Request<hyper::body::Incoming>| {
                let hears = hears.clone();
                async move {
                    let target = request.uri().to_string();
                    let body = request.into_body().collect().await?;
                    let trailers = body.trailers().cloned();
                    hears.lock().push((target, body.to_bytes(), trailers));
                    let response = http::Response::builder().header("trailer", "x-sum");
                    Ok::<_, hyper::Error>(response.body(pieces(answer, Some(("x-sum", "7")))).unwrap())
                }
            });
            tokio::spawn(
                hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(stream), service),
            );
        }
    });
    (address, heard)
}

#[tokio::test]
async fn http_2_goes_all_the_way_with_bodies_and_trailers() {
    let (model, heard) = model(&[b"{\"a\":", b"1}"]).await;
    let dir = tempfile::tempdir().unwrap();
    let (_coordinator, boundaries, address) =
        start_with(builder(model).upstream(format!("h2c://{model}/base")).journal(dir.path())).await;
    open_all(boundaries);
    let mut sender = connect(address).await;
    for path in ["/v1/messages?beta=true", "/x?y=%2F"] {
        let body = pieces(&[b"{\"messages\":", b"[]}"], Some(("x-check", "5")));
        let response = within(sender.send_request(request(address, path, body))).await.unwrap();
        assert_eq!(response.status(), 200);
        let answer = within(response.into_body().collect()).await.unwrap();
        assert_eq!(answer.trailers().unwrap()["x-sum"], "7");
        assert_eq!(answer.to_bytes(), "{\"a\":1}");
        let (target, body, trailers) = heard.lock().last().unwrap().clone();
        assert_eq!(target, format!("http://{model}/base{path}"));
        assert_eq!(body, "{\"messages\":[]}");
        assert_eq!(trailers.unwrap()["x-check"], "5");
    }
    // The same turn again, by HTTP/1.1, from the journal.
    let raw = post("/v1/messages?beta=true", "{\"messages\":[]}").replacen("\r\n", "\r\nte: trailers\r\n", 1);
    let again = ask_once(address, raw).await;
    assert_eq!((again.text(), again.trailers.len()), ("{\"a\":1}", 1));
    assert_eq!(heard.lock().len(), 2);
}

#[tokio::test]
async fn a_held_http_2_stream_is_kept_alive_and_hinders_no_other() {
    let model = Model::saying(sse(&anthropic_events("hi"))).await;
    let dir = tempfile::tempdir().unwrap();
    let moment = Duration::from_millis(20);
    let (_coordinator, mut boundaries, address) =
        start_with(builder(model.address).journal(dir.path()).keep_alive(moment, moment)).await;
    let mut sender = connect(address).await;
    let held = within(sender.send_request(request(address, "/v1/messages", pieces(&[b"{\"messages\":[1]}"], None))));
    let mut held = held.await.unwrap().into_body();
    let sign = within(held.frame()).await.unwrap().unwrap().into_data().unwrap();
    assert_eq!(sign, "event: ping\ndata: {\"type\": \"ping\"}\n\n");
    let gate = next(&mut boundaries).await.gate;
    // On the same connection.
    let other = within(sender.send_request(request(address, "/x", pieces(&[b"y"], None)))).await.unwrap();
    assert_eq!(within(other.into_body().collect()).await.unwrap().to_bytes(), anthropic_events("hi").concat());
    gate.decide(durable());
    let rest = within(held.collect()).await.unwrap().to_bytes();
    assert!(rest.ends_with(&anthropic_events("hi").concat()));
}

#[tokio::test]
async fn http_2_that_is_none_ends_its_connection_and_nothing_else() {
    let (model, heard) = model(&[b"{}"]).await;
    let (_coordinator, boundaries, address) =
        start_with(builder(model).upstream(format!("h2c://{model}")).header_timeout(Duration::from_millis(500))).await;
    open_all(boundaries);
    let mut sender = connect(address).await;
    within(sender.send_request(request(address, "/x", pieces(&[b"x"], None)))).await.unwrap();
    let frame = |kind: u8, flags: u8, stream: u32, length: usize| {
        let mut frame = (length as u32).to_be_bytes()[1..].to_vec();
        frame.extend([kind, flags]);
        frame.extend(stream.to_be_bytes());
        frame
    };
    let settings = frame(4, 0, 0, 0);
    let flood: Vec<u8> = (0..10_000).flat_map(|_| [frame(9, 0, 1, 100), vec![0x40; 100]].concat()).collect();
    let cases = [
        ("an oversized frame", [&settings[..], &frame(0, 0, 1, 0xFF_FFFF)].concat()),
        ("a frame before the settings", frame(0, 0, 1, 4)),
        ("data on a stream that is not open", [&settings[..], &frame(0, 0, 1, 1), b"x"].concat()),
        ("headers that are not HPACK", [&settings[..], &frame(1, 4, 1, 4), &[0xFF; 4]].concat()),
        ("endless headers", [&settings[..], &frame(1, 0, 1, 0), &flood].concat()),
        ("an even stream", [&settings[..], &frame(1, 5, 2, 1), &[0x82]].concat()),
        ("half a preface", Vec::new()),
    ];
    for (what, bytes) in cases {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let preface = if what == "half a preface" { &PREFACE[..20] } else { PREFACE };
        let _ = stream.write_all(&[preface, &bytes].concat()).await;
        // It ends, by itself and soon; how it says so is its own affair.
        let mut said = Vec::new();
        let _ = within(stream.read_to_end(&mut said)).await;
    }
    assert_eq!(heard.lock().len(), 1);
    let response = within(sender.send_request(request(address, "/x", pieces(&[b"y"], None)))).await.unwrap();
    assert_eq!(response.status(), 200);
}

#[tokio::test]
async fn informational_answers_end_here_and_the_real_one_passes() {
    let raw = format!(
        "HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: </a>\r\n\r\nHTTP/1.1 100 Continue\r\n\r\n{}",
        ok_json("{\"real\":1}")
    );
    let model = Model::saying(raw).await;
    let (_coordinator, boundaries, address) = start_with(builder(model.address)).await;
    open_all(boundaries);
    for raw in [ask("x"), post("/x", "{}")] {
        let response = ask_once(address, raw).await;
        assert_eq!((response.status(), response.text()), (200, "{\"real\":1}"));
        assert_eq!(response.header("link"), None);
    }
}

#[tokio::test]
async fn a_client_that_sends_before_it_reads_still_gets_an_early_refusal() {
    let early = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let model = early.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (mut stream, _) = early.accept().await.unwrap();
            stream.read_exact(&mut [0; 64]).await.unwrap();
            let raw = b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\nconnection: close\r\n\r\nbig";
            stream.write_all(raw).await.unwrap();
            // Leaves at once, with most of the request unread.
        }
    });
    let (_coordinator, boundaries, address) = start_with(builder(model).request_buffer(1000)).await;
    open_all(boundaries);
    for path in ["/v1/messages", "/x"] {
        let mut agent = Agent::connect(address).await;
        agent.send(format!("POST {path} HTTP/1.1\r\nhost: h\r\ncontent-length: 3000000\r\n\r\n")).await;
        for _ in 0..300 {
            agent.send(vec![b' '; 10_000]).await;
        }
        let response = agent.receive().await.expect("the refusal, not a reset");
        assert!([413, 502].contains(&response.status()), "{}", response.start);
    }
}

#[tokio::test]
async fn an_answer_without_a_body_stays_without_one_in_http_2() {
    let model = Model::saying("HTTP/1.1 200 OK\r\ncontent-length: 12\r\n\r\n").await;
    let (_coordinator, _boundaries, address) = start_with(builder(model.address)).await;
    let stream = TcpStream::connect(address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let head = http::Request::head(format!("http://{address}/")).body(Full::new(Bytes::new())).unwrap();
    let response = within(sender.send_request(head)).await.unwrap();
    assert_eq!(response.headers()["content-length"], "12");
    assert!(within(response.into_body().collect()).await.unwrap().to_bytes().is_empty());
}
