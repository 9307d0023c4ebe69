//! What is mounted where, and putting one filesystem in the place of another.

use std::fs;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use crab_backend_files::mountinfo::{self, Mount};
use crab_core::{Error, ErrorKind, Result};
use rustix::fs::{CWD, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MoveMountFlags, UnmountFlags};

use crate::failure;

/// The dataset or snapshot that is mounted, where it is ZFS.
pub(crate) fn dataset(mount: &Mount) -> Option<&str> {
    if mount.kind == b"zfs" { mount.source.to_str() } else { None }
}

fn attributes(mount: &Mount) -> MountAttrFlags {
    let mut attributes = MountAttrFlags::empty();
    for option in mount.options.split(|byte| *byte == b',') {
        attributes |= match option {
            b"ro" => MountAttrFlags::MOUNT_ATTR_RDONLY,
            b"nosuid" => MountAttrFlags::MOUNT_ATTR_NOSUID,
            b"nodev" => MountAttrFlags::MOUNT_ATTR_NODEV,
            b"noexec" => MountAttrFlags::MOUNT_ATTR_NOEXEC,
            b"noatime" => MountAttrFlags::MOUNT_ATTR_NOATIME,
            b"nodiratime" => MountAttrFlags::MOUNT_ATTR_NODIRATIME,
            _ => MountAttrFlags::empty(),
        };
    }
    attributes
}

/// The mounts that this process sees, at one moment.
#[derive(Debug)]
pub(crate) struct Mounts(Vec<Mount>);

impl Mounts {
    pub(crate) fn read() -> Result<Self> {
        mountinfo::read().map(Self)
    }

    #[cfg(test)]
    pub(crate) fn parse(text: &str) -> Self {
        Self(mountinfo::parse(text.as_bytes()))
    }

    /// What is mounted at exactly this path, uppermost.
    pub(crate) fn at(&self, path: &Path) -> Option<&Mount> {
        self.stack(path).find(|mount| !self.stack(path).any(|other| other.parent == mount.id))
    }

    /// All that is mounted at exactly this path.
    pub(crate) fn stack(&self, path: &Path) -> impl Iterator<Item = &Mount> {
        self.0.iter().filter(move |mount| mount.point == path)
    }

    /// The mount that a path lies in.
    pub(crate) fn holding(&self, path: &Path) -> Option<&Mount> {
        path.ancestors().find_map(|path| self.at(path))
    }

    /// Where the whole of a dataset is mounted.
    pub(crate) fn of(&self, dataset: &str) -> Option<&Mount> {
        self.0.iter().find(|mount| self::dataset(mount) == Some(dataset) && mount.tree == Path::new("/"))
    }

    /// The mounts below a path that are snapshots of the dataset at it, which ZFS mounts when they are looked at.
    fn snapshots_below(&self, root: &Path) -> impl Iterator<Item = &Mount> {
        let control = root.join(".zfs");
        self.0.iter().filter(move |mount| {
            mount.point.starts_with(&control) && dataset(mount).is_some_and(|dataset| dataset.contains('@'))
        })
    }

    /// A mount that uses the filesystem at `root` besides the one at `root`: one of it elsewhere, or one inside it.
    pub(crate) fn using(&self, root: &Path) -> Option<&Mount> {
        let own = self.at(root);
        let snapshots: Vec<&Path> = self.snapshots_below(root).map(|mount| mount.point.as_path()).collect();
        self.0.iter().find(|mount| {
            let inside = mount.point.starts_with(root) && mount.point != root;
            let elsewhere = own.is_some_and(|own| mount.device == own.device) && mount.point != root;
            (inside && !snapshots.contains(&mount.point.as_path())) || elsewhere
        })
    }
}

/// A filesystem that is mounted nowhere yet.
pub(crate) struct Detached(OwnedFd);

impl Detached {
    /// Opens its uppermost directory.
    pub(crate) fn open(&self) -> Result<OwnedFd> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        rustix::fs::openat(&self.0, ".", flags, Mode::empty()).map_err(|errno| failure::system("open a version", errno))
    }
}

