//! Which CRIU is used: found, of a version that can work on this kernel, and tried.

use std::collections::BTreeSet;
use std::fmt;
use std::io::Write;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use crab_core::{Error, ErrorKind, Result};
use rustix::process::{Pid, Signal};

use crate::area::Area;
use crate::failure::CriuFailure;
use crate::proto::{CGROUPS_IGNORE, Kind, NETWORK_LOCK_SKIP, Options};
use crate::swrk::Swrk;
use crate::sys::{self, Surroundings};
use crate::{files, procfs};

/// The first version that can leave the network unlocked.
const OLDEST: Version = Version { major: 3, minor: 18, sublevel: 0 };
/// Older ones cannot dump any TCP socket on kernels from [`NEW_KERNEL`] on.
const OLDEST_ON_NEW: Version = Version { major: 4, minor: 2, sublevel: 0 };
const NEW_KERNEL: (u32, u32) = (6, 16);
/// Where trials that succeeded are noted.
const TRIALS: &str = "self-test.json";
/// The tools that CRIU runs (`tar`, `ip`) are looked for here.
pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
const FIX: &str = "run `cargo xtask setup`, or install criu >= 4.2";
/// A version answer and a dump of two small processes take milliseconds.
const TRIAL_TIME: Duration = Duration::from_secs(30);

/// CRIU's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Version {
    major: u32,
    minor: u32,
    sublevel: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)?;
        if self.sublevel == 0 { Ok(()) } else { write!(f, ".{}", self.sublevel) }
    }
}

impl std::str::FromStr for Version {
    type Err = std::num::ParseIntError;

    fn from_str(text: &str) -> std::result::Result<Self, Self::Err> {
        let mut numbers = text.splitn(3, '.').map(str::parse);
        let mut next = || numbers.next().unwrap_or(Ok(0));
        Ok(Self { major: next()?, minor: next()?, sublevel: next()? })
    }
}

impl Version {
    /// Without the corrections, which change no format.
    pub(crate) fn release(self) -> (u32, u32) {
        (self.major, self.minor)
    }
}

/// A CRIU that works here.
#[derive(Clone, Debug)]
pub(crate) struct Program {
    pub(crate) path: PathBuf,
    pub(crate) version: Version,
}

/// Finds one: the configured one alone, else the first of `PATH` and of the private installation that works.
pub(crate) fn find(configured: Option<&Path>, area: &Arc<Area>) -> Result<Program> {
    if !rustix::process::geteuid().is_root() {
        return Err(Error::new(ErrorKind::Unsupported, "CRIU needs root").fix("run as root"));
    }
    let candidates = match configured {
        Some(path) => vec![path.to_owned()],
        None => candidates(),
    };
    let mut reasons = Vec::new();
    for path in candidates {
        match examine(&path, area) {
            Ok(program) => return Ok(program),
            Err(error) => {
                tracing::debug!(path = %path.display(), %error, "not this CRIU");
                reasons.push(format!("{}: {error}", path.display()));
            }
        }
    }
    if reasons.is_empty() {
        reasons.push(format!("there is none in PATH and none at {}", private().display()));
    }
    Err(Error::new(ErrorKind::Unsupported, format!("no usable CRIU was found ({})", reasons.join("; "))).fix(FIX))
}

/// The installation of `cargo xtask setup`.
fn private() -> PathBuf {
    let home = std::env::var_os("CRAB_HOME").filter(|home| !home.is_empty());
    home.map_or_else(|| PathBuf::from("/var/lib/crab"), PathBuf::from).join("criu/usr/sbin/criu")
}

fn candidates() -> Vec<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let installed = std::env::split_paths(&path).filter(|directory| directory.is_absolute()).map(|d| d.join("criu"));
    let mut seen = BTreeSet::new();
    installed.chain([private()]).filter(|path| path.is_file() && seen.insert(path.clone())).collect()
}

fn examine(path: &Path, area: &Arc<Area>) -> Result<Program> {
    let metadata = std::fs::metadata(path).map_err(|e| Error::io("look at it", e))?;
    if !metadata.is_file() || metadata.permissions().mode() & 0o111 == 0 {
        return Err(Error::new(ErrorKind::Unsupported, "it is no program"));
    }
    let version = ask_version(path)?;
    let release = kernel_release();
    suits(version, &release)?;
    let identity =
        format!("{} {} {}.{} {release}", path.display(), metadata.len(), metadata.mtime(), metadata.mtime_nsec());
    let trials = area.base().join(TRIALS);
    let mut noted: BTreeSet<String> =
        std::fs::read(&trials).ok().and_then(|text| serde_json::from_slice(&text).ok()).unwrap_or_default();
    if !noted.contains(&identity) {
        trial(path, area)?;
        noted.insert(identity);
        if let Err(error) = note(&trials, &noted) {
            tracing::debug!(%error, "the trial of CRIU could not be noted, and will be repeated");
        }
    }
    Ok(Program { path: path.to_owned(), version })
}

