//! Which sessions are worked through: the project's own, and recorded ones by a rule.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crab_core::{Error, Result};
use crab_examples::run::Runner;
use crab_examples::session::Session;

/// Recorded sessions with more responses are not taken: they take long, and are the same in kind.
const MOST_RESPONSES: usize = 100;

/// What is left of a recorded session: its first responses.
const KEPT: usize = 40;

/// The rule, for people.
pub(crate) const RULE: &str = "Of the recorded sessions every one with at most 100 responses, cut after its 40th. Their \
     repositories are not at hand: each works on a stand-in, in which the files that it reads exist and those that it \
     edits hold what it replaces. Times, durations, made-up names of temporary files, numbers of processes, addresses \
     and the order of lines in an output are left out of what is compared of them. Those that do not end the same twice without any fault all the same are \
     left out, by name.";

/// A session to work through.
#[derive(Clone)]
pub(crate) struct Material {
    pub(crate) session: Arc<Session>,
    /// Whether the project ships it.
    pub(crate) own: bool,
    /// Which agent made it.
    pub(crate) agent: String,
}

impl Material {
    /// A runner of it, on a stand-in for what it started from where that is not at hand.
    pub(crate) fn runner(&self, program: &Path, scale: f64) -> Runner {
        let session = Arc::clone(&self.session);
        let mut runner = if self.own { Runner::new(session, program) } else { Runner::on_stand_in(session, program) };
        runner.scale = scale;
        runner
    }
}

/// The project's own.
pub(crate) fn own() -> Result<Vec<Material>> {
    let all = Session::all()?.into_iter();
    Ok(all.map(|session| Material { session: Arc::new(session), own: true, agent: "shipped".to_owned() }).collect())
}

/// Those below a directory, by the rule; and how many were not taken.
pub(crate) fn recorded(directory: &Path) -> Result<(Vec<Material>, usize)> {
    let mut paths = Vec::new();
    find(directory, &mut paths)?;
    paths.sort();
    let (mut taken, mut passed) = (Vec::new(), 0);
    for path in paths {
        let mut session = Session::load_recorded(&path)?;
        if session.responses.is_empty() || session.responses.len() > MOST_RESPONSES {
            passed += 1;
            continue;
        }
        session.responses.truncate(KEPT);
        let agent = session.name.split("__").next().unwrap_or("unknown").to_owned();
        taken.push(Material { session: Arc::new(session), own: false, agent });
    }
    Ok((taken, passed))
}

fn find(directory: &Path, paths: &mut Vec<PathBuf>) -> Result<()> {
    let io = |e| Error::io(format!("read {}", directory.display()), e);
    for entry in std::fs::read_dir(directory).map_err(io)? {
        let path = entry.map_err(io)?.path();
        if path.is_dir() {
            find(&path, paths)?;
        } else if path.extension().is_some_and(|extension| extension == "jsonl") {
            paths.push(path);
        }
    }
    Ok(())
}
