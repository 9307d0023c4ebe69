//! Random changes of a tree, of every kind that a file system knows.

use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions, Permissions};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, FileType, Mode, XattrFlags};

/// A source of changes; equal seeds give equal changes.
pub struct Churn(u64);

impl Churn {
    /// Of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) % bound
    }

    /// A random byte.
    pub fn byte(&mut self) -> u8 {
        self.below(256) as u8
    }

    /// All paths of the tree, directories first.
    fn paths(root: &Path, directories: bool) -> Vec<PathBuf> {
        let mut found = if directories { vec![root.to_owned()] } else { Vec::new() };
        let mut open = vec![root.to_owned()];
        while let Some(directory) = open.pop() {
            let mut entries: Vec<_> = fs::read_dir(&directory).unwrap().map(|entry| entry.unwrap().path()).collect();
            entries.sort();
            for path in entries {
                let is_directory = fs::symlink_metadata(&path).unwrap().is_dir();
                if is_directory {
                    open.push(path.clone());
                }
                if is_directory == directories {
                    found.push(path);
                }
            }
        }
        found
    }

    fn pick(&mut self, paths: &[PathBuf]) -> Option<PathBuf> {
        (!paths.is_empty()).then(|| paths[self.below(paths.len() as u64) as usize].clone())
    }

    /// A place for a name, taken or not.
    fn place(&mut self, root: &Path) -> PathBuf {
        let directory = self.pick(&Self::paths(root, true)).unwrap();
        let name: &[u8] = match self.below(12) {
            0 => b"caf\xe9",
            1 => b"with space",
            2 => b"-n\n",
            n => &[b'a' + n as u8],
        };
        directory.join(OsStr::from_bytes(name))
    }

    fn file(&mut self, root: &Path) -> Option<PathBuf> {
        let mut files = Self::paths(root, false);
        files.retain(|path| fs::symlink_metadata(path).unwrap().is_file());
        self.pick(&files)
    }

    fn bytes(&mut self) -> Vec<u8> {
        let length = [0, 5, 100, 3000, 4096, 5000, 20_000, 200_000][self.below(8) as usize];
        let byte = self.below(7) as u8;
        // Half of it compresses.
        (0..length).map(|n| if n % 8192 < 4096 { byte } else { self.below(256) as u8 }).collect()
    }

    /// Changes something. What cannot be done in this tree changes nothing.
    pub fn step(&mut self, root: &Path) {
        let place = self.place(root);
        // Opening a pipe would wait for its other end.
        let plain = fs::metadata(&place).map_or(true, |found| found.is_file());
        match self.below(22) {
            0..=3 | 16 if !plain => {}
            0..=3 => drop(fs::write(&place, self.bytes())),
            4 | 5 => drop(fs::create_dir(&place)),
            6 => {
                let target = [&b"somewhere"[..], b"/", b"a/b"][self.below(3) as usize];
                drop(symlink(OsStr::from_bytes(target), &place));
            }
            7 => {
                if let Some(file) = self.file(root) {
                    drop(fs::hard_link(file, &place));
                }
            }
            8 | 9 => {
                let all = [Self::paths(root, false), Self::paths(root, true)].concat();
                if let Some(from) = self.pick(&all).filter(|from| *from != root) {
                    drop(fs::rename(from, &place));
                }
            }
            10 => {
                // Two change places.
                let all = [Self::paths(root, false), Self::paths(root, true)].concat();
                let (Some(a), Some(b)) = (self.pick(&all), self.pick(&all)) else { return };
                if a != root && b != root {
                    let flags = rustix::fs::RenameFlags::EXCHANGE;
                    let _ = rustix::fs::renameat_with(rustix::fs::CWD, &a, rustix::fs::CWD, &b, flags);
                }
            }
            11 => {
                if let Some(path) = self.pick(&Self::paths(root, false)) {
                    fs::remove_file(path).unwrap();
                }
            }
            12 => {
                if let Some(path) = self.pick(&Self::paths(root, true)).filter(|path| path != root) {
                    fs::remove_dir_all(path).unwrap();
                }
            }
            13 => {
                let Some(file) = self.file(root) else { return };
                let offset = self.below(30_000);
                OpenOptions::new().write(true).open(file).unwrap().write_all_at(&self.bytes(), offset).unwrap();
            }
            14 => {
                let Some(file) = self.file(root) else { return };
                let size = self.below(40_000);
                OpenOptions::new().write(true).open(file).unwrap().set_len(size).unwrap();
            }
            15 => {
                let Some(file) = self.file(root) else { return };
                let file = OpenOptions::new().write(true).open(file).unwrap();
                let mode = [
                    FallocateFlags::KEEP_SIZE | FallocateFlags::PUNCH_HOLE,
                    FallocateFlags::KEEP_SIZE,
                    FallocateFlags::empty(),
                    FallocateFlags::ZERO_RANGE,
                ][self.below(4) as usize];
                // Not every file system can do all of these.
                let _ = rustix::fs::fallocate(file, mode, self.below(20_000), 1 + self.below(20_000));
            }
            16 => {
                let Some(file) = self.file(root) else { return };
                let from = File::open(file).unwrap();
                let Ok(to) = File::create(&place) else { return };
                let _ = rustix::fs::ioctl_ficlone(to, from);
            }
            17 => {
                let all = [Self::paths(root, false), Self::paths(root, true)].concat();
                let Some(path) = self.pick(&all) else { return };
                if !fs::symlink_metadata(&path).unwrap().is_symlink() {
                    let mode = [0o644, 0o600, 0o4755, 0o777][self.below(4) as usize];
                    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
                }
            }
            18 => {
                let all = [Self::paths(root, false), Self::paths(root, true)].concat();
                let Some(path) = self.pick(&all) else { return };
                std::os::unix::fs::lchown(path, Some(self.below(3) as u32), Some(self.below(3) as u32)).unwrap();
            }
            19 => {
                let all = [Self::paths(root, false), Self::paths(root, true)].concat();
                let Some(path) = self.pick(&all) else { return };
                let name = ["user.a", "user.b", "trusted.c"][self.below(3) as usize];
                let value = vec![b'v'; self.below(600) as usize];
                if self.below(3) == 0 {
                    let _ = rustix::fs::lremovexattr(path, name);
                } else {
                    // Links and devices take trusted ones only.
                    let _ = rustix::fs::lsetxattr(path, name, &value, XattrFlags::empty());
                }
            }
            20 => {
                let kind = [FileType::Fifo, FileType::Socket, FileType::CharacterDevice, FileType::BlockDevice]
                    [self.below(4) as usize];
                let device = rustix::fs::makedev(self.below(300) as u32, self.below(70_000) as u32);
                let mode = Mode::from_bits_truncate(0o640);
                let _ = rustix::fs::mknodat(rustix::fs::CWD, &place, kind, mode, device);
            }
            _ => {
                // Rewritten to what it was, time of modification included: no change.
                let Some(file) = self.file(root) else { return };
                let content = fs::read(&file).unwrap();
                let before = fs::metadata(&file).unwrap();
                let open = OpenOptions::new().write(true).open(&file).unwrap();
                open.write_all_at(&content, 0).unwrap();
                open.set_modified(before.modified().unwrap()).unwrap();
                assert_eq!(fs::metadata(&file).unwrap().mtime_nsec(), before.mtime_nsec());
            }
        }
    }
}
