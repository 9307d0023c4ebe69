//! The programs in the kernel, and the maps that they write.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::Duration;

use aya::maps::{Array, HashMap, MapData, PerCpuArray, PerCpuValues};
use aya::programs::BtfTracePoint;
use aya::{Btf, Ebpf, EbpfLoader};
use crab_core::{Error, ErrorKind, Result};
use parking_lot::Mutex;

use super::layout::{Aligned, MOST_LEVELS, MOST_SANDBOXES, OnCpu, SHARED_ROOT, SLOTS, Slot};

#[cfg(target_arch = "x86_64")]
static OBJECT: &Aligned<[u8]> = &Aligned(*include_bytes!("../../bpf/inspector.x86.bpf.o"));
#[cfg(target_arch = "aarch64")]
static OBJECT: &Aligned<[u8]> = &Aligned(*include_bytes!("../../bpf/inspector.arm64.bpf.o"));

/// Programs, and the tracepoints that they hang on.
const PROGRAMS: [(&str, &str); 4] = [
    ("on_move", "cgroup_attach_task"),
    ("on_switch", "sched_switch"),
    ("on_signal", "signal_generate"),
    ("on_syscall", "sys_exit"),
];

/// Programs that let the look at a btrfs root be left out, where the kernel has their tracepoints.
const BTRFS_PROGRAMS: [(&str, &str); 2] =
    [("on_btrfs_room", "btrfs_space_reservation"), ("on_btrfs_data", "btrfs_inode_mod_outstanding_extents")];

/// The loaded programs. They stop when this is dropped.
pub(crate) struct Kernel {
    maps: Mutex<Maps>,
    sees_btrfs: bool,
    // Holds the programs and their links.
    _programs: Ebpf,
}

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Kernel").finish_non_exhaustive()
    }
}

struct Maps {
    sandboxes: HashMap<MapData, u64, u32>,
    levels: Array<MapData, u32>,
    epochs: Array<MapData, u64>,
    slots: Array<MapData, Slot>,
    running: PerCpuArray<MapData, OnCpu>,
    roots: HashMap<MapData, u64, u32>,
    outside: Array<MapData, u64>,
    free: BTreeSet<u32>,
    used_levels: BTreeMap<u32, u32>,
}

/// A sandbox as the programs know it.
#[derive(Debug)]
pub(crate) struct Registered {
    index: u32,
    cgroup: u64,
    epoch: u64,
    /// The number of the btrfs subvolume that is its root.
    root: Option<u64>,
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
    /// Loads the programs and lets them run.
    pub(crate) fn load() -> Result<Self> {
        let btf = Btf::from_sys_fs().map_err(|error| failed("cannot read the kernel's type information", error))?;
        let mut programs = EbpfLoader::new()
            .btf(Some(&btf))
            .load(&OBJECT.0)
            .map_err(|error| failed("cannot load the BPF maps", error))?;
        let mut maps = Maps::of(&mut programs)?;
        maps.forget_what_runs()?;
        for (name, tracepoint) in PROGRAMS {
            attach(&mut programs, &btf, name, tracepoint)?;
        }
        let sees_btrfs = BTRFS_PROGRAMS.iter().all(|(name, tracepoint)| {
            let tried = attach(&mut programs, &btf, name, tracepoint);
            if let Err(error) = &tried {
                tracing::info!("each look at files will commit them first: {error}");
            }
            tried.is_ok()
        });
        make_every_cpu_switch();
        Ok(Self { maps: Mutex::new(maps), sees_btrfs, _programs: programs })
    }

    /// Begins to watch the tasks of a cgroup. Time is in nanoseconds since boot.
    pub(crate) fn register(&self, cgroup: &Path, root: Option<u64>, now: u64) -> Result<Registered> {
        let id = fs::metadata(cgroup).map_err(|error| Error::io(format!("look at {}", cgroup.display()), error))?.ino();
        let level = level(cgroup)?;
        let mut maps = self.maps.lock();
        let index = maps
            .free
            .pop_first()
            .ok_or_else(|| Error::new(ErrorKind::Full, format!("{MOST_SANDBOXES} sandboxes are watched already")))?;
        let registered = Registered { index, cgroup: id, epoch: 1, root };
        let done = maps.begin(&registered, level, now);
        if done.is_err() {
            maps.free.insert(index);
        }
        done.map(|()| registered)
    }

