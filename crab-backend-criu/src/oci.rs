//! CRIU through an OCI runtime: for hosts that keep their sandboxes as containers of `runc`.
//!
//! The runtime starts CRIU, so we do not talk to it ourselves. What we want of it stands in a configuration file, which
//! goes before what the runtime asks for; and CRIU runs a script at each of its steps, which asks us over a pair of
//! fifos and waits for the answer.

use std::fs::File;
use std::io::{Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use crab_core::{Error, ErrorKind, External, Result, Sandbox, SandboxId};
use rustix::event::{PollFd, PollFlags};
use rustix::fs::{FileType, Mode};
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags};

use crate::area::Scratch;
use crate::cgroup::timespec;
use crate::proto::{Kind, Notify, Options, Response, RestoreResponse};
use crate::swrk::{Broken, Swrk};
use crate::sys::{self, Surroundings};
use crate::{files, program};

/// The steps of CRIU that we want to hear of.
const STEPS: &str = "pre-dump|post-dump|post-restore|pre-resume";
const HOOK: &str = "hook";
const ASKS: &str = "asks";
const ANSWERS: &str = "answers";
const PID: &str = "pid";
/// `O_NONBLOCK`.
const NONBLOCK: i32 = 0o4000;
/// The runtime gets this long to end after CRIU.
const GRACE: Duration = Duration::from_secs(10);

/// An OCI runtime whose containers are the sandboxes: `runc`, from 1.1 on.
///
/// A sandbox's name is its container's. Its bundle is the directory of that name in [`bundles`](Self::bundles), and its
/// `config.json` has these two:
/// - `"org.criu.config"` among the annotations: the path `<images>/.oci/<name>.conf`, where images is what
///   [`CriuBuilder::images`](crate::CriuBuilder::images) got. The backend writes the file before each use.
/// - `linux.cgroupsPath`: the sandbox's cgroup is that path in the hierarchy of cgroup v2.
///
/// Its network namespace, where it has one, is named there by its path: one that the runtime makes comes back with its
/// devices down.
///
/// Before a restore the host deletes the container of the name (`runc delete --force`), as a part of killing the sandbox.
/// The runtime gives standard streams and namespaces by itself: nothing but a network namespace that the `config.json`
/// names may be [declared](crab_core::External).
#[derive(Clone, Debug)]
pub struct OciRuntime {
    program: PathBuf,
    state: PathBuf,
    bundles: PathBuf,
}

impl OciRuntime {
    /// A runtime by its program, the directory of its state (`--root`), and the directory of the bundles.
    #[must_use]
    pub fn new(program: impl Into<PathBuf>, state: impl Into<PathBuf>, bundles: impl Into<PathBuf>) -> Self {
        Self { program: program.into(), state: state.into(), bundles: bundles.into() }
    }

    /// The directory of the bundles.
    #[must_use]
    pub fn bundles(&self) -> &Path {
        &self.bundles
    }
}

/// A runtime that is used, and where its CRIU finds its configuration.
#[derive(Debug)]
pub(crate) struct Oci {
    runtime: OciRuntime,
    criu: PathBuf,
    configurations: PathBuf,
}

impl Oci {
    /// Looks at the runtime. Configurations go below `images`.
    pub(crate) fn new(runtime: OciRuntime, criu: &Path, images: &Path) -> Result<Self> {
        let version = Command::new(&runtime.program).arg("--version").stdin(Stdio::null()).output();
        let works = version.as_ref().is_ok_and(|output| output.status.success());
        if !works {
            let what = format!("{} is no OCI runtime that works", runtime.program.display());
            let error = Error::new(ErrorKind::Unsupported, what).fix("install runc (`apt-get install runc`)");
            return Err(match version {
                Ok(_) => error,
                Err(source) => error.caused_by(source),
            });
        }
        let configurations = images.join(".oci");
        files::private_directory(&configurations)?;
        Ok(Self { runtime, criu: criu.to_owned(), configurations })
    }

    /// Refuses what the runtime would not give again.
    pub(crate) fn suits(external: &[External]) -> Result<()> {
        match external.iter().find(|external| !matches!(external, External::NetworkNamespace { .. })) {
            Some(external) => {
                let what = format!("an OCI runtime cannot give {} again", external.key());
                Err(Error::new(ErrorKind::NotCheckpointable, what).fix("give the container nothing of that kind"))
            }
            None => Ok(()),
        }
    }

