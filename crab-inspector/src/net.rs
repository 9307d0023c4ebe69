//! What differs between two states of a filesystem, given a set of inodes that may. Pure: it reads through [`Pair`].
//!
//! The question is what a restore of the old state would bring back: names, kinds, content, modes, owners, extended
//! attributes, link targets and counts, times of modification. How the new state came about does not matter, so a file
//! that was made and removed, renamed and renamed back, or rewritten to what it was is no difference.
//!
//! **Times of modification.** A file whose bytes were written anew and are equal has a new time, which is no
//! difference; a file whose time alone was set is one. The two are told apart by what lies on disk: a write leaves an
//! extent that is younger than the old state. Where that is so, and the new time lies between the old state and the
//! file's last change of any kind, the time is what a write would have left. All else is a difference. A directory's
//! entries leave no such trace once they are removed again, so a directory's new time in that window is taken for that
//! of a made and removed entry: a `touch` of a directory and nothing else is not seen. Access times never count.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::io;
use std::time::Duration;

/// What kind of file an inode is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    File,
    Directory,
    Link,
    /// A device, fifo or socket.
    Special,
}

impl Kind {
    pub(crate) fn of_mode(mode: u32) -> Self {
        match mode & 0o170_000 {
            0o100_000 => Self::File,
            0o040_000 => Self::Directory,
            0o120_000 => Self::Link,
            _ => Self::Special,
        }
    }
}

/// A time as a filesystem stores it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, serde::Serialize, serde::Deserialize)]
pub(crate) struct Stamp {
    pub(crate) seconds: i64,
    pub(crate) nanoseconds: u32,
}

impl Stamp {
    /// The time so long after the epoch.
    pub(crate) fn since_epoch(time: Duration) -> Self {
        Self { seconds: i64::try_from(time.as_secs()).unwrap_or(i64::MAX), nanoseconds: time.subsec_nanos() }
    }
}

/// The facts of one inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Inode {
    /// The transaction in which the inode was made: number and this name it for ever.
    pub(crate) born: u64,
    /// The transaction that last changed it.
    pub(crate) touched: u64,
    pub(crate) size: u64,
    pub(crate) links: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) mode: u32,
    pub(crate) kind: Kind,
    pub(crate) device: u64,
    pub(crate) flags: u64,
    pub(crate) modified: Stamp,
    pub(crate) changed: Stamp,
    pub(crate) made: Stamp,
}

/// Where a name of a directory leads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    pub(crate) inode: u64,
    /// To another filesystem tree, whose content is not seen here.
    pub(crate) foreign: bool,
}

/// A run of a file's bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Extent {
    /// The transaction that wrote it.
    pub(crate) written: u64,
    /// Which bytes it stands for: equal places hold equal bytes.
    pub(crate) place: Vec<u8>,
}

/// What an inode holds.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Body {
    pub(crate) entries: BTreeMap<Vec<u8>, Entry>,
    pub(crate) attributes: BTreeMap<Vec<u8>, Vec<u8>>,
    pub(crate) extents: BTreeMap<u64, Extent>,
}

/// One of the two states.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Old,
    New,
}

/// Two states of one filesystem in which an inode that is in both keeps its number.
pub(crate) trait Pair {
    /// An inode's facts, `None` where this side does not have it.
    fn inode(&mut self, side: Side, number: u64) -> io::Result<Option<Inode>>;

    /// What an inode holds. `None`: too much to hold in memory.
    fn body(&mut self, side: Side, number: u64) -> io::Result<Option<Body>>;

    /// Whether the bytes of a file or link on the new side equal those of one on the old side. Both have this size.
    fn same_bytes(&mut self, new: u64, old: u64, size: u64) -> io::Result<bool>;
}

/// How much a comparison may cost. What is beyond counts as different.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Limits {
    /// Inodes that are looked at.
    pub(crate) inodes: usize,
    /// Bytes of content that are read from each side.
    pub(crate) bytes: u64,
}

impl Limits {
    /// What a comparison may cost where nobody says otherwise.
    pub(crate) const DEFAULT: Self = Self { inodes: 4096, bytes: 32 << 20 };
}

