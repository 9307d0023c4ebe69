//! The engine's spans, written as they end.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use crab_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id};
use tracing::subscriber::set_global_default;
use tracing_subscriber::Registry;
use tracing_subscriber::layer::{Context, Layer, SubscriberExt};
use tracing_subscriber::registry::LookupSpan;

use super::Span;

/// Writes all spans of this process to a file from now on.
pub(super) fn record(path: &Path) -> Result<()> {
    let file = File::options().create(true).append(true).open(path);
    let file = file.map_err(|e| Error::io(format!("write {}", path.display()), e))?;
    set_global_default(Registry::default().with(Recorder(Mutex::new(file))))
        .map_err(|e| Error::new(ErrorKind::Internal, "spans are recorded already").caused_by(e))
}

struct Recorder(Mutex<File>);

/// What is kept of a span while it is open.
struct Open {
    start_us: u64,
    sandbox: String,
}

#[derive(Default)]
struct Sandbox(Option<String>);

impl Visit for Sandbox {
    fn record_debug(&mut self, field: &Field, value: &dyn std::fmt::Debug) {
        if field.name() == "sandbox" {
            self.0 = Some(format!("{value:?}"));
        }
    }
}

fn now_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(u64::MAX))
}

impl<S: tracing::Subscriber + for<'a> LookupSpan<'a>> Layer<S> for Recorder {
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let Some(span) = context.span(id) else { return };
        let mut sandbox = Sandbox::default();
        attributes.record(&mut sandbox);
        // A step's sandbox is the one of the turn that it belongs to.
        let inherited =
            || span.parent().and_then(|parent| parent.extensions().get::<Open>().map(|open| open.sandbox.clone()));
        let sandbox = sandbox.0.or_else(inherited).unwrap_or_default();
        span.extensions_mut().insert(Open { start_us: now_us(), sandbox });
    }

    fn on_close(&self, id: Id, context: Context<'_, S>) {
        let Some(span) = context.span(&id) else { return };
        let Some(open) = span.extensions_mut().remove::<Open>() else { return };
        let span = Span {
            name: span.name().to_owned(),
            sandbox: open.sandbox,
            took_us: now_us().saturating_sub(open.start_us),
            start_us: open.start_us,
        };
        if let Ok(mut line) = serde_json::to_vec(&span) {
            line.push(b'\n');
            // A trace with a hole is no reason to end the service.
            let _ = self.0.lock().write_all(&line);
        }
    }
}
