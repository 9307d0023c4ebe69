//! What the coordinator adds, measured beside a direct connection and beside nginx, in one run.
//!
//! Client and model are threads of this process; each proxy is a process of its own with one thread that serves, as
//! nginx has. One request after the other goes each way in turn, so that the machine's moods hit all ways alike.
//!
//! Benches are built with all crates optimized as one (`[profile.bench]`), as the crate's documentation advises where
//! microseconds count: it saves a tenth of a request's instructions.
//!
//! What remains was counted. Of system calls a request takes six here and nine in nginx, an event of a stream three in
//! both, and only the one thread is woken. The rest is code: nginx spends 21,000 instructions of its own on a request,
//! the coordinator 38,000 on one that is no turn, most of them in hyper, tokio and what they call, and 84,000 on a turn,
//! of which the digest of its 8 KiB is 20,000 quick ones. An event of a stream costs nginx 2,000 and the
//! coordinator 10,000; it comes after a pause, so much of that is not in the processor's caches.

mod client;
mod model;
mod proxy;

use std::net::SocketAddr;
use std::time::Duration;

use crate::report::{Report, percentile};
use client::Client;
use proxy::{Coordinator, Nginx};

/// Requests each way, after some that warm up.
const ROUNDS: usize = 5_000;
const WARM_UP: usize = 300;
const STREAMS: usize = 256;
const EVENTS_A_SECOND: u32 = 20;
const BIG_BODY: u64 = 1 << 30;

/// A path that is a turn of the agent, and one that is not.
const TURN: &str = "/v1/messages";
const OTHER: &str = "/x";

pub(crate) fn run(report: &mut Report) -> Result<(), String> {
    if proxy::is_child() {
        // This process was started by the bench, to be the coordinator.
        return proxy::serve();
    }
    let failed = |what: &'static str| move |error: std::io::Error| format!("{what}: {error}");
    let model = model::start().map_err(failed("cannot start the model"))?;
    let nginx = Nginx::start(model)?;
    let coordinator = Coordinator::start(model, None)?;
    round_trips(report, model, nginx.address, coordinator.address).map_err(failed("round trips"))?;
    events(report, model, nginx.address, coordinator.address).map_err(failed("events of a stream"))?;
    many_streams(report, &coordinator).map_err(failed("many streams"))?;
    drop((nginx, coordinator));
    big_bodies(report, model)?;
    journaled(report, model)
}

/// An 8 KiB POST: straight to the model, by nginx, by the coordinator as no turn, and as a turn with an open gate.
fn round_trips(
    report: &mut Report,
    model: SocketAddr,
    nginx: SocketAddr,
    coordinator: SocketAddr,
) -> std::io::Result<()> {
    let ways = [(model, OTHER), (nginx, OTHER), (coordinator, OTHER), (coordinator, TURN)];
    let [mut direct, mut nginx, mut passed, mut turn] = client::posts(ways, WARM_UP, ROUNDS)?;
    // Pairs of neighbours, so that a slow moment counts for neither.
    let mut own: Vec<f64> = turn.iter().zip(&passed).map(|(turn, passed)| turn - passed).collect();
    for (name, samples) in
        [("direct", &mut direct), ("nginx", &mut nginx), ("passed", &mut passed), ("turn", &mut turn)]
    {
        report.add(&format!("{name}_us_p50"), percentile(samples, 50.0));
        report.add(&format!("{name}_us_p99"), percentile(samples, 99.0));
    }
    let mut added = |percent| percentile(&mut turn, percent) - percentile(&mut direct, percent);
    report.add_bounded("added_us_p50", added(50.0), 25.0);
    report.add_bounded("added_us_p99", added(99.0), 200.0);
    report.add_bounded("vs_nginx_p50_ratio", percentile(&mut turn, 50.0) / percentile(&mut nginx, 50.0), 1.2);
    report.add_bounded("gate_overhead_us_p50", percentile(&mut own, 50.0), 18.0);
    Ok(())
}

/// How long an event of a stream takes from the model's hand to the client's, the gate being open.
fn events(report: &mut Report, model: SocketAddr, nginx: SocketAddr, coordinator: SocketAddr) -> std::io::Result<()> {
    let mut samples = [(); 3].map(|()| Vec::new());
    for round in 0..20 {
        for ((address, path), samples) in
            [(model, OTHER), (nginx, OTHER), (coordinator, TURN)].into_iter().zip(&mut samples)
        {
            let mut client = Client::connect(address)?;
            let late = client.stream(path, round, 100, Duration::from_millis(2))?;
            // The first waits for the turn to be opened.
            samples.extend(late.into_iter().skip(1));
        }
    }
    let [mut direct, mut nginx, mut turn] = samples;
    let floor = percentile(&mut direct, 50.0);
    report.add("sse_event_direct_us_p50", floor);
    report.add("sse_event_nginx_added_us_p50", percentile(&mut nginx, 50.0) - floor);
    report.add_bounded("sse_event_added_us_p50", percentile(&mut turn, 50.0) - floor, 30.0);
    Ok(())
}

/// Many streams at once, each with its own turn, and what has been resident at the most until their end.
fn many_streams(report: &mut Report, coordinator: &Coordinator) -> std::io::Result<()> {
    let every = Duration::from_secs(1) / EVENTS_A_SECOND;
    let mut late = client::streams(coordinator.address, TURN, STREAMS, 6 * EVENTS_A_SECOND, every)?;
    report.add("sse_256_streams_late_ms_p50", percentile(&mut late, 50.0) / 1e3);
    report.add_bounded("sse_256_streams_late_ms_p99", percentile(&mut late, 99.0) / 1e3, 50.0);
    report.add("sse_256_streams_rss_mb", coordinator.peak()? as f64 / 1024.0);
    Ok(())
}

/// A gigabyte to the model and one from it, by a coordinator that has served nothing but a few small requests before.
fn big_bodies(report: &mut Report, model: SocketAddr) -> Result<(), String> {
    let failed = |error: std::io::Error| format!("big bodies: {error}");
    let coordinator = Coordinator::start(model, Some(&proxy::scratch("big")?))?;
    client::posts([(coordinator.address, OTHER), (coordinator.address, TURN)], 0, 20).map_err(failed)?;
    let before = coordinator.reset_peak().map_err(failed)?;
    let mut client = Client::connect(coordinator.address).map_err(failed)?;
    client.upload(TURN, BIG_BODY).map_err(failed)?;
    let sent = coordinator.peak().map_err(failed)?;
    client.download(TURN, BIG_BODY).map_err(failed)?;
    let received = coordinator.peak().map_err(failed)?;
    let growth = |peak: u64| peak.saturating_sub(before) as f64 / 1024.0;
    report.add("rss_before_mb", before as f64 / 1024.0);
    report.add("rss_growth_request_mb", growth(sent));
    report.add_bounded("rss_growth_mb", growth(received), 16.0);
    Ok(())
}

/// The same POST where each answer is made durable before its end is given: the disk's time, not the coordinator's.
fn journaled(report: &mut Report, model: SocketAddr) -> Result<(), String> {
    let failed = |error| format!("journaled turns: {error}");
    let coordinator = Coordinator::start(model, Some(&proxy::scratch("journal")?))?;
    let ways = [(model, OTHER), (coordinator.address, TURN)];
    let [mut direct, mut turn] = client::posts(ways, 20, 300).map_err(failed)?;
    report.add("journaled_added_us_p50", percentile(&mut turn, 50.0) - percentile(&mut direct, 50.0));
    Ok(())
}
