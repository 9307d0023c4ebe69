//! A bench in the virtual machine.

use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use super::boot;
use super::image::{Image, remove};
use crate::tasks;

const LIMIT: Duration = Duration::from_secs(15 * 60);

/// Builds the benches for speed and runs one in the guest. Its figures go to `json`.
pub(super) fn run(image: &Image, name: &str, json: Option<&Path>) -> Result<bool, String> {
    if !name.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-') {
        return Err(format!("\"{name}\" is no bench"));
    }
    let output = tasks::cargo()
        .args(["build", "--release", "--package", "crab-benches", "--bin", "crab-bench", "--message-format=json"])
        .stderr(Stdio::inherit())
        .output()
        .map_err(|error| format!("cannot start cargo: {error}"))?;
    let said = String::from_utf8_lossy(&output.stdout);
    let program = said
        .lines()
        .rev()
        .find_map(|line| line.split_once("\"executable\":\"")?.1.split_once('"'))
        .map(|(path, _)| Path::new(path).to_owned())
        .filter(|_| output.status.success())
        .ok_or("the benches cannot be built")?;
    let mut script = format!("/mnt/share/crab-bench {name} --json /mnt/share/figures.json\n");
    let mut files = vec![(program.clone(), "crab-bench".to_owned())];
    if name.starts_with("criu") {
        script.insert_str(0, boot::SANDBOXES);
        files.push(boot::init()?);
    }
    let beside = program.parent().unwrap_or(Path::new("."));
    let share = boot::share(beside, &files, &script)?;
    println!("vm: booting for the bench {name}");
    let code = boot::boot(image, &share, LIMIT, |line| println!("{line}"))?;
    if let Some(json) = json.filter(|_| code == 0) {
        std::fs::copy(share.join("figures.json"), json)
            .map_err(|error| format!("cannot write {}: {error}", json.display()))?;
    }
    remove(&share)?;
    Ok(code == 0)
}
