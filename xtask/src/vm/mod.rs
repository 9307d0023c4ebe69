//! `cargo xtask vm`: a virtual machine for the tests that need another kernel than the host's.
//!
//! Its kernel has what Debian's has: ZFS as a module, btrfs, soft-dirty pages, BPF with fentry and LSM. It runs under
//! QEMU's own emulation, so it needs no hardware support and works inside other virtual machines; it is 15 to 70 times
//! slower than the host. Nothing is compiled in it: the tests are built on the host and run there in one boot.

mod bench;
mod boot;
mod build;
mod image;
mod suite;

use std::path::PathBuf;
use std::process::ExitCode;

pub(crate) use suite::run as run_suites;

const USAGE: &str = "\
Usage: cargo xtask vm test [--filter TEXT] [--image PATH]
       cargo xtask vm bench NAME [--json FILE] [--image PATH]
       cargo xtask vm build [--image PATH]

test runs the tests that need the virtual machine, all of them in one boot; with --filter, only those whose
PACKAGE/PROGRAM, as it is printed, holds TEXT or one of several between commas, or whose own name holds TEXT. With
CRAB_STRESS=full the stress is as large there as on the host, which takes much longer. bench runs one bench there. build
makes its image where it is missing.

The image is a directory, or a packed one (.tar.zst) to be unpacked to CRAB_HOME/vm. It is the one that --image or
CRAB_VM names, else CRAB_HOME/vm, else ../shared/vm/pack.tar.zst beside this project where that exists, else it is
built from Debian's packages, which takes 6 to 15 minutes, once.
";

/// The command line.
pub(crate) fn main(arguments: &[String]) -> Result<ExitCode, String> {
    let (task, rest) = arguments.split_first().ok_or(USAGE)?;
    let (mut filter, mut image, mut json) = (None, None, None);
    let (name, rest) = match rest.split_first() {
        Some((name, rest)) if task == "bench" => (name.as_str(), rest),
        _ => ("", rest),
    };
    let mut rest = rest.iter();
    while let Some(argument) = rest.next() {
        let value = rest.next().ok_or_else(|| format!("{argument} needs a value\n\n{USAGE}"))?;
        match argument.as_str() {
            "--filter" if task == "test" => filter = Some(value.clone()),
            "--json" if task == "bench" => json = Some(PathBuf::from(value)),
            "--image" => image = Some(PathBuf::from(value)),
            _ => return Err(format!("vm knows no `{argument}`\n\n{USAGE}")),
        }
    }
    match task.as_str() {
        "build" => image::ready(image).map(|_| ExitCode::SUCCESS),
        "bench" => {
            let is_good = bench::run(&image::ready(image)?, name, json.as_deref())?;
            Ok(if is_good { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        "test" => {
            let outcome = suite::run(&image::ready(image)?, filter.as_deref())?;
            outcome.print();
            Ok(if outcome.is_good() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
        }
        _ => Err(USAGE.to_owned()),
    }
}

/// The image, made ready where it is not. The error says why there is none.
pub(crate) fn image() -> Result<image::Image, String> {
    image::ready(None)
}
