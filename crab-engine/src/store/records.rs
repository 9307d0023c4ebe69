//! What stands in `sandbox.json`, `marks.json` and `operations/OP.json`.

use std::collections::{BTreeMap, BTreeSet};

use crab_core::{ArtifactId, Label, OperationId, SandboxId, TurnNumber, VersionId};
use serde::{Deserialize, Serialize};

use crate::report::{PassedOver, RestoreReport};

/// What is known of a sandbox besides its versions.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct SandboxRecord {
    /// The highest version number that was given to a version that is gone.
    pub(crate) highest: VersionId,
    /// The last restore that put files in place.
    pub(crate) restored: Option<Restored>,
    pub(crate) forked_from: Option<ForkedFrom>,
    /// Somebody detached it: it is not attached when the store is opened.
    pub(crate) detached: bool,
}

impl Default for SandboxRecord {
    fn default() -> Self {
        Self { highest: VersionId(0), restored: None, forked_from: None, detached: false }
    }
}

impl SandboxRecord {
    pub(super) fn for_file(&self, id: &SandboxId) -> SandboxFile {
        SandboxFile {
            sandbox: id.clone(),
            highest: self.highest,
            restored: self.restored.clone(),
            forked_from: self.forked_from.clone(),
            detached: self.detached,
        }
    }
}

#[derive(Serialize, Deserialize)]
pub(super) struct SandboxFile {
    pub(super) sandbox: SandboxId,
    highest: VersionId,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    restored: Option<Restored>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    forked_from: Option<ForkedFrom>,
    #[serde(default, skip_serializing_if = "is_false")]
    detached: bool,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde asks for it")]
fn is_false(value: &bool) -> bool {
    !value
}

impl From<SandboxFile> for SandboxRecord {
    fn from(file: SandboxFile) -> Self {
        Self { highest: file.highest, restored: file.restored, forked_from: file.forked_from, detached: file.detached }
    }
}

/// What people and programs said of a version: it is kept while any of this is said.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Mark {
    #[serde(default)]
    pub(crate) pinned: bool,
    #[serde(default, skip_serializing_if = "BTreeSet::is_empty")]
    pub(crate) labels: BTreeSet<Label>,
}

pub(crate) type Marks = BTreeMap<VersionId, Mark>;

#[derive(Serialize, Deserialize)]
pub(super) struct MarksFile {
    pub(super) sandbox: SandboxId,
    pub(super) marks: Marks,
}

/// A restore put this version's files in place. It is the standing version until one is made with a number of at
/// least `floor`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Restored {
    pub(crate) version: VersionId,
    pub(crate) floor: VersionId,
    pub(crate) operation: OperationId,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ForkedFrom {
    pub(crate) sandbox: SandboxId,
    pub(crate) version: VersionId,
    /// The sandboxes whose artifacts it shares: those of a fork of a fork are of older ones. They are looked for there
    /// when nothing else names them any more.
    #[serde(default)]
    pub(crate) owners: BTreeSet<SandboxId>,
}

/// A restore or fork, from before its first effect.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Operation {
    pub(crate) id: OperationId,
    /// The sandbox that it changes or makes.
    pub(crate) sandbox: SandboxId,
    pub(crate) kind: OperationKind,
    /// The version whose state is put in place: chosen once, so that a second attempt does the same.
    pub(crate) version: VersionId,
    /// The name under which the replaced files are kept.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) keep: Option<ArtifactId>,
    /// The last turn that was seen before.
    pub(crate) last_turn: TurnNumber,
    /// There may have been later ones: what would tell cannot be read.
    #[serde(default, skip_serializing_if = "is_false")]
    pub(crate) more_turns: bool,
    /// The version that stood before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) standing: Option<VersionId>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) passed_over: Vec<PassedOver>,
    /// Orders operations of one sandbox: larger is later.
    pub(crate) sequence: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) outcome: Option<Outcome>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "kind")]
pub(crate) enum OperationKind {
    Restore,
    Fork { from: SandboxId },
}

/// How an operation ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Outcome {
    Done(RestoreReport),
    /// Another restore of the sandbox began before this one had ended.
    Superseded(OperationId),
}
