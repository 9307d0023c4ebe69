#![doc = include_str!("../SESSIONS.md")]

use std::path::Path;
use std::time::Duration;

use crab_core::{Error, ErrorKind, Result};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::volatile::Volatile;

/// A recorded session.
#[derive(Clone, Debug)]
pub struct Session {
    /// A name for people: the file's.
    pub name: String,
    /// What the user asked for.
    pub task: String,
    /// The working directory of its commands.
    pub cwd: String,
    /// How a finished run is judged.
    pub judge: Judge,
    /// The model's responses, in order.
    pub responses: Vec<Response>,
}

/// How the end state of a run is compared with the fault-free run's.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Judge {
    /// Paths whose content differs from run to run without any fault, such as logs with times.
    #[serde(default)]
    pub ignore: Vec<String>,
    /// Commands whose output shows the state of live processes.
    #[serde(default)]
    pub probes: Vec<String>,
    /// Text that differs from run to run without any fault, wherever it stands.
    #[serde(default)]
    pub volatile: Volatile,
    /// The lines of an output have no order that can be relied on, since several processes write them at once.
    #[serde(default)]
    pub unordered: bool,
}

/// Tools that only read.
const READERS: [&str; 4] = ["read_file", "grep", "glob", "list_dir"];

/// One response of the model.
#[derive(Clone, Debug)]
pub struct Response {
    /// How long the model took.
    pub delay: Duration,
    /// The tool calls that it asked for.
    pub calls: Vec<Call>,
    /// Whether the calls run at once.
    pub parallel: bool,
}

/// One tool call.
#[derive(Clone, Debug, PartialEq)]
pub struct Call {
    /// The tool's name.
    pub tool: String,
    /// Its input.
    pub input: Map<String, Value>,
}

#[derive(Deserialize)]
struct Head {
    #[serde(default)]
    task: Value,
    #[serde(default)]
    start_state: StartState,
    #[serde(default)]
    judge: Judge,
}

#[derive(Default, Deserialize)]
struct StartState {
    cwd: Option<String>,
}

#[derive(Deserialize)]
struct Line {
    tool: String,
    llm_turn: Option<u64>,
    llm_ms: Option<f64>,
    #[serde(default)]
    parallel_group: Value,
    #[serde(flatten)]
    rest: Map<String, Value>,
}

/// The sessions that the project ships: name and text.
const SHIPPED: [(&str, &str); 14] = [
    ("ticket-desk", include_str!("../sessions/ticket-desk.jsonl")),
    ("calc-bisect", include_str!("../sessions/calc-bisect.jsonl")),
    ("glyph-build", include_str!("../sessions/glyph-build.jsonl")),
    ("incident-review", include_str!("../sessions/incident-review.jsonl")),
    ("interval-repair", include_str!("../sessions/interval-repair.jsonl")),
    ("job-queue", include_str!("../sessions/job-queue.jsonl")),
    ("loan-database", include_str!("../sessions/loan-database.jsonl")),
    ("metrics-relay", include_str!("../sessions/metrics-relay.jsonl")),
    ("night-watch", include_str!("../sessions/night-watch.jsonl")),
    ("package-shop", include_str!("../sessions/package-shop.jsonl")),
    ("parallel-audit", include_str!("../sessions/parallel-audit.jsonl")),
    ("repl-survey", include_str!("../sessions/repl-survey.jsonl")),
    ("scratch-work", include_str!("../sessions/scratch-work.jsonl")),
    ("stdlib-research", include_str!("../sessions/stdlib-research.jsonl")),
];

/// The fields of a call that are its input.
const INPUT: [&str; 8] = ["command", "path", "content", "old", "edits", "args", "background", "session_id"];

impl Session {
    /// Reads a session file.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] with the line number where it is not in the format.
    pub fn load(path: &Path) -> Result<Self> {
        let text = std::fs::read_to_string(path).map_err(|e| Error::io(format!("read {}", path.display()), e))?;
        let name = path.file_stem().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        Self::parse(&name, &text)
    }

