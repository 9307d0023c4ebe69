//! Freeze, thaw and kill by cgroup v2, for hosts to delegate to.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crab_core::{Condition, Error, ErrorKind, Result, SandboxId};

/// One cgroup v2 directory. A handle, not an owner: nothing happens when it is dropped.
///
/// The calls write to the kernel's files directly (microseconds) and wait without blocking the thread.
///
/// ```no_run
/// # async fn example() -> crab_core::Result<()> {
/// use crab_engine::CgroupV2;
///
/// let cgroup = CgroupV2::below_mount("sandboxes/box-1")?;
/// cgroup.freeze().await?;
/// cgroup.thaw().await?;
/// # Ok(()) }
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CgroupV2 {
    path: PathBuf,
    patience: Duration,
}

/// How long a freeze or kill may take before it counts as failed. A task in uninterruptible sleep delays both.
const PATIENCE: Duration = Duration::from_secs(10);

impl CgroupV2 {
    /// A cgroup by its directory in the host's filesystem.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), patience: PATIENCE }
    }

    /// A cgroup by its path below the place where cgroup v2 is mounted, such as `sandboxes/box-1`.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where cgroup v2 is not mounted, [`ErrorKind::InvalidInput`] where the path leaves
    /// the mount.
    pub fn below_mount(relative: impl AsRef<Path>) -> Result<Self> {
        let relative = relative.as_ref();
        let normal = |part: std::path::Component<'_>| matches!(part, std::path::Component::Normal(_));
        if !relative.components().all(normal) {
            let message = format!("{} is no path below the cgroup mount", relative.display());
            return Err(Error::new(ErrorKind::InvalidInput, message));
        }
        Ok(Self::new(Self::mount()?.join(relative)))
    }

    /// The same with another time after which a freeze or kill counts as failed; 10 s by default.
    #[must_use]
    pub fn with_patience(mut self, patience: Duration) -> Self {
        self.patience = patience;
        self
    }

    /// Where cgroup v2 is mounted: `/sys/fs/cgroup` on a unified host, often `/sys/fs/cgroup/unified` on a hybrid one.
    ///
    /// # Errors
    /// [`ErrorKind::Unsupported`] where it is not mounted.
    pub fn mount() -> Result<PathBuf> {
        let path = "/proc/self/mountinfo";
        let text = fs::read_to_string(path).map_err(|source| Error::io(format!("read {path}"), source))?;
        find_mount(&text).ok_or_else(|| {
            Error::new(ErrorKind::Unsupported, "cgroup v2 is not mounted")
                .fix("mount it: mount -t cgroup2 none /sys/fs/cgroup")
        })
    }

    /// Its directory.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The condition of its tasks, those in child cgroups too. A cgroup that does not exist is
    /// [`Condition::Stopped`].
    ///
    /// # Errors
    /// Where the kernel's answer cannot be read.
    pub fn condition(&self) -> Result<Condition> {
        Ok(match self.events()? {
            Some(Events { populated: true, frozen: true }) => Condition::Frozen,
            Some(Events { populated: true, frozen: false }) => Condition::Running,
            Some(Events { populated: false, .. }) | None => Condition::Stopped,
        })
    }

    /// Whether it has tasks, itself or in a child cgroup.
    ///
    /// # Errors
    /// Where the kernel's answer cannot be read.
    pub fn populated(&self) -> Result<bool> {
        Ok(self.events()?.is_some_and(|events| events.populated))
    }

    /// Stops all tasks and returns when all have stopped. Tasks that come later are stopped too, until the thaw.
    /// Dropping the future may leave it frozen: thaw it.
    ///
    /// # Errors
    /// [`ErrorKind::NotFound`] where the cgroup does not exist, [`ErrorKind::TimedOut`] where a task does not stop in
    /// time. It is thawed again then; the error says so, or says that this failed.
    pub async fn freeze(&self) -> Result<()> {
        self.write("cgroup.freeze", "1")?;
        let frozen = self.wait(|events| events.is_none_or(|events| events.frozen)).await;
        let error = match frozen {
            Ok(true) => return Ok(()),
            Ok(false) => Error::new(
                ErrorKind::TimedOut,
                format!("tasks of {} did not stop within {:?}", self.path.display(), self.patience),
            ),
            Err(error) => error,
        };
        Err(match self.write("cgroup.freeze", "0") {
            Ok(()) => error.condition(Condition::Running),
            Err(_) => error.condition(Condition::Frozen),
        })
    }

    /// Lets all tasks run again. Does nothing where it is not frozen or does not exist.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] where the kernel does not report the thaw in time, for example because a parent cgroup
    /// is frozen.
    pub async fn thaw(&self) -> Result<()> {
        match self.write("cgroup.freeze", "0") {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            other => other?,
        }
        if self.wait(|events| events.is_none_or(|events| !events.frozen)).await? {
            return Ok(());
        }
        Err(Error::new(ErrorKind::TimedOut, format!("{} stays frozen", self.path.display()))
            .fix("thaw the cgroup above it")
            .condition(Condition::Frozen))
    }

    /// Ends all tasks, frozen ones too, and returns when none is left. Does nothing where it does not exist.
    ///
    /// # Errors
    /// [`ErrorKind::TimedOut`] where a task does not end in time.
    pub async fn kill(&self) -> Result<()> {
        match self.write("cgroup.kill", "1") {
            Err(error) if error.kind() == ErrorKind::NotFound && !self.path.exists() => return Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Err(Error::new(ErrorKind::Unsupported, "this kernel has no cgroup.kill")
                    .fix("use a kernel from 5.14 on")
                    .caused_by(error));
            }
            other => other?,
        }
        if self.wait(|events| events.is_none_or(|events| !events.populated)).await? {
            return Ok(());
        }
        Err(Error::new(
            ErrorKind::TimedOut,
            format!("tasks of {} did not end within {:?}", self.path.display(), self.patience),
        ))
    }

    fn write(&self, file: &str, text: &str) -> Result<()> {
        let path = self.path.join(file);
        // Opened without create: in a cgroup that is gone nothing must be made.
        let mut options = fs::OpenOptions::new();
        let written =
            options.write(true).open(&path).and_then(|mut file| io::Write::write_all(&mut file, text.as_bytes()));
        written.map_err(|source| vanished(&path, source))
    }

    fn events(&self) -> Result<Option<Events>> {
        let path = self.path.join("cgroup.events");
        match fs::read_to_string(&path) {
            Ok(text) => Ok(Some(Events::parse(&text))),
            Err(source) => match vanished(&path, source) {
                error if error.kind() == ErrorKind::NotFound => Ok(None),
                error => Err(error),
            },
        }
    }

    /// Waits until the events are as wanted. `false` where that did not come in time.
    async fn wait(&self, done: impl Fn(Option<Events>) -> bool) -> Result<bool> {
        let begun = Instant::now();
        // Most freezes end within a fraction of a millisecond: look a few times before sleeping.
        let mut looks = 0u32;
        loop {
            if done(self.events()?) {
                return Ok(true);
            }
            if begun.elapsed() > self.patience {
                return Ok(false);
            }
            looks += 1;
            if looks < 20 {
                tokio::task::yield_now().await;
            } else {
                tokio::time::sleep(Duration::from_millis(u64::from(looks / 20).min(10))).await;
            }
        }
    }

    /// A name for a sandbox's cgroup that is safe below any parent.
    #[must_use]
    pub fn of_sandbox(parent: &Path, id: &SandboxId) -> Self {
        Self::new(parent.join(id.as_str()))
    }
}

