//! Reads a store: what is whole goes into the index, everything else is reported and left.

use std::fs::{self, DirEntry};
use std::io::Read;
use std::path::Path;
use std::sync::Arc;

use crab_core::{Manifest, OperationId, Result, SandboxId, VersionId};
use serde::de::DeserializeOwned;

use super::envelope::{self, Kind, MAX_RECORD};
use super::records::{MarksFile, SandboxFile};
use super::{DamageKind, Damaged, Index, Operation, SandboxIndex, SandboxRecord, TEMPORARY, io_error};

pub(super) fn scan(root: &Path) -> Result<Index> {
    let mut index = Index::default();
    for entry in entries(root)? {
        match name_of(&entry).as_str() {
            "FORMAT" | "LOCK" | "sandboxes" | "operations" | "lost+found" => {}
            _ => alien(&mut index.damaged, &entry, None),
        }
    }
    for entry in entries(&root.join("sandboxes"))? {
        match SandboxId::new(name_of(&entry)) {
            Ok(id) if is_dir(&entry) => {
                let sandbox = scan_sandbox(&entry.path(), &id, &mut index.damaged)?;
                index.sandboxes.insert(id, sandbox);
            }
            _ => alien(&mut index.damaged, &entry, None),
        }
    }
    for entry in entries(&root.join("operations"))? {
        let name = name_of(&entry);
        let Some(Ok(id)) = name.strip_suffix(".json").map(OperationId::new) else {
            alien(&mut index.damaged, &entry, None);
            continue;
        };
        match read::<Operation>(Kind::Operation, &entry.path()) {
            Ok(operation) if operation.id == id => {
                index.operations.insert(id, operation);
            }
            Ok(other) => {
                let detail = format!("it is the record of operation {}", other.id);
                report(&mut index.damaged, &entry, None, (DamageKind::Misplaced, detail));
                index.damaged_operations.insert(id);
            }
            Err(what) => {
                report(&mut index.damaged, &entry, None, what);
                index.damaged_operations.insert(id);
            }
        }
    }
    for damaged in &index.damaged {
        tracing::warn!(path = %damaged.path.display(), kind = ?damaged.kind, "stepped over: {damaged}");
    }
    Ok(index)
}

fn scan_sandbox(dir: &Path, id: &SandboxId, damaged: &mut Vec<Damaged>) -> Result<SandboxIndex> {
    let mut sandbox = SandboxIndex::default();
    for entry in entries(dir)? {
        match name_of(&entry).as_str() {
            "versions" if is_dir(&entry) => {}
            "sandbox.json" => match read::<SandboxFile>(Kind::Sandbox, &entry.path()) {
                Ok(file) if file.sandbox == *id => {
                    sandbox.record = SandboxRecord::from(file);
                    sandbox.recorded = true;
                }
                Ok(file) => {
                    let detail = format!("it is the record of sandbox {}", file.sandbox);
                    sandbox.record_damage = Some(DamageKind::Misplaced);
                    report(damaged, &entry, Some(id), (DamageKind::Misplaced, detail));
                }
                Err(what) => {
                    sandbox.record_damage = Some(what.0);
                    report(damaged, &entry, Some(id), what);
                }
            },
            "marks.json" => {
                let what = match read::<MarksFile>(Kind::Marks, &entry.path()) {
                    Ok(file) if file.sandbox == *id => {
                        sandbox.marks = file.marks;
                        continue;
                    }
                    Ok(file) => (DamageKind::Misplaced, format!("these are the marks of sandbox {}", file.sandbox)),
                    Err(what) => what,
                };
                sandbox.marks_damage = Some(what.0);
                report(damaged, &entry, Some(id), what);
            }
            _ => alien(damaged, &entry, Some(id)),
        }
    }
    let versions = dir.join("versions");
    let listed = if versions.is_dir() { entries(&versions)? } else { Vec::new() };
    for entry in listed {
        let name = name_of(&entry);
        if let Some(version) = numbered(&name, ".removed") {
            sandbox.tombstones.push(version);
            sandbox.record.highest = sandbox.record.highest.max(version);
            continue;
        }
        let Some(version) = numbered(&name, ".json") else {
            alien(damaged, &entry, Some(id));
            continue;
        };
        let what = match read::<Manifest>(Kind::Manifest, &entry.path()) {
            Ok(manifest) if manifest.sandbox == *id && manifest.version == version => {
                sandbox.versions.insert(version, Arc::new(manifest));
                continue;
            }
            Ok(other) => (DamageKind::Misplaced, format!("it is the manifest of {} {}", other.sandbox, other.version)),
            Err(what) => what,
        };
        let found = damage(&entry, Some(id), Some(version), what);
        sandbox.damaged.push(found.clone());
        damaged.push(found);
    }
    Ok(sandbox)
}

/// The entries of a directory in a stable order. Unfinished writes of a dead owner are removed on the way.
fn entries(dir: &Path) -> Result<Vec<DirEntry>> {
    let failed = |source| io_error(format!("read {}", dir.display()), source);
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        if name_of(&entry).starts_with(TEMPORARY) && !is_dir(&entry) {
            // It stays where the disk is read-only; it does no harm.
            let _ = fs::remove_file(entry.path());
            continue;
        }
        found.push(entry);
    }
    found.sort_by_key(DirEntry::file_name);
    Ok(found)
}

fn name_of(entry: &DirEntry) -> String {
    entry.file_name().to_string_lossy().into_owned()
}

fn is_dir(entry: &DirEntry) -> bool {
    entry.file_type().is_ok_and(|kind| kind.is_dir())
}

/// `v12.json` is version 12; `v012.json` and `v+1.json` are nothing of ours.
fn numbered(name: &str, suffix: &str) -> Option<VersionId> {
    let number = name.strip_prefix('v')?.strip_suffix(suffix)?.parse().ok()?;
    let version = VersionId(number);
    (number > 0 && format!("{version}{suffix}") == name).then_some(version)
}

fn read<T: DeserializeOwned>(kind: Kind, path: &Path) -> std::result::Result<T, (DamageKind, String)> {
    let unreadable = |error: std::io::Error| (DamageKind::Unreadable, error.to_string());
    // Never through a link, and never from a pipe or device that somebody put here.
    let meta = fs::symlink_metadata(path).map_err(unreadable)?;
    if !meta.is_file() {
        return Err((DamageKind::Alien, "it is not a plain file".to_owned()));
    }
    let mut text = Vec::new();
    let file = fs::File::open(path).map_err(unreadable)?;
    file.take(MAX_RECORD + 1).read_to_end(&mut text).map_err(unreadable)?;
    if text.len() as u64 > MAX_RECORD {
        return Err((DamageKind::Alien, format!("it is longer than {MAX_RECORD} bytes")));
    }
    envelope::decode(kind, &text)
}

fn damage(
    entry: &DirEntry,
    sandbox: Option<&SandboxId>,
    version: Option<VersionId>,
    (kind, detail): (DamageKind, String),
) -> Damaged {
    Damaged { path: entry.path(), sandbox: sandbox.cloned(), version, kind, detail }
}

fn report(list: &mut Vec<Damaged>, entry: &DirEntry, sandbox: Option<&SandboxId>, what: (DamageKind, String)) {
    list.push(damage(entry, sandbox, None, what));
}

fn alien(list: &mut Vec<Damaged>, entry: &DirEntry, sandbox: Option<&SandboxId>) {
    report(list, entry, sandbox, (DamageKind::Alien, "Crab makes no such file".to_owned()));
}