    pub(crate) fn dump(
        &self,
        sandbox: &Sandbox,
        scratch: &Scratch,
        options: &Options,
        deadline: Option<Instant>,
    ) -> Result<Runtime> {
        let mut command = self.command("checkpoint", &sandbox.id, scratch);
        command.arg("--leave-running").arg(sandbox.id.as_str());
        self.start(command, &sandbox.id, scratch, options, deadline)
    }

    pub(crate) fn restore(
        &self,
        sandbox: &Sandbox,
        scratch: &Scratch,
        options: &Options,
        deadline: Option<Instant>,
    ) -> Result<Runtime> {
        let mut command = self.command("restore", &sandbox.id, scratch);
        command.arg("--detach").arg("--bundle").arg(self.runtime.bundles.join(sandbox.id.as_str()));
        command.arg("--pid-file").arg(scratch.work().join(PID)).arg(sandbox.id.as_str());
        self.start(command, &sandbox.id, scratch, options, deadline)
    }

    /// Forgets a container of which a restore failed.
    pub(crate) fn forget(&self, id: &SandboxId) {
        let mut command = Command::new(&self.runtime.program);
        command.arg("--root").arg(&self.runtime.state).args(["delete", "--force"]).arg(id.as_str());
        let done = command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status();
        if !done.as_ref().is_ok_and(ExitStatus::success) {
            tracing::debug!(?done, container = %id, "there was nothing for the runtime to forget");
        }
    }

    fn command(&self, what: &str, id: &SandboxId, scratch: &Scratch) -> Command {
        let mut command = Command::new(&self.runtime.program);
        command.arg("--root").arg(&self.runtime.state).arg("--criu").arg(&self.criu).arg(what);
        command.arg("--image-path").arg(scratch.images()).arg("--work-path").arg(scratch.work());
        tracing::debug!(container = %id, what, "the OCI runtime is asked");
        command
    }

    fn start(
        &self,
        mut command: Command,
        id: &SandboxId,
        scratch: &Scratch,
        options: &Options,
        deadline: Option<Instant>,
    ) -> Result<Runtime> {
        let work = scratch.work();
        let failed = |e: std::io::Error| Error::io(format!("start {}", self.runtime.program.display()), e);
        let fifo = |name: &str| {
            let path = work.join(name);
            rustix::fs::mknodat(rustix::fs::CWD, &path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?;
            // For both ways, so that opening it waits for nobody.
            File::options().read(true).write(true).custom_flags(NONBLOCK).open(path)
        };
        let (asks, answers) = (fifo(ASKS).map_err(failed)?, fifo(ANSWERS).map_err(failed)?);
        let hook = work.join(HOOK);
        let configuration = self.configurations.join(format!("{id}.conf"));
        let write = || {
            let mut file = files::create(&hook)?;
            file.write_all(hook_text(&work)?.as_bytes())?;
            file.set_permissions(std::fs::Permissions::from_mode(0o700))?;
            // A script that is still open for writing cannot be run.
            drop(file);
            let fresh = configuration.with_extension("new");
            let _ = std::fs::remove_file(&fresh);
            files::create(&fresh)?.write_all(configuration_text(options, &hook)?.as_bytes())?;
            std::fs::rename(&fresh, &configuration)
        };
        write().map_err(failed)?;
        // Its own messages say nothing that the log of CRIU does not, but for those before CRIU runs.
        let messages = files::create(&work.join("runtime.log")).map_err(failed)?;
        command
            .env_clear()
            .env("PATH", program::PATH)
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::from(messages));
        // Its CRIU inherits it too.
        let surroundings = Surroundings { keep: vec![scratch.tie()?], ..Surroundings::default() };
        let mut child = sys::spawn(command, surroundings).map_err(failed)?;
        let end = i32::try_from(child.id()).ok().and_then(Pid::from_raw).ok_or(Errno::SRCH);
        match end.and_then(|pid| rustix::process::pidfd_open(pid, PidfdFlags::empty())) {
            Ok(end) => Ok(Runtime { child, end, asks, answers, heard: Vec::new(), pid: work.join(PID), deadline }),
            Err(error) => {
                let _ = child.kill();
                let _ = child.wait();
                Err(failed(error.into()))
            }
        }
    }
}

