//! Bringing a sandbox back to a version: validate, record, kill, swap the files, bring the processes back, finish.
//!
//! | step | what a crash after it leaves | what the same operation does next time |
//! |---|---|---|
//! | validate | nothing | begins |
//! | record the operation | the sandbox as it was | goes on: kill |
//! | kill | a stopped sandbox | goes on: files |
//! | restore the files, keep the replaced ones | a stopped sandbox with the version's files | the kept artifact is there, so it is not kept again; the files are put in place afresh |
//! | write the manifest of the replaced state | the same, and that version | the same |
//! | write the standing version into the sandbox's record | the same | the same |
//! | restore the processes, hand them to the host | a running sandbox | kills it and goes on, since nobody knows how far it ran |
//! | finish the operation | | returns the report |

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crab_core::{
    Artifact, Condition, Domain, Effects, Error, ErrorKind, Half, HostFacts, MANIFEST_FORMAT, Manifest, OperationId,
    Origin, RestoreTarget, Result, Sandbox, SandboxId, Timings, TurnNumber, VersionId,
};

use super::calls::{blocking, call};
use super::events::EventKind;
use super::lineage::{self, Select};
use super::{Engine, Inner, checkpoint, detached, meters, names};
use crate::report::{PassedOver, ProcessOutcome, RestoreReport};
use crate::store::{Operation, OperationKind, Outcome, Restored, SandboxRecord};

/// How many operations that have ended the store remembers for each sandbox.
const REMEMBERED: usize = 16;

/// How a restore is done.
#[derive(Clone, Debug, Default)]
pub struct RestoreOptions {
    /// Names the restore. The same name again finishes a restore that was cut off, or returns its report. Without one
    /// it gets a name of its own, which [`Unfinished`](super::Unfinished) tells after a crash.
    pub operation: Option<OperationId>,
    /// Where the wanted version is damaged, take the newest whole one before it and say so in the report.
    pub allow_fallback: bool,
    /// A restore that has not got so far by this moment as to end the sandbox's tasks, with everything validated and
    /// recorded, fails with [`ErrorKind::TimedOut`] and has changed nothing: the sandbox runs on, its turns too. One that
    /// has is carried through, however late it ends, since what was ended cannot be brought back but by a restore.
    pub deadline: Option<Instant>,
}

impl Engine {
    /// Brings a sandbox back to a version, whether it lives or not, and attaches it. Everything is checked before
    /// anything is touched. The files that are replaced are kept as a version of their own where the backend can. The
    /// sandbox's waiting turns are cancelled; a checkpoint that has begun is waited for.
    ///
    /// Dropping the future does not stop the restore.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`], [`ErrorKind::Corrupt`], [`ErrorKind::Unsupported`] where the version does not exist, is
    /// damaged or needs another host, [`ErrorKind::InvalidInput`] where the sandbox's root cannot be replaced,
    /// [`ErrorKind::TimedOut`] by the deadline: nothing was touched. Otherwise the error tells the sandbox's condition; the same operation may be asked for again. It then puts the version's files in
    /// place afresh, ends what the first attempt may have started, and reports as
    /// [`replaced`](RestoreReport::replaced) what the first attempt replaced.
    pub async fn restore(&self, id: &SandboxId, select: Select, options: RestoreOptions) -> Result<RestoreReport> {
        let (inner, id) = (self.0.clone(), id.clone());
        detached("restore", async move { inner.restore(&id, select, options).await }).await
    }
}

fn passed(deadline: Option<Instant>) -> Result<()> {
    match deadline {
        Some(deadline) if Instant::now() >= deadline => {
            Err(Error::new(ErrorKind::TimedOut, "the restore's deadline passed before anything was touched"))
        }
        _ => Ok(()),
    }
}

/// A smaller limit where the deadline is nearer.
fn until(limit: Duration, deadline: Option<Instant>) -> Duration {
    deadline.map_or(limit, |deadline| limit.min(deadline.saturating_duration_since(Instant::now())))
}

