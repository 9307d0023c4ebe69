//! What is on disk: enough to answer again, nothing that is secret.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use crab_coordinator::{GateRecord, JournalLimits};
use crab_core::{ErrorKind, TurnNumber};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Semaphore;

use crate::support::*;

fn files(dir: &Path) -> Vec<std::path::PathBuf> {
    let mut all = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            all.extend(files(&path));
        }
        all.push(path);
    }
    all
}

fn answers(dir: &Path) -> usize {
    let is_answer = |path: &std::path::PathBuf| path.extension().is_some_and(|e| e == "answer");
    files(dir).iter().filter(|path| is_answer(path)).count()
}

#[tokio::test]
async fn after_a_restart_the_journal_answers_and_numbers_go_on() {
    let model = Model::counting().await;
    let dir = tempfile::tempdir().unwrap();
    let (coordinator, boundaries, address) = start(&model, dir.path()).await;
    open_all(boundaries);
    for question in ["a", "b"] {
        ask_once(address, ask(question)).await;
    }
    until(|| coordinator.turns(&id("box")).iter().all(|turn| turn.delivered)).await;
    coordinator.shutdown(PATIENCE).await;

    let (coordinator, boundaries, address) = start(&model, dir.path()).await;
    let turns = open_all(boundaries);
    let known = coordinator.turns(&id("box"));
    assert!(known.iter().all(|turn| turn.journaled && turn.delivered));
    assert!(matches!(known[1].gate, GateRecord::Durable(_)));
    assert_eq!(ask_once(address, ask("b")).await.text(), "{\"answer\":2}");
    assert_eq!(model.asked(), 2);
    assert_eq!(ask_once(address, ask("c")).await.text(), "{\"answer\":3}");
    assert_eq!(*turns.lock(), [3]);
}

#[tokio::test]
async fn an_answer_whose_gate_was_never_decided_waits_for_a_new_turn() {
    let model = Model::counting().await;
    let dir = tempfile::tempdir().unwrap();
    {
        let (coordinator, mut boundaries, address) = start(&model, dir.path()).await;
        let mut agent = Agent::connect(address).await;
        agent.send(ask("a")).await;
        let _held = next(&mut boundaries).await;
        until(|| coordinator.turns(&id("box"))[0].journaled).await;
        coordinator.shutdown(std::time::Duration::ZERO).await;
    }
    let (_coordinator, mut boundaries, address) = start(&model, dir.path()).await;
    let mut agent = Agent::connect(address).await;
    agent.send(ask("a")).await;
    let boundary = next(&mut boundaries).await;
    assert_eq!(boundary.turn.number, TurnNumber(2));
    assert!(agent.hears_nothing().await);
    boundary.gate.decide(durable());
    assert_eq!(agent.receive().await.unwrap().text(), "{\"answer\":1}");
    assert_eq!(model.asked(), 1);
}

/// The lock is given back when the last task is gone, which may be a moment later.
async fn restarted(
    model: &Model,
    dir: &Path,
) -> (crab_coordinator::Coordinator, crab_coordinator::Boundaries, std::net::SocketAddr) {
    within(async {
        loop {
            let started = builder(model.address)
                .journal(dir)
                .listen(crab_coordinator::Listen::loopback(), crab_coordinator::resolve::OneSandbox(id("box")))
                .start()
                .await;
            match started {
                Ok((coordinator, boundaries)) => {
                    let address = coordinator.address().unwrap();
                    return (coordinator, boundaries, address);
                }
                Err(error) if error.kind() == ErrorKind::Busy => {
                    tokio::time::sleep(std::time::Duration::from_millis(10)).await;
                }
                Err(error) => panic!("{error}"),
            }
        }
    })
    .await
}

#[tokio::test]
async fn a_part_of_an_answer_is_never_given_for_a_whole() {
    let cut = |whole: &[u8]| whole[..whole.len() - 1].to_vec();
    // The end is in place: this is found only when the answer is read.
    let changed = |whole: &[u8]| {
        let mut changed = whole.to_vec();
        changed[whole.len() / 2] ^= 1;
        changed
    };
    for damage in [&cut as &dyn Fn(&[u8]) -> Vec<u8>, &changed] {
        let model = Model::counting().await;
        let dir = tempfile::tempdir().unwrap();
        let (coordinator, boundaries, address) = start(&model, dir.path()).await;
        open_all(boundaries);
        ask_once(address, ask("a")).await;
        coordinator.shutdown(PATIENCE).await;
        let is_answer = |path: &std::path::PathBuf| path.extension().is_some_and(|e| e == "answer");
        let answer = files(dir.path()).into_iter().find(is_answer).unwrap();
        std::fs::write(&answer, damage(&std::fs::read(&answer).unwrap())).unwrap();

        let (_coordinator, boundaries, address) = restarted(&model, dir.path()).await;
        open_all(boundaries);
        let mut response = ask_once(address, ask("a")).await;
        if response.status() != 200 {
            assert_eq!(response.header("x-should-retry"), Some("true"));
            response = ask_once(address, ask("a")).await;
        }
        assert_eq!(response.text(), "{\"answer\":2}");
    }
}

/// An answer in pieces as they are on the wire, so long that some of it is on disk before its end has come.
fn long_answer(number: usize) -> Vec<Vec<u8>> {
    let mut events = anthropic_events(&format!("{number}{}", "x".repeat(40_000)));
    for _ in 0..2 {
        events.insert(1, events[1].clone());
    }
    events
}

