//! One boot of the virtual machine.

use std::ffi::OsString;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::image::{Image, virtiofsd};
use crate::command;
use crate::setup::Home;

/// The guest's memory in MiB. Pools and images of its tests live in it.
const MEMORY: u32 = 3584;

/// Makes the guest ready for sandboxes; the program [`INIT`] must be in its share.
pub(super) const SANDBOXES: &str = include_str!("sandboxes.sh");
/// The same with ZFS in the place of btrfs; [`BASE`] must be in its share. What is told by [`ON_ZFS`] finds them.
pub(super) const ZFS_SANDBOXES: &str = include_str!("zfs.sh");
/// The root filesystem of the host's sandboxes, as an archive.
pub(super) const BASE: &str = "base.tar";
/// The environment of what runs on those.
pub(super) const ON_ZFS: &str = "CRAB_HOME=/tmp/crab-zfs";
/// The first process of every sandbox.
pub(super) const INIT: &str = "crab-init";

/// Where it is here, and its name in the share.
pub(super) fn init() -> Result<(PathBuf, String), String> {
    let path = Home::from_environment().base().join("sbin").join(INIT);
    match path.is_file() {
        true => Ok((path, INIT.to_owned())),
        false => Err(format!("{} is not there: run `cargo xtask setup` first", path.display())),
    }
}

/// Packs the root filesystem of the host's sandboxes into a share.
pub(super) fn pack_base(share: &Path) -> Result<(), String> {
    let base = Home::from_environment().base();
    command::run(command::system("tar").arg("-C").arg(&base).arg("-cf").arg(share.join(BASE)).arg("."))
        .map_err(|message| format!("{message}\n(is {} there? `cargo xtask setup` makes it)", base.display()))
}

/// A process that ends when this is dropped.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Runs `share/run` in the guest, where the directory is writable at /mnt/share, and hands every line that it prints to
/// `on_line`. Gives its exit code.
///
/// Emulated, so that it runs anywhere; `CRAB_VM_ACCEL` names another way to QEMU, such as `kvm`.
pub(super) fn boot(image: &Image, share: &Path, limit: Duration, mut on_line: impl FnMut(&str)) -> Result<i32, String> {
    let sockets = share.with_extension("sockets");
    super::image::remove(&sockets)?;
    std::fs::create_dir_all(&sockets).map_err(|error| format!("cannot make {}: {error}", sockets.display()))?;
    let ended = share.join("ended");
    let _ = std::fs::remove_file(&ended);
    let root = serve(&image.root(), &sockets.join("root"), "always")?;
    let shared = serve(share, &sockets.join("share"), "auto")?;
    let console = share.join("console");

    let accel = match std::env::var("CRAB_VM_ACCEL") {
        Ok(accel) if !accel.is_empty() => accel,
        _ => "tcg,thread=multi,tb-size=512".to_owned(),
    };
    let mut qemu = command::system("qemu-system-x86_64");
    qemu.args(["-M", "q35", "-cpu", "max", "-smp", "1", "-accel", &accel])
        .args(["-m", &MEMORY.to_string()])
        .args(["-object", &format!("memory-backend-memfd,id=mem,size={MEMORY}M,share=on"), "-numa", "node,memdev=mem"])
        .args(["-nodefaults", "-display", "none", "-no-reboot", "-device", "virtio-rng-pci"])
        .arg("-serial")
        .arg(option("file:", &console, ""))
        .args(["-device", "virtio-serial-pci", "-chardev", "stdio,id=out,signal=off"])
        .args(["-device", "virtconsole,chardev=out"])
        .arg("-chardev")
        .arg(option("socket,id=c0,path=", &sockets.join("root"), ""))
        .args(["-device", "vhost-user-fs-pci,chardev=c0,tag=rootfs"])
        .arg("-chardev")
        .arg(option("socket,id=c1,path=", &sockets.join("share"), ""))
        .args(["-device", "vhost-user-fs-pci,chardev=c1,tag=share"])
        .arg("-kernel")
        .arg(image.kernel())
        .args([
            "-append",
            "console=ttyS0 quiet root=rootfs rootfstype=virtiofs ro init=/crab-vm-init panic=-1 mitigations=off \
             lsm=landlock,lockdown,yama,bpf",
        ])
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit());
    let mut child = qemu.spawn().map_err(|error| format!("cannot start qemu-system-x86_64: {error}"))?;
    let stdout = child.stdout.take();
    let guest = Arc::new(Mutex::new(Running(child)));
    let (done, late) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicBool::new(false)));
    let watch = watch(Arc::clone(&guest), Arc::clone(&done), Arc::clone(&late), limit);
    if let Some(stdout) = stdout {
        let mut reader = BufReader::new(stdout);
        let mut line = Vec::new();
        while reader.read_until(b'\n', &mut line).unwrap_or(0) > 0 {
            on_line(String::from_utf8_lossy(&line).trim_end());
            line.clear();
        }
    }
    done.store(true, Ordering::SeqCst);
    let _ = watch.join();
    drop((guest, root, shared));
    let _ = super::image::remove(&sockets);
    if late.load(Ordering::SeqCst) {
        return Err(format!("the virtual machine did not end within {} minutes", limit.as_secs() / 60));
    }
    let code = std::fs::read_to_string(&ended).ok().and_then(|text| text.trim().parse().ok());
    code.ok_or_else(|| {
        let said = std::fs::read(&console).unwrap_or_default();
        let said = String::from_utf8_lossy(&said);
        let lines: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
        format!("the virtual machine failed; its last lines:\n{}", lines[lines.len().saturating_sub(15)..].join("\n"))
    })
}

