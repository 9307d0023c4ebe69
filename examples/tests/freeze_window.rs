//! An engine over real processes and real files whose process is killed while a sandbox is frozen: whoever opens the store
//! next has a sandbox that runs, and that nobody freezes again.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crab_backend_btrfs::BtrfsBackend;
use crab_backend_criu::CriuBackend;
use crab_core::{Condition, ErrorKind, SandboxId};
use crab_engine::policy::{Plan, Policy, View};
use crab_engine::{Engine, EventKind};
use crab_examples::sandbox::{Config, ExampleHost, Sandbox, ScratchArea, ScratchRoot, criu_binary, home};
use crab_inspector::PollingInspector;

/// Tells the other process what to work on.
const VARIABLE: &str = "CRAB_TEST_FREEZE_WINDOW";
const ROUNDS: u32 = 40;
/// However slow the machine is, no further round begins after this.
const ENOUGH: Duration = Duration::from_secs(45);

/// Counts in a file as fast as it can, with memory whose dump takes a while.
const COUNTER: &str = "
import os
memory = os.urandom(48 << 20)
fd = os.open('/root/count', os.O_RDWR | os.O_CREAT)
n = 0
while True:
    n += 1
    os.pwrite(fd, b'%020d' % n, 0)
";

fn count(sandbox: &Sandbox) -> u64 {
    let text = std::fs::read_to_string(sandbox.root().join("root/count")).unwrap_or_default();
    text.trim_start_matches('0').parse().unwrap_or(0)
}

/// Waits for something that happens soon, however slow the machine is.
#[track_caller]
fn eventually(what: &str, mut happened: impl FnMut() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !happened() {
        assert!(Instant::now() < deadline, "did not happen: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

struct Everything;

impl Policy for Everything {
    fn decide(&self, _view: &View<'_>) -> Plan {
        Plan::FULL
    }
}

/// Where an engine has its things.
struct Place {
    store: PathBuf,
    images: PathBuf,
    captures: PathBuf,
    versions: PathBuf,
}

impl Place {
    fn new(disk: &Path, memory: &Path) -> Self {
        let disk = |name: &str| disk.join(name);
        Self { store: disk("store"), images: disk("images"), versions: disk("versions"), captures: memory.to_owned() }
    }

    /// Opens an engine for one sandbox. A process that was just being started may hold the store for a moment more than
    /// the one that started it.
    async fn open(&self, id: &SandboxId) -> (Engine, Arc<Sandbox>) {
        let deadline = Instant::now() + Duration::from_secs(60);
        loop {
            let host = Arc::new(ExampleHost::new());
            let sandbox = host.keep(Sandbox::attach(id).unwrap());
            let processes = CriuBackend::builder().images(&self.images).capture_dir(&self.captures);
            let opened = Engine::builder(&self.store)
                .filesystem(Arc::new(BtrfsBackend::open(&self.versions).unwrap()))
                .process(Arc::new(processes.binary(criu_binary()).open().await.unwrap()))
                .host(host)
                .delta(Arc::new(PollingInspector::new()))
                .policy(Arc::new(Everything))
                .open()
                .await;
            match opened {
                Ok(engine) => return (engine, sandbox),
                Err(error) if error.kind() == ErrorKind::Busy && Instant::now() < deadline => {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
                Err(error) => panic!("{error}"),
            }
        }
    }
}

/// What is killed: run by the test below, as a process of its own. It makes one version after the other, and says when the
/// sandbox is frozen for one.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "the other half of the test in this file, which runs it"]
async fn the_program_that_is_killed() {
    let Ok(task) = std::env::var(VARIABLE) else { return };
    let words: Vec<&str> = task.split(' ').collect();
    let [id, disk, memory] = words[..] else { panic!("{task}") };
    let id = id.parse().unwrap();
    let (engine, _sandbox) = Place::new(disk.as_ref(), memory.as_ref()).open(&id).await;
    engine.attach(&id).await.unwrap();
    let mut events = engine.events();
    tokio::spawn(async move {
        while let Some(event) = events.next().await {
            if matches!(event.unwrap().kind, EventKind::Frozen) {
                println!("\nfrozen");
            }
        }
    });
    loop {
        engine.checkpoint(&id).await.unwrap();
    }
}

fn start(id: &SandboxId, disk: &Path, memory: &Path) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "the_program_that_is_killed", "--nocapture"])
        .env(VARIABLE, format!("{id} {} {}", disk.display(), memory.display()))
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn after_a_kill_in_the_freeze_window_the_sandbox_runs_and_goes_on_running() {
    if !home().join("pool/base/sbin/crab-init").exists() || !criu_binary().exists() {
        println!("skipped: criu and sandboxes (root and `cargo xtask setup` are needed)");
        return;
    }
    let id: SandboxId = format!("window-{}", std::process::id()).parse().unwrap();
    let root = ScratchRoot::new(id.as_str()).unwrap();
    let disk = ScratchArea::new("window").unwrap();
    let memory = tempfile::Builder::new().prefix("crab-test-").tempdir_in("/dev/shm").unwrap();
    let place = Place::new(disk.path(), memory.path());
    let sandbox = Sandbox::launch(Config::new(id.clone(), root.path())).unwrap();
    std::fs::write(sandbox.root().join("root/counter.py"), COUNTER).unwrap();
    assert!(sandbox.exec("setsid python3 /root/counter.py </dev/null >/dev/null 2>&1 &").unwrap().success());
    eventually("it counts", || count(&sandbox) > 0);
    let runs = |what: &str| {
        let before = count(&sandbox);
        eventually(what, || {
            assert_eq!(sandbox.condition().unwrap(), Condition::Running, "{what}");
            count(&sandbox) > before
        });
    };
    let (begun, mut thawed, mut rounds) = (Instant::now(), 0, 0);
    for round in 0..ROUNDS {
        if begun.elapsed() > ENOUGH {
            break;
        }
        let mut child = start(&id, disk.path(), memory.path());
        let said = BufReader::new(child.stdout.take().unwrap()).lines();
        assert!(
            said.map_while(Result::ok).any(|line| line == "frozen"),
            "the program does not run: {:?}",
            child.wait()
        );
        // A freeze takes about that long.
        std::thread::sleep(Duration::from_millis(u64::from(round * 17 % ROUNDS * 3)));
        child.kill().unwrap();
        child.wait().unwrap();
        let (engine, _) = place.open(&id).await;
        assert_eq!(sandbox.condition().unwrap(), Condition::Running, "round {round}");
        runs("it counts again");
        assert_eq!(engine.opened().attached, std::slice::from_ref(&id), "round {round}: {:?}", engine.opened());
        thawed += engine.opened().thawed.len();
        // What a CRIU that nobody waited for would do comes soon.
        for _ in 0..20 {
            assert_eq!(sandbox.condition().unwrap(), Condition::Running, "round {round}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        runs("it goes on");
        engine.close().await;
        rounds += 1;
    }
    println!("killed {rounds} times: {thawed} times the sandbox had been left frozen");
    assert!(thawed > 0, "no kill came in a freeze window");
    // And a version can be made.
    let (engine, _) = place.open(&id).await;
    engine.checkpoint(&id).await.unwrap();
    engine.close().await;
    drop(engine);
    runs("it goes on");
    sandbox.destroy().unwrap();
}
