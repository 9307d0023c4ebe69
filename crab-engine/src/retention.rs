//! Which versions may go. Pure.
//!
//! A version is *held* where something needs it whatever the rules say: it stands, it is pinned or labelled, a restore
//! or fork that did not end needs it, or a file that says so cannot be read. Held versions are never removed. Of the
//! others the rules keep some; then the quotas remove more, oldest first. Artifacts are counted by reference: one goes
//! with the last version that needs it, also where that is a version of a fork.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::time::Duration;

use crab_core::{SandboxId, VersionId};
use serde::{Deserialize, Serialize};

/// What is kept of each sandbox, and how much room versions may take.
///
/// Without [`last`](Self::last) and [`every`](Self::every) all versions are kept; with them a version is kept where
/// either keeps it. Ages are counted back from the sandbox's newest version, not from the clock: what an idle sandbox
/// has does not grow old, and a clock that jumps between two prunes removes nothing.
///
/// ```
/// use std::time::Duration;
/// use crab_engine::retention::Retention;
///
/// const HOUR: Duration = Duration::from_secs(3600);
/// // The last ten, all of the last hour, then one an hour for a day; at most 20 GiB a sandbox.
/// let retention = Retention::keep_all()
///     .last(10)
///     .every(Duration::ZERO, HOUR)
///     .every(HOUR, 24 * HOUR)
///     .sandbox_quota(20 << 30);
/// # let _ = retention;
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[must_use]
pub struct Retention {
    last: Option<usize>,
    every: Vec<(Duration, Duration)>,
    sandbox_bytes: Option<u64>,
    store_bytes: Option<u64>,
}

impl Retention {
    /// Keeps everything.
    pub fn keep_all() -> Self {
        Self::default()
    }

    /// Keeps the newest `count` versions.
    pub fn last(mut self, count: usize) -> Self {
        self.last = Some(count);
        self
    }

    /// Of versions that are at most `age` older than the newest, keeps the newest of each `interval`; all of them where
    /// the interval is zero. Several may be given.
    pub fn every(mut self, interval: Duration, age: Duration) -> Self {
        self.every.push((interval, age));
        self
    }

    /// What the versions of one sandbox may take, in bytes as far as the backends tell them. Artifacts that a fork
    /// shares count for both. Removes what the other rules keep, but nothing that is held.
    pub fn sandbox_quota(mut self, bytes: u64) -> Self {
        self.sandbox_bytes = Some(bytes);
        self
    }

    /// What all versions of the store may take, in bytes. Shared artifacts count once.
    pub fn store_quota(mut self, bytes: u64) -> Self {
        self.store_bytes = Some(bytes);
        self
    }

    /// Whether sizes matter.
    pub(crate) fn has_quota(&self) -> bool {
        self.sandbox_bytes.is_some() || self.store_bytes.is_some()
    }

    /// Whether a new version of one sandbox can be a reason to remove one of another.
    pub(crate) fn spans_sandboxes(&self) -> bool {
        self.store_bytes.is_some()
    }
}

/// Why a version is kept whatever the rules say.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Held {
    /// A restore of the latest version brings it back.
    Standing,
    /// It is pinned.
    Pinned,
    /// It has a label.
    Labelled,
    /// A restore or fork that did not end needs it.
    Operation,
    /// Somebody reads it.
    Read,
    /// A file that tells what is held cannot be read.
    Unreadable,
}

impl fmt::Display for Held {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Standing => "it is the standing version",
            Self::Pinned => "it is pinned",
            Self::Labelled => "it has a label",
            Self::Operation => "a restore or fork that did not end needs it",
            Self::Read => "it is being read",
            Self::Unreadable => "what tells its pins, or which version stands, cannot be read",
        })
    }
}

/// Which rule removes a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Rule {
    /// Neither [`Retention::last`] nor [`Retention::every`] keeps it.
    NotKept,
    /// The sandbox took more than its quota.
    SandboxQuota,
    /// The store took more than its quota.
    StoreQuota,
}

