//! Locks that a restore would lose. A process's POSIX locks on a file go when it closes any descriptor of that file,
//! and CRIU closes one after it has mapped the file, when it has set the locks already. So a lock on a file that its
//! holder also maps is not there after a restore. SQLite in WAL mode is the case that matters: its locks lie on the
//! mapped `-shm` file.
//!
//! A lost exclusive lock lets a second writer in: that is refused, and is over when the transaction is. A lost shared
//! lock is accepted, since an open database has one all the time.

use std::collections::BTreeSet;

use crab_core::{Error, ErrorKind, Result};

use crate::procfs;

/// A POSIX lock of `/proc/locks`.
#[derive(Debug, PartialEq, Eq)]
struct Lock<'a> {
    pid: u32,
    /// Major and minor number, hexadecimal, as in `/proc/PID/maps`.
    device: &'a str,
    inode: &'a str,
}

/// Refuses an exclusive lock that would be lost. The tasks are stopped: what holds now is what is dumped.
pub(crate) fn check(processes: &BTreeSet<u32>) -> Result<()> {
    let locks = std::fs::read_to_string("/proc/locks").map_err(|e| Error::io("read the table of file locks", e))?;
    for lock in locks.lines().filter_map(exclusive).filter(|lock| processes.contains(&lock.pid)) {
        let maps = std::fs::read(format!("/proc/{}/maps", lock.pid)).unwrap_or_default();
        let maps = String::from_utf8_lossy(&maps);
        if let Some(path) = maps.lines().find_map(|line| mapped(line, &lock)) {
            let what = format!(
                "{} holds an exclusive lock on {}, which it also maps: a restore would lose the lock",
                procfs::describe(lock.pid),
                path.escape_default()
            );
            return Err(Error::new(ErrorKind::NotCheckpointable, what).retry());
        }
    }
    Ok(())
}

/// `2: POSIX  ADVISORY  WRITE 1700 00:27:8709 120 120`, where it is that kind. One that waits has an arrow there.
fn exclusive(line: &str) -> Option<Lock<'_>> {
    let mut words = line.split_ascii_whitespace().skip(1);
    (words.next()? == "POSIX").then_some(())?;
    (words.nth(1)? == "WRITE").then_some(())?;
    let pid = words.next()?.parse().ok()?;
    let (device, inode) = words.next()?.rsplit_once(':')?;
    Some(Lock { pid, device, inode })
}

/// The path of a line of `/proc/PID/maps`, where it is the locked file: `7f00-7f10 rw-s 00000000 00:27 8709  /path`.
fn mapped<'a>(line: &'a str, lock: &Lock<'_>) -> Option<&'a str> {
    let mut words = line.split_ascii_whitespace().skip(3);
    let same = words.next()? == lock.device && words.next()? == lock.inode;
    same.then(|| line.find('/').and_then(|at| line.get(at..)).unwrap_or("a file"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exclusive_posix_locks_that_are_held_count() {
        let lock = exclusive("2: POSIX  ADVISORY  WRITE 1700 00:27:8709 120 120").unwrap();
        assert_eq!(lock, Lock { pid: 1700, device: "00:27", inode: "8709" });
        for other in [
            "2: POSIX  ADVISORY  READ 1700 00:27:8709 120 120",
            "2: -> POSIX  ADVISORY  WRITE 1700 00:27:8709 120 120",
            "1: FLOCK  ADVISORY  WRITE 5 00:27:16691 0 EOF",
            "1: OFDLCK ADVISORY  WRITE -1 00:27:16691 0 EOF",
            "",
        ] {
            assert_eq!(exclusive(other), None, "{other}");
        }
    }

    #[test]
    fn the_file_is_found_among_the_mappings() {
        let lock = Lock { pid: 1, device: "00:27", inode: "8709" };
        let maps = "7f2a-7f2b rw-s 00000000 00:27 8709                       /root/my data.db-shm";
        assert_eq!(mapped(maps, &lock), Some("/root/my data.db-shm"));
        assert_eq!(mapped("7f2a-7f2b rw-s 00000000 00:27 8700   /x", &lock), None);
        assert_eq!(mapped("7ffc-7ffd rw-p 00000000 00:00 0   [stack]", &lock), None);
    }
}
