//! Sandboxes with a server that holds a number in memory, a backend of their own, and what tests do with both.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use crab_backend_criu::{CriuBackend, CriuBuilder};
use crab_core::conformance::BackendFixture;
use crab_core::{
    Artifact, ArtifactId, AtCut, CaptureRequest, Captured, CheckpointBackend, External, InheritedFd, NoCut,
    OperationId, RestoreTarget, Restored, Result, SandboxHost, SandboxId,
};
use crab_examples::sandbox::{Config, ExampleHost, Sandbox, ScratchRoot, criu_binary, home};

/// A server whose whole state is a number: `set N` and `get`, one line for each connection.
pub(crate) const SERVER: &str = r#"
import socket
number = 0
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", 7000))
server.listen(16)
while True:
    client, _ = server.accept()
    try:
        with client:
            words = client.makefile().readline().split()
            if words[:1] == ["set"]:
                number = int(words[1])
            client.sendall(f"{number}\n".encode())
    except OSError:
        pass
"#;
const PORT: u16 = 7000;

pub(crate) struct World {
    pub(crate) host: Arc<ExampleHost>,
    pub(crate) backend: Arc<CriuBackend>,
    pub(crate) images: PathBuf,
    pub(crate) captures: PathBuf,
    boxes: Mutex<Vec<(Arc<Sandbox>, ScratchRoot)>>,
    _images: tempfile::TempDir,
    _captures: tempfile::TempDir,
}

impl Drop for World {
    fn drop(&mut self) {
        for (sandbox, root) in self.boxes.lock().unwrap().drain(..) {
            self.host.forget(&sandbox.id());
            // Killed and gone before its root goes.
            drop(sandbox);
            drop(root);
        }
    }
}

/// Says once for each test why it cannot run.
pub(crate) fn lacking() -> bool {
    let ready = rustix::process::geteuid().is_root()
        && home().join("pool/base/sbin/crab-init").exists()
        && criu_binary().exists();
    if !ready {
        println!("skipped: criu and sandboxes (root and `cargo xtask setup` are needed)");
    }
    !ready
}

pub(crate) async fn world() -> Option<World> {
    world_with(|builder| builder).await
}

pub(crate) async fn world_with(configure: impl FnOnce(CriuBuilder) -> CriuBuilder) -> Option<World> {
    if lacking() {
        return None;
    }
    // On a disk, as a store is.
    let directory = home().join("pool/scratch");
    std::fs::create_dir_all(&directory).unwrap();
    let images = tempfile::Builder::new().prefix("images-").tempdir_in(directory).unwrap();
    let captures = tempfile::Builder::new().prefix("crab-test-").tempdir_in("/dev/shm").unwrap();
    let builder = CriuBackend::builder().images(images.path()).capture_dir(captures.path()).binary(criu_binary());
    let backend = Arc::new(configure(builder).open().await.unwrap());
    Some(World {
        host: Arc::new(ExampleHost::new()),
        backend,
        images: images.path().to_owned(),
        captures: captures.path().to_owned(),
        boxes: Mutex::default(),
        _images: images,
        _captures: captures,
    })
}

