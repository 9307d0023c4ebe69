//! Real agents inside a sandbox: it dies while its agent waits for the model, comes back, and the agent ends its work as
//! if nothing had happened. `cargo xtask setup --agents` installs the agents.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

#[path = "../../crab-coordinator/tests/agents/model.rs"]
#[allow(dead_code, reason = "shared with the tests of the coordinator alone")]
mod model;
#[path = "../../crab-coordinator/tests/http/support/mod.rs"]
#[allow(dead_code, reason = "the scripted model's server is of use, the rest is not")]
mod support;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crab_backend_btrfs::BtrfsBackend;
use crab_backend_criu::CriuBackend;
use crab_coordinator::resolve::OneSandbox;
use crab_coordinator::{AfterRestore, Coordinator, GateRecord};
use crab_core::{SandboxHost, SandboxId, StateDelta};
use crab_engine::{Engine, ProcessOutcome, RestoreOptions, Select};
use crab_examples::import::import;
use crab_examples::sandbox::{
    Config, ExampleHost, ExecOptions, Sandbox, ScratchArea, criu_binary, home, snapshot_root,
};
use crab_examples::session::{Call, Session};
use crab_inspector::{Inspector, PollingInspector};
use tokio::sync::watch;

use model::Script;
use support::Model;

const PORT: u16 = 8080;
const LIMIT: Duration = Duration::from_secs(240);

/// Where the agents are, if they are.
fn agents() -> Option<PathBuf> {
    let dir = home().join("agents");
    if dir.join("recipe").exists() {
        return Some(dir);
    }
    println!("skipped: real agents (cargo xtask setup --agents)");
    None
}

/// How an agent is put into a sandbox, started, and started again.
struct Recipe {
    name: &'static str,
    /// From the agents' directory into the sandbox's root.
    files: &'static [(&'static str, &'static str)],
    /// What is left out of directories among them.
    without: &'static [&'static str],
    config: Option<(&'static str, &'static str)>,
    start: &'static str,
    /// How it takes up its work where its files are all that came back. Without, its processes are saved.
    resume: Option<&'static str>,
    env: &'static [(&'static str, &'static str)],
    /// Where it keeps the files of its sessions, of a kind that can be imported.
    sessions: Option<&'static str>,
}

const CLAUDE_ENV: &[(&str, &str)] = &[
    ("ANTHROPIC_BASE_URL", "http://127.0.0.1:8080"),
    ("ANTHROPIC_API_KEY", "dummy"),
    ("IS_SANDBOX", "1"),
    ("CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC", "1"),
    ("DISABLE_TELEMETRY", "1"),
    ("DISABLE_AUTOUPDATER", "1"),
];
const CLAUDE: Recipe = Recipe {
    name: "claude",
    files: &[("node_modules/@anthropic-ai/claude-code/bin/claude.exe", "opt/agent")],
    without: &[],
    config: None,
    start: "/opt/agent -p 'do the work' --dangerously-skip-permissions",
    resume: None,
    env: CLAUDE_ENV,
    sessions: Some("root/.claude/projects"),
};

fn delta() -> Arc<dyn StateDelta> {
    match Inspector::load() {
        Ok(inspector) => Arc::new(inspector),
        Err(error) => {
            println!("skipped: BPF ({error})");
            Arc::new(PollingInspector::new())
        }
    }
}

async fn exec(sandbox: &Arc<Sandbox>, command: String, env: &[(&str, &str)]) -> String {
    let sandbox = Arc::clone(sandbox);
    let env = env.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect();
    let options = ExecOptions { env, ..ExecOptions::default() };
    let output = tokio::task::spawn_blocking(move || sandbox.exec_with(&command, &options)).await.unwrap();
    output.unwrap().text()
}

/// Carries connections from inside the sandbox to the coordinator.
fn bridge(sandbox: &Sandbox, to: std::net::SocketAddr) -> tokio::task::JoinHandle<()> {
    let listener = sandbox.listen(PORT).unwrap();
    listener.set_nonblocking(true).unwrap();
    let listener = tokio::net::TcpListener::from_std(listener).unwrap();
    tokio::spawn(async move {
        let mut connections = tokio::task::JoinSet::new();
        while let Ok((mut inside, _)) = listener.accept().await {
            connections.spawn(async move {
                if let Ok(mut outside) = tokio::net::TcpStream::connect(to).await {
                    let _ = tokio::io::copy_bidirectional(&mut inside, &mut outside).await;
                }
            });
        }
    })
}

