//! Whoever asks again gets the same answer, and the model is not asked twice.

use std::sync::Arc;
use std::time::Duration;

use crab_coordinator::{AfterRestore, Event};
use crab_core::TurnNumber;
use tokio::io::AsyncWriteExt;
use tokio::sync::Semaphore;

use crate::support::*;

#[tokio::test]
async fn a_retry_of_a_turn_that_is_done_is_answered_from_the_journal() {
    let model = Model::counting().await;
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, boundaries, address) = start(&model, dir.path()).await;
    let turns = open_all(boundaries);
    let first = ask_once(address, ask("x")).await;
    let spaced = post(
        "/v1/messages?beta=true",
        "{ \"messages\": [{\"content\":\"x\",\"role\":\"user\",\"cache_control\":{}}], \"model\":\"m\" }",
    );
    for raw in [ask("x"), spaced] {
        let again = ask_once(address, raw).await;
        assert_eq!(again.start, first.start);
        assert_eq!(again.body, first.body);
        let without_date = |message: &Message| {
            let headers = message.headers.iter().filter(|header| header.0 != "date");
            headers.cloned().collect::<Vec<_>>()
        };
        assert_eq!(without_date(&again), without_date(&first));
    }
    assert_eq!(model.asked(), 1);
    assert_eq!(*turns.lock(), [1]);
    // Another question, then the first one anew: that is meant.
    assert_eq!(ask_once(address, ask("y")).await.text(), "{\"answer\":2}");
    assert_eq!(ask_once(address, ask("x")).await.text(), "{\"answer\":3}");
    assert_eq!(*turns.lock(), [1, 2, 3]);
    assert_eq!(coordinator.newest_turn(&id("box")).unwrap().0, 3);
}

