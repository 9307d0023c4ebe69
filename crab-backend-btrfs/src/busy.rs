//! Whether something still uses a sandbox's root.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::os::fd::AsFd;
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};

use crab_core::{Condition, Error, ErrorKind, Result};
use rustix::fs::{AtFlags, StatxFlags};

use crate::failure;

/// Refuses a sandbox with tasks. A cgroup that does not exist has none.
pub(crate) fn refuse_tasks(cgroup: &Path) -> Result<()> {
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

/// Refuses a root that is mounted elsewhere, or on or in which something is mounted. Only the mounts that this process
/// sees are known. Others live in mount namespaces of their own, which end with their tasks; where one outlives them,
/// it keeps seeing the replaced tree and does no harm to the restored one.
///
/// `root` is free of symbolic links, and `parent` is its parent directory.
pub(crate) fn refuse_mounts(root: &Path, parent: impl AsFd) -> Result<()> {
    let text = fs::read("/proc/self/mountinfo").map_err(|error| Error::io("read /proc/self/mountinfo", error))?;
    let mounts: Vec<Mount> = text.split(|byte| *byte == b'\n').filter_map(Mount::parse).collect();
    let of_parent = rustix::fs::statx(parent, c"", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID)
        .map_err(failure::at("look at the parent of", root))?
        .stx_mnt_id;
    match using(root, of_parent, &mounts) {
        None => Ok(()),
        Some(mount) => {
            let message = format!("the root {} is in use by the mount {}", root.display(), mount.point.display());
            Err(Error::new(ErrorKind::Busy, message).fix("unmount it first"))
        }
    }
}

/// One line of mountinfo, as far as it matters here.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    id: u64,
    device: Vec<u8>,
    /// What of the filesystem is mounted.
    tree: PathBuf,
    /// Where it is mounted.
    point: PathBuf,
}

impl Mount {
    fn parse(line: &[u8]) -> Option<Self> {
        let mut fields = line.split(|byte| *byte == b' ');
        let id = std::str::from_utf8(fields.next()?).ok()?.parse().ok()?;
        let device = fields.nth(1)?.to_vec();
        let tree = unescape(fields.next()?);
        let point = unescape(fields.next()?);
        Some(Self { id, device, tree, point })
    }
}

/// The mount that uses the root, where one does.
fn using<'a>(root: &Path, of_parent: u64, mounts: &'a [Mount]) -> Option<&'a Mount> {
    // Where the root stands within its filesystem, by which bind mounts of it name it. Subvolumes of one btrfs share
    // one device number here.
    let within = mounts.iter().find(|mount| mount.id == of_parent).and_then(|mount| {
        let below = root.strip_prefix(&mount.point).ok()?;
        Some((&mount.device, mount.tree.join(below)))
    });
    mounts.iter().find(|mount| {
        mount.point.starts_with(root)
            || within.as_ref().is_some_and(|(device, tree)| mount.device == **device && mount.tree.starts_with(tree))
    })
}

/// Undoes the octal escapes of mountinfo.
fn unescape(field: &[u8]) -> PathBuf {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((byte, after)) = rest.split_first() {
        if let [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..] = rest {
            bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
            rest = after;
        } else {
            bytes.push(*byte);
            rest = after;
        }
    }
    OsString::from_vec(bytes).into()
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt;

    use super::*;

    const MOUNTS: &str = "\
20 1 254:0 / / rw - ext4 /dev/vda rw
30 20 0:40 / /pool rw - btrfs /dev/loop0 rw
31 20 0:40 /boxes/one /mnt/bound\\040one rw - btrfs /dev/loop0 rw
32 20 0:40 /boxes/two/usr /mnt/usr rw - btrfs /dev/loop0 rw
33 30 0:5 / /pool/boxes/three/proc rw - proc proc rw
34 20 0:41 /boxes/four /mnt/other rw - btrfs /dev/loop1 rw
";

    fn user(root: &str) -> Option<String> {
        let mounts: Vec<Mount> = MOUNTS.as_bytes().split(|b| *b == b'\n').filter_map(Mount::parse).collect();
        using(Path::new(root), 30, &mounts).map(|mount| mount.point.display().to_string())
    }

    #[test]
    fn every_way_of_using_a_root_is_found() {
        assert_eq!(user("/pool/boxes/one").as_deref(), Some("/mnt/bound one"), "bound as a whole");
        assert_eq!(user("/pool/boxes/two").as_deref(), Some("/mnt/usr"), "a part of it is bound");
        assert_eq!(user("/pool/boxes/three").as_deref(), Some("/pool/boxes/three/proc"), "something is mounted in it");
        assert_eq!(user("/pool/boxes/four"), None, "the same path on another filesystem");
        assert_eq!(user("/pool/boxes/on"), None, "a name that another begins with");
    }

    #[test]
    fn tasks_are_told_from_their_absence() {
        let cgroup = tempfile::tempdir().unwrap();
        refuse_tasks(&cgroup.path().join("missing")).unwrap();
        refuse_tasks(cgroup.path()).unwrap();
        fs::write(cgroup.path().join("cgroup.procs"), "12\n").unwrap();
        assert_eq!(refuse_tasks(cgroup.path()).unwrap_err().kind(), ErrorKind::Busy);
        // Tasks of a child cgroup are counted by the events alone.
        fs::write(cgroup.path().join("cgroup.procs"), "").unwrap();
        fs::write(cgroup.path().join("cgroup.events"), "populated 1\nfrozen 1\n").unwrap();
        let error = refuse_tasks(cgroup.path()).unwrap_err();
        assert_eq!((error.kind(), error.sandbox_condition()), (ErrorKind::Busy, Some(Condition::Frozen)));
        fs::write(cgroup.path().join("cgroup.events"), "populated 0\nfrozen 0\n").unwrap();
        refuse_tasks(cgroup.path()).unwrap();
    }

    #[test]
    fn bytes_that_are_not_escapes_stay() {
        for (text, bytes) in [("a\\040b", "a b"), ("a\\", "a\\"), ("\\9", "\\9"), ("\\134x", "\\x"), ("\\777", "\\777")]
        {
            assert_eq!(unescape(text.as_bytes()).as_os_str().as_bytes(), bytes.as_bytes());
        }
    }
}
