//! Building the image from Debian's packages. ZFS is not in Debian's kernel: its modules are compiled here, in a second
//! root that is thrown away.

use std::path::Path;

use super::image::{remove, require};
use crate::command;
use crate::setup::apt;

const SUITE: &str = "trixie";
/// What the tests use in the guest.
const PACKAGES: &[&str] = &[
    "mount",
    "zfsutils-linux",
    "criu",
    "btrfs-progs",
    "bpftool",
    "busybox-static",
    "kmod",
    "udev",
    "iproute2",
    "iptables",
    "procps",
    "e2fsprogs",
    "python3-minimal",
    "strace",
];
/// What compiles ZFS.
const COMPILERS: &[&str] =
    &["linux-headers-cloud-amd64", "gcc", "make", "libc6-dev", "libelf1t64", "file", "kmod", "perl"];

/// Builds the image in a directory.
pub(super) fn build(directory: &Path) -> Result<(), String> {
    println!("vm: building the image in {} from Debian's packages: 6 to 15 minutes, once", directory.display());
    require("mmdebstrap", "mmdebstrap")?;
    let new = directory.with_extension("new");
    remove(&new)?;
    std::fs::create_dir_all(&new).map_err(|error| format!("cannot make {}: {error}", new.display()))?;
    let (root, compiler) = (new.join("root"), new.join("compiler"));
    println!("vm: the guest's root filesystem");
    bootstrap(&root, PACKAGES)?;
    println!("vm: the root filesystem that compiles ZFS");
    bootstrap(&compiler, COMPILERS)?;

    let kernel = kernel_of(&root)?;
    println!("vm: the kernel {kernel} and the sources of ZFS");
    let packages = root.join("packages");
    std::fs::create_dir_all(&packages).map_err(|error| format!("cannot make {}: {error}", packages.display()))?;
    let script =
        format!("cd /packages && apt-get -q -o APT::Sandbox::User=root download linux-image-{kernel} zfs-dkms");
    command::run(command::system("chroot").arg(&root).args(["sh", "-c", &script]))?;
    unpack(&packages, "linux-image-", &new.join("kernel"))?;
    unpack(&packages, "zfs-dkms", &compiler)?;
    remove(&packages)?;

    println!("vm: compiling ZFS");
    let common = kernel.strip_suffix("-cloud-amd64").unwrap_or(&kernel);
    let script = format!(
        "set -e; cd /usr/src/zfs-*; \
         ./configure --quiet --disable-dependency-tracking --with-config=kernel \
         --with-linux=/usr/src/linux-headers-{common}-common --with-linux-obj=/usr/src/linux-headers-{kernel}; \
         make -s -j$(nproc); mkdir -p /out; for m in spl zfs; do cp $(find module -maxdepth 1 -name $m.ko) /out/; done; \
         strip --strip-debug /out/*.ko"
    );
    // A namespace of its own, so that nothing stays mounted whatever happens.
    let mounts = "mount -t proc proc \"$0/proc\"; mount --bind /dev \"$0/dev\"; mount -t tmpfs tmpfs \"$0/tmp\"; \
                  exec chroot \"$0\" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root sh -c \"$1\"";
    command::run(command::system("unshare").args(["-m", "sh", "-c", mounts]).arg(&compiler).arg(&script))?;

    println!("vm: putting it together");
    let script = "set -e; cd \"$0\"; k=$1; m=root/usr/lib/modules/$k; mkdir -p $m/updates; \
                  cp -a kernel/usr/lib/modules/$k/. $m/; cp compiler/out/*.ko $m/updates/; \
                  chroot root depmod $k; cp kernel/boot/vmlinuz-$k vmlinuz; \
                  rm -rf kernel compiler root/var/lib/apt root/var/cache/apt";
    command::run(command::system("sh").args(["-c", script]).arg(&new).arg(&kernel))?;
    remove(directory)?;
    std::fs::rename(&new, directory).map_err(|error| format!("cannot rename {}: {error}", new.display()))
}

fn bootstrap(root: &Path, packages: &[&str]) -> Result<(), String> {
    let mut command = command::system("mmdebstrap");
    command
        .args(["--mode=root", "--quiet", "--components=main,contrib", "--format=directory", "--variant=apt"])
        // Its apt finds the kernel later, so its lists stay.
        .arg("--skip=cleanup/apt")
        .arg(format!("--include={}", packages.join(",")))
        .arg(format!("--keyring={}", apt::KEYRING))
        .args(["--aptopt=Acquire::Languages \"none\"", "--aptopt=APT::Install-Recommends \"false\""])
        .arg("--aptopt=Acquire::Retries \"3\"")
        .args(["--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=path-exclude=/usr/share/doc/*"])
        .args(["--dpkgopt=path-exclude=/usr/share/locale/*", "--dpkgopt=force-unsafe-io"]);
    for option in apt::transport_options() {
        command.arg(format!("--aptopt={}", option.trim_end_matches(';')));
    }
    command::run(command.arg(SUITE).arg(root).arg(apt::mirror()?))
}

/// The release of the newest kernel that the root's apt knows.
fn kernel_of(root: &Path) -> Result<String, String> {
    let said =
        command::output(command::system("chroot").arg(root).args(["apt-cache", "depends", "linux-image-cloud-amd64"]))?;
    said.lines()
        .find_map(|line| line.trim().strip_prefix("Depends: linux-image-"))
        .map(str::to_owned)
        .ok_or_else(|| format!("Debian {SUITE} offers no linux-image-cloud-amd64"))
}

fn unpack(packages: &Path, name: &str, into: &Path) -> Result<(), String> {
    let failed = |error| format!("cannot read {}: {error}", packages.display());
    let file = std::fs::read_dir(packages)
        .map_err(failed)?
        .flatten()
        .find(|entry| entry.file_name().to_string_lossy().starts_with(name))
        .ok_or_else(|| format!("{name} was not downloaded"))?;
    command::run(command::system("dpkg-deb").arg("-x").arg(file.path()).arg(into))
}
