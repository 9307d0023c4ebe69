//! The programs in the kernel, and the maps that they write.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs;
use std::io;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

use aya::maps::{Array, HashMap, MapData, MapError, PerCpuArray, PerCpuValues};
use aya::programs::links::{FdLink, PinnedLink};
use aya::programs::{BtfTracePoint, Program, ProgramError, RawTracePoint, RawTracePointRunOptions, TestRun};
use aya::{Btf, Ebpf, EbpfLoader};
use crab_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use super::layout::{
    Aligned, MOST_LEVELS, MOST_SANDBOXES, OUTSIDE_BTRFS, OUTSIDE_DEVICES, OnCpu, SHARED_ROOT, SLOTS, Slot,
};

#[cfg(target_arch = "x86_64")]
static OBJECT: &Aligned<[u8]> = &Aligned(*include_bytes!("../../bpf/inspector.x86.bpf.o"));
#[cfg(target_arch = "aarch64")]
static OBJECT: &Aligned<[u8]> = &Aligned(*include_bytes!("../../bpf/inspector.arm64.bpf.o"));

/// Programs, and the tracepoints that they hang on.
const PROGRAMS: [(&str, &str); 6] = [
    ("on_fork", "sched_process_fork"),
    ("on_exit", "sched_process_exit"),
    ("on_move", "cgroup_attach_task"),
    ("on_switch", "sched_switch"),
    ("on_signal", "signal_generate"),
    ("on_syscall", "sys_exit"),
];

/// The program that is run on demand.
const UNREPORTED: &str = "unreported";

/// The maps.
const MAPS: [&str; 8] = ["sandboxes", "levels", "epochs", "slots", "running", "roots", "devices", "outside"];

/// A file system whose changes are seen, where the kernel has what this needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FileSystem {
    Btrfs,
    Ext4,
    Xfs,
}

impl FileSystem {
    pub(crate) const ALL: [Self; 3] = [Self::Btrfs, Self::Ext4, Self::Xfs];

    /// The programs for it, and the tracepoints that they hang on.
    fn programs(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Btrfs => &[
                ("on_btrfs_room", "btrfs_space_reservation"),
                ("on_btrfs_data", "btrfs_inode_mod_outstanding_extents"),
            ],
            Self::Ext4 => &[
                ("on_ext4_inode", "ext4_journal_start_inode"),
                ("on_ext4", "ext4_journal_start_sb"),
                ("on_ext4_write", "ext4_da_write_begin"),
                ("on_ext4_write_at_once", "ext4_write_begin"),
                ("on_dirty", "writeback_dirty_folio"),
                ("on_direct", "iomap_dio_rw_begin"),
            ],
            Self::Xfs => &[
                ("on_xfs", "xfs_trans_alloc"),
                ("on_xfs_write", "xfs_file_buffered_write"),
                ("on_xfs_hole", "xfs_free_file_space"),
                ("on_dirty", "writeback_dirty_folio"),
                ("on_direct", "iomap_dio_rw_begin"),
            ],
        }
    }
}

impl fmt::Display for FileSystem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Btrfs => "btrfs",
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
        })
    }
}

/// What the files of a sandbox are known by.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Place {
    /// The number of a btrfs subvolume.
    Subvolume(u64),
    /// A device, as the kernel numbers it.
    Device(FileSystem, u64),
    /// Nothing by which the kernel would tell of changes.
    Nowhere,
}

/// The loaded programs. They stop when this is dropped.
pub(crate) struct Kernel {
    maps: Mutex<Maps>,
    programs: Mutex<Programs>,
}

/// Holds the programs and their links.
struct Programs {
    loaded: Ebpf,
    btf: Btf,
    running: BTreeSet<&'static str>,
    /// What runs only as long as this process does.
    links: Vec<FdLink>,
    /// What runs on without it. Held, so that whoever removes the pins does not stop the programs meanwhile.
    pinned: Vec<PinnedLink>,
    /// Whether all switches were reported can be asked.
    tells_unreported: bool,
    /// Where links are pinned, so that programs run on without this process.
    pins: Option<PathBuf>,
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel").finish_non_exhaustive()
    }
}

