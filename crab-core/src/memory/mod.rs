//! A world in memory: sandboxes, their host, a delta source and both backends. It behaves as the real parts must, takes
//! faults on order, and needs no privileges: for tests of engines and orchestrators.
//!
//! A sandbox here has files (path to content) and processes (name to what it holds in memory). Nothing can be done to
//! it while it is frozen or stopped, so a test notices when it was left so.
//!
//! ```
//! use crab_core::memory::MemoryWorld;
//! use crab_core::{SandboxId, SandboxHost};
//!
//! let world = MemoryWorld::new();
//! let id = SandboxId::new("box-1")?;
//! world.create(&id);
//! world.write(&id, "/notes", "one")?;
//! world.remember(&id, "server", "a value in memory")?;
//! assert_eq!(world.files(&id)["/notes"], "one");
//! # Ok::<(), crab_core::Error>(())
//! ```

use std::collections::{BTreeMap, HashMap, VecDeque};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use async_trait::async_trait;

use crate::{
    Artifact, ArtifactId, ByteStream, Capabilities, CaptureRequest, Captured, Change, CheckpointBackend, Condition,
    Delta, Domain, Effects, Error, ErrorKind, Evidence, ExportRequest, External, FileChanges, ImportRequest,
    InheritedFd, OperationId, Prepared, Rebase, RestoreTarget, Restored, Result, Sandbox, SandboxHost, SandboxId,
    Space, StateDelta, Token, Unknown,
};

mod transfer;
use transfer::Ready;

/// A step at which a fault can be ordered.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Step {
    /// [`SandboxHost::describe`]
    Describe,
    /// [`SandboxHost::freeze`]
    Freeze,
    /// [`SandboxHost::thaw`]
    Thaw,
    /// [`SandboxHost::kill`]
    Kill,
    /// [`SandboxHost::inherit`]
    Inherit,
    /// [`SandboxHost::adopt`]
    Adopt,
    /// [`SandboxHost::relaunch`]
    Relaunch,
    /// [`StateDelta::take`], where an error makes both domains unknown.
    Take,
    /// [`CheckpointBackend::prepare`] of the processes.
    Prepare,
    /// [`CheckpointBackend::capture`], before the cut.
    Capture(Domain),
    /// [`CheckpointBackend::capture`], after the cut.
    AfterCut(Domain),
    /// [`Captured::persist`], before the artifact exists.
    Persist(Domain),
    /// [`Captured::persist`], when the artifact exists already.
    AfterPersist(Domain),
    /// [`CheckpointBackend::verify`]
    Verify(Domain),
    /// [`CheckpointBackend::fits`]
    Fits(Domain),
    /// [`CheckpointBackend::restore`], before anything is changed.
    Restore(Domain),
    /// [`CheckpointBackend::restore`], when the state is restored.
    AfterRestore(Domain),
    /// [`CheckpointBackend::remove`]
    Remove(Domain),
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// The call fails with this kind.
    Error(ErrorKind),
    /// The call panics.
    Panic,
    /// The call never returns.
    Hang,
    /// All tasks of all sandboxes die, and the call goes on.
    Deaths,
}

/// File contents by path, or what processes hold by their name.
type Contents = BTreeMap<String, String>;

#[derive(Clone, Debug, Default)]
struct MemoryBox {
    files: Contents,
    processes: Contents,
    condition: Option<Condition>,
    external: Vec<External>,
    init: u32,
}

impl MemoryBox {
    fn condition(&self) -> Condition {
        self.condition.unwrap_or(Condition::Stopped)
    }
}

#[derive(Clone, Debug)]
enum Stored {
    Files(Contents),
    Processes(Contents),
}

impl Stored {
    fn bytes(&self) -> u64 {
        let (Self::Files(contents) | Self::Processes(contents)) = self;
        contents.iter().map(|(name, content)| name.len() as u64 + content.len() as u64).sum()
    }
}

type Key = (Domain, SandboxId, ArtifactId);

#[derive(Clone, Debug, Default)]
struct Watch {
    files: Option<Contents>,
    processes: Option<Contents>,
    taken: BTreeMap<u64, (Contents, Contents)>,
}

