//! A CRIU of our own: recent enough, with its own C library, beside the system's.
//!
//! Debian stable's CRIU is too old for current kernels, and installing a newer suite's would
//! replace the system's libc. So its packages are unpacked into a private root and the binary is
//! pointed at the C library in there.

use std::path::Path;

use super::{Found, Home, Report, apt, remove_tree, write};
use crate::command;

/// Older ones cannot dump inet sockets on kernels from 6.16 on.
const OLDEST: (u32, u32) = (4, 2);
/// The Debian suite that has it.
const SUITE: &str = "forky";
const LIBRARIES: &str = "usr/lib/x86_64-linux-gnu";
const STAMP: &str = "crab-criu-version";

pub(super) fn look(home: &Home) -> Result<Found, String> {
    let stamp = std::fs::read_to_string(home.criu().join(STAMP)).unwrap_or_default();
    let stamp = stamp.trim();
    // The stamp is written last; the binary is asked too, as somebody may have removed it.
    if !stamp.is_empty() && version(home.criu_binary().as_path()).is_ok_and(|now| now == stamp) {
        return Ok(Found::Ready(format!("CRIU {stamp} at {}", home.criu_binary().display())));
    }
    Ok(Found::Absent(format!("CRIU {}.{} or newer in {}", OLDEST.0, OLDEST.1, home.criu().display())))
}

pub(super) fn make(home: &Home, report: &Report) -> Result<(), String> {
    let advice = |message: String| {
        format!(
            "{message}\nCRIU saves and restores the processes. If the mirror cannot be reached, \
             unpack a CRIU {}.{} or newer into {} yourself and write its version to {STAMP} there",
            OLDEST.0,
            OLDEST.1,
            home.criu().display()
        )
    };
    let mirror = apt::mirror()?;
    // The binary holds absolute paths of this directory: it is built in place, stamp last.
    let target = home.criu();
    let scratch = home.path().join("criu-download");
    remove_tree(&target)?;
    remove_tree(&scratch)?;
    std::fs::create_dir_all(&target).map_err(|error| format!("cannot make {}: {error}", target.display()))?;
    report.note(&format!("fetching CRIU from Debian {SUITE}, into a private root"));
    let packages =
        apt::PrivateApt::new(&scratch, &mirror, SUITE).and_then(|apt| apt.download("criu")).map_err(advice)?;
    for package in &packages {
        command::run(command::system("dpkg-deb").arg("-x").arg(package).arg(&target))?;
    }
    remove_tree(&scratch)?;
    let binary = home.criu_binary();
    let libraries = target.join(LIBRARIES);
    command::run(
        command::system("patchelf")
            .arg("--set-interpreter")
            .arg(libraries.join("ld-linux-x86-64.so.2"))
            .arg("--set-rpath")
            .arg(&libraries)
            .arg("--force-rpath")
            .arg(&binary),
    )?;
    let version = version(&binary)?;
    if number(&version).is_none_or(|found| found < OLDEST) {
        return Err(advice(format!("Debian {SUITE} has CRIU {version}, which is too old")));
    }
    write(&target.join(STAMP), &format!("{version}\n"))?;
    report.note(&format!("CRIU {version}: {} packages unpacked", packages.len()));
    Ok(())
}

fn version(binary: &Path) -> Result<String, String> {
    let text = command::output(std::process::Command::new(binary).arg("--version"))?;
    text.lines()
        .find_map(|line| line.strip_prefix("Version:"))
        .map(|version| version.trim().to_owned())
        .ok_or_else(|| format!("{} does not say its version", binary.display()))
}

fn number(version: &str) -> Option<(u32, u32)> {
    let mut numbers = version.split('.').map_while(|part| part.parse().ok());
    Some((numbers.next()?, numbers.next()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_compare_as_numbers() {
        assert!(number("4.10.1").unwrap() > OLDEST);
        assert!(number("4.2").unwrap() >= OLDEST);
        assert!(number("3.17.1").unwrap() < OLDEST);
        assert_eq!(number("git"), None);
    }
}
