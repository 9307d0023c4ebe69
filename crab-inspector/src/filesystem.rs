//! Whether the files of a sandbox differ from those of its last version, without events.

use std::path::{Path, PathBuf};

use crab_core::{Change, Evidence, Unknown};

use crate::btrfs::{self, Lineage, Subvolume};
use crate::net::{Difference, Limits, Stop};

/// What a take saw of the files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Mark {
    uuid: [u8; 16],
    generation: u64,
}

/// What the files are compared with.
#[derive(Debug)]
pub(crate) enum Base {
    /// A snapshot of the subvolume, and up to which generation it is known to be equal.
    Snapshot { lineage: Lineage, equal_at: u64 },
    /// Only what a take saw.
    Mark(Mark),
}

/// The root of a sandbox.
#[derive(Debug)]
pub(crate) enum Root {
    Subvolume(Subvolume),
    /// Something that cannot be compared, and what it is.
    Other(String),
}

impl Root {
    /// The number of the subvolume.
    pub(crate) fn number(&self) -> Option<u64> {
        match self {
            Self::Subvolume(subvolume) => subvolume.number().ok(),
            Self::Other(_) => None,
        }
    }

    /// The device number that its files bear.
    pub(crate) fn device(&self) -> Option<u64> {
        match self {
            Self::Subvolume(subvolume) => subvolume.device().ok(),
            Self::Other(_) => None,
        }
    }

    pub(crate) fn open(path: &Path) -> std::io::Result<Self> {
        Ok(match Subvolume::open(path)? {
            Some(subvolume) => Self::Subvolume(subvolume),
            None => Self::Other(format!(
                "the root is {}, and only a btrfs subvolume can be compared without BPF",
                btrfs::filesystem_name(path)
            )),
        })
    }
}

/// What one look at the files gave.
#[derive(Debug)]
pub(crate) struct Look {
    pub(crate) change: Change,
    pub(crate) mark: Option<Mark>,
    /// All that differs, where it is known.
    pub(crate) difference: Option<Difference>,
}

impl Look {
    fn unknown(reason: Unknown) -> Self {
        Self { change: Change::Unknown(reason), mark: None, difference: None }
    }

    fn failed(what: &str, error: &std::io::Error) -> Self {
        Self::unknown(Unknown::Failed(format!("{what}: {error}")))
    }
}

/// The base that a version's files make, given where they can be read and what the take before it saw.
pub(crate) fn base(root: &Root, tree: Option<&PathBuf>, mark: Option<Mark>) -> Option<Base> {
    if let (Root::Subvolume(live), Some(path)) = (root, tree) {
        let lineage =
            Subvolume::open(path).ok().flatten().and_then(|snapshot| Lineage::of(live, snapshot).ok().flatten());
        if let Some(lineage) = lineage {
            let equal_at = lineage.untouched;
            return Some(Base::Snapshot { lineage, equal_at });
        }
    }
    mark.map(Base::Mark)
}

/// So often a comparison begins anew because the files were written meanwhile.
const ATTEMPTS: usize = 3;

/// Looks at the files.
pub(crate) fn look(root: &Root, base: Option<&mut Base>, limits: Limits) -> Look {
    let live = match root {
        Root::Subvolume(live) => live,
        Root::Other(why) => return Look::unknown(Unknown::Unobservable(why.clone())),
    };
    let mut info = match live.settled() {
        Ok(info) => info,
        Err(error) => return Look::failed("cannot read the subvolume's generation", &error),
    };
    let mut look = Look {
        change: Change::Unknown(Unknown::NoBase),
        mark: Some(Mark { uuid: info.uuid, generation: info.generation }),
        difference: None,
    };
    let Some(base) = base else { return look };
    match live.has_nested() {
        Ok(false) => {}
        Ok(true) => {
            let why = "a subvolume lies inside the root, and snapshots leave it out";
            look.change = Change::Unknown(Unknown::Unobservable(why.to_owned()));
            return look;
        }
        Err(error) => return Look::failed("cannot search the subvolume's tree", &error),
    }
    let (lineage, equal_at) = match base {
        Base::Mark(mark) => {
            look.change = if look.mark.as_ref() == Some(mark) {
                Change::Unchanged
            } else {
                changed("the subvolume was written, and there is no snapshot to compare with")
            };
            return look;
        }
        Base::Snapshot { lineage, .. } if !lineage.is_of(&info) => {
            look.change = changed("the root is another subvolume");
            return look;
        }
        Base::Snapshot { lineage, equal_at } => (lineage, equal_at),
    };
    for _ in 0..ATTEMPTS {
        if info.generation == *equal_at {
            look.change = Change::Unchanged;
            look.difference = Some(Difference::default());
            return look;
        }
        let compared = lineage.compare(live, limits);
        match compared {
            Ok(difference) if !difference.is_empty() => {
                look.change = Change::Changed(describe(live, &difference));
                look.difference = Some(difference);
                return look;
            }
            Ok(_) => {}
            Err(Stop::TooMuch(what)) => {
                look.change = changed(what);
                return look;
            }
            Err(Stop::Failed(error)) => return Look::failed("cannot compare the files", &error),
        }
        // All was equal, each part at its moment. That is a state that was there only if nothing was written meanwhile.
        match live.settled() {
            Ok(now) if now.generation == info.generation => *equal_at = now.generation,
            Ok(now) => info = now,
            Err(error) => return Look::failed("cannot read the subvolume's generation", &error),
        }
    }
    if info.generation == *equal_at {
        look.change = Change::Unchanged;
        look.difference = Some(Difference::default());
    } else {
        look.change = changed("files are written while they are compared");
    }
    look
}

fn changed(why: &str) -> Change {
    Change::Changed(Evidence::Filesystem(why.to_owned()))
}

/// So many paths are named.
const EXAMPLES: usize = 5;

fn describe(live: &Subvolume, difference: &Difference) -> Evidence {
    let names = difference.names.iter().filter_map(|(directory, name)| {
        let mut path = live.path_of(*directory)?;
        if path != b"/" {
            path.push(b'/');
        }
        path.extend_from_slice(name);
        Some(path)
    });
    let inodes = difference.new_inodes.iter().filter_map(|inode| live.path_of(*inode));
    Evidence::Files {
        count: difference.count,
        examples: names.chain(inodes).take(EXAMPLES).map(|path| String::from_utf8_lossy(&path).into_owned()).collect(),
    }
}
