//! Nothing passes a closed gate.

use std::sync::Arc;
use std::time::Duration;

use crab_coordinator::GatePolicy;
use crab_core::{Error, ErrorKind, Exposure, TurnBoundary, Verdict};
use tokio::io::AsyncWriteExt;
use tokio::sync::Notify;

use crate::support::*;

#[tokio::test]
async fn the_request_goes_at_once_and_the_answer_waits_for_the_verdict() {
    let model = Model::saying(sse(&anthropic_events("hi"))).await;
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, mut boundaries, address) = start(&model, dir.path()).await;
    let mut agent = Agent::connect(address).await;
    agent.send(ask("x")).await;
    let mut boundary = next(&mut boundaries).await;
    assert_eq!(boundary.turn.sandbox, id("box"));
    assert_eq!(boundary.turn.number.0, 1);
    assert!(boundary.turn.conversation.is_some());
    // The model has answered, though nobody has opened the gate.
    assert_eq!(within(boundary.gate.exposed()).await, Exposure::Waiting);
    until(|| coordinator.turns(&id("box"))[0].journaled).await;
    assert!(agent.hears_nothing().await);
    boundary.gate.decide(durable());
    let response = agent.receive().await.unwrap();
    assert_eq!(response.header("x-request-id"), Some("r1"));
    assert_eq!(response.body, anthropic_events("hi").concat());
    until(|| coordinator.turns(&id("box"))[0].delivered).await;
}