    /// Stops to watch.
    pub(crate) fn unregister(&self, registered: &Registered) {
        let mut maps = self.maps.lock();
        // The same cgroup may be watched anew already.
        if maps.sandboxes.get(&registered.cgroup, 0).ok() == Some(registered.index) {
            let _ = maps.sandboxes.remove(&registered.cgroup);
        }
        if let Some(root) = registered.root
            && maps.roots.get(&root, 0).ok() == Some(registered.index)
        {
            let _ = maps.roots.remove(&root);
        }
        maps.free.insert(registered.index);
    }

    /// Whether changes of btrfs roots are noted.
    pub(crate) fn sees_btrfs(&self) -> bool {
        self.sees_btrfs
    }

    /// Begins a new interval and reads the earlier ones.
    pub(crate) fn read(&self, registered: &mut Registered, now: u64) -> Result<Reading, aya::maps::MapError> {
        let mut maps = self.maps.lock();
        let (index, old) = (registered.index, registered.epoch);
        let next = old + 1;
        maps.slots.set(place(index, next), Slot::empty(next, now), 0)?;
        maps.epochs.set(index, next, 0)?;
        registered.epoch = next;
        // A program that had read the old epoch may still write: its interval is read again the next times.
        let slots = (next.saturating_sub(SLOTS - 1).max(1)..next)
            .map(|epoch| maps.slots.get(&place(index, epoch), 0))
            .collect::<Result<Vec<_>, _>>()?;
        let mut reading = Reading { slots, running: Vec::new(), blind: false, outside: maps.outside.get(&0, 0)? };
        for cpu in maps.running.get(&0, 0)?.iter() {
            if cpu.sandbox == OnCpu::UNKNOWN.sandbox {
                reading.blind = true;
            } else if cpu.sandbox == index + 1 {
                reading.running.push((cpu.started, cpu.since));
            }
        }
        Ok(reading)
    }
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
            roots: HashMap::try_from(take("roots")?).map_err(wrong)?,
            outside: Array::try_from(take("outside")?).map_err(wrong)?,
            free: (0..MOST_SANDBOXES).collect(),
            used_levels: BTreeMap::new(),
        })
    }

    fn forget_what_runs(&mut self) -> Result<()> {
        let cpus = self.running.get(&0, 0).map_err(|error| failed("cannot read a BPF map", error))?.len();
        let unknown = PerCpuValues::try_from(vec![OnCpu::UNKNOWN; cpus])
            .map_err(|error| failed("cannot count the CPUs", error))?;
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
        if let Some(root) = registered.root {
            // Two file systems may number their subvolumes alike. Such a number stays shared for good.
            let owner = if self.roots.get(&root, 0).is_ok() { SHARED_ROOT } else { index };
            self.roots.insert(root, owner, 0).map_err(wrong)?;
        }
        self.sandboxes.insert(registered.cgroup, index, 0).map_err(wrong)
    }
}

/// A program that was tried.
pub(crate) struct Tried {
    pub(crate) program: &'static str,
    pub(crate) tracepoint: &'static str,
    /// Why it cannot be used.
    pub(crate) error: Option<Error>,
    /// Nothing can be told without it.
    pub(crate) needed: bool,
}

/// Tries each program alone.
pub(crate) fn try_programs() -> Result<Vec<Tried>> {
    let btf = Btf::from_sys_fs().map_err(|error| failed("cannot read the kernel's type information", error))?;
    let mut programs =
        EbpfLoader::new().btf(Some(&btf)).load(&OBJECT.0).map_err(|error| failed("cannot load the BPF maps", error))?;
    Ok(PROGRAMS
        .iter()
        .chain(&BTRFS_PROGRAMS)
        .map(|(name, tracepoint)| {
            let tried = attach(&mut programs, &btf, name, tracepoint);
            Tried {
                program: name,
                tracepoint,
                error: tried.err(),
                needed: PROGRAMS.iter().any(|(needed, _)| needed == name),
            }
        })
        .collect())
}

fn attach(programs: &mut Ebpf, btf: &Btf, name: &str, tracepoint: &str) -> Result<()> {
    let program: &mut BtfTracePoint = programs
        .program_mut(name)
        .ok_or_else(|| Error::new(ErrorKind::Internal, format!("there is no BPF program {name}")))?
        .try_into()
        .map_err(|error| failed("a BPF program is not what it should be", error))?;
    program.load(tracepoint, btf).map_err(|error| failed(&format!("cannot load the BPF program {name}"), error))?;
    program.attach().map_err(|error| failed(&format!("cannot attach to {tracepoint}"), error))?;
    Ok(())
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
