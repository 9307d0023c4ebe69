//! What passes, passes unchanged.

use std::sync::Arc;

use proptest::prelude::*;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::support::*;

#[tokio::test]
async fn what_is_no_turn_passes_ungated_with_its_query() {
    let model = Model::saying(ok_json("{\"data\":[]}")).await;
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, _boundaries, address) = start(&model, dir.path()).await;
    let mut agent = Agent::connect(address).await;
    for raw in [
        "GET /v1/models?limit=2&x=%2F HTTP/1.1\r\nhost: h\r\n\r\n".to_owned(),
        post("/v1/messages/count_tokens?beta=true", "{}"),
        post("/v1/responses/unknown//path/", "not json"),
    ] {
        let response = agent.ask(&raw).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.text(), "{\"data\":[]}");
    }
    let targets: Vec<String> = model.seen.lock().iter().map(|m| m.target().to_owned()).collect();
    assert_eq!(
        targets,
        ["/v1/models?limit=2&x=%2F", "/v1/messages/count_tokens?beta=true", "/v1/responses/unknown//path/"]
    );
    assert_eq!(model.seen.lock()[0].header("host"), Some(model.address.to_string().as_str()));
    assert_eq!(coordinator.newest_turn(&id("box")), None);
}

#[tokio::test]
async fn head_keeps_its_length_and_has_no_body() {
    let model = Model::saying("HTTP/1.1 200 OK\r\ncontent-length: 1234\r\nx-a: b\r\n\r\n").await;
    let (_coordinator, _boundaries, address) = start_with(builder(model.address)).await;
    let mut agent = Agent::connect(address).await;
    for _ in 0..2 {
        agent.send("HEAD / HTTP/1.1\r\nhost: h\r\n\r\n").await;
        let Agent { stream, buffer } = &mut agent;
        let response = within(read_message(stream, buffer, Some("HEAD"))).await.unwrap();
        assert_eq!(response.header("content-length"), Some("1234"));
        assert_eq!(response.header("x-a"), Some("b"));
    }
}

#[tokio::test]
async fn a_chunked_request_arrives_whole_and_chunked_and_with_trailers() {
    let model = Model::counting().await;
    let dir = tempfile::tempdir().unwrap();
    let (_coordinator, boundaries, address) = start(&model, dir.path()).await;
    open_all(boundaries);
    for path in ["/v1/messages", "/upload"] {
        let mut raw =
            format!("POST {path} HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n")
                .into_bytes();
        for piece in ["{\"messages\":", "[", "1,2]}"] {
            raw.extend(chunk(piece.as_bytes()));
        }
        raw.extend_from_slice(b"0\r\nx-sum: 9\r\n\r\n");
        assert_eq!(ask_once(address, raw).await.status(), 200);
        let seen = model.seen.lock().last().unwrap().clone();
        assert_eq!(seen.text(), "{\"messages\":[1,2]}");
        assert!(seen.chunked);
        assert_eq!(seen.header("content-length"), None);
        assert_eq!(seen.trailers, [("x-sum".to_owned(), "9".to_owned())]);
    }
}

#[tokio::test]
async fn headers_of_one_connection_stay_and_all_others_pass() {
    let model = Model::saying(
        "HTTP/1.1 203 Odd\r\nconnection: keep-alive, x-hop\r\nx-hop: 1\r\nkeep-alive: timeout=5\r\nx-twice: a\r\nx-twice: b\r\ncontent-length: 2\r\n\r\nok",
    )
    .await;
    let (_coordinator, boundaries, address) = start_with(builder(model.address)).await;
    open_all(boundaries);
    for path in ["/v1/messages", "/x"] {
        let response = ask_once(
            address,
            format!("POST {path} HTTP/1.1\r\nhost: h\r\nconnection: x-mine\r\nx-mine: 1\r\nproxy-authorization: p\r\nx-api-key: k\r\nanthropic-beta: one\r\nanthropic-beta: two\r\ncontent-length: 2\r\n\r\n{{}}"),
        )
        .await;
        assert_eq!(response.status(), 203);
        assert_eq!(response.header("x-hop"), None);
        assert_eq!(response.header("keep-alive"), None);
        let twice: Vec<_> = response.headers.iter().filter(|h| h.0 == "x-twice").collect();
        assert_eq!(twice.len(), 2);
        let seen = model.seen.lock().last().unwrap().clone();
        assert_eq!(seen.header("x-mine"), None);
        assert_eq!(seen.header("proxy-authorization"), None);
        assert_eq!(seen.header("x-api-key"), Some("k"));
        assert_eq!(seen.headers.iter().filter(|h| h.0 == "anthropic-beta").count(), 2);
    }
}

