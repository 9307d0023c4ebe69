//! The inspector with BPF.

use std::collections::BTreeSet;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use crab_core::{
    Change, Delta, Effects, Error, Evidence, Rebase, Result, Sandbox, SandboxId, StateDelta, Token, Unknown,
};

use crate::bpf::layout::{Destination, left};
use crate::bpf::{FileSystem, Kernel, Place, Registered};
use crate::filesystem::{self, Base, Known, Look, Mark, Moment, Root};
use crate::history::{History, Interval, nobody_before};
use crate::holdings::{Holdings, maps_files};
use crate::ledger::Ledger;
use crate::mounts::{self, Mounts};
use crate::net::{Difference, Limits};
use crate::registry::Registry;
use crate::saved::{self, Saved};
use crate::tasks::Census;

/// When processes that the version holds count as unchanged although they ran.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ProcessRule {
    /// If they only waited: every system call was one of waiting that ended by time, by a freeze, or with nothing to
    /// take, or managed private memory; no signal came; no shared memory could be stored to; and all of them together
    /// used less CPU than the bound since the version. The first process of a pid namespace may also collect children
    /// that are not the version's. A restore would bring back processes that do the same again.
    Waiting {
        /// CPU time of all tasks of the version, since the version.
        cpu: Duration,
    },
    /// Never.
    Strict,
}

impl Default for ProcessRule {
    fn default() -> Self {
        Self::Waiting { cpu: Duration::from_millis(50) }
    }
}

/// Settings of an [`Inspector`].
#[derive(Clone, Debug)]
pub struct InspectorBuilder {
    rule: ProcessRule,
    limits: Limits,
    coordinators: Vec<SocketAddr>,
    pinned: Option<(PathBuf, PathBuf)>,
}

impl InspectorBuilder {
    /// When processes that ran count as unchanged.
    #[must_use]
    pub fn process_rule(mut self, rule: ProcessRule) -> Self {
        self.rule = rule;
        self
    }

    /// How many files, and how many bytes of them, are compared at a take. What is beyond counts as changed.
    #[must_use]
    pub fn limits(mut self, files: usize, bytes: u64) -> Self {
        self.limits = Limits { inodes: files, bytes };
        self
    }

    /// An address of the coordinator as sandboxes see it: what is sent there is no external effect.
    #[must_use]
    pub fn coordinator(mut self, address: SocketAddr) -> Self {
        self.coordinators.push(address);
        self
    }

    /// Lets the programs note on when this process ends. They and their maps are pinned in `pins`, a folder of a bpffs;
    /// what the versions hold is written to `state`, a folder of this inspector's own. An inspector that is loaded with
    /// the same folders then goes on where this one ended: attaching a sandbox that was watched, with the same cgroup
    /// and root, keeps its base, unless more than six takes were made since the last re-base, or it is detached first. The base of a
    /// domain that had no version is still unknown. One process at a time may use the folders.
    ///
    /// Pinned programs slow down the host until [`Inspector::unpin`].
    #[must_use]
    pub fn pinned(mut self, pins: impl Into<PathBuf>, state: impl Into<PathBuf>) -> Self {
        self.pinned = Some((pins.into(), state.into()));
        self
    }

    /// Loads the programs into the kernel. Unless they are [pinned](Self::pinned), they go when the inspector is dropped. One inspector serves all sandboxes of
    /// a host: loading takes a quarter of a second, and every system call of the host pays for each that is loaded.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`](crab_core::ErrorKind::Unsupported) where the kernel or the privileges do not allow
    /// it; [`Inspector::probe`] says what is missing.
    pub fn load(self) -> Result<Inspector> {
        let pins = self.pinned.as_ref().map(|(pins, _)| pins.as_path());
        let kernel = Arc::new(Kernel::load(pins)?);
        let state = match &self.pinned {
            Some((_, state)) => Some(
                saved::Folder::open(state).map_err(|error| Error::io(format!("make {}", state.display()), error))?,
            ),
            None => None,
        };
        Ok(Inspector { settings: Arc::new(self), kernel, state, sandboxes: Registry::new() })
    }
}

