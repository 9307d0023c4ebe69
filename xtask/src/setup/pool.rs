//! The embedded default store: a btrfs in a sparse file, mounted by loop device.

use super::{Found, Home, Report, host, make_private_directory};
use crate::command;

const GIB: u64 = 1 << 30;
/// The file's apparent size where the disk has room for it.
const WANTED: u64 = 16 * GIB;
/// The base root filesystem and a few snapshots fit in this.
const LEAST: u64 = 3 * GIB;
/// What is left to the rest of the disk.
const SPARE: u64 = 2 * GIB;

pub(super) fn look(home: &Home) -> Result<Found, String> {
    let what = format!("btrfs pool at {}", home.pool().display());
    let target = home.pool().display().to_string();
    let mount = host::mounts().into_iter().rev().find(|mount| mount.target == target);
    match mount {
        Some(mount) if mount.kind == "btrfs" => Ok(Found::Ready(what)),
        Some(mount) => Err(format!(
            "{target} holds a mounted {}, not btrfs; unmount it or set CRAB_HOME to another place",
            mount.kind
        )),
        None => Ok(Found::Absent(what)),
    }
}

pub(super) fn make(home: &Home, report: &Report) -> Result<(), String> {
    let image = home.pool_image();
    if !image.exists() {
        make_image(home, report)?;
    }
    make_private_directory(&home.pool())?;
    command::run(command::system("mount").args(["-t", "btrfs", "-o", "loop,noatime"]).arg(&image).arg(home.pool()))
        .map_err(|message| {
            format!(
                "{message}\nThe pool needs a free loop device and a whole {}. If the file is damaged \
             and nothing in it matters, remove it and run setup again",
                image.display()
            )
        })?;
    make_private_directory(&home.pool())
}

/// Formats a temporary file and renames it: a killed setup never leaves half a pool.
fn make_image(home: &Home, report: &Report) -> Result<(), String> {
    let free = free_bytes(home)?;
    let size = WANTED.min(free.saturating_sub(SPARE) / GIB * GIB);
    if size < LEAST {
        return Err(format!(
            "the disk under {} has {} MiB free; the pool needs {} MiB and leaves {} MiB to others. \
             Free some space or set CRAB_HOME to a larger disk",
            home.path().display(),
            free >> 20,
            LEAST >> 20,
            SPARE >> 20
        ));
    }
    let image = home.pool_image();
    let temporary = image.with_extension("new");
    let failed = |error: std::io::Error| format!("cannot make {}: {error}", temporary.display());
    let file = {
        use std::os::unix::fs::OpenOptionsExt;
        std::fs::OpenOptions::new()
            .write(true)
            .create(true)
            .truncate(true)
            .mode(0o600)
            .open(&temporary)
            .map_err(failed)?
    };
    file.set_len(size).map_err(failed)?;
    report.note(&format!("formatting a sparse file of {} GiB", size / GIB));
    // One copy of metadata: the file's own disk is no safer with two.
    command::run(
        command::system("mkfs.btrfs")
            .args(["-q", "-f", "-L", "crab-pool", "-m", "single", "-d", "single"])
            .arg(&temporary),
    )?;
    file.sync_all().map_err(failed)?;
    std::fs::rename(&temporary, &image).map_err(failed)
}

fn free_bytes(home: &Home) -> Result<u64, String> {
    let text = command::output(command::system("df").args(["--output=avail", "-B1"]).arg(home.path()))?;
    text.lines()
        .nth(1)
        .and_then(|line| line.trim().parse().ok())
        .ok_or_else(|| format!("cannot read the free space from df's answer: {text:?}"))
}
