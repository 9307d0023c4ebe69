//! One dump: the sandbox stopped, saved by CRIU, the cut, the sandbox as it was.

use std::collections::BTreeMap;
use std::os::fd::AsRawFd;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crab_core::{Artifact, ArtifactId, Condition, Error, ErrorKind, External, Result, Sandbox, SandboxId};

use crate::area::Scratch;
use crate::backend::{Connections, FileLocks, Inner};
use crate::cgroup::{Cgroup, FreezerGuard};
use crate::copies::Copies;
use crate::cut::Cut;
use crate::failure::CriuFailure;
use crate::oci::{Oci, Run};
use crate::precopy::Precopy;
use crate::preflight::{self, Tree};
use crate::procfs::Stat;
use crate::program::{self, common_options};
use crate::proto::{Kind, Options, Response};
use crate::store::Reservation;
use crate::swrk::{Broken, Swrk};
use crate::sys::Surroundings;
use crate::turns::Caller;
use crate::{externals, files, locks, procfs, stats};

/// The facts that are stored with an artifact.
pub(crate) const FACT_KERNEL: &str = "kernel";
pub(crate) const FACT_ARCHITECTURE: &str = "architecture";
pub(crate) const FACT_CRIU: &str = "criu";
pub(crate) const FACT_TASKS: &str = "tasks";
const FACT_INIT: &str = "init";

const LOG: &str = "dump.log";
const LOOK: &str = "see that all processes are there, or restore the last version";
/// How many processes the facts name at most.
const NAMED: usize = 4096;

/// How CRIU says that it cannot use copies of memory that were made before.
const ABOUT_COPIES: [&str; 3] = ["in parent pagemap", "no parent inventory", "racking memory"];

/// CRIU's own limit for stopping the tasks, where the caller has none.
const SEIZE_SECONDS: u32 = 10;

/// What is to be dumped.
pub(crate) struct Job {
    pub(crate) inner: Arc<Inner>,
    pub(crate) sandbox: Sandbox,
    pub(crate) artifact: ArtifactId,
    pub(crate) like: Option<(SandboxId, ArtifactId)>,
    pub(crate) frozen: bool,
    pub(crate) deadline: Option<Instant>,
    pub(crate) caller: Caller,
}

/// A dump that is not durable yet.
#[derive(Debug)]
pub(crate) struct Dumped {
    pub(crate) name: Reservation,
    pub(crate) scratch: Scratch,
    /// The dump is to be united with these.
    pub(crate) precopy: Option<Precopy>,
    pub(crate) like: Option<(SandboxId, ArtifactId)>,
    pub(crate) external: Vec<External>,
    pub(crate) facts: BTreeMap<String, String>,
    pub(crate) stopped: Option<Duration>,
}

/// Dumps. Whatever happens, the sandbox is afterwards as the caller had it.
pub(crate) fn run(job: Job, cut: Cut) -> Result<Dumped> {
    let condition = if job.frozen { Condition::Frozen } else { Condition::Running };
    attempt(job, cut).map_err(|error| match error.sandbox_condition() {
        // Nothing lives in what has no init, and what says its condition knows better.
        None if error.kind() != ErrorKind::InvalidInput => error.condition(condition),
        _ => error,
    })
}