/// A version that goes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Removal {
    /// Whose version.
    pub sandbox: SandboxId,
    /// Which.
    pub version: VersionId,
    /// Why.
    pub rule: Rule,
    /// Bytes that are free when it is gone, after those before it in the list, as far as the backends tell.
    pub bytes: u64,
}

/// A quota that is still not kept: everything that is left is held.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OverQuota {
    /// Whose quota; `None` for the store's.
    pub sandbox: Option<SandboxId>,
    /// What is taken, in bytes.
    pub bytes: u64,
    /// What may be taken.
    pub quota: u64,
}

/// One version, as a decision needs it. `K` names artifacts.
#[derive(Clone, Debug)]
pub(crate) struct Entry<K> {
    pub(crate) version: VersionId,
    pub(crate) created_ms: u64,
    /// What it needs, with what that depends on.
    pub(crate) artifacts: BTreeSet<K>,
    pub(crate) held: Option<Held>,
}

/// What is to be removed, in order, and the quotas that are not kept all the same.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Removals {
    pub(crate) removals: Vec<Removal>,
    pub(crate) over: Vec<OverQuota>,
}

/// Decides. Versions are given oldest first; what has no known size counts as nothing. With `only` the versions of that
/// sandbox alone may go; those of the others still hold what they share.
pub(crate) fn decide<K: Ord>(
    retention: &Retention,
    store: &BTreeMap<SandboxId, Vec<Entry<K>>>,
    sizes: &BTreeMap<K, u64>,
    only: Option<&SandboxId>,
) -> Removals {
    let mut ledger = Ledger { left: BTreeMap::new(), users: BTreeMap::new(), sizes, removals: Vec::new() };
    for (id, entries) in store {
        ledger.left.extend(entries.iter().map(|entry| ((id, entry.version), entry)));
    }
    ledger.users = ledger.users_of(None);
    let may_go = |id: &SandboxId, entry: &Entry<K>| entry.held.is_none() && only.is_none_or(|only| only == id);
    for (id, entries) in store {
        let kept = kept(retention, entries);
        for entry in entries.iter().filter(|entry| may_go(id, entry) && !kept.contains(&entry.version)) {
            ledger.remove(id, entry.version, Rule::NotKept);
        }
    }
    let mut over = Vec::new();
    let mut keep_quota = |of: Option<&SandboxId>, quota: u64, rule: Rule| {
        let mut oldest: Vec<(u64, &SandboxId, VersionId)> = Vec::new();
        for (id, entries) in store.iter().filter(|(id, _)| of.is_none_or(|of| of == *id)) {
            let free = entries.iter().zip(times(entries)).filter(|(entry, _)| may_go(id, entry));
            oldest.extend(free.map(|(entry, time)| (time, id, entry.version)));
        }
        oldest.sort_unstable();
        let mut users = ledger.users_of(of);
        let mut bytes = users.keys().map(|key| ledger.size(key)).fold(0, u64::saturating_add);
        for (_, id, version) in oldest {
            if bytes <= quota {
                break;
            }
            if let Some(entry) = ledger.left.get(&(id, version)).copied() {
                bytes = bytes.saturating_sub(release(&mut users, sizes, entry));
                ledger.remove(id, version, rule);
            }
        }
        if bytes > quota {
            over.push(OverQuota { sandbox: of.cloned(), bytes, quota });
        }
    };
    if let Some(quota) = retention.sandbox_bytes {
        for id in store.keys().filter(|id| only.is_none_or(|only| only == *id)) {
            keep_quota(Some(id), quota, Rule::SandboxQuota);
        }
    }
    if let Some(quota) = retention.store_bytes {
        keep_quota(None, quota, Rule::StoreQuota);
    }
    Removals { removals: ledger.removals, over }
}

