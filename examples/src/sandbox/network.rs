//! The sandbox's network namespace: made outside, mounted under a name, with a loopback device only.

use std::fs::File;
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crab_core::{Error, ErrorKind, Result, SandboxId};
use rustix::mount::UnmountFlags;

use super::state::run_directory;
use super::sys;

/// Makes the namespace where it is missing; returns the path it is mounted on.
pub(super) fn ensure(id: &SandboxId) -> Result<PathBuf> {
    let path = path(id)?;
    if is_namespace(&path) {
        return Ok(path);
    }
    remove(&path)?;
    File::create(&path).map_err(|e| Error::io(format!("create {}", path.display()), e))?;
    let outcome = sys::on_own_thread(|| {
        sys::new_network()?;
        // A child of this thread is born into its namespace.
        let status = Command::new("ip")
            .args(["link", "set", "lo", "up"])
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .stdin(Stdio::null())
            .status()?;
        if !status.success() {
            return Err(std::io::Error::other(format!("`ip link set lo up` failed ({status})")));
        }
        rustix::mount::mount_bind("/proc/thread-self/ns/net", &path).map_err(std::io::Error::from)
    });
    if let Err(error) = outcome {
        let _ = std::fs::remove_file(&path);
        return Err(Error::io("make a network namespace", error));
    }
    Ok(path)
}

pub(super) fn open(path: &Path) -> Result<File> {
    if !is_namespace(path) {
        return Err(Error::new(ErrorKind::NotFound, format!("{} is no network namespace", path.display()))
            .fix("launch the sandbox again"));
    }
    File::open(path).map_err(|e| Error::io(format!("open {}", path.display()), e))
}

pub(super) fn remove(path: &Path) -> Result<()> {
    while rustix::mount::unmount(path, UnmountFlags::DETACH).is_ok() {}
    match std::fs::remove_file(path) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(Error::io(format!("remove {}", path.display()), e)),
        _ => Ok(()),
    }
}

/// A socket of the host that listens inside the namespace: how a sandbox without network reaches a service of its host.
pub(super) fn listen(path: &Path, port: u16) -> Result<TcpListener> {
    let namespace = open(path)?;
    sys::on_own_thread(|| {
        sys::enter_network(&namespace)?;
        TcpListener::bind((Ipv4Addr::LOCALHOST, port))
    })
    .map_err(|e| Error::io(format!("listen on port {port} inside the sandbox"), e))
}

/// A connection of the host to a server inside the namespace.
pub(super) fn connect(path: &Path, port: u16) -> Result<TcpStream> {
    let namespace = open(path)?;
    sys::on_own_thread(|| {
        sys::enter_network(&namespace)?;
        TcpStream::connect((Ipv4Addr::LOCALHOST, port))
    })
    .map_err(|e| Error::io(format!("connect to port {port} inside the sandbox"), e))
}

fn path(id: &SandboxId) -> Result<PathBuf> {
    let directory = run_directory()?.join("netns");
    std::fs::create_dir_all(&directory).map_err(|e| Error::io(format!("make {}", directory.display()), e))?;
    Ok(directory.join(id.as_str()))
}

/// A file that nothing is mounted on is what a reboot or a killed launch leaves.
fn is_namespace(path: &Path) -> bool {
    const NSFS_MAGIC: u64 = 0x6e73_6673;
    rustix::fs::statfs(path).is_ok_and(|s| u64::try_from(s.f_type) == Ok(NSFS_MAGIC))
}