fn attempt(job: Job, cut: Cut) -> Result<Dumped> {
    let Job { inner, sandbox, artifact, like, frozen, deadline, caller } = job;
    let _turn = inner.turns.take(&sandbox.cgroup, deadline)?;
    let name = inner.store.reserve(&sandbox.id, &artifact)?;
    let copies = inner.prepared.take(&(sandbox.id.clone(), artifact.clone()));
    let tree = preflight::check(&sandbox)?;
    let external = externals::left_out(&sandbox, tree.init)?;
    if inner.oci.is_some() {
        Oci::suits(&sandbox.external)?;
    }
    let copies = match copies {
        None if inner.copies() && !frozen => Some(copies_of(&inner, &sandbox, &tree, deadline, &caller)?),
        copies => copies,
    };
    let (scratch, precopy, noted) = match copies {
        Some(Copies { scratch, precopy, stopped }) => (scratch, Some(precopy), stopped),
        None => (inner.area_for(tree.bytes).directory()?, None, Duration::ZERO),
    };
    let io = |e| Error::io("open the capture directory", e);
    let images = files::open_directory(&scratch.images()).map_err(io)?;
    let work = files::open_directory(&scratch.work()).map_err(io)?;
    let cgroup = Cgroup::at(&sandbox.cgroup);
    let mut options = Options {
        pid: i32::try_from(tree.init).ok(),
        leave_running: Some(true),
        notify_scripts: Some(true),
        ghost_limit: Some(inner.ghost_limit),
        file_locks: Some(inner.locks != FileLocks::Refuse),
        tcp_established: Some(inner.connections == Connections::Keep),
        // Connections that nobody has accepted yet: their clients are reset at restore and try again.
        tcp_skip_in_flight: Some(true),
        tcp_close: Some(inner.connections == Connections::Close),
        external,
        freeze_cgroup: Some(utf8(&sandbox.cgroup, "the cgroup's path")?),
        timeout: Some(seconds_left(deadline)),
        ..common_options(images.as_raw_fd(), work.as_raw_fd(), LOG)
    };
    let run = match &inner.oci {
        Some(oci) => Run::Runtime(oci.dump(&sandbox, &scratch, &options, deadline)?),
        None => {
            let binds = scratch.area().run_directory()?.into_iter().collect();
            let surroundings = Surroundings { keep: vec![scratch.tie()?], binds, ..Surroundings::default() };
            let swrk = Swrk::start(&inner.program.path, surroundings, deadline)?;
            swrk.shield_from_oom();
            Run::Own(swrk)
        }
    };
    if precopy.is_some() {
        options.track_mem = Some(true);
        options.parent_img = Some("../before".to_owned());
    }
    let mut talk = Talk {
        run,
        precopy,
        init: tree.init,
        locks: inner.locks,
        images: scratch.images(),
        deadline,
        // What CRIU does to the freezer is undone also where the caller froze.
        freezer: frozen.then(|| FreezerGuard::new(&cgroup, Some(caller))),
        cgroup,
        cut: Some(cut),
        stopped_at: None,
        refusal: None,
        held: false,
        tasks: 0,
        processes: BTreeMap::new(),
    };
    let answer = talk.converse(options);
    let Talk { run, precopy, freezer, stopped_at, refusal, held, tasks, processes, cgroup, .. } = talk;
    // CRIU lets go of the tasks before it answers; one that did not answer is killed first, for the same.
    let run = answer.is_ok().then_some(run);
    let settled = freezer.map_or(Ok(()), FreezerGuard::settle);
    let stopped = stopped_at.map(|since| since.elapsed());
    let ended_well = run.is_some_and(|run| run.finish().is_ok_and(|status| status.success()));
    if let Err(error) = settled {
        return Err(match refusal {
            Some(refusal) => error.caused_by(refusal),
            None => error,
        });
    }
    let what = format!("dump the processes of the sandbox {}", sandbox.id);
    let answer = match (answer, refusal) {
        (Err(broken), _) if held => return Err(injured(broken.into_error(&what), &cgroup)),
        (_, Some(refusal)) => return Err(refusal),
        (answer, None) => answer.map_err(|broken| broken.into_error(&what))?,
    };
    if !answer.success || !ended_well {
        let log = scratch.work().join(LOG);
        let text = std::fs::read(&log).unwrap_or_default();
        let text = String::from_utf8_lossy(&text);
        // Whatever else CRIU fails of has nothing to do with the copies.
        if precopy.is_some() && ABOUT_COPIES.iter().any(|words| text.contains(words)) {
            tracing::warn!("a dump with copies of memory failed: dumps are full ones from now on");
            inner.incremental.store(false, Ordering::Relaxed);
        }
        let kept = inner.store.keep_log(&format!("{}-{artifact}-dump.log", sandbox.id), &log);
        let failure = CriuFailure::from_log(&text).kept_at(kept);
        return Err(failure.into_error(&format!("cannot {what}"), ErrorKind::Io));
    }
    let stopped = stopped.or_else(|| stats::stopped(&std::fs::read(scratch.work().join("stats-dump")).ok()?));
    let stopped = stopped.map(|stopped| stopped + noted);
    let mut facts = facts(&inner, tasks, tree.init);
    facts.extend(processes.into_iter().map(|(pid, name)| (Artifact::process_fact(pid), name)));
    Ok(Dumped { name, scratch, precopy, like, external: sandbox.external, facts, stopped })
}