/// What is left, how often each artifact of it is needed, and what is not left.
struct Ledger<'a, K> {
    left: BTreeMap<(&'a SandboxId, VersionId), &'a Entry<K>>,
    users: BTreeMap<&'a K, usize>,
    sizes: &'a BTreeMap<K, u64>,
    removals: Vec<Removal>,
}

impl<'a, K: Ord> Ledger<'a, K> {
    fn size(&self, key: &K) -> u64 {
        self.sizes.get(key).copied().unwrap_or(0)
    }

    /// How many versions, of one sandbox or of all, need each artifact.
    fn users_of(&self, of: Option<&SandboxId>) -> BTreeMap<&'a K, usize> {
        let mut users = BTreeMap::new();
        for (_, entry) in self.left.iter().filter(|((id, _), _)| of.is_none_or(|of| of == *id)) {
            for key in &entry.artifacts {
                *users.entry(key).or_default() += 1;
            }
        }
        users
    }

    fn remove(&mut self, id: &'a SandboxId, version: VersionId, rule: Rule) {
        let Some(entry) = self.left.remove(&(id, version)) else { return };
        let bytes = release(&mut self.users, self.sizes, entry);
        self.removals.push(Removal { sandbox: id.clone(), version, rule, bytes });
    }
}

/// Takes a version's uses away and says what that frees.
fn release<'a, K: Ord>(users: &mut BTreeMap<&'a K, usize>, sizes: &BTreeMap<K, u64>, entry: &'a Entry<K>) -> u64 {
    let mut bytes = 0u64;
    for key in &entry.artifacts {
        let count = users.entry(key).or_default();
        *count = count.saturating_sub(1);
        if *count == 0 {
            bytes = bytes.saturating_add(sizes.get(key).copied().unwrap_or(0));
        }
    }
    bytes
}

/// When the versions were made, in milliseconds: by the clock, but none later than a newer one, in case the clock
/// jumped ahead for a while.
fn times<K>(entries: &[Entry<K>]) -> Vec<u64> {
    let mut times: Vec<u64> = entries.iter().map(|entry| entry.created_ms).collect();
    for at in (1..times.len()).rev() {
        times[at - 1] = times[at - 1].min(times[at]);
    }
    times
}

/// The versions that the rules keep.
fn kept<K>(retention: &Retention, entries: &[Entry<K>]) -> BTreeSet<VersionId> {
    if retention.last.is_none() && retention.every.is_empty() {
        return entries.iter().map(|entry| entry.version).collect();
    }
    let mut kept = BTreeSet::new();
    kept.extend(entries.iter().rev().take(retention.last.unwrap_or(0)).map(|entry| entry.version));
    let times = times(entries);
    let newest = times.last().copied().unwrap_or(0);
    for (interval, age) in &retention.every {
        let (interval, age) = (millis(*interval), millis(*age));
        let mut slots = BTreeSet::new();
        for (entry, time) in entries.iter().zip(&times).rev() {
            let old = newest - time;
            // The first that is seen of a slot is its newest.
            if old <= age && (interval == 0 || slots.insert(old / interval)) {
                kept.insert(entry.version);
            }
        }
    }
    kept
}