/// Runs the agent; its sandbox is killed while it waits for the model's second answer, whose turn is saved already.
async fn dies_and_ends_its_work(recipe: &Recipe) {
    let Some(agents) = agents() else { return };
    let script = Arc::new(Script::new("/root/done".into()));
    // The model keeps its second answer until the sandbox has died.
    let (died, is_dead) = watch::channel(false);
    let answers = script.clone();
    let model = Model::start(move |message, stream| {
        let raw = answers.answer(&message);
        let mut is_dead = is_dead.clone();
        let second = answers.asked() == 2;
        Box::pin(async move {
            if second {
                let _ = is_dead.wait_for(|dead| *dead).await;
            }
            tokio::io::AsyncWriteExt::write_all(&mut *stream.lock().await, &raw).await.is_ok()
        })
    })
    .await;

    let area = ScratchArea::new(recipe.name).unwrap();
    let root = area.path().join("root");
    snapshot_root(&root).unwrap();
    for (from, to) in recipe.files {
        copy(&agents.join(from), &root.join(to), recipe.without);
    }
    if let Some((path, text)) = recipe.config {
        let path = root.join(path);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        std::fs::write(path, text).unwrap();
    }
    let id: SandboxId = format!("{}-{}", recipe.name, std::process::id()).parse().unwrap();
    let host = Arc::new(ExampleHost::new());
    let sandbox = host.launch(Config::new(id.clone(), &root)).unwrap();
    let mut builder = Engine::builder(area.path().join("store"))
        .filesystem(Arc::new(BtrfsBackend::open(area.path().join("versions")).unwrap()))
        .host(Arc::clone(&host) as Arc<dyn SandboxHost>)
        .delta(delta());
    if recipe.resume.is_none() {
        let images = area.path().join("images");
        let processes = CriuBackend::builder().images(images).binary(criu_binary()).open().await.unwrap();
        builder = builder.process(Arc::new(processes));
    }
    let engine = builder.open().await.unwrap();
    engine.attach(&id).await.unwrap();
    let (coordinator, boundaries) = Coordinator::builder()
        .upstream(format!("http://{}", model.address))
        .listen(crab_coordinator::Listen::loopback(), OneSandbox(id.clone()))
        .journal(area.path().join("journal"))
        .start()
        .await
        .unwrap();
    let driving = tokio::spawn({
        let engine = engine.clone();
        async move { engine.drive(boundaries).await }
    });
    let bridging = bridge(&sandbox, coordinator.address().unwrap());

    let background = |line: &str| format!("setsid nohup {line} </dev/null >>/root/said 2>&1 &");
    exec(&sandbox, background(recipe.start), recipe.env).await;
    until(&sandbox, "the second turn to be saved", || {
        let turns = coordinator.turns(&id);
        turns.len() == 2 && matches!(turns[1].gate, GateRecord::Durable(_))
    })
    .await;
    assert_eq!(read(&root, "root/done"), "step 1\n");
    std::fs::write(sandbox.cgroup().join("cgroup.kill"), "1").unwrap();

    let report = engine.restore(&id, Select::Latest, RestoreOptions::default()).await.unwrap();
    coordinator.rewind(&id, report.turn, AfterRestore::Replay);
    died.send_replace(true);
    match recipe.resume {
        None => assert!(matches!(report.process, ProcessOutcome::Restored { .. }), "{report:?}"),
        Some(resume) => {
            exec(&sandbox, background(resume), recipe.env).await;
        }
    }
    until(&sandbox, "the agent's last words", || read(&root, "root/said").contains(model::LAST_WORDS)).await;
    let done = read(&root, "root/done");
    let mut steps: Vec<&str> = done.lines().collect();
    if recipe.resume.is_some() {
        // It asks its model before its session on disk holds the last result: what was restored may lack that, and then
        // the relaunched agent repeats the step.
        steps.dedup();
    }
    assert_eq!(steps, ["step 1", "step 2"], "{}", read(&root, "root/said"));
    if let Some(sessions) = recipe.sessions {
        // What it keeps of this session can be replayed.
        let imported = imported(&root.join(sessions));
        let lines: Vec<String> =
            imported.responses.iter().flat_map(|response| &response.calls).map(Call::shell).collect();
        for step in ["echo step 1 >> /root/done", "echo step 2 >> /root/done"] {
            assert!(lines.iter().any(|line| line.contains(step)), "{lines:?}");
        }
    }

    bridging.abort();
    coordinator.shutdown(Duration::from_secs(1)).await;
    let _ = driving.await;
    engine.close().await;
    sandbox.kill().unwrap();
}

