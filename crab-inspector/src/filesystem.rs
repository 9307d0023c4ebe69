//! Whether the files of a sandbox differ from those of its last version, found by looking at them.

use std::path::{Path, PathBuf};

use crab_core::{Change, Evidence, Unknown};
use rustix::time::{ClockId, clock_gettime};

use crate::bpf::Place;
use crate::btrfs::{Lineage, Subvolume};
use crate::folder::Folder;
use crate::net::{Difference, Limits, Stamp, Stop};
use crate::tree::{self, Age, Directory};

/// What a take saw of the files.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Mark {
    /// When it was.
    clock: Clock,
    /// The moment, where later changes are told of.
    pub(crate) moment: Option<Moment>,
    content: Content,
}

/// What was seen of the files themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
enum Content {
    /// How far a subvolume was.
    Generation { uuid: [u8; 16], generation: u64 },
    /// All of it, where it was read.
    Digest(Option<[u8; 32]>),
}

/// A moment from which on changes are told of: the interval that had begun, and what had been counted of others' doings.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Moment {
    pub(crate) epoch: u64,
    pub(crate) outside: u64,
}

impl Mark {
    fn new(moment: Option<Moment>, content: Content) -> Self {
        Self { clock: Clock::now(), moment, content }
    }

    /// The mark of a take at which nothing had been told of since the take that made this one.
    pub(crate) fn still_at(&self, moment: Moment) -> Self {
        Self { clock: Clock::now(), moment: Some(moment), content: self.content }
    }
}

/// A time by the clock that files' times are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Clock {
    now: Stamp,
    /// Nanoseconds that it is ahead of the time since boot: another after it was set.
    ahead: i64,
}

/// A file's time may be so much older than the moment it was set: a clock tick, and more.
const COARSE: i64 = 20_000_000;

impl Clock {
    fn now() -> Self {
        let of = |clock| {
            let time = clock_gettime(clock);
            i128::from(time.tv_sec) * 1_000_000_000 + i128::from(time.tv_nsec)
        };
        let real = of(ClockId::Realtime);
        let past = real - i128::from(COARSE);
        let now = Stamp {
            seconds: i64::try_from(past.div_euclid(1_000_000_000)).unwrap_or(i64::MIN),
            // Below 10^9.
            nanoseconds: past.rem_euclid(1_000_000_000) as u32,
        };
        Self { now, ahead: i64::try_from(real - of(ClockId::Boottime)).unwrap_or(i64::MAX) }
    }

    /// Whether nobody set the clock between the two.
    fn goes_on_to(&self, later: &Self) -> bool {
        self.ahead.abs_diff(later.ahead) < COARSE.unsigned_abs() / 4
    }
}

/// What the files are compared with.
#[derive(Debug)]
pub(crate) enum Base {
    /// A snapshot of the subvolume, and up to which generation it is known to be equal.
    Snapshot { lineage: Lineage, equal_at: u64 },
    /// A copy of the tree, made after a time.
    Tree { old: Directory, made_after: Option<Clock> },
    /// Only what a take saw.
    Mark(Mark),
}

/// The root of a sandbox.
#[derive(Debug)]
pub(crate) enum Root {
    Subvolume(Subvolume),
    Folder(Folder),
    /// Something that cannot be observed, and what it is.
    Other(String),
}

impl Root {
    /// By what the kernel tells of changes to it.
    pub(crate) fn place(&self) -> Place {
        match self {
            Self::Subvolume(subvolume) => subvolume.number().map_or(Place::Nowhere, Place::Subvolume),
            Self::Folder(folder) => folder.place,
            Self::Other(_) => Place::Nowhere,
        }
    }

    /// The device number that its files bear, where that is one.
    pub(crate) fn device(&self) -> Option<u64> {
        match self {
            Self::Subvolume(subvolume) => subvolume.device().ok(),
            Self::Folder(folder) if folder.is_overlay() => None,
            Self::Folder(folder) => folder.top.stat().ok().map(|stat| stat.st_dev),
            Self::Other(_) => None,
        }
    }

