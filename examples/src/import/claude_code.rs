//! Claude Code: `~/.claude/projects/DIRECTORY/SESSION.jsonl`. A line for each message; a response of several parts has a
//! line for each part, all with the response's id.

use serde_json::{Map, Value, json};

use super::{Import, Imported, fields, text_of, time};

pub(super) fn read(lines: &[Value]) -> Import {
    let mut import = Import { agent: "claude-code", ..Import::default() };
    let mut responses: Vec<&str> = Vec::new();
    // When the model was asked: at the last line that was not its own.
    let mut asked: Option<i64> = None;
    for line in lines {
        // Sub-agents have conversations of their own.
        if line["isSidechain"] == true {
            continue;
        }
        let now = time::milliseconds(&line["timestamp"]);
        let note = |known: &mut String, value: &Value| {
            if known.is_empty() {
                value.as_str().unwrap_or_default().clone_into(known);
            }
        };
        note(&mut import.cwd, &line["cwd"]);
        note(&mut import.version, &line["version"]);
        let message = &line["message"];
        match line["type"].as_str() {
            Some("user") => {
                asked = now.or(asked);
                if import.task.is_empty() {
                    import.task = text_of(&message["content"]);
                }
            }
            Some("assistant") => {
                note(&mut import.model, &message["model"]);
                let id = message["id"].as_str().unwrap_or_default();
                for part in message["content"].as_array().into_iter().flatten().filter(|p| p["type"] == "tool_use") {
                    let is_new = responses.last() != Some(&id);
                    if is_new {
                        responses.push(id);
                    }
                    let llm_ms = if is_new { now.zip(asked).map(|(now, asked)| now - asked) } else { None };
                    let (tool, input) = call(part["name"].as_str().unwrap_or_default(), &part["input"]);
                    import.calls.push(Imported { response: responses.len() as u64, llm_ms, tool, input });
                }
            }
            _ => {}
        }
    }
    import
}

fn call(name: &str, input: &Value) -> (String, Map<String, Value>) {
    let path = &input["file_path"];
    let (tool, input) = match name {
        "Bash" => ("bash", fields([("command", &input["command"]), ("background", &input["run_in_background"])])),
        "Write" => ("write_file", fields([("path", path), ("content", &input["content"])])),
        "Edit" => ("edit", fields([("path", path), ("old", &input["old_string"]), ("content", &input["new_string"])])),
        "MultiEdit" => {
            let edits = input["edits"].as_array().into_iter().flatten();
            let edits: Value =
                edits.map(|edit| json!({"old": edit["old_string"], "content": edit["new_string"]})).collect();
            ("multi_edit", fields([("path", path), ("edits", &edits)]))
        }
        "Read" => ("read_file", fields([("path", path)])),
        "Grep" => ("grep", fields([("path", &input["path"]), ("args", input)])),
        "Glob" => ("glob", fields([("path", &input["path"]), ("args", input)])),
        "LS" => ("list_dir", fields([("path", &input["path"])])),
        "BashOutput" => ("bash_output", fields([("args", input)])),
        "KillShell" | "KillBash" => ("kill_shell", fields([("args", input)])),
        "Task" | "Agent" => ("subagent", fields([("args", input)])),
        other => return (other.to_lowercase(), fields([("args", input)])),
    };
    (tool.to_owned(), input)
}