/// Sees what sandboxes change by BPF programs on the scheduler, on signals and on the end of system calls.
///
/// The programs note, per sandbox and per interval between two takes, when the oldest task that did something started,
/// when the oldest that ran did, how much CPU older tasks used, and what was done that outlives a task that is gone.
/// That is map state of fixed size: there is no queue that could overflow. Whether a task of a version did something is
/// a comparison of two times.
///
/// Some kernels do not report every switch of a CPU to another task. That shows by the count that the kernel itself
/// keeps, and then the scheduler's counters of each thread of the version say whether it ran, and for how long.
///
/// **Processes** are unchanged if
/// - the sandbox has the same threads as the version, and
/// - none of them did anything: see [`ProcessRule`], and
/// - nothing that came and went left anything behind: in kernel state (ipc, mounts, memory or limits of others, keys),
///   in a pipe, socket or terminal that a process of the version holds, or in a tmpfs.
///
/// **Files** of a btrfs subvolume are compared with the version's snapshot as by
/// [`PollingInspector`](crate::PollingInspector), those of a root on ext4, xfs, or an overlay of such or of btrfs with
/// the copy that [`Rebase::tree`] names, name by name. Where there is no copy, what may have been written counts as
/// changed. But a look at them is left out while nothing can have changed them since the last one: tasks of the sandbox
/// made only system calls that are known to change no file, none of them could store to a mapped file, and nobody else
/// wrote: to the subvolume or the metadata of any btrfs, or to the device that the root lies on. Without tracepoints for
/// it in the kernel, and on tmpfs, which has none, each take looks. Files that changed while a process of the version
/// holds them, or a path that leads to them, make the processes changed too ([`Evidence::Crossing`]).
///
/// Limits: a process outside the sandbox that writes into the memory of one inside, or into a pipe or socket of one that
/// does not wait for it, is not seen; nor is a change to a network namespace, or to the lower folder of an overlay. Two
/// sandboxes that share a device are taken not to write to each other's roots. In a copy that is compared with, a file
/// that was rewritten to what it was differs by its time, and hard links are told by their count. Reads set access
/// times, which others' reads cannot be told from writes by: mount with `noatime`.
#[derive(Debug)]
pub struct Inspector {
    settings: Arc<InspectorBuilder>,
    kernel: Arc<Kernel>,
    state: Option<saved::Folder>,
    sandboxes: Registry<Watched>,
}

impl Inspector {
    /// Loads an inspector with default settings.
    ///
    /// # Errors
    /// As [`InspectorBuilder::load`].
    pub fn load() -> Result<Self> {
        Self::builder().load()
    }

    /// Settings to change before loading.
    #[must_use]
    pub fn builder() -> InspectorBuilder {
        InspectorBuilder {
            rule: ProcessRule::default(),
            limits: Limits::DEFAULT,
            coordinators: Vec::new(),
            pinned: None,
        }
    }

    /// Removes what inspectors have [pinned](InspectorBuilder::pinned) in a folder.
    ///
    /// # Errors
    /// Where it is not there or cannot be removed.
    pub fn unpin(pins: &Path) -> Result<()> {
        crate::bpf::unpin(pins).map_err(|error| Error::io(format!("remove {}", pins.display()), error))
    }

    /// What this host offers.
    #[must_use]
    pub fn probe() -> crate::Probe {
        crate::Probe::run()
    }
}

