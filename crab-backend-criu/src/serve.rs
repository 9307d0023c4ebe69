//! Memory images as files of a file system of ours. CRIU reads them while they are put together, and each page goes
//! from us straight into the task: no second copy of the memory is written, read or kept.
//!
//! The file system is mounted beside the other images, in a mount namespace that only one of our threads is in: nobody
//! else sees it, and the kernel takes it away whatever becomes of us. Who reads then gets an error.

use std::io::IoSlice;
use std::num::NonZero;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::Scope;

use crab_core::{Error, Result};
use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags};

use crate::ahead::Ahead;
use crate::fuse::{self, Call, Reads, Request};
use crate::rebuild::{Blocks, Suspects, Whole};
use crate::{files, sys};

/// No image has such a name.
const MOUNT: &str = ".memory";
/// More threads would only wait for memory.
const MOST: usize = 4;

/// What is served until this value goes.
pub(crate) struct Served<'a> {
    pages: &'a Ahead<'a>,
    /// The directory with all images.
    pub(crate) images: OwnedFd,
    _end: Sender<()>,
}

impl Drop for Served<'_> {
    fn drop(&mut self) {
        self.pages.stop();
    }
}

/// Serves memory images beside the others in a directory.
pub(crate) fn start<'scope, 'env: 'scope>(
    scope: &'scope Scope<'scope, 'env>,
    pages: &'env Ahead<'env>,
    directory: &'env Path,
) -> Result<Served<'env>> {
    let failed = |e: std::io::Error| Error::io("serve the memory images", e);
    for name in pages.names() {
        std::os::unix::fs::symlink(Path::new(MOUNT).join(name), directory.join(name)).map_err(failed)?;
    }
    files::private_directory(&directory.join(MOUNT))?;
    let (end, ended) = channel();
    let (told, mounted) = channel();
    scope.spawn(move || keep(directory, &told, &ended));
    let gone = |_| Err(std::io::Error::other("the thread ended"));
    let (device, images) = mounted.recv().unwrap_or_else(gone).map_err(failed)?;
    let device = Arc::new(device);
    let files = Arc::new(Files { pages, opened: pages.names().map(|_| AtomicBool::new(false)).collect() });
    let cores = std::thread::available_parallelism().map_or(1, NonZero::get);
    for _ in 0..cores.clamp(2, MOST) {
        let (device, files) = (Arc::clone(&device), Arc::clone(&files));
        scope.spawn(move || files.serve(&device));
    }
    // CRIU has work of its own while they are ahead of it.
    for _ in 0..cores.saturating_sub(1).clamp(1, MOST) {
        scope.spawn(|| pages.run());
    }
    Ok(Served { pages, images, _end: end })
}

/// Whether this process may do that; tried out in a directory.
pub(crate) fn is_possible(directory: &Path) -> bool {
    let nothing = Whole { name: String::new(), packs: Vec::new(), images: Vec::new(), suspects: Suspects::default() };
    let pages = Ahead::new(&nothing, &|| Ok(()));
    let tried = std::thread::scope(|scope| start(scope, &pages, directory).map(drop));
    tried
        .inspect_err(|error| tracing::info!(%error, "restores put the memory images together before CRIU begins"))
        .is_ok()
}

/// Mounts, and unmounts at the end. It must be a thread of its own.
fn keep(directory: &Path, told: &Sender<std::io::Result<(OwnedFd, OwnedFd)>>, ended: &Receiver<()>) {
    let place = directory.join(MOUNT);
    let mount = || {
        sys::private_mounts()?;
        let device = rustix::fs::open("/dev/fuse", OFlags::RDWR | OFlags::CLOEXEC, Mode::empty())?;
        let (user, group) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let options = format!(
            "fd={},rootmode=40000,user_id={user},group_id={group},allow_other,default_permissions",
            device.as_raw_fd()
        );
        let options = std::ffi::CString::new(options)?;
        let flags = MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
        rustix::mount::mount("crab", &place, "fuse", flags, options.as_c_str())?;
        let images = files::open_directory(directory).inspect_err(|_| unmount(&place))?;
        Ok((device, images))
    };
    let _ = told.send(mount());
    // Nobody says anything: the other end goes.
    let _ = ended.recv();
    unmount(&place);
}

/// Ends all waiting for answers too.
fn unmount(place: &Path) {
    let _ = rustix::mount::unmount(place, UnmountFlags::FORCE | UnmountFlags::DETACH);
}

struct Files<'a> {
    pages: &'a Ahead<'a>,
    /// Whether each was opened before.
    opened: Vec<AtomicBool>,
}

