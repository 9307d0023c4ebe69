//! Real agents and real SDKs do their work through the coordinator, while its gates are held, against a scripted model.
//! `cargo xtask setup --agents` installs them.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test stops where it is surprised")]

#[path = "../http/support/mod.rs"]
#[allow(dead_code, reason = "shared with the tests over plain sockets")]
mod support;

mod model;

use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::Duration;

use crab_core::TurnBoundary;
use parking_lot::Mutex;
use tokio::process::Command;

use model::Script;
use support::{Model, builder, durable, start_with};

/// How long gates are held: not at all, longer than a keep-alive, longer than many a client's patience with silence.
const HOLDS: [u64; 3] = [0, 5, 40];
const LIMIT: Duration = Duration::from_secs(300);

/// Where the agents are, if they are.
fn agents() -> Option<PathBuf> {
    let home = std::env::var_os("CRAB_HOME").filter(|home| !home.is_empty());
    let dir = PathBuf::from(home.unwrap_or_else(|| "/var/lib/crab".into())).join("agents");
    if dir.join("recipe").exists() {
        return Some(dir);
    }
    println!("skipped: real agents (cargo xtask setup --agents)");
    None
}

/// A program that has nothing of the machine but what it is given: an empty home, no proxies, no keys.
fn program(path: &Path, home: &Path) -> Command {
    let mut command = Command::new(path);
    command
        .env_clear()
        .env("PATH", "/usr/local/bin:/usr/bin:/bin")
        .env("HOME", home)
        .env("LANG", "C.UTF-8")
        .env("TERM", "dumb")
        .env("NO_COLOR", "1")
        .current_dir(home.join("work"))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true);
    command
}

/// What one client did with a coordinator whose gates are held.
struct Session {
    /// What it printed, both ways.
    said: String,
    succeeded: bool,
    /// Lines of the work that its tool calls did.
    work: Vec<String>,
    /// Turn requests that the model saw.
    asked: usize,
    turns: usize,
    delivered: usize,
}

/// Runs a client. The first gate, whose answer calls a tool, is held for `hold` seconds.
async fn session(hold: u64, client: impl FnOnce(&Path, u16) -> Command) -> Session {
    let home = tempfile::tempdir().unwrap();
    std::fs::create_dir(home.path().join("work")).unwrap();
    let script = Arc::new(Script::new(home.path().join("work/done")));
    let answers = script.clone();
    let model = Model::start(move |message, stream| {
        let raw = answers.answer(&message);
        Box::pin(async move { tokio::io::AsyncWriteExt::write_all(&mut *stream.lock().await, &raw).await.is_ok() })
    })
    .await;
    let journal = tempfile::tempdir().unwrap();
    let (coordinator, mut boundaries, address) = start_with(builder(model.address).journal(journal.path())).await;
    let turns = Arc::new(Mutex::new(0));
    let opened = turns.clone();
    let engine = tokio::spawn(async move {
        while let Some(boundary) = boundaries.next().await {
            *opened.lock() += 1;
            if *opened.lock() == 1 {
                tokio::time::sleep(Duration::from_secs(hold)).await;
            }
            boundary.gate.decide(durable());
        }
    });
    let running = client(home.path(), address.port()).spawn().unwrap().wait_with_output();
    let output = tokio::time::timeout(LIMIT, running).await.expect("the client does not end").unwrap();
    engine.abort();
    let work = std::fs::read_to_string(home.path().join("work/done")).unwrap_or_default();
    let delivered = coordinator.turns(&support::id("box")).iter().filter(|turn| turn.delivered).count();
    let turns = *turns.lock();
    Session {
        said: format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr)),
        succeeded: output.status.success(),
        work: work.lines().map(str::to_owned).collect(),
        asked: script.asked(),
        turns,
        delivered,
    }
}

