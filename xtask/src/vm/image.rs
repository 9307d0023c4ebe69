//! Where the virtual machine's files come from.

use std::path::{Path, PathBuf};

use super::build;
use crate::command;
use crate::setup::Home;

/// What begins the guest's work; a part of this project, put into the image before each boot.
const INIT: &str = include_str!("init.sh");

/// A root filesystem as a directory, and a kernel that fits it.
#[derive(Debug)]
pub(crate) struct Image {
    directory: PathBuf,
}

impl Image {
    pub(super) fn root(&self) -> PathBuf {
        self.directory.join("root")
    }

    pub(super) fn kernel(&self) -> PathBuf {
        self.directory.join("vmlinuz")
    }

    fn is_whole(&self) -> bool {
        self.root().join("usr/bin").is_dir() && self.kernel().is_file()
    }
}

/// Finds, unpacks or builds the image, and the programs that run it.
pub(crate) fn ready(named: Option<PathBuf>) -> Result<Image, String> {
    let named = named.or_else(|| std::env::var_os("CRAB_VM").filter(|path| !path.is_empty()).map(PathBuf::from));
    let home = Home::from_environment().path().join("vm");
    let image = match named {
        Some(path) if path.is_file() => unpacked(&path, &home)?,
        Some(path) => Image { directory: path },
        None => Image { directory: home.clone() },
    };
    require_programs()?;
    if !image.is_whole() {
        let pack = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../shared/vm/pack.tar.zst");
        if image.directory == home && pack.is_file() {
            unpacked(&pack, &home)?;
        } else {
            build::build(&image.directory)?;
        }
    }
    if !image.is_whole() {
        return Err(format!("{} holds no image of a virtual machine", image.directory.display()));
    }
    let init = image.root().join("crab-vm-init");
    let failed = |error: std::io::Error| format!("cannot write {}: {error}", init.display());
    if std::fs::read_to_string(&init).unwrap_or_default() != INIT {
        use std::os::unix::fs::PermissionsExt;
        std::fs::write(&init, INIT).map_err(failed)?;
        std::fs::set_permissions(&init, std::fs::Permissions::from_mode(0o755)).map_err(failed)?;
    }
    Ok(image)
}

/// Unpacks a packed image, unless that was done before.
fn unpacked(pack: &Path, into: &Path) -> Result<Image, String> {
    let image = Image { directory: into.to_owned() };
    if image.is_whole() {
        return Ok(image);
    }
    println!("vm: unpacking {} to {}", pack.display(), into.display());
    require("zstd", "zstd")?;
    let new = into.with_extension("new");
    remove(&new)?;
    std::fs::create_dir_all(&new).map_err(|error| format!("cannot make {}: {error}", new.display()))?;
    command::run(command::system("tar").arg("-C").arg(&new).args(["--zstd", "--numeric-owner", "-xf"]).arg(pack))?;
    remove(into)?;
    std::fs::rename(&new, into).map_err(|error| format!("cannot rename {}: {error}", new.display()))?;
    Ok(image)
}

pub(super) fn remove(path: &Path) -> Result<(), String> {
    match std::fs::remove_dir_all(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(format!("cannot remove {}: {error}", path.display()))
        }
        _ => Ok(()),
    }
}

fn require_programs() -> Result<(), String> {
    require("qemu-system-x86_64", "qemu-system-x86")?;
    if virtiofsd().is_none() {
        // Up to Debian 12 it came with QEMU.
        install("virtiofsd")?;
    }
    virtiofsd().map(drop).ok_or_else(|| "there is no virtiofsd on this machine".to_owned())
}

/// The server of the guest's file systems, and whether it is the newer one, whose options differ.
pub(super) fn virtiofsd() -> Option<(PathBuf, bool)> {
    let (old, new) = (PathBuf::from("/usr/lib/qemu/virtiofsd"), PathBuf::from("/usr/libexec/virtiofsd"));
    if new.is_file() { Some((new, true)) } else { old.is_file().then_some((old, false)) }
}

/// Installs the package that brings a program, where that is missing.
pub(super) fn require(program: &str, package: &str) -> Result<(), String> {
    if command::find(program).is_some() {
        return Ok(());
    }
    install(package)?;
    command::find(program).map(drop).ok_or_else(|| format!("the package {package} brought no {program}"))
}

fn install(package: &str) -> Result<(), String> {
    println!("vm: installing {package} (apt-get)");
    if command::find("apt-get").is_none() {
        return Err(format!("this is no Debian-like system (no apt-get): install {package} by hand"));
    }
    command::run(command::system("apt-get").args(["update", "-q"]))?;
    command::run(command::system("apt-get").args([
        "install",
        "-q",
        "-y",
        "--no-install-recommends",
        "--no-upgrade",
        "--no-remove",
        package,
    ]))
}
