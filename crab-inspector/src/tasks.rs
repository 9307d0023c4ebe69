//! Which threads a sandbox has, and whether they ran.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::Path;

use crab_core::Evidence;

use crate::cgroup;

/// A thread's id and the clock tick in which it started: ids are given out again, the pair is not.
pub(crate) type Thread = (u32, u64);

/// What was seen of one thread.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Trace {
    /// Its process.
    pub(crate) process: u32,
    /// Its name.
    pub(crate) name: String,
    /// Nanoseconds on a CPU.
    pub(crate) ran_for: u64,
    /// How often it was put on a CPU.
    pub(crate) runs: u64,
    /// It was on a CPU or waiting for one when it was looked at, so the counters lag behind.
    pub(crate) runnable: bool,
}

/// What was seen of all threads of a sandbox.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Census {
    pub(crate) threads: BTreeMap<Thread, Trace>,
    /// CPU time of the cgroup in microseconds, tasks that are gone included.
    pub(crate) usage: u64,
}

impl Census {
    /// Looks at all threads of a cgroup subtree.
    pub(crate) fn take(cgroup: &Path) -> io::Result<Self> {
        let mut census = Self::default();
        // A thread that is born while the list is read shows in a second reading.
        let mut listed = cgroup::threads(cgroup)?;
        for _ in 0..8 {
            census.threads.clear();
            for &tid in &listed {
                match look(tid) {
                    Ok((thread, trace)) => {
                        census.threads.insert(thread, trace);
                    }
                    Err(error) if cgroup::gone(&error) => {}
                    Err(error) => return Err(error),
                }
            }
            let again = cgroup::threads(cgroup)?;
            if again == listed {
                census.usage = cgroup::usage_usec(cgroup)?;
                return Ok(census);
            }
            listed = again;
        }
        Err(io::Error::other("threads come and go faster than they can be listed"))
    }

    /// The processes that the threads belong to.
    pub(crate) fn processes(&self) -> BTreeSet<u32> {
        self.threads.values().map(|trace| trace.process).collect()
    }

    /// The name of a thread.
    pub(crate) fn name_of(&self, tid: u32) -> Option<&str> {
        self.threads.iter().find(|((id, _), _)| *id == tid).map(|(_, trace)| trace.name.as_str())
    }

    /// Which thread came or went since an earlier census. Threads that started in clock tick `until` or later count as
    /// come since, also if the census caught them.
    pub(crate) fn other_threads(&self, base: &Self, until: u64) -> Option<Evidence> {
        let new = self.threads.iter().find(|(thread, _)| thread.1 >= until || !base.threads.contains_key(thread));
        if let Some((thread, trace)) = new {
            return Some(Evidence::NewTask(named(thread, trace)));
        }
        base.threads
            .iter()
            .find(|(thread, _)| !self.threads.contains_key(thread))
            .map(|(thread, trace)| Evidence::GoneTask(named(thread, trace)))
    }

    /// What is different from an earlier census: the first thing that proves that the processes may be in another
    /// state.
    pub(crate) fn since(&self, base: &Self) -> Option<Evidence> {
        if let Some(evidence) = self.other_threads(base, u64::MAX) {
            return Some(evidence);
        }
        for (thread, trace) in &self.threads {
            let ran = base.threads.get(thread).is_none_or(|was| {
                trace.runnable || was.runnable || (trace.ran_for, trace.runs) != (was.ran_for, was.runs)
            });
            if ran {
                return Some(Evidence::TaskRan(named(thread, trace)));
            }
        }
        // Threads that came and went may have written into the memory of those that stayed, or changed what the kernel
        // holds for them.
        (!self.threads.is_empty() && self.usage != base.usage)
            .then(|| Evidence::Kernel("processes came and went, and may have left state behind".to_owned()))
    }
}

/// What threads did in a while.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ran {
    /// Any of them was on a CPU.
    pub(crate) any: bool,
    /// For so many nanoseconds, the last clock tick of one that still is not counted.
    pub(crate) nanoseconds: u64,
}

impl Census {
    /// What the threads of this census did since, told by the scheduler's own counters. A thread that is gone counts as
    /// one that ran.
    pub(crate) fn ran(&self) -> io::Result<Ran> {
        let mut ran = Ran::default();
        for ((tid, _), was) in &self.threads {
            match schedstat(*tid) {
                Ok((ran_for, runs)) => {
                    ran.any |= was.runnable || (ran_for, runs) != (was.ran_for, was.runs);
                    ran.nanoseconds = ran.nanoseconds.saturating_add(ran_for.saturating_sub(was.ran_for));
                }
                Err(error) if cgroup::gone(&error) => ran.any = true,
                Err(error) => return Err(error),
            }
        }
        Ok(ran)
    }
}

