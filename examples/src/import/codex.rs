//! Codex: `~/.codex/sessions/YEAR/MONTH/DAY/rollout-*.jsonl`. A line for each item of the conversation; calls that no
//! result stands between were asked for by one response.

use serde_json::{Map, Value};

use super::{Import, Imported, fields, patch, text_of, time};
use crate::session::quote;

pub(super) fn read(lines: &[Value]) -> Import {
    let mut import = Import { agent: "codex-cli", ..Import::default() };
    let mut response = 0;
    // A result, or a message of the user, came since the last call.
    let mut answered = true;
    let mut asked: Option<i64> = None;
    for line in lines {
        let (payload, now) = (&line["payload"], time::milliseconds(&line["timestamp"]));
        match line["type"].as_str() {
            Some("session_meta") => {
                payload["cwd"].as_str().unwrap_or_default().clone_into(&mut import.cwd);
                payload["cli_version"].as_str().unwrap_or_default().clone_into(&mut import.version);
            }
            Some("turn_context") => payload["model"].as_str().unwrap_or_default().clone_into(&mut import.model),
            Some("response_item") => match payload["type"].as_str() {
                Some("message") if payload["role"] == "user" => {
                    (answered, asked) = (true, now.or(asked));
                    let text = text_of(&payload["content"]);
                    // What Codex itself puts in front of the user's words.
                    if import.task.is_empty() && !text.starts_with('<') && !text.starts_with("# AGENTS.md") {
                        import.task = text;
                    }
                }
                Some("function_call_output" | "custom_tool_call_output" | "local_shell_call_output") => {
                    (answered, asked) = (true, now.or(asked));
                }
                Some("function_call" | "custom_tool_call" | "local_shell_call") => {
                    let llm_ms = if answered { now.zip(asked).map(|(now, asked)| now - asked) } else { None };
                    response += u64::from(answered);
                    answered = false;
                    for (at, (tool, input)) in calls(payload, &import.cwd).into_iter().enumerate() {
                        let llm_ms = llm_ms.filter(|_| at == 0);
                        import.calls.push(Imported { response, llm_ms, tool, input });
                    }
                }
                _ => {}
            },
            _ => {}
        }
    }
    import
}

fn calls(payload: &Value, cwd: &str) -> Vec<(String, Map<String, Value>)> {
    let name = payload["name"].as_str().unwrap_or("shell");
    let arguments = match payload["arguments"].as_str() {
        Some(text) => serde_json::from_str(text).unwrap_or(Value::Null),
        None => payload["action"].clone(),
    };
    let patch = payload["input"].as_str().or_else(|| arguments["input"].as_str());
    match (name, patch) {
        ("apply_patch", Some(text)) => return patch::calls(text, cwd),
        ("write_stdin", _) => {
            return vec![("write_stdin".to_owned(), fields([("args", &arguments)]))];
        }
        _ => {}
    }
    let command = match &arguments["command"] {
        Value::Null => arguments["cmd"].as_str().map(str::to_owned),
        Value::String(line) => Some(line.clone()),
        Value::Array(words) => {
            let words: Vec<&str> = words.iter().filter_map(Value::as_str).collect();
            match words.as_slice() {
                [shell, flags, line] if shell.ends_with("sh") && flags.starts_with('-') => Some((*line).to_owned()),
                words => Some(words.iter().map(|word| quote(word)).collect::<Vec<_>>().join(" ")),
            }
        }
        _ => None,
    };
    let Some(command) = command else { return vec![(name.to_owned(), fields([("args", &arguments)]))] };
    // A patch may also be the command's argument.
    if let Some((_, rest)) = command.split_once("*** Begin Patch")
        && command.trim_start().starts_with("apply_patch")
    {
        return patch::calls(rest, cwd);
    }
    let elsewhere = arguments["workdir"].as_str().filter(|directory| !directory.is_empty() && *directory != cwd);
    let command = match elsewhere {
        Some(directory) => format!("cd {} && {command}", quote(directory)),
        None => command,
    };
    vec![("bash".to_owned(), fields([("command", &Value::from(command))]))]
}