#[derive(Default)]
struct State {
    boxes: BTreeMap<SandboxId, MemoryBox>,
    artifacts: BTreeMap<Key, Stored>,
    /// Captures that are prepared.
    prepared: Vec<ArtifactId>,
    /// Which restore made an artifact of the state that it replaced.
    kept: HashMap<Key, OperationId>,
    damaged: Vec<Key>,
    faults: HashMap<Step, VecDeque<Fault>>,
    steps: Vec<Step>,
    watches: HashMap<SandboxId, Watch>,
    next: u64,
}

/// The world. Clones share it; it outlives engines, as a real host's sandboxes do.
#[derive(Clone, Default)]
pub struct MemoryWorld(Arc<Mutex<State>>);

impl MemoryWorld {
    /// An empty world.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic is ordered only before the state is touched, so a poisoned state is whole.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Makes a running sandbox with an `init` process and no files.
    pub fn create(&self, id: &SandboxId) {
        let mut state = self.state();
        state.next += 1;
        let init = u32::try_from(state.next).unwrap_or(u32::MAX);
        let processes = BTreeMap::from([("init".to_owned(), String::new())]);
        let made = MemoryBox { processes, condition: Some(Condition::Running), init, ..MemoryBox::default() };
        state.boxes.insert(id.clone(), made);
    }

    /// Makes an empty, stopped sandbox: the target of a fork.
    pub fn create_stopped(&self, id: &SandboxId) {
        self.state().boxes.insert(id.clone(), MemoryBox::default());
    }

    /// Forgets a sandbox, as if its cgroup and root had vanished.
    pub fn vanish(&self, id: &SandboxId) {
        self.state().boxes.remove(id);
    }

    fn act<T>(&self, id: &SandboxId, act: impl FnOnce(&mut MemoryBox) -> T) -> Result<T> {
        let mut state = self.state();
        let sandbox = state.boxes.get_mut(id).ok_or_else(|| unknown_sandbox(id))?;
        match sandbox.condition() {
            Condition::Running => Ok(act(sandbox)),
            other => Err(Error::new(ErrorKind::Busy, format!("{id} cannot act")).condition(other)),
        }
    }

    /// A task of the sandbox writes a file.
    ///
    /// # Errors
    /// Where the sandbox is not running.
    pub fn write(&self, id: &SandboxId, path: &str, content: &str) -> Result<()> {
        self.act(id, |sandbox| sandbox.files.insert(path.to_owned(), content.to_owned()))?;
        Ok(())
    }

    /// The host writes a file of the sandbox, in whatever condition that is.
    ///
    /// # Errors
    /// Where there is no such sandbox.
    pub fn write_from_outside(&self, id: &SandboxId, path: &str, content: &str) -> Result<()> {
        let mut state = self.state();
        let sandbox = state.boxes.get_mut(id).ok_or_else(|| unknown_sandbox(id))?;
        sandbox.files.insert(path.to_owned(), content.to_owned());
        Ok(())
    }

    /// A task of the sandbox removes a file.
    ///
    /// # Errors
    /// Where the sandbox is not running.
    pub fn unlink(&self, id: &SandboxId, path: &str) -> Result<()> {
        self.act(id, |sandbox| sandbox.files.remove(path))?;
        Ok(())
    }

    /// A process, started if it does not live yet, stores a value in its memory.
    ///
    /// # Errors
    /// Where the sandbox is not running.
    pub fn remember(&self, id: &SandboxId, process: &str, value: &str) -> Result<()> {
        self.act(id, |sandbox| sandbox.processes.insert(process.to_owned(), value.to_owned()))?;
        Ok(())
    }

    /// A process ends.
    ///
    /// # Errors
    /// Where the sandbox is not running.
    pub fn exit(&self, id: &SandboxId, process: &str) -> Result<()> {
        self.act(id, |sandbox| sandbox.processes.remove(process))?;
        Ok(())
    }

    /// All tasks die at once. The files stay.
    pub fn crash(&self, id: &SandboxId) {
        if let Some(sandbox) = self.state().boxes.get_mut(id) {
            sandbox.processes.clear();
            sandbox.condition = Some(Condition::Stopped);
        }
    }

