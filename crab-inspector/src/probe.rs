//! What this host offers to the inspector.

use std::fmt;
use std::path::Path;

use crate::bpf;

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
            Ok(tried) => checks.extend(tried.into_iter().map(|tried| Check {
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
            })),
            Err(error) => checks.push(Check {
                what: "BPF".to_owned(),
                works: false,
                needed: true,
                detail: error.to_string(),
                remedy: Some("run with CAP_BPF and CAP_PERFMON".to_owned()),
            }),
        }
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
