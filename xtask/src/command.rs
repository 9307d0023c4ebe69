//! Running other programs, with errors that say what to look at.

use std::ffi::OsStr;
use std::process::{Command, Stdio};

/// Where system tools live, whatever the caller's PATH says.
const SYSTEM_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// A system tool, run with a plain environment: C locale, no questions asked.
pub(crate) fn system(program: &str) -> Command {
    let mut command = Command::new(find(program).unwrap_or_else(|| program.to_owned()));
    command
        .env("PATH", SYSTEM_PATH)
        .env("LC_ALL", "C.UTF-8")
        .env("DEBIAN_FRONTEND", "noninteractive")
        .stdin(Stdio::null());
    command
}

/// The full path of a system tool, if it is installed.
pub(crate) fn find(program: &str) -> Option<String> {
    SYSTEM_PATH
        .split(':')
        .map(|directory| format!("{directory}/{program}"))
        .find(|path| std::fs::metadata(path).is_ok_and(|metadata| metadata.is_file()))
}

/// Runs a command to its end and returns what it printed.
pub(crate) fn output(command: &mut Command) -> Result<String, String> {
    let shown = shown(command);
    let output = command.output().map_err(|error| format!("cannot start `{shown}`: {error}"))?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let mut said = String::from_utf8_lossy(&output.stderr).into_owned();
    said.push_str(&String::from_utf8_lossy(&output.stdout));
    Err(format!("`{shown}` failed ({}); its last lines:\n{}", output.status, tail(&said, 15)))
}

/// Runs a command to its end, for its effect only.
pub(crate) fn run(command: &mut Command) -> Result<(), String> {
    output(command).map(drop)
}

fn shown(command: &Command) -> String {
    let words: Vec<_> =
        std::iter::once(command.get_program()).chain(command.get_args()).map(OsStr::to_string_lossy).collect();
    let line = words.join(" ");
    match line.char_indices().nth(160) {
        Some((cut, _)) => format!("{}...", &line[..cut]),
        None => line,
    }
}

fn tail(text: &str, count: usize) -> String {
    let lines: Vec<&str> = text.lines().filter(|line| !line.trim().is_empty()).collect();
    lines[lines.len().saturating_sub(count)..].iter().map(|line| format!("    {line}")).collect::<Vec<_>>().join("\n")
}
