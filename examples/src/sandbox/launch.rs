//! The sandbox itself: launched, found again, stopped, started again, removed.

use std::fs::File;
use std::net::{TcpListener, TcpStream};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use crab_core::{Condition, Error, ErrorKind, External, InheritedFd, Result, SandboxId};
use parking_lot::Mutex;
use rustix::process::{Pid, PidfdFlags, WaitId, WaitIdOptions};

use super::cgroup::Cgroup;
use super::exec::{self, ExecOptions, Output};
use super::network;
use super::pipes::{Pipe, Pipes};
use super::roots;
use super::state::{self, ProcessIdentity, State};
use super::sys;

/// What a sandbox is to be.
#[derive(Clone, Debug)]
pub struct Config {
    id: SandboxId,
    root: PathBuf,
    tmpfs_tmp: bool,
    detached: bool,
}

impl Config {
    /// A sandbox of this name on this root filesystem: a writable snapshot of the base, see
    /// [`snapshot_root`](super::snapshot_root).
    #[must_use]
    pub fn new(id: SandboxId, root: impl Into<PathBuf>) -> Self {
        Self { id, root: root.into(), tmpfs_tmp: false, detached: false }
    }

    /// The same with `/tmp` in memory. What lies there then belongs to the processes' state, not to the files'.
    #[must_use]
    pub fn with_tmpfs_tmp(mut self) -> Self {
        self.tmpfs_tmp = true;
        self
    }

    /// The same, but it lives on when this process ends, until somebody [attaches](Sandbox::attach) and destroys it.
    #[must_use]
    pub fn detached(mut self) -> Self {
        self.detached = true;
        self
    }
}

/// A sandbox of this host. Dropping the value that launched it destroys it, but for its root filesystem, unless it was
/// launched [detached](Config::detached).
#[derive(Debug)]
pub struct Sandbox {
    state: Mutex<State>,
    cgroup: Cgroup,
    pipes: Pipes,
    /// Held while frozen, so that nobody enters.
    closed: Mutex<Option<File>>,
    destroy_on_drop: bool,
}

impl Sandbox {
    /// Makes and starts a sandbox.
    ///
    /// # Errors
    /// [`ErrorKind::AlreadyExists`] where one of this name lives; nothing is left behind.
    pub fn launch(config: Config) -> Result<Self> {
        let detached = config.detached;
        let mut sandbox = Self::prepare(config)?;
        // A failed start clears all away when the value drops.
        sandbox.destroy_on_drop = true;
        sandbox.start()?;
        sandbox.destroy_on_drop = !detached;
        Ok(sandbox)
    }

    /// Makes a sandbox in which nothing lives yet: what a version of another one is restored into. Its root need not
    /// exist.
    ///
    /// # Errors
    /// As [`launch`](Self::launch).
    pub fn prepare(config: Config) -> Result<Self> {
        if let Ok(old) = State::load(&config.id) {
            if old.live_init().is_some() {
                return Err(Error::new(ErrorKind::AlreadyExists, format!("a sandbox {} lives already", old.id))
                    .fix("destroy it first, or take another id"));
            }
            clear_away(&old)?;
        }
        let netns = network::ensure(&config.id)?;
        let cgroup = match Cgroup::create(&config.id) {
            Ok(cgroup) => cgroup,
            Err(error) => {
                let _ = network::remove(&netns);
                return Err(error);
            }
        };
        let owner = if config.detached { None } else { ProcessIdentity::of(std::process::id()) };
        let state = State {
            root: config.root,
            cgroup: cgroup.path().to_owned(),
            netns,
            tmpfs_tmp: config.tmpfs_tmp,
            init: None,
            owner,
            id: config.id,
        };
        let mut sandbox = Self::from_state(state)?;
        sandbox.destroy_on_drop = !config.detached;
        let saved = sandbox.state.lock().save();
        if let Err(error) = saved {
            sandbox.destroy_on_drop = true;
            return Err(error);
        }
        Ok(sandbox)
    }