#[tokio::test]
async fn after_the_gate_the_answer_streams_as_it_comes() {
    let step = Arc::new(Notify::new());
    let steps = step.clone();
    let model = Model::start(move |_, stream| {
        let step = steps.clone();
        Box::pin(async move {
            let mut stream = stream.lock().await;
            stream.write_all(SSE_HEAD.as_bytes()).await.unwrap();
            for event in anthropic_events("hi") {
                stream.write_all(&chunk(&event)).await.unwrap();
                step.notified().await;
            }
            stream.write_all(LAST_CHUNK).await.is_ok()
        })
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let (_coordinator, boundaries, address) = start(&model, dir.path()).await;
    open_all(boundaries);
    let mut agent = Agent::connect(address).await;
    agent.send(ask("x")).await;
    let mut heard = Vec::new();
    for event in anthropic_events("hi") {
        // Each event is heard while the model waits with the next.
        within(async {
            while !heard.ends_with(&chunk(&event)) {
                let mut piece = [0; 1024];
                let n = tokio::io::AsyncReadExt::read(&mut agent.stream, &mut piece).await.unwrap();
                assert!(n > 0);
                heard.extend_from_slice(&piece[..n]);
            }
        })
        .await;
        step.notify_one();
    }
}

#[tokio::test]
async fn a_gate_that_fails_or_is_dropped_is_the_providers_retryable_error() {
    let model = Model::saying(ok_json("{\"secret\":1}")).await;
    let dir = tempfile::tempdir().unwrap();
    let (_coordinator, mut boundaries, address) = start(&model, dir.path()).await;
    let mut agent = Agent::connect(address).await;
    let failed = || {
        let error = Error::new(ErrorKind::Full, "the pool is full").fix("free space");
        Verdict::Failed(Arc::new(error))
    };
    for (request, status, dropped) in [
        (ask("a"), 529, true),
        (ask("b"), 529, false),
        (post("/v1/chat/completions", "{\"messages\":[1]}"), 503, true),
        (post("/v1/chat/completions", "{\"messages\":[2]}"), 503, false),
    ] {
        agent.send(request).await;
        let boundary = next(&mut boundaries).await;
        if dropped {
            drop(boundary);
        } else {
            boundary.gate.decide(failed());
        }
        let response = agent.receive().await.unwrap();
        assert_eq!(response.status(), status);
        assert_eq!(response.header("retry-after"), Some("1"));
        assert!(!response.text().contains("secret"));
        let message = response.json()["error"]["message"].as_str().unwrap().to_owned();
        assert_eq!(message.contains("free space"), !dropped, "{message}");
        if status == 529 {
            assert_eq!(response.json()["error"]["type"], "overloaded_error");
        }
    }
}

#[tokio::test]
async fn without_an_engine_no_answer_goes_out() {
    let model = Model::saying(ok_json("{}")).await;
    let (_coordinator, boundaries, address) = start_with(builder(model.address)).await;
    drop(boundaries);
    assert_eq!(ask_once(address, ask("x")).await.status(), 529);
}

#[tokio::test]
async fn parallel_requests_have_a_gate_each() {
    let model = Model::start(|message, stream| {
        Box::pin(async move {
            let raw = ok_json(message.text());
            stream.lock().await.write_all(raw.as_bytes()).await.is_ok()
        })
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let (_coordinator, mut boundaries, address) = start(&model, dir.path()).await;
    let mut agents = Vec::new();
    let mut gates = Vec::new();
    for n in 0..4u64 {
        let mut agent = Agent::connect(address).await;
        agent.send(ask(&format!("question {n}"))).await;
        let boundary = next(&mut boundaries).await;
        assert_eq!(boundary.turn.number.0, n + 1);
        agents.push(agent);
        gates.push(boundary.gate);
    }
    for n in [2, 0, 3, 1] {
        // Opening one opens no other.
        let gate = gates.remove(gates.len().min(n).min(gates.len() - 1));
        let at = agents.len().min(n).min(agents.len() - 1);
        let mut agent = agents.remove(at);
        assert!(agent.hears_nothing().await);
        gate.decide(durable());
        assert_eq!(agent.receive().await.unwrap().status(), 200);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sixty_four_streams_at_once() {
    let model = Model::start(|message, stream| {
        Box::pin(async move {
            let events = anthropic_events(&message.body.len().to_string());
            stream.lock().await.write_all(&sse(&events)).await.is_ok()
        })
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, boundaries, address) = start(&model, dir.path()).await;
    let turns = open_all(boundaries);
    let agents: Vec<_> = (0..64)
        .map(|n| {
            tokio::spawn(async move {
                let mut agent = Agent::connect(address).await;
                for turn in 0..3 {
                    let text = "x".repeat(n * 3 + turn);
                    let raw = ask(&format!("{n} {turn} {text}"));
                    let length = raw.split("\r\n\r\n").nth(1).unwrap().len();
                    let response = agent.ask(raw).await;
                    assert_eq!(response.body, anthropic_events(&length.to_string()).concat());
                }
            })
        })
        .collect();
    for agent in agents {
        agent.await.unwrap();
    }
    let expected: Vec<u64> = (1..=64 * 3).collect();
    assert_eq!(*turns.lock(), expected, "boundaries come in the order of their numbers");
    assert!(coordinator.turns(&id("box")).iter().all(|turn| turn.journaled));
}

#[tokio::test]
async fn a_client_that_goes_away_cancels_the_request() {
    let model = Model::start(|_, stream| {
        Box::pin(async move {
            let mut stream = stream.lock().await;
            stream.write_all(SSE_HEAD.as_bytes()).await.unwrap();
            stream.write_all(&chunk(b": begun\n\n")).await.unwrap();
            true
        })
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let (_coordinator, mut boundaries, address) = start(&model, dir.path()).await;
    for (n, opened) in [(1, false), (2, true)] {
        let mut agent = Agent::connect(address).await;
        agent.send(ask(&n.to_string())).await;
        let mut boundary = next(&mut boundaries).await;
        within(boundary.gate.exposed()).await;
        if opened {
            boundary.gate.decide(durable());
        }
        drop(agent);
        until(|| *model.closed.lock() == n).await;
    }
    // Also a request that is no turn.
    let mut agent = Agent::connect(address).await;
    agent.send(post("/x", "{}")).await;
    until(|| model.asked() == 3).await;
    drop(agent);
    until(|| *model.closed.lock() == 3).await;
}

#[tokio::test]
async fn patience_with_the_engine_ends_as_the_policy_says() {
    let max_hold = Duration::from_millis(50);
    for (policy, status) in [(GatePolicy::Strict { max_hold }, 529), (GatePolicy::BestEffort { max_hold }, 200)] {
        let model = Model::saying(ok_json("{}")).await;
        let (_coordinator, mut boundaries, address) = start_with(builder(model.address).gate(policy)).await;
        let mut agent = Agent::connect(address).await;
        agent.send(ask("x")).await;
        let _held = next(&mut boundaries).await;
        assert_eq!(agent.receive().await.unwrap().status(), status);
    }
}

#[tokio::test]
async fn a_stream_that_is_held_long_is_kept_alive_and_then_comes_whole() {
    let model = Model::saying(sse(&anthropic_events("hi"))).await;
    let dir = tempfile::tempdir().unwrap();
    let short = Duration::from_millis(20);
    let (_coordinator, mut boundaries, address) =
        start_with(builder(model.address).journal(dir.path()).keep_alive(short, short)).await;
    for fails in [false, true] {
        let mut agent = Agent::connect(address).await;
        agent.send(ask(&fails.to_string())).await;
        let boundary = next(&mut boundaries).await;
        let ping = b"event: ping\ndata: {\"type\": \"ping\"}\n\n";
        let mut heard = Vec::new();
        within(async {
            while heard.windows(ping.len()).filter(|part| part == ping).count() < 3 {
                let mut piece = [0; 1024];
                let n = tokio::io::AsyncReadExt::read(&mut agent.stream, &mut piece).await.unwrap();
                heard.extend_from_slice(&piece[..n]);
            }
        })
        .await;
        agent.buffer = heard;
        if fails {
            drop(boundary);
        } else {
            boundary.gate.decide(durable());
        }
        let response = agent.receive().await.unwrap();
        assert_eq!(response.status(), 200);
        let text = response.text().replace(std::str::from_utf8(ping).unwrap(), "");
        if fails {
            assert!(
                text.starts_with("event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\""),
                "{text}"
            );
            assert!(!text.contains("message_start"));
        } else {
            assert_eq!(text.as_bytes(), anthropic_events("hi").concat());
        }
    }
}

#[tokio::test]
async fn boundaries_end_with_the_coordinator_and_answers_under_way_are_finished() {
    let model = Model::saying(ok_json("{}")).await;
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, mut boundaries, address) = start(&model, dir.path()).await;
    let mut agent = Agent::connect(address).await;
    agent.send(ask("x")).await;
    let boundary = next(&mut boundaries).await;
    let down = tokio::spawn(coordinator.shutdown(PATIENCE));
    assert!(agent.hears_nothing().await);
    boundary.gate.decide(durable());
    assert_eq!(agent.receive().await.unwrap().status(), 200);
    within(down).await.unwrap();
    assert!(within(boundaries.next()).await.is_none());
    assert!(tokio::net::TcpStream::connect(address).await.is_err());
}

#[tokio::test]
async fn a_slow_client_slows_the_model_and_memory_stays_bounded() {
    let sent = Arc::new(parking_lot::Mutex::new(0usize));
    let counter = sent.clone();
    let model = Model::start(move |_, stream| {
        let counter = counter.clone();
        Box::pin(async move {
            let mut stream = stream.lock().await;
            stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 67108864\r\n\r\n").await.unwrap();
            for _ in 0..1024 {
                if stream.write_all(&[7; 65536]).await.is_err() {
                    return false;
                }
                *counter.lock() += 65536;
            }
            true
        })
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let (_coordinator, boundaries, address) = start(&model, dir.path()).await;
    open_all(boundaries);
    let mut agent = Agent::connect(address).await;
    agent.send(ask("x")).await;
    // The model can send only what the buffers on the way take: the kernel's and the window.
    let mut last = 0;
    loop {
        tokio::time::sleep(Duration::from_millis(200)).await;
        let now = *sent.lock();
        if now == last && now > 0 {
            break;
        }
        last = now;
    }
    assert!(last < 32 << 20, "{last} bytes were taken from the model");
    let response = agent.receive().await.unwrap();
    assert_eq!(response.body.len(), 67_108_864);
}

#[tokio::test]
async fn helpers_pass_ungated_if_so_wished() {
    let model = Model::saying(ok_json("{}")).await;
    let (coordinator, _boundaries, address) = start_with(builder(model.address).helper_models(["*haiku*"])).await;
    let raw = post("/v1/messages", "{\"model\":\"claude-haiku-4\",\"messages\":[1]}");
    let response = ask_once(address, raw.clone()).await;
    assert_eq!(response.status(), 200);
    assert_eq!(model.seen.lock()[0].text(), raw.split("\r\n\r\n").nth(1).unwrap());
    assert_eq!(coordinator.newest_turn(&id("box")), None);
}

#[tokio::test]
async fn when_the_coordinator_goes_the_engine_sees_its_gates_abandoned() {
    let model = Model::saying(ok_json("{}")).await;
    let dir = tempfile::tempdir().unwrap();
    for graceful in [true, false] {
        let (coordinator, mut boundaries, address) = start(&model, dir.path()).await;
        let mut agent = Agent::connect(address).await;
        agent.send(ask(&graceful.to_string())).await;
        let boundary = next(&mut boundaries).await;
        let (mut exposure, _opener) = (boundary.gate, ());
        assert_eq!(within(exposure.exposed()).await, Exposure::Waiting);
        if graceful {
            coordinator.shutdown(Duration::ZERO).await;
        } else {
            drop(coordinator);
        }
        assert!(within(boundaries.next()).await.is_none());
        assert!(agent.receive().await.is_none());
    }
}
