//! The suites that every implementation of a core trait passes.
//!
//! A test gives a fixture (how to make a sandbox, how to change it, how to read it) and calls [`backend`], [`delta`] or
//! [`host`], which run every rule on a sandbox of its own, or single rules by name. A broken rule panics with what was
//! expected. The suites use no runtime and wait for no time to pass.
//!
//! ```text
//! #[tokio::test]
//! async fn conforms() {
//!     crab_core::conformance::backend(&MyFixture::new().await).await;
//! }
//! ```
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "these are tests")]

pub mod calls;
pub mod churn;
pub mod disk;
pub mod model;
pub mod stress;
mod transfer;
pub mod trees;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

pub use transfer::{
    a_bad_import_leaves_nothing, a_diff_names_exactly_what_differs, a_diff_tells_changes_of_metadata_alone,
    a_fork_makes_a_root_where_there_is_none, an_export_can_be_imported_elsewhere,
    an_import_that_was_cut_short_goes_on_or_begins_anew, space_is_accounted,
};

use async_trait::async_trait;

use crate::{
    Artifact, ArtifactId, AtCut, CaptureRequest, Captured, Change, CheckpointBackend, Condition, Domain, Error,
    ErrorKind, NoCut, OperationId, Prepared, Rebase, RestoreTarget, Restored, Result, SandboxHost, SandboxId,
    StateDelta, Unknown,
};

/// How the backend suite makes and sees sandboxes. The *value* is the domain's whole state as far as the suite is
/// concerned: a number in a file for a filesystem, a number in a process's memory for processes.
#[async_trait]
pub trait BackendFixture: Send + Sync {
    /// The backend under test.
    fn backend(&self) -> Arc<dyn CheckpointBackend>;

    /// The host of the sandboxes.
    fn host(&self) -> Arc<dyn SandboxHost>;

    /// Makes a new sandbox with live tasks (for a filesystem backend: with or without).
    async fn sandbox(&self) -> SandboxId;

    /// Brings the domain to the state that `value` names, from inside the sandbox where tasks live.
    async fn set(&self, id: &SandboxId, value: u64);

    /// Reads the state, `None` where it cannot be read.
    async fn get(&self, id: &SandboxId) -> Option<u64>;

    /// Makes a stopped sandbox that an artifact of another one can be restored into, where the backend
    /// [forks](crate::Capabilities::forks). `None` skips that rule.
    async fn fork_target(&self, _from: &SandboxId) -> Option<SandboxId> {
        None
    }

    /// The same, but its root does not exist, for a filesystem backend. `None` skips that rule.
    async fn rootless_target(&self, _from: &SandboxId) -> Option<SandboxId> {
        None
    }

    /// Opens the backend anew, as if the process had ended and another one went on.
    async fn reopen(&self) {}

    /// Deletes a stopped sandbox with its root.
    async fn delete(&self, _id: &SandboxId) {}

    /// What is stored and belongs neither to these sandboxes nor to these artifacts, by names that people understand.
    fn strays(&self, _sandboxes: &BTreeSet<SandboxId>, _artifacts: &[Artifact]) -> Vec<String> {
        Vec::new()
    }

    /// The states that artifacts hold, where that can be told without a restore.
    fn read(&self, _artifacts: &[Artifact]) -> Option<Vec<Option<u64>>> {
        None
    }
}

static NEXT: AtomicU64 = AtomicU64::new(1);

