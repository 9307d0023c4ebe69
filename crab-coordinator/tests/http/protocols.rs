//! Other protocols than plain HTTP/1.1, and peers that fall silent.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use crab_coordinator::{Listen, resolve::OneSandbox};
use http_body_util::{BodyExt, Full};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

use crate::support::*;

#[tokio::test]
async fn a_websocket_that_is_no_turn_is_carried_both_ways() {
    let model = Model::start(|message, stream| {
        Box::pin(async move {
            let mut stream = stream.lock().await;
            assert_eq!(message.header("upgrade"), Some("websocket"));
            assert_eq!(message.header("connection"), Some("upgrade"));
            let head = "HTTP/1.1 101 Switching Protocols\r\nconnection: upgrade\r\nupgrade: websocket\r\nsec-websocket-accept: x\r\n\r\n";
            stream.write_all(head.as_bytes()).await.unwrap();
            let mut word = [0; 4];
            stream.read_exact(&mut word).await.unwrap();
            word.reverse();
            stream.write_all(&word).await.unwrap();
            false
        })
    })
    .await;
    let (_coordinator, _boundaries, address) = start_with(builder(model.address)).await;
    let mut stream = TcpStream::connect(address).await.unwrap();
    let ask = "GET /realtime HTTP/1.1\r\nhost: h\r\nconnection: Upgrade\r\nupgrade: websocket\r\nsec-websocket-key: k\r\n\r\n";
    stream.write_all(ask.as_bytes()).await.unwrap();
    let mut heard = Vec::new();
    within(async {
        while !heard.ends_with(b"\r\n\r\n") {
            heard.push(stream.read_u8().await.unwrap());
        }
    })
    .await;
    let head = String::from_utf8(heard).unwrap();
    assert!(head.starts_with("HTTP/1.1 101 ") && head.contains("sec-websocket-accept: x"), "{head}");
    stream.write_all(b"abcd").await.unwrap();
    let mut rest = Vec::new();
    within(stream.read_to_end(&mut rest)).await.unwrap();
    assert_eq!(rest, b"dcba");
}

#[tokio::test]
async fn a_websocket_where_turns_go_is_told_to_use_http() {
    let model = Model::saying(ok_json("{}")).await;
    let (_coordinator, _boundaries, address) = start_with(builder(model.address)).await;
    for (method, path) in [("GET", "/v1/responses"), ("POST", "/v1/messages"), ("GET", "/v1/chat/completions")] {
        let raw = format!(
            "{method} {path} HTTP/1.1\r\nhost: h\r\nconnection: upgrade\r\nupgrade: websocket\r\ncontent-length: 0\r\n\r\n"
        );
        let response = ask_once(address, raw).await;
        assert_eq!(response.status(), 426);
        assert!(response.text().contains("plain POST"));
    }
    assert_eq!(model.asked(), 0);
}

#[tokio::test]
async fn an_agent_may_speak_http_2() {
    let model = Model::saying(sse(&anthropic_events("hi"))).await;
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, mut boundaries, address) = start(&model, dir.path()).await;
    let stream = TcpStream::connect(address).await.unwrap();
    let (mut sender, connection) =
        hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await.unwrap();
    tokio::spawn(connection);
    let request = || {
        http::Request::post(format!("http://{address}/v1/messages?beta=true"))
            .header("x-api-key", "k")
            .body(Full::new(Bytes::from_static(b"{\"messages\":[1]}")))
            .unwrap()
    };
    let answer = tokio::spawn(sender.send_request(request()));
    let boundary = next(&mut boundaries).await;
    boundary.gate.decide(durable());
    let response = within(answer).await.unwrap().unwrap();
    assert_eq!(response.status(), 200);
    let body = within(response.into_body().collect()).await.unwrap().to_bytes();
    assert_eq!(body, anthropic_events("hi").concat());
    let seen = model.seen.lock()[0].clone();
    assert_eq!((seen.target(), seen.text()), ("/v1/messages?beta=true", "{\"messages\":[1]}"));
    assert_eq!(seen.header("host"), Some(model.address.to_string().as_str()));

    // A stream that is reset cancels its request and no other.
    let model_2 = Model::start(|_, _| Box::pin(async { true })).await;
    coordinator.set_upstream(&format!("http://{}", model_2.address)).unwrap();
    let mut other = request();
    *other.body_mut() = Full::new(Bytes::from_static(b"{\"messages\":[2]}"));
    let waiting = tokio::spawn(sender.send_request(other));
    until(|| model_2.asked() == 1).await;
    waiting.abort();
    until(|| *model_2.closed.lock() == 1).await;
    assert!(sender.is_ready());
}

