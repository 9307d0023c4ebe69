//! The btrfs ioctls, each as one safe function. All of them block.
#![allow(unsafe_code)]

use std::ffi::{OsStr, OsString};
use std::mem;
use std::os::fd::AsFd;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use linux_raw_sys::btrfs as raw;
use linux_raw_sys::ctypes::c_char;
use linux_raw_sys::ioctl as number;
use rustix::io::{Errno, Result};
use rustix::ioctl::{Getter, Opcode, Setter, Updater, ioctl};

/// What the kernel tells about a subvolume.
pub(crate) type SubvolumeInfo = raw::btrfs_ioctl_get_subvol_info_args;

/// One file name as the fixed field of an ioctl's argument.
fn name_field<const N: usize>(name: &OsStr) -> Result<[c_char; N]> {
    let bytes = name.as_bytes();
    if bytes.is_empty() || bytes.contains(&0) || bytes.contains(&b'/') {
        return Err(Errno::INVAL);
    }
    if bytes.len() >= N || bytes.len() > 255 {
        return Err(Errno::NAMETOOLONG);
    }
    let mut field = [0; N];
    for (to, from) in field.iter_mut().zip(bytes) {
        // `c_char` is signed on some machines; the bits stay.
        *to = *from as c_char;
    }
    Ok(field)
}

/// The text of a fixed field, up to its first NUL.
fn text(field: &[c_char]) -> OsString {
    OsString::from_vec(field.iter().map(|c| *c as u8).take_while(|c| *c != 0).collect())
}

fn volume_args(name: &OsStr, fd: i64, flags: u64) -> Result<raw::btrfs_ioctl_vol_args_v2> {
    Ok(raw::btrfs_ioctl_vol_args_v2 {
        fd,
        transid: 0,
        flags,
        __bindgen_anon_1: raw::btrfs_ioctl_vol_args_v2__bindgen_ty_1 { unused: [0; 4] },
        __bindgen_anon_2: raw::btrfs_ioctl_vol_args_v2__bindgen_ty_2 { name: name_field(name)? },
    })
}

/// Makes a snapshot `name` in `directory` of the subvolume whose root `source` is. The kernel writes the source's dirty
/// data out first and commits the transaction, so the snapshot is on stable storage when this returns.
pub(crate) fn create_snapshot(directory: impl AsFd, name: &OsStr, source: impl AsFd, read_only: bool) -> Result<()> {
    use std::os::fd::AsRawFd;
    let source = source.as_fd();
    let flags = if read_only { u64::from(raw::BTRFS_SUBVOL_RDONLY) } else { 0 };
    let args = volume_args(name, i64::from(source.as_raw_fd()), flags)?;
    // SAFETY: the number belongs to this argument type, which the kernel only reads; `source` stays open during it.
    unsafe { ioctl(directory, Setter::<{ number::BTRFS_IOC_SNAP_CREATE_V2 as Opcode }, _>::new(args)) }
}

/// Makes an empty subvolume `name` in `directory`.
pub(crate) fn create_subvolume(directory: impl AsFd, name: &OsStr) -> Result<()> {
    let args = volume_args(name, 0, 0)?;
    // SAFETY: the number belongs to this argument type, which the kernel only reads.
    unsafe { ioctl(directory, Setter::<{ number::BTRFS_IOC_SUBVOL_CREATE_V2 as Opcode }, _>::new(args)) }
}

/// Removes the subvolume `name` in `directory`, read-only ones too. Its space is freed in the background.
pub(crate) fn destroy_subvolume(directory: impl AsFd, name: &OsStr) -> Result<()> {
    let args = raw::btrfs_ioctl_vol_args { fd: 0, name: name_field(name)? };
    // SAFETY: the number belongs to this argument type, which the kernel only reads.
    unsafe { ioctl(directory, Setter::<{ number::BTRFS_IOC_SNAP_DESTROY as Opcode }, _>::new(args)) }
}

/// The subvolume that `fd` is in.
pub(crate) fn subvolume_info(fd: impl AsFd) -> Result<SubvolumeInfo> {
    // The call may return 1 on success, which rustix takes for what it is.
    // SAFETY: the number belongs to this type, all of which the kernel fills on success.
    unsafe { ioctl(fd, Getter::<{ number::BTRFS_IOC_GET_SUBVOL_INFO as Opcode }, SubvolumeInfo>::new()) }
}

