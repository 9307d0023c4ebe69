//! CRIUs that outlive the process that started them. They notice that nobody listens, put the tasks back as they found
//! them, and end; a sandbox that they found frozen they freeze once more at that. So what they work on is not to be
//! touched before they are gone.
//!
//! Each inherits a descriptor of the [tie](crate::area::Area::tie) of its owner's part of a capture directory: a file
//! with a lock on it, which is free again when the owner and the last of them are gone. Tasks that CRIU restores do not
//! keep it.

use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crab_core::{Error, ErrorKind, Result};
use rustix::process::{Pid, PidfdFlags, Signal};

use crate::{area, files, oci, procfs};

/// The kernel gets this long to end what is killed.
const END: Duration = Duration::from_secs(10);

/// Returns when no CRIU that works in one of these parts, whose owners are dead, lives any more. What has not ended by
/// itself after `patience` is killed.
pub(crate) fn outlive(parts: &[PathBuf], patience: Duration) -> Result<()> {
    let begun = Instant::now();
    for part in parts {
        let mut held = None;
        while area::is_tied(part) {
            held.get_or_insert_with(|| hurry(part));
            let waited = begun.elapsed();
            if waited > patience {
                let left = holders(&area::tie_of(part));
                if waited > patience + END {
                    let names: Vec<_> = left.iter().map(|(pid, _)| procfs::describe(*pid)).collect();
                    let what = format!("a CRIU of a process that has died does not end: {}", names.join(", "));
                    return Err(Error::new(ErrorKind::TimedOut, what).fix("end it, then thaw its sandbox"));
                }
                for (pid, handle) in left {
                    tracing::warn!(pid, "a CRIU of a process that has died is ended");
                    let _ = rustix::process::pidfd_send_signal(&handle, Signal::KILL);
                }
            }
            std::thread::sleep(Duration::from_millis(2));
        }
    }
    Ok(())
}

/// Has them fail soon: a CRIU without a directory to write to or to read from puts the tasks back and ends. What is
/// returned is to be kept until then.
fn hurry(part: &Path) -> Vec<File> {
    let names = files::names(part).unwrap_or_default();
    let runs = names.into_iter().map(|name| part.join(name)).filter(|path| path.is_dir());
    runs.flat_map(|run| {
        // They may write there still; what stays goes with the rest.
        let _ = std::fs::remove_dir_all(run.join(area::IMAGES));
        oci::refuse(&run.join(area::WORK))
    })
    .collect()
}

/// The processes that hold the tie, this one left out. It is closed to strangers.
fn holders(tie: &Path) -> Vec<(u32, OwnedFd)> {
    let Ok(tie) = tie.canonicalize() else { return Vec::new() };
    let holds = |pid: u32| {
        let number = Pid::from_raw(i32::try_from(pid).ok()?)?;
        // Before the look: then it is the handle of what was looked at, or of one that is gone.
        let handle = rustix::process::pidfd_open(number, PidfdFlags::empty()).ok()?;
        procfs::descriptors(pid).iter().any(|fd| Path::new(&fd.target) == tie).then_some((pid, handle))
    };
    procfs::all().into_iter().filter(|pid| *pid != std::process::id()).filter_map(holds).collect()
}

#[cfg(test)]
mod tests {
    use std::process::{Child, Command, Stdio};
    use std::sync::Arc;

    use super::*;
    use crate::area::Area;
    use crate::sys::{self, Surroundings};

    /// A process that holds the tie of an area, as a CRIU does. It ends when its input does.
    fn tied(area: &Arc<Area>) -> Child {
        child(vec![area.tie().unwrap()])
    }

    fn child(keep: Vec<std::os::fd::OwnedFd>) -> Child {
        let mut command = Command::new("cat");
        command.stdin(Stdio::piped()).stdout(Stdio::null());
        sys::spawn(command, Surroundings { keep, ..Surroundings::default() }).unwrap()
    }

    /// Makes it look as if the owner of this area had died.
    fn orphaned(area: Arc<Area>) -> PathBuf {
        let part = area.own().to_owned();
        let aside = part.with_extension("aside");
        std::fs::rename(&part, &aside).unwrap();
        drop(area);
        std::fs::rename(aside, &part).unwrap();
        part
    }

    #[test]
    fn who_holds_a_tie_is_found_by_that_alone_and_killed_when_its_time_is_up() {
        let base = tempfile::tempdir().unwrap();
        let (dead, other) = (Area::open(base.path()).unwrap(), Area::open(base.path()).unwrap());
        let (mut orphan, mut theirs) = (tied(&dead), tied(&other));
        let part = orphaned(dead);
        std::fs::create_dir_all(part.join("0/images")).unwrap();
        let found: Vec<u32> = holders(&area::tie_of(&part)).into_iter().map(|(pid, _)| pid).collect();
        assert!(found.contains(&orphan.id()) && !found.contains(&theirs.id()), "{found:?}");
        outlive(std::slice::from_ref(&part), Duration::from_millis(50)).unwrap();
        assert!(!area::is_tied(&part));
        assert!(!part.join("0/images").exists(), "it was not told to hurry");
        assert!(!orphan.wait().unwrap().success());
        // Of the one whose owner lives nobody has taken notice.
        drop(theirs.stdin.take());
        assert!(theirs.wait().unwrap().success());
    }

    #[test]
    fn an_area_recovers_when_the_last_orphan_has_ended() {
        let base = tempfile::tempdir().unwrap();
        let (dead, living) = (Area::open(base.path()).unwrap(), Area::open(base.path()).unwrap());
        // One that has not yet closed what its owner had.
        let mut orphan = child(dead.descriptors());
        let part = orphaned(dead);
        std::thread::scope(|scope| {
            let recovering = scope.spawn(|| living.recover());
            std::thread::sleep(Duration::from_millis(30));
            assert!(part.exists() && !recovering.is_finished());
            drop(orphan.stdin.take());
            recovering.join().unwrap().unwrap();
        });
        assert!(!part.exists());
        assert!(orphan.wait().unwrap().success());
    }
}