/// Makes a dataset or snapshot ready to be put in place, with the same options as another mount.
pub(crate) fn detached(dataset: &str, like: Option<&Mount>) -> Result<Detached> {
    let what = |errno: Errno| match errno {
        Errno::ACCESS => Error::new(ErrorKind::Unsupported, format!("the key of the dataset {dataset} is not loaded"))
            .fix("run `zfs load-key` for it"),
        errno => failure::system(format_args!("mount the dataset {dataset}"), errno),
    };
    let open = || {
        let context = rustix::mount::fsopen("zfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
        rustix::mount::fsconfig_set_string(context.as_fd(), "source", dataset)?;
        rustix::mount::fsconfig_create(context.as_fd())?;
        let attributes = like.map_or(MountAttrFlags::empty(), attributes);
        rustix::mount::fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
    };
    open().map(Detached).map_err(what)
}

/// Mounts a dataset at an empty directory.
pub(crate) fn attach(filesystem: &Detached, at: &Path) -> Result<()> {
    move_to(filesystem, at, MoveMountFlags::empty())
        .map_err(|errno| failure::system(format_args!("mount at {}", at.display()), errno))
}

fn move_to(filesystem: &Detached, at: &Path, flags: MoveMountFlags) -> Result<(), Errno> {
    let flags = flags | MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    rustix::mount::move_mount(filesystem.0.as_fd(), "", CWD, at, flags)
}

/// Whether nobody uses what is mounted at a path, as far as the kernel can tell at this moment. Snapshots that ZFS has
/// mounted in it do not count.
pub(crate) fn is_idle(at: &Path) -> Result<bool> {
    for mount in Mounts::read()?.snapshots_below(at) {
        // Whoever reads in one goes on reading.
        let _ = rustix::mount::unmount(&mount.point, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
    }
    // The first time this only marks a mount that is not in use; looking at it takes an earlier mark away.
    let _ = fs::metadata(at);
    match rustix::mount::unmount(at, UnmountFlags::EXPIRE | UnmountFlags::NOFOLLOW) {
        Err(Errno::AGAIN) => Ok(true),
        Err(Errno::BUSY) => Ok(false),
        // It was marked before and not used since: now it is gone, which the caller wanted next.
        Ok(()) => Ok(true),
        Err(errno) => Err(failure::system(format_args!("look at the mount at {}", at.display()), errno)),
    }
}

/// Puts a filesystem in the place of the one that is mounted at a path. At no moment is nothing there, where the kernel
/// can do that (Linux 6.5); else there is for an instant.
pub(crate) fn replace(filesystem: &Detached, at: &Path) -> Result<()> {
    let failed = |errno| failure::system(format_args!("mount at {}", at.display()), errno);
    if Mounts::read()?.at(at).is_none() {
        return attach(filesystem, at);
    }
    match move_to(filesystem, at, MoveMountFlags::MOVE_MOUNT_BENEATH) {
        Ok(()) => unmount(at),
        Err(Errno::INVAL | Errno::NOSYS) => {
            unmount(at)?;
            move_to(filesystem, at, MoveMountFlags::empty()).map_err(failed)
        }
        Err(errno) => Err(failed(errno)),
    }
}

/// Takes the uppermost mount at a path away. Who still uses it goes on using it.
pub(crate) fn unmount(at: &Path) -> Result<()> {
    rustix::mount::unmount(at, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW)
        .map_err(|errno| failure::system(format_args!("unmount {}", at.display()), errno))
}

/// Some of the processes that use the filesystem at a path: by their directories, open files and mappings.
pub(crate) fn users(at: &Path) -> Vec<String> {
    const SHOWN: usize = 3;
    use std::os::unix::fs::MetadataExt;
    let Ok(device) = fs::metadata(at).map(|about| about.dev()) else { return Vec::new() };
    let on_it = |path: &Path| fs::metadata(path).is_ok_and(|about| about.dev() == device);
    let mut found = Vec::new();
    for process in fs::read_dir("/proc").into_iter().flatten().flatten() {
        let path = process.path();
        if !process.file_name().as_bytes().iter().all(u8::is_ascii_digit) {
            continue;
        }
        let files = ["fd", "map_files"].iter().flat_map(|kind| fs::read_dir(path.join(kind)).into_iter().flatten());
        if on_it(&path.join("cwd")) || on_it(&path.join("root")) || files.flatten().any(|file| on_it(&file.path())) {
            let name = fs::read_to_string(path.join("comm")).unwrap_or_default();
            found.push(format!("{} ({})", process.file_name().display(), name.trim()));
            if found.len() == SHOWN {
                break;
            }
        }
    }
    found
}

/// Makes a directory to mount at. One that is there must be empty.
pub(crate) fn make_point(at: &Path) -> Result<()> {
    match fs::create_dir(at) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            let empty = fs::symlink_metadata(at).is_ok_and(|about| about.is_dir())
                && fs::read_dir(at).is_ok_and(|mut entries| entries.next().is_none());
            if empty {
                return Ok(());
            }
            let message = format!("{} is in the way: it is no dataset and not an empty directory", at.display());
            Err(Error::new(ErrorKind::AlreadyExists, message).fix("move it away"))
        }
        Err(error) => Err(Error::io(format_args!("create the directory {}", at.display()), error)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
20 1 254:0 / / rw - ext4 /dev/vda rw
40 20 0:35 / /tank rw,relatime shared:1 - zfs tank rw,xattr,noacl
41 40 0:36 / /tank/boxes rw,relatime shared:2 master:3 - zfs tank/boxes rw,xattr,noacl
42 41 0:37 / /tank/boxes/one rw,nosuid,noatime - zfs tank/boxes/one rw,xattr,noacl
43 42 0:38 / /tank/boxes/one/.zfs/snapshot/a rw,relatime - zfs tank/boxes/one@a ro,xattr
44 41 0:40 / /tank/boxes/two rw - zfs tank/boxes/two rw
45 20 0:40 /usr /mnt/my\\040usr rw - zfs tank/boxes/two rw
46 41 0:41 / /tank/boxes/three rw - zfs tank/boxes/three rw
47 46 0:5 / /tank/boxes/three/proc rw - proc proc rw
";

    #[test]
    fn datasets_are_told_by_their_mounts() {
        let mounts = Mounts::parse(MOUNTS);
        let at = |path: &str| mounts.at(Path::new(path)).and_then(dataset);
        assert_eq!(at("/tank/boxes/one"), Some("tank/boxes/one"));
        assert_eq!(at("/"), None, "another kind of filesystem");
        assert_eq!(at("/tank/boxes/one/etc"), None);
        let holding = mounts.holding(Path::new("/tank/boxes/new/x")).unwrap();
        assert_eq!(dataset(holding), Some("tank/boxes"));
        assert_eq!(mounts.of("tank/boxes/one@a").unwrap().point, Path::new("/tank/boxes/one/.zfs/snapshot/a"));
        assert_eq!(mounts.of("tank/boxes/four"), None);
        let attributes = attributes(mounts.at(Path::new("/tank/boxes/one")).unwrap());
        assert_eq!(attributes, MountAttrFlags::MOUNT_ATTR_NOSUID | MountAttrFlags::MOUNT_ATTR_NOATIME);
    }

    #[test]
    fn every_way_of_using_a_root_is_found() {
        let mounts = Mounts::parse(MOUNTS);
        let user = |root: &str| mounts.using(Path::new(root)).map(|mount| mount.point.display().to_string());
        assert_eq!(user("/tank/boxes/one"), None, "a snapshot that was looked at is no user");
        assert_eq!(user("/tank/boxes/two").as_deref(), Some("/mnt/my usr"), "a part of it is bound elsewhere");
        assert_eq!(user("/tank/boxes/three").as_deref(), Some("/tank/boxes/three/proc"), "something is mounted in it");
        assert_eq!(user("/tank/boxes/on"), None, "a name that another begins with");
    }

    #[test]
    fn of_two_mounts_at_one_path_the_upper_one_counts() {
        // The one that was put beneath has the higher number, and the other lies on it.
        let text = "20 1 1:1 / / rw - ext4 a rw\n41 50 0:1 / /p rw - zfs old rw\n50 20 0:2 / /p rw - zfs new rw\n";
        let mounts = Mounts::parse(text);
        assert_eq!(mounts.at(Path::new("/p")).and_then(dataset), Some("old"));
        assert_eq!(mounts.stack(Path::new("/p")).count(), 2);
    }
}