    /// The files, or none where the sandbox does not exist.
    #[must_use]
    pub fn files(&self, id: &SandboxId) -> BTreeMap<String, String> {
        self.state().boxes.get(id).map(|sandbox| sandbox.files.clone()).unwrap_or_default()
    }

    /// The processes and what they hold, or none where the sandbox does not exist.
    #[must_use]
    pub fn processes(&self, id: &SandboxId) -> BTreeMap<String, String> {
        self.state().boxes.get(id).map(|sandbox| sandbox.processes.clone()).unwrap_or_default()
    }

    /// The condition, [`Condition::Stopped`] where the sandbox does not exist.
    #[must_use]
    pub fn condition_of(&self, id: &SandboxId) -> Condition {
        self.state().boxes.get(id).map_or(Condition::Stopped, MemoryBox::condition)
    }

    /// Orders a fault for the next time that this step is reached and no earlier order stands.
    pub fn order(&self, step: Step, fault: Fault) {
        self.state().faults.entry(step).or_default().push_back(fault);
    }

    /// Takes all orders back.
    pub fn clear_orders(&self) {
        self.state().faults.clear();
    }

    /// The steps reached so far, in order.
    #[must_use]
    pub fn steps(&self) -> Vec<Step> {
        self.state().steps.clone()
    }

    /// All artifacts that exist.
    #[must_use]
    pub fn artifacts(&self) -> Vec<(Domain, SandboxId, ArtifactId)> {
        self.state().artifacts.keys().cloned().collect()
    }

    /// Captures that are prepared and not over yet.
    #[must_use]
    pub fn prepared(&self) -> Vec<ArtifactId> {
        self.state().prepared.clone()
    }

    /// Damages an artifact, as a flipped bit would.
    pub fn damage(&self, artifact: &Artifact) {
        self.state().damaged.push(key(artifact));
    }

    /// The backend of one domain. Its name is `"memory"`.
    #[must_use]
    pub fn backend(&self, domain: Domain) -> Arc<dyn CheckpointBackend> {
        Arc::new(MemoryBackend { world: self.clone(), domain })
    }

    async fn reach(&self, step: Step) -> Result<()> {
        let fault = {
            let mut state = self.state();
            state.steps.push(step);
            state.faults.get_mut(&step).and_then(VecDeque::pop_front)
        };
        match fault {
            None => Ok(()),
            Some(Fault::Error(kind)) => Err(Error::new(kind, format!("ordered fault at {step:?}"))),
            #[allow(clippy::panic, reason = "it was ordered")]
            Some(Fault::Panic) => panic!("ordered panic at {step:?}"),
            Some(Fault::Hang) => std::future::pending().await,
            Some(Fault::Deaths) => {
                let ids: Vec<SandboxId> = self.state().boxes.keys().cloned().collect();
                ids.iter().for_each(|id| self.crash(id));
                Ok(())
            }
        }
    }
}

fn unknown_sandbox(id: &SandboxId) -> Error {
    Error::new(ErrorKind::NotFound, format!("there is no sandbox {id}"))
}

fn key(artifact: &Artifact) -> Key {
    (artifact.domain, artifact.sandbox.clone(), artifact.id.clone())
}

fn name_taken(id: &ArtifactId) -> Error {
    Error::new(ErrorKind::AlreadyExists, format!("an artifact {id} exists already"))
}

fn refuse_late(deadline: Option<Instant>) -> Result<()> {
    match deadline {
        Some(deadline) if Instant::now() >= deadline => {
            Err(Error::new(ErrorKind::TimedOut, "the deadline passed before the call was begun"))
        }
        _ => Ok(()),
    }
}

#[async_trait]
impl SandboxHost for MemoryWorld {
    async fn describe(&self, id: &SandboxId) -> Result<Sandbox> {
        self.reach(Step::Describe).await?;
        let state = self.state();
        let known = state.boxes.get(id).ok_or_else(|| unknown_sandbox(id))?;
        let mut sandbox = Sandbox::new(id.clone(), format!("/memory/{id}/root"), format!("/memory/{id}/cgroup"));
        sandbox.external.clone_from(&known.external);
        if known.condition() != Condition::Stopped {
            sandbox.init = Some(known.init);
        }
        Ok(sandbox)
    }

