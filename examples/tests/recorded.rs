//! Sessions of real agents, recorded elsewhere, worked through with a crash in each. They are no part of the project:
//! `CRAB_TRACES` names a directory with `trajectories/*.jsonl` in it, or one lies beside the checkout in
//! `shared/traces`.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use crab_examples::crash::{Crash, Moment};
use crab_examples::run::{Recovery, Runner};
use crab_examples::sandbox::{criu_binary, home, left_for_good};
use crab_examples::session::Session;

/// Sessions that end the same twice on a stand-in for their repository; a crash in each.
const SESSIONS: [(&str, Crash); 4] = [
    ("claude-code__EntityProcess_agentv__4e29b032b173", crash(8, Moment::Command)),
    ("claude-code__entireio_cli__e156aad9548e", crash(17, Moment::CrabAndSandbox)),
    ("swe-agent__crypto_katy", crash(11, Moment::AfterCommand)),
    ("swe-agent__rev_rock", crash(6, Moment::Answer)),
];

const fn crash(response: usize, moment: Moment) -> Crash {
    Crash { response, moment, fraction: 0.5 }
}

fn traces() -> PathBuf {
    match std::env::var_os("CRAB_TRACES") {
        Some(path) => path.into(),
        None => Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/traces"),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn sessions_of_real_agents_end_as_without_the_crash() {
    if !home().join("pool/base/sbin/crab-init").exists() || !criu_binary().exists() {
        println!("skipped: sandboxes (root and `cargo xtask setup` are needed)");
        return;
    }
    if !traces().join("trajectories").exists() {
        println!("skipped: recorded trajectories (name a directory of them by CRAB_TRACES)");
        return;
    }
    for (at, (name, crash)) in SESSIONS.into_iter().enumerate() {
        let session = Session::load_recorded(&traces().join(format!("trajectories/{name}.jsonl"))).unwrap();
        let mut runner = Runner::on_stand_in(Arc::new(session), Path::new(env!("CARGO_BIN_EXE_demo")));
        let truth = runner.truth(&format!("recorded-truth{at}")).await.unwrap();
        runner.command_times = truth.command_times.clone();
        let outcome = runner.run(&format!("recorded-crash{at}"), Recovery::Crab, Some(crash)).await;
        let outcome = outcome.unwrap_or_else(|error| panic!("{name}: {error}"));
        assert!(outcome.crashed && !outcome.restores.is_empty(), "{name}");
        assert_eq!(outcome.end.differences(&truth.end), Vec::<String>::new(), "{name}");
    }
    assert_eq!(left_for_good("recorded-"), Vec::<String>::new());
}
