use super::*;
use crab_core::{Effects, Half, HostFacts, Origin, Timings, TurnNumber};

fn id() -> SandboxId {
    SandboxId::new("box").unwrap()
}

fn manifest(version: u64) -> Arc<Manifest> {
    Arc::new(Manifest {
        format: crab_core::MANIFEST_FORMAT,
        sandbox: id(),
        version: VersionId(version),
        parent: None,
        turn: TurnNumber(version),
        origin: Origin::Turn,
        filesystem: Half::Empty,
        process: Half::Missing("a test".into()),
        conversation: None,
        effects: Effects::default(),
        created_ms: 7,
        host: HostFacts::default(),
        timings: Timings::default(),
    })
}

fn open(dir: &Path) -> Store {
    Store::open(dir, Steps::default()).unwrap()
}

fn versions(store: &Store) -> Vec<u64> {
    store.with(|index| index.sandboxes[&id()].versions.keys().map(|version| version.0).collect())
}

/// A store with versions 1 to 3.
fn filled(dir: &Path) {
    let store = open(dir);
    store.put_sandbox(&id(), SandboxRecord::default()).unwrap();
    for version in 1..=3 {
        store.put_version(manifest(version)).unwrap();
    }
}

#[test]
fn what_was_put_is_there_after_reopening_and_is_the_owners_alone() {
    let dir = tempfile::tempdir().unwrap();
    let root = dir.path().join("new/store");
    filled(&root);
    let store = open(&root);
    assert_eq!(versions(&store), [1, 2, 3]);
    assert!(store.with(|index| index.damaged.is_empty()));
    let mut todo = vec![root];
    while let Some(path) = todo.pop() {
        let mode = fs::metadata(&path).unwrap().permissions().mode() & 0o777;
        if path.is_dir() {
            assert_eq!(mode, 0o700, "{}", path.display());
            todo.extend(fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else {
            assert_eq!(mode, 0o600, "{}", path.display());
        }
    }
}

#[test]
fn a_second_owner_is_told_who_holds_the_store() {
    let dir = tempfile::tempdir().unwrap();
    let first = open(dir.path());
    let error = Store::open(dir.path(), Steps::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy);
    assert!(error.to_string().contains("this process"), "{error}");
    drop(first);
    open(dir.path());
}

#[test]
fn torn_alien_newer_and_misplaced_files_are_reported_and_left() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path());
    let versions_dir = dir.path().join("sandboxes/box/versions");
    let whole = fs::read_to_string(versions_dir.join("v2.json")).unwrap();
    let put = |name: &str, text: &str| fs::write(versions_dir.join(name), text).unwrap();
    put("v3.json", &whole[..whole.len() / 2]);
    put("v4.json", &whole);
    put("v5.json", &whole.replace("\"format\": 1", "\"format\": 99"));
    put("v6.json", &whole.replacen("a test", "a best", 1));
    put("v7.json", "");
    put("notes.txt", "mine");
    put("v01.json", &whole);
    put(".crab-tmp-1-1", "half");
    std::os::unix::fs::symlink("/etc/passwd", versions_dir.join("v8.json")).unwrap();
    fs::create_dir(dir.path().join("sandboxes/.hidden")).unwrap();
    fs::write(dir.path().join("operations/x.json"), "{}").unwrap();

    let store = open(dir.path());
    assert_eq!(versions(&store), [1, 2]);
    let kinds: BTreeMap<String, DamageKind> = store.with(|index| {
        index
            .damaged
            .iter()
            .map(|damaged| (damaged.path.file_name().unwrap().to_string_lossy().into_owned(), damaged.kind))
            .collect()
    });
    let expected = [
        (".hidden", DamageKind::Alien),
        ("notes.txt", DamageKind::Alien),
        ("v01.json", DamageKind::Alien),
        ("v3.json", DamageKind::Torn),
        ("v4.json", DamageKind::Misplaced),
        ("v5.json", DamageKind::Newer),
        ("v6.json", DamageKind::Checksum),
        ("v7.json", DamageKind::Torn),
        ("v8.json", DamageKind::Alien),
        ("x.json", DamageKind::Alien),
    ];
    assert_eq!(kinds, expected.map(|(name, kind)| (name.to_owned(), kind)).into());
    assert!(!versions_dir.join(".crab-tmp-1-1").exists(), "an unfinished write is of no use");
    for name in ["v3.json", "v4.json", "v5.json", "v6.json", "v7.json", "notes.txt"] {
        assert!(versions_dir.join(name).exists(), "{name} was deleted");
    }
    // No number is given away twice, not even that of a file that could not be read.
    assert_eq!(store.with(|index| index.sandboxes[&id()].next_version()), VersionId(9));
    assert_eq!(store.put_version(manifest(3)).unwrap_err().0.kind(), ErrorKind::AlreadyExists);
}

#[test]
fn a_number_is_not_used_again_after_its_version_was_removed() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path());
    open(dir.path()).remove_version(&id(), VersionId(3)).unwrap();
    let store = open(dir.path());
    assert_eq!(versions(&store), [1, 2]);
    assert_eq!(store.with(|index| index.sandboxes[&id()].next_version()), VersionId(4));
}

