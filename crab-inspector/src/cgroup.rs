//! The tasks of a cgroup v2 subtree.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// More child cgroups than this are not looked through.
const MOST_GROUPS: usize = 4096;

/// All groups of a subtree, the top one first. Groups that vanish meanwhile are left out.
pub(crate) fn groups(top: &Path) -> io::Result<Vec<PathBuf>> {
    let mut groups = vec![top.to_owned()];
    let mut at = 0;
    while at < groups.len() {
        let entries = match fs::read_dir(&groups[at]) {
            Ok(entries) => entries,
            Err(error) if at > 0 && error.kind() == io::ErrorKind::NotFound => {
                groups.remove(at);
                continue;
            }
            Err(error) => return Err(error),
        };
        for entry in entries {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                if groups.len() == MOST_GROUPS {
                    return Err(io::Error::other("there are too many child cgroups"));
                }
                groups.push(entry.path());
            }
        }
        at += 1;
    }
    Ok(groups)
}

/// The ids of all threads in a subtree, as the reader's pid namespace numbers them.
pub(crate) fn threads(top: &Path) -> io::Result<BTreeSet<u32>> {
    let mut threads = BTreeSet::new();
    for (i, group) in groups(top)?.iter().enumerate() {
        match fs::read_to_string(group.join("cgroup.threads")) {
            Ok(text) => {
                for line in text.lines() {
                    threads.insert(line.trim().parse().map_err(io::Error::other)?);
                }
            }
            Err(error) if i > 0 && gone(&error) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(threads)
}

/// How much CPU time the subtree has used, tasks that are gone included.
pub(crate) fn usage_usec(top: &Path) -> io::Result<u64> {
    let text = fs::read_to_string(top.join("cpu.stat"))?;
    text.lines()
        .find_map(|line| line.strip_prefix("usage_usec ")?.trim().parse().ok())
        .ok_or_else(|| io::Error::other("cpu.stat has no usage_usec"))
}

/// Whether the subtree is to be frozen, by its own setting. What cannot be read counts as not.
pub(crate) fn is_frozen(top: &Path) -> bool {
    fs::read_to_string(top.join("cgroup.freeze")).is_ok_and(|text| text.trim() == "1")
}

/// Whether reading failed because the cgroup or task ceased to be.
pub(crate) fn gone(error: &io::Error) -> bool {
    let errno = rustix::io::Errno::from_io_error(error);
    matches!(errno, Some(rustix::io::Errno::NOENT | rustix::io::Errno::NODEV | rustix::io::Errno::SRCH))
}
