//! What is looked at before anything is stopped: CRIU would fail on it in the middle of a dump, or hang, and would
//! name a number where a person needs a name.

use std::collections::BTreeSet;

use crab_core::{Error, ErrorKind, External, Result, Sandbox};

use crate::cgroup::Cgroup;
use crate::procfs::{self, Stat};
use crate::{descriptors, landlock, mounts};

/// A process tree that may be dumped.
#[derive(Debug)]
pub(crate) struct Tree {
    pub(crate) init: u32,
    /// What its memory needs at the most.
    pub(crate) bytes: u64,
}

pub(crate) fn refuse(what: String) -> Error {
    Error::new(ErrorKind::NotCheckpointable, what)
}

/// Looks at the whole sandbox.
pub(crate) fn check(sandbox: &Sandbox) -> Result<Tree> {
    let init = live_init(sandbox)?;
    has_own_namespaces(init)?;
    let cgroup = Cgroup::at(&sandbox.cgroup);
    let processes = membership(&cgroup, init)?;
    has_one_user_namespace(init, &processes)?;
    has_one_time_namespace(init, &processes)?;
    check_mounts(sandbox, init)?;
    descriptors::check(&processes, init, &sandbox.external)?;
    landlock::check(&processes, init)?;
    may_read_limits(&processes)?;
    let page = u64::try_from(rustix::param::page_size()).unwrap_or(4096);
    let pages: u64 = processes.iter().filter_map(|pid| Stat::read(*pid)).map(|stat| stat.pages).sum();
    Ok(Tree { init, bytes: pages.saturating_mul(page) })
}

/// The init that the host names, where it lives.
fn live_init(sandbox: &Sandbox) -> Result<u32> {
    let invalid = |what: String| Err(Error::new(ErrorKind::InvalidInput, what).fix("capture a sandbox that lives"));
    let Some(init) = sandbox.init else {
        return invalid(format!("nothing lives in the sandbox {}, so there are no processes to save", sandbox.id));
    };
    match Stat::read(init) {
        Some(stat) if !stat.is_dead() => Ok(init),
        _ => invalid(format!("the init of the sandbox {}, process {init}, does not live", sandbox.id)),
    }
}

/// In the host's own pid namespace the numbers would be taken at restore; in its mount namespace a restore would put
/// the sandbox's mounts into the host.
fn has_own_namespaces(init: u32) -> Result<()> {
    let me = std::process::id();
    for (kind, name) in [("pid", "pid"), ("mnt", "mount")] {
        if procfs::namespace(init, kind) == procfs::namespace(me, kind) {
            let fix = "start the sandbox in pid and mount namespaces of its own";
            return Err(refuse(format!("{} shares the host's {name} namespace", procfs::describe(init))).fix(fix));
        }
    }
    if procfs::pid_inside(init) != Some(1) {
        let fix = "name the process that is number 1 in the sandbox as its init";
        return Err(refuse(format!("{} is not number 1 of its pid namespace", procfs::describe(init))).fix(fix));
    }
    Ok(())
}

/// CRIU reads the resource limits of each process. Those of another user's it may read by a right that root in a
/// container often lacks.
fn may_read_limits(processes: &BTreeSet<u32>) -> Result<()> {
    const SYS_RESOURCE: u32 = 24;
    let own = procfs::status(std::process::id(), "CapEff:").and_then(|set| u64::from_str_radix(&set, 16).ok());
    if own.is_none_or(|set| set & (1 << SYS_RESOURCE) != 0) {
        return Ok(());
    }
    let root = |pid: &u32| {
        let ids = ["Uid:", "Gid:"].map(|name| procfs::status(*pid, name));
        ids.iter().flatten().flat_map(|ids| ids.split_ascii_whitespace().take(3)).all(|id| id == "0")
    };
    match processes.iter().find(|pid| !root(pid)) {
        Some(pid) => {
            let what = format!("{} is of another user, and CRIU may not read its limits here", procfs::describe(*pid));
            Err(refuse(what).fix("give this program the capability CAP_SYS_RESOURCE"))
        }
        None => Ok(()),
    }
}

