//! What the kernel must offer, and the kernel file systems that setup mounts itself.

use std::path::Path;

use super::{Found, Home, Report};
use crate::command;

/// Checks what only the machine's owner can provide.
pub(super) fn require(report: &mut Report) {
    let root = status_field("Uid:").is_some_and(|uids| uids.split_whitespace().nth(1) == Some("0"));
    if root {
        report.present("root");
    } else {
        report.missing("root", "Namespaces, mounts and CRIU need it: run this with sudo.");
    }

    let arch = std::env::consts::ARCH;
    if arch == "x86_64" {
        report.present("architecture x86_64");
    } else {
        report.missing(&format!("a supported architecture (this is {arch})"), "Only x86_64 is set up by this task.");
    }

    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    match kernel_version(&release) {
        Some(version) if version >= (5, 14) => {
            report.present(&format!("kernel {}", release.trim()));
        }
        _ => report.missing(
            &format!("kernel 5.14 or newer (this is {})", release.trim()),
            "cgroup.kill and pidfd namespaces need it.",
        ),
    }

    match cgroup2_mount() {
        Some(path) => report.present(&format!("cgroup v2 at {path}")),
        None => report.missing(
            "a cgroup v2 mount",
            "Mount one: mount -t cgroup2 none /sys/fs/cgroup (or boot with systemd.unified_cgroup_hierarchy=1).",
        ),
    }

    let btrfs = || file_systems().lines().any(|line| line.trim() == "btrfs");
    if !btrfs() && command::find("modprobe").is_some() {
        // A failure shows below: the line is still missing.
        let _ = command::run(command::system("modprobe").arg("btrfs"));
    }
    if btrfs() {
        report.present("btrfs in the kernel");
    } else {
        report.missing("btrfs in the kernel", "Boot a kernel with CONFIG_BTRFS_FS.");
    }
}

pub(super) fn look_tracefs(_: &Home) -> Result<Found, String> {
    Ok(look_mount("tracefs", "/sys/kernel/tracing"))
}

pub(super) fn make_tracefs(_: &Home, _: &Report) -> Result<(), String> {
    mount("tracefs", "/sys/kernel/tracing")
}

pub(super) fn look_bpffs(_: &Home) -> Result<Found, String> {
    Ok(look_mount("bpf", "/sys/fs/bpf"))
}

pub(super) fn make_bpffs(_: &Home, _: &Report) -> Result<(), String> {
    mount("bpf", "/sys/fs/bpf")
}

fn look_mount(kind: &str, target: &str) -> Found {
    let what = format!("{kind} at {target}");
    if mounts().iter().any(|mount| mount.target == target && mount.kind == kind) {
        Found::Ready(what)
    } else {
        Found::Absent(what)
    }
}

fn mount(kind: &str, target: &str) -> Result<(), String> {
    if !Path::new(target).is_dir() {
        return Err(format!(
            "{target} is not there: this kernel has no {kind}; without it the inspector cannot \
             see what a sandbox does. Boot a kernel with CONFIG_FTRACE and CONFIG_BPF_SYSCALL"
        ));
    }
    command::run(command::system("mount").args(["-t", kind, kind, target]))
}

/// One line of `/proc/self/mountinfo`.
pub(super) struct Mount {
    pub(super) target: String,
    pub(super) kind: String,
    pub(super) options: String,
}

pub(super) fn mounts() -> Vec<Mount> {
    let text = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    text.lines().filter_map(parse_mount).collect()
}

fn parse_mount(line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(4);
    let target = left.next()?.replace("\\040", " ");
    let options = left.next()?.to_owned();
    let kind = right.split(' ').next()?.to_owned();
    Some(Mount { target, kind, options })
}

fn cgroup2_mount() -> Option<String> {
    mounts()
        .into_iter()
        .find(|mount| mount.kind == "cgroup2" && mount.options.split(',').any(|o| o == "rw"))
        .map(|mount| mount.target)
}

fn file_systems() -> String {
    std::fs::read_to_string("/proc/filesystems").unwrap_or_default()
}

fn status_field(name: &str) -> Option<String> {
    std::fs::read_to_string("/proc/self/status")
        .ok()?
        .lines()
        .find_map(|line| line.strip_prefix(name).map(str::to_owned))
}

fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.trim().split(|c: char| !c.is_ascii_digit()).map_while(|part| part.parse().ok());
    Some((numbers.next()?, numbers.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_versions_are_read_from_release_strings() {
        assert_eq!(kernel_version("6.18.44-rc1-x\n"), Some((6, 18)));
        assert_eq!(kernel_version("5.4"), Some((5, 4)));
        assert_eq!(kernel_version("unknown"), None);
    }

    #[test]
    fn a_mount_line_gives_target_kind_and_options() {
        let line = "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:9 - cgroup2 cgroup2 rw";
        let mount = parse_mount(line).unwrap();
        assert_eq!(mount.target, "/sys/fs/cgroup/unified");
        assert_eq!(mount.kind, "cgroup2");
        assert_eq!(mount.options, "rw,relatime");
    }
}