/// Nanoseconds that a thread was on a CPU, and how often it was put on one.
fn schedstat(tid: u32) -> io::Result<(u64, u64)> {
    let text = fs::read_to_string(format!("/proc/{tid}/schedstat"))?;
    parse_schedstat(&text).ok_or_else(|| odd(tid, "schedstat"))
}

fn named((tid, _): &Thread, trace: &Trace) -> String {
    format!("{tid} ({})", trace.name)
}

fn look(tid: u32) -> io::Result<(Thread, Trace)> {
    let folder = Path::new("/proc").join(tid.to_string());
    // The state first: counters that are read later hold all of a run that had ended by then.
    let stat = fs::read(folder.join("stat"))?;
    let stat = parse_stat(&stat).ok_or_else(|| odd(tid, "stat"))?;
    let (ran_for, runs) = schedstat(tid)?;
    let status = fs::read_to_string(folder.join("status"))?;
    let process = status
        .lines()
        .find_map(|line| line.strip_prefix("Tgid:")?.trim().parse().ok())
        .ok_or_else(|| odd(tid, "status"))?;
    let trace = Trace { process, name: stat.name, ran_for, runs, runnable: stat.state == b'R' };
    Ok(((tid, stat.started), trace))
}

fn odd(tid: u32, file: &str) -> io::Error {
    io::Error::other(format!("/proc/{tid}/{file} cannot be understood"))
}

#[derive(Debug, PartialEq, Eq)]
struct Stat {
    name: String,
    state: u8,
    started: u64,
}

/// Reads `/proc/PID/stat`. The name may hold anything, brackets and newlines too, and ends at the last bracket.
fn parse_stat(stat: &[u8]) -> Option<Stat> {
    let open = stat.iter().position(|b| *b == b'(')?;
    let close = stat.iter().rposition(|b| *b == b')')?;
    let name = String::from_utf8_lossy(stat.get(open + 1..close)?).into_owned();
    let rest = std::str::from_utf8(stat.get(close + 1..)?).ok()?;
    let mut fields = rest.split_ascii_whitespace();
    let state = *fields.next()?.as_bytes().first()?;
    // The state is field 3, the start time field 22.
    let started = fields.nth(18)?.parse().ok()?;
    Some(Stat { name, state, started })
}

fn parse_schedstat(text: &str) -> Option<(u64, u64)> {
    let mut fields = text.split_ascii_whitespace();
    let ran_for = fields.next()?.parse().ok()?;
    let runs = fields.nth(1)?.parse().ok()?;
    Some((ran_for, runs))
}

#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn read_any(data: &[u8]) {
    let _ = (parse_stat(data), parse_schedstat(&String::from_utf8_lossy(data)));
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn census(threads: &[(u32, u64)], usage: u64) -> Census {
        let trace = |runs| Trace { process: 1, name: "x".into(), ran_for: runs * 10, runs, runnable: false };
        Census { threads: threads.iter().map(|(tid, runs)| ((*tid, 7), trace(*runs))).collect(), usage }
    }

    #[test]
    fn what_ran_came_or_went_is_seen() {
        let base = census(&[(1, 5), (2, 6)], 100);
        assert_eq!(base.since(&base), None);
        let ran = census(&[(1, 5), (2, 7)], 100);
        assert!(matches!(ran.since(&base), Some(Evidence::TaskRan(_))));
        let new = census(&[(1, 5), (2, 6), (3, 0)], 100);
        assert!(matches!(new.since(&base), Some(Evidence::NewTask(_))));
        let gone = census(&[(1, 5)], 100);
        assert!(matches!(gone.since(&base), Some(Evidence::GoneTask(_))));
        let passed = census(&[(1, 5), (2, 6)], 101);
        assert!(matches!(passed.since(&base), Some(Evidence::Kernel(_))));
    }

    #[test]
    fn with_nobody_there_before_or_now_nothing_is_kept() {
        assert_eq!(census(&[], 500).since(&census(&[], 100)), None);
    }

    #[test]
    fn a_name_cannot_forge_fields() {
        let stat = b"42 (a) R (b\n) S 1 1 1 0 -1 4194560 1 2 3 4 5 6 7 8 20 0 1 0 987 1 2 3";
        let read = parse_stat(stat).unwrap();
        assert_eq!((read.state, read.started), (b'S', 987));
        assert_eq!(read.name, "a) R (b\n");
    }

    #[test]
    fn this_thread_is_seen_running() {
        let ((tid, _), trace) = look(std::process::id()).unwrap();
        assert_eq!(tid, trace.process);
        assert!(trace.runs > 0);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(data in proptest::collection::vec(any::<u8>(), 0..200), text in ".{0,60}") {
            let _ = parse_stat(&data);
            let _ = parse_schedstat(&text);
        }
    }
}
