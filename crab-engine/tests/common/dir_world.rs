//! A world in a directory, so that it survives the process that acts on it, as real sandboxes and their snapshots do.
//! Every effect is one rename, and every effect is a point at which the process may be killed.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::io::ErrorKind as Io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use async_trait::async_trait;
use crab_core::{
    Artifact, ArtifactId, Capabilities, CaptureRequest, Captured, Change, CheckpointBackend, Condition, Delta, Domain,
    Effects, Error, ErrorKind, Evidence, External, InheritedFd, Rebase, RestoreTarget, Restored, Result, Sandbox,
    SandboxHost, SandboxId, StateDelta, Token, Unknown,
};
use parking_lot::Mutex;

pub type Contents = BTreeMap<String, String>;

/// Called with a name at every effect.
pub type Hook = Arc<dyn Fn(&'static str) + Send + Sync>;

#[derive(Clone)]
pub struct DirWorld {
    root: PathBuf,
    hook: Hook,
    /// The delta source's memory: it dies with the process.
    watches: Arc<Mutex<HashMap<SandboxId, Watch>>>,
}

#[derive(Default)]
struct Watch {
    base: [Option<Contents>; 2],
    taken: BTreeMap<u64, [Contents; 2]>,
    next: u64,
}

fn place(domain: Domain) -> &'static str {
    match domain {
        Domain::Filesystem => "files",
        Domain::Process => "processes",
    }
}

impl DirWorld {
    pub fn new(root: &Path, hook: Hook) -> Self {
        for name in ["boxes", "artifacts"] {
            fs::create_dir_all(root.join(name)).unwrap();
        }
        Self { root: root.to_owned(), hook, watches: Arc::default() }
    }

    fn put(&self, path: &Path, text: &str) {
        let temporary = path.with_extension(format!("tmp{:016x}", rand()));
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&temporary, text).unwrap();
        (self.hook)("world.before");
        fs::rename(temporary, path).unwrap();
        (self.hook)("world.after");
    }

    fn in_box(&self, id: &SandboxId, name: &str) -> PathBuf {
        self.root.join("boxes").join(id.as_str()).join(name)
    }

    fn artifact_path(&self, domain: Domain, id: &SandboxId, artifact: &str) -> PathBuf {
        self.root.join("artifacts").join(place(domain)).join(id.as_str()).join(artifact)
    }

    pub fn create(&self, id: &SandboxId, condition: Condition) {
        if !self.in_box(id, "condition").exists() {
            self.set(id, Domain::Filesystem, &Contents::new());
            self.set(id, Domain::Process, &Contents::new());
            self.set_condition(id, condition);
        }
    }

    pub fn get(&self, id: &SandboxId, domain: Domain) -> Contents {
        let text = fs::read_to_string(self.in_box(id, place(domain))).unwrap_or_else(|_| "{}".to_owned());
        serde_json::from_str(&text).unwrap()
    }

    pub fn set(&self, id: &SandboxId, domain: Domain, contents: &Contents) {
        self.put(&self.in_box(id, place(domain)), &serde_json::to_string(contents).unwrap());
    }

    pub fn condition_of(&self, id: &SandboxId) -> Condition {
        match fs::read_to_string(self.in_box(id, "condition")).as_deref() {
            Ok("running") => Condition::Running,
            Ok("frozen") => Condition::Frozen,
            _ => Condition::Stopped,
        }
    }

    pub fn set_condition(&self, id: &SandboxId, condition: Condition) {
        self.put(&self.in_box(id, "condition"), &condition.to_string());
    }

    pub fn stored(&self, artifact: &Artifact) -> Option<Contents> {
        let path = self.artifact_path(artifact.domain, &artifact.sandbox, artifact.id.as_str());
        serde_json::from_str(&fs::read_to_string(path).ok()?).ok()
    }

    /// All artifacts that exist.
    pub fn artifacts(&self) -> Vec<(Domain, SandboxId, ArtifactId)> {
        let mut found = Vec::new();
        for domain in [Domain::Filesystem, Domain::Process] {
            let Ok(boxes) = fs::read_dir(self.root.join("artifacts").join(place(domain))) else { continue };
            for sandbox in boxes.flatten() {
                let id = SandboxId::new(sandbox.file_name().to_string_lossy()).unwrap();
                for artifact in fs::read_dir(sandbox.path()).unwrap().flatten() {
                    let name = artifact.file_name().into_string().unwrap();
                    if !name.contains(".tmp") {
                        found.push((domain, id.clone(), ArtifactId::new(name).unwrap()));
                    }
                }
            }
        }
        found
    }

    pub fn backend(&self, domain: Domain) -> Arc<dyn CheckpointBackend> {
        Arc::new(DirBackend { world: self.clone(), domain })
    }
}

