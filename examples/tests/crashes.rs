//! The main job with all real parts: sessions are worked through with Crab as a process of its own, and whatever dies
//! at whatever moment, the work ends as if nothing had happened.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use crab_core::{Error, Result};
use crab_examples::crash::{Crash, Moment, Numbers};
use crab_examples::run::{Outcome, Recovery, Runner};
use crab_examples::sandbox::{criu_binary, home, left_for_good};
use crab_examples::session::Session;

/// Why the machine cannot run these tests, said once per test.
fn lacking() -> bool {
    let ready = home().join("pool/base/sbin/crab-init").exists() && criu_binary().exists();
    if !ready {
        println!("skipped: sandboxes (root and `cargo xtask setup` are needed)");
    }
    !ready
}

fn runner(session: Session) -> Runner {
    Runner::new(Arc::new(session), Path::new(env!("CARGO_BIN_EXE_demo")))
}

/// Runs some crashes at a time and says of each how it ended.
async fn all(runner: Arc<Runner>, name: &str, crashes: Vec<(u64, Crash)>) -> Vec<(u64, Crash, Result<Outcome>)> {
    let places = Arc::new(tokio::sync::Semaphore::new(2));
    let mut runs = tokio::task::JoinSet::new();
    for (seed, crash) in crashes {
        let (runner, places, name) = (Arc::clone(&runner), Arc::clone(&places), format!("{name}-{seed}"));
        runs.spawn(async move {
            let _place = places.acquire().await.map_err(|e| Error::new(crab_core::ErrorKind::Internal, e.to_string()));
            (seed, crash, runner.run(&name, Recovery::Crab, Some(crash)).await)
        });
    }
    runs.join_all().await
}

#[tokio::test(flavor = "multi_thread")]
async fn twenty_random_crashes_end_as_the_run_without_a_fault() {
    if lacking() {
        return;
    }
    let mut runner = runner(Session::ticket_desk().unwrap());
    let turns = runner.session.responses.len();
    let truth = runner.truth("seeds-truth").await.unwrap();
    runner.command_times = truth.command_times.clone();

    let calm = runner.run("seeds-calm", Recovery::Crab, None).await.unwrap();
    assert_eq!(calm.end.differences(&truth.end), Vec::<String>::new(), "with Crab and without a crash");
    assert_eq!((calm.told.covered.len(), &calm.told.uncovered[..]), (turns + 1, &[][..]));
    if calm.bpf {
        // Ten of the session's responses only read files, and more leave nothing behind.
        let skips = calm.told.covered.iter().filter(|turn| turn.captured == "skip").count();
        assert!(skips >= 8, "turns that change nothing made versions: {:?}", calm.told.covered);
    }

    let crashes = (1..=20).map(|seed| (seed, Crash::random(seed, turns))).collect();
    for (seed, crash, outcome) in all(Arc::new(runner), "seeds", crashes).await {
        let outcome = outcome.unwrap_or_else(|error| panic!("seed {seed}, {crash:?}: {error}"));
        assert!(outcome.crashed, "seed {seed}: {crash:?} did not happen");
        assert_eq!(outcome.end.differences(&truth.end), Vec::<String>::new(), "seed {seed}, {crash:?}");
        let lives = if crash.moment.ends_sandbox() { 1.. } else { 0.. };
        assert!(lives.contains(&outcome.restores.len()), "seed {seed}, {crash:?}: {:?}", outcome.restores);
        assert_eq!(outcome.restarts > 0, crash.moment.ends_crab(), "seed {seed}, {crash:?}");
    }
    assert_eq!(left_for_good("seeds-"), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn less_than_files_and_processes_does_not_end_the_same() {
    if lacking() {
        return;
    }
    let runner = runner(Session::ticket_desk().unwrap());
    let truth = runner.truth("less-truth").await.unwrap();
    // Both servers hold state by then.
    let crash = Crash::at(19, Moment::AfterCommand, &mut Numbers(1));
    for (name, recovery) in [("less-chat", Recovery::ChatOnly), ("less-files", Recovery::ChatAndFiles)] {
        let outcome = runner.run(name, recovery, Some(crash)).await.unwrap();
        assert!(outcome.crashed);
        let differences = outcome.end.differences(&truth.end);
        assert!(differences.iter().any(|line| line.contains("7070 COUNT")), "{recovery:?}: {differences:?}");
    }
    assert_eq!(left_for_good("less-"), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_dies_after_its_last_command_is_begun_anew_where_nothing_was_saved() {
    if lacking() {
        return;
    }
    let mut session = Session::ticket_desk().unwrap();
    session.responses.truncate(4);
    let runner = runner(session);
    let truth = runner.truth("last-truth").await.unwrap();
    let crash = Crash::at(3, Moment::AfterCommand, &mut Numbers(1));
    let outcome = runner.run("last-restart", Recovery::Restart, Some(crash)).await.unwrap();
    assert!(outcome.crashed);
    assert_eq!(outcome.end.differences(&truth.end), Vec::<String>::new());
    assert_eq!(left_for_good("last-"), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_ends_its_own_shell_does_not_pass_for_a_dead_sandbox() {
    if lacking() {
        return;
    }
    let lines = [r#"{"task": "go"}"#, r#"{"tool": "bash", "command": "echo before; kill -9 $PPID $$", "llm_turn": 1}"#];
    let runner = runner(Session::parse("own-shell", &lines.join("\n")).unwrap());
    let end = tokio::time::timeout(Duration::from_secs(300), runner.truth("shell-truth")).await;
    let conversation = end.expect("it begins anew for ever").unwrap().end.conversation;
    assert!(conversation.iter().any(|message| message.to_string().contains("before")), "{conversation:?}");
    assert_eq!(left_for_good("shell-"), Vec::<String>::new());
}
