//! Datasets for hosts: make and clone the roots of sandboxes. All calls block on the pool; in async code run them on a
//! thread that may block. [`ZfsBackend::delete_root`](crate::ZfsBackend::delete_root) deletes one.
//!
//! A path names the dataset of its name inside the one that is its parent directory: `/tank/boxes/one` is the dataset
//! `tank/boxes/one` where `tank/boxes` is mounted at `/tank/boxes`.
//!
//! Errors are of the kinds [`NotFound`](ErrorKind::NotFound), [`AlreadyExists`](ErrorKind::AlreadyExists),
//! [`InvalidInput`](ErrorKind::InvalidInput) (no dataset, another pool), [`Unsupported`](ErrorKind::Unsupported) (no ZFS,
//! or no privilege), [`Full`](ErrorKind::Full), [`Busy`](ErrorKind::Busy) and [`Io`](ErrorKind::Io), and nothing was
//! changed where a call fails.

use std::path::Path;

use crab_core::{Error, ErrorKind, Result};

use crate::capture::write_out;
use crate::failure;
use crate::mounts;
use crate::place::Place;
use crate::pool::{Pool, Wanted};
use crate::sys::Map;

/// Makes an empty dataset and mounts it.
///
/// # Errors
/// As the module says.
pub fn create(path: &Path) -> Result<()> {
    let place = new_place(path)?;
    let pool = Pool::of(&place.dataset)?;
    pool.calls()
        .create(&place.dataset, &Map::new())
        .map_err(|failed| failure::zfs(format_args!("create the dataset {}", place.dataset), failed))?;
    mount_new(&pool, &place)
}

/// Makes a writable copy of a dataset, in one pool with it, and mounts it. It shares the blocks of the first one, which
/// can then not be destroyed before it.
///
/// # Errors
/// As the module says.
pub fn clone(from: &Path, path: &Path) -> Result<()> {
    let (image, place) = (Place::of(from)?, new_place(path)?);
    let pool = Pool::of(&image.dataset)?;
    pool.require_here(&place.dataset)?;
    if image.mounted {
        write_out(&image)?;
    }
    let name = place.dataset.replace('/', ":");
    let snapshot = format!("{}@crab-image-{name}", image.dataset);
    let wanted =
        Wanted { dataset: image.dataset.clone(), snapshot: snapshot.clone(), home: String::new(), marks: Map::new() };
    if let Some(why) = pool.capture(&[wanted])?.remove(&snapshot) {
        let message = format!("cannot take a snapshot of {}: {why:?}", image.dataset);
        return Err(Error::new(ErrorKind::Io, message));
    }
    let cloned = pool
        .calls()
        .clone(&place.dataset, &snapshot, &Map::new())
        .map_err(|failed| failure::zfs(format_args!("clone the dataset {}", image.dataset), failed));
    // It goes with the clone.
    let dropped = pool.calls().destroy_snapshots([snapshot.as_str()]);
    cloned?;
    dropped.map_err(|failed| failure::zfs(format_args!("let go of the snapshot {snapshot}"), failed))?;
    mount_new(&pool, &place)
}

fn new_place(path: &Path) -> Result<Place> {
    let place = Place::of(path)?;
    if place.mounted {
        let message = format!("{} is the dataset {} already", path.display(), place.dataset);
        return Err(Error::new(ErrorKind::AlreadyExists, message));
    }
    mounts::make_point(&place.path)?;
    Ok(place)
}

fn mount_new(pool: &Pool, place: &Place) -> Result<()> {
    let mounted = mounts::detached(&place.dataset, None).and_then(|new| mounts::attach(&new, &place.path));
    mounted.inspect_err(|_| {
        if let Err(left) = pool.calls().destroy(&place.dataset) {
            tracing::warn!(dataset = place.dataset, ?left, "a new dataset was left behind");
        }
    })
}