/// The paths, below the root of the subvolume `root`, of the subvolumes directly inside it; at most `limit` of them.
pub(crate) fn nested_subvolumes(root: impl AsFd, limit: usize) -> Result<Vec<OsString>> {
    let mut found = Vec::new();
    let mut from = 0;
    loop {
        // SAFETY: plain numbers, for which zero is a value.
        let mut args: raw::btrfs_ioctl_get_subvol_rootref_args = unsafe { mem::zeroed() };
        args.min_treeid = from;
        // SAFETY: the number belongs to this type, which the kernel reads and fills in place.
        let result = unsafe {
            ioctl(root.as_fd(), Updater::<{ number::BTRFS_IOC_GET_SUBVOL_ROOTREF as Opcode }, _>::new(&mut args))
        };
        // EOVERFLOW says that there are more than fit; those that fit are given.
        let more = match result {
            Ok(()) => false,
            Err(Errno::OVERFLOW) => true,
            Err(error) => return Err(error),
        };
        for child in args.rootref.iter().take(usize::from(args.num_items)) {
            if found.len() == limit {
                return Ok(found);
            }
            match path_of(root.as_fd(), child.dirid, child.treeid) {
                Ok(path) => found.push(path),
                // It was removed in between.
                Err(Errno::NOENT) => {}
                Err(error) => return Err(error),
            }
        }
        if !more || args.min_treeid <= from {
            return Ok(found);
        }
        from = args.min_treeid;
    }
}

fn path_of(root: impl AsFd, directory: u64, tree: u64) -> Result<OsString> {
    // SAFETY: plain numbers, for which zero is a value.
    let mut args: raw::btrfs_ioctl_ino_lookup_user_args = unsafe { mem::zeroed() };
    args.dirid = directory;
    args.treeid = tree;
    // SAFETY: the number belongs to this type, which the kernel reads and fills in place.
    unsafe { ioctl(root, Updater::<{ number::BTRFS_IOC_INO_LOOKUP_USER as Opcode }, _>::new(&mut args)) }?;
    // The path of the directory ends in a slash, or is empty for the root itself.
    let mut path = text(&args.path);
    path.push(text(&args.name));
    Ok(path)
}

/// The id of the mounted filesystem that `fd` is on. ENOTTY where that is not btrfs.
pub(crate) fn filesystem_id(fd: impl AsFd) -> Result<[u8; 16]> {
    // SAFETY: plain numbers, for which zero is a value; a zero in `flags` asks for no more than the basic fields.
    let mut args: raw::btrfs_ioctl_fs_info_args = unsafe { mem::zeroed() };
    // SAFETY: the number belongs to this type, which the kernel reads and fills in place.
    unsafe { ioctl(fd, Updater::<{ number::BTRFS_IOC_FS_INFO as Opcode }, _>::new(&mut args)) }?;
    Ok(args.fsid)
}

/// How a subvolume is sent.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SendOptions {
    /// The number of the read-only subvolume from which the receiver goes on; 0 for none.
    pub(crate) parent: u64,
    /// Tell which ranges may differ, and not what is in them.
    pub(crate) without_data: bool,
    /// 1 or 2.
    pub(crate) version: u32,
}

/// Writes the stream of the read-only subvolume whose root `snapshot` is into `output`. Runs until all is written.
///
/// Where nobody reads any more, the thread gets SIGPIPE, which must not end the process: it is blocked here for good,
/// so this is for a thread of its own.
pub(crate) fn send(snapshot: impl AsFd, output: impl AsFd, options: SendOptions) -> Result<()> {
    use std::os::fd::AsRawFd;
    block_sigpipe();
    let mut flags = raw::BTRFS_SEND_FLAG_VERSION;
    if options.without_data {
        flags |= raw::BTRFS_SEND_FLAG_NO_FILE_DATA;
    }
    // From these, besides what is sent itself, ranges may be shared.
    let mut sources = [options.parent];
    let count = u64::from(options.parent != 0 && !options.without_data);
    let args = raw::btrfs_ioctl_send_args {
        send_fd: i64::from(output.as_fd().as_raw_fd()),
        clone_sources_count: count,
        clone_sources: if count == 0 { std::ptr::null_mut() } else { sources.as_mut_ptr() },
        parent_root: options.parent,
        flags: u64::from(flags),
        version: options.version,
        reserved: [0; 28],
    };
    // SAFETY: the number belongs to this argument type, which the kernel only reads; `sources` holds `count` numbers
    // and outlives the call, and so does `output`.
    unsafe { ioctl(snapshot, Setter::<{ number::BTRFS_IOC_SEND as Opcode }, _>::new(args)) }
}

