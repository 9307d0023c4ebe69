//! Many sandboxes at once, each at its own session, under one scheme after the other.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crab_core::Result;
use crab_examples::crash::Numbers;
use crab_examples::crowd::Crowd;
use crab_examples::run::Runner;

use crate::material::Material;
use crate::results::Cell;
use crate::scheme::{self, Scheme};
use crate::usage;

/// What is timed.
pub(crate) const SCHEMES: [Scheme; 4] = [scheme::NONE, scheme::CRAB, scheme::FULL, scheme::IN_ORDER];

/// What the short form times.
pub(crate) const SHORT: [Scheme; 2] = [scheme::NONE, scheme::CRAB];

/// Each session is cut after so many responses.
const RESPONSES: usize = 16;

/// The sandboxes begin within this time, as users come: not all in one moment.
const WITHIN: Duration = Duration::from_secs(10);

/// Runs `count` sandboxes at once under a scheme.
pub(crate) async fn cell(
    materials: &[Material],
    count: usize,
    scheme: Scheme,
    (scale, seed): (f64, u64),
    program: &Path,
) -> Result<Cell> {
    let runners: Vec<Runner> =
        (0..count).map(|at| runner(&materials[at % materials.len()], scheme, scale, program)).collect();
    let mut numbers = Numbers(seed);
    let within = WITHIN.mul_f64(if count > 1 { scale.min(1.0) } else { 0.0 });
    let delays: Vec<Duration> = (0..count).map(|_| within.mul_f64(numbers.fraction())).collect();
    let crowd = Crowd::launch(&runners, &format!("eval-crowd{count}"), scheme.recovery).await?;
    let (crab, pool) = (crowd.crab(), usage::device(&crowd.directory()));
    let before = (usage::of(crab), usage::written(pool.as_deref()), usage::busy());
    let begun = Instant::now();
    let mut after = None;
    let outcomes = crowd
        .work(&delays, || {
            after = Some((usage::of(crab), usage::written(pool.as_deref()), usage::busy(), begun.elapsed()))
        })
        .await;
    let (usage_after, written, busy, wall) = after.unwrap_or((None, 0, (0, 0), Duration::ZERO));
    let mut cell = Cell {
        scheme: scheme.name.to_owned(),
        scale,
        took_s: Vec::new(),
        failures: Vec::new(),
        turns: Vec::new(),
        wall_s: wall.as_secs_f64(),
        busy: usage::share(before.2, busy),
        crab: before.0.zip(usage_after).map(|(before, after)| after.since(&before)),
        device_bytes: written.saturating_sub(before.1),
    };
    for (at, outcome) in outcomes.into_iter().enumerate() {
        match outcome {
            Ok(outcome) => {
                cell.took_s.push(Some(outcome.took.as_secs_f64()));
                cell.failures.extend(outcome.told.uncovered.iter().map(|(turn, why)| format!("turn {turn}: {why}")));
                cell.turns.extend(outcome.told.covered);
            }
            Err(error) => {
                if at < count {
                    cell.took_s.push(None);
                }
                cell.failures.push(error.to_string());
            }
        }
    }
    Ok(cell)
}

fn runner(material: &Material, scheme: Scheme, scale: f64, program: &Path) -> Runner {
    let mut session = material.session.as_ref().clone();
    session.responses.truncate(RESPONSES);
    // What it ends with is judged elsewhere; here time is measured.
    session.judge.probes.clear();
    let cut = Material { session: Arc::new(session), ..material.clone() };
    let mut runner = cut.runner(program, scale);
    runner.saving = scheme.saving;
    runner
}