#[async_trait]
impl StateDelta for Inspector {
    async fn attach(&self, sandbox: &Sandbox) -> Result<()> {
        let root =
            Root::open(&sandbox.root).map_err(|error| Error::io(format!("open {}", sandbox.root.display()), error))?;
        // The old watch first: its cgroup may be the same one. Attaching again begins anew.
        let again = self.sandboxes.remove(&sandbox.id, Watched::give_up);
        let place = root.place();
        let kept = self.state.as_ref().filter(|_| !again).and_then(|state| state.read(&sandbox.id));
        let kept = kept.and_then(|kept| {
            kept.mark.moment?;
            let same = !kept.root.is_empty() && kept.root == root.identity();
            let registered = self.kernel.resume(&sandbox.cgroup, place, kept.current).filter(|_| same)?;
            Some((kept, registered))
        });
        let (kept, registered) = match kept {
            Some((kept, registered)) => (Some(kept), registered),
            None => {
                if let Some(state) = &self.state {
                    state.remove(&sandbox.id);
                }
                (None, self.kernel.register(&sandbox.cgroup, place, now())?)
            }
        };
        let mut watched = Watched {
            id: sandbox.id.clone(),
            state: self.state.clone(),
            tree: None,
            back: READ_AGAIN,
            settings: self.settings.clone(),
            registered,
            kernel: self.kernel.clone(),
            told: match place {
                Place::Subvolume(_) => self.kernel.sees(FileSystem::Btrfs),
                Place::Device(what, _) => self.kernel.sees(what),
                Place::Nowhere => false,
            },
            device: root.device(),
            root,
            cgroup: sandbox.cgroup.clone(),
            ledger: Ledger::new(self.sandboxes.token()),
            files: None,
            history: History::default(),
            last: None,
            verdict: None,
            holdings: None,
            mark: None,
            answer: None,
            mapped: true,
            asynchronous: false,
        };
        if let Some(kept) = kept {
            watched.go_on(kept, self.sandboxes.token());
        }
        self.sandboxes.insert(&sandbox.id, watched);
        Ok(())
    }

    async fn take(&self, id: &SandboxId) -> Delta {
        self.sandboxes.take(id, Watched::take_at_once, Watched::take).await
    }

    async fn rebase(&self, id: &SandboxId, base: &Rebase) {
        let base = base.clone();
        self.sandboxes.with(id, move |watched| watched.rebase(&base)).await;
    }

    async fn detach(&self, id: &SandboxId) {
        self.sandboxes.remove(id, Watched::give_up);
    }
}

/// What a take saw of the processes.
#[derive(Clone, Debug)]
struct Seen {
    /// The interval that began with the take, and when.
    epoch: u64,
    time: u64,
    census: Arc<Census>,
    mounts: Arc<Mounts>,
}

#[derive(Debug)]
struct Watched {
    id: SandboxId,
    state: Option<saved::Folder>,
    /// Where the version's files can be read.
    tree: Option<PathBuf>,
    /// So many earlier intervals are read the next time.
    back: u64,
    settings: Arc<InspectorBuilder>,
    kernel: Arc<Kernel>,
    registered: Registered,
    root: Root,
    /// The device that the root's files bear, where they all bear the same.
    device: Option<u64>,
    /// Changes of files by others than the sandbox are told of.
    told: bool,
    cgroup: PathBuf,
    ledger: Ledger<Option<Mark>, Option<Seen>>,
    files: Option<Base>,
    history: History,
    last: Option<Seen>,
    /// What was said of the processes at the last look, by themselves.
    verdict: Option<Change>,
    /// What the last look at the files saw.
    mark: Option<Mark>,
    /// What is known of the files. It stays true as long as nothing is told of.
    answer: Option<Answer>,
    /// A process may have a file mapped that it can change by storing to memory.
    mapped: bool,
    /// A process can have files changed without a system call of its own.
    asynchronous: bool,
    /// What the processes of the version hold, once it was needed. It stays true while they do nothing.
    holdings: Option<Arc<Holdings>>,
}

/// What a look at the files found, where changes after it are told of.
#[derive(Clone, Debug)]
struct Answer {
    /// The moment of the look.
    moment: Moment,
    change: Change,
    difference: Option<Arc<Difference>>,
}

impl Answer {
    /// At a moment the files were those of the version.
    fn unchanged(moment: Moment) -> Self {
        Self { moment, change: Change::Unchanged, difference: Some(Arc::default()) }
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        // A successor may go on with it.
        if self.state.is_none() {
            self.kernel.unregister(&self.registered);
        }
    }
}

/// An interval that is over may still be written to, by a program that began before: it is read so often.
const READ_AGAIN: u64 = 3;

/// So many threads' counters are read at once.
const AT_ONCE: usize = 32;

/// Nanoseconds of a clock tick, in which `/proc` gives times.
const TICK: u64 = 10_000_000;

