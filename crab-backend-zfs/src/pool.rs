//! The pool as this backend sees it: what its channel programs ask and do, with plain data on this side.

use std::collections::BTreeMap;
use std::ffi::c_int;

use crab_core::{ArtifactId, Error, ErrorKind, Result, SandboxId};

use crate::failure;
use crate::properties;
use crate::resume::Point;
use crate::sys::{Calls, Failed, Map, Value};

const LOOK: &str = include_str!("programs/look.lua");
const FIND: &str = include_str!("programs/find.lua");
const CAPTURE: &str = include_str!("programs/capture.lua");
const BEGIN: &str = include_str!("programs/begin.lua");
const MARK: &str = include_str!("programs/mark.lua");
const FINISH: &str = include_str!("programs/finish.lua");

/// The tag under which every version is held.
pub(crate) const HOLD: &str = "crab";
/// The marks, as user properties.
pub(crate) const MARK_FORMAT: &str = "crab:format";
pub(crate) const MARK_SANDBOX: &str = "crab:sandbox";
const MARK_ARTIFACT: &str = "crab:artifact";
pub(crate) const MARK_CLONE: &str = "crab:clone";
const MARK_BASE: &str = "crab:base";

/// The longest name that ZFS gives to a dataset or snapshot.
const LONGEST: usize = 255;

/// A pool, and the library to speak to it.
#[derive(Clone, Debug)]
pub(crate) struct Pool {
    calls: Calls,
    name: String,
    /// The guid of the dataset of all versions. Other stores may keep theirs in the same pool.
    base: u64,
}

/// A filesystem or volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Dataset {
    pub(crate) guid: u64,
    /// Not a volume.
    pub(crate) is_filesystem: bool,
    /// The snapshot that it was cloned from.
    pub(crate) origin: Option<String>,
    pub(crate) encrypted: bool,
    /// Which restore made it.
    pub(crate) clone: Option<String>,
    /// The journal of the last restore, on the datasets that have one.
    pub(crate) journal: Option<String>,
    /// What wrote it, on the dataset of all versions.
    pub(crate) format: Option<String>,
    /// When it was made, in seconds since 1970.
    pub(crate) created: u64,
    /// From where what it received a part of can be continued.
    pub(crate) resume: Option<Point>,
    /// Datasets inside it, by their whole names.
    pub(crate) children: Vec<String>,
    /// Its snapshots, by their whole names.
    pub(crate) snapshots: Vec<String>,
    /// What was set on it alone and goes with it.
    pub(crate) carried: Map,
}

/// A snapshot that this backend made.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// Its whole name.
    pub(crate) name: String,
    pub(crate) guid: u64,
    pub(crate) sandbox: SandboxId,
    pub(crate) artifact: ArtifactId,
    /// It was persisted.
    pub(crate) held: bool,
    /// It was removed, and goes when nothing depends on it any more.
    pub(crate) removed: bool,
    /// The number of the transaction that made it.
    pub(crate) made: u64,
    /// Bytes that only it refers to.
    pub(crate) used: u64,
    /// Bytes that it refers to.
    pub(crate) referenced: u64,
    /// When it was taken, in seconds since 1970.
    pub(crate) created: u64,
}

impl Found {
    pub(crate) fn dataset(&self) -> &str {
        dataset_of(&self.name)
    }
}

/// A snapshot to be taken.
#[derive(Clone, Debug)]
pub(crate) struct Wanted {
    pub(crate) dataset: String,
    /// Its whole name.
    pub(crate) snapshot: String,
    /// The dataset of the sandbox's branches, on which the name must be free too.
    pub(crate) home: String,
    pub(crate) marks: Map,
}

/// Why a snapshot was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NotTaken {
    /// A dataset stands inside the root.
    Child(String),
    Errno(c_int),
}

/// What is to be done after a restore or a removal.
#[derive(Debug, Default)]
pub(crate) struct Finish<'a> {
    /// The dataset under which a sandbox's branches and journal stand.
    pub(crate) home: &'a str,
    /// The sandbox's root, to be made the head of its line.
    pub(crate) live: Option<&'a str>,
    /// A branch whose newest files nobody needs.
    pub(crate) discard: Option<&'a str>,
    /// The journal is not needed any more.
    pub(crate) forget: bool,
}

/// The dataset of a snapshot.
pub(crate) fn dataset_of(snapshot: &str) -> &str {
    snapshot.split_once('@').map_or(snapshot, |(dataset, _)| dataset)
}

/// The pool of a dataset.
pub(crate) fn pool_of(dataset: &str) -> &str {
    dataset.split(['/', '@']).next().unwrap_or(dataset)
}

fn names<'a>(names: impl IntoIterator<Item = &'a str>) -> Map {
    names.into_iter().map(|name| (name.to_owned(), Value::Bool(true))).collect()
}