fn millis(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn id(name: &str) -> SandboxId {
        SandboxId::new(name).unwrap()
    }

    fn entry(version: u64, created_ms: u64, artifacts: &[u64]) -> Entry<u64> {
        Entry { version: VersionId(version), created_ms, artifacts: artifacts.iter().copied().collect(), held: None }
    }

    fn gone(retention: &Retention, entries: Vec<Entry<u64>>) -> Vec<u64> {
        let sizes = (0..100).map(|key| (key, 10)).collect();
        let store = BTreeMap::from([(id("box"), entries)]);
        decide(retention, &store, &sizes, None).removals.iter().map(|removal| removal.version.0).collect()
    }

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn without_rules_nothing_goes() {
        let entries = (1..9).map(|v| entry(v, v, &[v])).collect();
        assert!(gone(&Retention::keep_all(), entries).is_empty());
    }

    #[test]
    fn the_newest_are_kept_and_what_is_held_besides_them() {
        let mut entries: Vec<_> = (1..=6).map(|v| entry(v, v, &[v])).collect();
        entries[1].held = Some(Held::Pinned);
        assert_eq!(gone(&Retention::keep_all().last(2), entries), [1, 3, 4]);
    }

    #[test]
    fn ages_thin_out_and_count_back_from_the_newest_version() {
        // One a second for a minute.
        let entries: Vec<_> = (1..=60).map(|v| entry(v, v * 1000, &[])).collect();
        let retention = Retention::keep_all().every(Duration::ZERO, 5 * SECOND).every(10 * SECOND, 40 * SECOND);
        let gone = gone(&retention, entries);
        let kept: Vec<u64> = (1..=60).filter(|v| !gone.contains(v)).collect();
        assert_eq!(kept, [20, 30, 40, 50, 55, 56, 57, 58, 59, 60]);
    }

    #[test]
    fn a_clock_that_jumped_ahead_and_back_makes_nobody_older() {
        let steady: Vec<_> = (1..=10).map(|v| entry(v, v * 1000, &[])).collect();
        let mut jumped = steady.clone();
        // Version 4 was made in the year 2100, as its host believed.
        jumped[3].created_ms = 4_102_444_800_000;
        let retention = Retention::keep_all().every(Duration::ZERO, 6 * SECOND);
        assert_eq!(gone(&retention, jumped), gone(&retention, steady));
        // Back to 1970: all ages are nothing, and nothing goes.
        let back: Vec<_> = (1..=10).map(|v| entry(v, 10_000 - v * 1000, &[])).collect();
        assert!(gone(&retention, back).is_empty());
    }

    #[test]
    fn quotas_remove_the_oldest_first_count_shared_artifacts_once_and_say_what_they_cannot_reach() {
        // Versions 1 to 3 share artifact 50, so only the last of them frees it.
        let entries = vec![entry(1, 1, &[1, 50]), entry(2, 2, &[2, 50]), entry(3, 3, &[50]), entry(4, 4, &[4])];
        let sizes: BTreeMap<u64, u64> = [(1, 10), (2, 10), (4, 10), (50, 100)].into();
        let mut store = BTreeMap::from([(id("box"), entries)]);
        let quota = |store: &_, bytes| decide(&Retention::keep_all().sandbox_quota(bytes), store, &sizes, None);
        let numbers = |found: &Removals| found.removals.iter().map(|r| (r.version.0, r.bytes)).collect::<Vec<_>>();
        assert_eq!(numbers(&quota(&store, 130)), []);
        assert_eq!(numbers(&quota(&store, 120)), [(1, 10)]);
        assert_eq!(numbers(&quota(&store, 50)), [(1, 10), (2, 10), (3, 100)]);
        if let Some(entries) = store.get_mut(&id("box")) {
            entries[2].held = Some(Held::Standing);
        }
        let found = quota(&store, 50);
        assert_eq!(numbers(&found), [(1, 10), (2, 10), (4, 10)]);
        assert_eq!(found.over, [OverQuota { sandbox: Some(id("box")), bytes: 100, quota: 50 }]);
    }

    #[test]
    fn a_fork_shares_what_counts_once_for_the_store_and_for_each_of_both() {
        let store = BTreeMap::from([(id("box"), vec![entry(1, 1, &[1])]), (id("fork"), vec![entry(1, 2, &[1])])]);
        let sizes = BTreeMap::from([(1, 10)]);
        let found = decide(&Retention::keep_all().store_quota(10).sandbox_quota(10), &store, &sizes, None);
        assert!(found.removals.is_empty() && found.over.is_empty());
        let found = decide(&Retention::keep_all().store_quota(5), &store, &sizes, None);
        let bytes: Vec<u64> = found.removals.iter().map(|removal| removal.bytes).collect();
        assert_eq!(bytes, [0, 10]);
    }

    fn entries() -> impl Strategy<Value = Vec<Entry<u64>>> {
        let one =
            (0..50u64, prop::collection::btree_set(0..20u64, 0..4), prop::option::weighted(0.2, Just(Held::Pinned)));
        prop::collection::vec(one, 0..12).prop_map(|list| {
            let numbered = list.into_iter().zip(1..);
            numbered
                .map(|((created_ms, artifacts, held), v)| Entry { version: VersionId(v), created_ms, artifacts, held })
                .collect()
        })
    }

    fn retention() -> impl Strategy<Value = Retention> {
        let rung = (0..20u64, 0..50u64).prop_map(|(i, a)| (Duration::from_millis(i), Duration::from_millis(a)));
        let quota = || prop::option::of(0..200u64);
        (prop::option::of(0..8usize), prop::collection::vec(rung, 0..3), quota(), quota())
            .prop_map(|(last, every, sandbox_bytes, store_bytes)| Retention { last, every, sandbox_bytes, store_bytes })
    }

    proptest! {
        #[test]
        fn nothing_held_goes_what_stays_is_whole_and_quotas_are_kept_or_told(
            a in entries(), b in entries(), retention in retention(), only: bool,
        ) {
            let sizes: BTreeMap<u64, u64> = (0..20).map(|key| (key, key + 1)).collect();
            let store = BTreeMap::from([(id("a"), a), (id("b"), b)]);
            let only = only.then(|| id("a"));
            let found = decide(&retention, &store, &sizes, only.as_ref());
            let gone: BTreeSet<(SandboxId, VersionId)> =
                found.removals.iter().map(|removal| (removal.sandbox.clone(), removal.version)).collect();
            prop_assert_eq!(gone.len(), found.removals.len(), "each goes once");
            let mut left: BTreeMap<&SandboxId, BTreeSet<u64>> = BTreeMap::new();
            let mut all = BTreeSet::new();
            for (id, entries) in &store {
                for entry in entries {
                    all.extend(&entry.artifacts);
                    let goes = gone.contains(&(id.clone(), entry.version));
                    prop_assert!(!goes || (entry.held.is_none() && only.as_ref().is_none_or(|only| only == id)));
                    if !goes {
                        left.entry(id).or_default().extend(&entry.artifacts);
                    }
                }
            }
            let kept: BTreeSet<u64> = left.values().flatten().copied().collect();
            let sum = |keys: &BTreeSet<u64>| keys.iter().map(|key| sizes[key]).sum::<u64>();
            // What is freed is what nothing that stays needs.
            let freed: u64 = found.removals.iter().map(|removal| removal.bytes).sum();
            prop_assert_eq!(freed, sum(&all) - sum(&kept));
            let told = |of: Option<&SandboxId>| found.over.iter().any(|over| over.sandbox.as_ref() == of);
            if let Some(quota) = retention.store_bytes {
                prop_assert_eq!(sum(&kept) > quota, told(None));
            }
            if let (Some(quota), Some(keys)) = (retention.sandbox_bytes, left.get(&id("a"))) {
                prop_assert!(sum(keys) <= quota || told(Some(&id("a"))));
            }
            if let Some(last) = retention.last && retention.sandbox_bytes.is_none() && retention.store_bytes.is_none() {
                for (id, entries) in &store {
                    for entry in entries.iter().rev().take(last) {
                        prop_assert!(!gone.contains(&(id.clone(), entry.version)));
                    }
                }
            }
            // Deciding again about what is left finds nothing more to remove by the quotas.
            let rest = store.iter().map(|(id, entries)| {
                let rest = entries.iter().filter(|entry| !gone.contains(&(id.clone(), entry.version))).cloned();
                (id.clone(), rest.collect())
            });
            let again = decide(&Retention { last: None, every: vec![], ..retention }, &rest.collect(), &sizes, only.as_ref());
            prop_assert!(again.removals.is_empty(), "{:?}", again.removals);
        }
    }
}