/// Nanoseconds since boot, as the kernel dates the start of tasks.
fn now() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    // Neither part is negative.
    now.tv_sec.cast_unsigned() * 1_000_000_000 + now.tv_nsec.cast_unsigned()
}

/// Whether there is time to look at processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Patience {
    None,
    ToLook,
}

impl Patience {
    fn to_look(self) -> io::Result<()> {
        match self {
            Self::None => Err(io::ErrorKind::WouldBlock.into()),
            Self::ToLook => Ok(()),
        }
    }
}

impl Watched {
    /// What can be said without a look at anything but what the programs noted and the list of threads.
    fn take_at_once(&mut self, token: u64) -> Option<Delta> {
        // Not before all that is needed is there: reading is not repeated for nothing.
        let base = self.base()?.clone();
        self.last.as_ref()?;
        if self.answer.as_ref()?.change != Change::Unchanged {
            return None;
        }
        let (time, outside) = self.read().ok()?;
        let (seen, process) = match self.same_as_last(time) {
            Some(seen) => (seen, self.verdict.clone()?),
            None => {
                let seen = self.same_threads(time)?;
                let since = self.history.since(base.epoch);
                // An error says that there is more to look at.
                let process = self.compare(&seen, &base, &since, Patience::None).ok()?;
                (seen, process)
            }
        };
        self.files_still(outside)?;
        self.verdict = Some(process.clone());
        self.last = Some(seen.clone());
        let effects = self.effects();
        self.ledger.record(token, self.mark.clone(), Some(seen));
        Some(Delta { filesystem: Change::Unchanged, process, effects, token: Token(token) })
    }

    fn take(&mut self, token: u64) -> Delta {
        let read = self.read();
        let looked = match &read {
            Ok((time, _)) => self.look(*time),
            Err(error) => Err(io::Error::new(error.kind(), error.to_string())),
        };
        let (mut process, seen) = match looked {
            Ok(seen) => (self.judge(&seen), Some(seen)),
            Err(error) => (failed(&error), None),
        };
        self.verdict = seen.is_some().then(|| process.clone());
        let outside = read.ok().map(|(_, outside)| outside);
        let (mut filesystem, difference) = match outside.and_then(|outside| self.files_still(outside)) {
            Some(answer) => (answer.change, answer.difference),
            None => self.look_at_files(outside),
        };
        if let Some(alien) = seen.as_ref().and_then(|seen| seen.mounts.alien.as_ref()) {
            let why = format!("the sandbox can write to {alien}");
            filesystem = Change::Unknown(Unknown::Unobservable(why));
            self.answer = None;
        }
        if process == Change::Unchanged && filesystem.needs_checkpoint() {
            process = self.crossing(difference.as_deref()).unwrap_or_else(|error| failed(&error));
        }
        let effects = self.effects();
        self.ledger.record(token, self.mark.clone(), seen);
        Delta { filesystem, process, effects, token: Token(token) }
    }

    /// Reads what the programs noted, and begins a new interval. Gives the time of that, and what had been counted of
    /// others' doings.
    fn read(&mut self) -> io::Result<(u64, u64)> {
        let time = now();
        let back = std::mem::replace(&mut self.back, READ_AGAIN);
        let reading = match self.kernel.read(&mut self.registered, time, back) {
            Ok(reading) => reading,
            Err(error) => {
                // Whatever happened, it happened in the interval that is not over.
                self.last = None;
                self.answer = None;
                self.mapped = true;
                self.asynchronous = true;
                self.history.add(Interval {
                    oldest_actor: 0,
                    oldest_runner: 0,
                    left: left::KERNEL | left::FILES,
                    unreported: true,
                    ..Interval::quiet(self.registered.epoch())
                });
                return Err(io::Error::other(error));
            }
        };
        for (i, slot) in reading.slots.iter().enumerate() {
            let mut interval = Interval::from(slot);
            if i + 1 == reading.slots.len() {
                for (started, since) in &reading.running {
                    interval.oldest_runner = interval.oldest_runner.min(*started);
                    if *started < slot.begin {
                        let ran = time.saturating_sub(*since);
                        interval.cpu = interval.cpu.saturating_add(ran);
                    }
                }
                if reading.blind {
                    interval.oldest_runner = 0;
                    interval.cpu = u64::MAX;
                }
                interval.unreported = reading.unreported;
            }
            self.mapped |= interval.left & left::MAPPED != 0;
            self.asynchronous |= interval.left & left::ASYNC != 0;
            self.history.add(interval);
        }
        Ok((time, reading.outside))
    }