/// Runs an agent's session once for each hold, at the same time, and checks that it noticed nothing.
async fn notices_nothing(client: impl Fn(&Path, u16) -> Command) {
    let sessions = HOLDS.map(|hold| session(hold, &client));
    for (session, hold) in futures_util::future::join_all(sessions).await.into_iter().zip(HOLDS) {
        let said = &session.said;
        assert!(session.succeeded, "gates held for {hold} s: {said}");
        assert!(said.contains(model::LAST_WORDS), "gates held for {hold} s: {said}");
        assert_eq!(session.work, ["step 1", "step 2"], "each tool call ran once; gates held for {hold} s: {said}");
        assert_eq!(
            (session.turns, session.asked, session.delivered),
            (model::TURNS, model::TURNS, model::TURNS),
            "no request was repeated; gates held for {hold} s: {said}"
        );
        let lower = said.to_lowercase();
        for alarm in ["retry", "retrying", "timed out", "timeout", "stream disconnected", "overloaded", "stalled"] {
            assert!(!lower.contains(alarm), "gates held for {hold} s: {said}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claude_code_notices_nothing_of_a_held_gate() {
    let Some(agents) = agents() else { return };
    notices_nothing(|home, port| {
        let mut command = program(&agents.join("node_modules/.bin/claude"), home);
        command
            .args(["-p", "do the work", "--dangerously-skip-permissions"])
            .env("ANTHROPIC_BASE_URL", format!("http://127.0.0.1:{port}"))
            .env("ANTHROPIC_API_KEY", "dummy")
            .env("IS_SANDBOX", "1")
            .env("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1")
            .env("DISABLE_TELEMETRY", "1")
            .env("DISABLE_AUTOUPDATER", "1");
        command
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn codex_notices_nothing_of_a_held_gate() {
    let Some(agents) = agents() else { return };
    notices_nothing(|home, port| {
        let config = format!(
            "model = \"scripted\"\nmodel_provider = \"scripted\"\n\n[model_providers.scripted]\nname = \"scripted\"\nbase_url = \"http://127.0.0.1:{port}/v1\"\nenv_key = \"SCRIPTED_KEY\"\nwire_api = \"responses\"\n"
        );
        std::fs::create_dir(home.join(".codex")).unwrap();
        std::fs::write(home.join(".codex/config.toml"), config).unwrap();
        let mut command = program(&agents.join("node_modules/.bin/codex"), home);
        command
            .args(["exec", "--dangerously-bypass-approvals-and-sandbox", "--skip-git-repo-check", "do the work"])
            .env("CODEX_HOME", home.join(".codex"))
            .env("SCRIPTED_KEY", "dummy");
        command
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mini_swe_agent_notices_nothing_of_a_held_gate() {
    let Some(agents) = agents() else { return };
    notices_nothing(|home, port| {
        let mut command = program(&agents.join("venv/bin/mini"), home);
        command
            .args(["--model", "openai/scripted", "--task", "do the work", "--yolo", "--exit-immediately"])
            .arg("--output")
            .arg(home.join("trajectory.json"))
            .env("OPENAI_API_BASE", format!("http://127.0.0.1:{port}/v1"))
            .env("OPENAI_API_KEY", "dummy")
            .env("MSWEA_CONFIGURED", "true")
            .env("MSWEA_COST_TRACKING", "ignore_errors")
            .env("MSWEA_GLOBAL_CONFIG_DIR", home)
            .env("LITELLM_LOCAL_MODEL_COST_MAP", "True");
        command
    })
    .await;
}

/// The SDKs with their own defaults: a session of three turns, streamed and in one piece, by each API.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_sdks_notice_nothing_of_a_held_gate() {
    let Some(agents) = agents() else { return };
    let cases = ["messages", "chat", "responses"].iter().flat_map(|api| [(api, "whole"), (api, "stream")]);
    let sessions = cases.map(|(api, how)| {
        let agents = &agents;
        async move {
            let session = session(5, |home, port| {
                let mut command = program(&agents.join("venv/bin/python"), home);
                command.args(["-c", include_str!("sdk.py"), api, how, &port.to_string()]);
                command
            })
            .await;
            (api, how, session)
        }
    });
    for (api, how, session) in futures_util::future::join_all(sessions).await {
        assert!(session.succeeded, "{api} {how}: {}", session.said);
        assert!(session.said.contains(model::LAST_WORDS), "{api} {how}: {}", session.said);
        assert_eq!((session.turns, session.asked), (model::TURNS, model::TURNS), "{api} {how}: {}", session.said);
        assert_eq!(session.work, ["step 1", "step 2"], "{api} {how}: {}", session.said);
    }
}