fn name(what: &str) -> String {
    format!("{what}-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed))
}

fn artifact_name() -> ArtifactId {
    ArtifactId::new(name("conformance")).unwrap()
}

async fn try_capture(
    f: &dyn BackendFixture,
    id: &SandboxId,
    artifact: ArtifactId,
    at_cut: &mut dyn AtCut,
) -> Result<Box<dyn Captured>> {
    try_capture_until(f, id, artifact, at_cut, None).await
}

async fn try_capture_until(
    f: &dyn BackendFixture,
    id: &SandboxId,
    artifact: ArtifactId,
    at_cut: &mut dyn AtCut,
    deadline: Option<Instant>,
) -> Result<Box<dyn Captured>> {
    let sandbox = f.host().describe(id).await.expect("the host describes its own sandbox");
    let request = CaptureRequest { sandbox: &sandbox, artifact, parent: None, frozen: false, deadline, at_cut };
    f.backend().capture(request).await
}

async fn checkpoint(f: &dyn BackendFixture, id: &SandboxId) -> Artifact {
    let captured = try_capture(f, id, artifact_name(), &mut NoCut).await.expect("capture");
    captured.persist().await.expect("persist")
}

async fn try_restore(
    f: &dyn BackendFixture,
    id: &SandboxId,
    artifact: &Artifact,
    operation: &OperationId,
    keep_replaced: Option<ArtifactId>,
) -> Result<Restored> {
    try_restore_until(f, id, artifact, operation, keep_replaced, None).await
}

async fn try_restore_until(
    f: &dyn BackendFixture,
    id: &SandboxId,
    artifact: &Artifact,
    operation: &OperationId,
    keep_replaced: Option<ArtifactId>,
    deadline: Option<Instant>,
) -> Result<Restored> {
    let host = f.host();
    let sandbox = host.describe(id).await.expect("the host describes its own sandbox");
    let inherited = host.inherit(id, &artifact.external).await.expect("the host gives what is external");
    let target = RestoreTarget { sandbox, operation: operation.clone(), keep_replaced, inherited, deadline };
    let restored = f.backend().restore(artifact, target).await?;
    if let Some(init) = restored.init {
        host.adopt(id, init).await.expect("the host adopts what was restored");
    }
    Ok(restored)
}

fn operation() -> OperationId {
    OperationId::new(name("restore")).unwrap()
}

/// Kills the sandbox and restores the artifact, and for a filesystem starts it again.
async fn kill_and_restore(f: &dyn BackendFixture, id: &SandboxId, artifact: &Artifact) {
    f.host().kill(id).await.expect("kill");
    try_restore(f, id, artifact, &operation(), None).await.expect("restore");
    start_if_files(f, id).await;
}

async fn start_if_files(f: &dyn BackendFixture, id: &SandboxId) {
    if f.backend().domain() == Domain::Filesystem {
        f.host().relaunch(id).await.expect("relaunch");
    }
}

async fn listed(f: &dyn BackendFixture, id: &SandboxId) -> Vec<ArtifactId> {
    let mut names: Vec<_> = f.backend().list(id).await.expect("list").into_iter().map(|a| a.id).collect();
    names.sort();
    names
}

macro_rules! suite {
    ($(#[$doc:meta])* $suite:ident($fixture:ty): $($rule:ident),* $(,)?) => {
        $(#[$doc])*
        pub async fn $suite(f: $fixture) {
            $(
                // The name of the rule is printed first, so that a hang or panic can be told.
                eprintln!(concat!("rule ", stringify!($rule)));
                $rule(f).await;
            )*
        }
    };
}

suite! {
    /// Runs every rule for a [`CheckpointBackend`], each on a new sandbox.
    backend(&dyn BackendFixture):
    a_restore_brings_back_the_captured_state,
    a_capture_leaves_the_sandbox_running_as_it_was,
    what_happens_after_the_cut_is_not_captured,
    what_happens_after_the_preparation_is_captured,
    a_preparation_that_is_dropped_leaves_nothing,
    the_cut_runs_exactly_once,
    a_failing_cut_fails_the_capture_and_leaves_nothing,
    a_discarded_capture_leaves_nothing,
    a_dropped_capture_leaves_no_artifact,
    only_persisted_artifacts_are_listed,
    an_artifact_name_is_never_taken_twice,
    newer_versions_survive_going_back,
    a_removed_artifact_is_gone_and_removal_repeats,
    removing_one_leaves_the_others_whole,
    restoring_a_missing_artifact_changes_nothing,
    a_restore_into_a_live_sandbox_is_refused,
    the_same_restore_can_be_tried_again,
    replaced_state_is_kept_where_offered,
    a_second_attempt_keeps_what_the_first_one_replaced,
    replaced_state_never_takes_the_place_of_an_artifact,
    a_passed_deadline_changes_nothing,
    a_fork_leaves_the_original_alone,
    a_fork_makes_a_root_where_there_is_none,
    recover_disturbs_nothing,
    a_diff_names_exactly_what_differs,
    a_diff_tells_changes_of_metadata_alone,
    space_is_accounted,
    an_export_can_be_imported_elsewhere,
    a_bad_import_leaves_nothing,
    an_import_that_was_cut_short_goes_on_or_begins_anew,
}

/// Capture, change, kill, restore: the old state is back.
pub async fn a_restore_brings_back_the_captured_state(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    f.set(&id, 1).await;
    let artifact = checkpoint(f, &id).await;
    assert_eq!(artifact.domain, f.backend().domain());
    assert_eq!(artifact.backend, f.backend().name());
    assert_eq!(artifact.sandbox, id);
    f.backend().verify(&artifact).await.expect("a new artifact is whole");
    f.set(&id, 2).await;
    assert_eq!(f.get(&id).await, Some(2), "the fixture reads what it set");
    kill_and_restore(f, &id, &artifact).await;
    assert_eq!(f.get(&id).await, Some(1));
    f.set(&id, 3).await;
    assert_eq!(f.get(&id).await, Some(3), "the restored sandbox lives");
}

/// The sandbox works on during and after a capture.
pub async fn a_capture_leaves_the_sandbox_running_as_it_was(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    f.set(&id, 5).await;
    let before = f.host().condition(&id).await.unwrap();
    let captured = try_capture(f, &id, artifact_name(), &mut NoCut).await.expect("capture");
    assert_eq!(f.host().condition(&id).await.unwrap(), before, "after the capture");
    assert_eq!(f.get(&id).await, Some(5));
    f.set(&id, 6).await;
    captured.persist().await.expect("persist");
    assert_eq!(f.host().condition(&id).await.unwrap(), before, "after persist");
    assert_eq!(f.get(&id).await, Some(6));
}

/// A change between capture and persist belongs to the next version.
pub async fn what_happens_after_the_cut_is_not_captured(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    f.set(&id, 10).await;
    let captured = try_capture(f, &id, artifact_name(), &mut NoCut).await.expect("capture");
    f.set(&id, 11).await;
    let artifact = captured.persist().await.expect("persist");
    kill_and_restore(f, &id, &artifact).await;
    assert_eq!(f.get(&id).await, Some(10));
}

/// Whatever a backend does before the freeze, what it captures is what there is at the cut.
pub async fn what_happens_after_the_preparation_is_captured(f: &dyn BackendFixture) {
    let (id, artifact) = (f.sandbox().await, artifact_name());
    f.set(&id, 20).await;
    let prepared = prepare(f, &id, &artifact).await;
    f.set(&id, 21).await;
    f.host().freeze(&id).await.expect("freeze");
    let before = f.host().condition(&id).await.unwrap();
    let sandbox = f.host().describe(&id).await.expect("the host describes its own sandbox");
    let mut nothing = NoCut;
    let request = CaptureRequest {
        sandbox: &sandbox,
        artifact,
        parent: None,
        frozen: true,
        deadline: None,
        at_cut: &mut nothing,
    };
    let captured = f.backend().capture(request).await.expect("capture");
    assert_eq!(f.host().condition(&id).await.unwrap(), before, "the caller froze it");
    f.host().thaw(&id).await.expect("thaw");
    drop(prepared);
    f.set(&id, 22).await;
    let artifact = captured.persist().await.expect("persist");
    kill_and_restore(f, &id, &artifact).await;
    assert_eq!(f.get(&id).await, Some(21));
}

/// A preparation is no artifact, does not take the name, and goes without a trace.
pub async fn a_preparation_that_is_dropped_leaves_nothing(f: &dyn BackendFixture) {
    let (id, artifact) = (f.sandbox().await, artifact_name());
    f.set(&id, 30).await;
    let before = f.host().condition(&id).await.unwrap();
    for _ in 0..2 {
        drop(prepare(f, &id, &artifact).await);
        assert_eq!(f.host().condition(&id).await.unwrap(), before);
        assert!(listed(f, &id).await.is_empty());
    }
    f.set(&id, 31).await;
    let captured = try_capture(f, &id, artifact, &mut NoCut).await.expect("capture");
    let artifact = captured.persist().await.expect("persist");
    kill_and_restore(f, &id, &artifact).await;
    assert_eq!(f.get(&id).await, Some(31));
}

async fn prepare(f: &dyn BackendFixture, id: &SandboxId, artifact: &ArtifactId) -> Prepared {
    let sandbox = f.host().describe(id).await.expect("the host describes its own sandbox");
    f.backend().prepare(&sandbox, artifact, None).await.expect("prepare")
}

struct Counting {
    runs: u32,
    fail: bool,
}

#[async_trait]
impl AtCut for Counting {
    async fn run(&mut self) -> Result<()> {
        self.runs += 1;
        if self.fail { Err(Error::new(ErrorKind::Io, "the cut was told to fail")) } else { Ok(()) }
    }
}

/// The cut is called once, before the capture returns.
pub async fn the_cut_runs_exactly_once(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    f.set(&id, 1).await;
    let mut cut = Counting { runs: 0, fail: false };
    let captured = try_capture(f, &id, artifact_name(), &mut cut).await.expect("capture");
    assert_eq!(cut.runs, 1);
    captured.discard().await.expect("discard");
}

/// An error at the cut fails the capture; the sandbox lives on and nothing is stored.
pub async fn a_failing_cut_fails_the_capture_and_leaves_nothing(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    f.set(&id, 4).await;
    let before = f.host().condition(&id).await.unwrap();
    let mut cut = Counting { runs: 0, fail: true };
    let result = try_capture(f, &id, artifact_name(), &mut cut).await;
    assert!(result.is_err(), "the capture must fail with its cut");
    assert_eq!(f.host().condition(&id).await.unwrap(), before);
    assert_eq!(f.get(&id).await, Some(4));
    assert!(listed(f, &id).await.is_empty());
    // The failure leaves nothing that disturbs the next one.
    checkpoint(f, &id).await;
}

/// Discard removes all of a capture, its name too.
pub async fn a_discarded_capture_leaves_nothing(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    f.set(&id, 4).await;
    let artifact = artifact_name();
    let captured = try_capture(f, &id, artifact.clone(), &mut NoCut).await.expect("capture");
    captured.discard().await.expect("discard");
    assert!(listed(f, &id).await.is_empty());
    let again = try_capture(f, &id, artifact, &mut NoCut).await.expect("the name is free again");
    again.discard().await.expect("discard");
}

/// Dropping a capture never makes an artifact.
pub async fn a_dropped_capture_leaves_no_artifact(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    f.set(&id, 4).await;
    drop(try_capture(f, &id, artifact_name(), &mut NoCut).await.expect("capture"));
    assert!(listed(f, &id).await.is_empty());
    assert_eq!(f.get(&id).await, Some(4));
}

/// A capture is listed when it is persisted and not before, for its own sandbox only.
pub async fn only_persisted_artifacts_are_listed(f: &dyn BackendFixture) {
    let (one, two) = (f.sandbox().await, f.sandbox().await);
    f.set(&one, 1).await;
    f.set(&two, 2).await;
    let first = checkpoint(f, &one).await;
    let pending = try_capture(f, &one, artifact_name(), &mut NoCut).await.expect("capture");
    assert_eq!(listed(f, &one).await, std::slice::from_ref(&first.id));
    let second = pending.persist().await.expect("persist");
    let mut expected = [first.id, second.id];
    expected.sort();
    assert_eq!(listed(f, &one).await, expected);
    assert!(listed(f, &two).await.is_empty());
}

/// An existing artifact is never overwritten.
pub async fn an_artifact_name_is_never_taken_twice(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    f.set(&id, 1).await;
    let first = checkpoint(f, &id).await;
    f.set(&id, 2).await;
    // The name may be refused at capture or, at the latest, at persist.
    let error = match try_capture(f, &id, first.id.clone(), &mut NoCut).await {
        Ok(captured) => captured.persist().await.err(),
        Err(error) => Some(error),
    };
    assert_eq!(error.expect("the name is taken").kind(), ErrorKind::AlreadyExists);
    f.backend().verify(&first).await.expect("the first artifact is whole");
    kill_and_restore(f, &id, &first).await;
    assert_eq!(f.get(&id).await, Some(1));
}

/// Going back to an old version leaves newer ones restorable.
pub async fn newer_versions_survive_going_back(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    let mut versions = Vec::new();
    for value in 1..=3 {
        f.set(&id, value).await;
        versions.push((value, checkpoint(f, &id).await));
    }
    for at in [0, 2, 1, 1, 2] {
        let (value, artifact) = &versions[at];
        kill_and_restore(f, &id, artifact).await;
        assert_eq!(f.get(&id).await, Some(*value));
    }
}

/// Removal is complete and can be repeated.
pub async fn a_removed_artifact_is_gone_and_removal_repeats(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    f.set(&id, 1).await;
    let artifact = checkpoint(f, &id).await;
    f.backend().remove(&artifact).await.expect("remove");
    assert!(listed(f, &id).await.is_empty());
    assert_eq!(f.backend().verify(&artifact).await.unwrap_err().kind(), ErrorKind::NotFound);
    f.backend().remove(&artifact).await.expect("removing again does nothing");
    assert_eq!(f.get(&id).await, Some(1), "the sandbox is not touched");
}

/// Removing the oldest leaves the newest restorable.
pub async fn removing_one_leaves_the_others_whole(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    f.set(&id, 1).await;
    let old = checkpoint(f, &id).await;
    f.set(&id, 2).await;
    let new = checkpoint(f, &id).await;
    f.backend().remove(&old).await.expect("remove");
    f.backend().verify(&new).await.expect("whole");
    f.set(&id, 3).await;
    kill_and_restore(f, &id, &new).await;
    assert_eq!(f.get(&id).await, Some(2));
}

/// A restore of what is not there fails before anything is touched.
pub async fn restoring_a_missing_artifact_changes_nothing(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    f.set(&id, 1).await;
    let kept = checkpoint(f, &id).await;
    let missing = Artifact { id: artifact_name(), ..kept.clone() };
    f.host().kill(&id).await.expect("kill");
    let error = try_restore(f, &id, &missing, &operation(), None).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::NotFound, "{error}");
    assert_eq!(f.host().condition(&id).await.unwrap(), Condition::Stopped);
    try_restore(f, &id, &kept, &operation(), None).await.expect("restore what is there");
    start_if_files(f, &id).await;
    assert_eq!(f.get(&id).await, Some(1));
}

/// While tasks live the restore is refused, and they live on.
pub async fn a_restore_into_a_live_sandbox_is_refused(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    f.set(&id, 1).await;
    let artifact = checkpoint(f, &id).await;
    f.set(&id, 2).await;
    if f.host().condition(&id).await.unwrap() == Condition::Stopped {
        return;
    }
    // The host gives nothing to a sandbox that lives, so the refusal cannot depend on what it gives.
    let sandbox = f.host().describe(&id).await.expect("describe");
    let target =
        RestoreTarget { sandbox, operation: operation(), keep_replaced: None, inherited: Vec::new(), deadline: None };
    let error = f.backend().restore(&artifact, target).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Busy, "{error}");
    assert_eq!(f.get(&id).await, Some(2), "the live sandbox is not touched");
}

/// An operation that is tried again, after it was done and the sandbox killed, ends in the same state.
pub async fn the_same_restore_can_be_tried_again(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    f.set(&id, 1).await;
    let artifact = checkpoint(f, &id).await;
    f.set(&id, 2).await;
    let operation = operation();
    for _ in 0..3 {
        f.host().kill(&id).await.expect("kill");
        try_restore(f, &id, &artifact, &operation, None).await.expect("restore");
    }
    start_if_files(f, &id).await;
    assert_eq!(f.get(&id).await, Some(1));
}

/// The replaced state becomes an artifact that can be restored in turn.
pub async fn replaced_state_is_kept_where_offered(f: &dyn BackendFixture) {
    if !f.backend().capabilities().keeps_replaced {
        return;
    }
    let id = f.sandbox().await;
    f.set(&id, 1).await;
    let artifact = checkpoint(f, &id).await;
    f.set(&id, 2).await;
    f.host().kill(&id).await.expect("kill");
    let keep = artifact_name();
    let restored = try_restore(f, &id, &artifact, &operation(), Some(keep.clone())).await.expect("restore");
    let replaced = restored.replaced.expect("the replaced state");
    assert_eq!(replaced.id, keep);
    assert!(listed(f, &id).await.contains(&keep));
    start_if_files(f, &id).await;
    assert_eq!(f.get(&id).await, Some(1));
    f.backend().verify(&replaced).await.expect("whole");
    kill_and_restore(f, &id, &replaced).await;
    assert_eq!(f.get(&id).await, Some(2));
}

/// What stands in the sandbox at a second attempt is what the first one restored: the kept state is the first one's.
pub async fn a_second_attempt_keeps_what_the_first_one_replaced(f: &dyn BackendFixture) {
    if !f.backend().capabilities().keeps_replaced {
        return;
    }
    let id = f.sandbox().await;
    f.set(&id, 1).await;
    let artifact = checkpoint(f, &id).await;
    f.set(&id, 2).await;
    f.host().kill(&id).await.expect("kill");
    let (operation, keep) = (operation(), artifact_name());
    for attempt in 1..=3 {
        let restored = try_restore(f, &id, &artifact, &operation, Some(keep.clone())).await.expect("restore");
        let replaced = restored.replaced.expect("the replaced state");
        assert_eq!(replaced.id, keep, "attempt {attempt}");
        f.backend().verify(&replaced).await.expect("whole");
        if attempt == 2 {
            f.backend().recover().await.expect("recover");
        }
    }
    start_if_files(f, &id).await;
    assert_eq!(f.get(&id).await, Some(1));
    let kept = f.backend().list(&id).await.expect("list").into_iter().find(|a| a.id == keep).expect("it is listed");
    kill_and_restore(f, &id, &kept).await;
    assert_eq!(f.get(&id).await, Some(2));
}

/// A name that is taken is refused for the replaced state before anything is changed.
pub async fn replaced_state_never_takes_the_place_of_an_artifact(f: &dyn BackendFixture) {
    if !f.backend().capabilities().keeps_replaced {
        return;
    }
    let id = f.sandbox().await;
    f.set(&id, 1).await;
    let artifact = checkpoint(f, &id).await;
    f.set(&id, 2).await;
    f.host().kill(&id).await.expect("kill");
    let error = try_restore(f, &id, &artifact, &operation(), Some(artifact.id.clone())).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AlreadyExists, "{error}");
    start_if_files(f, &id).await;
    assert_eq!(f.get(&id).await, Some(2));
    kill_and_restore(f, &id, &artifact).await;
    assert_eq!(f.get(&id).await, Some(1));
}