    /// What was seen at the last look, where nobody ran since.
    fn same_as_last(&self, time: u64) -> Option<Seen> {
        let last = self.last.as_ref()?;
        self.history.since(last.epoch).nobody_ran().then(|| Seen {
            epoch: self.registered.epoch(),
            time,
            census: last.census.clone(),
            mounts: last.mounts.clone(),
        })
    }

    /// What was seen at the last look, where that is known to be so still: nobody who was there then did anything by
    /// which threads, mounts or files in tmpfs could have become others, and who came is gone.
    fn same_threads(&self, time: u64) -> Option<Seen> {
        // A list that holds some who came while it was made is none to go by.
        let last = self.last.as_ref().filter(|_| self.verdict == Some(Change::Unchanged))?;
        let since = self.history.since(last.epoch);
        let stirred = left::KERNEL | left::FILES | left::MAPPED | left::ASYNC | left::COMPAT | left::UNREADABLE;
        if !nobody_before(since.oldest_actor, last.time) || since.left & stirred != 0 || self.mapped {
            return None;
        }
        (since.tasks == 0).then(|| Seen {
            epoch: self.registered.epoch(),
            time,
            census: last.census.clone(),
            mounts: last.mounts.clone(),
        })
    }

    /// Looks at the tasks where any ran.
    fn look(&mut self, time: u64) -> io::Result<Seen> {
        let seen = match self.same_as_last(time) {
            Some(seen) => seen,
            None => {
                self.last = None;
                let census = Census::take(&self.cgroup)?;
                let processes = census.processes();
                let mounts = mounts::look(&processes, self.root.top_device())?;
                // Whoever could do so is gone.
                self.asynchronous &= !processes.is_empty();
                // What is mapped while this looks is noted in the new interval.
                if self.mapped && !maps_files(&processes)? {
                    // None of the threads that were looked at has gone, and none that was not has come.
                    let now = crate::cgroup::threads(&self.cgroup)?;
                    self.mapped = !now.iter().eq(census.threads.keys().map(|(tid, _)| tid));
                }
                Seen { epoch: self.registered.epoch(), time, census: Arc::new(census), mounts: Arc::new(mounts) }
            }
        };
        self.last = Some(seen.clone());
        Ok(seen)
    }

    /// What the last look found, where no file can have changed since. This moment is then as good as that of the look,
    /// and later.
    fn files_still(&mut self, outside: u64) -> Option<Answer> {
        let answer = self.answer.clone().filter(|answer| !self.touched_since(answer.moment, outside))?;
        let moment = Moment { epoch: self.registered.epoch(), outside };
        if let Some(mark) = &mut self.mark {
            *mark = mark.still_at(moment);
        }
        Some(answer)
    }

    /// Whether a file may have changed.
    fn touched_since(&self, moment: Moment, outside: u64) -> bool {
        let since = self.history.since(moment.epoch);
        let may_store = self.mapped || since.left & left::MAPPED != 0;
        // Once files can change without a task that does it, they have to be looked at.
        !self.told
            || self.asynchronous
            || outside != moment.outside
            || since.left & (left::FILES | left::ASYNC | left::COMPAT) != 0
            || may_store && !since.nobody_ran()
    }

    /// Looks at the files. `outside` was read before.
    fn look_at_files(&mut self, outside: Option<u64>) -> (Change, Option<Arc<Difference>>) {
        if let Some(answer) = &self.answer {
            let since = self.history.since(answer.moment.epoch);
            tracing::trace!(left = since.left, call = since.files_act, "the files have to be looked at");
            metrics::counter!("crab_inspector_file_looks_total").increment(1);
        }
        let moment = outside.map(|outside| Moment { epoch: self.registered.epoch(), outside }).filter(|_| self.told);
        let look = self.look_until_at_rest(moment);
        let difference = look.difference.map(Arc::new);
        if let Some(moment) = moment.filter(|_| !self.asynchronous) {
            let found = !matches!(look.change, Change::Unknown(_));
            let answer = Answer { moment, change: look.change.clone(), difference: difference.clone() };
            self.answer = found.then_some(answer);
        }
        self.mark = look.mark;
        (look.change, difference)
    }