    /// Finds a sandbox that this or another process launched. It may be stopped.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] where there is none of this name.
    pub fn attach(id: &SandboxId) -> Result<Self> {
        Self::from_state(State::load(id)?)
    }

    fn from_state(state: State) -> Result<Self> {
        Ok(Self {
            cgroup: Cgroup::at(&state.cgroup),
            pipes: Pipes::at(state::pipes_directory(&state.id)?),
            closed: Mutex::new(None),
            destroy_on_drop: false,
            state: Mutex::new(state),
        })
    }

    /// Its name.
    #[must_use]
    pub fn id(&self) -> SandboxId {
        self.state.lock().id.clone()
    }

    /// Its root filesystem.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.state.lock().root.clone()
    }

    /// Its cgroup's directory.
    #[must_use]
    pub fn cgroup(&self) -> &Path {
        self.cgroup.path()
    }

    /// Where its network namespace is mounted.
    #[must_use]
    pub fn netns(&self) -> PathBuf {
        self.state.lock().netns.clone()
    }

    /// The host's pid of its pid 1, while it lives.
    #[must_use]
    pub fn init(&self) -> Option<u32> {
        self.state.lock().live_init()
    }

    /// Runs a command line with bash and waits for its end; its children may live on.
    ///
    /// # Errors
    /// Where it cannot be started. A command that fails is no error: see [`Output::code`].
    pub fn exec(&self, line: &str) -> Result<Output> {
        self.exec_with(line, &ExecOptions::default())
    }

    /// The same with options.
    ///
    /// # Errors
    /// As [`exec`](Self::exec).
    pub fn exec_with(&self, line: &str, options: &ExecOptions) -> Result<Output> {
        self.begin(line, options)?.finish(options)
    }

    /// Starts the command, with nobody freezing the sandbox until it is inside.
    fn begin(&self, line: &str, options: &ExecOptions) -> Result<exec::Running> {
        let entrance = state::entrance(&self.id())?;
        entrance.lock_shared().map_err(|e| Error::io("lock the sandbox's entrance", e))?;
        // Another process may have restored or relaunched it.
        let state = State::load(&self.id())?;
        let init = state.live_init();
        *self.state.lock() = state;
        let Some(init) = init else { return Err(self.not_running()) };
        if self.condition()? == Condition::Frozen {
            return Err(Error::new(ErrorKind::Busy, format!("the sandbox {} is frozen", self.id()))
                .fix("thaw it first")
                .condition(Condition::Frozen));
        }
        exec::start(line, options, pidfd(init)?, &self.cgroup, &self.pipes)
    }

    fn not_running(&self) -> Error {
        Error::new(ErrorKind::NotFound, format!("nothing runs in the sandbox {}", self.id()))
            .fix("restore or relaunch it first")
            .condition(Condition::Stopped)
    }

    /// Stops all its tasks where they are. Commands that are on their way in arrive first; later ones wait outside.
    ///
    /// # Errors
    /// Where a task did not stop; all run again.
    pub fn freeze(&self) -> Result<()> {
        let mut closed = self.closed.lock();
        if closed.is_none() {
            let entrance = state::entrance(&self.id())?;
            entrance.lock().map_err(|e| Error::io("lock the sandbox's entrance", e))?;
            *closed = Some(entrance);
        }
        self.cgroup.freeze().inspect_err(|_| *closed = None)
    }

    /// Lets its tasks run again.
    ///
    /// # Errors
    /// Where they may still be frozen.
    pub fn thaw(&self) -> Result<()> {
        self.cgroup.thaw()?;
        *self.closed.lock() = None;
        Ok(())
    }

    /// Ends all its tasks, frozen ones too; returns when none is left.
    ///
    /// # Errors
    /// Where tasks may be left.
    pub fn kill(&self) -> Result<()> {
        self.cgroup.kill()?;
        *self.closed.lock() = None;
        let mut state = self.state.lock();
        if let Ok(current) = State::load(&state.id) {
            *state = current;
        }
        if let Some(init) = state.init.take() {
            reap(init);
            state.save()?;
        }
        drop(state);
        self.pipes.clear();
        Ok(())
    }

    /// The condition of its tasks.
    ///
    /// # Errors
    /// Where the kernel does not say.
    pub fn condition(&self) -> Result<Condition> {
        self.cgroup.condition()
    }

    /// Ends what runs and starts it afresh on its root filesystem.
    ///
    /// # Errors
    /// It is stopped when this fails.
    pub fn relaunch(&self) -> Result<()> {
        self.kill()?;
        let id = self.id();
        network::ensure(&id)?;
        Cgroup::create(&id)?;
        self.start()
    }

    /// Takes over a process tree that was restored into its cgroup.
    ///
    /// # Errors
    /// [`ErrorKind::InvalidInput`] where `init` lives elsewhere or not at all.
    pub fn adopt(&self, init: u32) -> Result<()> {
        let refuse =
            |why| Error::new(ErrorKind::InvalidInput, format!("process {init} {why} the sandbox {}", self.id()));
        let identity = ProcessIdentity::of(init).ok_or_else(|| refuse("does not live, so it cannot become"))?;
        if !self.cgroup.processes().contains(&init) {
            return Err(refuse("is not in the cgroup of").fix(format!("restore into {}", self.cgroup.path().display())));
        }
        let mut state = self.state.lock();
        state.init = Some(identity);
        state.save()
    }

    /// What its processes hold of the host's, at this moment.
    #[must_use]
    pub fn external(&self) -> Vec<External> {
        let mut external = vec![External::NetworkNamespace { path: self.netns() }];
        let held = self.pipes.held_by(&self.cgroup.processes());
        external.extend(held.into_iter().map(|inode| External::Pipe { inode }));
        external
    }

    /// Gives again what restored processes had of the host's: the network namespace, pipes that are drained in the
    /// background, and the cgroup.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where something is asked for that this host never gave.
    pub fn inherit(&self, external: &[External]) -> Result<Vec<InheritedFd>> {
        Cgroup::create(&self.id())?;
        let given = external.iter().map(|external| {
            let fd = match external {
                External::NetworkNamespace { .. } => OwnedFd::from(network::open(&network::ensure(&self.id())?)?),
                External::Pipe { .. } => {
                    let Pipe { read, write, inode } = self.pipes.make()?;
                    self.pipes.drain(read, inode);
                    write
                }
                other => {
                    return Err(Error::new(
                        ErrorKind::Unsupported,
                        format!("this sandbox cannot give {} to restored processes", other.key()),
                    ));
                }
            };
            Ok(InheritedFd { external: external.clone(), fd })
        });
        given.collect()
    }

    /// A sandbox as crab-core describes it.
    #[must_use]
    pub fn describe(&self) -> crab_core::Sandbox {
        let mut sandbox = crab_core::Sandbox::new(self.id(), self.root(), self.cgroup());
        sandbox.init = self.init();
        sandbox.external = self.external();
        sandbox
    }

    /// A listener of the host on the sandbox's loopback device (port 0 takes a free one): how a sandbox without network
    /// reaches a service of its host, such as the coordinator.
    ///
    /// # Errors
    /// Where the port is taken.
    pub fn listen(&self, port: u16) -> Result<TcpListener> {
        network::listen(&self.netns(), port)
    }

    /// A connection of the host to a server in the sandbox.
    ///
    /// # Errors
    /// Where nobody listens.
    pub fn connect(&self, port: u16) -> Result<TcpStream> {
        network::connect(&self.netns(), port)
    }

    /// Ends it and removes what the host keeps of it. Its root filesystem stays.
    ///
    /// # Errors
    /// Where something may be left; [`sweep`] finds it.
    pub fn destroy(mut self) -> Result<()> {
        self.destroy_on_drop = false;
        self.clear()
    }

    /// The same with its root filesystem.
    ///
    /// # Errors
    /// As [`destroy`](Self::destroy).
    pub fn destroy_with_root(self) -> Result<()> {
        let root = self.root();
        self.destroy()?;
        roots::delete_root(&root)
    }

    fn clear(&self) -> Result<()> {
        self.kill()?;
        clear_away(&self.state.lock())
    }

    fn start(&self) -> Result<()> {
        let id = self.id();
        let mut state = self.state.lock();
        let program = state.root.join(exec::INIT.trim_start_matches('/'));
        if !program.is_file() {
            return Err(Error::new(ErrorKind::NotFound, format!("{} is not there", program.display()))
                .fix("make the root by `snapshot_root`, after `cargo xtask setup`")
                .condition(Condition::Stopped));
        }
        let cannot = |e| Error::io(format!("start the sandbox {id}"), e).condition(Condition::Stopped);
        let Pipe { read, write, inode } = self.pipes.make()?;
        let mut command = exec::inside(write);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let birth = sys::Birth {
            root: &state.root,
            cgroup_procs: self.cgroup.open_procs()?,
            network: network::open(&state.netns)?,
            hostname: id.as_str().get(..64).unwrap_or(id.as_str()),
            tmpfs_tmp: state.tmpfs_tmp,
        };
        let mut child = sys::spawn_init(command, birth).map_err(cannot)?;
        let ready = exec::await_ready(&read);
        self.pipes.forget(inode);
        let identity = ProcessIdentity::of(child.id());
        if ready.is_err() || identity.is_none() {
            self.cgroup.kill()?;
            child.wait().map_err(cannot)?;
            ready?;
            return Err(cannot(std::io::Error::other("its init ended at once")));
        }
        state.init = identity;
        state.save()
    }
}

