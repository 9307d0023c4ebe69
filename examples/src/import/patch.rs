//! The patches of Codex, as calls that have their effect.

use serde_json::{Map, Value, json};

use super::fields;
use crate::session::quote;

/// What a file's part of a patch does.
enum Part {
    Add(String),
    Update(Vec<(String, String)>),
    Delete,
}

/// The calls of a patch, whose paths are relative to `cwd`.
pub(super) fn calls(text: &str, cwd: &str) -> Vec<(String, Map<String, Value>)> {
    let mut parts: Vec<(String, Part)> = Vec::new();
    let absolute = |path: &str| match path.starts_with('/') {
        true => path.to_owned(),
        false => format!("{}/{path}", cwd.trim_end_matches('/')),
    };
    for line in text.lines() {
        let begins = [("*** Add File: ", 0), ("*** Update File: ", 1), ("*** Delete File: ", 2)];
        if let Some((path, kind)) = begins.iter().find_map(|(start, kind)| Some((line.strip_prefix(start)?, kind))) {
            let part = match kind {
                0 => Part::Add(String::new()),
                1 => Part::Update(Vec::new()),
                _ => Part::Delete,
            };
            parts.push((absolute(path.trim()), part));
            continue;
        }
        match parts.last_mut() {
            Some((_, Part::Add(content))) if line.starts_with('+') => {
                content.push_str(&line[1..]);
                content.push('\n');
            }
            Some((_, Part::Update(hunks))) if line.starts_with("@@") => hunks.push(Default::default()),
            Some((_, Part::Update(hunks))) if !line.starts_with("***") => {
                if hunks.is_empty() {
                    hunks.push(Default::default());
                }
                let Some((old, new)) = hunks.last_mut() else { continue };
                let (sign, rest) = line.split_at_checked(1).unwrap_or((" ", ""));
                for (side, takes) in [(old, sign != "+"), (new, sign != "-")] {
                    if takes {
                        side.push_str(rest);
                        side.push('\n');
                    }
                }
            }
            _ => {}
        }
    }
    parts
        .into_iter()
        .map(|(path, part)| {
            let name = json!(path);
            match part {
                Part::Add(content) => {
                    ("write_file".to_owned(), fields([("path", &name), ("content", &json!(content))]))
                }
                Part::Update(hunks) => {
                    let edits: Value =
                        hunks.into_iter().map(|(old, new)| json!({"old": old, "content": new})).collect();
                    ("multi_edit".to_owned(), fields([("path", &name), ("edits", &edits)]))
                }
                Part::Delete => {
                    let command = json!(format!("rm -f {}", quote(&path)));
                    ("bash".to_owned(), fields([("command", &command)]))
                }
            }
        })
        .collect()
}
