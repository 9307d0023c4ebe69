//! What the evaluation ran on.

use std::collections::BTreeMap;
use std::process::{Command, Stdio};

use crab_examples::sandbox::criu_binary;

/// By name, for people.
pub(crate) fn facts() -> BTreeMap<String, String> {
    let file = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let line = |text: &str, name: &str| {
        let line = text.lines().find(|line| line.starts_with(name));
        line.and_then(|line| line.split_once(':')).map(|(_, value)| value.trim().to_owned()).unwrap_or_default()
    };
    let says = |program: &std::ffi::OsStr, argument: &str| {
        let output = Command::new(program).arg(argument).stdin(Stdio::null()).output();
        let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned()).unwrap_or_default();
        text.lines().next().unwrap_or("unknown").to_owned()
    };
    let cores = std::thread::available_parallelism().map_or(0, usize::from);
    [
        ("processor", format!("{} cores, {}", cores, line(&file("/proc/cpuinfo"), "model name"))),
        ("memory", line(&file("/proc/meminfo"), "MemTotal")),
        ("kernel", file("/proc/sys/kernel/osrelease").trim().to_owned()),
        ("criu", says(criu_binary().as_os_str(), "--version")),
        ("btrfs", says("btrfs".as_ref(), "--version")),
        ("crab", env!("CARGO_PKG_VERSION").to_owned()),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into()
}