    /// What was found equal was so at its own moment. That was a state of the files only where none changed meanwhile.
    fn look_until_at_rest(&mut self, moment: Option<Moment>) -> Look {
        let mapped = self.mapped || self.asynchronous;
        let frozen = crate::cgroup::is_frozen(&self.cgroup);
        let known = Known { moment, mapped, frozen, limits: self.settings.limits };
        let mut before = moment.map(|moment| moment.outside);
        // Of a subvolume another look tells, unless all is told of and only the sandbox acted: the calls of its tasks are
        // noted at their end too, while a task of the host may still be at what was counted when it began.
        let alone = self.answer.as_ref().map(|answer| answer.moment.outside) == before;
        let listens = matches!(self.root, Root::Folder(_)) || before.is_some() && alone && !self.asynchronous;
        let mut tries = filesystem::TRIES;
        loop {
            let from = self.registered.epoch();
            let mut look = filesystem::look(&self.root, self.files.as_mut(), known);
            if look.change != Change::Unchanged || look.at_rest {
                return look;
            }
            if listens && let Ok((_, outside)) = self.read() {
                let since = self.history.since(from);
                let written = since.left & (left::FILES | left::MAPPED | left::COMPAT | left::ASYNC) != 0
                    || mapped && !since.nobody_ran()
                    || before.replace(outside) != Some(outside);
                if !written {
                    return look;
                }
            }
            tries -= 1;
            if tries == 0 {
                look.give_up();
                return look;
            }
        }
    }

    fn base(&self) -> Option<&Seen> {
        self.ledger.process.mark.as_ref()?.as_ref()
    }

    fn judge(&mut self, seen: &Seen) -> Change {
        let Some(base) = self.base().cloned() else {
            return Change::Unknown(Unknown::NoBase);
        };
        let since = self.history.since(base.epoch);
        self.compare(seen, &base, &since, Patience::ToLook).unwrap_or_else(|error| failed(&error))
    }

    /// The rules, the cheap ones first.
    fn compare(&mut self, seen: &Seen, base: &Seen, since: &Interval, patience: Patience) -> io::Result<Change> {
        if since.left & left::COMPAT != 0 {
            let why = "a 32-bit process ran".to_owned();
            return Ok(Change::Unknown(Unknown::Unobservable(why)));
        }
        if !nobody_before(since.oldest_actor, base.time) {
            let name = base.census.name_of(since.actor).unwrap_or("?");
            let what =
                if since.act < 0 { format!("signal {}", -since.act) } else { format!("system call {}", since.act) };
            return changed(Evidence::TaskRan(format!("{} ({name}), {what}", since.actor)));
        }
        if let Some(evidence) = seen.census.other_threads(&base.census, base.time / TICK) {
            return changed(evidence);
        }
        // Nobody ran, or nobody is left whom it could matter to.
        if since.nobody_ran() || seen.census.threads.is_empty() {
            return Ok(Change::Unchanged);
        }
        let (any, nanoseconds) = if since.unreported {
            if seen.census.threads.len() > AT_ONCE {
                patience.to_look()?;
            }
            let ran = base.census.ran()?;
            (ran.any, ran.nanoseconds)
        } else {
            (!nobody_before(since.oldest_runner, base.time), since.cpu)
        };
        if any {
            let ran = |what: String| changed(Evidence::TaskRan(what));
            match self.settings.rule {
                ProcessRule::Strict => return ran("of the version".to_owned()),
                ProcessRule::Waiting { cpu } => {
                    let used = Duration::from_nanos(nanoseconds);
                    if used > cpu {
                        return ran(format!("of the version, for {used:.0?}"));
                    }
                    if let Some(memory) = &self.holdings(base, patience)?.shared_memory {
                        return ran(format!("of the version, and can write to {memory}"));
                    }
                }
            }
        }
        if let Some(what) = self.left_behind(base, since, patience)? {
            return changed(what);
        }
        match (&seen.mounts.tmpfs, &base.mounts.tmpfs) {
            (Ok(now), Ok(was)) if now == was => Ok(Change::Unchanged),
            (Ok(_), Ok(_)) => changed(Evidence::Kernel("files in a tmpfs differ".to_owned())),
            (Err(why), _) | (_, Err(why)) => changed(Evidence::Kernel(format!("a tmpfs was not compared: {why}"))),
        }
    }

