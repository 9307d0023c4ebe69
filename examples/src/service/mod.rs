//! Crab as a process of its own: one engine, one coordinator, one inspector and both backends around many sandboxes, told
//! what to do by JSON lines on its standard input and telling what happens by JSON lines on its standard output.
//!
//! An orchestrator that embeds Crab writes what [`serve`] does, with its own way of giving orders. It is a process of
//! its own here so that it can be killed on purpose: [`Service`] is its other side, which starts it, and starts it
//! again on the same store, journal and port.

mod client;
mod parcel;
mod server;
mod spans;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crab_core::{Digest, OperationId, SandboxId};
use serde::{Deserialize, Serialize};

pub use client::Service;
pub use server::{serve, serve_as_program};

/// What a service is to look after.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ServiceConfig {
    /// The sandboxes. They must have been launched.
    pub sandboxes: Vec<SandboxId>,
    /// Where the store, the process images and the journal lie.
    pub directory: PathBuf,
    /// Where the versions of the files lie: on the btrfs of the sandboxes' roots.
    pub versions: PathBuf,
    /// The model.
    pub upstream: String,
    /// Where to listen for the agents, which post to `/sandbox/ID/...`. Port 0 takes a free one.
    pub listen: SocketAddr,
    /// Whether processes are saved too. Without, a restore brings the files back and starts the sandbox afresh.
    pub processes: bool,
    /// Which turns are saved.
    pub saving: Saving,
    /// Where to write what the engine does and how long each step takes: JSON lines of [`Span`].
    pub spans: Option<PathBuf>,
}

/// Which turns are saved.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Saving {
    /// What has changed, as Crab does it.
    #[default]
    Changed,
    /// The same, but processes that ran at all count as changed.
    Strict,
    /// The same as the first, but files that were touched count as changed, whatever is in them now.
    Touched,
    /// The same as the first, but a checkpoint that an answer waits for is not preferred to older ones.
    InOrder,
    /// Files and processes at every turn, whatever has changed: what Crab is compared with.
    Everything,
}

/// An order to the service.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "order")]
pub enum Order {
    /// Look after one more sandbox.
    Attach {
        /// Which. It must have been launched.
        sandbox: SandboxId,
    },
    /// Bring a sandbox back to a version.
    Restore {
        /// Which sandbox.
        sandbox: SandboxId,
        /// Names the restore: the same name again finishes one that was cut off.
        operation: OperationId,
        /// To the version that covers this turn; to the newest where none is named.
        turn: Option<u64>,
    },
    /// Make another sandbox of a version of this one, which runs on.
    Fork {
        /// Which sandbox.
        from: SandboxId,
        /// The version that covers this turn; the newest where none is named.
        turn: Option<u64>,
        /// The new one: prepared, and nothing lives in it.
        into: SandboxId,
    },
    /// Write a sandbox's newest version to a directory, from which another service can take it over.
    Export {
        /// Which sandbox.
        sandbox: SandboxId,
        /// The directory. It is made.
        parcel: PathBuf,
    },
    /// Take a sandbox over that another service has exported. It waits for the order to restore it.
    Import {
        /// Which sandbox: known by its name, and nothing lives in it.
        sandbox: SandboxId,
        /// What was written.
        parcel: PathBuf,
    },
    /// Look after a sandbox no longer. Its versions stay.
    Release {
        /// Which.
        sandbox: SandboxId,
    },
}

/// What an order came to.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// It is done, and there is nothing more to say.
    Done,
    /// A sandbox is back, or was forked.
    Restored(Restored),
}

/// What a turn came to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TurnReport {
    /// The turn.
    pub turn: u64,
    /// The version that covers it.
    pub version: u64,
    /// What was captured for it: `skip`, `fs`, `process` or `full`.
    pub captured: String,
    /// What had changed, in words.
    pub delta: String,
    /// Checkpoint time behind the model's answer.
    pub hidden: Duration,
    /// Checkpoint time in which the agent waited.
    pub exposed: Duration,
    /// For how long the sandbox stood still.
    pub frozen: Duration,
    /// Bytes written, where known.
    pub bytes: Option<u64>,
    /// Bytes that a whole copy of what was captured takes, where known.
    pub size: Option<u64>,
}

/// What a restore came to.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Restored {
    /// The version that is back.
    pub version: u64,
    /// The newest turn that this version covers. The agent goes on from its boundary.
    pub turn: u64,
    /// The digest of the conversation at that boundary.
    pub conversation: Option<Digest>,
    /// Whether the processes run on from where they were saved.
    pub processes: bool,
    /// How long it took.
    pub took: Duration,
}

/// What a service told of a sandbox's turns.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Told {
    /// Turns that are covered by a version.
    pub covered: Vec<TurnReport>,
    /// Turns that are not, and why.
    pub uncovered: Vec<(u64, String)>,
}

/// A step of the engine's work: a line of the file that [`ServiceConfig::spans`] names.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Span {
    /// What was done, such as `frozen` or `persist`.
    pub name: String,
    /// For which sandbox.
    pub sandbox: String,
    /// When it began, in microseconds since 1970.
    pub start_us: u64,
    /// How long it took, in microseconds.
    pub took_us: u64,
}

/// A line of the service's input.
#[derive(Debug, Serialize, Deserialize)]
struct Numbered {
    number: u64,
    #[serde(flatten)]
    order: Order,
}

/// A line of the service's output.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "message")]
enum Message {
    /// It works.
    Ready {
        /// Where the agents post to.
        address: SocketAddr,
        /// Whether the inspector sees kernel events. Without, it is coarser.
        bpf: bool,
    },
    /// A turn is covered.
    Turn { sandbox: SandboxId, report: TurnReport },
    /// A turn is not covered.
    Uncovered { sandbox: SandboxId, turn: u64, error: String },
    /// An order was carried out, and all that happened before was told before.
    Answered { number: u64, answer: Answer },
    /// An order could not be carried out.
    Failed { number: u64, error: String },
}
