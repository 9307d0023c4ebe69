//! A coordinator without an engine: holds every answer for a fixed time, then lets it go. For trying an agent's patience.
//!
//! ```text
//! cargo run -p crab-coordinator --example hold -- http://127.0.0.1:9000 5 [journal]
//! ```
//! prints the address to give to the agent, then a line for each turn.

use std::time::Duration;

use crab_coordinator::{Coordinator, Listen, resolve::one_sandbox};
use crab_core::{TurnBoundary, Verdict, VersionId};

#[tokio::main]
async fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let (Some(upstream), Some(seconds)) = (arguments.next(), arguments.next()) else {
        return Err("usage: hold UPSTREAM SECONDS [JOURNAL]".into());
    };
    let hold = Duration::from_secs_f64(seconds.parse()?);
    let mut builder = Coordinator::builder().upstream(upstream).listen(Listen::loopback(), one_sandbox("agent")?);
    if let Some(dir) = arguments.next() {
        builder = builder.journal(dir);
    }
    let (coordinator, mut boundaries) = builder.start().await?;
    if let Some(address) = coordinator.address() {
        println!("http://{address}");
    }
    while let Some(boundary) = boundaries.next().await {
        println!("{} {}", boundary.turn.sandbox, boundary.turn.number);
        tokio::spawn(async move {
            tokio::time::sleep(hold).await;
            boundary.gate.decide(Verdict::Durable(VersionId(1)));
        });
    }
    Ok(())
}
