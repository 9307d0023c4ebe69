//! Whether a mount uses a sandbox's root.

use std::os::fd::AsFd;
use std::path::Path;

use crab_backend_files::mountinfo::{self, Mount};
use crab_core::{Error, ErrorKind, Result};
use rustix::fs::{AtFlags, StatxFlags};

use crate::failure;

/// Refuses a root that is mounted elsewhere, or on or in which something is mounted. Only the mounts that this process
/// sees are known. Others live in mount namespaces of their own, which end with their tasks; where one outlives them,
/// it keeps seeing the replaced tree and does no harm to the restored one.
///
/// `root` is free of symbolic links, and `parent` is its parent directory.
pub(crate) fn refuse_mounts(root: &Path, parent: impl AsFd) -> Result<()> {
    let mounts = mountinfo::read()?;
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

#[cfg(test)]
mod tests {
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
        let mounts = mountinfo::parse(MOUNTS.as_bytes());
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
}
