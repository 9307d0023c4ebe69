//! Sessions of Claude Code and Codex, from the files in which those agents keep them, in the format that `SESSIONS.md`
//! describes.
//!
//! What the tools gave back is not taken over: a replay runs the calls for real. What has no effect in a sandbox, such as a
//! plan or a web search, is kept as a call that does nothing, so that the turns stay the same.

mod claude_code;
mod codex;
mod patch;
mod time;

use std::fmt::Write as _;

use crab_core::{Error, ErrorKind, Result};
use serde_json::{Map, Value, json};

/// Longer waits hold a person's.
const LONGEST_WAIT_MS: i64 = 300_000;

/// A session as it is put together.
#[derive(Default)]
struct Import {
    agent: &'static str,
    version: String,
    model: String,
    task: String,
    cwd: String,
    calls: Vec<Imported>,
}

/// A call, and the response that asked for it.
struct Imported {
    response: u64,
    /// How long the model took, on the first call of a response.
    llm_ms: Option<i64>,
    tool: String,
    input: Map<String, Value>,
}

/// Reads a session file of either agent and gives the session in JSON lines.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] where it is neither, or holds no tool call.
pub fn import(text: &str) -> Result<String> {
    let bad = |why: String| Error::new(ErrorKind::InvalidInput, why).fix("give a session file of Claude Code or Codex");
    let mut lines: Vec<Value> = Vec::new();
    for (at, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
        match serde_json::from_str(line) {
            Ok(line) => lines.push(line),
            // An agent that was killed leaves its last line torn.
            Err(_) if at + 1 == text.lines().count() => {}
            Err(error) => return Err(bad(format!("line {}: {error}", at + 1))),
        }
    }
    let is_codex = lines.iter().any(|line| line["type"] == "response_item" || line["type"] == "session_meta");
    let import = if is_codex { codex::read(&lines) } else { claude_code::read(&lines) };
    if import.calls.is_empty() {
        return Err(bad("it holds no tool call".to_owned()));
    }
    Ok(import.text())
}

impl Import {
    fn text(&self) -> String {
        let mut text = json!({
            "source": format!("imported from a session file of {}", self.agent),
            "agent": self.agent,
            "agent_version": self.version,
            "model": self.model,
            "task": self.task,
            "start_state": {"kind": "unknown", "cwd": self.cwd},
            "labels": {},
        })
        .to_string();
        for (at, call) in self.calls.iter().enumerate() {
            let mut line = call.input.clone();
            line.insert("turn".to_owned(), json!(at + 1));
            line.insert("tool".to_owned(), json!(call.tool));
            line.insert("llm_turn".to_owned(), json!(call.response));
            if let Some(wait) = call.llm_ms.filter(|wait| (0..LONGEST_WAIT_MS).contains(wait)) {
                line.insert("llm_ms".to_owned(), json!(wait));
            }
            if self.calls.iter().filter(|other| other.response == call.response).count() > 1 {
                line.insert("parallel_group".to_owned(), json!(call.response));
            }
            // Writing to a string cannot fail.
            let _ = write!(text, "\n{}", Value::Object(line));
        }
        text + "\n"
    }
}

/// The text of a message, whose content is text or a list of parts.
fn text_of(content: &Value) -> String {
    match content {
        Value::String(text) => text.clone(),
        Value::Array(parts) => {
            let texts: Vec<&str> = parts.iter().filter_map(|part| part["text"].as_str()).collect();
            texts.join("\n")
        }
        _ => String::new(),
    }
}