    /// A name for what it is, another for each root.
    pub(crate) fn identity(&self) -> String {
        match self {
            Self::Subvolume(subvolume) => subvolume.info().map(|info| format!("{:?}", info.uuid)).unwrap_or_default(),
            Self::Folder(folder) => {
                folder.top.stat().map(|stat| format!("{}:{}", stat.st_dev, stat.st_ino)).unwrap_or_default()
            }
            Self::Other(_) => String::new(),
        }
    }

    /// The device number of its topmost directory.
    pub(crate) fn top_device(&self) -> Option<u64> {
        match self {
            Self::Folder(folder) => folder.top.stat().ok().map(|stat| stat.st_dev),
            other => other.device(),
        }
    }

    pub(crate) fn open(path: &Path) -> std::io::Result<Self> {
        if let Some(subvolume) = Subvolume::open(path)? {
            return Ok(Self::Subvolume(subvolume));
        }
        Ok(match Folder::open(path)? {
            Ok(folder) => Self::Folder(folder),
            Err(why) => Self::Other(why),
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
    /// Where they were found equal: all of them at one moment, and not each at its own.
    pub(crate) at_rest: bool,
}

impl Look {
    fn at(mark: Mark) -> Self {
        Self { change: Change::Unknown(Unknown::NoBase), mark: Some(mark), difference: None, at_rest: false }
    }

    fn unknown(reason: Unknown) -> Self {
        Self { change: Change::Unknown(reason), mark: None, difference: None, at_rest: false }
    }

    fn failed(what: &str, error: &std::io::Error) -> Self {
        Self::unknown(Unknown::Failed(format!("{what}: {error}")))
    }

    fn equal(&mut self) {
        self.change = Change::Unchanged;
        self.difference = Some(Difference::default());
    }

    /// Nobody knows whether what was found equal was so at one moment.
    pub(crate) fn give_up(&mut self) {
        self.change = changed("files are written while they are compared");
        self.difference = None;
        // A digest of files that were written meanwhile is none of any state.
        self.mark.take_if(|mark| matches!(mark.content, Content::Digest(_)));
    }
}

/// What is known besides the files themselves.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Known {
    /// The moment of the look, where changes after it will be told of.
    pub(crate) moment: Option<Moment>,
    /// Files may have been changed by storing to memory, which leaves no time.
    pub(crate) mapped: bool,
    /// The sandbox stands still until the look is over.
    pub(crate) frozen: bool,
    pub(crate) limits: Limits,
}

/// The base that a version's files make, given where they can be read and what the take before it saw.
pub(crate) fn base(root: &Root, tree: Option<&PathBuf>, mark: Option<Mark>) -> Option<Base> {
    match (root, tree) {
        (Root::Subvolume(live), Some(path)) => {
            let lineage =
                Subvolume::open(path).ok().flatten().and_then(|snapshot| Lineage::of(live, snapshot).ok().flatten());
            if let Some(lineage) = lineage {
                let equal_at = lineage.untouched;
                return Some(Base::Snapshot { lineage, equal_at });
            }
        }
        (Root::Folder(live), Some(path)) => {
            if let Some(old) = Directory::open(path).ok().filter(|old| apart(&live.top, old)) {
                let made_after = mark.map(|mark| mark.clock);
                return Some(Base::Tree { old, made_after });
            }
        }
        _ => {}
    }
    mark.map(Base::Mark)
}

/// Whether two are not the same directory.
fn apart(a: &Directory, b: &Directory) -> bool {
    let (Ok(a), Ok(b)) = (a.stat(), b.stat()) else {
        return false;
    };
    (a.st_dev, a.st_ino) != (b.st_dev, b.st_ino)
}

/// So many looks are taken at files that are written meanwhile.
pub(crate) const TRIES: usize = 4;

/// Looks at the files where nothing tells of changes: until those of a subvolume were at rest.
pub(crate) fn look_alone(root: &Root, mut base: Option<&mut Base>, known: Known) -> Look {
    let mut tries = TRIES;
    loop {
        let mut look = look(root, base.as_deref_mut(), known);
        if look.change != Change::Unchanged || look.at_rest || !matches!(root, Root::Subvolume(_)) {
            return look;
        }
        tries -= 1;
        if tries == 0 {
            look.give_up();
            return look;
        }
    }
}

/// Looks at the files once.
pub(crate) fn look(root: &Root, base: Option<&mut Base>, known: Known) -> Look {
    match root {
        Root::Subvolume(live) => look_at_subvolume(live, base, known),
        Root::Folder(live) => look_at_folder(live, base.as_deref(), known),
        Root::Other(why) => Look::unknown(Unknown::Unobservable(why.clone())),
    }
}

fn look_at_folder(live: &Folder, base: Option<&Base>, known: Known) -> Look {
    let mark = Mark::new(known.moment, Content::Digest(None));
    let clock = mark.clock;
    let mut look = Look::at(mark);
    match base {
        Some(Base::Tree { old, made_after }) => {
            let age = Age {
                after: made_after.map_or(Stamp { seconds: i64::MAX, nanoseconds: 0 }, |clock| clock.now),
                times_tell: !known.mapped && made_after.is_some_and(|then| then.goes_on_to(&clock)),
            };
            match tree::compare(&live.top, old, age, known.limits) {
                Ok((difference, _)) if difference.is_empty() => look.equal(),
                Ok((difference, examples)) => {
                    look.change = Change::Changed(Evidence::Files { count: difference.count, examples });
                    look.difference = Some(difference);
                }
                Err(Stop::TooMuch(what)) => look.change = changed(what),
                Err(Stop::Failed(error)) => look.change = cannot_compare(&error),
            }
        }
        Some(Base::Mark(Mark { moment: Some(_), .. })) => {
            look.change = changed("files may have been written, and there is no copy to compare with");
        }
        _ if known.moment.is_none() => read_whole(live, base, known.limits, &mut look),
        _ => {}
    }
    look
}

/// Where nothing tells of changes and there is no copy, all of it is remembered by a digest.
fn read_whole(live: &Folder, base: Option<&Base>, limits: Limits, look: &mut Look) {
    let was = match base {
        Some(Base::Mark(Mark { content: Content::Digest(was), .. })) => *was,
        _ => None,
    };
    match live.digest(limits) {
        Ok(now) => {
            if let Some(mark) = &mut look.mark {
                mark.content = Content::Digest(Some(now));
            }
            match was {
                Some(was) if was == now => look.equal(),
                Some(_) => look.change = changed("files differ"),
                None => {}
            }
        }
        Err(error) => {
            let why = format!("changes to the root's file system do not show, and {error}");
            look.change = Change::Unknown(Unknown::Unobservable(why));
        }
    }
}

fn cannot_compare(error: &std::io::Error) -> Change {
    Change::Unknown(Unknown::Failed(format!("cannot compare the files: {error}")))
}

fn look_at_subvolume(live: &Subvolume, base: Option<&mut Base>, known: Known) -> Look {
    let info = match live.settled(known.frozen) {
        Ok(info) => info,
        Err(error) => return Look::failed("cannot read the subvolume's generation", &error),
    };
    let seen = Content::Generation { uuid: info.uuid, generation: info.generation };
    let mut look = Look::at(Mark::new(known.moment, seen));
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
            look.at_rest = mark.content == seen;
            look.change = if look.at_rest {
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
        // Only folders have one.
        Base::Tree { .. } => return look,
    };
    if info.generation == *equal_at {
        look.equal();
        look.at_rest = true;
        return look;
    }
    match lineage.compare(live, known.limits) {
        Ok(difference) if difference.is_empty() => {
            look.equal();
            // Was it written meanwhile, then this generation never comes again.
            *equal_at = info.generation;
        }
        Ok(difference) => {
            look.change = Change::Changed(describe(live, &difference));
            look.difference = Some(difference);
        }
        Err(Stop::TooMuch(what)) => look.change = changed(what),
        Err(Stop::Failed(error)) => look.change = cannot_compare(&error),
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