fn keys(value: Option<&Value>) -> Vec<String> {
    value.and_then(Value::map).map(|map| map.keys().cloned().collect()).unwrap_or_default()
}

fn text(map: &Map, name: &str) -> Option<String> {
    map.get(name).and_then(Value::text).map(str::to_owned)
}

fn number(map: &Map, name: &str) -> u64 {
    map.get(name).and_then(Value::number).unwrap_or_default()
}

/// A number for a name, since names in ZFS are short: FNV-1a.
pub(crate) fn number_for(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// The beginning of the names of a sandbox's snapshots. Sandbox and store are in it, since promoting a fork brings
/// snapshots of two sandboxes into one dataset. A collision of two sandboxes and an artifact's name would be refused as
/// taken.
fn prefix(base: u64, sandbox: &SandboxId) -> String {
    format!("crab-{:016x}-", number_for(base.to_le_bytes().into_iter().chain(sandbox.as_str().bytes())))
}

/// A property that ZFS shows as `on` or as 1.
fn is_set(map: &Map, name: &str) -> bool {
    match map.get(name) {
        Some(Value::Bool(set)) => *set,
        Some(Value::Text(text)) => text == "on",
        Some(other) => other.number().is_some_and(|number| number != 0),
        None => false,
    }
}

impl Dataset {
    fn read(map: &Map) -> Self {
        Self {
            guid: number(map, "guid"),
            is_filesystem: map.get("kind").and_then(Value::text) == Some("filesystem"),
            origin: text(map, "origin").filter(|origin| !origin.is_empty()),
            encrypted: map.get("keys").and_then(Value::text).is_some_and(|keys| keys != "none" && keys != "-"),
            clone: text(map, "clone"),
            journal: text(map, "journal"),
            format: text(map, "format"),
            created: number(map, "created"),
            resume: text(map, "resume").as_deref().and_then(Point::of_zfs),
            children: keys(map.get("children")),
            snapshots: keys(map.get("snapshots")),
            carried: map.get("carried").and_then(Value::map).cloned().unwrap_or_default(),
        }
    }
}

impl Found {
    /// `None` where the marks are not ours.
    fn read(base: u64, name: &str, map: &Map) -> Option<Self> {
        let owner = u64::from_str_radix(map.get("base")?.text()?, 16).ok()?;
        let sandbox: SandboxId = map.get("sandbox")?.text()?.parse().ok()?;
        let artifact: ArtifactId = map.get("artifact")?.text()?.parse().ok()?;
        // A received snapshot may carry the marks of the one that was sent.
        let expected = format!("{}{artifact}", prefix(base, &sandbox));
        (owner == base && name.split_once('@')?.1 == expected).then(|| Self {
            name: name.to_owned(),
            guid: number(map, "guid"),
            sandbox,
            artifact,
            held: is_set(map, "held"),
            removed: is_set(map, "removed"),
            made: number(map, "made"),
            used: number(map, "used"),
            referenced: number(map, "referenced"),
            created: number(map, "created"),
        })
    }
}

impl Pool {
    /// The pool that a dataset is in.
    pub(crate) fn of(dataset: &str) -> Result<Self> {
        Ok(Self { calls: Calls::load()?, name: pool_of(dataset).to_owned(), base: 0 })
    }

    /// The same, for the versions of one store.
    pub(crate) fn for_base(self, guid: u64) -> Self {
        Self { base: guid, ..self }
    }

    /// What a snapshot for an artifact needs. Refused where ZFS could not hold its name.
    pub(crate) fn wanted(
        &self,
        dataset: &str,
        home: String,
        sandbox: &SandboxId,
        artifact: &ArtifactId,
    ) -> Result<Wanted> {
        let snapshot = format!("{dataset}@{}{artifact}", prefix(self.base, sandbox));
        if snapshot.len() > LONGEST {
            let message = format!("the name {snapshot} is longer than the {LONGEST} bytes that ZFS allows");
            return Err(Error::new(ErrorKind::InvalidInput, message)
                .fix("use shorter names of datasets, sandboxes or artifacts"));
        }
        let marks = Map::from([
            (MARK_BASE.to_owned(), format!("{:016x}", self.base).into()),
            (MARK_SANDBOX.to_owned(), sandbox.as_str().into()),
            (MARK_ARTIFACT.to_owned(), artifact.as_str().into()),
        ]);
        Ok(Wanted { dataset: dataset.to_owned(), snapshot, home, marks })
    }

    pub(crate) fn calls(&self) -> Calls {
        self.calls
    }

    /// Refuses a dataset of another pool.
    pub(crate) fn require_here(&self, dataset: &str) -> Result<()> {
        if pool_of(dataset) == self.name {
            return Ok(());
        }
        let message = format!("the dataset {dataset} is not in the pool {}", self.name);
        Err(Error::new(ErrorKind::InvalidInput, message).fix("keep sandboxes and versions in one pool"))
    }

    fn ask(&self, program: &str, arguments: &Map, what: &str) -> Result<Map> {
        let value =
            self.calls.look(&self.name, program, arguments).map_err(|failed| self.program_failed(what, failed))?;
        Ok(match value {
            Value::Map(map) => map,
            _ => Map::new(),
        })
    }

    fn program_failed(&self, what: &str, failed: Failed) -> Error {
        failure::zfs(format_args!("{what} in the pool {}", self.name), failed)
    }

    /// Describes those of the datasets that exist.
    pub(crate) fn look<'a>(&self, datasets: impl IntoIterator<Item = &'a str>) -> Result<BTreeMap<String, Dataset>> {
        let arguments = Map::from([
            ("names".to_owned(), Value::Map(names(datasets))),
            ("carry".to_owned(), Value::Map(names(properties::CARRIED.iter().copied()))),
        ]);
        let found = self.ask(LOOK, &arguments, "look at datasets")?;
        Ok(found.iter().filter_map(|(name, about)| Some((name.clone(), Dataset::read(about.map()?)))).collect())
    }

    /// Describes a dataset, where it exists.
    pub(crate) fn look_at(&self, dataset: &str) -> Result<Option<Dataset>> {
        Ok(self.look([dataset])?.remove(dataset))
    }

    /// All snapshots of a sandbox that were taken and not removed, wherever in the pool they are.
    pub(crate) fn find_all(&self, sandbox: &SandboxId) -> Result<Vec<Found>> {
        let mut found = self.find(&prefix(self.base, sandbox), &self.name, None)?;
        found.retain(|found| found.sandbox == *sandbox && !found.removed);
        Ok(found)
    }

    /// All snapshots of the store, removed ones too.
    pub(crate) fn find_everything(&self) -> Result<Vec<Found>> {
        self.find("crab-", &self.name, None)
    }

    /// Those of them that are of one dataset, or of others below it.
    pub(crate) fn find_below(&self, dataset: &str) -> Result<Vec<Found>> {
        self.find("crab-", dataset, None)
    }

    /// One snapshot, wherever it is; first where it is likely to be. Removed ones too.
    pub(crate) fn find_one(
        &self,
        sandbox: &SandboxId,
        artifact: &ArtifactId,
        likely: Option<&str>,
    ) -> Result<Option<Found>> {
        let name = format!("{}{artifact}", prefix(self.base, sandbox));
        let is_it = |found: &Found| found.sandbox == *sandbox && found.artifact == *artifact;
        if let Some(dataset) = likely.filter(|dataset| pool_of(dataset) == self.name)
            && let Some(found) = self.find(&name, dataset, Some(dataset))?.into_iter().find(is_it)
        {
            return Ok(Some(found));
        }
        Ok(self.find(&name, &self.name, None)?.into_iter().find(is_it))
    }

    fn find(&self, prefix: &str, below: &str, exact: Option<&str>) -> Result<Vec<Found>> {
        let mut arguments = Map::from([("prefix".to_owned(), prefix.into()), ("below".to_owned(), below.into())]);
        if let Some(dataset) = exact {
            arguments.insert("exact".to_owned(), Value::Map(names([dataset])));
        }
        let found = self.ask(FIND, &arguments, "look for versions")?;
        Ok(found.iter().filter_map(|(name, about)| Found::read(self.base, name, about.map()?)).collect())
    }

    /// Takes snapshots, all at one moment and each whole or not at all. Gives those that failed.
    pub(crate) fn capture(&self, wanted: &[Wanted]) -> Result<BTreeMap<String, NotTaken>> {
        let snapshots = wanted
            .iter()
            .map(|wanted| {
                let about = Map::from([
                    ("dataset".to_owned(), wanted.dataset.as_str().into()),
                    ("home".to_owned(), wanted.home.as_str().into()),
                    ("marks".to_owned(), Value::Map(wanted.marks.clone())),
                ]);
                (wanted.snapshot.clone(), Value::Map(about))
            })
            .collect();
        let arguments = Map::from([("snapshots".to_owned(), Value::Map(snapshots))]);
        let failed = self
            .calls
            .program(&self.name, CAPTURE, &arguments)
            .map_err(|failed| self.program_failed("take snapshots", failed))?;
        let mut not_taken = BTreeMap::new();
        for (name, why) in failed.map().into_iter().flatten() {
            let Some(why) = why.map() else { continue };
            let why = match text(why, "child") {
                Some(child) => NotTaken::Child(child),
                None => NotTaken::Errno(c_int::try_from(number(why, "errno")).unwrap_or(5)),
            };
            not_taken.insert(name.clone(), why);
        }
        Ok(not_taken)
    }

    /// Writes a sandbox's journal, and takes a snapshot with it, both or none.
    pub(crate) fn begin(&self, home: &str, journal: &str, snapshot: Option<&Wanted>) -> Result<()> {
        let mut arguments = Map::from([("home".to_owned(), home.into()), ("journal".to_owned(), journal.into())]);
        if let Some(snapshot) = snapshot {
            arguments.insert("snapshot".to_owned(), snapshot.snapshot.as_str().into());
            arguments.insert("marks".to_owned(), Value::Map(snapshot.marks.clone()));
        }
        let what = "begin a restore";
        let errno =
            self.calls.program(&self.name, BEGIN, &arguments).map_err(|failed| self.program_failed(what, failed))?;
        match errno.number().and_then(|errno| c_int::try_from(errno).ok()) {
            Some(0) => Ok(()),
            errno => Err(self.program_failed(what, Failed { errno: errno.unwrap_or(5), said: None })),
        }
    }

    /// Marks a snapshot that is there already.
    pub(crate) fn mark(&self, wanted: &Wanted) -> Result<()> {
        let arguments = Map::from([
            ("snapshot".to_owned(), wanted.snapshot.as_str().into()),
            ("marks".to_owned(), Value::Map(wanted.marks.clone())),
        ]);
        let what = "mark a snapshot";
        let errno =
            self.calls.program(&self.name, MARK, &arguments).map_err(|failed| self.program_failed(what, failed))?;
        match errno.number().and_then(|errno| c_int::try_from(errno).ok()) {
            Some(0) => Ok(()),
            errno => Err(self.program_failed(what, Failed { errno: errno.unwrap_or(5), said: None })),
        }
    }

    /// Does what is left to do. What of it fails is left to the next time, and logged.
    pub(crate) fn finish(&self, finish: &Finish<'_>) -> Result<()> {
        let mut arguments =
            Map::from([("home".to_owned(), finish.home.into()), ("forget".to_owned(), Value::Bool(finish.forget))]);
        for (name, value) in [("live", finish.live), ("discard", finish.discard)] {
            if let Some(value) = value {
                arguments.insert(name.to_owned(), value.into());
            }
        }
        let failed =
            self.calls.program(&self.name, FINISH, &arguments).map_err(|failed| self.program_failed("tidy", failed))?;
        for (dataset, why) in failed.map().into_iter().flatten() {
            let (what, errno) =
                (why.map().and_then(|why| text(why, "what")), why.map().map(|why| number(why, "errno")));
            tracing::debug!(dataset, ?what, ?errno, "left to the next time");
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_of_two_sandboxes_and_of_two_stores_part() {
        let id = |name: &str| SandboxId::new(name).unwrap();
        assert_ne!(prefix(1, &id("one")), prefix(1, &id("two")));
        assert_ne!(prefix(1, &id("one")), prefix(2, &id("one")));
        // What is on disks must not change.
        assert_eq!(prefix(1, &id("one")), "crab-e88796e4a0da0158-");
    }

    #[test]
    fn datasets_and_pools_are_read_off_names() {
        assert_eq!(dataset_of("tank/a/b@c"), "tank/a/b");
        assert_eq!(pool_of("tank/a/b@c"), "tank");
        assert_eq!(pool_of("tank@c"), "tank");
        assert_eq!(pool_of("tank"), "tank");
    }

    #[test]
    fn snapshots_with_foreign_marks_are_not_ours() {
        let sandbox = SandboxId::new("one").unwrap();
        let name = format!("tank/one@{}a", prefix(7, &sandbox));
        let mut map = Map::from([
            ("base".to_owned(), "7".into()),
            ("sandbox".to_owned(), "one".into()),
            ("artifact".to_owned(), "a".into()),
            ("guid".to_owned(), Value::I64(-2)),
            ("held".to_owned(), Value::Bool(true)),
            ("removed".to_owned(), Value::I64(0)),
        ]);
        let found = Found::read(7, &name, &map).unwrap();
        assert!(found.held && !found.removed && found.guid == u64::MAX - 1);
        assert_eq!(Found::read(7, "tank/one@daily", &map), None);
        assert_eq!(Found::read(8, &name, &map), None, "another store's");
        map.insert("sandbox".to_owned(), "two".into());
        assert_eq!(Found::read(7, &name, &map), None);
    }

    proptest! {
        #[test]
        fn no_answer_makes_the_reader_panic(name in "\\PC{0,40}", text in "\\PC{0,20}", number: i64) {
            let map = Map::from([
                ("sandbox".to_owned(), text.as_str().into()),
                ("base".to_owned(), "0".into()),
                ("artifact".to_owned(), Value::I64(number)),
                ("guid".to_owned(), text.into()),
                ("removed".to_owned(), Value::Flag),
            ]);
            let _ = Found::read(0, &name, &map);
            let _ = Dataset::read(&map);
        }
    }
}
