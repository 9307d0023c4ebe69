//! The root filesystem that sandboxes start from: a small Debian in a btrfs subvolume.

use std::path::{Path, PathBuf};

use super::{Found, Home, Report, apt, write};
use crate::command;

/// Raise it when the recipe below changes in a way that its texts do not show.
const RECIPE: u32 = 1;
const SUITE: &str = "bookworm";
/// What agents' tools need: an interpreter, a compiler, a database, a terminal multiplexer.
const PACKAGES: &[&str] = &[
    "bash",
    "ca-certificates",
    "gcc",
    "git",
    "iproute2",
    "less",
    "libc6-dev",
    "make",
    "procps",
    "python3",
    "sqlite3",
    "strace",
    "tmux",
    "util-linux",
];
/// Kept as files, so that a sandbox without network can install a package.
const OFFLINE_PACKAGES: &[&str] = &["hello", "tree"];
/// Pid 1 of every sandbox.
const INIT_SOURCE: &str = include_str!("../../../examples/src/sandbox/init.c");
const STAMP: &str = "etc/crab-recipe";

pub(super) fn look(home: &Home) -> Result<Found, String> {
    let base = home.base();
    let what = format!("base root filesystem at {}", base.display());
    match std::fs::read_to_string(base.join(STAMP)) {
        Ok(stamp) if stamp.trim() == recipe() => Ok(Found::Ready(what)),
        Ok(_) => Ok(Found::Absent(format!("{what}, by a newer recipe"))),
        Err(_) => Ok(Found::Absent(what)),
    }
}

/// Builds beside the final place and renames: what is at the final place is always whole.
pub(super) fn make(home: &Home, report: &Report) -> Result<(), String> {
    let pool = home.pool();
    let new = pool.join("base.new");
    delete_subvolume(&new)?;
    command::run(btrfs(["subvolume", "create"]).arg(&new))?;
    let outcome = build(home, &new, report);
    if let Err(message) = outcome {
        // The build's own error matters more than a failure to tidy up after it.
        let _ = delete_subvolume(&new);
        return Err(message);
    }
    command::run(btrfs(["filesystem", "sync"]).arg(&pool))?;
    let base = home.base();
    let old = pool.join("base.old");
    delete_subvolume(&old)?;
    rename_if_there(&base, &old)?;
    rename_if_there(&new, &base)?;
    delete_subvolume(&old)
}

fn build(home: &Home, root: &Path, report: &Report) -> Result<(), String> {
    report.note(&format!("unpacking Debian {SUITE} (a minute or two)"));
    let init = compile_init(home)?;
    let hook = format!(
        "mkdir -p \"$1/opt/debs\" && cd \"$1/opt/debs\" && \
         APT_CONFIG=\"$MMDEBSTRAP_APT_CONFIG\" apt-get -q download {}",
        OFFLINE_PACKAGES.join(" ")
    );
    let mut command = command::system("mmdebstrap");
    command
        .args(["--mode=root", "--variant=minbase", "--quiet"])
        .arg(format!("--include={}", PACKAGES.join(",")))
        .arg(format!("--keyring={}", apt::KEYRING))
        .arg("--aptopt=Acquire::Retries \"3\"")
        // No documentation, no translations: 100 MB that no agent reads.
        .arg("--dpkgopt=path-exclude=/usr/share/doc/*")
        .arg("--dpkgopt=path-exclude=/usr/share/man/*")
        .arg("--dpkgopt=path-exclude=/usr/share/locale/*")
        .arg(format!("--customize-hook={hook}"))
        .arg("--skip=cleanup/tmp");
    for option in apt::transport_options() {
        command.arg(format!("--aptopt={}", option.trim_end_matches(';')));
    }
    command::run(command.arg(SUITE).arg(root).arg(apt::mirror()?)).map_err(|message| {
        format!("{message}\nThe sandboxes' root needs the Debian mirror of this system's apt sources")
    })?;
    report.note("adding init, devices and mount points");
    for file in ["etc/apt/apt.conf.d/99mmdebstrap", "etc/machine-id", "var/lib/dbus/machine-id"] {
        remove_file(&root.join(file))?;
    }
    for directory in ["proc", "sys", "dev/pts", "dev/shm", "run", "tmp", "root", "workspace"] {
        let path = root.join(directory);
        std::fs::create_dir_all(&path).map_err(|error| format!("cannot make {}: {error}", path.display()))?;
    }
    copy(&init, &root.join("sbin/crab-init"))?;
    remove_file(&init)?;
    make_devices(root)?;
    write(&root.join("etc/hostname"), "sandbox\n")?;
    write(&root.join("etc/hosts"), "127.0.0.1 localhost sandbox\n::1 localhost\n")?;
    write(&root.join("etc/resolv.conf"), "# a sandbox has no outside network\n")?;
    // Settings that the first run of a tool would otherwise write for itself.
    write(
        &root.join("root/.gitconfig"),
        "[user]\n\tname = Agent\n\temail = agent@sandbox.invalid\n[init]\n\tdefaultBranch = main\n",
    )?;
    // Last: a root without it is unfinished.
    write(&root.join(STAMP), &format!("{}\n", recipe()))
}

