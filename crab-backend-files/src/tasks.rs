//! Whether a sandbox has tasks.

use std::fs;
use std::io;
use std::path::Path;

use crab_core::{Condition, Error, ErrorKind, Result};

/// Refuses a sandbox with tasks. A cgroup that does not exist has none. Blocks for a moment.
///
/// # Errors
/// [`Busy`](ErrorKind::Busy) with the sandbox's condition; what the operating system says where that cannot be told.
pub fn refuse(cgroup: &Path) -> Result<()> {
    if has_tasks(cgroup)? {
        let message = format!("the sandbox has tasks in {}", cgroup.display());
        return Err(Error::new(ErrorKind::Busy, message).fix("kill it first").condition(condition_of(cgroup)));
    }
    Ok(())
}

fn has_tasks(cgroup: &Path) -> Result<bool> {
    // On cgroup v2 this counts the tasks of child cgroups too.
    if let Some(events) = read(&cgroup.join("cgroup.events"))? {
        return Ok(events.lines().any(|line| line == "populated 1"));
    }
    // Not a cgroup v2 directory, or its root, which has no events.
    Ok(read(&cgroup.join("cgroup.procs"))?.is_some_and(|tasks| !tasks.trim().is_empty()))
}

fn condition_of(cgroup: &Path) -> Condition {
    match read(&cgroup.join("cgroup.events")) {
        Ok(Some(events)) if events.lines().any(|line| line == "frozen 1") => Condition::Frozen,
        Ok(_) => Condition::Running,
        Err(_) => Condition::Unknown,
    }
}

fn read(path: &Path) -> Result<Option<String>> {
    match fs::read_to_string(path) {
        Ok(text) => Ok(Some(text)),
        // A cgroup that is removed while it is read says ENODEV.
        Err(error) if error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(19) => Ok(None),
        Err(error) => Err(Error::io(format_args!("read {}", path.display()), error)),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "these are tests")]
mod tests {
    use super::*;

    #[test]
    fn tasks_are_told_from_their_absence() {
        let cgroup = tempfile::tempdir().unwrap();
        refuse(&cgroup.path().join("missing")).unwrap();
        refuse(cgroup.path()).unwrap();
        fs::write(cgroup.path().join("cgroup.procs"), "12\n").unwrap();
        assert_eq!(refuse(cgroup.path()).unwrap_err().kind(), ErrorKind::Busy);
        // Tasks of a child cgroup are counted by the events alone.
        fs::write(cgroup.path().join("cgroup.procs"), "").unwrap();
        fs::write(cgroup.path().join("cgroup.events"), "populated 1\nfrozen 1\n").unwrap();
        let error = refuse(cgroup.path()).unwrap_err();
        assert_eq!((error.kind(), error.sandbox_condition()), (ErrorKind::Busy, Some(Condition::Frozen)));
        fs::write(cgroup.path().join("cgroup.events"), "populated 0\nfrozen 0\n").unwrap();
        refuse(cgroup.path()).unwrap();
    }
}
