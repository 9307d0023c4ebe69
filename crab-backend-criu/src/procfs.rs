//! What `/proc` says about processes. A process may end at any moment: then the answer is `None` or empty.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

/// The part of `/proc/PID/stat` that is used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Stat {
    /// The name, shortened by the kernel to 15 bytes.
    pub(crate) name: String,
    /// The state's letter: `Z` for a zombie.
    pub(crate) state: char,
    pub(crate) parent: u32,
    /// When it started, in clock ticks since the host did. With its number this names a process for ever.
    pub(crate) started: u64,
    /// Resident pages.
    pub(crate) pages: u64,
}

impl Stat {
    /// Reads it.
    pub(crate) fn read(pid: u32) -> Option<Self> {
        // A name need not be text.
        Self::parse(&String::from_utf8_lossy(&std::fs::read(format!("/proc/{pid}/stat")).ok()?))
    }

    /// The name is in parentheses and may hold spaces and parentheses itself: it ends at the last one.
    fn parse(text: &str) -> Option<Self> {
        let (before, after) = text.rsplit_once(')')?;
        let (_, name) = before.split_once('(')?;
        let mut fields = after.split_ascii_whitespace();
        Some(Self {
            name: name.to_owned(),
            state: fields.next()?.chars().next()?,
            parent: fields.next()?.parse().ok()?,
            started: fields.nth(17)?.parse().ok()?,
            pages: fields.nth(1)?.parse().ok()?,
        })
    }

    /// It has ended and was not waited for yet.
    pub(crate) fn is_dead(&self) -> bool {
        matches!(self.state, 'Z' | 'X' | 'x')
    }
}

/// A process for an error message: number and name.
pub(crate) fn describe(pid: u32) -> String {
    match Stat::read(pid) {
        Some(stat) => format!("process {pid} ({})", stat.name.escape_default()),
        None => format!("process {pid}"),
    }
}

/// The children of all threads of a process.
pub(crate) fn children(pid: u32) -> Vec<u32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    threads
        .flatten()
        .filter_map(|thread| std::fs::read_to_string(thread.path().join("children")).ok())
        .flat_map(|text| text.split_ascii_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// A process and all its descendants, zombies too.
pub(crate) fn tree(root: u32) -> BTreeSet<u32> {
    let mut found = BTreeSet::from([root]);
    let mut open = vec![root];
    while let Some(pid) = open.pop() {
        open.extend(children(pid).into_iter().filter(|child| found.insert(*child)));
    }
    found
}

/// The inode that names one of a process's namespaces: `"net"`, `"mnt"`, `"pid"`.
pub(crate) fn namespace(pid: u32, kind: &str) -> Option<u64> {
    std::fs::metadata(format!("/proc/{pid}/ns/{kind}")).ok().map(|metadata| metadata.ino())
}

/// A line of `/proc/PID/status`, without its name: `"Uid:"`.
pub(crate) fn status(pid: u32, name: &str) -> Option<String> {
    let status = std::fs::read(format!("/proc/{pid}/status")).ok()?;
    let status = String::from_utf8_lossy(&status);
    status.lines().find_map(|line| line.strip_prefix(name)).map(|rest| rest.trim().to_owned())
}

/// A process's number inside its own pid namespace.
pub(crate) fn pid_inside(pid: u32) -> Option<u32> {
    status(pid, "NSpid:")?.split_ascii_whitespace().last()?.parse().ok()
}

/// The `/proc/PID/cgroup` line of the unified hierarchy. A zombie keeps it.
pub(crate) fn cgroup(pid: u32) -> Option<String> {
    let text = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).ok()?;
    text.lines().find_map(|line| line.strip_prefix("0::")).map(str::to_owned)
}

/// One open descriptor.
#[derive(Debug)]
pub(crate) struct Descriptor {
    pub(crate) number: u32,
    /// What the link shows: `pipe:[123]`, `anon_inode:[io_uring]`, a path.
    pub(crate) target: String,
    pub(crate) path: PathBuf,
    pub(crate) readable: bool,
    pub(crate) writable: bool,
}

/// The open descriptors of a process.
pub(crate) fn descriptors(pid: u32) -> Vec<Descriptor> {
    let Ok(entries) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { return Vec::new() };
    let read = |entry: std::fs::DirEntry| {
        let path = entry.path();
        // The link's own permissions say how the descriptor was opened.
        let mode = std::fs::symlink_metadata(&path).ok()?.mode();
        Some(Descriptor {
            number: entry.file_name().to_str()?.parse().ok()?,
            target: std::fs::read_link(&path).ok()?.to_string_lossy().into_owned(),
            readable: mode & 0o400 != 0,
            writable: mode & 0o200 != 0,
            path,
        })
    };
    entries.flatten().filter_map(read).collect()
}

impl Descriptor {
    /// The mount that its file was opened through.
    pub(crate) fn mount(&self) -> Option<u64> {
        let info = self.path.to_str()?.replacen("/fd/", "/fdinfo/", 1);
        let text = std::fs::read_to_string(info).ok()?;
        text.lines().find_map(|line| line.strip_prefix("mnt_id:"))?.trim().parse().ok()
    }

    /// The protocol of a socket, as the kernel names it: `TCP`, `UNIX-STREAM`.
    pub(crate) fn protocol(&self) -> Option<String> {
        let mut name = [0_u8; 64];
        let length = rustix::fs::getxattr(&self.path, "system.sockprotoname", &mut name[..]).ok()?;
        let name = name.get(..length)?.split(|b| *b == 0).next()?;
        Some(String::from_utf8_lossy(name).into_owned())
    }
}

/// The processes of the whole host.
pub(crate) fn all() -> Vec<u32> {
    let Ok(entries) = std::fs::read_dir("/proc") else { return Vec::new() };
    entries.flatten().filter_map(|entry| entry.file_name().to_str()?.parse().ok()).collect()
}

/// The number in a link such as `pipe:[12]`, where it is of that kind.
pub(crate) fn link_inode(target: &str, kind: &str) -> Option<u64> {
    target.strip_prefix(kind)?.strip_prefix(":[")?.strip_suffix(']')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_with_parentheses_is_read_whole() {
        let rest = "S 7 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 5 4096 33 0";
        let stat = Stat::parse(&format!("12 (a) b (c) {rest}")).unwrap();
        assert_eq!(stat, Stat { name: "a) b (c".into(), state: 'S', parent: 7, started: 5, pages: 33 });
        assert_eq!(Stat::parse("12 (x"), None);
    }

    #[test]
    fn this_process_is_found_alive() {
        let me = std::process::id();
        assert!(!Stat::read(me).unwrap().is_dead());
        assert!(tree(me).contains(&me));
        assert!(descriptors(me).iter().any(|d| d.readable));
        assert!(namespace(me, "mnt").is_some());
    }
}