struct Maps {
    sandboxes: HashMap<MapData, u64, u32>,
    levels: Array<MapData, u32>,
    epochs: Array<MapData, u64>,
    slots: Array<MapData, Slot>,
    running: PerCpuArray<MapData, OnCpu>,
    roots: Places,
    devices: Places,
    outside: Array<MapData, u64>,
    free: BTreeSet<u32>,
    used_levels: BTreeMap<u32, u32>,
    /// Cgroups that an earlier process watched, and nobody since.
    left: BTreeMap<u64, u32>,
}

/// Numbers of places, each with the sandboxes whose files lie there.
struct Places {
    map: HashMap<MapData, u64, u32>,
    owners: BTreeMap<u64, BTreeSet<u32>>,
    /// Shared with somebody that an earlier process watched.
    shared_for_good: BTreeSet<u64>,
}

impl Places {
    fn new(map: HashMap<MapData, u64, u32>) -> Self {
        Self { map, owners: BTreeMap::new(), shared_for_good: BTreeSet::new() }
    }

    fn add(&mut self, place: u64, sandbox: u32) -> Result<(), MapError> {
        let known = self.owners.contains_key(&place);
        if !known && self.map.get(&place, 0).is_ok_and(|other| other != sandbox) {
            self.shared_for_good.insert(place);
        }
        self.owners.entry(place).or_default().insert(sandbox);
        self.tell(place)
    }

    fn remove(&mut self, place: u64, sandbox: u32) -> Result<(), MapError> {
        if let Some(owners) = self.owners.get_mut(&place) {
            owners.remove(&sandbox);
        }
        self.tell(place)
    }

    /// Two file systems may number their subvolumes alike, and several sandboxes may lie on one device.
    fn tell(&mut self, place: u64) -> Result<(), MapError> {
        let owners = self.owners.get(&place);
        let mut first = owners.into_iter().flatten();
        match (first.next(), first.next()) {
            (None, _) => {
                self.owners.remove(&place);
                self.map.remove(&place)
            }
            (Some(owner), None) if !self.shared_for_good.contains(&place) => self.map.insert(place, owner, 0),
            (Some(_), _) => self.map.insert(place, SHARED_ROOT, 0),
        }
    }
}

/// A sandbox as the programs know it.
#[derive(Debug)]
pub(crate) struct Registered {
    index: u32,
    cgroup: u64,
    epoch: u64,
    place: Place,
    /// How often switches of CPUs had gone unreported when the interval began. `None`: not known.
    unreported: Option<u64>,
}

/// What the programs noted up to a moment.
#[derive(Debug)]
pub(crate) struct Reading {
    /// Earlier ones, which may have been read before.
    pub(crate) slots: Vec<Slot>,
    /// When tasks of the sandbox that are on a CPU now started, and when they came on it.
    pub(crate) running: Vec<(u64, u64)>,
    /// What some CPU runs is not known.
    pub(crate) blind: bool,
    /// A CPU may have switched since the earlier reading without a report: who ran is not known from these.
    pub(crate) unreported: bool,
    /// How often others than sandboxes may have changed files.
    pub(crate) outside: u64,
}

fn failed(what: &str, error: impl std::error::Error + Send + Sync + 'static) -> Error {
    Error::new(ErrorKind::Unsupported, what).caused_by(error).fix("see `Inspector::probe`, or use `PollingInspector`")
}

impl Registered {
    /// The interval that is not over yet.
    pub(crate) fn epoch(&self) -> u64 {
        self.epoch
    }
}