/// Copies the memory of a running sandbox for a capture to come.
pub(crate) fn copy(inner: &Inner, sandbox: &Sandbox, deadline: Option<Instant>, caller: &Caller) -> Result<Copies> {
    let _turn = inner.turns.take(&sandbox.cgroup, deadline)?;
    let tree = preflight::check(sandbox)?;
    copies_of(inner, sandbox, &tree, deadline, caller)
}

fn copies_of(
    inner: &Inner,
    sandbox: &Sandbox,
    tree: &Tree,
    deadline: Option<Instant>,
    caller: &Caller,
) -> Result<Copies> {
    let scratch = inner.area_for(tree.bytes.saturating_mul(2)).directory()?;
    let cgroup = Cgroup::at(&sandbox.cgroup);
    let since = Instant::now();
    let freezer = FreezerGuard::new(&cgroup, None);
    let noted = cgroup.freeze(deadline).and_then(|()| Precopy::note(cgroup.processes()?, &scratch.before()));
    freezer.settle()?;
    let stopped = since.elapsed();
    let wanted = || match deadline {
        Some(deadline) if deadline <= Instant::now() => Err(Broken::TimedOut.into_error("copy the processes' memory")),
        _ if caller.has_gone() => Err(Error::new(ErrorKind::Cancelled, "nobody waits for the capture any more")),
        _ => Ok(()),
    };
    let mut precopy = noted?;
    precopy.copy(&wanted)?;
    Ok(Copies { precopy, scratch, stopped })
}

fn facts(inner: &Inner, tasks: usize, init: u32) -> BTreeMap<String, String> {
    let mut facts = BTreeMap::from([
        (FACT_KERNEL.to_owned(), program::kernel_release()),
        (FACT_ARCHITECTURE.to_owned(), std::env::consts::ARCH.to_owned()),
        (FACT_CRIU.to_owned(), inner.program.version.to_string()),
        (FACT_TASKS.to_owned(), tasks.to_string()),
    ]);
    if let Some(inside) = procfs::pid_inside(init) {
        facts.insert(FACT_INIT.to_owned(), inside.to_string());
    }
    facts
}

/// CRIU ended while it had its own code in the tasks. That code mostly finds its way out alone, but not always.
fn injured(error: Error, cgroup: &Cgroup) -> Error {
    let error = error.while_doing("processes may have been hurt").fix(LOOK);
    // Init may be among those that die of it, as soon as they run.
    for _ in 0..20 {
        match cgroup.is_populated() {
            Ok(true) => std::thread::sleep(Duration::from_millis(5)),
            Ok(false) => return error.condition(Condition::Stopped),
            Err(_) => return error.condition(Condition::Unknown),
        }
    }
    error
}

/// A path as CRIU's messages carry it.
pub(crate) fn utf8(path: &std::path::Path, what: &str) -> Result<String> {
    path.to_str().map(str::to_owned).ok_or_else(|| {
        Error::new(ErrorKind::InvalidInput, format!("{what} {} is not UTF-8", path.display())).fix("rename it")
    })
}

