//! Every way to change a file that is known, each by the sandbox, by a child cgroup of it, and by the host, on each kind
//! of root. The judgement must never be `Unchanged`; an independent one says that there was a change at all: a
//! subvolume's generation after a sync, and of other roots an archive of them.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use common::{Bench, Kind, Live, able, assert_unchanged, has, run, shell};
use crab_core::Change;
use crab_inspector::Inspector;

const WAYS: &[&str] = &[
    "write",
    "append",
    "pwrite",
    "writev",
    "pwritev",
    "pwritev2",
    "sendfile",
    "copy_file_range",
    "splice",
    "vmsplice",
    "aio",
    "io_uring",
    "io_uring_sqpoll",
    "direct",
    "truncate",
    "ftruncate",
    "open_trunc",
    "creat",
    "open_creat",
    "openat2",
    "tmpfile_link",
    "fallocate",
    "punch_hole",
    "zero_range",
    "madvise_remove",
    "mmap_store",
    "mmap_store_late",
    "read_into_mapping",
    "process_vm_writev",
    "ptrace",
    "mkdir",
    "mknod",
    "symlink",
    "link",
    "rename",
    "exchange",
    "unlink",
    "rmdir",
    "truncate_unlink",
    "rename_over_unlink",
    "chmod",
    "fchmod",
    "fchmodat2",
    "chown",
    "lchown",
    "utimensat",
    "setxattr",
    "fsetxattr",
    "removexattr",
    "setxattrat",
    "clone",
    "setflags",
    "bind",
    "open_by_handle",
    "inherited",
    "passed",
    "output",
    "killed",
    "core",
    "odd_name",
    "long_path",
    "compat",
];

struct Matrix {
    bench: Bench<Inspector>,
    tool: PathBuf,
    pristine: PathBuf,
    /// Whether the kernel tells of changes to this file system.
    told: bool,
}

/// Whether this is the virtual machine.
fn in_vm() -> bool {
    std::env::var_os("CRAB_IN_VM").is_some()
}