impl Kernel {
    /// Loads the programs and lets them run. With a folder of a bpffs they are kept there, or gone on with.
    pub(crate) fn load(pins: Option<&Path>) -> Result<Self> {
        let pins = pins.map(pins_of_this_object);
        if let Some(pins) = &pins {
            fs::DirBuilder::new().recursive(true).mode(0o700).create(pins).map_err(|error| {
                Error::io(format!("make {}", pins.display()), error).fix("give a folder of a mounted bpffs")
            })?;
        }
        let goes_on = pins.as_ref().is_some_and(|pins| PROGRAMS.iter().all(|(name, _)| link(pins, name).exists()));
        let btf = Btf::from_sys_fs().map_err(|error| failed("cannot read the kernel's type information", error))?;
        let mut loader = EbpfLoader::new();
        loader.btf(Some(&btf));
        if let Some(pins) = &pins {
            for name in MAPS {
                loader.map_pin_path(name, pins.join(name));
            }
        }
        let mut programs = loader.load(&OBJECT.0).map_err(|error| failed("cannot load the BPF maps", error))?;
        let mut maps = Maps::of(&mut programs)?;
        if goes_on {
            maps.go_on()?;
        } else {
            maps.forget_what_runs()?;
        }
        let mut programs = Programs::new(programs, btf, pins);
        for (name, tracepoint) in PROGRAMS {
            programs.run(name, tracepoint)?;
        }
        programs.tells_unreported = match programs.load_unreported() {
            Ok(()) => true,
            Err(error) => {
                tracing::info!("whether all switches are reported does not show, so tasks will be looked at: {error}");
                false
            }
        };
        if !goes_on {
            make_every_cpu_switch();
        }
        Ok(Self { maps: Mutex::new(maps), programs: Mutex::new(programs) })
    }

    /// Whether changes to a file system are noted from now on.
    pub(crate) fn sees(&self, what: FileSystem) -> bool {
        let mut programs = self.programs.lock();
        what.programs().iter().all(|(name, tracepoint)| {
            let tried = programs.run(name, tracepoint);
            if let Err(error) = &tried {
                tracing::info!("changes to {what} do not show by themselves, so files will be looked at: {error}");
            }
            tried.is_ok()
        })
    }

    /// The inode of a cgroup.
    pub(crate) fn cgroup_of(registered: &Registered) -> u64 {
        registered.cgroup
    }

    /// Begins to watch the tasks of a cgroup. Time is in nanoseconds since boot.
    pub(crate) fn register(&self, cgroup: &Path, place: Place, now: u64) -> Result<Registered> {
        let id = fs::metadata(cgroup).map_err(|error| Error::io(format!("look at {}", cgroup.display()), error))?.ino();
        let level = level(cgroup)?;
        let mut maps = self.maps.lock();
        if let Some(index) = maps.left.remove(&id) {
            // Watched anew.
            let _ = maps.sandboxes.remove(&id);
            maps.free.insert(index);
        }
        let index = maps
            .free
            .pop_first()
            .ok_or_else(|| Error::new(ErrorKind::Full, format!("{MOST_SANDBOXES} sandboxes are watched already")))?;
        let registered = Registered { index, cgroup: id, epoch: 1, place, unreported: None };
        let done = maps.begin(&registered, level, now);
        if done.is_err() {
            maps.free.insert(index);
        }
        done.map(|()| registered)
    }

    /// Goes on with what an earlier process watched. `None` where not all that was noted from an interval on is there.
    pub(crate) fn resume(&self, cgroup: &Path, place: Place, since: u64) -> Option<Registered> {
        let id = fs::metadata(cgroup).ok()?.ino();
        let mut maps = self.maps.lock();
        let index = *maps.left.get(&id)?;
        let epoch = maps.epochs.get(&index, 0).ok()?;
        if since > epoch || since + SLOTS < epoch + 2 {
            return None;
        }
        maps.settle(place, index).ok()?;
        maps.left.remove(&id);
        Some(Registered { index, cgroup: id, epoch, place, unreported: None })
    }