fn seconds_left(deadline: Option<Instant>) -> u32 {
    let left = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()).as_secs());
    left.and_then(|left| u32::try_from(left).ok())
        .map_or(SEIZE_SECONDS, |left| left.saturating_add(1).min(SEIZE_SECONDS))
}

/// The conversation of one dump.
struct Talk {
    run: Run,
    precopy: Option<Precopy>,
    init: u32,
    locks: FileLocks,
    images: PathBuf,
    cgroup: Cgroup,
    deadline: Option<Instant>,
    freezer: Option<FreezerGuard>,
    cut: Option<Cut>,
    stopped_at: Option<Instant>,
    /// Why we broke the dump off.
    refusal: Option<Error>,
    /// CRIU has begun to take hold of the tasks.
    held: bool,
    tasks: usize,
    /// Their names by their numbers inside the sandbox.
    processes: BTreeMap<u32, String>,
}

impl Talk {
    fn converse(&mut self, options: Options) -> Result<Response, Broken> {
        self.run.ask(Kind::Dump, options)?;
        loop {
            let message = match self.run.hear() {
                Err(Broken::TimedOut) if self.refusal.is_none() => {
                    self.give_up();
                    continue;
                }
                other => other?,
            };
            if message.kind() != Kind::Notify {
                return Ok(message);
            }
            let script = message.notify.and_then(|notify| notify.script).unwrap_or_default();
            let done = match script.as_str() {
                "pre-dump" | "post-dump" if self.refusal.is_some() => Ok(false),
                "pre-dump" => self.stop().map(|()| true),
                "post-dump" => self.at_cut().map(|()| true),
                _ => Ok(true),
            };
            // CRIU lets the tasks go on by itself when told of a failure.
            self.run.answer(done.as_ref().is_ok_and(|success| *success))?;
            if let Err(refusal) = done {
                self.refusal = Some(refusal);
            }
        }
    }

    /// The deadline has passed. To kill CRIU now would be to leave its code in the tasks, of which they die now and
    /// then. Without a directory to write to it fails by itself at the next image, and puts the tasks back first.
    fn give_up(&mut self) {
        self.refusal = Some(Broken::TimedOut.into_error("dump the processes"));
        if let Err(error) = files::remove_all(&self.images) {
            tracing::warn!(%error, "CRIU may not notice that its time is up");
        }
        self.run.give_grace();
    }

    /// CRIU is ready to stop the tasks. The freezer stops all of them at once and in a few milliseconds; left to
    /// itself CRIU would look for the result ten times a second only.
    fn stop(&mut self) -> Result<()> {
        if self.freezer.is_none() {
            self.stopped_at = Some(Instant::now());
            self.freezer = Some(FreezerGuard::new(&self.cgroup, None));
            self.cgroup.freeze(self.deadline)?;
        }
        // What came in since the first look. CRIU would wait for it for ever.
        let processes = preflight::membership(&self.cgroup, self.init)?;
        if self.locks == FileLocks::Keep {
            locks::check(&processes)?;
        }
        if let Some(precopy) = &self.precopy {
            precopy.check()?;
        }
        self.held = true;
        Ok(())
    }

    /// All is saved, and the tasks are still stopped.
    fn at_cut(&mut self) -> Result<()> {
        let processes = self.cgroup.processes()?;
        self.tasks = processes.len();
        let named = |pid: &u32| Some((procfs::pid_inside(*pid)?, Stat::read(*pid)?.name));
        self.processes = processes.iter().take(NAMED).filter_map(named).collect();
        if self.cut.take().is_some_and(|cut| cut.run(self.deadline)) {
            return Ok(());
        }
        // The caller knows why its own code failed.
        Err(Error::new(ErrorKind::Cancelled, "the capture was broken off at the cut"))
    }
}
