//! Which version stands, which one is meant, and what a restore loses. Pure.

use std::collections::BTreeSet;
use std::sync::Arc;

use crab_core::{Error, ErrorKind, Manifest, Origin, Result, SandboxId, TurnNumber, VersionId};

use crate::report::{KeptEffect, LostTurns};
use crate::store::{DamageKind, SandboxIndex};

/// Which version is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Select {
    /// The standing one: the newest that was made since the last restore, or else the one that was restored then.
    Latest,
    /// This one.
    Version(VersionId),
    /// The one that covers this turn: made at its boundary, or else the newest from before it, since the turn changed
    /// nothing or could not be covered.
    Turn(TurnNumber),
}

fn is_replaced(manifest: &Manifest) -> bool {
    matches!(manifest.origin, Origin::Replaced { .. })
}

/// The version that describes the sandbox best: what a restore of [`Select::Latest`] brings back.
pub(super) fn standing(index: &SandboxIndex) -> Option<&Arc<Manifest>> {
    let floor = index.record.restored.as_ref().map_or(VersionId(0), |restored| restored.floor);
    let newest = index.versions.range(floor..).rev().map(|(_, manifest)| manifest).find(|m| !is_replaced(m));
    newest.or_else(|| index.versions.get(&index.record.restored.as_ref()?.version))
}

/// The last turn that a version knows of.
pub(super) fn last_turn(index: &SandboxIndex) -> TurnNumber {
    index.versions.values().map(|manifest| manifest.turn).max().unwrap_or(TurnNumber(0))
}

fn damaged_error(index: &SandboxIndex, version: VersionId) -> Option<Error> {
    let damaged = index.damaged.iter().find(|damaged| damaged.version == Some(version))?;
    let kind = if damaged.kind == DamageKind::Newer { ErrorKind::Unsupported } else { ErrorKind::Corrupt };
    Some(Error::new(kind, format!("the manifest of {version} cannot be used: {damaged}")))
}

/// A wanted version: whole as far as the store can tell, or a damaged one with what is wrong.
pub(super) type Candidate = std::result::Result<Arc<Manifest>, (VersionId, Error)>;

/// The wanted version, then those that a fallback would try, in order: damaged newer ones first, then the wanted one's
/// ancestors.
pub(super) fn candidates(id: &SandboxId, index: &SandboxIndex, select: Select) -> Result<Vec<Candidate>> {
    let mut found: Vec<Candidate> = Vec::new();
    let not_found = |what: String| Error::new(ErrorKind::NotFound, what);
    let first = match select {
        Select::Latest => {
            let standing = standing(index);
            let floor = index.record.restored.as_ref().map_or(VersionId(0), |restored| restored.floor);
            let whole = standing.map_or(VersionId(0), |manifest| manifest.version);
            let damaged = index.damaged.iter().filter_map(|damaged| damaged.version);
            let mut newer: Vec<VersionId> = damaged.filter(|version| *version > whole && *version >= floor).collect();
            newer.sort_unstable_by(|a, b| b.cmp(a));
            found.extend(newer.into_iter().filter_map(|version| Some(Err((version, damaged_error(index, version)?)))));
            standing.cloned()
        }
        Select::Version(version) => match index.versions.get(&version) {
            Some(manifest) => Some(manifest.clone()),
            None => match damaged_error(index, version) {
                Some(error) => {
                    found.push(Err((version, error)));
                    index.versions.range(..version).rev().map(|(_, m)| m).find(|m| !is_replaced(m)).cloned()
                }
                None => return Err(not_found(format!("{id} has no version {version}"))),
            },
        },
        Select::Turn(turn) => Some(by_turn(id, index, turn)?),
    };
    let mut next = first;
    let mut seen = BTreeSet::new();
    while let Some(manifest) = next {
        if !seen.insert(manifest.version) {
            break;
        }
        next = match manifest.parent.map(|parent| (parent, index.versions.get(&parent))) {
            Some((_, Some(parent))) => Some(parent.clone()),
            // The parent was removed or is damaged: the next older one on the way is the best that is left.
            Some((parent, None)) => {
                index.versions.range(..parent).rev().map(|(_, m)| m).find(|m| !is_replaced(m)).cloned()
            }
            None => None,
        };
        found.push(Ok(manifest));
    }
    if found.is_empty() {
        return Err(not_found(format!("{id} has no version yet")));
    }
    Ok(found)
}

fn by_turn(id: &SandboxId, index: &SandboxIndex, turn: TurnNumber) -> Result<Arc<Manifest>> {
    let newest_with = |wanted: &dyn Fn(&Manifest) -> bool| index.versions.values().rev().find(|m| wanted(m)).cloned();
    if let Some(exact) = newest_with(&|m| m.turn == turn && !is_replaced(m)) {
        return Ok(exact);
    }
    let before = newest_with(&|m| m.turn < turn && !is_replaced(m));
    // A restore came between: what stood before it does not cover a turn after it.
    let restored_between =
        |found: &Manifest| index.versions.range(found.version..).any(|(_, m)| is_replaced(m) && m.turn < turn);
    match before {
        Some(found) if !restored_between(&found) => Ok(found),
        _ => Err(Error::new(ErrorKind::NotFound, format!("no version of {id} covers turn {turn}"))),
    }
}

/// Whether there may have been turns after [`last_turn`] that no file tells of any more: turns grow with the versions,
/// so only the newest of these matters.
pub(super) fn may_miss_turns(index: &SandboxIndex) -> bool {
    let newest = index.versions.last_key_value().map(|(version, _)| *version);
    index.damaged.iter().filter_map(|damaged| damaged.version).max() > newest
}

/// The turns that a restore of `version` loses, where the last one seen is `last`, and there may have been `more`.
pub(super) fn lost(version: &Manifest, last: TurnNumber, more: bool) -> Option<LostTurns> {
    let first = version.turn.next();
    (more || version.turn < last).then(|| LostTurns { first, last: (!more).then_some(last) })
}

/// What left the sandbox between the restored version and the one that stood: it stays in the world.
pub(super) fn kept_effects(index: &SandboxIndex, restored: &Manifest, standing: Option<VersionId>) -> Vec<KeptEffect> {
    let parent_of = |version: VersionId| index.versions.get(&version).and_then(|manifest| manifest.parent);
    let mut kept_past = BTreeSet::from([restored.version]);
    let mut at = restored.parent;
    while let Some(version) = at {
        if !kept_past.insert(version) {
            break;
        }
        at = parent_of(version);
    }
    let mut effects = Vec::new();
    let mut seen = BTreeSet::new();
    let mut at = standing;
    while let Some(version) = at {
        if kept_past.contains(&version) || !seen.insert(version) {
            break;
        }
        if let Some(manifest) = index.versions.get(&version)
            && manifest.effects.sent != Some(false)
        {
            effects.push(KeptEffect { version, turn: manifest.turn, effects: manifest.effects.clone() });
        }
        at = parent_of(version);
    }
    effects
}
