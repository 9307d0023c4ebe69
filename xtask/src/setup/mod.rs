//! `cargo xtask setup`: makes a machine ready to run Crab's examples, tests and benchmarks.
//!
//! Everything lives under one prefix (`/var/lib/crab`, or `CRAB_HOME`). Each step first looks
//! whether its work is done, so running setup again is cheap and repairs what a killed run or a
//! reboot left undone. The host's apt sources and libc are never touched.

mod agents;
pub(crate) mod apt;
mod base;
mod browser;
mod criu;
mod host;
mod packages;
mod pool;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// The prefix that holds all that setup makes.
#[derive(Debug, Clone)]
pub(crate) struct Home(PathBuf);

impl Home {
    /// `CRAB_HOME`, or `/var/lib/crab`.
    pub(crate) fn from_environment() -> Self {
        match std::env::var_os("CRAB_HOME") {
            // Absolute: the paths end up in binaries and in other programs' environments.
            Some(path) if !path.is_empty() => Self(std::path::absolute(&path).unwrap_or_else(|_| path.into())),
            _ => Self("/var/lib/crab".into()),
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.0
    }

    pub(crate) fn criu(&self) -> PathBuf {
        self.0.join("criu")
    }

    pub(crate) fn criu_binary(&self) -> PathBuf {
        self.0.join("criu/usr/sbin/criu")
    }

    pub(crate) fn pool_image(&self) -> PathBuf {
        self.0.join("pool.img")
    }

    pub(crate) fn pool(&self) -> PathBuf {
        self.0.join("pool")
    }

    pub(crate) fn base(&self) -> PathBuf {
        self.0.join("pool/base")
    }
}

/// What the user is told, one line a step, and how much was found missing.
#[derive(Default)]
struct Report {
    missing: usize,
}

impl Report {
    fn present(&self, what: &str) {
        println!("setup: {what}: already there");
    }

    fn doing(&self, what: &str) {
        println!("setup: {what} ...");
    }

    fn note(&self, what: &str) {
        println!("setup: {what}");
    }

    /// Something that a run without `--check` makes, or that only the user can provide.
    fn missing(&mut self, what: &str, advice: &str) {
        self.missing += 1;
        println!("setup: {what}: MISSING. {advice}");
    }
}

/// What a step found when it looked.
enum Found {
    /// The work is done; the text says what is there.
    Ready(String),
    /// The work is to be done; the text says what will be made.
    Absent(String),
}

type Step = (fn(&Home) -> Result<Found, String>, fn(&Home, &Report) -> Result<(), String>);

/// In order: each step may use what the ones before it made.
const STEPS: &[Step] = &[
    (packages::look, packages::make),
    (criu::look, criu::make),
    (pool::look, pool::make),
    (base::look, base::make),
    (host::look_tracefs, host::make_tracefs),
    (host::look_bpffs, host::make_bpffs),
];

/// Only with `--agents`.
const AGENTS: &[Step] = &[(agents::look, agents::make)];

/// Only with `--browser`.
const BROWSER: &[Step] = &[(browser::look, browser::make)];

/// The command line of `cargo xtask setup`.
pub(crate) fn main(arguments: &[String]) -> Result<ExitCode, String> {
    let (mut check_only, mut steps) = (false, STEPS.to_vec());
    for argument in arguments {
        match argument.as_str() {
            "--check" => check_only = true,
            "--agents" => steps.extend(AGENTS),
            "--browser" => steps.extend(BROWSER),
            other => {
                let usage = "cargo xtask setup [--check] [--agents] [--browser]";
                return Err(format!("setup knows no `{other}`. Usage: {usage}"));
            }
        }
    }
    if check_only { check(&steps) } else { make(&steps).map(|()| ExitCode::SUCCESS) }
}

/// Makes whatever is missing of what every test needs.
pub(crate) fn install() -> Result<(), String> {
    make(STEPS)
}

fn make(steps: &[Step]) -> Result<(), String> {
    let home = Home::from_environment();
    let mut report = Report::default();
    host::require(&mut report);
    if report.missing > 0 {
        return Err("this machine cannot run Crab's sandboxes; see the MISSING lines".to_owned());
    }
    make_private_directory(home.path())?;
    let _lock = lock(&home)?;
    for (look, make) in steps {
        match look(&home)? {
            Found::Ready(what) => report.present(&what),
            Found::Absent(what) => {
                report.doing(&what);
                make(&home, &report)?;
                if let Found::Absent(what) = look(&home)? {
                    return Err(format!("{what}: made, but still not found; run setup again"));
                }
            }
        }
    }
    report.note(&format!("ready in {}", home.path().display()));
    Ok(())
}

fn check(steps: &[Step]) -> Result<ExitCode, String> {
    let home = Home::from_environment();
    let mut report = Report::default();
    host::require(&mut report);
    for (look, _) in steps {
        match look(&home) {
            Ok(Found::Ready(what)) => report.present(&what),
            Ok(Found::Absent(what)) => report.missing(&what, "`cargo xtask setup` makes it."),
            Err(message) => report.missing(&message, "`cargo xtask setup` may repair it."),
        }
    }
    if report.missing == 0 {
        report.note("nothing is missing");
        return Ok(ExitCode::SUCCESS);
    }
    report.note(&format!("{} things are missing", report.missing));
    Ok(ExitCode::from(1))
}

/// One setup at a time: the lock goes with the process, so a killed run blocks nobody.
fn lock(home: &Home) -> Result<std::fs::File, String> {
    let path = home.path().join("setup.lock");
    let file = std::fs::File::create(&path).map_err(|error| format!("cannot create {}: {error}", path.display()))?;
    if file.try_lock().is_err() {
        println!("setup: another setup is running; waiting for it");
        file.lock().map_err(|error| format!("cannot lock {}: {error}", path.display()))?;
    }
    Ok(file)
}

/// A directory that only root may enter: process images and roots hold secrets.
fn make_private_directory(path: &Path) -> Result<(), String> {
    use std::os::unix::fs::PermissionsExt;
    let failed = |error: std::io::Error| {
        format!("cannot make {}: {error}. Point CRAB_HOME at a place that root can write", path.display())
    };
    std::fs::create_dir_all(path).map_err(failed)?;
    std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700)).map_err(failed)
}

fn remove_tree(path: &Path) -> Result<(), String> {
    match std::fs::remove_dir_all(path) {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(format!("cannot remove {}: {error}", path.display())),
    }
}

fn write(path: &Path, text: &str) -> Result<(), String> {
    std::fs::write(path, text).map_err(|error| format!("cannot write {}: {error}", path.display()))
}