/// A call whose deadline has passed gives up before it changes anything.
pub async fn a_passed_deadline_changes_nothing(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    f.set(&id, 1).await;
    let artifact = checkpoint(f, &id).await;
    f.set(&id, 2).await;
    let before = f.host().condition(&id).await.unwrap();
    let name = artifact_name();
    let result = try_capture_until(f, &id, name.clone(), &mut NoCut, Some(Instant::now())).await;
    assert_eq!(result.err().expect("it is too late").kind(), ErrorKind::TimedOut);
    assert_eq!(f.host().condition(&id).await.unwrap(), before, "after the capture");
    assert_eq!(f.get(&id).await, Some(2));
    assert_eq!(listed(f, &id).await, std::slice::from_ref(&artifact.id));
    let again = try_capture(f, &id, name, &mut NoCut).await.expect("the name is free");
    let latest = again.persist().await.expect("persist");

    f.host().kill(&id).await.expect("kill");
    let (operation, keep) = (operation(), artifact_name());
    let keep = f.backend().capabilities().keeps_replaced.then_some(keep);
    let late = Some(Instant::now());
    let error = try_restore_until(f, &id, &artifact, &operation, keep.clone(), late).await.unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
    assert_eq!(f.host().condition(&id).await.unwrap(), Condition::Stopped);
    let mut expected = [artifact.id.clone(), latest.id.clone()];
    expected.sort();
    assert_eq!(listed(f, &id).await, expected, "no replaced state is kept");
    if f.backend().domain() == Domain::Filesystem {
        start_if_files(f, &id).await;
        assert_eq!(f.get(&id).await, Some(2), "the files are what they were");
        f.host().kill(&id).await.expect("kill");
    }
    try_restore(f, &id, &artifact, &operation, keep).await.expect("in time");
    start_if_files(f, &id).await;
    assert_eq!(f.get(&id).await, Some(1));
}