#[tokio::test]
async fn an_expectation_is_met_here() {
    let model = Model::counting().await;
    let (_coordinator, boundaries, address) = start_with(builder(model.address)).await;
    open_all(boundaries);
    for path in ["/v1/messages", "/x"] {
        let mut agent = Agent::connect(address).await;
        agent
            .send(format!("POST {path} HTTP/1.1\r\nhost: h\r\nexpect: 100-continue\r\ncontent-length: 2\r\n\r\n"))
            .await;
        let mut head = [0; 25];
        within(agent.stream.read_exact(&mut head)).await.unwrap();
        assert_eq!(&head, b"HTTP/1.1 100 Continue\r\n\r\n");
        assert_eq!(agent.ask("{}").await.status(), 200);
        assert_eq!(model.seen.lock().last().unwrap().header("expect"), None);
    }
}

#[tokio::test]
async fn an_unreachable_model_is_a_clear_error_in_the_providers_form() {
    let free = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = free.local_addr().unwrap();
    drop(free);
    let dir = tempfile::tempdir().unwrap();
    let (_coordinator, boundaries, address) = start_with(builder(nobody).journal(dir.path())).await;
    open_all(boundaries);
    let response = ask_once(address, ask("x")).await;
    assert_eq!(response.status(), 502);
    assert_eq!(response.json()["error"]["type"], "api_error");
    let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains(&nobody.to_string()) && message.contains("Check that it runs"), "{message}");
    let response = ask_once(address, post("/v1/chat/completions", "{}")).await;
    assert_eq!(response.status(), 502);
    assert_eq!(response.json()["error"]["code"], "crab_upstream_unreachable");
    assert_eq!(ask_once(address, "GET / HTTP/1.1\r\nhost: h\r\n\r\n").await.status(), 502);
}

#[tokio::test]
async fn a_request_is_sent_once_when_the_model_closes_its_connection() {
    let model = Model::start(|message, stream| {
        Box::pin(async move {
            if message.target() == "/warm" {
                let raw = ok_json("{}");
                return stream.lock().await.write_all(raw.as_bytes()).await.is_ok();
            }
            // Closes without a word, as a server does that gave up on an idle connection.
            false
        })
    })
    .await;
    let (_coordinator, boundaries, address) = start_with(builder(model.address)).await;
    open_all(boundaries);
    let mut agent = Agent::connect(address).await;
    for (path, expected) in [("/v1/messages", 502), ("/x", 502)] {
        assert_eq!(agent.ask(post("/warm", "{}")).await.status(), 200);
        let before = model.asked();
        let response = agent.ask(post(path, "{\"a\":1}")).await;
        assert_eq!(response.status(), expected);
        assert!(response.text().contains("not sent a second time"));
        assert_eq!(model.asked(), before + 1);
    }
}

#[tokio::test]
async fn what_the_model_says_that_is_not_http_is_a_bad_gateway() {
    for garbage in ["garbage\r\n\r\n", "HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", "\0\0\0\0\r\n\r\n"] {
        let model = Model::start(move |_, stream| {
            Box::pin(async move {
                let _ = stream.lock().await.write_all(garbage.as_bytes()).await;
                false
            })
        })
        .await;
        let (_coordinator, boundaries, address) = start_with(builder(model.address)).await;
        open_all(boundaries);
        assert_eq!(ask_once(address, ask("x")).await.status(), 502);
        assert_eq!(ask_once(address, post("/x", "")).await.status(), 502);
    }
}