    fn holdings(&mut self, base: &Seen, patience: Patience) -> io::Result<Arc<Holdings>> {
        if let Some(held) = &self.holdings {
            return Ok(held.clone());
        }
        patience.to_look()?;
        let held = Arc::new(Holdings::look(&base.census.processes(), self.device)?);
        self.holdings = Some(held.clone());
        Ok(held)
    }

    /// What tasks that are gone left behind for those that stayed.
    fn left_behind(&mut self, base: &Seen, since: &Interval, patience: Patience) -> io::Result<Option<Evidence>> {
        let has = |what: u32| since.left & what != 0;
        if has(left::KERNEL) {
            let what = format!("system call {} changed state of the kernel", since.left_act);
            return Ok(Some(Evidence::Kernel(what)));
        }
        if has(left::UNREADABLE) {
            let what = "a file descriptor could not be followed".to_owned();
            return Ok(Some(Evidence::Kernel(what)));
        }
        let any = left::INET | left::UNIX | left::DEVICE;
        if !has(any) && since.pipes.is_empty() {
            return Ok(None);
        }
        let held = self.holdings(base, patience)?;
        let processes: BTreeSet<u32> = base.census.processes();
        let crossing = |what: &str| Ok(Some(Evidence::Crossing(what.to_owned())));
        if held.pipes.iter().any(|pipe| since.pipes.may_hold(*pipe)) {
            return crossing("data went through a pipe that a process of the version holds");
        }
        if has(left::DEVICE) && held.terminal {
            return crossing("a terminal was written to that a process of the version holds");
        }
        if has(left::UNIX | left::INET) && !held.sockets.is_empty() {
            patience.to_look()?;
        }
        if has(left::UNIX) && held.holds_unix_sockets(&processes)? {
            return crossing("data went to unix sockets, and processes of the version hold some");
        }
        if has(left::INET) && held.data_waits(&processes)? {
            return crossing("data waits in a socket that a process of the version holds");
        }
        Ok(None)
    }

    /// Whether processes that stayed hold something of the files that changed.
    fn crossing(&mut self, difference: Option<&Difference>) -> io::Result<Change> {
        let Some(base) = self.base().cloned() else {
            return Ok(Change::Unchanged);
        };
        if base.census.threads.is_empty() {
            return Ok(Change::Unchanged);
        }
        let held = self.holdings(&base, Patience::ToLook)?;
        let what = match difference {
            _ if held.watches => Some("a process of the version watches files".to_owned()),
            Some(difference) => {
                held.touched_by(difference, self.device).map(|path| format!("a process of the version holds {path}"))
            }
            None => held
                .holds_files()
                .then(|| "processes of the version hold files, and which ones changed is not known".into()),
        };
        Ok(what.map_or(Change::Unchanged, |what| Change::Changed(Evidence::Crossing(what))))
    }

    /// What left the sandbox since the processes' base.
    fn effects(&self) -> Effects {
        let since = self.history.since(self.base().map_or(0, |base| base.epoch));
        let known = &self.settings.coordinators;
        let destinations: Vec<SocketAddr> =
            since.destinations.iter().map(address).filter(|to| !known.contains(to)).collect();
        let sent = !destinations.is_empty() || since.left & left::SENT_OVERFLOW != 0;
        Effects { sent: Some(sent), destinations }
    }

