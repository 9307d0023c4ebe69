//! A btrfs in a file, mounted until it is dropped.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Runs a program to its end; its output is shown where it fails.
pub(crate) fn run<I: AsRef<OsStr>>(program: &str, arguments: impl IntoIterator<Item = I>) -> Result<(), String> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output();
    let output = output.map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{program} failed: {}", String::from_utf8_lossy(&output.stderr).trim()))
}

/// The file system.
pub(crate) struct Pool {
    directory: tempfile::TempDir,
}

impl Pool {
    /// With tree nodes of so many bytes.
    pub(crate) fn new(bytes: u64, node: u32) -> Result<Self, String> {
        let directory = tempfile::Builder::new().prefix("crab-bench-").tempdir().map_err(|error| error.to_string())?;
        let pool = Self { directory };
        let (image, node) = (pool.image(), node.to_string());
        let made = fs::File::create(&image).and_then(|file| file.set_len(bytes));
        made.and_then(|()| fs::create_dir(pool.path())).map_err(|error| error.to_string())?;
        run("mkfs.btrfs", ["-q".as_ref(), "-n".as_ref(), node.as_ref(), image.as_os_str()])?;
        run("mount", ["-o".as_ref(), "loop,noatime".as_ref(), image.as_os_str(), pool.path().as_os_str()])?;
        Ok(pool)
    }

    pub(crate) fn path(&self) -> PathBuf {
        self.directory.path().join("pool")
    }

    /// The file that holds it.
    pub(crate) fn image(&self) -> PathBuf {
        self.directory.path().join("image")
    }

    pub(crate) fn sync(&self) -> Result<(), String> {
        run("btrfs", ["filesystem".as_ref(), "sync".as_ref(), self.path().as_os_str()])
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let path: &Path = &self.path();
        if let Err(error) = run("umount", [path]) {
            eprintln!("{error}; unmounted lazily");
            let _ = run("umount", ["-l".as_ref(), path.as_os_str()]);
        }
    }
}
