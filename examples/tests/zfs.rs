//! The main job with ZFS in the place of btrfs, where there is ZFS: in the virtual machine.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use crab_examples::crash::{Crash, Moment, Numbers};
use crab_examples::run::{Progress, Recovery, Runner};
use crab_examples::sandbox::{ExecOptions, criu_binary, home, left_for_good};
use crab_examples::session::Session;

/// The program that is Crab's own process, where it is not where it was built.
fn program() -> PathBuf {
    std::env::var_os("CRAB_DEMO").map_or_else(|| Path::new(env!("CARGO_BIN_EXE_demo")).to_owned(), PathBuf::from)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_on_zfs_outlives_a_crash_and_ends_as_without() {
    let kind = rustix::fs::statfs(home().join("pool")).map(|found| found.f_type).unwrap_or(0);
    if kind != 0x2fc1_2fc1 || !criu_binary().exists() {
        println!("skipped: sandboxes on ZFS");
        return;
    }
    let session = Arc::new(Session::ticket_desk().unwrap());
    let turns = session.responses.len();
    let mut runner = Runner::new(session, &program());
    runner.commands = ExecOptions { timeout: Some(Duration::from_secs(300)), ..runner.commands };
    let begun = std::time::Instant::now();
    runner.progress = Box::new(move |progress: &Progress| println!("{} s: {progress:?}", begun.elapsed().as_secs()));
    let truth = runner.truth("zfs-truth").await.unwrap();
    runner.command_times = truth.command_times.clone();

    let crash = Crash::at(turns * 2 / 3, Moment::AfterCommand, &mut Numbers(1));
    let outcome = runner.run("zfs-crash", Recovery::Crab, Some(crash)).await.unwrap();
    assert!(outcome.crashed);
    assert_eq!(outcome.end.differences(&truth.end), Vec::<String>::new());
    assert!(outcome.restores.iter().all(|restore| restore.processes), "{:?}", outcome.restores);
    assert_eq!(left_for_good("zfs-"), Vec::<String>::new());
}