/// Restoring into another sandbox leaves the first as it is.
pub async fn a_fork_leaves_the_original_alone(f: &dyn BackendFixture) {
    if !f.backend().capabilities().forks {
        return;
    }
    let id = f.sandbox().await;
    f.set(&id, 1).await;
    let artifact = checkpoint(f, &id).await;
    f.set(&id, 2).await;
    let Some(fork) = f.fork_target(&id).await else {
        return;
    };
    try_restore(f, &fork, &artifact, &operation(), None).await.expect("restore into the fork");
    start_if_files(f, &fork).await;
    assert_eq!(f.get(&fork).await, Some(1));
    assert_eq!(f.get(&id).await, Some(2));
    f.set(&fork, 3).await;
    assert_eq!(f.get(&id).await, Some(2));
    assert_eq!(f.get(&fork).await, Some(3));
}

/// Recovery with nothing to recover touches neither sandboxes nor artifacts.
pub async fn recover_disturbs_nothing(f: &dyn BackendFixture) {
    let id = f.sandbox().await;
    f.set(&id, 1).await;
    let artifact = checkpoint(f, &id).await;
    f.set(&id, 2).await;
    f.backend().recover().await.expect("recover");
    f.backend().recover().await.expect("recover again");
    assert_eq!(f.get(&id).await, Some(2));
    f.backend().verify(&artifact).await.expect("whole");
    assert_eq!(listed(f, &id).await, [artifact.id]);
}