#[test]
fn a_directory_of_somebody_elses_or_of_a_newer_crab_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("thesis.tex"), "do not touch").unwrap();
    let error = Store::open(dir.path(), Steps::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);

    let dir = tempfile::tempdir().unwrap();
    drop(open(dir.path()));
    fs::write(dir.path().join("FORMAT"), "crab-store 2\n").unwrap();
    assert_eq!(Store::open(dir.path(), Steps::default()).unwrap_err().kind(), ErrorKind::Unsupported);
    fs::write(dir.path().join("FORMAT"), "\0\0\0").unwrap();
    assert_eq!(Store::open(dir.path(), Steps::default()).unwrap_err().kind(), ErrorKind::Corrupt);
}

#[cfg(feature = "failpoints")]
mod faults {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering};

    /// Fails the `n`th time that `step` is reached, counted from now.
    fn failing(step: &'static str, n: usize) -> Steps {
        let seen = AtomicUsize::new(0);
        Steps::new(Arc::new(move |reached| {
            if reached == step && seen.fetch_add(1, Ordering::SeqCst) == n {
                return Err(Error::new(ErrorKind::Io, "ordered"));
            }
            Ok(())
        }))
    }

    #[test]
    fn a_failed_fsync_poisons_until_reopened() {
        for (step, written) in [("store.fsync", false), ("store.fsync_dir", true)] {
            let dir = tempfile::tempdir().unwrap();
            filled(dir.path());
            let store = Store::open(dir.path(), failing(step, 0)).unwrap();
            let (error, maybe_written) = store.put_version(manifest(4)).unwrap_err();
            assert_eq!((error.kind(), maybe_written), (ErrorKind::Io, written));
            assert_eq!(versions(&store), [1, 2, 3], "it was never said to exist");
            assert_eq!(store.put_version(manifest(5)).unwrap_err().0.kind(), ErrorKind::Poisoned);
            assert_eq!(store.remove_version(&id(), VersionId(1)).unwrap_err().kind(), ErrorKind::Poisoned);
            drop(store);
            let store = open(dir.path());
            assert!(versions(&store).starts_with(&[1, 2, 3]));
            let next = store.with(|index| index.sandboxes[&id()].next_version());
            store.put_version(manifest(next.0)).unwrap();
        }
    }

    #[test]
    fn a_failed_write_or_rename_leaves_nothing_and_does_not_poison() {
        for step in ["store.write", "store.rename"] {
            let dir = tempfile::tempdir().unwrap();
            filled(dir.path());
            let store = Store::open(dir.path(), failing(step, 0)).unwrap();
            assert!(!store.put_version(manifest(4)).unwrap_err().1);
            let listed = fs::read_dir(dir.path().join("sandboxes/box/versions")).unwrap().count();
            assert_eq!(listed, 3);
            store.put_version(manifest(4)).unwrap();
        }
    }
}

#[test]
fn a_damaged_record_is_moved_aside_and_a_newer_one_is_not_touched() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path());
    let path = dir.path().join("sandboxes/box/sandbox.json");
    let whole = fs::read_to_string(&path).unwrap();
    fs::write(&path, &whole[..20]).unwrap();
    let store = open(dir.path());
    assert_eq!(versions(&store), [1, 2, 3]);
    store.put_sandbox(&id(), SandboxRecord::default()).unwrap();
    drop(store);
    let names: Vec<String> = fs::read_dir(path.parent().unwrap())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().to_string_lossy().into_owned())
        .collect();
    assert!(names.iter().any(|name| name.starts_with("sandbox.json.damaged-")), "{names:?}");

    let newer = whole.replace("\"format\": 1", "\"format\": 2");
    fs::write(&path, &newer).unwrap();
    let error = open(dir.path()).put_sandbox(&id(), SandboxRecord::default()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert_eq!(fs::read_to_string(&path).unwrap(), newer);
}

#[cfg(feature = "failpoints")]
#[test]
fn the_newest_version_can_be_removed_on_a_full_disk_and_its_number_stays_taken() {
    let dir = tempfile::tempdir().unwrap();
    filled(dir.path());
    let full = Steps::new(Arc::new(|step| match step {
        "store.write" => Err(Error::io("write", std::io::ErrorKind::StorageFull.into())),
        _ => Ok(()),
    }));
    let store = Store::open(dir.path(), full.clone()).unwrap();
    store.remove_version(&id(), VersionId(3)).unwrap();
    assert_eq!(versions(&store), [1, 2]);
    drop(store);
    let next = |store: &Store| store.with(|index| index.sandboxes[&id()].next_version());
    let store = Store::open(dir.path(), full).unwrap();
    assert_eq!((versions(&store), next(&store)), (vec![1, 2], VersionId(4)));
    drop(store);
    let store = open(dir.path());
    assert_eq!(next(&store), VersionId(4));
    assert!(store.with(|index| index.damaged.is_empty()));
    assert!(!dir.path().join("sandboxes/box/versions/v3.removed").exists(), "there is room now");
    drop(store);
    assert_eq!(next(&open(dir.path())), VersionId(4));
}
