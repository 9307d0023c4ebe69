//! The inspector without BPF, on a real btrfs, real cgroups and real processes.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::{Bench, Live, able, assert_changed, assert_unchanged, block_on, run};
use crab_core::{Change, Evidence, Sandbox, StateDelta, Unknown};
use crab_inspector::PollingInspector;

fn bench() -> Option<Bench<PollingInspector>> {
    if !able(&["mkfs.btrfs", "btrfs"]) {
        return None;
    }
    Some(Bench::new(PollingInspector::new()))
}

const SEED: &str = "mkdir -p d/e; echo one > a; echo two > d/b; ln -s a link; echo h > h1; ln h1 h2; mkfifo f;
    head -c 100000 /dev/urandom > big; head -c 1000000 /dev/zero > zeros; : > empty; touch -d 2001-01-01 old; chmod 640 a";

/// What a restore would not notice.
const NOTHING: &[(&str, &str)] = &[
    ("nothing", ":"),
    ("reads", "cat a d/b big >/dev/null; ls -lR >/dev/null; readlink link"),
    ("made and removed", "echo x > x; rm x; mkdir y; touch y/z; rm -r y"),
    ("made and removed, deep", "echo x > d/e/x; sync; rm d/e/x"),
    ("rewritten equal, small", "echo one > a"),
    ("rewritten equal, large", "cp big /tmp/crab-$$; cat /tmp/crab-$$ > big; rm /tmp/crab-$$"),
    ("rewritten equal by renaming over", "cat big > n; chmod 644 n; mv n big"),
    ("rewritten equal, twice", "echo no > a; sync; echo one > a"),
    ("renamed and back", "mv a x; sync; mv x a; mv d x; mv x d"),
    ("mode changed and back", "chmod 600 a; sync; chmod 640 a; chmod 700 d; chmod 755 d"),
    ("owner changed and back", "chown 7:8 a; chown 0:0 a"),
    (
        "xattr set and removed",
        "python3 -c 'import os; os.setxattr(\"a\",\"user.x\",b\"1\"); os.removexattr(\"a\",\"user.x\")'",
    ),
    ("link replaced by an equal one", "ln -sfn a link"),
    ("folder replaced by an equal one", "cp -a d/e d/f; rm -r d/e; mv d/f d/e"),
    ("linked and unlinked", "ln a x; rm x"),
    ("grown and cut", "echo more >> old; touch -d 2001-01-01 x; truncate -s 0 old; touch -r x old; rm x"),
    ("access times", "touch -a a d"),
    ("made without a name", "python3 -c 'import os; f=os.open(\".\",os.O_TMPFILE|os.O_RDWR); os.write(f,b\"x\")'"),
];

/// What it would.
const SOMETHING: &[(&str, &str)] = &[
    ("new file", "echo x > x"),
    ("new empty folder", "mkdir y"),
    ("removed file", "rm d/b"),
    ("removed tree", "rm -r d"),
    ("removed hard link", "rm h2"),
    ("hard links parted", "cp h1 x; mv x h1"),
    ("content, same size", "echo eno > a"),
    ("content, same size and time", "touch -r a /tmp/crab-$$; echo eno > a; touch -r /tmp/crab-$$ a; rm /tmp/crab-$$"),
    ("one byte of a large file", "printf x | dd of=zeros bs=1 seek=500000 conv=notrunc 2>/dev/null"),
    ("mmap store", "python3 -c 'import mmap; f=open(\"zeros\",\"r+b\"); m=mmap.mmap(f.fileno(),0); m[5]=1'"),
    ("appended", "echo x >> big"),
    ("cut", "truncate -s 1000 big"),
    ("hole", "fallocate -p -o 4096 -l 8192 big"),
    ("mode", "chmod 600 a"),
    ("mode of a folder", "chmod 700 d"),
    ("owner", "chown 7 a"),
    ("group of a folder", "chgrp 7 d"),
    ("xattr", "python3 -c 'import os; os.setxattr(\"a\",\"user.x\",b\"1\")'"),
    ("xattr of a folder", "python3 -c 'import os; os.setxattr(\"d\",\"user.x\",b\"1\")'"),
    ("time alone", "touch -d 2020-01-01 a"),
    ("time to now", "touch a"),
    ("time of an empty file to now", "touch empty"),
    ("time of a link", "touch -h link"),
    ("time of a fifo", "touch f"),
    ("time of a folder, past", "touch -d 2020-01-01 d"),
    ("time of a folder, future", "touch -d 2090-01-01 d"),
    ("time of a rewritten file, past", "echo one > a; touch -d 2020-01-01 a"),
    ("replaced by one with an older time", "cat big > n; touch -d 2020-01-01 n; mv n big"),
    ("link target", "ln -sfn big link"),
    ("link became a file", "rm link; cp a link"),
    ("rename", "mv a x"),
    ("rename of a folder", "mv d x"),
    ("two files exchanged", "mv a x; mv d/b a; mv x d/b"),
    ("renamed over", "mv a d/b"),
    ("inode flags", "chattr +d a"),
    ("immutable", "chattr +i a; sync; chattr -i a; chattr +A a"),
    ("fallocate beyond the end", "fallocate -l 200000 big"),
    ("reflink", "cp --reflink=always big x; cp --reflink=always x zeros; rm x"),
    ("socket", "python3 -c 'import socket; socket.socket(socket.AF_UNIX).bind(\"s\")'"),
    ("name that is not text", "printf x > \"$(printf 'a\\377b')\""),
    ("nested subvolume", "btrfs -q subvolume create sub"),
    ("deep change in a replaced folder", "cp -a d x; echo q > x/e/q; rm -r d; mv x d"),
];

