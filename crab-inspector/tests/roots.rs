//! Roots that are no btrfs subvolume, with and without a copy of the version's files to compare with.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod common;

use std::process::Command;

use common::{Bench, Kind, Live, able, assert_changed, assert_unchanged, has, run, shell};
use crab_core::{Change, Evidence, StateDelta, Unknown};
use crab_inspector::{Inspector, PollingInspector};

fn bench(kind: Kind) -> Option<Bench<Inspector>> {
    if !able(&["python3"]) {
        return None;
    }
    match Inspector::load() {
        Ok(inspector) => Some(Bench::on(kind, inspector)),
        Err(error) => {
            println!("skipped: BPF: {error}");
            None
        }
    }
}

/// A version of which nobody keeps a copy that could be read.
fn version_without_copy<D: StateDelta>(bench: &Bench<D>) {
    bench.cgroup.freeze(true);
    let token = bench.take().token;
    bench.cgroup.freeze(false);
    bench.rebase(token, true, true, None);
}

#[test]
fn without_a_copy_a_root_is_unchanged_until_something_may_have_written() {
    for kind in [Kind::Ext4, Kind::Overlay] {
        let Some(bench) = bench(kind) else { return };
        assert_eq!(bench.take().filesystem, Change::Unknown(Unknown::NoBase));
        bench.sh("mkdir d; echo one > d/a");
        version_without_copy(&bench);
        assert_unchanged(&bench.take().filesystem, "at rest");
        bench.sh("cat d/a; ls -l; find . | sort | head -1");
        assert_unchanged(&bench.take().filesystem, "a tool that reads");
        bench.sh("echo x > x; rm x");
        assert_changed(&bench.take().filesystem, "what came of it is not known");
        version_without_copy(&bench);
        assert_unchanged(&bench.take().filesystem, "a new version");
        shell(&bench.root, "echo two > d/a");
        assert_changed(&bench.take().filesystem, "the host wrote");
        assert_changed(&bench.take().filesystem, "it stays so");
    }
}

#[test]
fn with_a_copy_only_what_came_of_it_counts() {
    for kind in [Kind::Ext4, Kind::Overlay, Kind::Tmpfs] {
        let Some(mut bench) = bench(kind) else { return };
        bench.sh("mkdir -p d/e; echo one > d/a; ln d/a d/hard; ln -s a d/soft; touch -d 2001-01-01 d/a");
        bench.version();
        for (name, line) in [
            ("made and removed", "echo x > x; rm x; mkdir y; rmdir y"),
            ("renamed and back", "mv d/e d/f; mv d/f d/e"),
            ("its mode and back", "chmod 600 d/a; chmod 644 d/a"),
            ("rewritten, with its time", "echo one > d/a; touch -d 2001-01-01 d/a"),
        ] {
            bench.sh(line);
            assert_unchanged(&bench.take().filesystem, name);
        }
        for (name, line, path) in [
            ("bytes", "echo two > d/a; touch -d 2001-01-01 d/a", "/d/a"),
            ("a time", "touch -d 2002-01-01 d/a", "/d/a"),
            ("a new name", "echo x > d/e/x", "/d/e/x"),
            ("a name that is gone", "rm d/e/x", "/d/e/x"),
            ("another kind", "rm d/soft; mkdir d/soft", "/d/soft"),
            ("a mode", "chmod 700 d/soft", "/d/soft"),
            ("an attribute", "python3 -c 'import os; os.setxattr(\"d\", \"user.a\", b\"1\")'", "/d"),
        ] {
            bench.sh(line);
            let Change::Changed(Evidence::Files { count, examples }) = bench.take().filesystem else {
                panic!("{kind:?}, {name}: {}", bench.take().filesystem);
            };
            assert!(count >= 1 && examples.iter().any(|example| example == path), "{name}: {examples:?}");
            bench.version();
            assert_unchanged(&bench.take().filesystem, name);
        }
    }
}

