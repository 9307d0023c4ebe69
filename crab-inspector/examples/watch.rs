//! Watches cgroups until its input ends, and says how long decisions take. For measuring what watching costs.
//!
//! `watch ROOT CGROUP...`: each cgroup becomes a sandbox with this root.
use std::io::BufRead as _;
use std::time::Instant;

use crab_core::{Rebase, Sandbox, SandboxId, StateDelta};
use crab_inspector::Inspector;
use futures_executor::block_on;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let mut arguments = std::env::args().skip(1);
    let root = arguments.next().ok_or("say: watch ROOT CGROUP...")?;
    let inspector = Inspector::load()?;
    let mut ids = Vec::new();
    for (i, cgroup) in arguments.enumerate() {
        let id = SandboxId::new(format!("box-{i}"))?;
        block_on(inspector.attach(&Sandbox::new(id.clone(), &root, &cgroup)))?;
        let token = block_on(inspector.take(&id)).token;
        let base = Rebase { token, filesystem: true, process: true, tree: None };
        block_on(inspector.rebase(&id, &base));
        block_on(inspector.take(&id));
        ids.push(id);
    }
    println!("watching {}", ids.len());
    for line in std::io::stdin().lock().lines() {
        line?;
        let mut took: Vec<_> = ids
            .iter()
            .map(|id| {
                let begin = Instant::now();
                let delta = block_on(inspector.take(id));
                (begin.elapsed(), delta.is_clean())
            })
            .collect();
        took.sort();
        let clean = took.iter().filter(|(_, clean)| *clean).count();
        let at = |part: usize| took[(took.len() - 1) * part / 100].0;
        println!("p50 {:?}, p99 {:?}, worst {:?}, {clean} clean", at(50), at(99), at(100));
    }
    Ok(())
}
