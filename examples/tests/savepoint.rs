//! The main job with real parts: a sandbox dies in the middle of its work, comes back whole, and the work ends as if
//! nothing had happened.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::path::Path;
use std::sync::Arc;

use crab_backend_btrfs::BtrfsBackend;
use crab_backend_criu::CriuBackend;
use crab_core::{Boundary, Gate, SandboxHost, SandboxId, StateDelta, Turn, TurnNumber, Verdict};
use crab_engine::{Engine, RestoreOptions, Select};
use crab_examples::agent::Agent;
use crab_examples::judge::{EndState, describe_tree};
use crab_examples::model::ModelServer;
use crab_examples::sandbox::{Config, ExampleHost, Sandbox, ScratchRoot, criu_binary, delete_root, home};
use crab_examples::session::Session;
use crab_inspector::{Inspector, PollingInspector};

/// Where a run keeps its versions. Removed with all that is in it.
struct Kept {
    root: ScratchRoot,
    store: tempfile::TempDir,
    versions: std::path::PathBuf,
}

impl Kept {
    fn new(name: &str) -> Self {
        let root = ScratchRoot::new(name).unwrap();
        let versions = home().join(format!("pool/scratch/{name}-versions-{}", std::process::id()));
        Self { root, store: tempfile::tempdir().unwrap(), versions }
    }
}

impl Drop for Kept {
    fn drop(&mut self) {
        for sandbox in std::fs::read_dir(&self.versions).into_iter().flatten().flatten() {
            for version in std::fs::read_dir(sandbox.path()).into_iter().flatten().flatten() {
                if version.path().is_dir() {
                    let _ = delete_root(&version.path());
                }
            }
        }
        let _ = std::fs::remove_dir_all(&self.versions);
    }
}

/// The one with BPF where the kernel allows it.
fn inspector() -> Arc<dyn StateDelta> {
    match Inspector::load() {
        Ok(inspector) => Arc::new(inspector),
        Err(error) => {
            println!("skipped: BPF ({error})");
            Arc::new(PollingInspector::new())
        }
    }
}

async fn engine(kept: &Kept, host: &Arc<ExampleHost>) -> Engine {
    let images = kept.store.path().join("images");
    let processes = CriuBackend::builder().images(images).binary(criu_binary()).open().await.unwrap();
    Engine::builder(kept.store.path().join("store"))
        .filesystem(Arc::new(BtrfsBackend::open(&kept.versions).unwrap()))
        .process(Arc::new(processes))
        .host(Arc::clone(host) as Arc<dyn SandboxHost>)
        .delta(inspector())
        .open()
        .await
        .unwrap()
}

async fn exec(sandbox: &Arc<Sandbox>, command: String) -> Option<String> {
    let sandbox = Arc::clone(sandbox);
    let output = tokio::task::spawn_blocking(move || sandbox.exec(&command)).await.unwrap();
    // Without a code the whole sandbox was killed.
    output.ok().filter(|output| output.code.is_some()).map(|output| output.text())
}

/// Works through the session. With a crash: all tasks of the sandbox are killed when this response's first command was
/// given, before its results are.
async fn work(name: &str, session: &Arc<Session>, crash: Option<usize>) -> (EndState, usize) {
    let model = ModelServer::start(Arc::clone(session), 0.0).await.unwrap();
    let kept = Kept::new(name);
    let id: SandboxId = format!("{name}-{}", std::process::id()).parse().unwrap();
    let host = Arc::new(ExampleHost::new());
    let sandbox = host.launch(Config::new(id.clone(), kept.root.path())).unwrap();
    let engine = engine(&kept, &host).await;
    engine.attach(&id).await.unwrap();

    let mut agent = Agent::new(model.address(), "/v1/messages", &session.task);
    let mut armed = crash;
    // For each turn how many responses the conversation held at its boundary.
    let mut boundaries: Vec<usize> = Vec::new();
    loop {
        boundaries.push(agent.responses());
        let (gate, mut hold) = Gate::new();
        let number = TurnNumber(boundaries.len() as u64);
        engine.turn(Boundary { turn: Turn::new(id.clone(), number), gate }).await;
        let asked = agent.ask().await.unwrap();
        hold.answer_waiting();
        let verdict = hold.verdict().await;
        assert!(matches!(verdict, Verdict::Durable(_)), "{number}: {verdict:?}");
        if asked.is_empty() {
            break;
        }
        let mut results = Vec::new();
        let mut dead = false;
        for asked in asked {
            let crashes = armed == Some(agent.responses() - 1) && results.is_empty();
            let output = exec(&sandbox, asked.call.shell()).await;
            if crashes {
                armed = None;
                std::fs::write(sandbox.cgroup().join("cgroup.kill"), "1").unwrap();
            }
            match output {
                Some(text) if !crashes => results.push((asked.id, text)),
                _ => {
                    dead = true;
                    break;
                }
            }
        }
        if dead {
            let report = engine.restore(&id, Select::Latest, RestoreOptions::default()).await.unwrap();
            let turn = usize::try_from(report.turn.0).unwrap();
            agent.rewind(boundaries[turn - 1]);
            continue;
        }
        agent.give(results);
    }
    let versions = engine.versions(&id).len();
    let mut probes = Vec::new();
    for probe in &session.judge.probes {
        probes.push((probe.clone(), exec(&sandbox, probe.clone()).await.unwrap()));
    }
    engine.detach(&id).await;
    engine.close().await;
    sandbox.kill().unwrap();
    let tree = describe_tree(kept.root.path(), &session.judge.ignore).unwrap();
    (EndState { tree, probes, conversation: agent.messages().to_vec() }, versions)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sandbox_that_dies_mid_task_comes_back_whole() {
    if !Path::new(&home()).join("pool/base/sbin/crab-init").exists() || !criu_binary().exists() {
        println!("skipped: sandbox root or criu (run `cargo xtask setup`)");
        return;
    }
    let session = Arc::new(Session::ticket_desk().unwrap());
    let (truth, versions) = work("savepoint-truth", &session, None).await;
    if Inspector::probe().works() {
        // Ten of the session's responses only read, and more leave nothing behind.
        assert!(versions + 8 <= session.responses.len(), "turns that change nothing made versions: {versions}");
    }
    // While files are edited, after processes changed alone, and in the last command that changes anything.
    for crash in [8, 19, 24] {
        let (end, _) = work(&format!("savepoint-{crash}"), &session, Some(crash)).await;
        assert_eq!(end.differences(&truth), Vec::<String>::new(), "crash at response {crash}");
    }
}