/// A model server behind TLS that says which protocol it was spoken to in.
async fn tls_model(protocols: &[&str]) -> (std::net::SocketAddr, Vec<u8>) {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).unwrap();
    let key = rustls::pki_types::PrivateKeyDer::Pkcs8(made.signing_key.serialize_der().into());
    let mut config = rustls::ServerConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.as_bytes().to_vec()).collect();
    let acceptor = tokio_rustls::TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(stream) = acceptor.accept(stream).await else { return };
                let service = service_fn(|request: http::Request<hyper::body::Incoming>| async move {
                    let version = format!("{:?}", request.version());
                    let body = request.into_body().collect().await?.to_bytes();
                    let text = format!("{version} {}", body.len());
                    Ok::<_, hyper::Error>(http::Response::new(Full::new(Bytes::from(text))))
                });
                let _ = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new())
                    .serve_connection(TokioIo::new(stream), service)
                    .await;
            });
        }
    });
    (address, made.cert.pem().into_bytes())
}

#[tokio::test]
async fn the_model_is_reached_by_tls_in_http_2_or_1() {
    for (protocols, version) in [(&["h2", "http/1.1"][..], "HTTP/2.0"), (&["http/1.1"][..], "HTTP/1.1")] {
        let (model, certificate) = tls_model(protocols).await;
        let upstream = format!("https://localhost:{}", model.port());
        let dir = tempfile::tempdir().unwrap();
        let (_coordinator, boundaries, address) =
            start_with(builder(model).upstream(&upstream).extra_roots(certificate).journal(dir.path())).await;
        open_all(boundaries);
        for _ in 0..2 {
            let raw = ask("x");
            let length = raw.split("\r\n\r\n").nth(1).unwrap().len();
            assert_eq!(ask_once(address, raw).await.text(), format!("{version} {length}"));
        }
        assert_eq!(ask_once(address, post("/x", "abc")).await.text(), format!("{version} 3"));

        // Whom the coordinator does not know it does not talk to.
        let (_coordinator, boundaries, address) = start_with(builder(model).upstream(&upstream)).await;
        open_all(boundaries);
        let response = ask_once(address, ask("x")).await;
        assert_eq!(response.status(), 502);
        assert!(response.text().contains("certificate"), "{}", response.text());
    }
}

#[tokio::test]
async fn certificates_that_are_none_are_refused_at_the_start() {
    let nobody = "127.0.0.1:1".parse().unwrap();
    for pem in ["", "x", "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n"] {
        let started = builder(nobody).extra_roots(pem).listen(Listen::loopback(), OneSandbox(id("box"))).start().await;
        assert!(started.unwrap_err().to_string().contains("certificates in PEM"));
    }
}

