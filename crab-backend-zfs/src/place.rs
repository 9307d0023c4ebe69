//! Where a sandbox's root stands, and which dataset that is.
//!
//! A root that is mounted is the dataset that is mounted there. One that is not, or does not exist yet, is the dataset of
//! its name inside the one that its parent directory is: `/tank/boxes/one` is `tank/boxes/one` where `tank/boxes` is
//! mounted at `/tank/boxes`.

use std::path::{Path, PathBuf};

use crab_core::{Error, ErrorKind, Result};

use crate::mounts::{self, Mounts};

/// A sandbox's root.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Free of symbolic links.
    pub(crate) path: PathBuf,
    /// The dataset, which may not exist yet.
    pub(crate) dataset: String,
    /// It is mounted at the path, as this process sees it.
    pub(crate) mounted: bool,
}

impl Place {
    pub(crate) fn of(root: &Path) -> Result<Self> {
        let bad = |why: &str| Error::new(ErrorKind::InvalidInput, format!("the root {} {why}", root.display()));
        if !root.is_absolute() {
            return Err(bad("is not an absolute path"));
        }
        let (Some(parent), Some(name)) = (root.parent(), root.file_name()) else {
            return Err(bad("does not end in a file name"));
        };
        let parent =
            parent.canonicalize().map_err(|error| Error::io(format_args!("resolve {}", parent.display()), error))?;
        let path = parent.join(name);
        if path.is_symlink() {
            return Err(bad("is a symbolic link").fix("name what it points to"));
        }
        Self::among(&Mounts::read()?, path)
    }

    fn among(mounts: &Mounts, path: PathBuf) -> Result<Self> {
        let bad = |why: &str| Error::new(ErrorKind::InvalidInput, format!("the root {} {why}", path.display()));
        const FIX: &str = "make each root a ZFS dataset of its own, inside the dataset that is its parent directory";
        if let Some(mount) = mounts.at(&path) {
            return match mounts::dataset(mount) {
                Some(dataset) if !dataset.contains('@') && mount.tree == Path::new("/") => {
                    let dataset = dataset.to_owned();
                    Ok(Self { path, dataset, mounted: true })
                }
                _ => Err(bad("is a mount of something else than a ZFS dataset").fix(FIX)),
            };
        }
        let parent = path.parent().and_then(|parent| mounts.at(parent));
        let dataset = parent.filter(|mount| mount.tree == Path::new("/")).and_then(|mount| mounts::dataset(mount));
        match (dataset, path.file_name().and_then(|name| name.to_str())) {
            (Some(dataset), Some(name)) if !dataset.contains('@') && is_name(name) => {
                let dataset = format!("{dataset}/{name}");
                Ok(Self { path, dataset, mounted: false })
            }
            (Some(_), _) => Err(bad("has a name that no dataset can have")),
            (None, _) if mounts.holding(&path).is_some_and(|mount| mounts::dataset(mount).is_some()) => {
                Err(bad("is not a ZFS dataset, only a directory in one").fix(FIX))
            }
            (None, _) => Err(bad("is not a ZFS dataset").fix(FIX)),
        }
    }
}

/// Whether ZFS can have a dataset of this name.
fn is_name(name: &str) -> bool {
    !name.is_empty() && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.: ".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &str = "\
20 1 254:0 / / rw - ext4 /dev/vda rw
41 20 0:36 / /srv/boxes rw - zfs tank/boxes rw
42 41 0:37 / /srv/boxes/one rw - zfs tank/elsewhere/first rw
43 41 0:38 /usr /srv/boxes/part rw - zfs tank/other rw
44 41 0:39 / /srv/boxes/tmp rw - tmpfs tmp rw
45 20 0:40 / /snap rw - zfs tank/boxes@a rw
";

    fn place(path: &str) -> Result<Place> {
        Place::among(&Mounts::parse(MOUNTS), path.into())
    }

    #[test]
    fn a_root_is_what_is_mounted_there_or_would_be() {
        let one = place("/srv/boxes/one").unwrap();
        assert_eq!((one.dataset.as_str(), one.mounted), ("tank/elsewhere/first", true));
        let new = place("/srv/boxes/new").unwrap();
        assert_eq!((new.dataset.as_str(), new.mounted), ("tank/boxes/new", false));
    }

    #[test]
    fn what_cannot_be_a_root_is_refused_with_the_reason() {
        for (path, says) in [
            ("/srv/boxes/part", "something else"),
            ("/srv/boxes/tmp", "something else"),
            ("/srv/boxes/plain/new", "only a directory"),
            ("/srv/boxes/tmp/new", "not a ZFS dataset"),
            ("/home/new", "not a ZFS dataset"),
            ("/snap/new", "that no dataset can have"),
            ("/srv/boxes/a@b", "that no dataset can have"),
        ] {
            let error = place(path).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::InvalidInput, "{path}");
            assert!(error.to_string().contains(says), "{path}: {error}");
        }
    }
}
