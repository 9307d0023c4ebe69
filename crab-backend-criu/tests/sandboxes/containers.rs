//! The same backend over `runc`, for hosts that keep their sandboxes as containers: it passes the same suite.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use async_trait::async_trait;
use crab_backend_criu::{CriuBackend, OciRuntime};
use crab_core::conformance::BackendFixture;
use crab_core::{
    CheckpointBackend, Condition, Error, ErrorKind, External, InheritedFd, Result, Sandbox, SandboxHost, SandboxId,
};
use crab_examples::sandbox::{ScratchRoot, criu_binary, home};

use crate::support::{SERVER, assert_nothing_kept, eventually, lacking, unique};

/// A container, and its init while it lives.
struct Container {
    root: ScratchRoot,
    cgroup: PathBuf,
    init: Option<u32>,
}

/// Containers of runc.
struct Containers {
    base: tempfile::TempDir,
    images: PathBuf,
    captures: PathBuf,
    hierarchy: PathBuf,
    all: Mutex<HashMap<SandboxId, Container>>,
}

/// A container's cgroup, below each hierarchy: one level, so that runc takes all of it away with the container.
fn group(id: &SandboxId) -> String {
    format!("crab-test-{id}")
}

fn ip(words: &[&str]) {
    assert!(Command::new("ip").args(words).status().unwrap().success(), "{words:?}");
}

/// Where the network namespace of a container is.
fn network(id: &SandboxId) -> PathBuf {
    Path::new("/run/netns").join(id.as_str())
}

/// Where cgroups are mounted, by the kind of hierarchy: `cgroup` for each of version 1, `cgroup2`.
fn hierarchies(kind: &str) -> Vec<PathBuf> {
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    let lines = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    lines.filter(|words| words[2] == kind).map(|words| words[1].into()).collect()
}

impl Containers {
    fn new(images: &Path, captures: &Path) -> Self {
        let base = tempfile::tempdir().unwrap();
        std::fs::create_dir(base.path().join("bundles")).unwrap();
        let (images, captures) = (images.to_owned(), captures.to_owned());
        Self { base, images, captures, hierarchy: hierarchies("cgroup2").remove(0), all: Mutex::default() }
    }

    fn state(&self) -> PathBuf {
        self.base.path().join("state")
    }

    fn bundle(&self, id: &SandboxId) -> PathBuf {
        self.base.path().join("bundles").join(id.as_str())
    }

    fn runc(&self, arguments: &[&str]) -> bool {
        let mut command = Command::new("runc");
        command.arg("--log").arg(self.base.path().join("runc.log")).arg("--root").arg(self.state()).args(arguments);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status().unwrap().success()
    }

    /// Makes a bundle in which nothing runs.
    fn prepare(&self) -> SandboxId {
        let id: SandboxId = unique("oci").parse().unwrap();
        let root = ScratchRoot::new(id.as_str()).unwrap();
        std::fs::write(root.path().join("root/number.py"), SERVER).unwrap();
        let bundle = self.bundle(&id);
        std::fs::create_dir(&bundle).unwrap();
        // One of its own would come back with its loopback device down.
        ip(&["netns", "add", id.as_str()]);
        ip(&["-n", id.as_str(), "link", "set", "lo", "up"]);
        let mut namespaces = vec![serde_json::json!({ "type": "network", "path": network(&id) })];
        namespaces.extend(["pid", "ipc", "uts", "mount"].map(|kind| serde_json::json!({ "type": kind })));
        let configuration = serde_json::json!({
            "ociVersion": "1.0.2",
            "process": {
                "terminal": false,
                "user": {"uid": 0, "gid": 0},
                "args": ["python3", "/root/number.py"],
                "env": ["PATH=/usr/bin:/bin"],
                "cwd": "/",
            },
            "root": {"path": root.path()},
            "mounts": [
                {"destination": "/proc", "type": "proc", "source": "proc"},
                {"destination": "/dev", "type": "tmpfs", "source": "tmpfs", "options": ["nosuid", "mode=755"]},
                {"destination": "/dev/pts", "type": "devpts", "source": "devpts",
                 "options": ["newinstance", "ptmxmode=0666"]},
                {"destination": "/dev/shm", "type": "tmpfs", "source": "shm"},
            ],
            "annotations": {"org.criu.config": self.images.join(format!(".oci/{id}.conf"))},
            "linux": {
                "cgroupsPath": format!("/{}", group(&id)),
                "namespaces": namespaces,
            },
        });
        std::fs::write(bundle.join("config.json"), configuration.to_string()).unwrap();
        let cgroup = self.hierarchy.join(group(&id));
        std::fs::create_dir_all(&cgroup).unwrap();
        self.all.lock().unwrap().insert(id.clone(), Container { root, cgroup, init: None });
        id
    }

