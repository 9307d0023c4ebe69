//! A small, real sandbox for Crab's examples and tests. **It is not a product**: it isolates well enough to show and
//! test savepoints, and it is no security boundary. An orchestrator brings its own sandbox and implements
//! [`crab_core::SandboxHost`] for it; [`ExampleHost`] shows how.
//!
//! A sandbox is a cgroup v2, mount, pid, ipc, uts and network namespaces, and a root filesystem that is a btrfs
//! subvolume. Everything in it is made so that CRIU can save it without being told about exceptions: pid 1 is a tiny
//! static program inside the root, its devices are nodes of the root itself, `/proc`, `/dev/pts` and `/dev/shm` are its
//! own, no descriptor of the host stays open but the output pipes of commands, and the network namespace is made
//! outside and mounted under a name.
//!
//! ```no_run
//! use crab_examples::sandbox::{Config, ScratchRoot, Sandbox};
//! # fn main() -> crab_core::Result<()> {
//! let root = ScratchRoot::new("hello")?;
//! let sandbox = Sandbox::launch(Config::new("hello".parse()?, root.path()))?;
//! let output = sandbox.exec("uname -n; ps ax")?;
//! println!("{}", output.text());
//! # Ok(())
//! # }
//! ```
//!
//! What a sandbox is on the host:
//!
//! | what | where |
//! |---|---|
//! | its tasks | `<cgroup v2 mount>/crab/<id>` |
//! | its network | `/run/crab/netns/<id>`, with only a loopback device |
//! | its state, for other processes of the host | `/run/crab/<id>.json` |
//! | pipes of its commands whose other end the host holds | `/run/crab/<id>.pipes/<inode>` |

mod cgroup;
mod exec;
mod host;
mod launch;
mod leftovers;
mod network;
mod pipes;
mod roots;
mod state;
mod sys;
mod zfs;

pub use exec::{ExecOptions, Output};
pub use host::ExampleHost;
pub use launch::{Config, Sandbox, sweep};
pub use leftovers::{left_for_good, leftovers};
pub use roots::{ScratchArea, ScratchRoot, criu_binary, delete_root, home, open_files, snapshot_root};