impl Inner {
    async fn restore(
        self: &Arc<Self>,
        id: &SandboxId,
        select: Select,
        options: RestoreOptions,
    ) -> Result<RestoreReport> {
        self.check_open()?;
        let begun = Instant::now();
        let operation = match options.operation {
            Some(operation) => operation,
            None => names::operation()?,
        };
        if let Some(report) = self.known(&operation, id, &OperationKind::Restore)? {
            return Ok(report);
        }
        let lock = self.work_lock(id);
        let _exclusive = match tokio::time::timeout(until(Duration::MAX, options.deadline), lock.lock()).await {
            Ok(held) => held,
            Err(_) => {
                let late =
                    Error::new(ErrorKind::TimedOut, "a checkpoint of the sandbox did not end before the deadline");
                return Err(self.with_condition(id, late).await);
            }
        };
        // Somebody may have finished it while we waited.
        if let Some(report) = self.known(&operation, id, &OperationKind::Restore)? {
            return Ok(report);
        }
        let result = self.restore_exclusively(id, select, operation, options.allow_fallback, options.deadline).await;
        match result {
            Ok(report) => {
                let took = begun.elapsed();
                meters::restore(took);
                self.emit(id, EventKind::Restored { report: Arc::new(report.clone()), took });
                Ok(report)
            }
            Err(error) => Err(self.with_condition(id, error).await),
        }
    }

    /// The report of an operation that has ended; an error where the name belongs to something else.
    pub(super) fn known(
        &self,
        operation: &OperationId,
        id: &SandboxId,
        kind: &OperationKind,
    ) -> Result<Option<RestoreReport>> {
        let known = self.store.with(|index| index.operations.get(operation).cloned());
        match known {
            None => Ok(None),
            Some(known) if known.sandbox != *id || known.kind != *kind => Err(Error::new(
                ErrorKind::AlreadyExists,
                format!("the operation {operation} is another one, on {}", known.sandbox),
            )
            .fix("use another name")),
            Some(known) => match known.outcome {
                Some(Outcome::Done(report)) => Ok(Some(report)),
                Some(Outcome::Superseded(by)) => Err(Error::new(
                    ErrorKind::Cancelled,
                    format!("the operation {operation} was replaced by {by} before it had ended"),
                )
                .give_up()),
                None => Ok(None),
            },
        }
    }

    async fn restore_exclusively(
        self: &Arc<Self>,
        id: &SandboxId,
        select: Select,
        name: OperationId,
        allow_fallback: bool,
        deadline: Option<Instant>,
    ) -> Result<RestoreReport> {
        let unfinished = self.store.with(|index| index.operations.get(&name).cloned());
        let (version, passed_over) = match &unfinished {
            // Chosen once; what is newest now is not what was newest then.
            Some(operation) => {
                (self.choose(id, Select::Version(operation.version), false, deadline).await?.0, Vec::new())
            }
            None => self.choose(id, select, allow_fallback, deadline).await?,
        };
        let sandbox = self.describe(id).await?;
        self.fits(&version, &sandbox, deadline).await?;
        passed(deadline)?;
        let operation = match unfinished {
            Some(operation) => operation,
            None => {
                let operation = self.new_operation(id, &version, name, passed_over)?;
                let took_over = self.settle_superseded(id, &operation.id).await?;
                self.put_operation(operation.clone()).await?;
                // One that takes the place of another goes on: what the other had done is its own now.
                if !took_over && let Err(late) = passed(deadline) {
                    self.withdraw(&operation).await;
                    return Err(late);
                }
                operation
            }
        };
        self.step("restore.recorded")?;

        // The deadline is over with here. And from here on the delta's base is not what the sandbox is.
        self.attached.lock().remove(id);
        self.cancel(id, "the sandbox is being restored");
        self.forget_watch(id).await;
        self.kill(id).await?;
        self.step("restore.killed")?;
        let replaced = self.swap_files(&operation, &version, sandbox).await?;
        self.step("restore.swapped")?;
        let process = self.bring_back(id, &version, &operation.id).await?;
        self.step("restore.started")?;
        let report = self.store.with(|index| RestoreReport {
            operation: operation.id.clone(),
            sandbox: id.clone(),
            version: version.version,
            turn: version.turn,
            conversation: version.conversation,
            process,
            replaced,
            lost: lineage::lost(&version, operation.last_turn, operation.more_turns),
            passed_over: operation.passed_over.clone(),
            effects: index
                .sandboxes
                .get(id)
                .map(|sandbox| lineage::kept_effects(sandbox, &version, operation.standing))
                .unwrap_or_default(),
        });
        let lives = matches!(report.process, ProcessOutcome::Restored { .. }) | self.rewatch(id).await;
        self.finish_operation(operation, Outcome::Done(report.clone())).await?;
        self.install(id, true, lives);
        Ok(report)
    }