/// The line between the two states.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Since {
    /// Transactions after this one are on the new side alone.
    pub(crate) transaction: u64,
    /// The old state was taken then, give or take the coarseness of file times.
    pub(crate) time: Stamp,
}

/// What differs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Difference {
    /// Inodes of the old state that differ, are gone from a name, or stand behind another name.
    pub(crate) old_inodes: BTreeSet<u64>,
    /// The same for the new state, for naming them.
    pub(crate) new_inodes: BTreeSet<u64>,
    /// Names that came or went, with the directory they are in.
    pub(crate) names: Vec<(u64, Vec<u8>)>,
    /// How many files or names differ.
    pub(crate) count: u64,
}

impl Difference {
    pub(crate) fn is_empty(&self) -> bool {
        self.count == 0
    }
}

/// Why a comparison gave up.
#[derive(Debug)]
pub(crate) enum Stop {
    /// There was more to look at than the limits allow.
    TooMuch(&'static str),
    Failed(io::Error),
}

impl From<io::Error> for Stop {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

/// The names that are kept for the report.
const KEPT_NAMES: usize = 8;

struct Comparison<'a, P> {
    pair: &'a mut P,
    since: Since,
    left: Limits,
    found: Difference,
    /// Pairs of different inodes that stand behind the same name: new, old.
    replaced: VecDeque<(u64, u64)>,
}

/// Compares the two states, given every inode of the new state that may differ. A directory in which a name came, went
/// or changed must be among them.
pub(crate) fn compare<P: Pair>(
    pair: &mut P,
    since: Since,
    candidates: &[u64],
    limits: Limits,
) -> Result<Difference, Stop> {
    if candidates.len() > limits.inodes {
        return Err(Stop::TooMuch("many files were touched"));
    }
    let mut comparison =
        Comparison { pair, since, left: limits, found: Difference::default(), replaced: VecDeque::new() };
    for &number in candidates {
        comparison.candidate(number)?;
    }
    while let Some((new, old)) = comparison.replaced.pop_front() {
        comparison.replacement(new, old)?;
    }
    Ok(comparison.found)
}

impl<P: Pair> Comparison<'_, P> {
    fn spend(&mut self) -> Result<(), Stop> {
        self.left.inodes = self.left.inodes.checked_sub(1).ok_or(Stop::TooMuch("many files were replaced"))?;
        Ok(())
    }

    fn differs(&mut self, new: u64, old: u64) {
        self.found.old_inodes.insert(old);
        if self.found.new_inodes.insert(new) {
            self.found.count += 1;
        }
    }

    /// An inode that both sides may have.
    fn candidate(&mut self, number: u64) -> Result<(), Stop> {
        self.spend()?;
        let Some(new) = self.pair.inode(Side::New, number)? else {
            // Gone: the directory that named it is a candidate of its own.
            return Ok(());
        };
        let Some(old) = self.pair.inode(Side::Old, number)? else {
            // Made since: the directory that names it is a candidate; without a name it is nobody's file.
            return Ok(());
        };
        if new.born != old.born {
            // The number was given out again.
            self.differs(number, number);
            return Ok(());
        }
        if new.links == 0 && old.links == 0 {
            return Ok(());
        }
        if !same_facts(&new, &old) {
            self.differs(number, number);
            // The names below a directory are still of interest.
            if new.kind != Kind::Directory {
                return Ok(());
            }
        }
        let bodies = (self.pair.body(Side::New, number)?, self.pair.body(Side::Old, number)?);
        let (Some(new_body), Some(old_body)) = bodies else {
            self.differs(number, number);
            return Ok(());
        };
        if new_body.attributes != old_body.attributes {
            self.differs(number, number);
        }
        let same = match new.kind {
            Kind::Directory => {
                self.entries(number, &new_body.entries, &old_body.entries);
                new.modified == old.modified || self.left_by_a_write(&new)
            }
            Kind::File | Kind::Link => {
                let rewritten = new_body.extents.values().any(|extent| extent.written > self.since.transaction);
                (new.modified == old.modified || rewritten && self.left_by_a_write(&new))
                    && self.same_content((number, &new, &new_body), (number, &old_body))?
            }
            Kind::Special => new.modified == old.modified,
        };
        if !same {
            self.differs(number, number);
        }
        Ok(())
    }