fn rand() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(0)
}

#[async_trait]
impl SandboxHost for DirWorld {
    async fn describe(&self, id: &SandboxId) -> Result<Sandbox> {
        if !self.in_box(id, "condition").exists() {
            return Err(Error::new(ErrorKind::NotFound, format!("no sandbox {id}")));
        }
        let sandbox = Sandbox::new(id.clone(), self.in_box(id, "root"), self.in_box(id, "cgroup"));
        Ok(if self.condition_of(id) == Condition::Stopped { sandbox } else { sandbox.with_init(7) })
    }
    async fn freeze(&self, id: &SandboxId) -> Result<()> {
        if self.condition_of(id) == Condition::Running {
            self.set_condition(id, Condition::Frozen);
        }
        Ok(())
    }
    async fn thaw(&self, id: &SandboxId) -> Result<()> {
        if self.condition_of(id) == Condition::Frozen {
            self.set_condition(id, Condition::Running);
        }
        Ok(())
    }
    async fn kill(&self, id: &SandboxId) -> Result<()> {
        self.set_condition(id, Condition::Stopped);
        Ok(())
    }
    async fn condition(&self, id: &SandboxId) -> Result<Condition> {
        Ok(self.condition_of(id))
    }
    async fn inherit(&self, _id: &SandboxId, _external: &[External]) -> Result<Vec<InheritedFd>> {
        Ok(Vec::new())
    }
    async fn adopt(&self, _id: &SandboxId, _init: u32) -> Result<()> {
        Ok(())
    }
    async fn relaunch(&self, id: &SandboxId) -> Result<()> {
        self.set(id, Domain::Process, &Contents::new());
        self.set_condition(id, Condition::Running);
        Ok(())
    }
}

#[async_trait]
impl StateDelta for DirWorld {
    async fn attach(&self, sandbox: &Sandbox) -> Result<()> {
        self.watches.lock().insert(sandbox.id.clone(), Watch::default());
        Ok(())
    }
    async fn take(&self, id: &SandboxId) -> Delta {
        let now = [self.get(id, Domain::Filesystem), self.get(id, Domain::Process)];
        let mut watches = self.watches.lock();
        let watch = watches.entry(id.clone()).or_default();
        watch.next += 1;
        let token = watch.next;
        let change = |at: usize, evidence: Evidence| match &watch.base[at] {
            None => Change::Unknown(Unknown::NoBase),
            Some(base) if *base == now[at] => Change::Unchanged,
            Some(_) => Change::Changed(evidence),
        };
        let delta = Delta {
            filesystem: change(0, Evidence::Filesystem("it".into())),
            process: change(1, Evidence::TaskRan("it".into())),
            effects: Effects::default(),
            token: Token(token),
        };
        watch.taken.insert(token, now);
        delta
    }
    async fn rebase(&self, id: &SandboxId, base: &Rebase) {
        let mut watches = self.watches.lock();
        let Some(watch) = watches.get_mut(id) else { return };
        let Some([files, processes]) = watch.taken.remove(&base.token.0) else { return };
        if base.filesystem {
            watch.base[0] = Some(files);
        }
        if base.process {
            watch.base[1] = Some(processes);
        }
    }
    async fn detach(&self, id: &SandboxId) {
        self.watches.lock().remove(id);
    }
}