#[test]
fn a_snapshot_alone_is_no_change() {
    let Some(mut bench) = bench() else { return };
    let first = bench.take();
    assert_eq!(first.filesystem, Change::Unknown(Unknown::NoBase));
    assert_eq!(first.process, Change::Unknown(Unknown::NoBase));
    bench.sh(SEED);
    bench.version();
    for _ in 0..3 {
        let delta = bench.take();
        assert!(delta.is_clean(), "{delta:?}");
    }
}

#[test]
fn what_a_restore_would_not_notice_is_no_change() {
    let Some(mut bench) = bench() else { return };
    bench.sh(SEED);
    bench.version();
    for (name, line) in NOTHING {
        bench.sh(line);
        assert_unchanged(&bench.take().filesystem, name);
        // And so it stays with the next snapshot between.
        bench.files_version();
        assert_unchanged(&bench.take().filesystem, name);
    }
}

#[test]
fn what_a_restore_would_notice_is_a_change() {
    let Some(mut bench) = bench() else { return };
    bench.sh(SEED);
    bench.version();
    let pristine = bench.snapshot();
    for (name, line) in SOMETHING {
        bench.sh(line);
        let delta = bench.take();
        if name.starts_with("nested") {
            assert!(delta.filesystem.needs_checkpoint(), "{name}");
        } else {
            assert_changed(&delta.filesystem, name);
        }
        println!("{name}: {}", delta.filesystem);
        // Begin anew from the seed.
        bench.sh("chattr -i -A a; btrfs -q subvolume delete sub 2>/dev/null || true");
        run("sh", &[&"-c", &"find \"$0\" -mindepth 1 -delete; cp -a \"$1\"/. \"$0\"", &bench.root, &pristine]);
        bench.files_version();
        assert_unchanged(&bench.take().filesystem, name);
    }
}

#[test]
fn a_nested_subvolume_is_not_observable() {
    let Some(mut bench) = bench() else { return };
    bench.sh("btrfs -q subvolume create sub");
    bench.version();
    assert!(matches!(bench.take().filesystem, Change::Unknown(Unknown::Unobservable(_))));
}

#[test]
fn a_change_from_outside_is_seen() {
    let Some(mut bench) = bench() else { return };
    bench.version();
    std::fs::write(bench.root.join("x"), "x").unwrap();
    assert_changed(&bench.take().filesystem, "a write by the host");
}

#[test]
fn more_than_the_limits_is_changed() {
    if !able(&["mkfs.btrfs", "btrfs"]) {
        return;
    }
    let mut bench = Bench::new(PollingInspector::new().with_limits(100, 50_000));
    bench.sh("mkdir d; for i in $(seq 500); do echo $i > d/$i; done; head -c 100000 /dev/zero > big");
    bench.version();
    bench.sh("head -c 100000 /dev/zero > big");
    assert_changed(&bench.take().filesystem, "too many bytes");
    bench.version();
    bench.sh("for i in $(seq 500); do echo $i > d/$i; done");
    let Change::Changed(Evidence::Filesystem(_)) = bench.take().filesystem else {
        panic!("too many files were compared");
    };
}

#[test]
fn a_failed_checkpoint_keeps_the_old_base() {
    let Some(mut bench) = bench() else { return };
    bench.version();
    bench.sh("echo x > x");
    let taken = bench.take();
    // A checkpoint of `taken` fails; more is written, and a later one becomes durable.
    assert_changed(&bench.take().filesystem, "after the failure");
    let tree = bench.snapshot();
    bench.sh("echo y > y");
    bench.rebase(taken.token, true, true, Some(tree));
    assert_changed(&bench.take().filesystem, "written after the snapshot");
    bench.sh("rm y");
    assert_unchanged(&bench.take().filesystem, "undone");
}

