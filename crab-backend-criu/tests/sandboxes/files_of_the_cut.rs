//! Processes with the filesystem of their cut: what changes on disk after it does no harm.

use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;

use async_trait::async_trait;
use crab_core::{AtCut, Condition, ErrorKind, Result};
use crab_examples::sandbox::{Sandbox, delete_root};

use crate::support::{World, background, eventually, python, run, world};

/// Snapshots the root at the cut.
pub(crate) struct Pair {
    root: PathBuf,
    saved: PathBuf,
}

impl Pair {
    pub(crate) fn of(sandbox: &Sandbox) -> Self {
        let root = sandbox.root();
        let saved = root.with_file_name(format!("{}-saved", root.file_name().unwrap().to_string_lossy()));
        Self { root, saved }
    }
}

fn snapshot(from: &PathBuf, to: &PathBuf) {
    let status = Command::new("btrfs").args(["-q", "subvolume", "snapshot"]).args([from, to]).status().unwrap();
    assert!(status.success());
}

#[async_trait]
impl AtCut for Pair {
    async fn run(&mut self) -> Result<()> {
        snapshot(&self.root, &self.saved);
        Ok(())
    }
}

impl Drop for Pair {
    fn drop(&mut self) {
        let _ = delete_root(&self.saved);
    }
}

/// Puts the files of the cut where the sandbox's root is.
pub(crate) fn roll_back(sandbox: &Sandbox, pair: &Pair) {
    delete_root(&sandbox.root()).unwrap();
    snapshot(&pair.saved, &sandbox.root());
}

/// A sandbox whose process has something of the root open that changes after the cut, by `change`: it restores with
/// the files of the cut, and is refused with the others.
async fn changes_after_the_cut(world: &World, sandbox: &Arc<Sandbox>, change: &str, proof: impl Fn() -> bool) {
    let mut pair = Pair::of(sandbox);
    let artifact = world.capture_with(sandbox, false, None, &mut pair).await.unwrap().persist().await.unwrap();
    run(sandbox, change);
    sandbox.kill().unwrap();
    let error = world.restore(sandbox, &artifact).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
    assert_eq!(error.sandbox_condition(), Some(Condition::Stopped));
    assert!(error.to_string().contains("restore the filesystem of the same version first"), "{error}");
    roll_back(sandbox, &pair);
    world.restore(sandbox, &artifact).await.unwrap();
    eventually("it works on", || proof().then_some(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_log_that_another_process_appends_to_after_the_dump() {
    let Some(world) = world().await else { return };
    let sandbox = world.bare();
    run(&sandbox, "echo begin > /root/log");
    let program = "
import time
log = open('/root/log', 'a')
while True:
    try:
        open('/root/go').close()
        log.write('go\\n'); log.flush()
    except OSError:
        pass
    time.sleep(0.02)
";
    python(&sandbox, "logs", program);
    eventually("it runs", || {
        (run(&sandbox, "ls /proc/*/fd/ -l 2>/dev/null | grep -c /root/log || true") != "0").then_some(())
    });
    let log = || std::fs::read_to_string(sandbox.root().join("root/log")).unwrap();
    let mut pair = Pair::of(&sandbox);
    let artifact = world.capture_with(&sandbox, false, None, &mut pair).await.unwrap().persist().await.unwrap();
    run(&sandbox, "echo late >> /root/log");
    // A file that is open for appending may have grown.
    sandbox.kill().unwrap();
    world.restore(&sandbox, &artifact).await.unwrap();
    run(&sandbox, "touch /root/go");
    eventually("it appends behind what came late", || log().starts_with("begin\nlate\ngo\n").then_some(()));
    // With the files of the cut it goes on from there.
    sandbox.kill().unwrap();
    roll_back(&sandbox, &pair);
    world.restore(&sandbox, &artifact).await.unwrap();
    run(&sandbox, "touch /root/go");
    eventually("it appends to what there was", || log().starts_with("begin\ngo\n").then_some(()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_library_that_is_replaced_on_disk_after_the_dump() {
    let Some(world) = world().await else { return };
    let sandbox = world.bare();
    run(&sandbox, "cp $(ldconfig -p | grep -o '/[^ ]*libm.so.6' | head -1) /root/libx.so");
    let program = "
import ctypes, time
lib = ctypes.CDLL('/root/libx.so')
lib.cos.restype = ctypes.c_double
n = 0
while True:
    n += int(lib.cos(ctypes.c_double(0.0)))
    with open('/root/n', 'w') as file:
        file.write(str(n))
    time.sleep(0.01)
";
    python(&sandbox, "uses", program);
    let n = || std::fs::read_to_string(sandbox.root().join("root/n")).ok()?.parse::<u64>().ok();
    eventually("it calls the library", n);
    let first = std::cell::Cell::new(None);
    let proof = || {
        let now = n();
        if first.get().is_none() {
            first.set(now);
        }
        now > first.get()
    };
    let change =
        "cp $(ldconfig -p | grep -o '/[^ ]*libz.so.1' | head -1) /root/liby.so; mv /root/liby.so /root/libx.so";
    changes_after_the_cut(&world, &sandbox, change, proof).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_grows_by_its_own_process_while_the_images_are_stored() {
    let Some(world) = world().await else { return };
    let sandbox = world.bare();
    background(&sandbox, "sh -c 'while :; do echo line; done > /root/grows'");
    let size = || std::fs::metadata(sandbox.root().join("root/grows")).map(|m| m.len()).ok().filter(|size| *size > 0);
    eventually("it grows", size);
    let mut pair = Pair::of(&sandbox);
    let captured = world.capture_with(&sandbox, false, None, &mut pair).await.unwrap();
    let then = size();
    eventually("it grows on", || size().filter(|now| Some(*now) > then));
    let artifact = captured.persist().await.unwrap();
    sandbox.kill().unwrap();
    roll_back(&sandbox, &pair);
    let rolled = size();
    world.restore(&sandbox, &artifact).await.unwrap();
    eventually("it grows from the cut on", || size().filter(|now| Some(*now) > rolled));
}