/// A cgroup that vanishes while its file is open answers ENODEV.
fn vanished(path: &Path, source: io::Error) -> Error {
    const ENODEV: i32 = 19;
    if source.raw_os_error() == Some(ENODEV) {
        return Error::new(ErrorKind::NotFound, format!("the cgroup of {} is gone", path.display())).caused_by(source);
    }
    Error::io(format!("access {}", path.display()), source)
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Events {
    populated: bool,
    frozen: bool,
}

impl Events {
    fn parse(text: &str) -> Self {
        let has = |wanted: &str| text.lines().any(|line| line.trim() == wanted);
        Self { populated: has("populated 1"), frozen: has("frozen 1") }
    }
}

/// Finds cgroup v2 in the text of `mountinfo`; the first mount whose root is the hierarchy's own.
fn find_mount(mountinfo: &str) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (before, after) = line.split_once(" - ")?;
        let mut fields = before.split(' ').skip(3);
        let (_root, point) = (fields.next()?, fields.next()?);
        (after.split(' ').next()? == "cgroup2").then(|| PathBuf::from(unescape(point)))
    })
}

/// The kernel writes space, tab, newline and backslash as three octal digits.
fn unescape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('\\') {
        out.push_str(&rest[..at]);
        let code = rest.get(at + 1..at + 4).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                out.push(char::from(code));
                rest = &rest[at + 4..];
            }
            None => {
                out.push('\\');
                rest = &rest[at + 1..];
            }
        }
    }
    out.push_str(rest);
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mount_is_found_on_unified_and_hybrid_hosts() {
        let unified = "29 23 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(find_mount(unified), Some("/sys/fs/cgroup".into()));
        let hybrid = "\
            30 24 0:26 / /sys/fs/cgroup ro,nosuid shared:9 - tmpfs tmpfs ro,mode=755\n\
            31 30 0:27 / /sys/fs/cgroup/unified rw shared:10 - cgroup2 cgroup2 rw\n\
            32 30 0:28 / /sys/fs/cgroup/memory rw shared:11 - cgroup cgroup rw,memory\n";
        assert_eq!(find_mount(hybrid), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(find_mount("31 30 0:27 / /a\\040b rw - cgroup2 x rw\n"), Some("/a b".into()));
        assert_eq!(find_mount("garbage\n\n - \n"), None);
    }

    #[test]
    fn events_are_read_in_any_order_and_with_unknown_lines() {
        assert_eq!(Events::parse("populated 1\nfrozen 0\n"), Events { populated: true, frozen: false });
        assert_eq!(Events::parse("new 7\nfrozen 1\npopulated 0\n"), Events { populated: false, frozen: true });
        assert_eq!(Events::parse(""), Events::default());
    }

    #[tokio::test]
    async fn a_cgroup_that_is_gone_is_stopped_and_cannot_be_frozen() {
        let cgroup = CgroupV2::new("/proc/no/such/cgroup");
        assert_eq!(cgroup.condition().unwrap(), Condition::Stopped);
        assert!(!cgroup.populated().unwrap());
        assert_eq!(cgroup.freeze().await.unwrap_err().kind(), ErrorKind::NotFound);
        cgroup.thaw().await.unwrap();
        cgroup.kill().await.unwrap();
        for bad in ["../x", "/etc", "a/../b"] {
            assert_eq!(CgroupV2::below_mount(bad).unwrap_err().kind(), ErrorKind::InvalidInput, "{bad}");
        }
    }

    /// With privileges only; elsewhere there is nothing to test it on.
    #[tokio::test]
    async fn real_tasks_stop_run_again_and_end() {
        let Ok(mount) = CgroupV2::mount() else { return };
        let path = mount.join(format!("crab-engine-test-{}", std::process::id()));
        if fs::create_dir(&path).is_err() {
            eprintln!("skipped: cannot make cgroups here");
            return;
        }
        let child_path = path.join("child");
        fs::create_dir(&child_path).unwrap();
        let mut sleeper = std::process::Command::new("sleep").arg("1000").spawn().unwrap();
        fs::write(child_path.join("cgroup.procs"), sleeper.id().to_string()).unwrap();
        let cgroup = CgroupV2::new(&path);
        assert_eq!(cgroup.condition().unwrap(), Condition::Running);
        cgroup.freeze().await.unwrap();
        cgroup.freeze().await.unwrap();
        assert_eq!(cgroup.condition().unwrap(), Condition::Frozen);
        cgroup.thaw().await.unwrap();
        assert_eq!(cgroup.condition().unwrap(), Condition::Running);
        cgroup.freeze().await.unwrap();
        let reaper = std::thread::spawn(move || sleeper.wait());
        cgroup.kill().await.unwrap();
        reaper.join().unwrap().unwrap();
        assert_eq!(cgroup.condition().unwrap(), Condition::Stopped);
        // A frozen cgroup without tasks thaws too.
        cgroup.freeze().await.unwrap();
        assert_eq!(cgroup.condition().unwrap(), Condition::Stopped);
        cgroup.thaw().await.unwrap();
        fs::remove_dir(child_path).unwrap();
        fs::remove_dir(path).unwrap();
    }
}