impl Files<'_> {
    /// Answers until the file system is unmounted.
    fn serve(&self, device: &OwnedFd) {
        let (mut room, mut blocks) = (vec![0; fuse::REQUEST], Blocks::default());
        loop {
            let length = match rustix::io::read(device, &mut room[..]) {
                Ok(length) => length,
                // The second: whoever asked was killed.
                Err(Errno::INTR | Errno::NOENT | Errno::AGAIN) => continue,
                Err(_) => return,
            };
            if let Some(request) = room.get(..length).and_then(Request::parse) {
                self.answer(device, request, &mut blocks);
            }
        }
    }

    fn answer(&self, device: &OwnedFd, Request { unique, node, call }: Request<'_>, blocks: &mut Blocks) {
        let image = usize::try_from(node).unwrap_or(0).checked_sub(2);
        let size = image.and_then(|image| self.pages.size(image));
        let answer = match (call, image, size) {
            (Call::Forget, ..) => return,
            (Call::Read { offset, size }, Some(image), _) => match self.pages.read(image, offset, size, blocks) {
                Some(parts) => {
                    let length = parts.iter().map(|part| part.bytes().len()).sum();
                    let head = fuse::head(unique, length);
                    let slices: Vec<IoSlice<'_>> = std::iter::once(&head[..])
                        .chain(parts.iter().map(|part| part.bytes()))
                        .map(IoSlice::new)
                        .collect();
                    let _ = rustix::io::writev(device, &slices);
                    drop(slices);
                    self.pages.give_back(parts);
                    return;
                }
                None => fuse::refusal(unique, Errno::IO),
            },
            (Call::Begin { readahead, flags }, ..) => fuse::begun(unique, readahead, flags),
            (Call::LookUp { name }, ..) => match self.pages.find(name) {
                Some(image) => fuse::found(unique, image as u64 + 2, self.pages.size(image).unwrap_or(0)),
                None => fuse::refusal(unique, Errno::NOENT),
            },
            (Call::Attributes, ..) => fuse::attributes(unique, node, size.unwrap_or(0)),
            (Call::Open, Some(image), Some(_)) => {
                self.pages.opened();
                // CRIU opens each twice: at first to compare page by page with what a parent has, then for the rest.
                let again = self.opened.get(image).is_some_and(|opened| opened.swap(true, Ordering::Relaxed));
                fuse::opened(unique, if again { Reads::Direct } else { Reads::Cached })
            }
            (Call::Release, ..) => {
                self.pages.closed();
                fuse::head(unique, 0)
            }
            _ => fuse::refusal(unique, Errno::NOSYS),
        };
        // Who asked may be gone.
        let _ = rustix::io::write(device, &answer);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Seek, SeekFrom};

    use super::*;

    /// Opens a name in the directory as CRIU does.
    fn open(served: &Served<'_>, name: &str) -> std::io::Result<std::fs::File> {
        let opened = rustix::fs::openat(&served.images, name, OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(opened.into())
    }

    #[test]
    fn images_are_read_through_the_kernel_and_by_nobody_else() {
        let (packs, directory) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        if !is_possible(directory.path()) {
            println!("skipped: a file system of our own (root and /dev/fuse are needed)");
            return;
        }
        let directory = directory.path().join("images");
        std::fs::create_dir(&directory).unwrap();
        let (whole, first, second) = crate::ahead::tests::whole(packs.path(), 5000);
        let wanted = || Ok(());
        let pages = Ahead::new(&whole, &wanted);
        std::fs::write(directory.join("core-1.img"), "core").unwrap();
        let mut left = std::thread::scope(|scope| {
            let served = start(scope, &pages, &directory).unwrap();
            assert!(!directory.join("pages-1.img").exists(), "seen from outside");
            assert_eq!(open(&served, "pages-3.img").unwrap_err().kind(), std::io::ErrorKind::NotFound);
            assert_eq!(open(&served, ".memory/core-1.img").unwrap_err().kind(), std::io::ErrorKind::NotFound);
            let mut read = String::new();
            open(&served, "core-1.img").unwrap().read_to_string(&mut read).unwrap();
            assert_eq!(read, "core");
            // The first and the second time are of different kinds.
            for _ in 0..2 {
                for (name, bytes) in [("pages-1.img", &first), ("pages-2.img", &second)] {
                    let (mut file, mut read) = (open(&served, name).unwrap(), Vec::new());
                    assert_eq!(file.metadata().unwrap().len(), bytes.len() as u64);
                    file.read_to_end(&mut read).unwrap();
                    assert!(read == *bytes, "{name}");
                    file.seek(SeekFrom::Start(70_000)).unwrap();
                    file.read_exact(&mut read[..5000]).unwrap();
                    assert!(read[..5000] == bytes[70_000..75_000], "{name}");
                }
            }
            open(&served, "pages-1.img").unwrap()
        });
        // Whoever still has one open gets an error.
        left.rewind().unwrap();
        left.read_exact(&mut [0; 10]).unwrap_err();
        assert!(pages.end().is_none());
    }

    #[test]
    fn a_damaged_block_is_an_error_of_the_reader() {
        let (packs, directory) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        if !is_possible(directory.path()) {
            println!("skipped: a file system of our own (root and /dev/fuse are needed)");
            return;
        }
        let (whole, first, _) = crate::ahead::tests::whole(packs.path(), 5000);
        let path = packs.path().join(whole.packs[0].name().file());
        let mut torn = std::fs::read(&path).unwrap();
        let at = torn.len() / 2;
        torn[at] ^= 1;
        std::fs::write(&path, torn).unwrap();
        let wanted = || Ok(());
        let pages = Ahead::new(&whole, &wanted);
        let directory = directory.path().join("images");
        std::fs::create_dir(&directory).unwrap();
        std::thread::scope(|scope| {
            let served = start(scope, &pages, &directory).unwrap();
            let (mut file, mut read) = (open(&served, "pages-1.img").unwrap(), Vec::new());
            assert_eq!(file.read_to_end(&mut read).unwrap_err().raw_os_error(), Some(Errno::IO.raw_os_error()));
            assert!(read.len() < first.len() && first.starts_with(&read));
        });
        assert_eq!(pages.end().unwrap().kind(), crab_core::ErrorKind::Corrupt);
    }
}
