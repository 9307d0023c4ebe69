//! What a run left on the host: its tests and the demo look here after they have cleaned up.

use std::path::Path;
use std::time::{Duration, Instant};

use super::cgroup;
use super::roots::home;

/// All on this host that carries `name` in a place where a sandbox or a run has something: cgroups, processes in them,
/// mounts, state files, network namespaces, directories of the pool. Empty where nothing was left.
#[must_use]
pub fn leftovers(name: &str) -> Vec<String> {
    let mut found = Vec::new();
    let mut directories = vec!["/run/crab".into(), "/run/crab/netns".into()];
    directories.extend(["pool/areas", "pool/scratch"].map(|directory| home().join(directory)));
    directories.extend(cgroup::parent());
    for directory in &directories {
        for entry in std::fs::read_dir::<&Path>(directory).into_iter().flatten().flatten() {
            if entry.file_name().to_string_lossy().contains(name) {
                found.push(entry.path().display().to_string());
            }
        }
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    found.extend(mounts.lines().filter(|line| line.contains(name)).map(|line| format!("mount: {line}")));
    for process in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let cgroups = std::fs::read_to_string(process.path().join("cgroup")).unwrap_or_default();
        if cgroups.contains(name) {
            found.push(format!("process {}", process.file_name().to_string_lossy()));
        }
    }
    found
}

/// The same, when what goes by itself has gone: the parent of a dead process, which may be the host's init, takes its
/// exit status a moment later. Blocks for up to ten seconds where something is left.
#[must_use]
pub fn left_for_good(name: &str) -> Vec<String> {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        let found = leftovers(name);
        if found.is_empty() || Instant::now() > deadline {
            return found;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
}