    /// The first candidate that is whole, and those that were passed over for it.
    pub(super) async fn choose(
        &self,
        id: &SandboxId,
        select: Select,
        allow_fallback: bool,
        deadline: Option<Instant>,
    ) -> Result<(Arc<Manifest>, Vec<PassedOver>)> {
        let candidates = self.store.with(|index| match index.sandboxes.get(id) {
            Some(sandbox) => lineage::candidates(id, sandbox, select),
            None => Err(Error::new(ErrorKind::NotFound, format!("the store knows no sandbox {id}"))),
        })?;
        let mut passed_over = Vec::new();
        for candidate in candidates {
            let (version, error) = match candidate {
                Ok(manifest) => match self.verify(&manifest, deadline).await {
                    Ok(()) => return Ok((manifest, passed_over)),
                    Err(error) => (manifest.version, error),
                },
                Err(damaged) => damaged,
            };
            let damaged = matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound | ErrorKind::Unsupported);
            if !damaged || !allow_fallback {
                let error = error.while_doing(format!("version {version} of {id} cannot be restored"));
                return Err(match damaged {
                    true if error.remedy().is_none() => error.fix("allow a fallback, or name another version"),
                    _ => error,
                });
            }
            tracing::warn!(sandbox = %id, %version, "passed over: {error}");
            passed_over.push(PassedOver { version, reason: error.to_string() });
        }
        Err(Error::new(ErrorKind::Corrupt, format!("no version of {id} is whole")))
    }

    /// Checks that both halves are whole and can be restored here. A missing artifact is damage: the manifest named it.
    pub(super) async fn verify(&self, manifest: &Manifest, deadline: Option<Instant>) -> Result<()> {
        if manifest.filesystem.artifact().is_none() {
            return Err(Error::new(ErrorKind::Corrupt, format!("{} holds no files", manifest.version)));
        }
        let here = rustix::system::uname();
        let architecture = here.machine().to_string_lossy();
        if manifest.process.artifact().is_some()
            && !manifest.host.architecture.is_empty()
            && manifest.host.architecture != architecture
        {
            let message = format!("its processes ran on {}, this host is {architecture}", manifest.host.architecture);
            return Err(Error::new(ErrorKind::Unsupported, message));
        }
        for artifact in manifest.artifacts() {
            let backend = self.backend_of(artifact)?;
            let artifact = artifact.clone();
            let limit = until(self.options.deadlines.restore, deadline);
            call("verify an artifact", limit, async move { backend.verify(&artifact).await }).await?;
        }
        Ok(())
    }

    /// Checks that a version can be put in place in this sandbox, as far as can be told without touching it.
    pub(super) async fn fits(&self, manifest: &Manifest, sandbox: &Sandbox, deadline: Option<Instant>) -> Result<()> {
        for artifact in manifest.artifacts() {
            let backend = self.backend_of(artifact)?;
            let (artifact, sandbox) = (artifact.clone(), sandbox.clone());
            let limit = until(self.options.deadlines.host, deadline);
            let asked = call("look at the sandbox", limit, async move { backend.fits(&artifact, &sandbox).await });
            let version = manifest.version;
            asked.await.map_err(|error| error.while_doing(format!("{version} cannot be restored into it")))?;
        }
        Ok(())
    }

    fn new_operation(
        &self,
        id: &SandboxId,
        version: &Manifest,
        name: OperationId,
        passed_over: Vec<PassedOver>,
    ) -> Result<Operation> {
        let seen = self.attached.lock().get(id).map_or(TurnNumber(0), |attached| attached.last_turn());
        let keeps = self.filesystem.capabilities().keeps_replaced;
        let keep = keeps.then(|| names::artifact(self.next_version(id))).transpose()?;
        Ok(self.store.with(|index| {
            let sandbox = index.sandboxes.get(id);
            let known = sandbox.map_or(TurnNumber(0), lineage::last_turn);
            Operation {
                id: name,
                sandbox: id.clone(),
                kind: OperationKind::Restore,
                version: version.version,
                keep,
                last_turn: known.max(seen),
                // Turns that were seen since the store was opened are later than those that no file tells of.
                more_turns: seen <= known && sandbox.is_some_and(lineage::may_miss_turns),
                standing: sandbox.and_then(lineage::standing).map(|manifest| manifest.version),
                passed_over,
                sequence: index.operations.values().map(|operation| operation.sequence).max().unwrap_or(0) + 1,
                outcome: None,
            }
        }))
    }

    pub(super) async fn put_operation(&self, operation: Operation) -> Result<()> {
        let store = self.store.clone();
        blocking("record the operation", move || store.put_operation(operation)).await?
    }

    /// Takes back the record of an operation that has touched nothing.
    async fn withdraw(&self, operation: &Operation) {
        let (store, owned) = (self.store.clone(), operation.id.clone());
        let withdrawn = blocking("withdraw the operation", move || store.remove_operation(&owned)).await;
        if let Err(error) = withdrawn.and_then(|withdrawn| withdrawn) {
            tracing::warn!(operation = %operation.id, "it seems to have begun and has not: {error}");
        }
    }

    /// Ends what an earlier restore of the sandbox left open, and tells whether there was any. What it had replaced by
    /// then is kept as a version.
    async fn settle_superseded(&self, id: &SandboxId, by: &OperationId) -> Result<bool> {
        let open: Vec<Operation> = self.store.with(|index| {
            let open = index.operations.values().filter(|op| op.sandbox == *id && op.outcome.is_none() && op.id != *by);
            open.cloned().collect()
        });
        let found = !open.is_empty();
        for operation in open {
            if let Some(kept) = self.find_kept(&operation).await? {
                self.keep_version(&operation, kept).await?;
            }
            self.put_operation(Operation { outcome: Some(Outcome::Superseded(by.clone())), ..operation }).await?;
        }
        Ok(found)
    }

    pub(super) async fn kill(&self, id: &SandboxId) -> Result<()> {
        let (host, owned) = (self.host.clone(), id.clone());
        call("kill the sandbox", self.options.deadlines.host, async move { host.kill(&owned).await }).await
    }

    /// The replaced state that this operation has kept already.
    async fn find_kept(&self, operation: &Operation) -> Result<Option<Artifact>> {
        let Some(keep) = &operation.keep else { return Ok(None) };
        let (backend, id) = (self.filesystem.clone(), operation.sandbox.clone());
        let limit = self.options.deadlines.host;
        let listed = call("list artifacts", limit, async move { backend.list(&id).await }).await?;
        Ok(listed.into_iter().find(|artifact| artifact.id == *keep))
    }

    /// Puts the version's files in place and records that they stand. Returns the version of the replaced ones.
    async fn swap_files(
        &self,
        operation: &Operation,
        version: &Manifest,
        sandbox: Sandbox,
    ) -> Result<Option<VersionId>> {
        let stopped = |error: Error| match error.sandbox_condition() {
            None => error.condition(Condition::Stopped),
            Some(_) => error,
        };
        let kept = self.find_kept(operation).await.map_err(stopped)?;
        // A second attempt must not keep what the first one put in place, and must not take the swap for done either:
        // the restored processes may have run on it.
        let (keep_replaced, attempt) = match &kept {
            Some(_) => (None, names::attempt(&operation.id)?),
            None => (operation.keep.clone(), operation.id.clone()),
        };
        let deadline = Instant::now().checked_add(self.options.deadlines.restore);
        let target = RestoreTarget { sandbox, operation: attempt, keep_replaced, inherited: Vec::new(), deadline };
        let restored = self.restore_half(&version.filesystem, target).await.map_err(stopped)?;
        self.step("restore.files").map_err(stopped)?;
        let kept = match kept {
            Some(kept) => Some(kept),
            None => restored.and_then(|restored| restored.replaced),
        };
        let kept = match kept {
            Some(kept) => Some(self.keep_version(operation, kept).await.map_err(stopped)?),
            None => None,
        };
        self.step("restore.kept").map_err(stopped)?;
        let record = self.store.with(|index| {
            let sandbox = index.sandboxes.get(&operation.sandbox);
            let floor = sandbox.map_or(VersionId(1), crate::store::SandboxIndex::next_version);
            let restored = Restored { version: version.version, floor, operation: operation.id.clone() };
            let before = sandbox.map(|sandbox| sandbox.record.clone()).unwrap_or_default();
            SandboxRecord { restored: Some(restored), detached: false, ..before }
        });
        self.put_record(&operation.sandbox, record).await.map_err(stopped)?;
        Ok(kept)
    }

    /// Restores a stored half within its limit.
    pub(super) async fn restore_half(&self, half: &Half, target: RestoreTarget) -> Result<Option<crab_core::Restored>> {
        let Some(artifact) = half.artifact() else { return Ok(None) };
        let backend = self.backend_of(artifact)?;
        let what = match artifact.domain {
            Domain::Filesystem => "restore the files",
            Domain::Process => "restore the processes",
        };
        let limit = self.options.deadlines.restore;
        let artifact = artifact.clone();
        call(what, limit, async move { backend.restore(&artifact, target).await }).await.map(Some)
    }

    /// Makes a version of the files that a restore replaced.
    async fn keep_version(&self, operation: &Operation, kept: Artifact) -> Result<VersionId> {
        let is_it = |manifest: &Manifest| manifest.artifacts().any(|artifact| artifact.id == kept.id);
        let known = self.store.with(|index| {
            let versions = &index.sandboxes.get(&operation.sandbox)?.versions;
            versions.values().find(|manifest| is_it(manifest)).map(|manifest| manifest.version)
        });
        if let Some(version) = known {
            return Ok(version);
        }
        let version = self.next_version(&operation.sandbox);
        let mut manifest = Manifest {
            format: MANIFEST_FORMAT,
            sandbox: operation.sandbox.clone(),
            version,
            parent: operation.standing,
            turn: operation.last_turn,
            origin: Origin::Replaced { operation: operation.id.clone() },
            filesystem: Half::Stored(kept),
            process: Half::Missing("the processes were ended by the restore".to_owned()),
            conversation: None,
            effects: Effects::default(),
            created_ms: checkpoint::now_ms(),
            host: HostFacts::default(),
            timings: Timings::default(),
        };
        manifest.host = checkpoint::host_facts(&manifest);
        let (store, manifest) = (self.store.clone(), Arc::new(manifest));
        let stored = blocking("keep the replaced files", move || store.put_version(manifest)).await?;
        stored.map_err(|(error, _)| error)?;
        Ok(version)
    }

    /// Brings the processes of a version back in a stopped sandbox whose files are in place.
    pub(super) async fn bring_back(
        &self,
        id: &SandboxId,
        version: &Manifest,
        operation: &OperationId,
    ) -> Result<ProcessOutcome> {
        let outcome = match &version.process {
            Half::Stored(artifact) => self.start_restored(id, version, artifact, operation).await,
            Half::Empty => self.relaunch(id, "no process lived when the version was made").await,
            Half::Missing(reason) => self.relaunch(id, reason).await,
        };
        match outcome {
            Ok(outcome) => Ok(outcome),
            Err(error) => {
                let error = error.while_doing(format!("the files of {} are in place", version.version));
                // Whatever was started must not act on those files unseen.
                Err(match self.kill(id).await {
                    Ok(()) => error.condition(Condition::Stopped),
                    Err(_) => error.condition(Condition::Unknown),
                })
            }
        }
    }

    async fn start_restored(
        &self,
        id: &SandboxId,
        version: &Manifest,
        artifact: &Artifact,
        operation: &OperationId,
    ) -> Result<ProcessOutcome> {
        let limit = self.options.deadlines.host;
        let (host, owned, external) = (self.host.clone(), id.clone(), artifact.external.clone());
        let inherited = call("prepare the host", limit, async move { host.inherit(&owned, &external).await }).await?;
        // Described anew: preparing may have changed what there is.
        let sandbox = self.describe(id).await?;
        let target = RestoreTarget {
            sandbox,
            operation: names::attempt(operation)?,
            keep_replaced: None,
            inherited,
            deadline: Instant::now().checked_add(self.options.deadlines.restore),
        };
        let restored = self.restore_half(&version.process, target).await?.unwrap_or_default();
        self.step("restore.processes")?;
        let Some(init) = restored.init else {
            return Err(Error::new(ErrorKind::Internal, "the process backend named no restored process"));
        };
        let (host, owned) = (self.host.clone(), id.clone());
        call("adopt the processes", limit, async move { host.adopt(&owned, init).await }).await?;
        Ok(ProcessOutcome::Restored { init })
    }

    async fn relaunch(&self, id: &SandboxId, reason: &str) -> Result<ProcessOutcome> {
        let (host, owned) = (self.host.clone(), id.clone());
        call("relaunch", self.options.deadlines.host, async move { host.relaunch(&owned).await }).await?;
        Ok(ProcessOutcome::Relaunched { reason: reason.to_owned() })
    }

    /// Watches a restored sandbox, and tells whether it has tasks. Where it cannot be watched every turn counts as
    /// changed, which is safe.
    pub(super) async fn rewatch(&self, id: &SandboxId) -> bool {
        let mut lives = false;
        let watched = match self.describe(id).await {
            Ok(sandbox) => {
                lives = sandbox.init.is_some();
                self.watch(sandbox).await
            }
            Err(error) => Err(error),
        };
        if let Err(error) = watched {
            tracing::warn!(sandbox = %id, "restored, but its changes cannot be seen: {error}");
        }
        lives
    }

    /// Records the end of an operation and forgets the oldest ones of the sandbox.
    pub(super) async fn finish_operation(&self, operation: Operation, outcome: Outcome) -> Result<()> {
        let id = operation.sandbox.clone();
        self.put_operation(Operation { outcome: Some(outcome), ..operation }).await?;
        let old: Vec<OperationId> = self.store.with(|index| {
            let ended: BTreeSet<(u64, OperationId)> = index
                .operations
                .values()
                .filter(|operation| operation.sandbox == id && operation.outcome.is_some())
                .map(|operation| (operation.sequence, operation.id.clone()))
                .collect();
            let many = ended.len().saturating_sub(REMEMBERED);
            ended.into_iter().take(many).map(|(_, id)| id).collect()
        });
        let store = self.store.clone();
        let forgotten =
            blocking("forget old operations", move || old.iter().try_for_each(|old| store.remove_operation(old)));
        if let Err(error) = forgotten.await? {
            tracing::warn!(sandbox = %id, "old operations stay for now: {error}");
        }
        Ok(())
    }
}