    /// Stops to watch.
    pub(crate) fn unregister(&self, registered: &Registered) {
        let mut maps = self.maps.lock();
        // The same cgroup may be watched anew already.
        if maps.sandboxes.get(&registered.cgroup, 0).ok() == Some(registered.index) {
            let _ = maps.sandboxes.remove(&registered.cgroup);
        }
        let index = registered.index;
        // Where this fails, a number is left that tells of a sandbox that nobody asks about.
        let _ = match registered.place {
            Place::Subvolume(number) => maps.roots.remove(number, index),
            Place::Device(_, number) => maps.devices.remove(number, index),
            Place::Nowhere => Ok(()),
        };
        maps.free.insert(registered.index);
    }

    /// Begins a new interval and reads so many earlier ones, at most those that are kept apart.
    pub(crate) fn read(&self, registered: &mut Registered, now: u64, back: u64) -> Result<Reading, MapError> {
        let mut maps = self.maps.lock();
        let (index, old) = (registered.index, registered.epoch);
        let next = old + 1;
        // Before the interval begins, so that what goes unreported in it counts for it.
        let begun = unreported(&maps.running.get(&0, 0)?);
        maps.slots.set(place(index, next), Slot::empty(next, now), 0)?;
        maps.epochs.set(index, next, 0)?;
        registered.epoch = next;
        let pending = self.switched_unreported();
        let cpus = maps.running.get(&0, 0)?;
        let before = registered.unreported.replace(begun);
        // A program that had read the old epoch may still write: its interval is read again the next times.
        let slots = (next.saturating_sub(back.min(SLOTS - 1)).max(1)..next)
            .map(|epoch| maps.slots.get(&place(index, epoch), 0))
            .collect::<Result<Vec<_>, _>>()?;
        let counter = match registered.place {
            Place::Subvolume(_) => OUTSIDE_BTRFS,
            Place::Device(..) | Place::Nowhere => OUTSIDE_DEVICES,
        };
        let mut reading = Reading {
            slots,
            running: Vec::new(),
            blind: false,
            unreported: pending || before != Some(unreported(&cpus)),
            outside: maps.outside.get(&counter, 0)?,
        };
        for cpu in cpus.iter() {
            if cpu.sandbox == OnCpu::UNKNOWN.sandbox {
                reading.blind = true;
            } else if cpu.sandbox == index + 1 {
                reading.running.push((cpu.started, cpu.since));
            }
        }
        Ok(reading)
    }

    /// Whether a CPU has switched since the last switch of it that was reported, or may have.
    fn switched_unreported(&self) -> bool {
        // While another program is being loaded nobody waits for that.
        let Some(programs) = self.programs.try_lock().filter(|programs| programs.tells_unreported) else {
            return true;
        };
        let Some(Program::RawTracePoint(program)) = programs.loaded.program(UNREPORTED) else {
            return true;
        };
        program.test_run(RawTracePointRunOptions::new()).map_or(true, |said| said.return_value != 0)
    }
}

/// How often switches were found that had not been reported, on all CPUs.
fn unreported(cpus: &PerCpuValues<OnCpu>) -> u64 {
    cpus.iter().fold(0, |all, cpu| all.wrapping_add(cpu.unreported))
}

fn place(index: u32, epoch: u64) -> u32 {
    // Below 4,096.
    index * SLOTS as u32 + (epoch % SLOTS) as u32
}

