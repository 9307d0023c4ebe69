//! The comparison finds what a walk over both trees finds.

use std::collections::BTreeMap;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

use crab_core::FileChangeKind;
use crab_core::conformance::trees;
use proptest::prelude::*;

use super::{Kinship, Side, run};
use crate::subvolume::{self, Access};
use crate::support::Pool;
use crab_core::conformance::churn::Churn;

type Found = BTreeMap<Vec<u8>, FileChangeKind>;

fn side(path: &Path) -> Side {
    let info = subvolume::info(path).unwrap();
    Side { root: subvolume::open(path).unwrap(), id: info.id, path: path.to_owned() }
}

fn diff(from: &Path, to: &Path, kinship: Kinship, version: u32) -> Found {
    let mut found = Found::new();
    run(side(from), side(to), kinship, version, &mut |change| {
        assert_eq!(found.insert(change.path.clone(), change.kind), None, "{change:?} was given twice");
        ControlFlow::Continue(())
    })
    .unwrap();
    found
}

fn text(found: &Found) -> BTreeMap<String, FileChangeKind> {
    found.iter().map(|(path, kind)| (String::from_utf8_lossy(path).into_owned(), *kind)).collect()
}

#[track_caller]
fn check(from: &Path, to: &Path, kinship: Kinship) -> Found {
    let expected = trees::differences(from, to);
    for version in [1, 2] {
        let found = diff(from, to, kinship, version);
        let lacks: Found =
            expected.iter().filter(|(p, k)| found.get(*p) != Some(k)).map(|(p, k)| (p.clone(), *k)).collect();
        let more: Found =
            found.iter().filter(|(p, k)| expected.get(*p) != Some(k)).map(|(p, k)| (p.clone(), *k)).collect();
        assert!(
            lacks.is_empty() && more.is_empty(),
            "version {version} lacks {:?} has {:?}",
            text(&lacks),
            text(&more)
        );
    }
    expected
}

fn freeze(pool: &Pool, root: &Path, name: &str) -> std::path::PathBuf {
    let target = pool.path().join(name);
    subvolume::snapshot(root, &target, Access::ReadOnly).unwrap();
    target
}

#[test]
fn any_changes_are_found_as_a_walk_finds_them() {
    let Some(pool) = Pool::in_memory(512 << 20) else { return };
    let next = std::cell::Cell::new(0);
    let config = ProptestConfig { cases: 30, failure_persistence: None, ..ProptestConfig::default() };
    proptest!(config, |(seed: u64, before in 0..60_u32, between in 1..40_u32)| {
        let case = next.replace(next.get() + 1);
        let root = pool.path().join(format!("root-{case}"));
        subvolume::create(&root).unwrap();
        let mut churn = Churn::new(seed);
        (0..before).for_each(|_| churn.step(&root));
        let old = freeze(&pool, &root, &format!("old-{case}"));
        (0..between).for_each(|_| churn.step(&root));
        let new = freeze(&pool, &root, &format!("new-{case}"));
        check(&old, &new, Kinship::States);
        check(&new, &old, Kinship::States);
        // Back to the old state, and on from there another way.
        let again = pool.path().join(format!("again-{case}"));
        subvolume::snapshot(&old, &again, Access::Writable).unwrap();
        (0..between).for_each(|_| churn.step(&again));
        let other = freeze(&pool, &again, &format!("other-{case}"));
        check(&new, &other, Kinship::States);
        check(&other, &new, Kinship::States);
        for path in [&root, &old, &new, &again, &other] {
            subvolume::delete(path).unwrap();
        }
    });
}

#[test]
fn forks_that_are_changed_at_the_same_time_are_compared_too() {
    let Some(pool) = Pool::in_memory(512 << 20) else { return };
    let origin = pool.path().join("origin");
    subvolume::create(&origin).unwrap();
    (0..10).for_each(|_| Churn::new(5).step(&origin));
    for case in 0..12 {
        let forks = ["a", "b"].map(|name| pool.path().join(format!("{name}-{case}")));
        forks.iter().for_each(|fork| subvolume::snapshot(&origin, fork, Access::Writable).unwrap());
        // The same inode numbers in the same transaction.
        let [mut a, mut b] = [Churn::new(100 + case), Churn::new(200 + case)];
        for _ in 0..15 {
            a.step(&forks[0]);
            b.step(&forks[1]);
        }
        let [a, b] =
            [freeze(&pool, &forks[0], &format!("old-{case}")), freeze(&pool, &forks[1], &format!("new-{case}"))];
        check(&a, &b, Kinship::Unknown);
        check(&b, &a, Kinship::Unknown);
    }
}

#[test]
fn trees_that_share_nothing_are_compared_too() {
    let Some(pool) = Pool::new() else { return };
    let roots = ["one", "two"].map(|name| pool.path().join(name));
    for (seed, root) in roots.iter().enumerate() {
        subvolume::create(root).unwrap();
        let mut churn = Churn::new(77 + seed as u64);
        (0..60).for_each(|_| churn.step(root));
        // The same inode number, and not the same file.
        fs::write(root.join("equal"), "equal").unwrap();
    }
    let [one, two] = [freeze(&pool, &roots[0], "old"), freeze(&pool, &roots[1], "new")];
    assert!(!check(&one, &two, Kinship::States).is_empty());
    assert!(check(&one, &one, Kinship::States).is_empty());
}

#[test]
fn every_name_of_a_changed_file_is_found() {
    let Some(pool) = Pool::new() else { return };
    let root = pool.path().join("root");
    subvolume::create(&root).unwrap();
    fs::create_dir_all(root.join("deep/er")).unwrap();
    fs::write(root.join("file"), "old").unwrap();
    // So many that the kernel keeps some of them elsewhere.
    for n in 0..300 {
        let long = format!("deep/er/{n}-{}", "x".repeat(100));
        fs::hard_link(root.join("file"), root.join(long)).unwrap();
    }
    let old = freeze(&pool, &root, "old");
    fs::write(root.join("file"), "new").unwrap();
    fs::rename(root.join("deep"), root.join("moved")).unwrap();
    let new = freeze(&pool, &root, "new");
    assert_eq!(check(&old, &new, Kinship::States).len(), 1 + 2 * (300 + 2));
}

#[test]
fn nothing_outside_of_the_trees_is_looked_at() {
    let Some(pool) = Pool::new() else { return };
    let root = pool.path().join("root");
    subvolume::create(&root).unwrap();
    fs::create_dir(root.join("dir")).unwrap();
    fs::write(root.join("dir/passwd"), "inside").unwrap();
    let old = freeze(&pool, &root, "old");
    fs::remove_dir_all(root.join("dir")).unwrap();
    std::os::unix::fs::symlink("/etc", root.join("dir")).unwrap();
    let new = freeze(&pool, &root, "new");
    let found = check(&old, &new, Kinship::States);
    assert_eq!(found[&b"dir"[..]], FileChangeKind::Content);
    assert_eq!(found[&b"dir/passwd"[..]], FileChangeKind::Removed);
}

#[test]
fn a_reader_that_has_enough_ends_the_comparison() {
    let Some(pool) = Pool::new() else { return };
    let root = pool.path().join("root");
    subvolume::create(&root).unwrap();
    let old = freeze(&pool, &root, "old");
    (0..2000).for_each(|n| fs::write(root.join(n.to_string()), "x").unwrap());
    let new = freeze(&pool, &root, "new");
    let mut count = 0;
    run(side(&old), side(&new), Kinship::States, 1, &mut |_| {
        count += 1;
        if count < 3 { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    })
    .unwrap();
    assert_eq!(count, 3);
}
