//! The provider of the example is served as those that come with the crate are.

#[path = "../../examples/add_provider/cohere.rs"]
mod cohere;

use std::time::Duration;

use crate::support::*;

#[tokio::test]
async fn a_provider_of_ones_own_is_gated_kept_alive_journaled_and_refused_in_its_own_form() {
    let events = ["message-start", "content-delta", "message-end"]
        .map(|name| format!("event: {name}\ndata: {{\"type\":\"{name}\"}}\n\n").into_bytes());
    let model = Model::saying(sse(&events)).await;
    let dir = tempfile::tempdir().unwrap();
    let moment = Duration::from_millis(20);
    let builder = builder(model.address).journal(dir.path()).keep_alive(moment, moment).provider(cohere::Cohere);
    let (coordinator, mut boundaries, address) = start_with(builder).await;
    let ask = |text: &str| post("/v2/chat", &format!("{{\"messages\":[\"{text}\"]}}"));

    let mut agent = Agent::connect(address).await;
    agent.send(ask("one")).await;
    let gate = next(&mut boundaries).await.gate;
    tokio::time::sleep(moment * 4).await;
    gate.decide(durable());
    let answer = agent.receive().await.unwrap();
    assert!(answer.text().starts_with(": waiting\n\n"), "{}", answer.text());
    assert!(answer.body.ends_with(&events.concat()));
    until(|| coordinator.turns(&id("box"))[0].journaled).await;

    agent.send(ask("two")).await;
    drop(next(&mut boundaries).await.gate);
    let refusal = agent.receive().await.unwrap();
    let refused_early = refusal.status() == 503 && refusal.json()["id"] == "crab_checkpoint_failed";
    assert!(refused_early || refusal.text().contains("\"finish_reason\":\"ERROR\""), "{}", refusal.text());

    assert_eq!(agent.ask(post("/v2/embed", "{}")).await.status(), 200);
    assert_eq!(coordinator.newest_turn(&id("box")).unwrap().0, 2);
}