struct DirBackend {
    world: DirWorld,
    domain: Domain,
}

struct DirCapture {
    world: DirWorld,
    artifact: Artifact,
    contents: Contents,
}

#[async_trait]
impl CheckpointBackend for DirBackend {
    fn name(&self) -> &str {
        "dir"
    }
    fn domain(&self) -> Domain {
        self.domain
    }
    fn capabilities(&self) -> Capabilities {
        let all = Capabilities::default().with_forks();
        if self.domain == Domain::Filesystem { all.with_keeps_replaced() } else { all }
    }
    async fn recover(&self) -> Result<()> {
        Ok(())
    }
    async fn capture(&self, request: CaptureRequest<'_>) -> Result<Box<dyn Captured>> {
        let id = &request.sandbox.id;
        let contents = self.world.get(id, self.domain);
        request.at_cut.run().await?;
        Ok(Box::new(DirCapture {
            world: self.world.clone(),
            artifact: bare(self.domain, id, request.artifact),
            contents,
        }))
    }
    async fn verify(&self, artifact: &Artifact) -> Result<()> {
        match self.world.stored(artifact) {
            Some(_) => Ok(()),
            None => Err(Error::new(ErrorKind::NotFound, format!("no artifact {}", artifact.id))),
        }
    }
    async fn restore(&self, artifact: &Artifact, target: RestoreTarget) -> Result<Restored> {
        self.verify(artifact).await?;
        let id = &target.sandbox.id;
        if self.world.condition_of(id) != Condition::Stopped {
            return Err(Error::new(ErrorKind::Busy, format!("{id} has tasks")));
        }
        let mut restored = Restored::default();
        if let Some(keep) = target.keep_replaced {
            let kept = bare(self.domain, id, keep);
            // A second attempt: what was kept first is what was replaced.
            if self.world.stored(&kept).is_none() {
                let old = serde_json::to_string(&self.world.get(id, self.domain)).unwrap();
                self.world.put(&self.world.artifact_path(self.domain, id, kept.id.as_str()), &old);
            }
            restored.replaced = Some(kept);
        }
        let contents = self.world.stored(artifact).unwrap_or_default();
        self.world.set(id, self.domain, &contents);
        if self.domain == Domain::Process {
            self.world.set_condition(id, Condition::Running);
            restored.init = Some(7);
        }
        Ok(restored)
    }
    async fn remove(&self, artifact: &Artifact) -> Result<()> {
        (self.world.hook)("world.remove");
        let path = self.world.artifact_path(self.domain, &artifact.sandbox, artifact.id.as_str());
        match fs::remove_file(path) {
            Err(error) if error.kind() != Io::NotFound => Err(Error::io("remove an artifact", error)),
            _ => Ok(()),
        }
    }
    async fn list(&self, id: &SandboxId) -> Result<Vec<Artifact>> {
        let all = self.world.artifacts().into_iter();
        let own = all.filter(|(domain, sandbox, _)| *domain == self.domain && sandbox == id);
        Ok(own.map(|(domain, _, name)| bare(domain, id, name)).collect())
    }
}

fn bare(domain: Domain, id: &SandboxId, artifact: ArtifactId) -> Artifact {
    Artifact {
        id: artifact,
        sandbox: id.clone(),
        domain,
        backend: "dir".to_owned(),
        bytes: None,
        size: None,
        depends_on: Vec::new(),
        external: Vec::new(),
        facts: BTreeMap::new(),
    }
}

#[async_trait]
impl Captured for DirCapture {
    async fn persist(self: Box<Self>) -> Result<Artifact> {
        let path = self.world.artifact_path(self.artifact.domain, &self.artifact.sandbox, self.artifact.id.as_str());
        self.world.put(&path, &serde_json::to_string(&self.contents).unwrap());
        Ok(self.artifact)
    }
    async fn discard(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}