fn note(path: &Path, trials: &BTreeSet<String>) -> std::io::Result<()> {
    let temporary = path.with_extension(format!("tmp-{}", std::process::id()));
    let mut file = std::fs::File::options().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
    file.write_all(&serde_json::to_vec_pretty(trials)?)?;
    std::fs::rename(&temporary, path)
}

/// The kernel's release, as `uname -r` shows it.
pub(crate) fn kernel_release() -> String {
    rustix::system::uname().release().to_string_lossy().into_owned()
}

fn suits(version: Version, release: &str) -> Result<()> {
    let oldest = match kernel_version(release) {
        Some(kernel) if kernel < NEW_KERNEL => OLDEST,
        // A kernel that does not tell is taken for a new one.
        _ => OLDEST_ON_NEW,
    };
    if version >= oldest {
        return Ok(());
    }
    let what = format!("it is version {version}, and kernel {release} needs {oldest} or newer");
    Err(Error::new(ErrorKind::Unsupported, what))
}

fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

fn ask_version(path: &Path) -> Result<Version> {
    let what = "it was asked for its version";
    let failed = || Error::new(ErrorKind::Unsupported, "it does not tell its version");
    let swrk = Swrk::start(path, Surroundings::default(), Some(Instant::now() + TRIAL_TIME))?;
    swrk.ask(Kind::Version, None).map_err(|broken| broken.into_error(what))?;
    let answer = swrk.hear().map_err(|broken| broken.into_error(what))?.version.ok_or_else(failed)?;
    let number = |n: i32| u32::try_from(n).map_err(|_| failed());
    Ok(Version {
        major: number(answer.major)?,
        minor: number(answer.minor)?,
        sublevel: number(answer.sublevel.unwrap_or(0))?,
    })
}

/// The options that every run has.
pub(crate) fn common_options(images: i32, work: i32, log: &str) -> Options {
    Options {
        images_dir_fd: images,
        work_dir_fd: Some(work),
        log_file: Some(log.to_owned()),
        // Warnings: the reason for a failure is sometimes one.
        log_level: Some(2),
        file_locks: Some(true),
        manage_cgroups_mode: Some(CGROUPS_IGNORE),
        network_lock: Some(NETWORK_LOCK_SKIP),
        ..Options::default()
    }
}

/// Dumps small processes that hold a listening TCP socket, a pipe and a thread. `criu check` calls hosts fit that fail at
/// that.
fn trial(path: &Path, area: &Arc<Area>) -> Result<()> {
    use std::os::fd::AsRawFd;
    let io = |e| Error::io("prepare a trial dump", e);
    let scratch = area.directory()?;
    let subject = Subject::start(&scratch.work()).map_err(io)?;
    let images = files::open_directory(&scratch.images()).map_err(io)?;
    let work = files::open_directory(&scratch.work()).map_err(io)?;
    let surroundings = Surroundings { keep: vec![scratch.tie()?], ..Surroundings::default() };
    let swrk = Swrk::start(path, surroundings, Some(Instant::now() + TRIAL_TIME))?;
    let options = Options {
        pid: i32::try_from(subject.0.id()).ok(),
        leave_running: Some(true),
        ..common_options(images.as_raw_fd(), work.as_raw_fd(), "trial.log")
    };
    let what = "a trial dump of a process with a listening socket failed";
    let broken = |broken: crate::swrk::Broken| broken.into_error(what);
    swrk.ask(Kind::Dump, Some(options)).map_err(broken)?;
    let answer = swrk.hear().map_err(broken)?;
    let alive = procfs::Stat::read(subject.0.id()).is_some_and(|stat| !stat.is_dead());
    match (answer.success, alive) {
        (true, true) => Ok(()),
        (true, false) => Err(Error::new(ErrorKind::Unsupported, "a trial dump ended the process that it dumped")),
        (false, _) => {
            let log = std::fs::read(scratch.work().join("trial.log")).unwrap_or_default();
            let failure = CriuFailure::from_log(&String::from_utf8_lossy(&log));
            Err(Error::new(ErrorKind::Unsupported, what).caused_by(failure))
        }
    }
}

/// The processes of a trial: a shell and its children, in a session of their own. Dropping ends them.
struct Subject(Child);