    /// Reads a session from text.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] with the line number where it is not in the format.
    pub fn parse(name: &str, text: &str) -> Result<Self> {
        let bad = |line: usize, why: &dyn std::fmt::Display| {
            Error::new(ErrorKind::InvalidInput, format!("session {name}, line {line}: {why}"))
                .fix("write JSON lines in the format that examples/SESSIONS.md describes")
        };
        let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
        let (_, head) = lines.next().ok_or_else(|| bad(1, &"the file is empty"))?;
        let head: Head = serde_json::from_str(head).map_err(|e| bad(1, &e))?;
        let mut responses: Vec<(Option<u64>, Response)> = Vec::new();
        for (at, line) in lines {
            let line: Line = serde_json::from_str(line).map_err(|e| bad(at + 1, &e))?;
            let input = line.rest.into_iter().filter(|(key, _)| INPUT.contains(&key.as_str())).collect();
            let call = Call { tool: line.tool, input };
            let grouped = !line.parallel_group.is_null();
            match responses.last_mut() {
                Some((turn, response)) if line.llm_turn.is_some() && *turn == line.llm_turn => {
                    response.calls.push(call);
                    response.parallel &= grouped;
                }
                _ => {
                    let delay = Duration::from_secs_f64(line.llm_ms.unwrap_or(2000.0).clamp(0.0, 60_000.0) / 1000.0);
                    responses.push((line.llm_turn, Response { delay, calls: vec![call], parallel: grouped }));
                }
            }
        }
        Ok(Self {
            name: name.to_owned(),
            task: head.task.as_str().unwrap_or("go on").to_owned(),
            cwd: head.start_state.cwd.unwrap_or_else(|| "/root".to_owned()),
            judge: head.judge,
            responses: responses.into_iter().map(|(_, response)| response).collect(),
        })
    }

    /// The session that the demo plays.
    ///
    /// # Errors
    /// None, in a whole checkout.
    pub fn ticket_desk() -> Result<Self> {
        Self::named("ticket-desk")
    }

    /// [Loads](Self::load) a session that was recorded elsewhere. Of the calls that it made at once, only those that read
    /// run at once, since a command may write what another reads; and the judge leaves out git's index, which holds the
    /// times of the files, [volatile text](Volatile::recorded) and
    /// the order of lines.
    ///
    /// # Errors
    /// Those of [`load`](Self::load).
    pub fn load_recorded(path: &Path) -> Result<Self> {
        let mut session = Self::load(path)?;
        for response in &mut session.responses {
            response.parallel &= response.calls.iter().all(|call| READERS.contains(&call.tool.as_str()));
        }
        session.judge.ignore.push(format!("{}/.git/index", session.cwd));
        session.judge.volatile = Volatile::recorded();
        session.judge.unordered = true;
        Ok(session)
    }

    /// The shipped session of this name.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] where there is none.
    pub fn named(name: &str) -> Result<Self> {
        match SHIPPED.iter().find(|(shipped, _)| *shipped == name) {
            Some((_, text)) => Self::parse(name, text),
            None => {
                let names: Vec<_> = SHIPPED.iter().map(|(name, _)| *name).collect();
                Err(Error::new(ErrorKind::NotFound, format!("no session {name} is shipped"))
                    .fix(format!("take one of {}", names.join(", "))))
            }
        }
    }

    /// All shipped sessions, the demo's first.
    ///
    /// # Errors
    /// None, in a whole checkout.
    pub fn all() -> Result<Vec<Self>> {
        SHIPPED.iter().map(|(name, text)| Self::parse(name, text)).collect()
    }
}

impl Call {
    fn text(&self, key: &str) -> Option<&str> {
        self.input.get(key).and_then(Value::as_str)
    }

    /// The shell command that has this call's effect in a sandbox. Calls without an effect there (plans, questions,
    /// web searches) become `true`.
    #[must_use]
    pub fn shell(&self) -> String {
        let path = self.text("path").filter(|path| !path.is_empty()).map(quote);
        match self.tool.as_str() {
            "bash" | "interactive" => self.text("command").unwrap_or("true").to_owned(),
            "write_file" => match (path, self.text("content")) {
                (Some(path), Some(content)) => write_command(&path, content),
                _ => self.text("command").unwrap_or("true").to_owned(),
            },
            "edit" | "multi_edit" => match &path {
                Some(path) => self.edit_command(path),
                None => self.text("command").unwrap_or("true").to_owned(),
            },
            "read_file" => path.map_or_else(|| "true".to_owned(), |path| format!("cat {path}")),
            "list_dir" => path.map_or_else(|| "ls".to_owned(), |path| format!("ls {path}")),
            "glob" | "grep" => path.map_or_else(|| "ls".to_owned(), |path| format!("find {path} -maxdepth 1 | sort")),
            _ => "true".to_owned(),
        }
    }