    fn launch(&self, id: &SandboxId) {
        let pid = self.base.path().join("pid");
        let bundle = self.bundle(id);
        let words = ["create", "--bundle", bundle.to_str().unwrap(), "--pid-file", pid.to_str().unwrap(), id.as_str()];
        let log = || std::fs::read_to_string(self.base.path().join("runc.log")).unwrap();
        assert!(self.runc(&words), "{}", log());
        let init: u32 = std::fs::read_to_string(pid).unwrap().parse().unwrap();
        std::fs::write(self.cgroup(id).join("cgroup.procs"), init.to_string()).unwrap();
        assert!(self.runc(&["start", id.as_str()]), "{}", log());
        self.all.lock().unwrap().get_mut(id).unwrap().init = Some(init);
        eventually("the server answers", || self.ask(id, "get"));
    }

    fn cgroup(&self, id: &SandboxId) -> PathBuf {
        self.all.lock().unwrap()[id].cgroup.clone()
    }

    fn event(&self, id: &SandboxId, name: &str) -> bool {
        let events = std::fs::read_to_string(self.cgroup(id).join("cgroup.events")).unwrap_or_default();
        events.lines().any(|line| line == format!("{name} 1"))
    }

    fn ask(&self, id: &SandboxId, question: &str) -> Option<String> {
        let init = self.all.lock().unwrap()[id].init?;
        let namespace = std::fs::File::open(format!("/proc/{init}/ns/net")).ok()?;
        let connect = || {
            rustix::thread::move_into_link_name_space(std::os::fd::AsFd::as_fd(&namespace), None).ok()?;
            TcpStream::connect(("127.0.0.1", 7000)).ok()
        };
        let mut stream = std::thread::scope(|scope| scope.spawn(connect).join().unwrap())?;
        stream.set_read_timeout(Some(Duration::from_secs(60))).ok()?;
        stream.write_all(format!("{question}\n").as_bytes()).ok()?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer).ok()?;
        Some(answer.trim().to_owned())
    }

    fn end(&self, id: &SandboxId) {
        let cgroup = self.cgroup(id);
        std::fs::create_dir_all(&cgroup).unwrap();
        std::fs::write(cgroup.join("cgroup.kill"), "1").unwrap();
        eventually("all have ended", || (!self.event(id, "populated")).then_some(()));
        self.runc(&["delete", "--force", id.as_str()]);
        std::fs::create_dir_all(&cgroup).unwrap();
        std::fs::write(cgroup.join("cgroup.freeze"), "0").unwrap();
        self.all.lock().unwrap().get_mut(id).unwrap().init = None;
    }
}

impl Drop for Containers {
    fn drop(&mut self) {
        let all: Vec<SandboxId> = self.all.lock().unwrap().keys().cloned().collect();
        for id in all {
            self.end(&id);
            let _ = std::fs::remove_dir(self.cgroup(&id));
            ip(&["netns", "delete", id.as_str()]);
        }
    }
}