#[test]
fn tokens_of_others_move_nothing() {
    let Some(mut bench) = bench() else { return };
    let early = bench.take().token;
    let sandbox = bench.sandbox.clone();
    block_on(bench.inspector.attach(&sandbox)).unwrap();
    let tree = bench.snapshot();
    bench.rebase(early, true, true, Some(tree.clone()));
    assert_eq!(bench.take().filesystem, Change::Unknown(Unknown::NoBase));
    let token = bench.take().token;
    bench.rebase(token, true, false, Some(tree));
    let delta = bench.take();
    assert_unchanged(&delta.filesystem, "files have a base");
    assert_eq!(delta.process, Change::Unknown(Unknown::NoBase));
    block_on(bench.inspector.detach(&sandbox.id));
    assert_eq!(bench.take().process, Change::Unknown(Unknown::NotAttached));
}

#[test]
fn without_a_tree_only_an_untouched_generation_is_proof() {
    let Some(bench) = bench() else { return };
    let token = bench.take().token;
    bench.rebase(token, true, true, None);
    assert_unchanged(&bench.take().filesystem, "untouched");
    bench.sh("echo x > x; rm x");
    assert_changed(&bench.take().filesystem, "touched");
}

#[test]
fn a_root_made_from_the_version_is_compared_with_it() {
    let Some(mut bench) = bench() else { return };
    bench.sh(SEED);
    let version = bench.snapshot();
    let root = bench.image.path.join("restored");
    run("btrfs", &[&"-q", &"subvolume", &"snapshot", &version, &root]);
    let sandbox = Sandbox::new(bench.sandbox.id.clone(), &root, &bench.cgroup.path);
    block_on(bench.inspector.attach(&sandbox)).unwrap();
    let token = bench.take().token;
    bench.rebase(token, true, true, Some(version));
    assert_unchanged(&bench.take().filesystem, "just restored");
    bench.cgroup.run(&root, "echo x > x");
    assert_changed(&bench.take().filesystem, "written");
    bench.cgroup.run(&root, "rm x");
    assert_unchanged(&bench.take().filesystem, "removed");
}

#[test]
fn processes_that_live_come_go_and_run_are_seen() {
    let Some(mut bench) = bench() else { return };
    bench.version();
    bench.sh("true; ls / >/dev/null");
    assert_unchanged(&bench.take().process, "came and went, nobody stayed");

    let mut live = Live::start(bench.cgroup.command("exec cat"), &bench.root);
    live.say("hello");
    assert_eq!(live.hear(), "hello");
    assert!(matches!(bench.take().process, Change::Changed(Evidence::NewTask(_))));

    // A version without a freeze: nothing runs, nothing changes.
    std::thread::sleep(std::time::Duration::from_millis(50));
    let token = bench.take().token;
    let tree = bench.snapshot();
    bench.rebase(token, true, true, Some(tree));
    assert_unchanged(&bench.take().process, "it waits");

    // In a child cgroup too.
    let child = bench.cgroup.path.join("child");
    std::fs::create_dir(&child).unwrap();
    std::fs::write(child.join("cgroup.procs"), live.child.id().to_string()).unwrap();
    live.say("again");
    assert_eq!(live.hear(), "again");
    assert!(matches!(bench.take().process, Change::Changed(Evidence::TaskRan(_))));
    drop(live);
    assert!(matches!(bench.take().process, Change::Changed(Evidence::GoneTask(_))));
}

#[test]
fn frozen_sandboxes_can_be_looked_at() {
    let Some(mut bench) = bench() else { return };
    let mut live = Live::start(bench.cgroup.command("exec cat"), &bench.root);
    live.say("hello");
    live.hear();
    bench.version();
    bench.cgroup.freeze(true);
    let delta = bench.take();
    bench.cgroup.freeze(false);
    assert_unchanged(&delta.filesystem, "nothing was written");
    assert_changed(&delta.process, "thawing let it run");
}

#[test]
fn any_number_of_files_that_were_rewritten_equal_is_no_change() {
    let Some(mut bench) = bench() else { return };
    bench.sh("mkdir d; for i in $(seq 1000); do echo $i > d/$i; done");
    bench.version();
    for files in [1, 100, 1000] {
        bench.sh(&format!("for i in $(seq {files}); do echo $i > d/$i; done; sync"));
        assert_unchanged(&bench.take().filesystem, "rewritten equal");
    }
}
