//! Real file systems, cgroups and processes for tests. All of them go away when their guard is dropped.
#![allow(dead_code, clippy::unwrap_used, clippy::expect_used)]

use std::fs;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use crab_core::{Change, Delta, Rebase, Sandbox, SandboxId, StateDelta};
pub use futures_executor::block_on;

/// Runs a command and panics with what it said where it fails.
pub fn run(command: &str, arguments: &[&dyn AsRef<std::ffi::OsStr>]) -> String {
    let output = Command::new(command)
        .args(arguments.iter().map(|a| a.as_ref()))
        .output()
        .unwrap_or_else(|error| panic!("{command}: {error}"));
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{command}: {said}{}", String::from_utf8_lossy(&output.stderr));
    said
}

/// Runs a line of shell in a folder.
pub fn shell(folder: &Path, line: &str) -> String {
    let output = Command::new("sh").arg("-ec").arg(line).current_dir(folder).output().unwrap();
    assert!(
        output.status.success(),
        "{line}: {}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}

pub fn has(tool: &str) -> bool {
    Command::new("sh")
        .args(["-c", &format!("command -v {tool} >/dev/null")])
        .status()
        .is_ok_and(|status| status.success())
}

/// Whether this test can run: root, and the tools. Says what is skipped where not.
pub fn able(tools: &[&str]) -> bool {
    if !rustix_root() {
        println!("skipped: root");
        return false;
    }
    for tool in tools {
        if !has(tool) {
            println!("skipped: {}", tool.trim_start_matches("mkfs."));
            return false;
        }
    }
    true
}

fn rustix_root() -> bool {
    fs::read_to_string("/proc/self/status").is_ok_and(|status| {
        status.lines().any(|line| line.starts_with("Uid:") && line.split_whitespace().nth(2) == Some("0"))
    })
}

static COUNT: AtomicU32 = AtomicU32::new(0);

fn unique() -> String {
    format!("{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::Relaxed))
}

/// A file system in a file, mounted.
pub struct Image {
    folder: PathBuf,
    pub path: PathBuf,
}

impl Image {
    pub fn new(kind: &str) -> Self {
        let folder = std::env::temp_dir().join(format!("crab-inspector-{}", unique()));
        let path = folder.join("mount");
        fs::create_dir_all(&path).unwrap();
        if kind == "tmpfs" {
            run("mount", &[&"-o", &"size=256m,noatime", &"-t", &kind, &kind, &path]);
            return Self { folder, path };
        }
        let image = folder.join("image");
        fs::File::create(&image).unwrap().set_len(512 << 20).unwrap();
        let this = Self { folder, path };
        match kind {
            // Else the kernel writes the rest of it in the background, for minutes where all is slow.
            "ext4" => run("mkfs.ext4", &[&"-q", &"-E", &"lazy_itable_init=0,lazy_journal_init=0", &image]),
            _ => run(&format!("mkfs.{kind}"), &[&"-q", &image]),
        };
        run("mount", &[&"-o", &"loop,noatime", &"-t", &kind, &image, &this.path]);
        this
    }
}

impl Drop for Image {
    fn drop(&mut self) {
        let until = Instant::now() + Duration::from_secs(5);
        while !Command::new("umount")
            .arg(&self.path)
            .stderr(Stdio::null())
            .status()
            .is_ok_and(|status| status.success())
            && Instant::now() < until
        {
            std::thread::sleep(Duration::from_millis(50));
        }
        let _ = fs::remove_file(self.folder.join("image"));
        let _ = fs::remove_dir(&self.path);
        let _ = fs::remove_dir_all(self.folder.join("trees"));
        let _ = fs::remove_dir(&self.folder);
    }
}

/// A cgroup of its own below the test's.
pub struct Cgroup {
    pub path: PathBuf,
}

impl Cgroup {
    /// `None` where cgroup v2 is not mounted.
    pub fn new() -> Self {
        let top = fs::read_to_string("/proc/self/mountinfo")
            .unwrap()
            .lines()
            .find(|line| line.contains(" - cgroup2 "))
            .and_then(|line| line.split(' ').nth(4).map(PathBuf::from))
            .expect("cgroup v2 is mounted");
        let path = top.join(format!("crab-inspector-{}", unique()));
        fs::create_dir(&path).unwrap();
        Self { path }
    }

    pub fn freeze(&self, frozen: bool) {
        let value = if frozen { "1" } else { "0" };
        fs::write(self.path.join("cgroup.freeze"), value).unwrap();
        let wanted = format!("frozen {value}");
        wait("the cgroup to freeze or thaw", || {
            fs::read_to_string(self.path.join("cgroup.events")).unwrap().contains(&wanted)
        });
    }

    /// A command that starts in this cgroup: the shell that moves itself in becomes it.
    pub fn command(&self, line: &str) -> Command {
        let mut command = Command::new("sh");
        let enter = format!("echo $$ > {}/cgroup.procs; {line}", self.path.display());
        command.args(["-c", &enter]);
        command
    }

    /// Runs a line of shell in this cgroup to its end.
    pub fn run(&self, folder: &Path, line: &str) -> String {
        let output = self.command(line).current_dir(folder).output().unwrap();
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{line}: {said}{}", String::from_utf8_lossy(&output.stderr));
        said
    }
}

impl Drop for Cgroup {
    fn drop(&mut self) {
        let _ = fs::write(self.path.join("cgroup.freeze"), "0");
        let _ = fs::write(self.path.join("cgroup.kill"), "1");
        let until = Instant::now() + Duration::from_secs(5);
        while Instant::now() < until {
            if let Ok(children) = fs::read_dir(&self.path) {
                for child in children.flatten() {
                    if child.path().is_dir() {
                        let _ = fs::remove_dir(child.path());
                    }
                }
            }
            if fs::remove_dir(&self.path).is_ok() {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A process that answers on its pipes; killed when dropped.
pub struct Live {
    pub child: Child,
}

impl Live {
    pub fn start(mut command: Command, folder: &Path) -> Self {
        let child = command.current_dir(folder).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        Self { child }
    }

    pub fn say(&mut self, line: &str) {
        let input = self.child.stdin.as_mut().unwrap();
        writeln!(input, "{line}").unwrap();
    }

    /// Reads one line that it says.
    pub fn hear(&mut self) -> String {
        use std::io::Read as _;
        let output = self.child.stdout.as_mut().unwrap();
        let mut line = Vec::new();
        let mut byte = [0];
        while output.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {
            line.push(byte[0]);
        }
        String::from_utf8(line).unwrap()
    }
}

impl Drop for Live {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Waits until something is so.
pub fn wait(what: &str, mut so: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(10);
    while !so() {
        assert!(Instant::now() < until, "waited too long for {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// What a sandbox's root is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Subvolume,
    Ext4,
    Xfs,
    Tmpfs,
    /// An overlay, both of whose folders lie on ext4.
    Overlay,
}

impl Kind {
    pub fn file_system(self) -> &'static str {
        match self {
            Self::Subvolume => "btrfs",
            Self::Ext4 | Self::Overlay => "ext4",
            Self::Xfs => "xfs",
            Self::Tmpfs => "tmpfs",
        }
    }
}

/// An overlay that is unmounted when dropped.
struct Mounted(PathBuf);

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg("-l").arg(&self.0).status();
    }
}

/// A sandbox, watched.
pub struct Bench<D> {
    pub inspector: D,
    pub sandbox: Sandbox,
    pub root: PathBuf,
    pub kind: Kind,
    snapshots: u32,
    pub cgroup: Cgroup,
    overlay: Option<Mounted>,
    // Last, so that it is unmounted when nothing uses it.
    pub image: Image,
}

impl<D: StateDelta> Bench<D> {
    pub fn new(inspector: D) -> Self {
        Self::on(Kind::Subvolume, inspector)
    }

    pub fn on(kind: Kind, inspector: D) -> Self {
        let image = Image::new(kind.file_system());
        let cgroup = Cgroup::new();
        let root = image.path.join("root");
        let mut overlay = None;
        match kind {
            Kind::Subvolume => drop(run("btrfs", &[&"-q", &"subvolume", &"create", &root])),
            Kind::Overlay => {
                shell(
                    &image.path,
                    "mkdir root lower upper work
                    mount -t overlay overlay -o lowerdir=$PWD/lower,upperdir=$PWD/upper,workdir=$PWD/work root",
                );
                overlay = Some(Mounted(root.clone()));
            }
            Kind::Ext4 | Kind::Xfs | Kind::Tmpfs => fs::create_dir(&root).unwrap(),
        }
        let sandbox = Sandbox::new(SandboxId::new("box").unwrap(), &root, &cgroup.path);
        block_on(inspector.attach(&sandbox)).unwrap();
        Self { inspector, sandbox, root, kind, snapshots: 0, cgroup, overlay, image }
    }

    pub fn take(&self) -> Delta {
        block_on(self.inspector.take(&self.sandbox.id))
    }

    /// Makes a version of both domains, as an engine does.
    pub fn version(&mut self) {
        self.cgroup.freeze(true);
        let token = self.take().token;
        let tree = self.snapshot();
        self.cgroup.freeze(false);
        self.rebase(token, true, true, Some(tree));
    }

    /// Makes a version of the files alone.
    pub fn files_version(&mut self) {
        let tree = self.snapshot();
        let token = self.take().token;
        self.rebase(token, true, false, Some(tree));
    }

    pub fn rebase(&self, token: crab_core::Token, filesystem: bool, process: bool, tree: Option<PathBuf>) {
        let base = Rebase { token, filesystem, process, tree };
        block_on(self.inspector.rebase(&self.sandbox.id, &base));
    }

    pub fn snapshot(&mut self) -> PathBuf {
        self.snapshots += 1;
        if self.kind != Kind::Subvolume {
            // The old one goes: only the last is compared with.
            let trees = self.image.folder.join("trees");
            let _ = fs::remove_dir_all(trees.join(format!("v{}", self.snapshots.saturating_sub(2))));
            fs::create_dir_all(&trees).unwrap();
            let tree = trees.join(format!("v{}", self.snapshots));
            run("cp", &[&"-a", &self.root, &tree]);
            return tree;
        }
        let tree = self.image.path.join(format!("v{}", self.snapshots));
        run("btrfs", &[&"-q", &"subvolume", &"snapshot", &"-r", &self.root, &tree]);
        tree
    }

    pub fn sh(&self, line: &str) -> String {
        self.cgroup.run(&self.root, line)
    }
}

#[track_caller]
pub fn assert_unchanged(change: &Change, what: &str) {
    assert_eq!(*change, Change::Unchanged, "{what}");
}

#[track_caller]
pub fn assert_changed(change: &Change, what: &str) {
    assert!(matches!(change, Change::Changed(_)), "{what}: {change} is not changed");
}