/// Fields of a call, without those that are not there.
fn fields<const N: usize>(fields: [(&str, &Value); N]) -> Map<String, Value> {
    let present = fields.into_iter().filter(|(_, value)| !value.is_null());
    present.map(|(name, value)| (name.to_owned(), value.clone())).collect()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;
    use crate::session::Session;

    fn session(lines: &[Value]) -> Session {
        let text: Vec<String> = lines.iter().map(Value::to_string).collect();
        Session::parse("x", &import(&text.join("\n")).unwrap()).unwrap()
    }

    #[test]
    fn a_session_of_claude_code_becomes_responses_with_their_calls() {
        let at = |second: u32| format!("2026-03-01T10:00:{second:02}.500Z");
        let assistant = |second, id: &str, name: &str, input: Value| {
            json!({"type": "assistant", "timestamp": at(second), "cwd": "/repo", "version": "2.0.1", "message": {
                "id": id, "role": "assistant", "model": "m", "content": [{"type": "tool_use", "id": "t", "name": name, "input": input}]}})
        };
        let result = |second| {
            json!({"type": "user", "timestamp": at(second), "message": {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t", "content": "done"}]}})
        };
        let session = session(&[
            json!({"type": "summary", "summary": "older work"}),
            json!({"type": "user", "timestamp": at(0), "cwd": "/repo", "message": {"role": "user", "content": "mend it"}}),
            assistant(4, "one", "Bash", json!({"command": "make test", "description": "runs the tests"})),
            assistant(5, "one", "Read", json!({"file_path": "/repo/a.c"})),
            result(6),
            result(7),
            assistant(9, "two", "Edit", json!({"file_path": "/repo/a.c", "old_string": "x", "new_string": "y"})),
            result(10),
            assistant(
                11,
                "three",
                "MultiEdit",
                json!({"file_path": "/repo/a.c", "edits": [{"old_string": "y", "new_string": "z"}]}),
            ),
            assistant(12, "four", "Write", json!({"file_path": "/repo/b", "content": "text"})),
            assistant(13, "five", "TodoWrite", json!({"todos": []})),
        ]);
        assert_eq!((session.task.as_str(), session.cwd.as_str()), ("mend it", "/repo"));
        let shape: Vec<usize> = session.responses.iter().map(|response| response.calls.len()).collect();
        assert_eq!(shape, [2, 1, 1, 1, 1]);
        assert!(session.responses[0].parallel && !session.responses[1].parallel);
        assert_eq!(session.responses[0].delay.as_millis(), 4000);
        assert_eq!(session.responses[1].delay.as_millis(), 2000);
        assert_eq!(session.responses[0].calls[0].shell(), "make test");
        assert_eq!(session.responses[1].calls[0].replacements(), [("x".to_owned(), "y".to_owned())]);
        assert_eq!(session.responses[2].calls[0].replacements(), [("y".to_owned(), "z".to_owned())]);
        assert_eq!(session.responses[4].calls[0].shell(), "true");
    }

    #[test]
    fn a_session_of_codex_becomes_responses_with_their_calls() {
        let item = |second: u32, payload: Value| json!({"timestamp": format!("2026-03-01T10:01:{second:02}Z"), "type": "response_item", "payload": payload});
        let call = |second, name: &str, arguments: Value| {
            item(
                second,
                json!({"type": "function_call", "name": name, "call_id": "c", "arguments": arguments.to_string()}),
            )
        };
        let output = |second| item(second, json!({"type": "function_call_output", "call_id": "c", "output": "ok"}));
        let patch = "*** Begin Patch\n*** Add File: new.txt\n+one\n+two\n*** Update File: old.txt\n@@\n keep\n-away\n+here\n*** Delete File: gone.txt\n*** End Patch";
        let session = session(&[
            json!({"timestamp": "2026-03-01T10:01:00Z", "type": "session_meta", "payload": {"cwd": "/repo", "cli_version": "0.9"}}),
            item(
                1,
                json!({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "<environment_context>x"}]}),
            ),
            item(1, json!({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "mend it"}]})),
            call(6, "shell", json!({"command": ["bash", "-lc", "ls -l"], "workdir": "/repo/sub"})),
            call(6, "exec_command", json!({"cmd": "pwd"})),
            output(7),
            output(7),
            item(9, json!({"type": "custom_tool_call", "name": "apply_patch", "call_id": "c", "input": patch})),
            item(9, json!({"type": "custom_tool_call_output", "call_id": "c", "output": "ok"})),
            call(12, "update_plan", json!({"plan": []})),
        ]);
        assert_eq!((session.task.as_str(), session.cwd.as_str()), ("mend it", "/repo"));
        let shape: Vec<usize> = session.responses.iter().map(|response| response.calls.len()).collect();
        assert_eq!(shape, [2, 3, 1]);
        assert_eq!(session.responses[0].calls[0].shell(), "cd '/repo/sub' && ls -l");
        assert_eq!(session.responses[0].delay.as_millis(), 5000);
        let calls = &session.responses[1].calls;
        assert!(calls[0].shell().contains("printf %s 'one\ntwo\n' >>'/repo/new.txt'"), "{}", calls[0].shell());
        assert_eq!(calls[1].replacements(), [("keep\naway\n".to_owned(), "keep\nhere\n".to_owned())]);
        assert_eq!(calls[2].shell(), "rm -f '/repo/gone.txt'");
    }

    #[test]
    fn what_is_no_session_is_refused_and_a_torn_last_line_is_not() {
        for bad in ["", "nonsense\n{}", "{\"type\": \"user\"}"] {
            assert_eq!(import(bad).unwrap_err().kind(), ErrorKind::InvalidInput, "{bad}");
        }
        let call = json!({"type": "assistant", "message": {"id": "a", "content": [{"type": "tool_use", "name": "Bash", "input": {"command": "ls"}}]}});
        assert!(import(&format!("{call}\n{{\"type\": \"us")).is_ok());
    }
}
