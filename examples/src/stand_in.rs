//! A stand-in for what a recorded session started from, where that is not at hand: a repository in which the files that
//! the session reads exist, and those that it edits hold what it replaces.

use std::collections::BTreeMap;

use crate::session::{Session, quote, write_command};

/// Commands that make it, in a sandbox of the examples. They begin in `/`.
#[must_use]
pub fn stand_in(session: &Session) -> Vec<String> {
    let cwd = quote(&session.cwd);
    let mut commands = vec![format!("mkdir -p {cwd} && cd {cwd} && git init -q -b main .")];
    for (path, content) in files(session) {
        commands.push(format!("cd {cwd} && {}", write_command(&quote(&path), &content)));
    }
    commands.push(format!(
        "cd {cwd} && git config user.name dev && git config user.email dev@localhost && echo 'A stand-in.' >README.md \
         && git add -A . && git commit -q -m start"
    ));
    commands
}

/// The same time for all commits, in the start state and in the session: a commit's name depends on it.
#[must_use]
pub fn environment() -> Vec<(String, String)> {
    [
        ("GIT_AUTHOR_DATE", "2026-01-02T03:04:05Z"),
        ("GIT_COMMITTER_DATE", "2026-01-02T03:04:05Z"),
        ("GIT_PAGER", "cat"),
        ("GIT_TERMINAL_PROMPT", "0"),
    ]
    .map(|(name, value)| (name.to_owned(), value.to_owned()))
    .to_vec()
}

/// What is to be there at the start: for each file the texts that are replaced in it and that no earlier call brought.
fn files(session: &Session) -> BTreeMap<String, String> {
    let mut start: BTreeMap<String, String> = BTreeMap::new();
    let mut made: BTreeMap<String, String> = BTreeMap::new();
    for call in session.responses.iter().flat_map(|response| &response.calls) {
        let text = |key: &str| call.input.get(key).and_then(|value| value.as_str()).unwrap_or("");
        let path = text("path").to_owned();
        if path.is_empty() || path.ends_with('/') || path.starts_with("~") {
            continue;
        }
        match call.tool.as_str() {
            "write_file" => {
                made.entry(path).or_default().push_str(text("content"));
            }
            "edit" | "multi_edit" => {
                for (old, new) in call.replacements() {
                    let brought = made.entry(path.clone()).or_default();
                    if !old.is_empty() && !brought.contains(&old) {
                        let content = start.entry(path.clone()).or_default();
                        if !content.contains(&old) {
                            content.push_str(&old);
                            content.push('\n');
                        }
                    }
                    brought.push_str(&new);
                }
            }
            "read_file" if !made.contains_key(&path) => {
                start.entry(path.clone()).or_insert_with(|| format!("A stand-in for {path}.\n"));
            }
            _ => {}
        }
    }
    start
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    #[test]
    fn what_is_read_exists_and_what_is_replaced_is_there_once() {
        let lines = [
            r#"{"start_state": {"cwd": "/repo"}}"#,
            r#"{"tool": "read_file", "path": "/repo/a"}"#,
            r#"{"tool": "edit", "path": "/repo/b", "old": "one", "content": "two"}"#,
            r#"{"tool": "edit", "path": "/repo/b", "old": "two", "content": "three"}"#,
            r#"{"tool": "edit", "path": "/repo/b", "old": "four", "content": "five"}"#,
            r#"{"tool": "write_file", "path": "/repo/c", "content": "new"}"#,
            r#"{"tool": "edit", "path": "/repo/c", "old": "new", "content": "newer"}"#,
        ];
        let files = files(&Session::parse("x", &lines.join("\n")).unwrap());
        assert_eq!(files["/repo/a"], "A stand-in for /repo/a.\n");
        assert_eq!(files["/repo/b"], "one\nfour\n");
        assert!(!files.contains_key("/repo/c"));
    }
}