/// Answers for a caller who has died: its script, which would wait for ever, is told that all has failed. The answers
/// are there while what is returned is kept.
pub(crate) fn refuse(work: &Path) -> Vec<File> {
    // For both ways: a script that opens its end waits for nobody.
    let open = |name: &str| File::options().read(true).write(true).custom_flags(NONBLOCK).open(work.join(name));
    let Ok(mut answers) = open(ANSWERS) else { return Vec::new() };
    // For more steps than there are.
    let _ = answers.write_all("no\n".repeat(16).as_bytes());
    open(ASKS).into_iter().chain([answers]).collect()
}

/// A path as a shell and CRIU's configuration take it.
fn plain(path: &Path) -> std::io::Result<&str> {
    let text =
        path.to_str().filter(|text| !text.chars().any(|c| c.is_whitespace() || c.is_control() || "'\"\\#".contains(c)));
    text.ok_or_else(|| {
        std::io::Error::new(std::io::ErrorKind::InvalidInput, format!("{} has unusual letters in it", path.display()))
    })
}

fn hook_text(work: &Path) -> std::io::Result<String> {
    let work = plain(work)?;
    Ok(format!(
        "#!/bin/sh\ncase \"$CRTOOLS_SCRIPT_ACTION\" in {STEPS}) ;; *) exit 0;; esac\n\
         echo \"$CRTOOLS_SCRIPT_ACTION ${{CRTOOLS_INIT_PID:-0}}\" > '{work}/{ASKS}'\n\
         read -r answer < '{work}/{ANSWERS}' && [ \"$answer\" = yes ]\n"
    ))
}

/// The options that the runtime does not set, or sets otherwise.
fn configuration_text(options: &Options, hook: &Path) -> std::io::Result<String> {
    let mut lines = vec!["network-lock skip".to_owned(), "manage-cgroups ignore".to_owned()];
    lines.push(format!("action-script {}", plain(hook)?));
    for (set, name) in [
        (options.file_locks, "file-locks"),
        (options.tcp_established, "tcp-established"),
        (options.tcp_close, "tcp-close"),
        (options.tcp_skip_in_flight, "skip-in-flight"),
        (options.auto_dedup, "auto-dedup"),
    ] {
        if set == Some(true) {
            lines.push(name.to_owned());
        }
    }
    if let Some(limit) = options.ghost_limit {
        lines.push(format!("ghost-limit {limit}"));
    }
    if let Some(seconds) = options.timeout {
        lines.push(format!("timeout {seconds}"));
    }
    if let Some(cgroup) = &options.freeze_cgroup {
        lines.push(format!("freeze-cgroup {}", plain(Path::new(cgroup))?));
    }
    lines.push(String::new());
    Ok(lines.join("\n"))
}

/// A runtime at work. Dropping it kills it.
#[derive(Debug)]
pub(crate) struct Runtime {
    child: Child,
    end: OwnedFd,
    asks: File,
    answers: File,
    heard: Vec<u8>,
    pid: PathBuf,
    deadline: Option<Instant>,
}

impl Runtime {
    fn hear(&mut self) -> Result<Response, Broken> {
        loop {
            if let Some(notify) = self.next() {
                return Ok(Response {
                    kind: Kind::Notify.into(),
                    success: true,
                    notify: Some(notify),
                    ..Response::default()
                });
            }
            let left = self.deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Err(Broken::TimedOut);
            }
            let mut wanted = [PollFd::new(&self.asks, PollFlags::IN), PollFd::new(&self.end, PollFlags::IN)];
            match rustix::event::poll(&mut wanted, left.map(timespec).as_ref()) {
                Ok(0) | Err(Errno::INTR) => continue,
                Ok(_) => {}
                Err(error) => return Err(Broken::Io(error.into())),
            }
            if wanted[0].revents().is_empty() {
                let status = self.child.wait().map_err(Broken::Io)?;
                let init = std::fs::read_to_string(&self.pid).ok().and_then(|text| text.trim().parse().ok());
                let restore = init.map(|pid| RestoreResponse { pid });
                return Ok(Response { success: status.success(), restore, ..Response::default() });
            }
            let mut buffer = [0; 256];
            match self.asks.read(&mut buffer) {
                Ok(count) => self.heard.extend_from_slice(buffer.get(..count).unwrap_or_default()),
                Err(e) if matches!(e.kind(), std::io::ErrorKind::WouldBlock | std::io::ErrorKind::Interrupted) => {}
                Err(error) => return Err(Broken::Io(error)),
            }
        }
    }

    /// A line of the hook: the step, and init's number.
    fn next(&mut self) -> Option<Notify> {
        let end = self.heard.iter().position(|byte| *byte == b'\n')?;
        let line: Vec<u8> = self.heard.drain(..=end).collect();
        let line = String::from_utf8_lossy(&line);
        let (step, init) = line.trim().split_once(' ')?;
        Some(Notify { script: Some(step.to_owned()), pid: init.parse().ok().filter(|pid| *pid > 0) })
    }
}