#[tokio::test]
async fn a_retry_of_a_turn_that_runs_joins_it() {
    let go = Arc::new(Semaphore::new(0));
    let may = go.clone();
    let model = Model::start(move |_, stream| {
        let may = may.clone();
        Box::pin(async move {
            let mut stream = stream.lock().await;
            stream.write_all(SSE_HEAD.as_bytes()).await.unwrap();
            for event in anthropic_events("hi") {
                may.acquire().await.unwrap().forget();
                stream.write_all(&chunk(&event)).await.unwrap();
            }
            stream.write_all(LAST_CHUNK).await.is_ok()
        })
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let (_coordinator, boundaries, address) = start(&model, dir.path()).await;
    let turns = open_all(boundaries);
    let mut agents = Vec::new();
    for n in 0..3 {
        let mut agent = Agent::connect(address).await;
        agent.send(ask("x")).await;
        agents.push(agent);
        if n == 1 {
            until(|| model.asked() == 1).await;
            go.add_permits(1);
            tokio::time::sleep(Duration::from_millis(30)).await;
        }
    }
    tokio::time::sleep(Duration::from_millis(30)).await;
    // The first goes away: the others still get all of it.
    drop(agents.remove(0));
    go.add_permits(2);
    for mut agent in agents {
        assert_eq!(agent.receive().await.unwrap().body, anthropic_events("hi").concat());
    }
    assert_eq!(model.asked(), 1);
    assert_eq!(*turns.lock(), [1]);
}

#[tokio::test]
async fn after_an_error_or_a_broken_stream_the_model_is_asked_again_in_the_same_turn() {
    let count = Arc::new(parking_lot::Mutex::new(0));
    let model = Model::start(move |_, stream| {
        let n = {
            let mut count = count.lock();
            *count += 1;
            *count
        };
        Box::pin(async move {
            let mut stream = stream.lock().await;
            let raw = match n {
                1 => b"HTTP/1.1 529 Overloaded\r\ncontent-length: 4\r\nretry-after: 7\r\n\r\nbusy".to_vec(),
                2 => {
                    let mut raw = SSE_HEAD.as_bytes().to_vec();
                    raw.extend(chunk(&anthropic_events("cut")[0]));
                    raw
                }
                // An error inside of a stream that ends in good order.
                3 => sse(&[b"event: error\ndata: {}\n\n".to_vec()]),
                // A stream that ends in good order without its end.
                4 => sse(&anthropic_events("x")[..1]),
                _ => sse(&anthropic_events("good")),
            };
            stream.write_all(&raw).await.unwrap();
            n != 2
        })
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, boundaries, address) = start(&model, dir.path()).await;
    let turns = open_all(boundaries);
    let busy = ask_once(address, ask("x")).await;
    assert_eq!((busy.status(), busy.text(), busy.header("retry-after")), (529, "busy", Some("7")));
    let mut agent = Agent::connect(address).await;
    agent.send(ask("x")).await;
    assert!(agent.receive().await.is_none(), "a broken answer must look broken");
    for _ in 0..2 {
        assert_eq!(ask_once(address, ask("x")).await.status(), 200);
        assert!(!coordinator.turns(&id("box"))[0].journaled);
    }
    for _ in 0..2 {
        let good = ask_once(address, ask("x")).await;
        assert_eq!(good.body, anthropic_events("good").concat());
    }
    assert_eq!(model.asked(), 5);
    assert_eq!(*turns.lock(), [1]);
}

#[tokio::test]
async fn a_retry_after_a_failed_gate_is_a_new_turn_with_the_answer_that_is_here() {
    let model = Model::counting().await;
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, mut boundaries, address) = start(&model, dir.path()).await;
    let mut agent = Agent::connect(address).await;
    for _ in 0..2 {
        agent.send(ask("x")).await;
        drop(next(&mut boundaries).await);
        assert_eq!(agent.receive().await.unwrap().status(), 529);
    }
    until(|| coordinator.turns(&id("box")).iter().any(|turn| turn.journaled)).await;
    agent.send(ask("x")).await;
    let boundary = next(&mut boundaries).await;
    assert_eq!(boundary.turn.number.0, 3);
    assert!(agent.hears_nothing().await);
    boundary.gate.decide(durable());
    assert_eq!(agent.receive().await.unwrap().text(), "{\"answer\":1}");
    assert_eq!(model.asked(), 1);
}

#[tokio::test]
async fn a_restored_agent_walks_through_what_it_had_heard() {
    let model = Model::counting().await;
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, boundaries, address) = start(&model, dir.path()).await;
    let turns = open_all(boundaries);
    let mut agent = Agent::connect(address).await;
    for question in ["a", "b", "c"] {
        agent.ask(ask(question)).await;
    }
    coordinator.rewind(&id("box"), TurnNumber(2), AfterRestore::Replay);
    assert_eq!(agent.ask(ask("b")).await.text(), "{\"answer\":2}");
    // Replays are turns of their own: what the agent does in them has to be saved again.
    assert_eq!(*turns.lock(), [1, 2, 3, 4]);
    assert_eq!(agent.ask(ask("c")).await.text(), "{\"answer\":3}");
    assert_eq!(agent.ask(ask("other")).await.text(), "{\"answer\":4}");
    coordinator.rewind(&id("box"), TurnNumber(2), AfterRestore::AskModel);
    assert_eq!(agent.ask(ask("b")).await.text(), "{\"answer\":5}");
    assert_eq!(*turns.lock(), [1, 2, 3, 4, 5, 6, 7]);
}

#[tokio::test]
async fn an_answer_of_which_nobody_waits_is_kept_for_a_while_if_so_wished() {
    let go = Arc::new(Semaphore::new(0));
    let may = go.clone();
    let model = Model::start(move |_, stream| {
        let may = may.clone();
        Box::pin(async move {
            let mut stream = stream.lock().await;
            may.acquire().await.unwrap().forget();
            stream.write_all(&sse(&anthropic_events("late"))).await.is_ok()
        })
    })
    .await;
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, boundaries, address) =
        start_with(builder(model.address).journal(dir.path()).abandoned_grace(PATIENCE)).await;
    open_all(boundaries);
    let mut agent = Agent::connect(address).await;
    agent.send(ask("x")).await;
    until(|| model.asked() == 1).await;
    drop(agent);
    tokio::time::sleep(Duration::from_millis(50)).await;
    go.add_permits(1);
    until(|| coordinator.turns(&id("box"))[0].journaled).await;
    assert_eq!(ask_once(address, ask("x")).await.body, anthropic_events("late").concat());
    assert_eq!(model.asked(), 1);
}