#[tokio::test]
async fn requests_that_could_be_read_in_two_ways_are_refused_or_made_plain() {
    let model = Model::saying(ok_json("{}")).await;
    let (_coordinator, boundaries, address) = start_with(builder(model.address)).await;
    open_all(boundaries);
    for raw in [
        "POST /v1/messages HTTP/1.1\r\nhost: h\r\ncontent-length: 2\r\ncontent-length: 3\r\n\r\n{} ",
        "POST /x HTTP/1.1\r\nhost: h\r\ncontent-length: +2\r\n\r\n{}",
        "POST /x HTTP/1.1\r\nhost: h\r\n folded: 1\r\n\r\n",
        "POST /x HTTP/1.1\r\nhost: h\rx: 1\r\n\r\n",
        "POST /x HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked, gzip\r\n\r\n",
        "POST /x HTTP/1.1\r\nhost : h\r\ncontent-length: 0\r\n\r\n",
        "NOT HTTP\r\n\r\n",
    ] {
        let mut agent = Agent::connect(address).await;
        agent.send(raw).await;
        let response = agent.receive().await;
        assert!(response.is_none_or(|response| response.status() == 400), "{raw}");
    }
    assert_eq!(model.asked(), 0);
    // Both lengths given: the chunks count, and one length alone goes on.
    let raw =
        "POST /x HTTP/1.1\r\nhost: h\r\ncontent-length: 4\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n";
    let mut agent = Agent::connect(address).await;
    agent.send(raw).await;
    if let Some(response) = agent.receive().await
        && response.status() == 200
    {
        let seen = model.seen.lock()[0].clone();
        assert_eq!((seen.text(), seen.chunked, seen.header("content-length")), ("{}", true, None));
    }
}

#[tokio::test]
async fn sandboxes_are_told_apart_by_path_and_a_turn_without_one_is_refused() {
    let model = Model::saying(ok_json("{}")).await;
    let (coordinator, boundaries) = builder(model.address)
        .listen(crab_coordinator::Listen::loopback(), crab_coordinator::resolve::ByPath::default())
        .start()
        .await
        .unwrap();
    let address = coordinator.address().unwrap();
    open_all(boundaries);
    for sandbox in ["a", "b", "b"] {
        let raw = post(&format!("/sandbox/{sandbox}/v1/messages?beta=true"), "not json");
        assert_eq!(ask_once(address, raw).await.status(), 200);
        assert_eq!(model.seen.lock().last().unwrap().target(), "/v1/messages?beta=true");
    }
    assert_eq!(coordinator.newest_turn(&id("a")).unwrap().0, 1);
    assert_eq!(coordinator.newest_turn(&id("b")).unwrap().0, 2);
    let response = ask_once(address, ask("x")).await;
    assert_eq!(response.status(), 404);
    assert!(response.text().contains("names no sandbox"));
    assert_eq!(model.asked(), 3);
}