/// Makes a range of `file` share the blocks of a range of `source`.
pub(crate) fn clone_range(
    file: impl AsFd,
    offset: u64,
    source: impl AsFd,
    source_offset: u64,
    length: u64,
) -> Result<()> {
    use std::os::fd::AsRawFd;
    let args = raw::btrfs_ioctl_clone_range_args {
        src_fd: i64::from(source.as_fd().as_raw_fd()),
        src_offset: source_offset,
        src_length: length,
        dest_offset: offset,
    };
    // SAFETY: the number belongs to this argument type, which the kernel only reads; `source` stays open during it.
    unsafe { ioctl(file, Setter::<{ number::FICLONERANGE as Opcode }, _>::new(args)) }
}

/// Records of which subvolume, in which state, the writable subvolume whose root `root` is was received.
pub(crate) fn set_received(root: impl AsFd, uuid: [u8; 16], transaction: u64) -> Result<()> {
    // SAFETY: plain numbers, for which zero is a value.
    let mut args: raw::btrfs_ioctl_received_subvol_args = unsafe { mem::zeroed() };
    args.uuid = uuid.map(|byte| byte as c_char);
    args.stransid = transaction;
    // SAFETY: the number belongs to this type, which the kernel reads and fills in place.
    unsafe { ioctl(root, Updater::<{ number::BTRFS_IOC_SET_RECEIVED_SUBVOL as Opcode }, _>::new(&mut args)) }
}

fn block_sigpipe() {
    // SAFETY: the set is made by `sigemptyset` before it is used, and only this thread's mask is changed.
    unsafe {
        let mut set = mem::zeroed();
        libc::sigemptyset(&raw mut set);
        libc::sigaddset(&raw mut set, libc::SIGPIPE);
        libc::pthread_sigmask(libc::SIG_BLOCK, &raw const set, std::ptr::null_mut());
    }
}

/// The key of an item in a tree.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Key {
    pub(crate) object: u64,
    pub(crate) kind: u8,
    pub(crate) offset: u64,
}

impl Key {
    /// The one after it, where there is one.
    fn next(self) -> Option<Self> {
        let Self { object, kind, offset } = self;
        if let Some(offset) = offset.checked_add(1) {
            return Some(Self { object, kind, offset });
        }
        if let Some(kind) = kind.checked_add(1) {
            return Some(Self { object, kind, offset: 0 });
        }
        Some(Self { object: object.checked_add(1)?, kind: 0, offset: 0 })
    }
}

/// Gives the items from `first` to `last` of a tree, in order: 0 is the tree of the subvolume that `fd` is in. ENOENT
/// where there is no such tree.
pub(crate) fn search(fd: impl AsFd, tree: u64, first: Key, last: Key, mut item: impl FnMut(Key, &[u8])) -> Result<()> {
    const BUFFER: usize = 64 << 10;
    #[repr(C)]
    struct Args {
        head: raw::btrfs_ioctl_search_args_v2,
        buffer: [u8; BUFFER],
    }
    const HEADER: usize = mem::size_of::<raw::btrfs_ioctl_search_header>();
    // SAFETY: plain numbers, for which zero is a value.
    let mut args: Box<Args> = Box::new(unsafe { mem::zeroed() });
    let mut from = first;
    loop {
        args.head.key.tree_id = tree;
        args.head.key.min_objectid = from.object;
        args.head.key.max_objectid = last.object;
        args.head.key.min_type = u32::from(from.kind);
        args.head.key.max_type = u32::from(last.kind);
        args.head.key.min_offset = from.offset;
        args.head.key.max_offset = last.offset;
        args.head.key.max_transid = u64::MAX;
        args.head.key.nr_items = u32::MAX;
        args.head.buf_size = BUFFER as u64;
        // SAFETY: the number belongs to the head; the kernel reads it in place and writes at most `buf_size` bytes
        // behind it, where `buffer` is.
        unsafe { ioctl(fd.as_fd(), Updater::<{ number::BTRFS_IOC_TREE_SEARCH_V2 as Opcode }, _>::new(&mut *args)) }?;
        let count = args.head.key.nr_items;
        if count == 0 {
            return Ok(());
        }
        let mut rest = &args.buffer[..];
        let mut seen = from;
        for _ in 0..count {
            let Some((header, after)) = rest.split_at_checked(HEADER) else { return Err(Errno::OVERFLOW) };
            // SAFETY: the header is plain numbers and as long as the slice; it may lie at any address.
            let header: raw::btrfs_ioctl_search_header = unsafe { std::ptr::read_unaligned(header.as_ptr().cast()) };
            let Some((body, after)) = after.split_at_checked(header.len as usize) else { return Err(Errno::OVERFLOW) };
            seen = Key { object: header.objectid, kind: header.type_ as u8, offset: header.offset };
            item(seen, body);
            rest = after;
        }
        match seen.next() {
            Some(next) if next <= last => from = next,
            _ => return Ok(()),
        }
    }
}