#[async_trait]
impl SandboxHost for Containers {
    async fn describe(&self, id: &SandboxId) -> Result<Sandbox> {
        let all = self.all.lock().unwrap();
        let found = all.get(id).ok_or_else(|| Error::new(ErrorKind::NotFound, "no such container"))?;
        let mut sandbox = Sandbox::new(id.clone(), found.root.path(), &found.cgroup)
            .with_external(External::NetworkNamespace { path: network(id) });
        sandbox.init = found.init;
        Ok(sandbox)
    }
    async fn freeze(&self, id: &SandboxId) -> Result<()> {
        std::fs::write(self.cgroup(id).join("cgroup.freeze"), "1").unwrap();
        eventually("it is frozen", || self.event(id, "frozen").then_some(()));
        Ok(())
    }
    async fn thaw(&self, id: &SandboxId) -> Result<()> {
        std::fs::write(self.cgroup(id).join("cgroup.freeze"), "0").unwrap();
        eventually("it is thawed", || (!self.event(id, "frozen")).then_some(()));
        Ok(())
    }
    async fn kill(&self, id: &SandboxId) -> Result<()> {
        self.end(id);
        Ok(())
    }
    async fn condition(&self, id: &SandboxId) -> Result<Condition> {
        Ok(match (self.event(id, "populated"), self.event(id, "frozen")) {
            (false, _) => Condition::Stopped,
            (true, true) => Condition::Frozen,
            (true, false) => Condition::Running,
        })
    }
    async fn inherit(&self, id: &SandboxId, external: &[External]) -> Result<Vec<InheritedFd>> {
        std::fs::create_dir_all(self.cgroup(id)).unwrap();
        let fd = || std::fs::File::open(network(id)).unwrap().into();
        Ok(external.iter().map(|external| InheritedFd { external: external.clone(), fd: fd() }).collect())
    }
    async fn adopt(&self, id: &SandboxId, init: u32) -> Result<()> {
        assert_nothing_kept(&self.cgroup(id), &self.captures);
        self.all.lock().unwrap().get_mut(id).unwrap().init = Some(init);
        Ok(())
    }
    async fn relaunch(&self, id: &SandboxId) -> Result<()> {
        self.end(id);
        self.launch(id);
        Ok(())
    }
}

struct Fixture {
    containers: Arc<Containers>,
    backend: Arc<CriuBackend>,
}

#[async_trait]
impl BackendFixture for Fixture {
    fn backend(&self) -> Arc<dyn CheckpointBackend> {
        Arc::clone(&self.backend) as Arc<dyn CheckpointBackend>
    }
    fn host(&self) -> Arc<dyn SandboxHost> {
        Arc::clone(&self.containers) as Arc<dyn SandboxHost>
    }
    async fn sandbox(&self) -> SandboxId {
        let id = self.containers.prepare();
        self.containers.launch(&id);
        id
    }
    async fn set(&self, id: &SandboxId, value: u64) {
        assert_eq!(self.containers.ask(id, &format!("set {value}")), Some(value.to_string()));
    }
    async fn get(&self, id: &SandboxId) -> Option<u64> {
        self.containers.ask(id, "get")?.parse().ok()
    }
    async fn fork_target(&self, _from: &SandboxId) -> Option<SandboxId> {
        Some(self.containers.prepare())
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_backend_over_runc_passes_the_suite_of_backends() {
    if lacking() {
        return;
    }
    if Command::new("runc").arg("--version").stdout(Stdio::null()).status().is_err() {
        println!("skipped: runc (run `cargo xtask setup`)");
        return;
    }
    let directory = home().join("pool/scratch");
    let images = tempfile::Builder::new().prefix("images-").tempdir_in(directory).unwrap();
    let captures = tempfile::Builder::new().prefix("crab-test-").tempdir_in("/dev/shm").unwrap();
    let containers = Arc::new(Containers::new(images.path(), captures.path()));
    let runtime = OciRuntime::new("/usr/sbin/runc", containers.state(), containers.base.path().join("bundles"));
    let builder = CriuBackend::builder().images(images.path()).capture_dir(captures.path()).binary(criu_binary());
    let backend = Arc::new(builder.oci_runtime(runtime).open().await.unwrap());
    let fixture = Fixture { containers, backend };
    crab_core::conformance::backend(&fixture).await;
    let ids: Vec<SandboxId> = fixture.containers.all.lock().unwrap().keys().cloned().collect();
    drop(fixture);
    for hierarchy in hierarchies("cgroup").into_iter().chain(hierarchies("cgroup2")) {
        for id in &ids {
            assert!(!hierarchy.join(group(id)).exists(), "{} is left", hierarchy.join(group(id)).display());
        }
    }
}
