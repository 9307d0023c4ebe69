//! What the demo and Crab's process say where something is missing, full, alien or taken; and that nothing is lost and
//! nothing left behind.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::sync::Arc;

use crab_core::Condition;
use crab_examples::agent::Agent;
use crab_examples::model::ModelServer;
use crab_examples::sandbox::{
    Config, Sandbox, ScratchArea, criu_binary, home, left_for_good, leftovers, snapshot_root,
};
use crab_examples::service::{Saving, Service, ServiceConfig};
use crab_examples::session::Session;

const DEMO: &str = env!("CARGO_BIN_EXE_demo");

/// Why the machine cannot run these tests, said once per test.
fn lacking() -> bool {
    let ready = home().join("pool/base/sbin/crab-init").exists() && criu_binary().exists();
    if !ready {
        println!("skipped: sandboxes (root and `cargo xtask setup` are needed)");
    }
    !ready
}

#[track_caller]
fn assert_refused(output: &Output, words: &[&str]) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success(), "{said}");
    for word in words {
        assert!(said.contains(word), "`{word}` is not in: {said}");
    }
    assert!(!said.contains("panicked"), "{said}");
}

/// A sandbox, a model, and what Crab's process needs to look after them.
struct Stage {
    // Dropped in this order.
    model: ModelServer,
    sandbox: Sandbox,
    area: ScratchArea,
}

impl Stage {
    async fn new(name: &str) -> Self {
        let area = ScratchArea::new(name).unwrap();
        let root = area.path().join("root");
        snapshot_root(&root).unwrap();
        let id = format!("{name}-{}", std::process::id()).parse().unwrap();
        let sandbox = Sandbox::launch(Config::new(id, root)).unwrap();
        let model = ModelServer::start(Arc::new(Session::ticket_desk().unwrap()), 0.0).await.unwrap();
        Self { model, sandbox, area }
    }

    fn config(&self) -> ServiceConfig {
        ServiceConfig {
            sandboxes: vec![self.sandbox.id()],
            directory: self.area.path().join("crab"),
            versions: self.area.path().join("versions"),
            upstream: format!("http://{}", self.model.address()),
            listen: ([127, 0, 0, 1], 0).into(),
            processes: true,
            saving: Saving::default(),
            spans: None,
        }
    }

    fn agent(&self, service: &Service) -> Agent {
        let path = format!("/sandbox/{}/v1/messages", self.sandbox.id());
        Agent::new(service.address(), &path, "go")
    }
}

async fn start(config: ServiceConfig) -> Service {
    Service::start(Path::new(DEMO), config).await.unwrap()
}

/// Crab's process, run to its end with what it says.
fn serve(config: &ServiceConfig) -> Output {
    let text = serde_json::to_string(config).unwrap();
    Command::new(DEMO).args(["serve", &text]).stdin(Stdio::null()).output().unwrap()
}

#[test]
fn a_machine_without_setup_is_told_to_run_it() {
    if lacking() {
        return;
    }
    let empty = tempfile::tempdir().unwrap();
    let output = Command::new(DEMO).env("CRAB_HOME", empty.path()).output().unwrap();
    assert_refused(&output, &["root filesystem", "cargo xtask setup"]);
    // All but one tool.
    std::os::unix::fs::symlink(home().join("pool"), empty.path().join("pool")).unwrap();
    let output = Command::new(DEMO).env("CRAB_HOME", empty.path()).output().unwrap();
    assert_refused(&output, &["CRIU", "cargo xtask setup"]);
}