    async fn freeze(&self, id: &SandboxId) -> Result<()> {
        self.reach(Step::Freeze).await?;
        let mut state = self.state();
        let sandbox = state.boxes.get_mut(id).ok_or_else(|| unknown_sandbox(id))?;
        if sandbox.condition() == Condition::Running {
            sandbox.condition = Some(Condition::Frozen);
        }
        Ok(())
    }

    async fn thaw(&self, id: &SandboxId) -> Result<()> {
        self.reach(Step::Thaw).await?;
        let mut state = self.state();
        let sandbox = state.boxes.get_mut(id).ok_or_else(|| unknown_sandbox(id))?;
        if sandbox.condition() == Condition::Frozen {
            sandbox.condition = Some(Condition::Running);
        }
        Ok(())
    }

    async fn kill(&self, id: &SandboxId) -> Result<()> {
        self.reach(Step::Kill).await?;
        self.crash(id);
        Ok(())
    }

    async fn condition(&self, id: &SandboxId) -> Result<Condition> {
        self.state().boxes.get(id).map(MemoryBox::condition).ok_or_else(|| unknown_sandbox(id))
    }

    async fn inherit(&self, _id: &SandboxId, _external: &[External]) -> Result<Vec<InheritedFd>> {
        self.reach(Step::Inherit).await?;
        Ok(Vec::new())
    }

    async fn adopt(&self, id: &SandboxId, init: u32) -> Result<()> {
        self.reach(Step::Adopt).await?;
        let mut state = self.state();
        state.boxes.get_mut(id).ok_or_else(|| unknown_sandbox(id))?.init = init;
        Ok(())
    }

    async fn relaunch(&self, id: &SandboxId) -> Result<()> {
        self.reach(Step::Relaunch).await?;
        let mut state = self.state();
        let sandbox = state.boxes.get_mut(id).ok_or_else(|| unknown_sandbox(id))?;
        sandbox.processes = BTreeMap::from([("init".to_owned(), String::new())]);
        sandbox.condition = Some(Condition::Running);
        Ok(())
    }
}

fn compare(base: Option<&Contents>, now: &Contents, domain: Domain) -> Change {
    let Some(base) = base else {
        return Change::Unknown(Unknown::NoBase);
    };
    let differ: Vec<&String> = base
        .keys()
        .chain(now.keys().filter(|name| !base.contains_key(*name)))
        .filter(|name| base.get(*name) != now.get(*name))
        .collect();
    match (differ.first(), domain) {
        (None, _) => Change::Unchanged,
        (Some(_), Domain::Filesystem) => Change::Changed(Evidence::Files {
            count: differ.len() as u64,
            examples: differ.iter().take(3).map(|name| (*name).clone()).collect(),
        }),
        (Some(name), Domain::Process) => Change::Changed(match (base.contains_key(*name), now.contains_key(*name)) {
            (false, _) => Evidence::NewTask((*name).clone()),
            (_, false) => Evidence::GoneTask((*name).clone()),
            _ => Evidence::TaskRan((*name).clone()),
        }),
    }
}

#[async_trait]
impl StateDelta for MemoryWorld {
    async fn attach(&self, sandbox: &Sandbox) -> Result<()> {
        self.state().watches.insert(sandbox.id.clone(), Watch::default());
        Ok(())
    }

    async fn take(&self, id: &SandboxId) -> Delta {
        let failed = self.reach(Step::Take).await.err();
        let mut state = self.state();
        state.next += 1;
        let token = state.next;
        let unknown = |reason: Unknown| Delta {
            filesystem: Change::Unknown(reason.clone()),
            process: Change::Unknown(reason),
            effects: Effects::default(),
            token: Token(token),
        };
        if let Some(error) = failed {
            return unknown(Unknown::Failed(error.to_string()));
        }
        let State { boxes, watches, .. } = &mut *state;
        let (Some(sandbox), Some(watch)) = (boxes.get(id), watches.get_mut(id)) else {
            return unknown(Unknown::NotAttached);
        };
        watch.taken.insert(token, (sandbox.files.clone(), sandbox.processes.clone()));
        Delta {
            filesystem: compare(watch.files.as_ref(), &sandbox.files, Domain::Filesystem),
            process: compare(watch.processes.as_ref(), &sandbox.processes, Domain::Process),
            effects: Effects::default(),
            token: Token(token),
        }
    }

