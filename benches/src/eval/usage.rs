//! What processes and the machine took, as the kernel counts it.

use std::path::Path;

use crate::results::Usage;

/// A clock tick of the kernel's counters, in seconds: the same on all its architectures that matter here.
const TICK_S: f64 = 0.01;

/// Of a process and the ended children that it has waited for.
pub(crate) fn of(pid: Option<u32>) -> Option<Usage> {
    let pid = pid?;
    let read = |name: &str| std::fs::read_to_string(format!("/proc/{pid}/{name}")).ok();
    let stat = read("stat")?;
    // What follows the program's name, which may hold anything.
    let fields: Vec<&str> = stat.rsplit_once(')')?.1.split_whitespace().collect();
    let ticks: f64 = (11..15).filter_map(|at| fields.get(at)?.parse::<f64>().ok()).sum();
    let line = |text: &str, name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':').map(str::to_owned))?;
        line.split_whitespace().next()?.parse::<u64>().ok()
    };
    let io = read("io").unwrap_or_default();
    Some(Usage {
        cpu_s: ticks * TICK_S,
        resident_bytes: line(&read("status")?, "VmHWM").unwrap_or(0) * 1024,
        read_bytes: line(&io, "read_bytes").unwrap_or(0),
        written_bytes: line(&io, "write_bytes").unwrap_or(0),
    })
}

impl Usage {
    /// What was taken in between. The memory is the most that was resident until now.
    pub(crate) fn since(&self, before: &Self) -> Self {
        Self {
            cpu_s: self.cpu_s - before.cpu_s,
            resident_bytes: self.resident_bytes,
            read_bytes: self.read_bytes.saturating_sub(before.read_bytes),
            written_bytes: self.written_bytes.saturating_sub(before.written_bytes),
        }
    }
}

/// The block device below a directory of the pool, which is a loop device.
pub(crate) fn device(directory: &Path) -> Option<String> {
    // btrfs has device numbers of its own; the mount table names the device.
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").ok()?;
    let mounted = mounts.lines().filter_map(|line| {
        let (mount, device) = line.split_once(" - ")?;
        let (at, device) = (mount.split(' ').nth(4)?, device.split(' ').nth(1)?);
        (directory.starts_with(at) && at != "/").then(|| (at.len(), device.strip_prefix("/dev/").map(str::to_owned)))
    });
    mounted.max().and_then(|(_, device)| device)
}

/// Bytes written to it since the machine started.
pub(crate) fn written(device: Option<&str>) -> u64 {
    let stat = device.and_then(|device| std::fs::read_to_string(format!("/sys/block/{device}/stat")).ok());
    let sectors = stat.and_then(|stat| stat.split_whitespace().nth(6)?.parse::<u64>().ok());
    sectors.unwrap_or(0) * 512
}

/// All CPU time of the machine since it started, in ticks: busy, and in all.
pub(crate) fn busy() -> (u64, u64) {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let ticks: Vec<u64> =
        stat.lines().next().unwrap_or("").split_whitespace().skip(1).take(8).filter_map(|t| t.parse().ok()).collect();
    let all: u64 = ticks.iter().sum();
    let idle: u64 = ticks.iter().skip(3).take(2).sum();
    (all - idle, all)
}

/// The share of the time in between in which the machine was busy.
pub(crate) fn share(before: (u64, u64), after: (u64, u64)) -> f64 {
    let all = after.1.saturating_sub(before.1);
    after.0.saturating_sub(before.0) as f64 / all.max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_takes_something() {
        let mine = of(Some(std::process::id())).unwrap();
        assert!(mine.resident_bytes > 0);
        assert!(of(Some(u32::MAX)).is_none());
        let later = of(Some(std::process::id())).unwrap().since(&mine);
        assert!(later.cpu_s >= 0.0);
    }
}