    /// Two inodes that stand behind one name, before and now.
    fn replacement(&mut self, new_number: u64, old_number: u64) -> Result<(), Stop> {
        self.spend()?;
        let inodes = (self.pair.inode(Side::New, new_number)?, self.pair.inode(Side::Old, old_number)?);
        let (Some(new), Some(old)) = inodes else {
            self.differs(new_number, old_number);
            return Ok(());
        };
        // Several names of one inode would have to lead to one inode again: too rare to follow.
        let linked = new.kind != Kind::Directory && (new.links != 1 || old.links != 1);
        if linked || !same_facts(&new, &old) {
            self.differs(new_number, old_number);
            return Ok(());
        }
        let bodies = (self.pair.body(Side::New, new_number)?, self.pair.body(Side::Old, old_number)?);
        let (Some(new_body), Some(old_body)) = bodies else {
            self.differs(new_number, old_number);
            return Ok(());
        };
        // Not set by hand to something before the file was made or after its last change.
        let plausible = self.left_by_a_write(&new) && new.modified >= new.made;
        let same = new_body.attributes == old_body.attributes
            && (new.modified == old.modified || plausible)
            && match new.kind {
                Kind::Directory => {
                    self.entries(new_number, &new_body.entries, &old_body.entries);
                    true
                }
                Kind::File | Kind::Link => self.same_content((new_number, &new, &new_body), (old_number, &old_body))?,
                Kind::Special => true,
            };
        if !same {
            self.differs(new_number, old_number);
        }
        Ok(())
    }

    fn left_by_a_write(&self, new: &Inode) -> bool {
        self.since.time <= new.modified && new.modified <= new.changed
    }

    fn entries(&mut self, directory: u64, new: &BTreeMap<Vec<u8>, Entry>, old: &BTreeMap<Vec<u8>, Entry>) {
        let named = |found: &mut Difference, name: &Vec<u8>| {
            found.count += 1;
            if found.names.len() < KEPT_NAMES {
                found.names.push((directory, name.clone()));
            }
        };
        for (name, entry) in old {
            match new.get(name) {
                None => {
                    self.found.old_inodes.insert(entry.inode);
                    named(&mut self.found, name);
                }
                Some(now) if now == entry => {}
                Some(now) if now.foreign || entry.foreign => named(&mut self.found, name),
                Some(now) => self.replaced.push_back((now.inode, entry.inode)),
            }
        }
        for name in new.keys().filter(|name| !old.contains_key(*name)) {
            named(&mut self.found, name);
        }
    }

    fn same_content(
        &mut self,
        (new_number, new, new_body): (u64, &Inode, &Body),
        (old_number, old_body): (u64, &Body),
    ) -> Result<bool, Stop> {
        if same_places(&new_body.extents, &old_body.extents) {
            return Ok(true);
        }
        let Some(left) = self.left.bytes.checked_sub(new.size) else {
            // More than may be read: it counts as different.
            return Ok(false);
        };
        self.left.bytes = left;
        Ok(self.pair.same_bytes(new_number, old_number, new.size)?)
    }
}

fn same_facts(new: &Inode, old: &Inode) -> bool {
    let size = new.kind == Kind::Directory || new.size == old.size;
    size && new.mode == old.mode
        && new.uid == old.uid
        && new.gid == old.gid
        && new.device == old.device
        && new.flags == old.flags
        // A directory has one link whatever it holds.
        && new.links == old.links
}

fn same_places(new: &BTreeMap<u64, Extent>, old: &BTreeMap<u64, Extent>) -> bool {
    new.len() == old.len() && new.iter().zip(old).all(|((at, a), (was_at, b))| at == was_at && a.place == b.place)
}

#[cfg(test)]
#[path = "net_tests.rs"]
mod tests;