pub(crate) fn unique(what: &str) -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    format!("{what}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

pub(crate) fn artifact_name() -> ArtifactId {
    unique("p").parse().unwrap()
}

/// Waits for something that happens soon, however slow the machine is.
#[track_caller]
pub(crate) fn eventually<T>(what: &str, mut look: impl FnMut() -> Option<T>) -> T {
    let deadline = Instant::now() + Duration::from_secs(60);
    loop {
        if let Some(found) = look() {
            return found;
        }
        assert!(Instant::now() < deadline, "did not happen: {what}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

#[track_caller]
pub(crate) fn run(sandbox: &Sandbox, line: &str) -> String {
    let output = sandbox.exec(line).unwrap();
    assert!(output.success(), "`{line}` ended with {:?}: {}", output.code, output.text());
    output.text().trim_end().to_owned()
}

/// Starts a line in the background, holding nothing of the host's.
#[track_caller]
pub(crate) fn background(sandbox: &Sandbox, line: &str) {
    run(sandbox, &format!("setsid {line} </dev/null >/dev/null 2>&1 &"));
}

/// Nothing that belongs to the CRIU that restored them was left in these tasks' hands.
#[track_caller]
pub(crate) fn assert_nothing_kept(cgroup: &Path, captures: &Path) {
    let members = std::fs::read_to_string(cgroup.join("cgroup.procs")).unwrap();
    for pid in members.lines() {
        let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
        for target in descriptors.filter_map(|descriptor| std::fs::read_link(descriptor.path()).ok()) {
            assert!(!target.starts_with(captures), "process {pid} holds {}", target.display());
        }
    }
}

/// Starts a python program in the background.
#[track_caller]
pub(crate) fn python(sandbox: &Sandbox, name: &str, program: &str) {
    std::fs::write(sandbox.root().join(format!("root/{name}.py")), program).unwrap();
    background(sandbox, &format!("python3 /root/{name}.py"));
}

/// Starts a line in the background whose standard streams are all this descriptor of the host's.
pub(crate) fn background_on(sandbox: &Sandbox, stream: OwnedFd, line: &str) {
    // Whatever else the tests inherited is closed.
    let script = "for fd in /proc/$$/fd/*; do [ ${fd##*/} -le 2 ] || eval \"exec ${fd##*/}>&-\"; done; \
                  echo $$ > \"$1\" && exec nsenter -t \"$2\" -m -u -i -n -p -r -w /bin/sh -c \"$3\"";
    let status = Command::new("/bin/bash")
        .args(["--norc", "-c", script, "sh"])
        .arg(sandbox.cgroup().join("cgroup.procs"))
        .arg(sandbox.init().unwrap().to_string())
        .arg(format!("cd /root; exec 3<&0; {line} <&3 3<&- &"))
        .env_clear()
        .env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin")
        .stdin(Stdio::from(stream.try_clone().unwrap()))
        .stdout(Stdio::from(stream.try_clone().unwrap()))
        .stderr(Stdio::from(stream))
        .status()
        .unwrap();
    assert!(status.success());
}

/// Does something on a thread that is in namespaces of the sandbox: `net`, `mnt`.
pub(crate) fn within<T: Send>(sandbox: &Sandbox, namespaces: &[&str], work: impl FnOnce() -> T + Send) -> T {
    let init = sandbox.init().map_or_else(|| "self".to_owned(), |init| init.to_string());
    let files: Vec<_> =
        namespaces.iter().map(|name| std::fs::File::open(format!("/proc/{init}/ns/{name}")).unwrap()).collect();
    let enter = || {
        // A thread that shares its working directory with others cannot change its mounts.
        #[allow(unsafe_code, reason = "FILES is not among the flags, so no descriptor changes its meaning")]
        // SAFETY: as the reason says.
        unsafe {
            rustix::thread::unshare_unsafe(rustix::thread::UnshareFlags::FS).unwrap();
        }
        for file in &files {
            rustix::thread::move_into_link_name_space(file.as_fd(), None).unwrap();
        }
        work()
    };
    std::thread::scope(|scope| scope.spawn(enter).join().unwrap())
}

/// One question to a server in the sandbox.
pub(crate) fn ask(sandbox: &Sandbox, port: u16, question: &str) -> Option<String> {
    let mut stream = sandbox.connect(port).ok()?;
    stream.set_read_timeout(Some(Duration::from_secs(60))).ok()?;
    stream.write_all(format!("{question}\n").as_bytes()).ok()?;
    let mut answer = String::new();
    stream.read_to_string(&mut answer).ok()?;
    Some(answer.trim().to_owned())
}

#[track_caller]
pub(crate) fn set(sandbox: &Sandbox, value: u64) {
    assert_eq!(ask(sandbox, PORT, &format!("set {value}")), Some(value.to_string()));
}

pub(crate) fn get(sandbox: &Sandbox) -> Option<u64> {
    ask(sandbox, PORT, "get")?.parse().ok()
}

impl World {
    /// A sandbox in which nothing but init runs.
    pub(crate) fn bare(&self) -> Arc<Sandbox> {
        let id: SandboxId = unique("criu").parse().unwrap();
        let root = ScratchRoot::new(id.as_str()).unwrap();
        let sandbox = self.host.launch(Config::new(id, root.path())).unwrap();
        self.boxes.lock().unwrap().push((Arc::clone(&sandbox), root));
        sandbox
    }

    /// A sandbox with the number server.
    pub(crate) fn with_server(&self) -> Arc<Sandbox> {
        let sandbox = self.bare();
        python(&sandbox, "number", SERVER);
        eventually("the server answers", || get(&sandbox));
        sandbox
    }

    /// A stopped sandbox to restore into.
    pub(crate) fn stopped(&self) -> Arc<Sandbox> {
        let id: SandboxId = unique("criu-fork").parse().unwrap();
        let root = ScratchRoot::new(id.as_str()).unwrap();
        let sandbox = self.host.prepare(Config::new(id, root.path())).unwrap();
        self.boxes.lock().unwrap().push((Arc::clone(&sandbox), root));
        sandbox
    }

    pub(crate) async fn capture_with(
        &self,
        sandbox: &Sandbox,
        frozen: bool,
        deadline: Option<Instant>,
        at_cut: &mut dyn AtCut,
    ) -> Result<Box<dyn Captured>> {
        let described = sandbox.describe();
        let request =
            CaptureRequest { sandbox: &described, artifact: artifact_name(), parent: None, frozen, deadline, at_cut };
        self.backend.capture(request).await
    }

    pub(crate) async fn capture(&self, sandbox: &Sandbox) -> Result<Box<dyn Captured>> {
        self.capture_with(sandbox, false, None, &mut NoCut).await
    }

    pub(crate) async fn checkpoint(&self, sandbox: &Sandbox) -> Artifact {
        self.capture(sandbox).await.unwrap().persist().await.unwrap()
    }

    /// A checkpoint of a sandbox that holds more of the host's than it says itself.
    pub(crate) async fn checkpoint_with(&self, sandbox: &Sandbox, external: &[External]) -> Result<Artifact> {
        let mut described = sandbox.describe();
        described.external.extend(external.iter().cloned());
        let request = CaptureRequest {
            sandbox: &described,
            artifact: artifact_name(),
            parent: None,
            frozen: false,
            deadline: None,
            at_cut: &mut NoCut,
        };
        self.backend.capture(request).await?.persist().await
    }

    /// A restore that gives these besides what the sandbox gives itself.
    pub(crate) async fn restore_with(
        &self,
        sandbox: &Sandbox,
        artifact: &Artifact,
        given: Vec<InheritedFd>,
    ) -> Result<Restored> {
        let own: Vec<External> =
            artifact.external.iter().filter(|e| given.iter().all(|g| g.external != **e)).cloned().collect();
        let mut inherited = sandbox.inherit(&own)?;
        inherited.extend(given);
        let operation: OperationId = unique("restore").parse().unwrap();
        let target =
            RestoreTarget { sandbox: sandbox.describe(), operation, keep_replaced: None, inherited, deadline: None };
        let restored = self.backend.restore(artifact, target).await?;
        sandbox.adopt(restored.init.expect("a process backend names the init"))?;
        assert_nothing_kept(sandbox.cgroup(), &self.captures);
        Ok(restored)
    }

    pub(crate) async fn restore(&self, sandbox: &Sandbox, artifact: &Artifact) -> Result<Restored> {
        let inherited = sandbox.inherit(&artifact.external)?;
        let operation: OperationId = unique("restore").parse().unwrap();
        let target =
            RestoreTarget { sandbox: sandbox.describe(), operation, keep_replaced: None, inherited, deadline: None };
        let restored = self.backend.restore(artifact, target).await?;
        sandbox.adopt(restored.init.expect("a process backend names the init"))?;
        assert_nothing_kept(sandbox.cgroup(), &self.captures);
        Ok(restored)
    }

    /// Nothing is left of captures and restores, whole or broken off.
    pub(crate) fn has_no_captures(&self) -> bool {
        let parts = std::fs::read_dir(&self.captures).unwrap().flatten();
        parts
            .filter(|part| part.file_name().to_string_lossy().starts_with("owner-"))
            // Beside its locks.
            .all(|part| std::fs::read_dir(part.path()).unwrap().flatten().all(|entry| entry.path().is_file()))
    }

    #[track_caller]
    pub(crate) fn assert_no_captures(&self) {
        assert!(self.has_no_captures(), "captures are left behind");
    }
}

#[async_trait]
impl BackendFixture for World {
    fn backend(&self) -> Arc<dyn CheckpointBackend> {
        Arc::clone(&self.backend) as Arc<dyn CheckpointBackend>
    }

    fn host(&self) -> Arc<dyn SandboxHost> {
        Arc::clone(&self.host) as Arc<dyn SandboxHost>
    }

    async fn sandbox(&self) -> SandboxId {
        self.with_server().id()
    }

    async fn set(&self, id: &SandboxId, value: u64) {
        set(&self.host.get(id).unwrap(), value);
    }

    async fn get(&self, id: &SandboxId) -> Option<u64> {
        get(&self.host.get(id).unwrap())
    }

    async fn fork_target(&self, _from: &SandboxId) -> Option<SandboxId> {
        Some(self.stopped().id())
    }
}