#[tokio::test]
async fn a_model_that_never_answers_or_falls_silent_ends_in_an_error() {
    let model = Model::start(|message, stream| {
        Box::pin(async move {
            if message.text().contains("begin") {
                let mut raw = SSE_HEAD.as_bytes().to_vec();
                raw.extend(chunk(b": begun\n\n"));
                stream.lock().await.write_all(&raw).await.unwrap();
            }
            std::future::pending().await
        })
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let short = Duration::from_millis(60);
    let builder = builder(model.address).journal(dir.path()).answer_timeout(short).silence_timeout(short);
    let (_coordinator, boundaries, address) = start_with(builder).await;
    open_all(boundaries);
    for raw in [ask("x"), post("/x", "{}")] {
        let response = ask_once(address, raw).await;
        assert_eq!(response.status(), 504);
        assert!(response.text().contains("did not begin to answer"));
    }
    for raw in [ask("begin"), post("/x", "begin")] {
        let mut agent = Agent::connect(address).await;
        agent.send(raw).await;
        assert!(agent.receive().await.is_none(), "the answer must look broken");
    }
}

#[tokio::test]
async fn a_client_that_falls_silent_is_let_go() {
    let model = Model::saying(ok_json("{}")).await;
    let short = Duration::from_millis(60);
    let builder = builder(model.address).header_timeout(short).silence_timeout(short).max_connections(1);
    let (_coordinator, boundaries, address) = start_with(builder).await;
    open_all(boundaries);
    // With one slot, each must go before the next is served.
    for raw in [
        "",
        "P",
        "PRI * HTTP/2.0\r\n",
        "POST /v1/messages HTTP/1.1\r\nhost: h\r\n",
        "POST /v1/messages HTTP/1.1\r\nhost: h\r\ncontent-length: 10\r\n\r\n{",
        "POST /x HTTP/1.1\r\nhost: h\r\ncontent-length: 10\r\n\r\n{",
    ] {
        let mut stream = TcpStream::connect(address).await.unwrap();
        stream.write_all(raw.as_bytes()).await.unwrap();
        let mut rest = Vec::new();
        let _ = within(stream.read_to_end(&mut rest)).await;
        let rest = String::from_utf8_lossy(&rest).into_owned();
        assert!(rest.is_empty() || rest.starts_with("HTTP/1.1 4") || rest.starts_with("HTTP/1.1 502"), "{raw}: {rest}");
    }
    let mut endless = TcpStream::connect(address).await.unwrap();
    endless.write_all(b"POST /x HTTP/1.1\r\nx: ").await.unwrap();
    let flood = async { while endless.write_all(&[b'a'; 65536]).await.is_ok() {} };
    within(flood).await;
    assert_eq!(ask_once(address, ask("x")).await.status(), 200);
}

#[tokio::test]
async fn health_and_metrics_are_on_a_listener_of_their_own() {
    let model = Model::saying(ok_json("{}")).await;
    let builder = builder(model.address).admin(Listen::loopback(), || "crab_up 1\n".to_owned());
    let (coordinator, _boundaries, address) = start_with(builder).await;
    let Some(Listen::Tcp(admin)) = coordinator.admin_address() else { panic!("no admin listener") };
    let get = |path: &str| format!("GET {path} HTTP/1.1\r\nhost: h\r\nconnection: close\r\n\r\n");
    assert_eq!(ask_once(admin, get("/healthz")).await.text(), "ok\n");
    assert_eq!(ask_once(admin, get("/metrics")).await.text(), "crab_up 1\n");
    assert_eq!(ask_once(admin, get("/v1/messages")).await.status(), 404);
    // Agents have no share in it.
    assert_eq!(ask_once(address, get("/healthz")).await.text(), "{}");
    coordinator.shutdown(PATIENCE).await;
    assert!(TcpStream::connect(admin).await.is_err());
}

#[tokio::test]
async fn a_body_that_ends_with_its_connection_passes_and_is_not_taken_for_whole() {
    let model = Model::start(|_, stream| {
        Box::pin(async move {
            let raw = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n{\"cut\":";
            stream.lock().await.write_all(raw).await.unwrap();
            false
        })
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, boundaries, address) = start(&model, dir.path()).await;
    open_all(boundaries);
    for n in 1..=2 {
        assert_eq!(ask_once(address, ask("x")).await.text(), "{\"cut\":");
        assert!(!coordinator.turns(&id("box"))[0].journaled);
        assert_eq!(model.asked(), n);
    }
}

#[tokio::test]
async fn trailers_of_an_answer_pass_and_are_journaled() {
    let mut raw =
        b"HTTP/1.1 200 OK\r\ntrailer: x-sum\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\nx-sum: 7\r\n\r\n"
            .to_vec();
    raw.extend_from_slice(b"");
    let model = Model::saying(raw).await;
    let dir = tempfile::tempdir().unwrap();
    let (_coordinator, boundaries, address) = start(&model, dir.path()).await;
    open_all(boundaries);
    let with_te = |raw: String| raw.replacen("\r\n", "\r\nte: trailers\r\n", 1);
    for raw in [ask("x"), ask("x"), post("/x", "")] {
        let response = ask_once(address, with_te(raw)).await;
        assert_eq!(response.text(), "{}");
        assert_eq!(response.trailers, [("x-sum".to_owned(), "7".to_owned())]);
    }
    assert_eq!(model.asked(), 2);
}

#[tokio::test]
async fn an_old_client_gets_an_answer_that_it_can_read() {
    let model = Model::saying(sse(&anthropic_events("hi"))).await;
    let dir = tempfile::tempdir().unwrap();
    let (_coordinator, boundaries, address) = start(&model, dir.path()).await;
    open_all(boundaries);
    let response = ask_once(address, ask("x").replacen("HTTP/1.1", "HTTP/1.0", 1)).await;
    assert!(!response.chunked);
    assert_eq!(response.body, anthropic_events("hi").concat());
}