/// A restored init has clocks of its own. CRIU saves a task with other ones beside it, and cannot restore the tree.
fn has_one_time_namespace(init: u32, processes: &BTreeSet<u32>) -> Result<()> {
    let own = procfs::namespace(init, "time");
    let stranger = processes.iter().find(|pid| procfs::namespace(**pid, "time").is_some_and(|it| Some(it) != own));
    match stranger {
        None => Ok(()),
        Some(pid) => {
            let what = format!("{} is in another time namespace than the sandbox's init", procfs::describe(*pid));
            Err(refuse(what).fix("enter the time namespace too where commands enter the sandbox"))
        }
    }
}

/// Processes with rights of their own in a namespace of their own.
fn has_one_user_namespace(init: u32, processes: &BTreeSet<u32>) -> Result<()> {
    let own = procfs::namespace(init, "user");
    let stranger = processes.iter().find(|pid| procfs::namespace(**pid, "user").is_some_and(|it| Some(it) != own));
    match stranger {
        Some(pid) => {
            let what = format!("{} is in a user namespace of its own, which cannot be saved", procfs::describe(*pid));
            Err(refuse(what).fix("end it, or run it without a user namespace"))
        }
        None => Ok(()),
    }
}

/// A mount of the host's would be looked for in the sandbox's root at restore.
fn check_mounts(sandbox: &Sandbox, init: u32) -> Result<()> {
    let declared = |place: &str| {
        sandbox.external.iter().any(|e| matches!(e, External::Mount { inside } if inside.to_str() == Some(place)))
    };
    match mounts::foreign(&mounts::of(init), &mounts::of(std::process::id()), declared) {
        Some(mount) => {
            let place = mount.place.escape_default();
            Err(refuse(format!("what is mounted at {place} in the sandbox belongs to the host and is not declared"))
                .fix("declare the mount as external, or unmount it"))
        }
        None => Ok(()),
    }
}

/// The live processes of the sandbox: those of its cgroup and those below its init must be the same.
pub(crate) fn membership(cgroup: &Cgroup, init: u32) -> Result<BTreeSet<u32>> {
    // Processes come and go between the two looks; what is wrong stays wrong.
    let (mut outside, mut escaped): (Option<BTreeSet<u32>>, Option<BTreeSet<u32>>) = (None, None);
    for _ in 0..4 {
        let members = cgroup.processes()?;
        let tree = procfs::tree(init);
        let alive = |pid: &u32| Stat::read(*pid).is_none_or(|stat| !stat.is_dead());
        let keep = |now: BTreeSet<u32>, before: &Option<BTreeSet<u32>>| match before {
            Some(before) => now.intersection(before).copied().collect(),
            None => now,
        };
        let now_outside = keep(members.difference(&tree).copied().filter(alive).collect(), &outside);
        let now_escaped = keep(
            tree.difference(&members).copied().filter(|pid| Stat::read(*pid).is_some_and(|s| !s.is_dead())).collect(),
            &escaped,
        );
        if now_outside.is_empty() && now_escaped.is_empty() {
            return Ok(members);
        }
        (outside, escaped) = (Some(now_outside), Some(now_escaped));
    }
    let place = cgroup.path().display();
    if let Some(pid) = outside.iter().flatten().next() {
        let who = if *pid == 0 { "a process of another pid namespace".into() } else { procfs::describe(*pid) };
        return Err(refuse(format!("{who} is in the sandbox's cgroup {place} but not below its init, process {init}"))
            .fix("start every process of the sandbox below its init"));
    }
    let who = escaped.iter().flatten().next().map_or_else(String::new, |pid| procfs::describe(*pid));
    Err(refuse(format!("{who} is below the sandbox's init but not in its cgroup {place}"))
        .fix("keep every process of the sandbox in its cgroup"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sandbox_without_init_is_no_input() {
        let sandbox = Sandbox::new("box".parse().unwrap(), "/", "/no/such/cgroup");
        assert_eq!(check(&sandbox).unwrap_err().kind(), ErrorKind::InvalidInput);
    }

    #[test]
    fn a_process_of_the_host_is_refused() {
        let sandbox = Sandbox::new("box".parse().unwrap(), "/", "/no/such/cgroup").with_init(std::process::id());
        let error = check(&sandbox).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::NotCheckpointable, "{error}");
        assert!(error.to_string().contains("namespace"), "{error}");
    }
}