    fn rebase(&mut self, base: &Rebase) {
        let (files, processes) = self.ledger.rebase(base.token, base.filesystem, base.process);
        if files {
            let mark = self.ledger.filesystem.mark.clone().flatten();
            // The version's files were captured after the mark: where nothing is told of since, they are those.
            self.answer = mark
                .as_ref()
                .and_then(|mark| mark.moment)
                .filter(|moment| self.told && self.history.is_whole_since(moment.epoch))
                .map(Answer::unchanged);
            self.files = filesystem::base(&self.root, base.tree.as_ref(), mark);
            self.tree.clone_from(&base.tree);
        }
        if processes {
            self.holdings = None;
            self.verdict = None;
            // The next version of the files may be of a take before this one of the processes.
            let files = self.answer.as_ref().map_or(0, |answer| answer.moment.epoch);
            if let Some(epoch) = self.base().map(|base| base.epoch) {
                self.history.forget_before(epoch.min(files));
            }
        }
        if files || processes {
            self.keep();
        }
    }

    /// Nobody will go on with it.
    fn give_up(&mut self) {
        if let Some(state) = self.state.take() {
            state.remove(&self.id);
        }
    }

    /// Writes down what a successor would have to know.
    fn keep(&self) {
        let Some(state) = &self.state else { return };
        let mark = self.ledger.filesystem.mark.clone().flatten().filter(|mark| mark.moment.is_some());
        let kept = self.base().zip(mark).map(|(base, mark)| {
            let mounts = Mounts::clone(&base.mounts);
            let (cgroup, root) = (Kernel::cgroup_of(&self.registered), self.root.identity());
            let moment = (base.epoch, base.time);
            Saved::new(cgroup, root, moment, mounts, mark, self.tree.clone(), self.asynchronous)
                .with(&base.census)
                .noted(&self.history, self.registered.epoch())
        });
        let done = match kept {
            Some(kept) => state.write(&self.id, &kept),
            None => {
                state.remove(&self.id);
                Ok(())
            }
        };
        if let Err(error) = done {
            // An older one would be of another base: it is conservative, but of no use.
            state.remove(&self.id);
            tracing::warn!(sandbox = %self.id, %error, "a successor will not know what this version holds");
        }
    }

    /// Goes on from what a predecessor wrote down. All that was noted since is still to be read.
    fn go_on(&mut self, kept: Saved, token: u64) {
        let seen =
            Seen { epoch: kept.epoch, time: kept.time, census: Arc::new(kept.census()), mounts: Arc::new(kept.mounts) };
        self.asynchronous = kept.asynchronous;
        self.history = kept.history;
        self.back = u64::MAX;
        self.answer = kept.mark.moment.filter(|_| self.told).map(Answer::unchanged);
        self.files = filesystem::base(&self.root, kept.tree.as_ref(), Some(kept.mark.clone()));
        self.tree = kept.tree;
        self.mark = Some(kept.mark.clone());
        self.ledger = Ledger::resumed(token, Some(kept.mark), Some(seen));
        // So that the next successor goes on from here. Where it cannot be read, that is noted as everything.
        let _ = self.read();
        self.keep();
        tracing::info!(sandbox = %self.id, "goes on with what an earlier process watched");
    }
}

fn changed(evidence: Evidence) -> io::Result<Change> {
    Ok(Change::Changed(evidence))
}

fn failed(error: &io::Error) -> Change {
    let why = format!("cannot look at the processes: {error}");
    Change::Unknown(Unknown::Failed(why))
}

pub(crate) fn address(to: &Destination) -> SocketAddr {
    let ip = if to.family == 2 {
        let [a, b, c, d, ..] = to.address;
        IpAddr::V4(Ipv4Addr::new(a, b, c, d))
    } else {
        let ip = Ipv6Addr::from(to.address);
        ip.to_ipv4_mapped().map_or(IpAddr::V6(ip), IpAddr::V4)
    };
    SocketAddr::new(ip, u16::from_be(to.port))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn destinations_are_read() {
        let mut to = Destination { family: 2, port: 443u16.to_be(), ..Destination::default() };
        to.address[..4].copy_from_slice(&[192, 0, 2, 7]);
        assert_eq!(address(&to), "192.0.2.7:443".parse().unwrap());
        to.family = 10;
        to.address = Ipv4Addr::new(192, 0, 2, 7).to_ipv6_mapped().octets();
        assert_eq!(address(&to), "192.0.2.7:443".parse().unwrap());
    }
}