#[test]
fn somebody_who_is_not_root_is_told_to_be() {
    if lacking() {
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    std::fs::set_permissions(directory.path(), PermissionsExt::from_mode(0o755)).unwrap();
    let program = directory.path().join("demo");
    std::fs::copy(DEMO, &program).unwrap();
    let output = Command::new(program).uid(65_534).gid(65_534).current_dir("/").output().unwrap();
    assert_refused(&output, &["root"]);
}

#[test]
fn wrong_options_are_answered_with_the_right_ones() {
    let output = Command::new(DEMO).args(["--crash-at", "soon"]).output().unwrap();
    assert_refused(&output, &["soon", "cargo xtask demo [--seed N]"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_engine_on_the_same_store_is_refused_and_the_first_works_on() {
    if lacking() {
        return;
    }
    let stage = Stage::new("bad-second").await;
    let service = start(stage.config()).await;
    assert_refused(&serve(&stage.config()), &["held by the engine in process", "a store of its own"]);
    let mut agent = stage.agent(&service);
    assert!(!agent.ask().await.unwrap().is_empty());
    let told = service.stop().await.unwrap().remove(&stage.sandbox.id()).unwrap_or_default();
    assert_eq!((told.covered.len(), told.uncovered.len()), (1, 0));
    drop(stage);
    assert_eq!(left_for_good("bad-second"), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn alien_files_in_the_store_are_stepped_over_and_left_alone() {
    if lacking() {
        return;
    }
    let stage = Stage::new("bad-alien").await;
    let service = start(stage.config()).await;
    stage.agent(&service).ask().await.unwrap();
    service.stop().await.unwrap();
    let mut aliens = Vec::new();
    let mut folders = vec![stage.config().directory.join("store")];
    while let Some(folder) = folders.pop() {
        folders.extend(std::fs::read_dir(&folder).unwrap().flatten().map(|e| e.path()).filter(|path| path.is_dir()));
        aliens.push(folder.join("alien.json"));
    }
    assert!(aliens.len() > 1, "the store has folders");
    for alien in &aliens {
        std::fs::write(alien, "{\"format\": 1").unwrap();
    }
    let service = start(stage.config()).await;
    let mut agent = stage.agent(&service);
    // The same request: the journal and the versions are still there.
    agent.ask().await.unwrap();
    assert_eq!(stage.model.requests(), 1, "the answer came from the journal");
    let told = service.stop().await.unwrap().remove(&stage.sandbox.id()).unwrap_or_default();
    assert_eq!(told.uncovered, []);
    assert!(aliens.iter().all(|alien| alien.exists()));
    drop(stage);
    assert_eq!(left_for_good("bad-alien"), Vec::<String>::new());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unreachable_model_is_named_and_the_sandbox_runs_on() {
    if lacking() {
        return;
    }
    let stage = Stage::new("bad-model").await;
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let service = start(ServiceConfig { upstream: format!("http://{gone}"), ..stage.config() }).await;
    let error = stage.agent(&service).ask().await.unwrap_err().to_string();
    assert!(error.contains("50"), "a server error of the provider's form: {error}");
    assert!(error.contains("reach") || error.contains("connect"), "{error}");
    assert_eq!(stage.sandbox.condition().unwrap(), Condition::Running);
    service.stop().await.unwrap();
}

/// A small filesystem in memory, mounted for as long as the value lives.
struct SmallDisk(PathBuf);

impl SmallDisk {
    fn new(path: PathBuf, size: &str) -> Self {
        std::fs::create_dir_all(&path).unwrap();
        let mount = ["-t", "tmpfs", "-o", &format!("size={size},mode=700"), "none"];
        assert!(Command::new("mount").args(mount).arg(&path).status().unwrap().success());
        Self(path)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_fails_that_checkpoint_and_keeps_the_versions() {
    if lacking() {
        return;
    }
    let stage = Stage::new("bad-full").await;
    let disk = SmallDisk::new(stage.area.path().join("crab"), "24m");
    let service = start(stage.config()).await;
    let mut agent = stage.agent(&service);
    let asked = agent.ask().await.unwrap();
    agent.give(vec![(asked[0].id.clone(), "done".to_owned())]);
    // Something changes, and the disk is full.
    let hold = "f=open('/dev/urandom','rb').read(9000000)\nimport time\nwhile True: time.sleep(1000)";
    let line = format!("setsid python3 -c \"{hold}\" >/dev/null 2>&1 & touch /root/new; sleep 0.5");
    assert!(stage.sandbox.exec(&line).unwrap().success());
    let ballast = disk.0.join("ballast");
    let _ = std::fs::write(&ballast, vec![1; 30 << 20]);
    let error = agent.ask().await.unwrap_err().to_string();
    assert!(error.contains("529"), "the provider's way to say: try again: {error}");
    assert_eq!(stage.sandbox.condition().unwrap(), Condition::Running);
    // With room again the same request is covered, and the version from before is still whole.
    std::fs::remove_file(&ballast).unwrap();
    assert!(!agent.ask().await.unwrap().is_empty());
    let told = service.stop().await.unwrap().remove(&stage.sandbox.id()).unwrap_or_default();
    assert!(told.uncovered.iter().any(|(_, error)| error.contains("full") || error.contains("space")), "{told:?}");
    assert_eq!(told.covered.iter().map(|turn| turn.version).max(), Some(2), "{told:?}");
    drop(disk);
    drop(stage);
    assert_eq!(left_for_good("bad-full"), Vec::<String>::new());
}

#[test]
fn a_demo_that_is_told_to_stop_leaves_nothing_behind() {
    if lacking() {
        return;
    }
    let mut demo = Command::new(DEMO).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let name = format!("-{}", demo.id());
    // In the middle of a run, when there is something to leave behind.
    for _ in 0..600 {
        if leftovers(&name).len() > 3 {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(100));
    }
    assert!(!leftovers(&name).is_empty(), "a run has begun");
    let pid = rustix::process::Pid::from_child(&demo);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert!(!demo.wait().unwrap().success());
    assert_eq!(left_for_good(&name), Vec::<String>::new());
}