    async fn rebase(&self, id: &SandboxId, base: &Rebase) {
        let mut state = self.state();
        let Some(watch) = state.watches.get_mut(id) else {
            return;
        };
        let Some((files, processes)) = watch.taken.remove(&base.token.0) else {
            return;
        };
        watch.taken.retain(|token, _| *token > base.token.0);
        if base.filesystem {
            watch.files = Some(files);
        }
        if base.process {
            watch.processes = Some(processes);
        }
    }

    async fn detach(&self, id: &SandboxId) {
        self.state().watches.remove(id);
    }
}

struct MemoryBackend {
    world: MemoryWorld,
    domain: Domain,
}

/// Stands in the list of what is prepared, until it is dropped.
struct MemoryPreparation {
    world: MemoryWorld,
    artifact: ArtifactId,
}

impl Drop for MemoryPreparation {
    fn drop(&mut self) {
        let prepared = &mut self.world.state().prepared;
        if let Some(at) = prepared.iter().position(|artifact| *artifact == self.artifact) {
            prepared.swap_remove(at);
        }
    }
}

struct MemoryCapture {
    world: MemoryWorld,
    artifact: Artifact,
    stored: Stored,
}

#[async_trait]
impl CheckpointBackend for MemoryBackend {
    fn name(&self) -> &str {
        "memory"
    }

    fn domain(&self) -> Domain {
        self.domain
    }

    fn capabilities(&self) -> Capabilities {
        let capabilities = Capabilities::default().with_forks();
        match self.domain {
            Domain::Filesystem => capabilities.with_keeps_replaced().with_diffs().with_accounts().with_exports(),
            Domain::Process => capabilities.with_prepares(),
        }
    }

    async fn recover(&self) -> Result<()> {
        Ok(())
    }

    async fn prepare(&self, _sandbox: &Sandbox, artifact: &ArtifactId, deadline: Option<Instant>) -> Result<Prepared> {
        if self.domain == Domain::Filesystem {
            return Ok(Prepared::nothing());
        }
        let preparation = MemoryPreparation { world: self.world.clone(), artifact: artifact.clone() };
        self.world.state().prepared.push(artifact.clone());
        self.world.reach(Step::Prepare).await?;
        refuse_late(deadline)?;
        Ok(Prepared::new(Duration::ZERO, preparation))
    }

