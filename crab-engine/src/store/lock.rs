//! One owner at a time, by a lock that a dead owner cannot keep.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use crab_core::{Error, ErrorKind, Result};
use rustix::fs::{FlockOperation, flock};

/// Holds the store until it is dropped or its process ends.
#[derive(Debug)]
pub(super) struct Lock(File);

impl Drop for Lock {
    fn drop(&mut self) {
        // Closing is not enough where this process is just starting another: until that one has begun its program it
        // has a copy of the descriptor, and with it the lock.
        let _ = flock(&self.0, FlockOperation::Unlock);
    }
}

impl Lock {
    pub(super) fn take(root: &Path) -> Result<Self> {
        let path = root.join("LOCK");
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(|source| super::io_error(format!("open {}", path.display()), source))?;
        if let Err(errno) = flock(&file, FlockOperation::NonBlockingLockExclusive) {
            if errno != rustix::io::Errno::WOULDBLOCK {
                return Err(super::io_error(format!("lock {}", path.display()), errno.into()));
            }
            let mut holder = String::new();
            // The text is for people; where it cannot be read the lock still says that somebody holds it.
            let _ = file.read_to_string(&mut holder);
            let holder = match holder.trim().parse::<u32>() {
                Ok(pid) if pid == std::process::id() => "an engine in this process".to_owned(),
                Ok(pid) => format!("the engine in process {pid}"),
                Err(_) => "another engine".to_owned(),
            };
            return Err(Error::new(ErrorKind::Busy, format!("the store {} is held by {holder}", root.display()))
                .fix("close that engine, or give this one a store of its own"));
        }
        file.set_len(0)
            .and_then(|()| file.rewind())
            .and_then(|()| writeln!(file, "{}", std::process::id()))
            .map_err(|source| super::io_error(format!("write {}", path.display()), source))?;
        Ok(Self(file))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lock_that_was_let_go_is_free_though_a_copy_of_the_descriptor_lives_on() {
        let dir = tempfile::tempdir().unwrap();
        let lock = Lock::take(dir.path()).unwrap();
        assert_eq!(Lock::take(dir.path()).unwrap_err().kind(), ErrorKind::Busy);
        // As a child has it between fork and exec.
        let copy = lock.0.try_clone().unwrap();
        drop(lock);
        drop(Lock::take(dir.path()).unwrap());
        drop(copy);
    }
}
