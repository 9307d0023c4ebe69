//! A recorded session is played by the model server, worked through by the agent in a real sandbox, and ends the same
//! twice: what every comparison with a fault-free run rests on.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::Arc;

use crab_examples::agent::Agent;
use crab_examples::judge::{EndState, describe_tree};
use crab_examples::model::ModelServer;
use crab_examples::sandbox::{Config, Sandbox, ScratchRoot, home};
use crab_examples::session::Session;

async fn play(name: &str, session: &Arc<Session>) -> EndState {
    let model = ModelServer::start(Arc::clone(session), 0.0).await.unwrap();
    let root = ScratchRoot::new(name).unwrap();
    let id = format!("{name}-{}", std::process::id()).parse().unwrap();
    let sandbox = Arc::new(Sandbox::launch(Config::new(id, root.path())).unwrap());
    let mut agent = Agent::new(model.address(), "/v1/messages", &session.task);
    loop {
        let asked = agent.ask().await.unwrap();
        if asked.is_empty() {
            break;
        }
        let mut results = Vec::new();
        for asked in asked {
            let sandbox = Arc::clone(&sandbox);
            let command = asked.call.shell();
            let output = tokio::task::spawn_blocking(move || sandbox.exec(&command).unwrap()).await.unwrap();
            results.push((asked.id, output.text()));
        }
        agent.give(results);
    }
    let probes =
        session.judge.probes.iter().map(|probe| (probe.clone(), sandbox.exec(probe).unwrap().text())).collect();
    sandbox.kill().unwrap();
    EndState {
        tree: describe_tree(root.path(), &session.judge).unwrap(),
        probes,
        conversation: agent.messages().to_vec(),
    }
}

fn ready() -> bool {
    let ready = Path::new(&home()).join("pool/base/sbin/crab-init").exists();
    if !ready {
        println!("skipped: sandbox root (run `cargo xtask setup`)");
    }
    ready
}

#[tokio::test(flavor = "multi_thread")]
async fn the_demo_session_ends_the_same_twice() {
    if !ready() {
        return;
    }
    let session = Arc::new(Session::ticket_desk().unwrap());
    let first = play("session-one", &session).await;
    let second = play("session-two", &session).await;
    assert_eq!(second.differences(&first), Vec::<String>::new());
    assert_eq!(first.conversation.len(), 2 * session.responses.len() + 2);
    let answers: Vec<_> = first.probes.iter().map(|(_, text)| text.trim()).collect();
    assert_eq!(answers[0], "12", "the key-value server lives and holds what the session put into it: {answers:?}");
    assert_eq!(answers[2], "closed", "{answers:?}");
    assert_eq!(answers[3], "6575 after 11 entries", "{answers:?}");
}
