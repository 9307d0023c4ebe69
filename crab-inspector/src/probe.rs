//! What this host offers to the inspector.

use std::fmt;
use std::os::unix::fs::FileExt;
use std::path::Path;

use crate::bpf::{self, FileSystem, Tried};

/// One thing that was tried.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Check {
    /// What was tried.
    pub what: String,
    /// Whether it works.
    pub works: bool,
    /// Whether [`Inspector`](crate::Inspector) cannot do without it. The rest makes it faster.
    pub needed: bool,
    /// What it gives where it works, or why it does not.
    pub detail: String,
    /// What to do where it does not.
    pub remedy: Option<String>,
}

/// What this host offers, tried out. Displays as a table.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Probe {
    /// All that was tried.
    pub checks: Vec<Check>,
}

impl Probe {
    /// Tries everything out. Takes half a second, most of it for reading the kernel's types.
    #[must_use]
    pub fn run() -> Self {
        let mut checks = vec![
            file("/sys/kernel/btf/vmlinux", "the kernel's types", "use a kernel with CONFIG_DEBUG_INFO_BTF"),
            cgroup2(),
        ];
        match bpf::try_programs() {
            Ok(tried) => {
                let told: Vec<Check> = FileSystem::ALL.iter().map(|what| told(*what, &tried)).collect();
                checks.extend(tried.into_iter().map(|tried| Check {
                    what: format!("BPF program {}", tried.program),
                    works: tried.error.is_none(),
                    needed: tried.only_for.is_none(),
                    detail: match tried.error {
                        None => match tried.only_for {
                            None => format!("on {}", tried.tracepoint),
                            Some(what) => format!("on {}, for {what}", tried.tracepoint),
                        },
                        Some(error) => error.to_string(),
                    },
                    remedy: None,
                }));
                checks.extend(told);
            }
            Err(error) => checks.push(Check {
                what: "BPF".to_owned(),
                works: false,
                needed: true,
                detail: error.to_string(),
                remedy: Some("run with CAP_BPF and CAP_PERFMON".to_owned()),
            }),
        }
        checks.extend(rights());
        checks.push(soft_dirty());
        Self { checks }
    }

    /// Whether [`Inspector`](crate::Inspector) can be used here. If not, [`PollingInspector`](crate::PollingInspector)
    /// can.
    #[must_use]
    pub fn works(&self) -> bool {
        self.checks.iter().all(|check| check.works || !check.needed)
    }
}

fn file(path: &str, what: &str, remedy: &str) -> Check {
    let works = Path::new(path).exists();
    Check {
        what: what.to_owned(),
        works,
        needed: true,
        detail: if works { path.to_owned() } else { format!("{path} is not there") },
        remedy: (!works).then(|| remedy.to_owned()),
    }
}

/// Whether turns on a file system that change nothing need no look at the files.
fn told(what: FileSystem, tried: &[Tried]) -> Check {
    let missing = tried.iter().find(|tried| tried.only_for == Some(what) && tried.error.is_some());
    Check {
        what: format!("changes to {what}"),
        works: missing.is_none(),
        needed: false,
        detail: match missing {
            None => "are told of, so that files are looked at only then".to_owned(),
            Some(missing) => format!("are not told of without {}: files are looked at each turn", missing.tracepoint),
        },
        remedy: missing.map(|_| format!("load the module of {what}, or use a kernel with it built in")),
    }
}

/// The rights that are used, and what for.
fn rights() -> Vec<Check> {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let held = status.lines().find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok());
    let has = |number: u32| held.unwrap_or(0) >> number & 1 == 1;
    const SYS_ADMIN: u32 = 21;
    [
        ("CAP_BPF", 39, true, "to load the programs"),
        ("CAP_PERFMON", 38, true, "to run them on tracepoints"),
        ("CAP_SYS_ADMIN", SYS_ADMIN, false, "to compare a btrfs subvolume with its snapshot"),
        ("CAP_SYS_PTRACE", 19, false, "to see what processes of other users hold"),
    ]
    .into_iter()
    .map(|(name, number, needed, purpose)| {
        // The older right stands in for the two that were split off from it.
        let works = has(number) || needed && has(SYS_ADMIN);
        Check {
            what: name.to_owned(),
            works,
            needed,
            detail: purpose.to_owned(),
            remedy: (!works).then(|| format!("run with {name}")),
        }
    })
    .collect()
}

/// Whether the kernel marks pages that are stored to, found by a store: where it is built without that, asking it to
/// begin succeeds all the same. No rule relies on it.
fn soft_dirty() -> Check {
    let found = store_shows();
    Check {
        what: "soft-dirty pages".to_owned(),
        works: matches!(found, Ok(true)),
        needed: false,
        detail: match found {
            Ok(true) => "a store shows; no rule relies on it".to_owned(),
            Ok(false) => "a store does not show, though asking for it succeeds; no rule relies on it".to_owned(),
            Err(error) => format!("cannot be tried: {error}; no rule relies on it"),
        },
        remedy: None,
    }
}

fn store_shows() -> std::io::Result<bool> {
    const PAGE: usize = 4096;
    let mut memory = vec![1u8; 4 * PAGE];
    let marked = |memory: &[u8], at: usize| -> std::io::Result<bool> {
        let page = (memory.as_ptr() as usize + at) / rustix::param::page_size();
        let mut entry = [0; 8];
        std::fs::File::open("/proc/self/pagemap")?.read_exact_at(&mut entry, page as u64 * 8)?;
        Ok(u64::from_ne_bytes(entry) >> 55 & 1 == 1)
    };
    std::fs::write("/proc/self/clear_refs", "4")?;
    let before = marked(&memory, PAGE)?;
    memory[PAGE] = std::hint::black_box(2);
    let after = marked(std::hint::black_box(&memory), PAGE)?;
    Ok(after && !before)
}

fn cgroup2() -> Check {
    let table = std::fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let at = table.lines().find(|line| line.contains(" - cgroup2 ")).and_then(|line| line.split(' ').nth(4));
    Check {
        what: "cgroup v2".to_owned(),
        works: at.is_some(),
        needed: true,
        detail: at.map_or_else(|| "is not mounted".to_owned(), |at| format!("at {at}")),
        remedy: at.is_none().then(|| "mount -t cgroup2 cgroup2 /sys/fs/cgroup/unified".to_owned()),
    }
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for check in &self.checks {
            let sign = if check.works { "yes" } else { "no " };
            write!(f, "{sign}  {:<24}  {}", check.what, check.detail)?;
            if let Some(remedy) = &check.remedy {
                write!(f, "; {remedy}")?;
            }
            writeln!(f)?;
        }
        let rule = if self.works() {
            "processes are judged by what they did (Inspector)"
        } else {
            "processes are judged by whether they ran (PollingInspector): coarser, and still sound"
        };
        writeln!(f, "{rule}")
    }
}
