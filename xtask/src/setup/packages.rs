//! The few Debian packages that setup and the sandboxes need on the host.

use super::{Found, Home, Report};
use crate::command;

/// A tool and the package that brings it.
const TOOLS: &[(&str, &str)] = &[
    ("mkfs.btrfs", "btrfs-progs"),
    ("mkfs.xfs", "xfsprogs"),
    ("mmdebstrap", "mmdebstrap"),
    ("patchelf", "patchelf"),
    ("mount", "mount"),
    ("unshare", "util-linux"),
    ("ip", "iproute2"),
    ("gcc", "gcc"),
    ("dpkg-deb", "dpkg"),
    ("runc", "runc"),
];

const KEYRING: (&str, &str) = (super::apt::KEYRING, "debian-archive-keyring");
/// The static libc that the sandboxes' init is linked with.
const LIBC: (&str, &str) = ("/usr/lib/x86_64-linux-gnu/libc.a", "libc6-dev");

fn absent() -> Vec<&'static str> {
    let mut absent: Vec<&str> =
        TOOLS.iter().filter(|(tool, _)| command::find(tool).is_none()).map(|(_, package)| *package).collect();
    for (file, package) in [KEYRING, LIBC] {
        if !std::path::Path::new(file).exists() {
            absent.push(package);
        }
    }
    absent
}

pub(super) fn look(_: &Home) -> Result<Found, String> {
    let absent = absent();
    Ok(if absent.is_empty() {
        Found::Ready("host packages".to_owned())
    } else {
        Found::Absent(format!("host packages {}", absent.join(", ")))
    })
}

pub(super) fn make(_: &Home, report: &Report) -> Result<(), String> {
    install(&absent(), report)
}

/// Installs Debian packages that are not there.
pub(super) fn install(packages: &[&str], report: &Report) -> Result<(), String> {
    if command::find("apt-get").is_none() {
        return Err(format!(
            "this is no Debian-like system (no apt-get): install the tools of {} by hand, then run setup again",
            packages.join(", ")
        ));
    }
    let advice = |message: String| format!("{message}\nInstall {} by hand, then run setup again", packages.join(", "));
    report.note("reading the package lists (apt-get update)");
    command::run(command::system("apt-get").args(["update", "-q"])).map_err(advice)?;
    // --no-upgrade and --no-remove: what the host has stays as it is.
    command::run(
        command::system("apt-get")
            .args(["install", "-q", "-y", "--no-install-recommends", "--no-upgrade", "--no-remove"])
            .args(packages),
    )
    .map_err(advice)
}