/// Makes the directory that the guest sees: programs under their names there, and the script that it runs. It stands in
/// `beside`, where the programs are, so that they need not be copied.
pub(super) fn share(beside: &Path, programs: &[(PathBuf, String)], script: &str) -> Result<PathBuf, String> {
    let share = beside.join("crab-vm-share");
    let share = std::path::absolute(&share).map_err(|error| format!("cannot find {}: {error}", share.display()))?;
    super::image::remove(&share)?;
    std::fs::create_dir_all(&share).map_err(|error| format!("cannot make {}: {error}", share.display()))?;
    for (program, name) in programs {
        let to = share.join(name);
        std::fs::hard_link(program, &to)
            .or_else(|_| std::fs::copy(program, &to).map(drop))
            .map_err(|error| format!("cannot copy {}: {error}", program.display()))?;
    }
    let path = share.join("run");
    let environment = "export CRAB_IN_VM=1 CRAB_CRIU=/usr/sbin/criu CRAB_HOME=/tmp/crab RUST_BACKTRACE=1\n\
                       mkdir -p /tmp/crab\ncd /tmp\n";
    let stress = match std::env::var("CRAB_STRESS").as_deref() {
        Ok("full") => "export CRAB_STRESS=full\n",
        _ => "",
    };
    std::fs::write(&path, format!("{environment}{stress}{script}"))
        .map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    Ok(share)
}

fn option(before: &str, path: &Path, after: &str) -> OsString {
    let mut option = OsString::from(before);
    // A comma ends a value unless it is doubled.
    option.push(path.display().to_string().replace(',', ",,"));
    option.push(after);
    option
}

/// Ends the guest when its time is up.
fn watch(
    guest: Arc<Mutex<Running>>,
    done: Arc<AtomicBool>,
    late: Arc<AtomicBool>,
    limit: Duration,
) -> std::thread::JoinHandle<()> {
    let begun = Instant::now();
    std::thread::spawn(move || {
        while !done.load(Ordering::SeqCst) {
            if begun.elapsed() > limit {
                late.store(true, Ordering::SeqCst);
                let _ = guest.lock().unwrap_or_else(PoisonError::into_inner).0.kill();
                return;
            }
            std::thread::sleep(Duration::from_millis(200));
        }
    })
}

/// Offers a directory to the guest.
fn serve(directory: &Path, socket: &Path, cache: &str) -> Result<Running, String> {
    let (program, new) = virtiofsd().ok_or("there is no virtiofsd on this machine")?;
    let mut server = Command::new(program);
    server.arg(option("--socket-path=", socket, ""));
    if new {
        server.arg("--shared-dir").arg(directory).args(["--cache", cache, "--xattr"]);
    } else {
        server.args(["-o", "xattr", "-o", &format!("cache={cache}")]).arg("-o").arg(option("source=", directory, ""));
    }
    let child = server
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|error| format!("cannot start virtiofsd: {error}"))?;
    let server = Running(child);
    for _ in 0..200 {
        if socket.exists() {
            return Ok(server);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    Err(format!("virtiofsd does not offer {}", directory.display()))
}