#[tokio::test]
async fn of_an_answer_that_its_agent_left_all_is_given_again_or_nothing() {
    for grace in [Duration::ZERO, PATIENCE] {
        for heard in 0..=6 {
            let (go, asked) = (Arc::new(Semaphore::new(0)), Arc::new(AtomicUsize::new(0)));
            let model = Model::start({
                let go = go.clone();
                move |_, stream| {
                    let (go, number) = (go.clone(), asked.fetch_add(1, Ordering::Relaxed) + 1);
                    Box::pin(async move {
                        let mut stream = stream.lock().await;
                        let pieces = long_answer(number).iter().map(|event| chunk(event)).collect::<Vec<_>>();
                        let head = [SSE_HEAD.as_bytes().to_vec()];
                        for piece in head.into_iter().chain(pieces).chain([LAST_CHUNK.to_vec()]) {
                            go.acquire().await.unwrap().forget();
                            if stream.write_all(&piece).await.is_err() {
                                return false;
                            }
                        }
                        true
                    })
                }
            })
            .await;
            let dir = tempfile::tempdir().unwrap();
            let (coordinator, boundaries, address) =
                start_with(builder(model.address).journal(dir.path()).abandoned_grace(grace)).await;
            open_all(boundaries);

            let mut agent = Agent::connect(address).await;
            agent.send(ask("x")).await;
            // The head, and so many pieces.
            go.add_permits(if heard == 0 { 0 } else { heard + 1 });
            until(|| model.asked() == 1).await;
            let events = |text: &[u8]| text.windows(2).filter(|end| end == b"\n\n").count();
            let mut got = Vec::new();
            within(async {
                while events(&got) < heard.min(5) || heard == 6 && !got.ends_with(LAST_CHUNK) {
                    assert!(agent.stream.read_buf(&mut got).await.unwrap() > 0);
                }
            })
            .await;
            drop(agent);
            go.add_permits(100);

            let again = ask_once(address, ask("x")).await.body;
            let number = (1..=2).find(|&number| again == long_answer(number).concat());
            let number = number.unwrap_or_else(|| panic!("{grace:?} {heard}: not one whole answer"));
            assert!(number == 1 || grace.is_zero() && heard < 6, "{grace:?} {heard}");
            assert_eq!(model.asked(), number);
            // Whoever asked first is gone, and so is what was written for him.
            until(|| answers(dir.path()) == 1).await;
            coordinator.shutdown(PATIENCE).await;
            let (_coordinator, boundaries, address) = restarted(&model, dir.path()).await;
            open_all(boundaries);
            assert_eq!(ask_once(address, ask("x")).await.body, again);
            assert_eq!(model.asked(), number);
        }
    }
}

#[tokio::test]
async fn nothing_secret_is_on_disk_and_nobody_else_may_read() {
    let model =
        Model::saying("HTTP/1.1 200 OK\r\nset-cookie: session=sk-cookie-5678\r\ncontent-length: 2\r\n\r\n{}").await;
    let root = tempfile::tempdir().unwrap();
    let dir = root.path().join("journal");
    let (coordinator, boundaries, address) = start(&model, &dir).await;
    open_all(boundaries);
    let response = ask_once(address, ask("a secret question 9999")).await;
    assert_eq!(response.header("set-cookie"), Some("session=sk-cookie-5678"));
    coordinator.shutdown(PATIENCE).await;
    let mut seen = 0;
    for path in files(&dir).into_iter().chain([dir.clone()]) {
        let mode = std::fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        if path.is_dir() {
            assert_eq!(mode, 0o700, "{}", path.display());
            continue;
        }
        assert_eq!(mode, 0o600, "{}", path.display());
        let text = String::from_utf8_lossy(&std::fs::read(&path).unwrap()).into_owned();
        for secret in ["sk-secret-1234", "sk-cookie-5678", "9999"] {
            assert!(!text.contains(secret), "{} holds {secret}", path.display());
        }
        seen += 1;
    }
    assert_eq!(seen, 3, "lock, index, answer");
}

#[tokio::test]
async fn a_second_coordinator_on_the_same_journal_is_refused() {
    let model = Model::counting().await;
    let dir = tempfile::tempdir().unwrap();
    let (_first, _boundaries, _) = start(&model, dir.path()).await;
    let error = builder(model.address)
        .journal(dir.path())
        .listen(crab_coordinator::Listen::loopback(), crab_coordinator::resolve::OneSandbox(id("box")))
        .start()
        .await
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
}

#[tokio::test]
async fn old_answers_go_when_limits_or_the_host_say_so() {
    let model = Model::counting().await;
    let dir = tempfile::tempdir().unwrap();
    let limits = JournalLimits { turns: 4, ..JournalLimits::default() };
    let (coordinator, boundaries, address) = start_with(builder(model.address).journal_with(dir.path(), limits)).await;
    open_all(boundaries);
    for n in 0..10 {
        ask_once(address, ask(&n.to_string())).await;
    }
    until(|| answers(dir.path()) == 4).await;
    coordinator.forget_before(&id("box"), TurnNumber(10));
    until(|| answers(dir.path()) == 1).await;
    coordinator.set_floor(&id("box"), TurnNumber(50));
    ask_once(address, ask("floor")).await;
    assert_eq!(coordinator.newest_turn(&id("box")), Some(TurnNumber(51)));
    coordinator.forget(&id("box"));
    until(|| !dir.path().join("box").exists()).await;
}

#[tokio::test]
async fn answers_that_are_too_long_pass_and_are_not_kept() {
    let model = Model::counting().await;
    let dir = tempfile::tempdir().unwrap();
    let limits = JournalLimits { answer_bytes: 5, ..JournalLimits::default() };
    let (coordinator, boundaries, address) = start_with(builder(model.address).journal_with(dir.path(), limits)).await;
    open_all(boundaries);
    assert_eq!(ask_once(address, ask("a")).await.text(), "{\"answer\":1}");
    until(|| answers(dir.path()) == 0).await;
    assert!(!coordinator.turns(&id("box"))[0].journaled);
}
