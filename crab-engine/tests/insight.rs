//! What an operator sees: one tree of spans for each turn, and metrics by stable names.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use common::Fixture;
use crab_core::memory::{Fault, Step};
use crab_core::{Domain, ErrorKind, Verdict};
use crab_engine::RestoreOptions;
use crab_engine::retention::Retention;
use metrics::{
    Counter, CounterFn, Gauge, GaugeFn, Histogram, HistogramFn, Key, KeyName, Metadata, Recorder, SharedString, Unit,
};
use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::{LookupSpan, Registry};

/// Held by each test. Whether anybody listens to a span is remembered for the whole process: a test that runs the same
/// code without listening, at the same moment, would make the others deaf.
static ALONE: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

#[derive(Clone, Debug, Default)]
struct Seen {
    name: &'static str,
    parent: Option<u64>,
    fields: BTreeMap<&'static str, String>,
    closed: bool,
}

impl Visit for Seen {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        self.fields.insert(field.name(), format!("{value:?}").trim_matches('"').to_owned());
    }
}

/// Keeps all spans, as a layer that writes a Chrome trace would.
#[derive(Clone, Default)]
struct Trace(Arc<Mutex<Spans>>);

/// All spans in the order of their beginning, and the places of the open ones by the subscriber's numbers.
type Spans = (Vec<Seen>, HashMap<u64, usize>);

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Trace {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        if !attributes.metadata().target().starts_with("crab_engine") {
            return;
        }
        let parent = context.span(id).and_then(|span| span.parent().map(|parent| parent.id().into_u64()));
        let mut state = self.0.lock();
        let parent = parent.and_then(|parent| state.1.get(&parent).map(|at| *at as u64));
        let mut seen = Seen { name: attributes.metadata().name(), parent, ..Seen::default() };
        attributes.record(&mut seen);
        let at = state.0.len();
        state.0.push(seen);
        // The subscriber gives numbers again.
        state.1.insert(id.into_u64(), at);
    }
    fn on_record(&self, id: &Id, values: &Record<'_>, _context: Context<'_, S>) {
        let mut state = self.0.lock();
        if let Some(at) = state.1.get(&id.into_u64()).copied() {
            values.record(&mut state.0[at]);
        }
    }
    fn on_close(&self, id: Id, _context: Context<'_, S>) {
        let mut state = self.0.lock();
        if let Some(at) = state.1.remove(&id.into_u64()) {
            state.0[at].closed = true;
        }
    }
}

impl Trace {
    /// The paths of all spans from their roots, and whether all are closed.
    fn paths(&self) -> (Vec<String>, bool) {
        let spans = self.0.lock().0.clone();
        let path = |mut at: usize| {
            let mut path = spans[at].name.to_owned();
            while let Some(parent) = spans[at].parent {
                at = usize::try_from(parent).unwrap();
                path = format!("{}/{path}", spans[at].name);
            }
            path
        };
        let mut paths: Vec<String> = (0..spans.len()).map(path).collect();
        paths.sort();
        (paths, spans.iter().all(|span| span.closed))
    }

    fn named(&self, name: &str) -> Vec<Seen> {
        self.0.lock().0.iter().filter(|span| span.name == name).cloned().collect()
    }
}

#[tokio::test]
async fn every_turn_is_one_tree_of_spans_from_its_boundary_to_its_verdict() {
    let _alone = ALONE.lock().await;
    let f = Fixture::new();
    let engine = f.engine().await;
    let trace = Trace::default();
    let _default = tracing::subscriber::set_default(Registry::default().with(trace.clone()));
    assert!(matches!(f.turn(&engine, 1).await, Verdict::Durable(_)));
    engine.close().await;
    let (paths, closed) = trace.paths();
    let wanted = [
        "turn",
        "turn/checkpoint",
        "turn/checkpoint/commit",
        "turn/checkpoint/frozen",
        "turn/checkpoint/frozen/capture_processes",
        "turn/checkpoint/frozen/capture_processes/capture_files",
        "turn/checkpoint/persist",
        "turn/checkpoint/prepare",
        "turn/checkpoint/queued",
        "turn/decide",
        "turn/exposed",
        "turn/hidden",
        "turn/queued",
    ];
    assert_eq!(paths, wanted);
    assert!(closed, "a span stayed open");
    let turn = &trace.named("turn")[0].fields;
    let fields: Vec<(&str, &str)> = turn.iter().map(|(name, value)| (*name, value.as_str())).collect();
    assert_eq!(fields, [("outcome", "durable"), ("plan", "full"), ("sandbox", "box"), ("turn", "1"), ("version", "1")]);
}

#[tokio::test]
async fn skipped_and_failed_turns_tell_what_became_of_them() {
    let _alone = ALONE.lock().await;
    let f = Fixture::new();
    let engine = f.engine().await;
    f.covered(&engine, 1).await;
    let trace = Trace::default();
    let _default = tracing::subscriber::set_default(Registry::default().with(trace.clone()));
    f.covered(&engine, 2).await;
    assert_eq!(trace.paths().0, ["turn", "turn/decide"]);
    for _ in 0..2 {
        f.world.order(Step::Capture(Domain::Filesystem), Fault::Error(ErrorKind::Io));
    }
    f.world.write(&f.id, "/a", "1").unwrap();
    assert!(matches!(f.turn(&engine, 3).await, Verdict::Failed(_)));
    f.covered(&engine, 4).await;
    engine.close().await;
    let outcomes: Vec<String> = trace.named("turn").iter().map(|turn| turn.fields["outcome"].clone()).collect();
    assert_eq!(outcomes, ["skip", "failed", "durable"]);
    assert_eq!(trace.named("checkpoint").len(), 2);
    assert!(trace.paths().1, "a span stayed open");
}