#[tokio::test]
async fn it_serves_a_unix_socket_and_takes_its_place_again() {
    let model = Model::saying(ok_json("{}")).await;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("agent.sock");
    for _ in 0..2 {
        // As a process leaves it that was killed.
        drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
        let (coordinator, boundaries) = builder(model.address)
            .listen(crab_coordinator::Listen::Unix(path.clone()), crab_coordinator::resolve::OneSandbox(id("box")))
            .start()
            .await
            .unwrap();
        open_all(boundaries);
        let mut stream = tokio::net::UnixStream::connect(&path).await.unwrap();
        stream.write_all(ask("x").as_bytes()).await.unwrap();
        let response = within(read_message(&mut stream, &mut Vec::new(), Some("POST"))).await;
        assert_eq!(response.unwrap().status(), 200);
        drop(stream);
        coordinator.shutdown(PATIENCE).await;
        assert!(!path.exists());
    }
    std::fs::write(&path, "mine").unwrap();
    let error = builder(model.address)
        .listen(crab_coordinator::Listen::Unix(path.clone()), crab_coordinator::resolve::OneSandbox(id("box")))
        .start()
        .await
        .unwrap_err();
    assert!(error.to_string().contains("in use"), "{error}");
    assert_eq!(std::fs::read(&path).unwrap(), b"mine");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixty_four_megabytes_pass_both_ways() {
    const SIZE: usize = 64 << 20;
    let model = Model::start(|message, stream| {
        Box::pin(async move {
            let head = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", message.body.len());
            let mut stream = stream.lock().await;
            stream.write_all(head.as_bytes()).await.is_ok() && stream.write_all(&message.body).await.is_ok()
        })
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let (_coordinator, boundaries, address) = start(&model, dir.path()).await;
    open_all(boundaries);
    let body: Arc<[u8]> = (0..SIZE).map(|n| (n % 251) as u8).collect();
    for path in ["/v1/messages", "/x"] {
        let stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let (mut read, mut write) = stream.into_split();
        let sent = body.clone();
        let sending = tokio::spawn(async move {
            let head = format!("POST {path} HTTP/1.1\r\nhost: h\r\ncontent-length: {SIZE}\r\n\r\n");
            write.write_all(head.as_bytes()).await.unwrap();
            write.write_all(&sent).await.unwrap();
            write
        });
        let response = within(read_message(&mut read, &mut Vec::new(), Some("POST"))).await.unwrap();
        assert!(response.body == *body);
        // Until here the agent's sending half is open.
        drop(sending.await.unwrap());
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// However an answer is cut on the wire, the agent reads the same bytes, from the model and from the journal.
    #[test]
    fn any_chunking_of_an_answer_comes_out_equal(
        events in prop::collection::vec(prop::collection::vec(any::<u8>(), 1..300), 0..12),
        cuts in prop::collection::vec(1usize..200, 1..10),
        chunked: bool,
        is_turn: bool,
        text in "[a-z]{0,200}",
        is_stream: bool,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            // What a model's server says, or any bytes whatever.
            let events = if is_stream { anthropic_events(&text) } else { events };
            let kind = if is_stream { "text/event-stream" } else { "application/octet-stream" };
            let body = events.concat();
            let framing =
                if chunked { "transfer-encoding: chunked".into() } else { format!("content-length: {}", body.len()) };
            let mut raw = format!("HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n{framing}\r\n\r\n").into_bytes();
            if chunked {
                events.iter().for_each(|event| raw.extend(chunk(event)));
                raw.extend_from_slice(LAST_CHUNK);
            } else {
                raw.extend(&body);
            }
            let (raw, cuts): (Arc<[u8]>, Arc<[usize]>) = (raw.into(), cuts.into());
            let model = Model::start(move |_, stream| {
                let (raw, cuts) = (raw.clone(), cuts.clone());
                Box::pin(async move {
                    let mut stream = stream.lock().await;
                    stream.set_nodelay(true).unwrap();
                    let mut rest = &raw[..];
                    for cut in cuts.iter().cycle() {
                        let (piece, after) = rest.split_at((*cut).min(rest.len()));
                        if stream.write_all(piece).await.is_err() {
                            return false;
                        }
                        rest = after;
                        if rest.is_empty() {
                            return true;
                        }
                        tokio::task::yield_now().await;
                    }
                    true
                })
            })
            .await;
            let dir = tempfile::tempdir().unwrap();
            let (_coordinator, boundaries, address) = start(&model, dir.path()).await;
            open_all(boundaries);
            let mut agent = Agent::connect(address).await;
            for _ in 0..2 {
                let raw = if is_turn { ask("x") } else { post("/x", "{}") };
                let response = agent.ask(raw).await;
                assert_eq!(response.body, body);
                assert_eq!(response.chunked, chunked);
            }
            assert_eq!(model.asked(), if is_turn { 1 } else { 2 });
        });
    }
}
