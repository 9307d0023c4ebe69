//! Mounts of a sandbox, and which of them are the host's.

use std::collections::BTreeSet;

/// A line of `/proc/PID/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mount {
    pub(crate) id: u64,
    /// Major and minor number, as `8:1`.
    device: String,
    /// What of the file system is mounted.
    root: String,
    /// Where.
    pub(crate) place: String,
    kind: String,
}

impl Mount {
    /// `36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw`
    fn parse(line: &str) -> Option<Self> {
        let (mount, system) = line.split_once(" - ")?;
        let mut words = mount.split(' ');
        let id = words.next()?.parse().ok()?;
        Some(Self {
            id,
            device: words.nth(1)?.to_owned(),
            root: words.next()?.to_owned(),
            place: words.next()?.to_owned(),
            kind: system.split(' ').next()?.to_owned(),
        })
    }
}

/// The mounts that a process sees, in the order of mounting. None where it has gone.
pub(crate) fn of(pid: u32) -> Vec<Mount> {
    let text = std::fs::read(format!("/proc/{pid}/mountinfo")).unwrap_or_default();
    String::from_utf8_lossy(&text).lines().filter_map(Mount::parse).collect()
}

/// File systems that are the same everywhere, or that each namespace has its own of.
const EVERYWHERE: &[&str] = &[
    "proc",
    "sysfs",
    "devpts",
    "mqueue",
    "cgroup",
    "cgroup2",
    "devtmpfs",
    "securityfs",
    "debugfs",
    "tracefs",
    "bpf",
    "fusectl",
    "pstore",
    "configfs",
    "binfmt_misc",
    "hugetlbfs",
];

/// The first mount of a sandbox that is the host's: something of another file system than the sandbox's root, or of
/// outside the root in the same. `declared` says which places the host has named.
pub(crate) fn foreign<'a>(inside: &'a [Mount], host: &[Mount], declared: impl Fn(&str) -> bool) -> Option<&'a Mount> {
    let root = inside.iter().find(|mount| mount.place == "/")?;
    let known: BTreeSet<&str> = host.iter().map(|mount| mount.device.as_str()).collect();
    let below = |path: &str| match path.strip_prefix(root.root.trim_end_matches('/')) {
        Some(rest) => rest.is_empty() || rest.starts_with('/'),
        None => false,
    };
    inside.iter().find(|mount| {
        let own = if mount.device == root.device {
            below(&mount.root)
        } else {
            !known.contains(mount.device.as_str()) || (mount.root == "/" && EVERYWHERE.contains(&mount.kind.as_str()))
        };
        !own && !declared(&mount.place)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mounts(lines: &str) -> Vec<Mount> {
        lines.lines().filter_map(Mount::parse).collect()
    }

    const HOST: &str = "1 0 254:0 / / rw - ext4 /dev/vda rw\n\
                        2 1 0:40 / /pool rw - btrfs /dev/loop0 rw\n\
                        3 1 0:20 / /dev/shm rw shared:1 - tmpfs tmpfs rw\n\
                        4 1 0:21 / /proc rw - proc proc rw";
    const INSIDE: &str = "10 9 0:40 /boxes/a / rw - btrfs /dev/loop0 rw\n\
                          11 10 0:50 / /dev/shm rw - tmpfs shm rw\n\
                          12 10 0:51 / /proc rw - proc proc rw\n\
                          13 10 0:40 /boxes/a/data /srv rw - btrfs /dev/loop0 rw";

    #[test]
    fn a_sandbox_of_its_own_mounts_has_none_of_the_hosts() {
        assert_eq!(foreign(&mounts(INSIDE), &mounts(HOST), |_| false), None);
        assert!(!mounts(HOST).is_empty());
    }

    #[test]
    fn what_is_bound_from_the_host_is_found_until_it_is_declared() {
        for line in [
            "14 10 254:0 /home/me /work rw - ext4 /dev/vda rw",
            "14 10 0:40 /boxes/ab /work rw - btrfs /dev/loop0 rw",
            "14 10 0:20 / /work rw - tmpfs tmpfs rw",
            "14 10 0:21 /1 /work rw - proc proc rw",
        ] {
            let inside = mounts(&format!("{INSIDE}\n{line}"));
            assert_eq!(foreign(&inside, &mounts(HOST), |_| false).map(|m| m.place.as_str()), Some("/work"), "{line}");
            assert_eq!(foreign(&inside, &mounts(HOST), |place| place == "/work"), None);
        }
    }
}