/// How the delta suite makes and changes sandboxes.
#[async_trait]
pub trait DeltaFixture: Send + Sync {
    /// The observer under test.
    fn delta(&self) -> Arc<dyn StateDelta>;

    /// The host of the sandboxes.
    fn host(&self) -> Arc<dyn SandboxHost>;

    /// Makes a new sandbox with live tasks that are at rest.
    async fn sandbox(&self) -> SandboxId;

    /// Changes one domain, and not the other. Every call changes something else.
    async fn change(&self, id: &SandboxId, domain: Domain);

    /// The path at which the files of this moment can be read later, where the observer compares with them.
    async fn tree(&self, _id: &SandboxId) -> Option<std::path::PathBuf> {
        None
    }
}

suite! {
    /// Runs every rule for a [`StateDelta`], each on a new sandbox.
    delta(&dyn DeltaFixture):
    what_has_no_base_is_unknown,
    what_is_not_attached_is_unknown,
    a_sandbox_at_rest_is_unchanged,
    each_domain_is_seen_to_change,
    taking_does_not_move_the_base,
    what_happens_between_take_and_rebase_is_kept,
    a_rebase_of_one_domain_leaves_the_other,
    a_token_from_before_the_attach_has_no_effect,
    a_delta_can_be_taken_while_frozen,
}