async fn until(sandbox: &Arc<Sandbox>, what: &str, mut is: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is() {
        if begun.elapsed() > LIMIT {
            let said = exec(sandbox, "cat /root/said; ps axf".to_owned(), &[]).await;
            panic!("no sign of {what}: {said}");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn read(root: &Path, path: &str) -> String {
    std::fs::read_to_string(root.join(path)).unwrap_or_default()
}

/// The longest of the session files in a directory, imported.
fn imported(sessions: &Path) -> Session {
    let (mut open, mut files) = (vec![sessions.to_owned()], Vec::new());
    while let Some(directory) = open.pop() {
        for entry in std::fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            match path.is_dir() {
                true => open.push(path),
                false if path.extension().is_some_and(|extension| extension == "jsonl") => files.push(path),
                false => {}
            }
        }
    }
    let longest = files.iter().max_by_key(|path| std::fs::metadata(path).unwrap().len());
    let text = std::fs::read_to_string(longest.expect("it keeps its session")).unwrap();
    Session::parse("imported", &import(&text).unwrap()).unwrap()
}

fn copy(from: &Path, to: &Path, without: &[&str]) {
    std::fs::create_dir_all(to.parent().unwrap()).unwrap();
    if from.is_file() {
        std::fs::copy(from, to).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
        return;
    }
    std::fs::create_dir(to).unwrap();
    let all = std::fs::read_dir(from).unwrap_or_else(|error| panic!("{}: {error}", from.display()));
    let wanted = all
        .map(|entry| entry.unwrap())
        .filter(|entry| !without.iter().any(|name| entry.file_name() == *name))
        .map(|entry| entry.path());
    let status = std::process::Command::new("cp").arg("-r").args(wanted).arg(to).status().unwrap();
    assert!(status.success(), "cannot copy {}", from.display());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claude_code_lives_through_the_death_of_its_sandbox() {
    dies_and_ends_its_work(&CLAUDE).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claude_code_is_relaunched_and_resumes_its_session() {
    dies_and_ends_its_work(&Recipe {
        name: "claude-again",
        resume: Some("/opt/agent -p 'go on' --continue --dangerously-skip-permissions"),
        ..CLAUDE
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn codex_lives_through_the_death_of_its_sandbox() {
    dies_and_ends_its_work(&Recipe {
        name: "codex",
        files: &[("node_modules/@openai/codex-linux-x64/vendor/x86_64-unknown-linux-musl/bin/codex", "opt/agent")],
        without: &[],
        config: Some((
            "root/.codex/config.toml",
            "model = \"scripted\"\nmodel_provider = \"scripted\"\n\n[model_providers.scripted]\nname = \"scripted\"\nbase_url = \"http://127.0.0.1:8080/v1\"\nenv_key = \"SCRIPTED_KEY\"\nwire_api = \"responses\"\n",
        )),
        start: "/opt/agent exec --dangerously-bypass-approvals-and-sandbox --skip-git-repo-check 'do the work'",
        resume: None,
        env: &[("SCRIPTED_KEY", "dummy")],
        sessions: Some("root/.codex/sessions"),
    })
    .await;
}

/// Its interpreter is the sandbox's own; its packages are those that were installed for the same version of Python.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mini_swe_agent_lives_through_the_death_of_its_sandbox() {
    const PACKAGES: &str = "venv/lib/python3.11/site-packages";
    if agents().is_some_and(|agents| !agents.join(PACKAGES).exists()) {
        println!("skipped: mini-swe-agent in a sandbox (it is installed for another Python than Debian's)");
        return;
    }
    dies_and_ends_its_work(&Recipe {
        name: "mini",
        files: &[(PACKAGES, "opt/packages"), ("venv/bin/mini", "opt/mini")],
        // Large, and of no use to it.
        without: &["anthropic", "botocore", "hf_xet", "numpy", "numpy.libs", "pandas", "pip", "pyarrow", "setuptools"],
        config: None,
        start: "python3 /opt/mini --model openai/scripted --task 'do the work' --yolo --exit-immediately --output /root/trajectory.json",
        resume: None,
        env: &[
            ("PYTHONPATH", "/opt/packages"),
            ("OPENAI_API_BASE", "http://127.0.0.1:8080/v1"),
            ("OPENAI_API_KEY", "dummy"),
            ("MSWEA_CONFIGURED", "true"),
            ("MSWEA_COST_TRACKING", "ignore_errors"),
            ("MSWEA_GLOBAL_CONFIG_DIR", "/root"),
            ("LITELLM_LOCAL_MODEL_COST_MAP", "True"),
        ],
        sessions: None,
    })
    .await;
}
