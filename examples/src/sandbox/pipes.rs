//! Pipes whose write end a sandbox's processes hold and whose read end the host holds: they are the host's, so a
//! checkpoint has to name them and a restore has to give fresh ones. The record of them is a directory of empty files
//! named by inode, so that every process of the host sees the same.

use std::collections::BTreeSet;
use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use crab_core::{Error, Result};
use rustix::pipe::PipeFlags;

/// The record of one sandbox.
#[derive(Clone, Debug)]
pub(super) struct Pipes(PathBuf);

/// A pipe that is on record.
pub(super) struct Pipe {
    pub(super) read: OwnedFd,
    pub(super) write: OwnedFd,
    pub(super) inode: u64,
}

impl Pipes {
    pub(super) fn at(path: PathBuf) -> Self {
        Self(path)
    }

    /// Makes a pipe and puts it on record.
    pub(super) fn make(&self) -> Result<Pipe> {
        let (read, write) =
            rustix::pipe::pipe_with(PipeFlags::CLOEXEC).map_err(|e| Error::io("make a pipe", e.into()))?;
        let inode = rustix::fs::fstat(&read).map_err(|e| Error::io("look at a pipe", e.into()))?.st_ino;
        std::fs::create_dir_all(&self.0)
            .and_then(|()| File::create(self.entry(inode)))
            .map_err(|e| Error::io(format!("record a pipe in {}", self.0.display()), e))?;
        Ok(Pipe { read, write, inode })
    }

    /// Takes a pipe off the record, once nobody inside holds it.
    pub(super) fn forget(&self, inode: u64) {
        // The record may be gone already, with its sandbox.
        let _ = std::fs::remove_file(self.entry(inode));
    }

    /// Takes all pipes off the record: no process of the sandbox is left.
    pub(super) fn clear(&self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }

    /// Reads a pipe to its end on a thread of its own and throws away what comes, so that whoever writes to it neither
    /// blocks nor gets SIGPIPE.
    pub(super) fn drain(&self, pipe: OwnedFd, inode: u64) {
        let record = self.clone();
        let read = move || {
            // The thread blocks in read, whatever the descriptor was used for before.
            let _ = rustix::fs::fcntl_setfl(pipe.as_fd(), rustix::fs::OFlags::empty());
            let mut file = File::from(pipe);
            let mut buffer = [0; 4096];
            loop {
                match file.read(&mut buffer) {
                    Ok(0) => break,
                    Err(e) if e.kind() != std::io::ErrorKind::Interrupted => break,
                    _ => {}
                }
            }
            record.forget(inode);
        };
        // Without a thread the pipe closes here, and the writer learns of it.
        let _ = std::thread::Builder::new().name("crab-drain".into()).stack_size(64 << 10).spawn(read);
    }

    /// The pipes on record that one of these processes holds.
    pub(super) fn held_by(&self, processes: &[u32]) -> Vec<u64> {
        let recorded: BTreeSet<u64> = std::fs::read_dir(&self.0)
            .into_iter()
            .flatten()
            .flatten()
            .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
            .collect();
        if recorded.is_empty() {
            return Vec::new();
        }
        let mut held = BTreeSet::new();
        for pid in processes {
            let Ok(descriptors) = std::fs::read_dir(format!("/proc/{pid}/fd")) else { continue };
            for entry in descriptors.flatten() {
                if let Ok(target) = std::fs::read_link(entry.path())
                    && let Some(inode) = pipe_inode(&target)
                    && recorded.contains(&inode)
                {
                    held.insert(inode);
                }
            }
        }
        held.into_iter().collect()
    }

    fn entry(&self, inode: u64) -> PathBuf {
        self.0.join(inode.to_string())
    }
}

/// The inode in `pipe:[N]`.
fn pipe_inode(target: &Path) -> Option<u64> {
    target.to_str()?.strip_prefix("pipe:[")?.strip_suffix(']')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pipe_is_held_until_forgotten() {
        let directory = std::env::temp_dir().join(format!("crab-pipes-{}", std::process::id()));
        let pipes = Pipes::at(directory.clone());
        let pipe = pipes.make().unwrap();
        assert_eq!(pipes.held_by(&[std::process::id()]), [pipe.inode]);
        pipes.forget(pipe.inode);
        assert!(pipes.held_by(&[std::process::id()]).is_empty());
        pipes.clear();
        assert!(!directory.exists());
    }
}
