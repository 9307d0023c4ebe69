//! What was found, as it is kept between runs of the evaluation.

use std::collections::BTreeMap;
use std::path::Path;

use crab_core::{Error, ErrorKind, Result};
use crab_examples::service::TurnReport;
use serde::{Deserialize, Serialize};

/// All of it. A part that is there is not run again.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Results {
    pub(crate) seed: u64,
    /// What the recorded delays of the model are multiplied by, in the sessions part.
    pub(crate) scale: f64,
    pub(crate) quick: bool,
    pub(crate) machine: BTreeMap<String, String>,
    /// Sessions by name.
    pub(crate) sessions: BTreeMap<String, SessionRecord>,
    /// Sessions that cannot be judged, and why.
    pub(crate) left_out: BTreeMap<String, String>,
    /// Recorded sessions that were not taken, by the rule.
    pub(crate) not_taken: usize,
    /// By how many sandboxes there were at once.
    pub(crate) density: BTreeMap<usize, Vec<Cell>>,
    /// What `cargo xtask accuracy` found.
    pub(crate) accuracy: Option<serde_json::Value>,
}

#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct SessionRecord {
    /// Whether the project ships it.
    pub(crate) own: bool,
    /// Which agent made it.
    pub(crate) agent: String,
    pub(crate) responses: usize,
    pub(crate) runs: Vec<RunRecord>,
}

/// One run of one session.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct RunRecord {
    /// The scheme's name.
    pub(crate) scheme: String,
    /// What befell it; empty where nothing did.
    pub(crate) fault: String,
    /// After this response, counted from 1.
    pub(crate) response: usize,
    /// Where one fault is tried at each boundary of a session.
    pub(crate) one_of_many: bool,
    /// Against the run without a fault. Empty where it ended the same.
    pub(crate) differences: Vec<String>,
    pub(crate) took_s: f64,
    pub(crate) restores_s: Vec<f64>,
    pub(crate) turns: Vec<TurnReport>,
    pub(crate) evacuation: Option<Moved>,
}

/// A move to another store.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Moved {
    /// Until nothing that is needed is left behind.
    pub(crate) left_s: f64,
    /// Until the sandbox runs again.
    pub(crate) whole_s: f64,
    pub(crate) bytes: u64,
}

/// Many sandboxes at once under one scheme.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Cell {
    pub(crate) scheme: String,
    pub(crate) scale: f64,
    /// How long each sandbox's work took, in the order of the sandboxes, which is the same under each scheme. Nothing
    /// where it failed.
    pub(crate) took_s: Vec<Option<f64>>,
    pub(crate) failures: Vec<String>,
    pub(crate) turns: Vec<TurnReport>,
    /// From the first beginning to the last end.
    pub(crate) wall_s: f64,
    /// CPU time of the whole machine that was not idle, as a share.
    pub(crate) busy: f64,
    /// Of Crab's process and those that it started.
    pub(crate) crab: Option<Usage>,
    /// Bytes that were written to the device of the pool.
    pub(crate) device_bytes: u64,
}

/// What a process took.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Usage {
    pub(crate) cpu_s: f64,
    pub(crate) resident_bytes: u64,
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
}

impl Results {
    /// What an earlier run kept in this file; nothing where there is none.
    pub(crate) fn load(path: &Path) -> Result<Option<Self>> {
        let text = match std::fs::read_to_string(path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            text => text.map_err(|e| Error::io(format!("read {}", path.display()), e))?,
        };
        let results = serde_json::from_str(&text).map_err(|e| {
            Error::new(ErrorKind::InvalidInput, format!("{} was not kept by this evaluation", path.display()))
                .fix("name another file")
                .caused_by(e)
        })?;
        Ok(Some(results))
    }

    /// Keeps it: whole or not at all.
    pub(crate) fn save(&self, path: &Path) -> Result<()> {
        let io = |e| Error::io(format!("write {}", path.display()), e);
        let text = serde_json::to_vec(self)
            .map_err(|e| Error::new(ErrorKind::Internal, "cannot write the results as JSON").caused_by(e))?;
        let new = path.with_extension("new");
        std::fs::write(&new, text).map_err(io)?;
        std::fs::rename(&new, path).map_err(io)
    }
}