/// A part of a file on the disk.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FileExtent {
    /// Where it begins.
    pub(crate) place: u64,
    /// Bytes of the file.
    pub(crate) length: u64,
    /// Whether the bytes on the disk are others, such as compressed ones.
    pub(crate) encoded: bool,
    /// Whether something else has it too.
    pub(crate) shared: bool,
}

/// Gives the parts of a file that are on the disk and not in its tree.
pub(crate) fn file_extents(file: impl AsFd, mut extent: impl FnMut(FileExtent)) -> Result<()> {
    const COUNT: usize = 128;
    #[repr(C)]
    #[derive(Clone, Copy)]
    struct Extent {
        logical: u64,
        physical: u64,
        length: u64,
        reserved: [u64; 2],
        flags: u32,
        reserved_too: [u32; 3],
    }
    #[repr(C)]
    struct Args {
        start: u64,
        length: u64,
        flags: u32,
        mapped: u32,
        count: u32,
        reserved: u32,
        extents: [Extent; COUNT],
    }
    const LAST: u32 = 1;
    const NOWHERE: u32 = 0x2 | 0x4 | 0x200;
    const ENCODED: u32 = 0x8;
    const SHARED: u32 = 0x2000;
    let mut from = 0;
    loop {
        // SAFETY: plain numbers, for which zero is a value.
        let mut args: Args = unsafe { mem::zeroed() };
        args.start = from;
        args.length = u64::MAX - from;
        args.count = COUNT as u32;
        // SAFETY: the number belongs to the head of the structure; the kernel reads it in place and writes at most
        // `count` extents behind it, where `extents` is.
        unsafe { ioctl(file.as_fd(), Updater::<{ number::FS_IOC_FIEMAP as Opcode }, _>::new(&mut args)) }?;
        let mapped = &args.extents[..(args.mapped as usize).min(COUNT)];
        for found in mapped.iter().filter(|found| found.flags & NOWHERE == 0) {
            let (encoded, shared) = (found.flags & ENCODED != 0, found.flags & SHARED != 0);
            extent(FileExtent { place: found.physical, length: found.length, encoded, shared });
        }
        match mapped.last() {
            Some(last) if last.flags & LAST == 0 => from = last.logical + last.length,
            _ => return Ok(()),
        }
    }
}

/// Whether the caller may remove subvolumes. Searching a tree needs the same privilege and changes nothing.
pub(crate) fn check_privilege(fd: impl AsFd) -> Result<()> {
    // SAFETY: plain numbers, for which zero is a value.
    let mut args: raw::btrfs_ioctl_search_args = unsafe { mem::zeroed() };
    // One item at most; that none matches is a success too.
    args.key.tree_id = u64::from(raw::BTRFS_ROOT_TREE_OBJECTID);
    args.key.nr_items = 1;
    // SAFETY: the number belongs to this type, which the kernel reads and fills in place.
    unsafe { ioctl(fd, Updater::<{ number::BTRFS_IOC_TREE_SEARCH as Opcode }, _>::new(&mut args)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_that_are_more_than_one_component_never_reach_the_kernel() {
        for bad in ["", "a/b", "/", "a\0b"] {
            assert_eq!(name_field::<4040>(OsStr::new(bad)).unwrap_err(), Errno::INVAL, "{bad:?}");
        }
        let long = "x".repeat(256);
        assert_eq!(name_field::<4040>(OsStr::new(&long)).unwrap_err(), Errno::NAMETOOLONG);
        let name = OsStr::from_bytes(b"caf\xe9");
        assert_eq!(text(&name_field::<4088>(name).unwrap()), name);
    }
}
