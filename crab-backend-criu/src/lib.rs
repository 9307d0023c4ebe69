//! Process checkpoints for Crab by [CRIU](https://criu.org).
//!
//! [`CriuBackend`] implements [`crab_core::CheckpointBackend`] for [`crab_core::Domain::Process`]: it saves a sandbox's
//! live processes with their memory, descriptors, sockets and tmpfs, while they run on, and brings them back into a
//! stopped sandbox, or into another one.
//!
//! # What a sandbox must be like
//! - All its processes are in one cgroup v2 (child cgroups count; a restore puts all into the cgroup itself) and below
//!   one init, which is number 1 of a pid namespace, called `setsid`, and has a mount namespace of its own.
//! - What is the host's is [declared](crab_core::External): the network namespace, pipes, Unix sockets that were made
//!   in that namespace, terminals, and mounts of files, directories and device nodes. Nothing else of the host's is
//!   open.
//! - Its root filesystem at restore is that of the [cut](crab_core::AtCut): CRIU checks the sizes of open files and the
//!   build ids of mapped ones.
//!
//! # Containers of an OCI runtime
//! With [`CriuBuilder::oci_runtime`] the sandboxes are containers of `runc`, and it is `runc` that runs CRIU.
//!
//! # What it stores
//! An artifact is a list of images and the packs of pages that they are made of. Zero pages cost nothing, a page that an
//! earlier artifact of the sandbox has is a reference, the rest is compressed, and every block has a checksum that is
//! looked at before CRIU sees any of it. An artifact's directory holds all that it needs, by hard links: artifacts may
//! be removed in any order.
//!
//! A restore has CRIU read the memory straight from the packs, through a FUSE file system that nobody else sees, so
//! nothing is written first and no second copy is kept. Where this process may not mount one (`/dev/fuse` is needed),
//! with an OCI runtime, and with more than 32 processes, the images are put together in memory before CRIU begins, and
//! it gives each page back as it goes into a task. That takes longer, and the memory must be free.
//!
//! # Shorter freezes
//! With [`CriuBuilder::incremental`], and on a kernel that marks written pages, a capture copies the memory while the
//! sandbox runs and freezes it for what was written meanwhile. The marks are not trusted alone: Linux loses those of
//! memory that `mremap` moves by whole page tables, so every unmarked page must also be the same page of the machine
//! that was copied. Nothing of an earlier capture is needed, and what is stored is whole. Who freezes a sandbox himself
//! has the copies made before that by [`prepare`](crab_core::CheckpointBackend::prepare), as `crab-engine` does. It is
//! off by default.
//!
//! # What it refuses
//! Before anything is stopped, and by name: processes outside the tree or in a user namespace of their own, descriptors
//! that CRIU cannot save (io_uring, userfaultfd, perf events, seccomp listeners, Landlock rulesets, sockets of unusual
//! kinds), and whatever is the host's and not declared: ends of pipes and sockets, terminals, files, mounts. What CRIU
//! itself refuses comes back as [`CriuFailure`] in the error's source chain, with the place of its log.
//!
//! # Limits
//! - **A Landlock domain is not restored.** A process in one is refused by name; the kernel does not show it, so each
//!   process with `no_new_privs` is asked, on x86-64. One that restricted itself without `no_new_privs` (which needs
//!   `CAP_SYS_ADMIN`), or that another security module confines, is not found.
//! - POSIX locks on a file that their holder also maps are lost at a restore. A sandbox that holds an exclusive one, such
//!   as a transaction of SQLite in WAL mode, is refused until it is over; shared ones are lost silently.
//! - Processes of other users than root need `CAP_SYS_RESOURCE`, which root in a container often lacks.
//! - CRIU puts code of its own into the tasks. Whoever kills CRIU in the middle of a dump may end some of them: so a
//!   deadline does not kill it but makes it fail, and its end by other hands comes back as an error that says so.
//! - A blocked `poll` may return early with `EINTR` after a capture: `tail -f` ends of it, and
//!   `tail ---disable-inotify -f` does not.
//! - The monotonic clock inside, and timers, stand still between a dump and its restore; the wall clock is the host's.
//! - A random generator in a process's memory goes on where it was, in every fork the same. What a process draws from
//!   the kernel (`getrandom`, `/dev/urandom`) is different in each: an agent's tools should seed from there on each use.
//! - The network configuration of a declared network namespace is the host's.
//! - Images hold all of the processes' memory, secrets too: they are readable by their owner only.

mod ahead;
mod area;
mod backend;
mod cgroup;
mod copies;
mod cut;
mod deposit;
mod descriptors;
mod dump;
mod externals;
mod failure;
mod files;
mod fuse;
mod landlock;
mod locks;
mod marks;
mod mounts;
mod oci;
mod orphans;
mod pack;
mod pagemap;
mod parallel;
mod precopy;
mod preflight;
mod procfs;
mod program;
mod proto;
mod rebuild;
mod recipe;
mod restore;
mod serve;
mod sockets;
mod stats;
mod store;
mod swrk;
mod sys;
mod turns;

pub use backend::{Connections, CriuBackend, CriuBuilder, FileLocks};
pub use failure::{Cause, CriuFailure};
pub use oci::OciRuntime;

/// [`crab_core::CheckpointBackend::name`].
const NAME: &str = "criu";