    async fn capture(&self, request: CaptureRequest<'_>) -> Result<Box<dyn Captured>> {
        self.world.reach(Step::Capture(self.domain)).await?;
        refuse_late(request.deadline)?;
        let id = request.sandbox.id.clone();
        let external = request.sandbox.external.clone();
        let mut artifact = Artifact { external, ..self.bare(&id, request.artifact) };
        let thaw_after = {
            let mut state = self.world.state();
            if state.artifacts.contains_key(&key(&artifact)) {
                return Err(name_taken(&artifact.id));
            }
            let sandbox = state.boxes.get_mut(&id).ok_or_else(|| unknown_sandbox(&id))?;
            // As CRIU does, the process backend stops the tasks itself where the caller has not.
            let stops = self.domain == Domain::Process && sandbox.condition() == Condition::Running;
            if stops {
                sandbox.condition = Some(Condition::Frozen);
            }
            Unfreeze { world: &self.world, id: &id, armed: stops }
        };
        let stored = {
            let state = self.world.state();
            let sandbox = state.boxes.get(&id).ok_or_else(|| unknown_sandbox(&id))?;
            match self.domain {
                Domain::Filesystem => Stored::Files(sandbox.files.clone()),
                Domain::Process => Stored::Processes(sandbox.processes.clone()),
            }
        };
        artifact.bytes = Some(stored.bytes());
        if let Stored::Processes(processes) = &stored {
            // A process here has no number; its name makes one.
            let number =
                |name: &str| name.bytes().fold(0u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
            artifact.facts =
                processes.keys().map(|name| (Artifact::process_fact(number(name)), name.clone())).collect();
        }
        request.at_cut.run().await?;
        drop(thaw_after);
        self.world.reach(Step::AfterCut(self.domain)).await?;
        Ok(Box::new(MemoryCapture { world: self.world.clone(), artifact, stored }))
    }

    async fn verify(&self, artifact: &Artifact) -> Result<()> {
        self.world.reach(Step::Verify(self.domain)).await?;
        let state = self.world.state();
        if state.damaged.contains(&key(artifact)) {
            return Err(Error::new(ErrorKind::Corrupt, format!("artifact {} is damaged", artifact.id)));
        }
        if !state.artifacts.contains_key(&key(artifact)) {
            return Err(Error::new(ErrorKind::NotFound, format!("there is no artifact {}", artifact.id)));
        }
        Ok(())
    }

    async fn fits(&self, _artifact: &Artifact, _sandbox: &Sandbox) -> Result<()> {
        self.world.reach(Step::Fits(self.domain)).await
    }

    async fn restore(&self, artifact: &Artifact, target: RestoreTarget) -> Result<Restored> {
        self.world.reach(Step::Restore(self.domain)).await?;
        refuse_late(target.deadline)?;
        self.verify(artifact).await?;
        let mut restored = Restored::default();
        {
            let mut state = self.world.state();
            state.next += 1;
            let init = u32::try_from(state.next).unwrap_or(u32::MAX);
            let stored = state.artifacts.get(&key(artifact)).cloned();
            let id = &target.sandbox.id;
            let state = &mut *state;
            let sandbox = state.boxes.get_mut(id).ok_or_else(|| unknown_sandbox(id))?;
            if sandbox.condition() != Condition::Stopped {
                let busy = Error::new(ErrorKind::Busy, format!("{id} has tasks")).fix("kill it first");
                return Err(busy.condition(sandbox.condition()));
            }
            match stored {
                Some(Stored::Files(files)) => {
                    let old = Stored::Files(sandbox.files.clone());
                    let bytes = Some(old.bytes());
                    let kept = target.keep_replaced.map(|name| Artifact {
                        id: name,
                        sandbox: id.clone(),
                        bytes,
                        ..artifact.clone()
                    });
                    // What stands there at a second attempt is what the first one put there, not what it replaced.
                    let again = kept.as_ref().is_some_and(|kept| state.kept.get(&key(kept)) == Some(&target.operation));
                    if let Some(kept) = kept.as_ref().filter(|_| !again) {
                        if state.artifacts.contains_key(&key(kept)) {
                            return Err(name_taken(&kept.id));
                        }
                        state.artifacts.insert(key(kept), old);
                        state.kept.insert(key(kept), target.operation);
                    }
                    sandbox.files = files;
                    restored.replaced = kept;
                }
                Some(Stored::Processes(processes)) => {
                    sandbox.processes = processes;
                    sandbox.condition = Some(Condition::Running);
                    sandbox.init = init;
                    restored.init = Some(init);
                }
                // Verified above under the same name; only a concurrent removal gets here.
                None => {
                    return Err(Error::new(ErrorKind::NotFound, "the artifact was removed meanwhile"));
                }
            }
        }
        self.world.reach(Step::AfterRestore(self.domain)).await?;
        Ok(restored)
    }

    async fn remove(&self, artifact: &Artifact) -> Result<()> {
        self.world.reach(Step::Remove(self.domain)).await?;
        let mut state = self.world.state();
        state.artifacts.remove(&key(artifact));
        state.kept.remove(&key(artifact));
        Ok(())
    }

    async fn list(&self, id: &SandboxId) -> Result<Vec<Artifact>> {
        let state = self.world.state();
        Ok(state
            .artifacts
            .keys()
            .filter(|(domain, sandbox, _)| *domain == self.domain && sandbox == id)
            .map(|(_, sandbox, artifact)| self.bare(sandbox, artifact.clone()))
            .collect())
    }

    fn tree(&self, artifact: &Artifact) -> Option<PathBuf> {
        (self.domain == Domain::Filesystem)
            .then(|| PathBuf::from(format!("/memory/{}/versions/{}", artifact.sandbox, artifact.id)))
    }

    async fn diff(&self, from: &Artifact, to: &Artifact) -> Result<Box<dyn FileChanges>> {
        let (from, to) = (self.files(from).await?, self.files(to).await?);
        Ok(Box::new(Ready(transfer::differences(&from, &to).into())))
    }

    async fn space(&self, artifact: &Artifact) -> Result<Space> {
        // Nothing is shared here.
        let bytes = self.files(artifact).await?.values().map(|content| content.len() as u64).sum();
        Ok(Space { referenced: bytes, exclusive: bytes })
    }

    async fn export(&self, request: ExportRequest<'_>) -> Result<Box<dyn ByteStream>> {
        if request.resume.is_some() {
            return Err(Error::new(ErrorKind::Unsupported, "imports into memory are not resumed"));
        }
        let contents = self.files(request.artifact).await?;
        let base = match request.base {
            Some(base) => Some(self.files(base).await?),
            None => None,
        };
        let stream = transfer::encode(&contents, base.as_ref());
        // In several pieces, as streams come.
        Ok(Box::new(Ready(stream.chunks(16).map(<[u8]>::to_vec).collect())))
    }

    async fn import(&self, request: ImportRequest<'_>) -> Result<Artifact> {
        let artifact = self.bare(request.sandbox, request.artifact);
        let base = match request.base {
            Some(base) => Some(self.files(base).await?),
            None => None,
        };
        if self.domain != Domain::Filesystem {
            return Err(Error::new(ErrorKind::Unsupported, "only files are imported"));
        }
        if self.world.state().artifacts.contains_key(&key(&artifact)) {
            return Err(name_taken(&artifact.id));
        }
        let mut stream = Vec::new();
        while let Some(piece) = request.stream.next().await? {
            stream.extend(piece);
        }
        let contents = transfer::decode(&stream, base.as_ref())?;
        self.world.state().artifacts.insert(key(&artifact), Stored::Files(contents));
        Ok(artifact)
    }
}

impl MemoryBackend {
    fn bare(&self, sandbox: &SandboxId, id: ArtifactId) -> Artifact {
        Artifact {
            id,
            sandbox: sandbox.clone(),
            domain: self.domain,
            backend: "memory".to_owned(),
            bytes: None,
            size: None,
            depends_on: Vec::new(),
            external: Vec::new(),
            facts: BTreeMap::new(),
        }
    }