async fn attached(f: &dyn DeltaFixture) -> SandboxId {
    let id = f.sandbox().await;
    let sandbox = f.host().describe(&id).await.expect("describe");
    f.delta().attach(&sandbox).await.expect("attach");
    id
}

async fn based(f: &dyn DeltaFixture) -> SandboxId {
    let id = attached(f).await;
    rebase(f, &id, true, true).await;
    id
}

async fn rebase(f: &dyn DeltaFixture, id: &SandboxId, filesystem: bool, process: bool) {
    let token = f.delta().take(id).await.token;
    let tree = if filesystem { f.tree(id).await } else { None };
    f.delta().rebase(id, &Rebase { token, filesystem, process, tree }).await;
}

/// Before the first version nothing is proven.
pub async fn what_has_no_base_is_unknown(f: &dyn DeltaFixture) {
    let id = attached(f).await;
    let delta = f.delta().take(&id).await;
    assert!(delta.filesystem.needs_checkpoint() && delta.process.needs_checkpoint(), "{delta:?}");
    assert!(matches!(delta.filesystem, Change::Unknown(_)), "{delta:?}");
}

/// A sandbox that nobody attached, or that was detached, is unknown.
pub async fn what_is_not_attached_is_unknown(f: &dyn DeltaFixture) {
    let id = f.sandbox().await;
    let delta = f.delta().take(&id).await;
    assert_eq!(delta.filesystem, Change::Unknown(Unknown::NotAttached));
    assert_eq!(delta.process, Change::Unknown(Unknown::NotAttached));
    let id = based(f).await;
    f.delta().detach(&id).await;
    assert_eq!(f.delta().take(&id).await.process, Change::Unknown(Unknown::NotAttached));
    f.delta().detach(&id).await;
}

