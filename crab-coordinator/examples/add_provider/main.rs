//! Teaches the coordinator one more provider: one file (`cohere.rs`) and one line (marked below).
//!
//! ```text
//! cargo run -p crab-coordinator --example add_provider -- https://api.cohere.com
//! ```

mod cohere;

use crab_coordinator::{Coordinator, Listen, resolve::one_sandbox};
use crab_core::{TurnBoundary, Verdict, VersionId};

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let model = std::env::args().nth(1).ok_or("give the model's address, such as https://api.cohere.com")?;
    let (coordinator, mut boundaries) = Coordinator::builder()
        .upstream(model)
        .listen(Listen::loopback(), one_sandbox("box")?)
        .provider(cohere::Cohere) // <- the line
        .start()
        .await?;
    println!("point an agent at http://{}", coordinator.address().ok_or("no address")?);
    while let Some(boundary) = boundaries.next().await {
        println!("turn {}: its answer waits here until the turn's version is durable", boundary.turn.number);
        boundary.gate.decide(Verdict::Durable(VersionId(boundary.turn.number.0)));
    }
    Ok(())
}