/// The devices are nodes of the root itself, so that CRIU has no outside mount to be told about.
fn make_devices(root: &Path) -> Result<(), String> {
    let dev = root.join("dev");
    for (name, major, minor) in [
        ("null", "1", "3"),
        ("zero", "1", "5"),
        ("full", "1", "7"),
        ("random", "1", "8"),
        ("urandom", "1", "9"),
        ("tty", "5", "0"),
    ] {
        let node = dev.join(name);
        remove_file(&node)?;
        command::run(command::system("mknod").args(["-m", "666"]).arg(&node).args(["c", major, minor]))?;
    }
    for (name, target) in [
        ("ptmx", "pts/ptmx"),
        ("fd", "/proc/self/fd"),
        ("stdin", "/proc/self/fd/0"),
        ("stdout", "/proc/self/fd/1"),
        ("stderr", "/proc/self/fd/2"),
    ] {
        let link = dev.join(name);
        remove_file(&link)?;
        std::os::unix::fs::symlink(target, &link)
            .map_err(|error| format!("cannot make {}: {error}", link.display()))?;
    }
    Ok(())
}

/// Static, so that it needs nothing of the root it runs in.
fn compile_init(home: &Home) -> Result<PathBuf, String> {
    let source = home.path().join("crab-init.c");
    let binary = home.path().join("crab-init");
    write(&source, INIT_SOURCE)?;
    command::run(
        command::system("gcc")
            .args(["-std=gnu11", "-O2", "-Wall", "-Wextra", "-Werror", "-static", "-s", "-o"])
            .arg(&binary)
            .arg(&source),
    )?;
    remove_file(&source)?;
    Ok(binary)
}

/// What the finished root is recognised by: all that goes into it, in one number.
fn recipe() -> String {
    let parts = [SUITE, &PACKAGES.join(" "), &OFFLINE_PACKAGES.join(" "), INIT_SOURCE].join("\0");
    format!("{RECIPE}-{:016x}", fnv1a(parts.as_bytes()))
}

fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

fn btrfs<const N: usize>(arguments: [&str; N]) -> std::process::Command {
    let mut command = command::system("btrfs");
    command.args(arguments);
    command
}

fn delete_subvolume(path: &Path) -> Result<(), String> {
    if !path.exists() {
        return Ok(());
    }
    command::run(btrfs(["subvolume", "delete"]).arg(path))
}

fn rename_if_there(from: &Path, to: &Path) -> Result<(), String> {
    if !from.exists() {
        return Ok(());
    }
    std::fs::rename(from, to).map_err(|error| format!("cannot rename {} to {}: {error}", from.display(), to.display()))
}

fn remove_file(path: &Path) -> Result<(), String> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("cannot remove {}: {error}", path.display()))
        }
        _ => Ok(()),
    }
}

fn copy(from: &Path, to: &Path) -> Result<(), String> {
    std::fs::copy(from, to)
        .map(drop)
        .map_err(|error| format!("cannot copy {} to {}: {error}", from.display(), to.display()))
}