/// Nothing happened: both domains are unchanged, however often it is asked.
pub async fn a_sandbox_at_rest_is_unchanged(f: &dyn DeltaFixture) {
    let id = based(f).await;
    for _ in 0..3 {
        let delta = f.delta().take(&id).await;
        assert!(delta.is_clean(), "{delta:?}");
    }
}

/// A change of one domain is seen in it, and a new base makes it clean again.
pub async fn each_domain_is_seen_to_change(f: &dyn DeltaFixture) {
    let id = based(f).await;
    for domain in [Domain::Filesystem, Domain::Process, Domain::Filesystem] {
        f.change(&id, domain).await;
        let delta = f.delta().take(&id).await;
        assert!(delta.of(domain).needs_checkpoint(), "{domain}: {delta:?}");
        rebase(f, &id, true, true).await;
        let delta = f.delta().take(&id).await;
        assert!(delta.is_clean(), "after the rebase: {delta:?}");
    }
}

/// A checkpoint that failed leaves the sandbox as dirty as it was.
pub async fn taking_does_not_move_the_base(f: &dyn DeltaFixture) {
    let id = based(f).await;
    f.change(&id, Domain::Filesystem).await;
    for _ in 0..3 {
        assert!(f.delta().take(&id).await.filesystem.needs_checkpoint());
    }
}

/// What changed after the token was taken is still a change after the rebase.
pub async fn what_happens_between_take_and_rebase_is_kept(f: &dyn DeltaFixture) {
    for domain in [Domain::Filesystem, Domain::Process] {
        let id = based(f).await;
        f.change(&id, domain).await;
        let token = f.delta().take(&id).await.token;
        let tree = f.tree(&id).await;
        f.change(&id, domain).await;
        f.delta().take(&id).await;
        f.delta().rebase(&id, &Rebase { token, filesystem: true, process: true, tree }).await;
        let delta = f.delta().take(&id).await;
        assert!(delta.of(domain).needs_checkpoint(), "{domain}: {delta:?}");
    }
}