#[test]
fn a_store_to_a_page_that_is_dirty_already_shows_on_ext4() {
    let Some(mut bench) = bench(Kind::Ext4) else { return };
    bench.sh("head -c 8192 /dev/zero > mapped");
    let program = "import mmap, sys
f = open('mapped', 'r+b'); m = mmap.mmap(f.fileno(), 0); m[0] = 1
print('ready')
for line in sys.stdin: m[0] = (m[0] + 1) % 256; print('done')";
    let path = bench.image.path.join("program.py");
    std::fs::write(&path, program).unwrap();
    let line = format!("exec python3 -u {}", path.display());
    let mut live = Live::start(bench.cgroup.command(&line), &bench.root);
    assert_eq!(live.hear(), "ready");
    for _ in 0..3 {
        bench.version();
        assert_unchanged(&bench.take().filesystem, "at rest");
        live.say("");
        live.hear();
        assert_changed(&bench.take().filesystem, "a store");
    }
}

#[test]
fn a_write_through_a_loop_device_shows_on_ext4() {
    let Some(mut bench) = bench(Kind::Ext4) else { return };
    if !has("losetup") {
        println!("skipped: losetup");
        return;
    }
    bench.sh("head -c 1048576 /dev/zero > f");
    run("sync", &[&"-f", &bench.root]);
    let device = run("losetup", &[&"--show", &"-f", &bench.root.join("f")]);
    let device = device.trim();
    let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        bench.version();
        assert_unchanged(&bench.take().filesystem, "attached");
        run("sh", &[&"-c", &format!("echo changed | dd of={device} conv=notrunc,fsync 2>/dev/null")]);
        assert_changed(&bench.take().filesystem, "a write to the device");
    }));
    let _ = Command::new("losetup").args(["-d", device]).output();
    done.unwrap();
}

#[test]
fn sandboxes_that_share_a_device_do_not_hide_from_each_other_what_the_host_writes() {
    let Some(bench) = bench(Kind::Ext4) else { return };
    let second = bench.image.path.join("second");
    std::fs::create_dir(&second).unwrap();
    let cgroup = common::Cgroup::new();
    let other = crab_core::Sandbox::new("other".parse().unwrap(), &second, &cgroup.path);
    common::block_on(bench.inspector.attach(&other)).unwrap();
    let take = || common::block_on(bench.inspector.take(&other.id));
    let rebase = |token| {
        let base = crab_core::Rebase { token, filesystem: true, process: true, tree: None };
        common::block_on(bench.inspector.rebase(&other.id, &base));
    };
    rebase(take().token);
    version_without_copy(&bench);
    assert_unchanged(&take().filesystem, "the other, at rest");
    bench.sh("echo x > x");
    assert_changed(&bench.take().filesystem, "its own write");
    assert_unchanged(&take().filesystem, "what one sandbox writes is not the other's");
    version_without_copy(&bench);
    shell(&second, "echo y > y");
    assert_changed(&take().filesystem, "the host wrote to the other");
    assert_changed(&bench.take().filesystem, "or to this one: it is not told where");
    common::block_on(bench.inspector.detach(&other.id));
    version_without_copy(&bench);
    shell(&bench.root, "echo y > y");
    assert_changed(&bench.take().filesystem, "alone again");
}

#[test]
fn without_bpf_a_small_root_is_read_whole_and_a_large_one_is_unknown() {
    if !able(&[]) {
        return;
    }
    let bench = Bench::on(Kind::Ext4, PollingInspector::new().with_limits(50, 1 << 20));
    bench.sh("mkdir d; echo one > d/a");
    version_without_copy(&bench);
    assert_unchanged(&bench.take().filesystem, "at rest");
    bench.sh("echo two > d/a");
    assert_changed(&bench.take().filesystem, "bytes");
    bench.sh("for i in $(seq 60); do echo > $i; done");
    version_without_copy(&bench);
    assert!(matches!(bench.take().filesystem, Change::Unknown(Unknown::Unobservable(_))));
}
