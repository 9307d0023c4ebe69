//! What belongs to the host, as CRIU is told of it: left out at the dump, given again at the restore.

use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crab_core::{Error, ErrorKind, External, InheritedFd, Result, Sandbox};

use crate::procfs;
use crate::proto::InheritFd;

/// The name that the network namespace has in the images.
const NETWORK: &str = "extnet";
/// Numbers below are the standard streams of the CRIU process.
const LOWEST_FD: i32 = 10;

/// What a dump is told to leave out. Pipes need nothing: CRIU saves an end whose other end it does not find.
pub(crate) fn left_out(sandbox: &Sandbox, init: u32) -> Result<Vec<String>> {
    let mut keys = Vec::new();
    for external in &sandbox.external {
        match external {
            External::NetworkNamespace { path } => keys.push(network(path, init)?),
            External::Pipe { .. } => {}
            External::Socket { inode } => keys.push(format!("unix[{inode}]")),
            External::Terminal { .. } => keys.push(external.key()),
            External::Mount { inside } => {
                let name = mount_name(inside)?;
                keys.push(format!("mnt[{name}]:{name}"));
            }
            other => {
                let what = format!("CRIU's backend cannot leave out {}", other.key());
                return Err(Error::new(ErrorKind::Unsupported, what));
            }
        }
    }
    Ok(keys)
}

fn network(path: &Path, init: u32) -> Result<String> {
    let metadata = std::fs::metadata(path);
    let inode = metadata.map_err(|e| Error::io(format!("look at {}", path.display()), e))?.ino();
    if procfs::namespace(init, "net") != Some(inode) {
        let what = format!("{} does not live in the network namespace {}", procfs::describe(init), path.display());
        return Err(Error::new(ErrorKind::NotCheckpointable, what).fix("declare the one that it lives in"));
    }
    Ok(format!("net[{inode}]:{NETWORK}"))
}

/// A mount's place, as CRIU's options carry it.
fn mount_name(inside: &Path) -> Result<&str> {
    let plain = |name: &&str| name.starts_with('/') && !name.contains(['[', ']', ':']) && !name.contains('\n');
    inside.to_str().filter(plain).ok_or_else(|| {
        let what = format!("CRIU cannot be told of a mount at {}", inside.display().to_string().escape_default());
        Error::new(ErrorKind::InvalidInput, what).fix("declare an absolute path without brackets and colons")
    })
}

/// What a restore gets of the host's.
#[derive(Debug, Default)]
pub(crate) struct Given {
    /// The descriptors that CRIU inherits, in the order of what is external, and those that are only looked at.
    pub(crate) keep: Vec<OwnedFd>,
    pub(crate) inherit: Vec<InheritFd>,
    pub(crate) external: Vec<String>,
}

/// One descriptor for each external thing of an artifact.
pub(crate) fn given(externals: &[External], mut inherited: Vec<InheritedFd>) -> Result<Given> {
    let mut all = Given::default();
    for external in externals {
        let name = external.key();
        let Some(at) = inherited.iter().position(|given| given.external.key() == name) else {
            return Err(Error::new(ErrorKind::InvalidInput, format!("the host gave nothing in place of {name}"))
                .fix("give one descriptor for each external thing of the artifact"));
        };
        let given = inherited.swap_remove(at);
        let fd = rustix::io::fcntl_dupfd_cloexec(&given.fd, LOWEST_FD)
            .map_err(|e| Error::io("duplicate an inherited descriptor", e.into()))?;
        match external {
            External::Mount { inside } => {
                let source = std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
                    .map_err(|e| Error::io(format!("look at what is given in place of {name}"), e))?;
                let source = source.to_str().filter(|path| path.starts_with('/')).ok_or_else(|| {
                    Error::new(ErrorKind::InvalidInput, format!("what is given in place of {name} cannot be mounted"))
                })?;
                all.external.push(format!("mnt[{}]:{source}", mount_name(inside)?));
            }
            External::NetworkNamespace { .. } => {
                all.inherit.push(InheritFd { key: NETWORK.to_owned(), fd: fd.as_raw_fd() });
            }
            _ => all.inherit.push(InheritFd { key: name, fd: fd.as_raw_fd() }),
        }
        all.keep.push(fd);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mount_is_given_by_the_path_of_its_descriptor() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let external = External::Mount { inside: "/etc/thing".into() };
        let fd = std::fs::File::open(file.path()).unwrap().into();
        let inherited = vec![InheritedFd { external: external.clone(), fd }];
        let given = given(std::slice::from_ref(&external), inherited).unwrap();
        assert_eq!(given.external, [format!("mnt[/etc/thing]:{}", file.path().display())]);
        assert!(given.inherit.is_empty());
    }

    #[test]
    fn what_is_not_given_is_named() {
        let error = given(&[External::Socket { inode: 12 }], Vec::new()).unwrap_err();
        assert!(error.to_string().contains("socket:[12]"), "{error}");
    }

    #[test]
    fn a_mount_that_criu_would_misread_is_refused() {
        for inside in ["relative", "/a]:/b", "/a:b"] {
            assert_eq!(mount_name(Path::new(inside)).unwrap_err().kind(), ErrorKind::InvalidInput, "{inside}");
        }
    }
}