/// A version that holds only the files anew says nothing about the processes, and the other way round.
pub async fn a_rebase_of_one_domain_leaves_the_other(f: &dyn DeltaFixture) {
    for (saved, other) in [(Domain::Filesystem, Domain::Process), (Domain::Process, Domain::Filesystem)] {
        let id = based(f).await;
        f.change(&id, other).await;
        rebase(f, &id, saved == Domain::Filesystem, saved == Domain::Process).await;
        let delta = f.delta().take(&id).await;
        assert!(delta.of(other).needs_checkpoint(), "{other}: {delta:?}");
    }
}

/// After a new attach an old token proves nothing.
pub async fn a_token_from_before_the_attach_has_no_effect(f: &dyn DeltaFixture) {
    let id = based(f).await;
    let token = f.delta().take(&id).await.token;
    let sandbox = f.host().describe(&id).await.expect("describe");
    f.delta().attach(&sandbox).await.expect("attach again");
    f.delta().rebase(&id, &Rebase { token, filesystem: true, process: true, tree: None }).await;
    let delta = f.delta().take(&id).await;
    assert!(delta.filesystem.needs_checkpoint() && delta.process.needs_checkpoint(), "{delta:?}");
}

/// The decision is confirmed at the cut, where the sandbox is frozen.
pub async fn a_delta_can_be_taken_while_frozen(f: &dyn DeltaFixture) {
    let id = based(f).await;
    f.change(&id, Domain::Filesystem).await;
    f.host().freeze(&id).await.expect("freeze");
    let delta = f.delta().take(&id).await;
    let tree = f.tree(&id).await;
    f.delta().rebase(&id, &Rebase { token: delta.token, filesystem: true, process: true, tree }).await;
    f.host().thaw(&id).await.expect("thaw");
    assert!(delta.filesystem.needs_checkpoint(), "{delta:?}");
    // The thaw itself makes the tasks run for a moment, which may count as a change of processes, not of files.
    let delta = f.delta().take(&id).await;
    assert!(!delta.filesystem.needs_checkpoint(), "{delta:?}");
}

/// How the host suite gets sandboxes.
#[async_trait]
pub trait HostFixture: Send + Sync {
    /// The host under test.
    fn host(&self) -> Arc<dyn SandboxHost>;

    /// Makes a new sandbox with live tasks.
    async fn sandbox(&self) -> SandboxId;
}

suite! {
    /// Runs every rule for a [`SandboxHost`], each on a new sandbox.
    host(&dyn HostFixture):
    an_unknown_sandbox_is_not_found,
    freeze_and_thaw_repeat,
    kill_ends_frozen_tasks_too,
    a_killed_sandbox_can_be_relaunched,
}

/// A host refuses what it does not know.
pub async fn an_unknown_sandbox_is_not_found(f: &dyn HostFixture) {
    let id = SandboxId::new(name("unknown")).unwrap();
    assert_eq!(f.host().describe(&id).await.unwrap_err().kind(), ErrorKind::NotFound);
}

/// Freeze and thaw take effect before they return, and may be repeated.
pub async fn freeze_and_thaw_repeat(f: &dyn HostFixture) {
    let (host, id) = (f.host(), f.sandbox().await);
    assert!(host.describe(&id).await.expect("describe").init.is_some());
    for _ in 0..2 {
        host.freeze(&id).await.expect("freeze");
        host.freeze(&id).await.expect("freeze again");
        assert_eq!(host.condition(&id).await.unwrap(), Condition::Frozen);
        host.thaw(&id).await.expect("thaw");
        host.thaw(&id).await.expect("thaw again");
        assert_eq!(host.condition(&id).await.unwrap(), Condition::Running);
    }
}

/// Kill leaves no task, whatever the condition was, and may be repeated.
pub async fn kill_ends_frozen_tasks_too(f: &dyn HostFixture) {
    let (host, id) = (f.host(), f.sandbox().await);
    host.freeze(&id).await.expect("freeze");
    host.kill(&id).await.expect("kill");
    assert_eq!(host.condition(&id).await.unwrap(), Condition::Stopped);
    host.kill(&id).await.expect("kill again");
    assert_eq!(host.describe(&id).await.expect("a stopped sandbox is still known").init, None);
}

/// Relaunch starts anew on the root.
pub async fn a_killed_sandbox_can_be_relaunched(f: &dyn HostFixture) {
    let (host, id) = (f.host(), f.sandbox().await);
    for _ in 0..2 {
        host.kill(&id).await.expect("kill");
        host.relaunch(&id).await.expect("relaunch");
        assert_eq!(host.condition(&id).await.unwrap(), Condition::Running);
        assert!(host.describe(&id).await.expect("describe").init.is_some());
    }
}