#[tokio::test]
async fn a_request_longer_than_the_buffer_streams_and_its_retry_never_arrives_whole() {
    let model = Model::counting().await;
    let dir = tempfile::tempdir().unwrap();
    let (_coordinator, boundaries, address) =
        start_with(builder(model.address).journal(dir.path()).request_buffer(1000)).await;
    let turns = open_all(boundaries);
    let long = ask(&"long ".repeat(20_000));
    for chunked in [false, true] {
        let raw = if chunked {
            let body = long.split_once("\r\n\r\n").unwrap().1;
            let mut raw = b"POST /v1/messages HTTP/1.1\r\nhost: h\r\ntransfer-encoding: chunked\r\n\r\n".to_vec();
            body.as_bytes().chunks(777).for_each(|piece| raw.extend(chunk(piece)));
            raw.extend_from_slice(LAST_CHUNK);
            raw
        } else {
            long.clone().into_bytes()
        };
        let response = ask_once(address, raw).await;
        assert_eq!(response.text(), "{\"answer\":1}");
    }
    let seen = model.seen.lock().clone();
    assert_eq!(seen.len(), 1, "only one request arrived whole");
    assert_eq!(seen[0].text(), long.split_once("\r\n\r\n").unwrap().1);
    assert_eq!(*turns.lock(), [1]);
}

#[tokio::test]
async fn a_request_that_the_model_refuses_before_its_end_gets_that_answer() {
    let model = Model::start(|_, _| Box::pin(async { true })).await;
    let early = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = early.local_addr().unwrap();
    drop(model);
    tokio::spawn(async move {
        let (mut stream, _) = early.accept().await.unwrap();
        let mut piece = [0; 4096];
        tokio::io::AsyncReadExt::read(&mut stream, &mut piece).await.unwrap();
        let raw = b"HTTP/1.1 413 Too Large\r\ncontent-length: 3\r\nconnection: close\r\n\r\nbig";
        stream.write_all(raw).await.unwrap();
        std::future::pending::<()>().await;
    });
    let (_coordinator, boundaries, address) = start_with(builder(address).request_buffer(1000)).await;
    open_all(boundaries);
    let mut agent = Agent::connect(address).await;
    agent.send("POST /v1/messages HTTP/1.1\r\nhost: h\r\ncontent-length: 100000000\r\n\r\n").await;
    agent.send(vec![b' '; 100_000]).await;
    assert_eq!(agent.receive().await.unwrap().status(), 413);
}

#[tokio::test]
async fn a_conversation_that_was_not_restored_with_its_sandbox_is_reported() {
    let model = Model::counting().await;
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, boundaries, address) = start(&model, dir.path()).await;
    open_all(boundaries);
    let mut events = coordinator.events();
    let mut agent = Agent::connect(address).await;
    let history = |n: usize| {
        let elements: Vec<String> = (0..n).map(|n| format!("\"element {n}\"")).collect();
        post("/v1/messages", &format!("{{\"messages\":[{}]}}", elements.join(",")))
    };
    for n in [1, 3, 5, 7] {
        agent.ask(history(n)).await;
    }
    for n in [3, 5, 9] {
        coordinator.rewind(&id("box"), TurnNumber(2), AfterRestore::Replay);
        // What the restored agent, or its runner, asks next is in order; the last is not.
        agent.ask(history(n)).await;
    }
    let Some(Event::Diverged { restored_to, speaks_of, turn, .. }) = within(events.next()).await else {
        panic!("no event");
    };
    assert_eq!((restored_to, speaks_of, turn), (TurnNumber(2), TurnNumber(6), TurnNumber(7)));
}