fn matrix(kind: Kind) -> Option<Matrix> {
    // Where there is no compiler, as in a virtual machine, tests/mutate.c may have been built elsewhere.
    let prebuilt = std::env::var_os("CRAB_TEST_MUTATE").map(PathBuf::from);
    if !able(if prebuilt.is_some() { &["python3"] } else { &["cc", "python3"] }) {
        return None;
    }
    if kind == Kind::Subvolume && !able(&["mkfs.btrfs", "btrfs"]) || kind == Kind::Xfs && !able(&["mkfs.xfs"]) {
        return None;
    }
    let told = format!("changes to {}", kind.file_system());
    let told = Inspector::probe().checks.iter().any(|check| check.works && check.what == told);
    let inspector = match Inspector::load() {
        Ok(inspector) => inspector,
        Err(error) => {
            println!("skipped: BPF: {error}");
            return None;
        }
    };
    let bench = Bench::on(kind, inspector);
    let tool = bench.image.path.join("mutate");
    match prebuilt {
        Some(prebuilt) => drop(fs::copy(prebuilt, &tool).unwrap()),
        None => {
            let source = bench.image.path.join("mutate.c");
            fs::write(&source, include_str!("mutate.c")).unwrap();
            run("cc", &[&"-O1", &"-w", &"-o", &tool, &source]);
        }
    }
    bench.sh("mkdir d; echo old > d/old; ln -s f link; head -c 1048576 /dev/zero | tr '\\0' f > f
        head -c 1048576 /dev/zero | tr '\\0' g > g; echo x > x; chmod 600 f");
    shell(&bench.root, "python3 -c 'import os; os.setxattr(\"x\", \"user.a\", b\"1\")'");
    let pristine = bench.image.path.join("pristine");
    if kind == Kind::Subvolume {
        run("btrfs", &[&"-q", &"subvolume", &"snapshot", &"-r", &bench.root, &pristine]);
    } else {
        run("cp", &[&"-a", &bench.root, &pristine]);
    }
    Some(Matrix { bench, tool, pristine, told })
}

impl Matrix {
    /// Back to the beginning, and so often looked at that nothing but events would show a change.
    fn reset(&mut self) {
        let line = "find \"$0\" -mindepth 1 -delete; cp -a --reflink=auto \"$1\"/. \"$0\"";
        run("sh", &[&"-c", &line, &self.bench.root, &self.pristine]);
        self.bench.version();
        // What the flush of the reset itself stirs up ends soon, and so does what the last way left behind.
        let until = Instant::now() + Duration::from_secs(if in_vm() { 100 } else { 5 });
        while !self.at_rest() {
            if Instant::now() >= until {
                let begin = Instant::now();
                let delta = self.bench.take();
                panic!("the files are not at rest: {delta:?}, looked at in {:?}", begin.elapsed());
            }
        }
    }

    /// Whether the files are unchanged, by events alone where there are any: a look would have committed what another
    /// subvolume wrote.
    fn at_rest(&self) -> bool {
        let unchanged = || self.bench.take().filesystem == Change::Unchanged;
        if !unchanged() {
            return false;
        }
        if !self.told {
            return true;
        }
        let begin = Instant::now();
        // Emulated, all takes some twenty times as long, and more where the machine has other work.
        let quick = if in_vm() { 1000 } else { 1 };
        unchanged() && begin.elapsed() < Duration::from_millis(quick)
    }

    /// Another word after each change.
    fn state(&self) -> String {
        if self.bench.kind == Kind::Subvolume {
            run("sync", &[&"-f", &self.bench.root]);
            let shown = run("btrfs", &[&"subvolume", &"show", &self.bench.root]);
            return shown.lines().find(|line| line.trim().starts_with("Generation:")).unwrap().to_owned();
        }
        shell(
            &self.bench.root,
            "{ tar --xattrs --xattrs-include='*' --sort=name -cf - .; lsattr -aR 2>/dev/null || true; } | sha256sum",
        )
    }

    /// Makes a change and looks. `None`: this host has no such way.
    fn try_way(&mut self, way: &str, mut command: Command) -> Option<Change> {
        self.reset();
        let before = self.state();
        let output = command.current_dir(&self.bench.root).output().unwrap();
        match output.status.code() {
            Some(0) => {}
            Some(77) => return None,
            code => panic!("{way}: {code:?} {}", String::from_utf8_lossy(&output.stderr)),
        }
        let change = self.bench.take().filesystem;
        assert!(self.state() != before, "{way} changed nothing");
        Some(change)
    }

    fn all(&mut self, by: &str, command: impl Fn(&Self, &str) -> Command) {
        let mut missed = Vec::new();
        let mut skipped = Vec::new();
        for way in WAYS {
            let command = command(self, way);
            match self.try_way(way, command) {
                Some(Change::Unchanged) => missed.push(*way),
                Some(_) => {}
                None => skipped.push(*way),
            }
        }
        println!("{by}: {} ways, not here: {skipped:?}", WAYS.len() - skipped.len());
        assert!(missed.is_empty(), "{by}: missed {missed:?}");
        assert!(WAYS.len() - skipped.len() > 40, "too few ways work here");
    }

    fn by_everybody(&mut self) {
        let child = self.bench.cgroup.path.join("child");
        fs::create_dir(&child).unwrap();
        self.all("by the sandbox", |matrix, way| {
            matrix.bench.cgroup.command(&format!("exec {} {way}", matrix.tool.display()))
        });
        // Emulated, one round takes as long as the rest elsewhere.
        if in_vm() {
            return;
        }
        self.all("by a child cgroup", |matrix, way| {
            let line = format!("echo $$ > {}/cgroup.procs; exec {} {way}", child.display(), matrix.tool.display());
            let mut command = Command::new("sh");
            command.args(["-c", &line]);
            command
        });
        self.all("by the host", |matrix, way| {
            let mut command = Command::new(&matrix.tool);
            command.arg(way);
            command
        });
    }
}

#[test]
fn every_way_shows_on_btrfs() {
    let Some(mut matrix) = matrix(Kind::Subvolume) else { return };
    matrix.by_everybody();
}

#[test]
fn every_way_shows_on_ext4() {
    let Some(mut matrix) = matrix(Kind::Ext4) else { return };
    matrix.by_everybody();
}

#[test]
fn every_way_shows_on_an_overlay() {
    let Some(mut matrix) = matrix(Kind::Overlay) else { return };
    matrix.by_everybody();
}

#[test]
fn every_way_shows_on_xfs() {
    let Some(mut matrix) = matrix(Kind::Xfs) else { return };
    matrix.by_everybody();
}

#[test]
fn every_way_shows_on_tmpfs() {
    let Some(mut matrix) = matrix(Kind::Tmpfs) else { return };
    matrix.by_everybody();
}

#[test]
fn by_a_store_to_a_page_that_is_dirty_already() {
    let Some(mut matrix) = matrix(Kind::Subvolume) else { return };
    matrix.reset();
    let line = format!("exec {} live", matrix.tool.display());
    let mut live = Live::start(matrix.bench.cgroup.command(&line), &matrix.bench.root);
    assert_eq!(live.hear(), "ready");
    for _ in 0..3 {
        matrix.bench.version();
        live.say("");
        live.hear();
        assert!(matrix.bench.take().filesystem.needs_checkpoint(), "the first store");
        // Not committed meanwhile by a look: the page stays dirty.
        live.say("");
        live.hear();
        assert!(matrix.bench.take().filesystem.needs_checkpoint(), "the second store");
    }
}

#[test]
fn through_a_loop_device() {
    if !has("losetup") {
        println!("skipped: losetup");
        return;
    }
    for kind in [Kind::Subvolume, Kind::Ext4] {
        written_through_a_loop_device(kind);
    }
}

fn written_through_a_loop_device(kind: Kind) {
    let Some(mut matrix) = matrix(kind) else { return };
    let device = run("losetup", &[&"--show", &"-f", &matrix.bench.root.join("f")]);
    let device = device.trim();
    let written = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        // The device is the old file, which the reset replaces: it is attached anew.
        run("losetup", &[&"-d", &device]);
        matrix.reset();
        run("losetup", &[&device, &matrix.bench.root.join("f")]);
        assert_unchanged(&matrix.bench.take().filesystem, "attached");
        run("sh", &[&"-c", &format!("echo changed | dd of={device} conv=notrunc,fsync 2>/dev/null")]);
        assert!(matrix.bench.take().filesystem.needs_checkpoint(), "a write to the device");
    }));
    let _ = Command::new("losetup").args(["-d", device]).output();
    written.unwrap();
}

#[test]
fn reading_tools_need_no_commit() {
    let Some(mut matrix) = matrix(Kind::Subvolume) else { return };
    matrix.reset();
    // Another subvolume has much to write: a commit would take long.
    let other = matrix.bench.image.path.join("other");
    run("btrfs", &[&"-q", &"subvolume", &"create", &other]);
    let mut took = Vec::new();
    for _ in 0..20 {
        matrix.bench.cgroup.run(&matrix.bench.root, "cat f d/old | head -c 100000 | wc -c; ls -lR | sort | tail -1");
        shell(&other, "true");
        let begin = Instant::now();
        assert_unchanged(&matrix.bench.take().filesystem, "read");
        took.push(begin.elapsed());
    }
    took.sort();
    println!("a look after reading: p50 {:?}, worst {:?}", took[10], took[19]);
}
