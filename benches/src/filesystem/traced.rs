//! What the kernel does to btrfs's trees meanwhile, as its tracepoints tell it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

const INSTANCES: &str = "/sys/kernel/tracing/instances";
const EVENTS: [&str; 2] = ["add_delayed_tree_ref", "btrfs_cow_block"];

/// A trace of its own of one file system, removed when this is dropped.
pub(crate) struct Traced {
    directory: PathBuf,
    /// By which the file system is known in it.
    uuid: String,
}

impl Traced {
    /// `None` where this machine does not trace.
    pub(crate) fn new(device: &Path) -> Option<Self> {
        let output = Command::new("blkid").args(["-s", "UUID", "-o", "value"]).arg(device).output().ok()?;
        let uuid = String::from_utf8(output.stdout).ok()?.trim().to_owned();
        let directory = Path::new(INSTANCES).join(format!("crab-bench-{}", std::process::id()));
        fs::create_dir(&directory).ok()?;
        let this = Self { directory, uuid };
        this.write("tracing_on", "0")?;
        this.write("buffer_size_kb", "8192")?;
        EVENTS.iter().try_for_each(|event| this.write(&format!("events/btrfs/{event}/enable"), "1"))?;
        Some(this)
    }

    fn write(&self, name: &str, value: &str) -> Option<()> {
        fs::write(self.directory.join(name), value).ok()
    }

    /// How many references to tree blocks were added or dropped, and how many tree blocks were copied, while `work` ran.
    pub(crate) fn during<T>(&self, work: impl FnOnce() -> T) -> (T, [usize; 2]) {
        let _ = self.write("trace", "");
        let _ = self.write("tracing_on", "1");
        let done = work();
        let _ = self.write("tracing_on", "0");
        let trace = fs::read_to_string(self.directory.join("trace")).unwrap_or_default();
        let ours = trace.lines().filter(|line| line.contains(&self.uuid));
        let counts = EVENTS.map(|event| ours.clone().filter(|line| line.contains(&format!(" {event}: "))).count());
        (done, counts)
    }
}

impl Drop for Traced {
    fn drop(&mut self) {
        let _ = fs::remove_dir(&self.directory);
    }
}