impl Subject {
    /// `directory` is for a program.
    fn start(directory: &Path) -> std::io::Result<Self> {
        let listener = OwnedFd::from(TcpListener::bind("127.0.0.1:0")?);
        let threads = directory.join("threads");
        let mut file = std::fs::File::options().write(true).create_new(true).mode(0o700).open(&threads)?;
        file.write_all(&two_threads())?;
        drop(file);
        let mut command = Command::new("/bin/sh");
        command
            // Where nothing in that directory may be run, the trial goes without threads.
            .args(["-c", "sleep 60 | cat & \"$0\" & wait"])
            .arg(threads)
            .env_clear()
            .env("PATH", "/usr/bin:/bin")
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        let surroundings = Surroundings { keep: vec![listener], session: true, ..Surroundings::default() };
        let subject = sys::spawn(command, surroundings).map(Self)?;
        let patience = Instant::now() + Duration::from_secs(1);
        while !subject.has_threads() && cfg!(target_arch = "x86_64") && Instant::now() < patience {
            std::thread::sleep(Duration::from_millis(1));
        }
        Ok(subject)
    }

    fn has_threads(&self) -> bool {
        procfs::tree(self.0.id()).into_iter().any(|pid| procfs::status(pid, "Threads:").is_some_and(|n| n != "1"))
    }
}

/// A program that starts a thread and waits with it for ever: no tool that is on every machine does.
fn two_threads() -> Vec<u8> {
    /// Where it is loaded, and how long its headers are.
    const PLACE: u64 = 0x40_0000;
    const HEADERS: u64 = 64 + 56;
    let code: &[u8] = if cfg!(target_arch = "x86_64") {
        &[
            0xb8, 56, 0, 0, 0, // eax = clone
            0xbf, 0, 0x0f, 5, 0, // edi = CLONE_VM | FS | FILES | SIGHAND | THREAD | SYSVSEM
            0x48, 0x8d, 0xb4, 0x24, 0, 0xf0, 0xff, 0xff, // rsi = rsp - 4096
            0x31, 0xd2, 0x45, 0x31, 0xd2, 0x45, 0x31, 0xc0, // edx = r10 = r8 = 0
            0x0f, 0x05, // system call
            0xb8, 34, 0, 0, 0, // eax = pause
            0x0f, 0x05, // system call
            0xeb, 0xf7, // again
        ]
    } else {
        // Another machine's program does not start, and the trial goes without threads.
        &[]
    };
    let size = HEADERS + code.len() as u64;
    let mut program = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0\x01\0\0\0".to_vec();
    for word in [PLACE + HEADERS, 64, 0] {
        program.extend(word.to_le_bytes());
    }
    // No flags; 64 bytes of header; one entry of 56 bytes; no sections.
    program.extend([0, 0, 0, 0, 64, 0, 56, 0, 1, 0, 0, 0, 0, 0, 0, 0]);
    // To be loaded, read and run.
    program.extend([1, 0, 0, 0, 5, 0, 0, 0]);
    for word in [0, PLACE, PLACE, size, size, 4096] {
        program.extend(word.to_le_bytes());
    }
    program.extend(code);
    program
}

impl Drop for Subject {
    fn drop(&mut self) {
        // The child was not waited for yet, so its number is still that of its own session.
        if let Some(group) = i32::try_from(self.0.id()).ok().and_then(Pid::from_raw) {
            let _ = rustix::process::kill_process_group(group, Signal::KILL);
        }
        let _ = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(major: u32, minor: u32) -> Version {
        Version { major, minor, sublevel: 0 }
    }

    #[test]
    fn a_new_kernel_needs_a_new_criu() {
        assert!(suits(version(4, 1), "6.18.44-x").is_err());
        assert!(suits(version(4, 2), "6.18.44-x").is_ok());
        assert!(suits(version(4, 1), "6.12.1").is_ok());
        assert!(suits(version(3, 17), "6.1.0-13-amd64").is_err());
        assert!(suits(version(4, 1), "unknown").is_err());
        assert!(suits(version(4, 1), "7.0").is_err());
    }

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn the_trial_is_one_of_threads_too() {
        let directory = tempfile::tempdir().unwrap();
        assert!(Subject::start(directory.path()).unwrap().has_threads());
    }

    #[test]
    fn an_error_names_the_binary_and_what_to_run() {
        let base = tempfile::tempdir().unwrap();
        let area = Area::open(base.path()).unwrap();
        let error = find(Some(Path::new("/bin/true")), &area).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        let text = error.to_string();
        if rustix::process::geteuid().is_root() {
            assert!(text.contains("/bin/true") && text.contains("cargo xtask setup"), "{text}");
        }
    }
}