impl Maps {
    fn of(programs: &mut Ebpf) -> Result<Self> {
        let mut take = |name: &'static str| {
            programs
                .take_map(name)
                .ok_or_else(|| Error::new(ErrorKind::Internal, format!("the BPF object has no map {name}")))
        };
        let wrong = |error| failed("a BPF map is not what it should be", error);
        Ok(Self {
            sandboxes: HashMap::try_from(take("sandboxes")?).map_err(wrong)?,
            levels: Array::try_from(take("levels")?).map_err(wrong)?,
            epochs: Array::try_from(take("epochs")?).map_err(wrong)?,
            slots: Array::try_from(take("slots")?).map_err(wrong)?,
            running: PerCpuArray::try_from(take("running")?).map_err(wrong)?,
            roots: Places::new(HashMap::try_from(take("roots")?).map_err(wrong)?),
            devices: Places::new(HashMap::try_from(take("devices")?).map_err(wrong)?),
            outside: Array::try_from(take("outside")?).map_err(wrong)?,
            free: (0..MOST_SANDBOXES).collect(),
            used_levels: BTreeMap::new(),
            left: BTreeMap::new(),
        })
    }

    /// Takes over what an earlier process told the programs.
    fn go_on(&mut self) -> Result<()> {
        let wrong = |error| failed("cannot read a BPF map", error);
        for at in 0..MOST_LEVELS {
            let level = self.levels.get(&at, 0).map_err(wrong)?;
            if level > 0 {
                self.used_levels.insert(level - 1, at);
            }
        }
        for entry in self.sandboxes.iter() {
            let (cgroup, index) = entry.map_err(wrong)?;
            self.free.remove(&index);
            self.left.insert(cgroup, index);
        }
        Ok(())
    }

    /// Tells the programs where a sandbox's files lie.
    fn settle(&mut self, place: Place, index: u32) -> Result<(), MapError> {
        match place {
            Place::Subvolume(number) => self.roots.add(number, index),
            Place::Device(_, number) => self.devices.add(number, index),
            Place::Nowhere => Ok(()),
        }
    }

    fn forget_what_runs(&mut self) -> Result<()> {
        let known: Vec<u64> = self.sandboxes.keys().flatten().collect();
        for cgroup in known {
            let _ = self.sandboxes.remove(&cgroup);
        }
        let cpus = self.running.get(&0, 0).map_err(|error| failed("cannot read a BPF map", error))?.len();
        // One that is off runs nothing, and switches before it does.
        let mut states = vec![OnCpu::default(); cpus];
        for cpu in aya::util::online_cpus().map_err(|(what, error)| Error::io(what, error))? {
            if let Some(state) = states.get_mut(cpu as usize) {
                *state = OnCpu::UNKNOWN;
            }
        }
        let unknown = PerCpuValues::try_from(states).map_err(|error| failed("cannot count the CPUs", error))?;
        self.running.set(0, unknown, 0).map_err(|error| failed("cannot write a BPF map", error))
    }

    fn begin(&mut self, registered: &Registered, level: u32, now: u64) -> Result<()> {
        let wrong = |error| failed("cannot write a BPF map", error);
        let next = u32::try_from(self.used_levels.len()).unwrap_or(u32::MAX);
        if !self.used_levels.contains_key(&level) {
            if next >= MOST_LEVELS {
                return Err(Error::new(ErrorKind::Full, "the cgroups of sandboxes lie at too many different depths")
                    .fix("keep them at up to four different depths"));
            }
            self.levels.set(next, level + 1, 0).map_err(wrong)?;
            self.used_levels.insert(level, next);
        }
        let (index, epoch) = (registered.index, registered.epoch);
        self.slots.set(place(index, epoch), Slot::empty(epoch, now), 0).map_err(wrong)?;
        self.epochs.set(index, epoch, 0).map_err(wrong)?;
        self.settle(registered.place, index).map_err(wrong)?;
        self.sandboxes.insert(registered.cgroup, index, 0).map_err(wrong)
    }
}

/// A program that was tried.
pub(crate) struct Tried {
    pub(crate) program: &'static str,
    pub(crate) tracepoint: &'static str,
    /// Why it cannot be used.
    pub(crate) error: Option<Error>,
    /// The file system that it is for. `None`: nothing can be told without it.
    pub(crate) only_for: Option<FileSystem>,
}