impl Drop for Sandbox {
    fn drop(&mut self) {
        if self.destroy_on_drop
            && let Err(error) = self.clear()
        {
            eprintln!("left behind: {error}");
        }
    }
}

/// Removes what dead runs left on this host: sandboxes whose launcher has died, and those in which nothing lives and
/// that nobody owns. Root filesystems stay. Returns the names.
///
/// # Errors
/// Where something could not be removed; the others are removed all the same.
pub fn sweep() -> Result<Vec<SandboxId>> {
    let mut swept = Vec::new();
    let mut first_error = None;
    for state in state::all()? {
        let abandoned = match state.owner {
            Some(owner) => !owner.is_alive(),
            None => state.live_init().is_none(),
        };
        if !abandoned {
            continue;
        }
        match clear_away(&state) {
            Ok(()) => swept.push(state.id),
            Err(error) => first_error = first_error.or(Some(error)),
        }
    }
    first_error.map_or(Ok(swept), Err)
}

fn clear_away(state: &State) -> Result<()> {
    let cgroup = Cgroup::at(&state.cgroup);
    cgroup.kill()?;
    if let Some(init) = state.init {
        reap(init);
    }
    cgroup.remove()?;
    network::remove(&state.netns)?;
    Pipes::at(state::pipes_directory(&state.id)?).clear();
    state.remove()
}

fn pidfd(pid: u32) -> Result<OwnedFd> {
    let gone = || Error::new(ErrorKind::NotFound, "the sandbox's init has just ended").fix("restore or relaunch it");
    let pid = i32::try_from(pid).ok().and_then(Pid::from_raw).ok_or_else(gone)?;
    rustix::process::pidfd_open(pid, PidfdFlags::empty()).map_err(|e| gone().caused_by(std::io::Error::from(e)))
}

/// Takes the exit status of a killed init, if it is a child of this process. Any other parent does that itself.
fn reap(init: ProcessIdentity) {
    if !init.is_known() {
        return;
    }
    let Some(pid) = i32::try_from(init.pid).ok().and_then(Pid::from_raw) else { return };
    while let Err(rustix::io::Errno::INTR) = rustix::process::waitid(WaitId::Pid(pid), WaitIdOptions::EXITED) {}
}