impl Drop for Runtime {
    fn drop(&mut self) {
        // Both do nothing to a child that was waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// CRIU at work for us: our own, or a runtime's.
#[derive(Debug)]
pub(crate) enum Run {
    Own(Swrk),
    Runtime(Runtime),
}

impl Run {
    pub(crate) fn ask(&self, kind: Kind, options: Options) -> Result<(), Broken> {
        match self {
            Self::Own(swrk) => swrk.ask(kind, Some(options)),
            // It was told when it was started.
            Self::Runtime(_) => Ok(()),
        }
    }

    pub(crate) fn hear(&mut self) -> Result<Response, Broken> {
        match self {
            Self::Own(swrk) => swrk.hear(),
            Self::Runtime(runtime) => runtime.hear(),
        }
    }

    pub(crate) fn answer(&mut self, success: bool) -> Result<(), Broken> {
        match self {
            Self::Own(swrk) => swrk.answer(success),
            Self::Runtime(runtime) => {
                if !success {
                    runtime.deadline = runtime.deadline.map(|deadline| deadline.max(Instant::now() + GRACE));
                }
                let answer: &[u8] = if success { b"yes\n" } else { b"no\n" };
                runtime.answers.write_all(answer).map_err(Broken::Io)
            }
        }
    }

    pub(crate) fn give_grace(&mut self) {
        match self {
            Self::Own(swrk) => swrk.give_grace(),
            Self::Runtime(runtime) => {
                runtime.deadline = runtime.deadline.map(|deadline| deadline.max(Instant::now() + GRACE));
            }
        }
    }

    pub(crate) fn finish(self) -> std::io::Result<ExitStatus> {
        match self {
            Self::Own(swrk) => swrk.finish(),
            Self::Runtime(mut runtime) => runtime.child.wait(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_script_whose_caller_has_died_does_not_wait_for_ever() {
        let work = tempfile::tempdir().unwrap();
        let work = work.path();
        for name in [ASKS, ANSWERS] {
            rustix::fs::mknodat(rustix::fs::CWD, work.join(name), FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        }
        let script = |step: &str| {
            let mut command = Command::new("/bin/sh");
            command.arg("-c").arg(hook_text(work).unwrap()).env("CRTOOLS_SCRIPT_ACTION", step).spawn().unwrap()
        };
        let mut waiting = script("pre-dump");
        let refused = refuse(work);
        assert!(!waiting.wait().unwrap().success());
        assert!(!script("post-restore").wait().unwrap().success(), "one that comes later");
        assert!(script("setup-namespaces").wait().unwrap().success(), "one that asks nothing");
        drop(refused);
        assert!(refuse(&work.join("nothing")).is_empty());
    }

    #[test]
    fn the_configuration_says_what_the_runtime_does_not() {
        let options = Options {
            file_locks: Some(true),
            tcp_close: Some(false),
            ghost_limit: Some(5),
            freeze_cgroup: Some("/sys/fs/cgroup/x".into()),
            ..Options::default()
        };
        let text = configuration_text(&options, Path::new("/run/hook")).unwrap();
        assert_eq!(
            text,
            "network-lock skip\nmanage-cgroups ignore\naction-script /run/hook\nfile-locks\nghost-limit 5\n\
             freeze-cgroup /sys/fs/cgroup/x\n"
        );
        assert!(configuration_text(&options, Path::new("/run/a hook\nexec-cmd x")).is_err());
    }
}