/// Tries each program alone.
pub(crate) fn try_programs() -> Result<Vec<Tried>> {
    let btf = Btf::from_sys_fs().map_err(|error| failed("cannot read the kernel's type information", error))?;
    let loaded =
        EbpfLoader::new().btf(Some(&btf)).load(&OBJECT.0).map_err(|error| failed("cannot load the BPF maps", error))?;
    let mut programs = Programs::new(loaded, btf, None);
    let mut all: Vec<_> = PROGRAMS.iter().map(|(name, tracepoint)| (*name, *tracepoint, None)).collect();
    for what in FileSystem::ALL {
        all.extend(what.programs().iter().map(|(name, tracepoint)| (*name, *tracepoint, Some(what))));
    }
    Ok(all
        .into_iter()
        .map(|(program, tracepoint, only_for)| Tried {
            program,
            tracepoint,
            error: programs.run(program, tracepoint).err(),
            only_for,
        })
        .collect())
}

impl Programs {
    fn new(loaded: Ebpf, btf: Btf, pins: Option<PathBuf>) -> Self {
        let (links, pinned) = (Vec::new(), Vec::new());
        Self { loaded, btf, running: BTreeSet::new(), links, pinned, tells_unreported: false, pins }
    }

    /// Loads the program that is run on demand, and tries it.
    fn load_unreported(&mut self) -> Result<()> {
        let Some(Program::RawTracePoint(program)) = self.loaded.program_mut(UNREPORTED) else {
            return Err(Error::new(ErrorKind::Internal, format!("there is no BPF program {UNREPORTED}")));
        };
        let tried = again(|| program.load()).and_then(|()| program.test_run(RawTracePointRunOptions::new()));
        tried.map(drop).map_err(|error| failed(&format!("cannot run the BPF program {UNREPORTED}"), error))
    }

    /// Loads a program and hangs it on its tracepoint, unless it runs already.
    fn run(&mut self, name: &'static str, tracepoint: &str) -> Result<()> {
        if self.running.contains(name) {
            return Ok(());
        }
        let pin = self.pins.as_ref().map(|pins| link(pins, name));
        if let Some(pin) = pin.as_ref().filter(|pin| pin.exists()) {
            let pinned = PinnedLink::from_pin(pin).map_err(|error| failed("cannot hold a pinned program", error))?;
            self.pinned.push(pinned);
            self.running.insert(name);
            return Ok(());
        }
        let program = self
            .loaded
            .program_mut(name)
            .ok_or_else(|| Error::new(ErrorKind::Internal, format!("there is no BPF program {name}")))?;
        let done = match program {
            Program::BtfTracePoint(program) => start_btf(program, tracepoint, &self.btf),
            Program::RawTracePoint(program) => start_raw(program, tracepoint),
            _ => return Err(Error::new(ErrorKind::Internal, format!("{name} is no program for a tracepoint"))),
        };
        let running =
            done.map_err(|error| failed(&format!("cannot run the BPF program {name} on {tracepoint}"), error))?;
        match pin {
            Some(pin) => {
                self.pinned.push(running.pin(pin).map_err(|error| failed("cannot pin a BPF program", error))?);
            }
            None => self.links.push(running),
        }
        self.running.insert(name);
        Ok(())
    }
}

/// Loads a program. A signal to this thread ends the kernel's check of it, which then has to begin anew.
fn again(mut load: impl FnMut() -> Result<(), ProgramError>) -> Result<(), ProgramError> {
    let mut tries = 10;
    loop {
        match load() {
            Err(ProgramError::LoadError { io_error, .. })
                if io_error.kind() == io::ErrorKind::WouldBlock && tries > 0 =>
            {
                tries -= 1;
            }
            other => return other,
        }
    }
}

fn start_btf(program: &mut BtfTracePoint, tracepoint: &str, btf: &Btf) -> Result<FdLink, ProgramError> {
    again(|| program.load(tracepoint, btf))?;
    let link = program.attach()?;
    program.take_link(link).map(FdLink::from)
}