    /// What an edit replaces, and by what.
    #[must_use]
    pub fn replacements(&self) -> Vec<(String, String)> {
        match self.input.get("edits").and_then(Value::as_array) {
            Some(edits) => edits
                .iter()
                .map(|edit| {
                    let text = |key: &str| edit.get(key).and_then(Value::as_str).unwrap_or("").to_owned();
                    (text("old"), text("content"))
                })
                .collect(),
            None => vec![(self.text("old").unwrap_or("").to_owned(), self.text("content").unwrap_or("").to_owned())],
        }
    }

    fn edit_command(&self, path: &str) -> String {
        let pairs = self.replacements();
        let program = "import json,sys\n\
            path, pairs = sys.argv[1], json.loads(sys.argv[2])\n\
            text = open(path).read()\n\
            for old, new in pairs:\n    \
                if not old or old not in text: sys.exit('the text to replace was not found')\n    \
                text = text.replace(old, new, 1)\n\
            open(path, 'w').write(text)\n\
            print('edited')";
        // Two-string arrays of JSON never fail to be written.
        let pairs = serde_json::to_string(&pairs).unwrap_or_default();
        format!("python3 -c {} {path} {}", quote(program), quote(&pairs))
    }
}

/// A kernel takes arguments of up to 128 KiB; longer files are written in parts.
const PART: usize = 60_000;

pub(crate) fn write_command(path: &str, content: &str) -> String {
    use std::fmt::Write as _;
    let mut command = format!("mkdir -p \"$(dirname {path})\" && : >{path}");
    let mut rest = content;
    while !rest.is_empty() {
        let mut end = rest.len().min(PART);
        while !rest.is_char_boundary(end) {
            end -= 1;
        }
        let (part, later) = rest.split_at(end);
        rest = later;
        // Writing to a string cannot fail.
        let _ = write!(command, " && printf %s {} >>{path}", quote(part));
    }
    command
}

/// Quotes text for the shell.
#[must_use]
pub fn quote(text: &str) -> String {
    format!("'{}'", text.replace('\'', "'\\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_demo_session_is_a_real_piece_of_work() {
        let session = Session::ticket_desk().unwrap();
        assert!(session.responses.len() >= 25);
        assert!(session.responses.iter().any(|response| response.calls.len() > 1), "it has parallel calls");
        assert!(!session.judge.probes.is_empty());
    }

    #[test]
    fn every_session_in_the_folder_is_shipped_and_can_be_judged() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("sessions");
        let all = Session::all().unwrap();
        assert_eq!(std::fs::read_dir(folder).unwrap().count(), all.len());
        for session in all {
            assert!(session.responses.len() >= 12, "{}", session.name);
            assert!(session.judge.ignore.iter().chain([&session.cwd]).all(|path| path.starts_with('/')));
            assert_eq!(Session::named(&session.name).unwrap().responses.len(), session.responses.len());
        }
        assert_eq!(Session::named("none").unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn a_bad_line_is_named() {
        let error = Session::parse("x", "{}\n{\"tool\": \"bash\"}\nnonsense\n").unwrap_err();
        assert!(error.to_string().contains("line 3"), "{error}");
    }

    #[test]
    fn written_files_have_exactly_the_content() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a b/c'd");
        for content in ["", "it's $HOME `x` \\n\n", &"\u{e4}'".repeat(50_000)] {
            let input = [("path", path.to_str().unwrap()), ("content", content)]
                .map(|(key, value)| (key.to_owned(), Value::from(value)));
            let call = Call { tool: "write_file".into(), input: input.into_iter().collect() };
            // A script file, since the whole command may be longer than one argument.
            let script = directory.path().join("script");
            std::fs::write(&script, call.shell()).unwrap();
            assert!(std::process::Command::new("sh").arg(&script).status().unwrap().success());
            assert_eq!(std::fs::read_to_string(&path).unwrap(), content);
        }
    }
}