/// Keeps the sums of counters, the last values of gauges, and how often histograms were recorded, by name and labels.
#[derive(Clone, Default)]
struct Meters(Arc<Mutex<BTreeMap<String, f64>>>);

struct Meter(Meters, String);

impl Meter {
    fn change(&self, change: impl FnOnce(&mut f64)) {
        change(self.0.0.lock().entry(self.1.clone()).or_default());
    }
}

impl CounterFn for Meter {
    fn increment(&self, value: u64) {
        self.change(|sum| *sum += value as f64);
    }
    fn absolute(&self, value: u64) {
        self.change(|sum| *sum = value as f64);
    }
}

impl GaugeFn for Meter {
    fn increment(&self, value: f64) {
        self.change(|sum| *sum += value);
    }
    fn decrement(&self, value: f64) {
        self.change(|sum| *sum -= value);
    }
    fn set(&self, value: f64) {
        self.change(|sum| *sum = value);
    }
}

impl HistogramFn for Meter {
    fn record(&self, value: f64) {
        assert!((0.0..60.0).contains(&value), "{} is not in seconds: {value}", self.1);
        self.change(|count| *count += 1.0);
    }
}

impl Meters {
    fn meter(&self, key: &Key) -> Arc<Meter> {
        let mut name = key.name().to_owned();
        for label in key.labels() {
            name += &format!(" {}={}", label.key(), label.value());
        }
        Arc::new(Meter(self.clone(), name))
    }
}

impl Recorder for Meters {
    fn describe_counter(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_gauge(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn describe_histogram(&self, _: KeyName, _: Option<Unit>, _: SharedString) {}
    fn register_counter(&self, key: &Key, _: &Metadata<'_>) -> Counter {
        Counter::from_arc(self.meter(key))
    }
    fn register_gauge(&self, key: &Key, _: &Metadata<'_>) -> Gauge {
        Gauge::from_arc(self.meter(key))
    }
    fn register_histogram(&self, key: &Key, _: &Metadata<'_>) -> Histogram {
        Histogram::from_arc(self.meter(key))
    }
}

#[test]
fn the_metrics_have_the_names_that_dashboards_know() {
    let _alone = ALONE.blocking_lock();
    let meters = Meters::default();
    metrics::with_local_recorder(&meters, || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let f = Fixture::new();
            let engine = f.engine().await;
            f.covered(&engine, 1).await;
            f.covered(&engine, 2).await;
            f.world.write(&f.id, "/a", "1").unwrap();
            f.covered(&engine, 3).await;
            f.world.remember(&f.id, "server", "1").unwrap();
            for _ in 0..2 {
                f.world.order(Step::Capture(Domain::Process), Fault::Error(ErrorKind::Io));
            }
            assert!(matches!(f.turn(&engine, 4).await, Verdict::Failed(_)));
            engine.prune(&Retention::keep_all().last(1)).await.unwrap();
            engine.restore(&f.id, crab_engine::Select::Latest, RestoreOptions::default()).await.unwrap();
            engine.close().await;
        });
    });
    let seen = meters.0.lock().clone();
    let of = |name: &str| seen.get(name).copied().unwrap_or_else(|| panic!("{name} is not among {seen:#?}"));
    assert_eq!(of("crab_turns_total outcome=durable"), 2.0);
    assert_eq!(of("crab_turns_total outcome=skip"), 1.0);
    assert_eq!(of("crab_turns_total outcome=failed"), 1.0);
    assert_eq!(of("crab_checkpoints_total plan=full"), 1.0);
    assert_eq!(of("crab_checkpoints_total plan=fs"), 1.0);
    assert_eq!(of("crab_checkpoint_failures_total kind=Io"), 2.0);
    assert!(of("crab_unknown_deltas_total domain=filesystem reason=no_base") >= 1.0);
    assert!(of("crab_unknown_deltas_total domain=process reason=no_base") >= 1.0);
    assert_eq!(of("crab_frozen_seconds"), 1.0);
    assert_eq!(of("crab_capture_seconds"), 2.0);
    assert_eq!(of("crab_persist_seconds"), 2.0);
    assert_eq!(of("crab_hidden_seconds"), 3.0);
    assert_eq!(of("crab_exposed_seconds"), 3.0);
    assert_eq!(of("crab_restore_seconds"), 1.0);
    assert_eq!(of("crab_pruned_versions_total rule=not_kept"), 1.0);
    assert!(of("crab_pruned_bytes_total rule=not_kept") >= 0.0);
    assert_eq!(of("crab_waiting_requests"), 0.0);
    assert_eq!(of("crab_store_damaged_files"), 0.0);
    assert_eq!(of("crab_orphans_removed_total"), 0.0);
    // Each of them is in the documentation, and nothing else is measured.
    let documented = include_str!("../src/lib.rs");
    for name in seen.keys() {
        let name = name.split(' ').next().unwrap();
        assert!(documented.contains(&format!("`{name}`")), "{name} is not documented");
    }
}