    /// The files of an artifact.
    async fn files(&self, artifact: &Artifact) -> Result<Contents> {
        self.verify(artifact).await?;
        match self.world.state().artifacts.get(&key(artifact)) {
            Some(Stored::Files(files)) => Ok(files.clone()),
            _ => Err(Error::new(ErrorKind::Unsupported, "only artifacts of files can be looked into")),
        }
    }
}

/// Lets the sandbox run again when a process capture ends, however it ends.
struct Unfreeze<'a> {
    world: &'a MemoryWorld,
    id: &'a SandboxId,
    armed: bool,
}

impl Drop for Unfreeze<'_> {
    fn drop(&mut self) {
        if self.armed
            && let Some(sandbox) = self.world.state().boxes.get_mut(self.id)
            && sandbox.condition() == Condition::Frozen
        {
            sandbox.condition = Some(Condition::Running);
        }
    }
}

#[async_trait]
impl Captured for MemoryCapture {
    async fn persist(self: Box<Self>) -> Result<Artifact> {
        self.world.reach(Step::Persist(self.artifact.domain)).await?;
        self.world.state().artifacts.insert(key(&self.artifact), self.stored.clone());
        self.world.reach(Step::AfterPersist(self.artifact.domain)).await?;
        Ok(self.artifact)
    }

    async fn discard(self: Box<Self>) -> Result<()> {
        Ok(())
    }
}