fn start_raw(program: &mut RawTracePoint, tracepoint: &str) -> Result<FdLink, ProgramError> {
    again(|| program.load())?;
    let link = program.attach(tracepoint)?;
    program.take_link(link).map(FdLink::from)
}

/// Where the link of a program is pinned.
fn link(pins: &Path, program: &str) -> PathBuf {
    pins.join(format!("link_{program}"))
}

/// Another build of the programs has a folder of its own: it could not read this one's maps.
fn pins_of_this_object(pins: &Path) -> PathBuf {
    let digest = Sha256::digest(&OBJECT.0);
    pins.join(digest.iter().take(8).map(|byte| format!("{byte:02x}")).collect::<String>())
}

/// Removes all that was pinned in a folder, of any build. The programs stop where no process holds them.
pub(crate) fn unpin(pins: &Path) -> io::Result<()> {
    for build in fs::read_dir(pins)? {
        let build = build?.path();
        for pinned in fs::read_dir(&build)? {
            fs::remove_file(pinned?.path())?;
        }
        fs::remove_dir(&build)?;
    }
    fs::remove_dir(pins)
}

/// How deep a cgroup lies below the root of its hierarchy.
fn level(cgroup: &Path) -> Result<u32> {
    const ROOT: u64 = 1;
    for (level, folder) in cgroup.ancestors().enumerate() {
        let at = |error: std::io::Error| Error::io(format!("look at {}", folder.display()), error);
        let kind = rustix::fs::statfs(folder).map_err(|error| at(error.into()))?;
        if kind.f_type != 0x6367_7270 {
            break;
        }
        if fs::metadata(folder).map_err(at)?.ino() == ROOT {
            // A path is not that long.
            return Ok(u32::try_from(level).unwrap_or(u32::MAX - 1));
        }
    }
    Err(Error::new(
        ErrorKind::Unsupported,
        format!("{} does not lie under a cgroup v2 mount of the whole hierarchy", cgroup.display()),
    )
    .fix("give the sandbox's cgroup under a mount of the root cgroup"))
}

/// Runs on each CPU for a moment, so that what it runs next is seen. A CPU that is missed is known to be.
fn make_every_cpu_switch() {
    let Ok(all) = rustix::thread::sched_getaffinity(None) else {
        return;
    };
    // A thread of its own: its affinity is nobody's concern.
    let visit = move || {
        for cpu in (0..rustix::thread::CpuSet::MAX_CPU).filter(|cpu| all.is_set(*cpu)) {
            let mut one = rustix::thread::CpuSet::new();
            one.set(cpu);
            if rustix::thread::sched_setaffinity(None, &one).is_ok() {
                std::thread::sleep(Duration::from_micros(50));
            }
        }
    };
    if let Ok(thread) = std::thread::Builder::new().spawn(visit) {
        let _ = thread.join();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The objects of all architectures, also the one that cannot be loaded here.
    #[test]
    fn every_object_holds_every_program_and_map() {
        for object in [
            &include_bytes!("../../bpf/inspector.x86.bpf.o")[..],
            &include_bytes!("../../bpf/inspector.arm64.bpf.o")[..],
        ] {
            let parsed = aya_obj::Object::parse(object).unwrap();
            let needed = PROGRAMS.iter().chain(FileSystem::ALL.iter().flat_map(|what| what.programs()));
            for (program, _) in needed {
                assert!(parsed.programs.contains_key(*program), "{program}");
            }
            assert!(parsed.programs.contains_key(UNREPORTED));
            for map in MAPS {
                assert!(parsed.maps.contains_key(map), "{map}");
            }
            let size = |map: &str| parsed.maps[map].value_size() as usize;
            assert_eq!((size("slots"), size("running")), (size_of::<Slot>(), size_of::<OnCpu>()));
        }
    }
}
