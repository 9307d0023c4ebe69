//! The library's functions as safe calls. They fail with an errno, and block until the pool has done what was asked:
//! what a call has changed is on the disk when it returns.
#![allow(unsafe_code, reason = "the library's functions are called")]

use std::ffi::c_int;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr;

use super::bindings::{
    LZC_DATSET_TYPE_ZFS, LZC_SEND_FLAG_COMPRESS, LZC_SEND_FLAG_LARGE_BLOCK, LZC_SEND_FLAG_RAW, LibZfsCore,
};
use super::library;
use super::nvlist::{Map, NvList, Returned, Value, text};

/// A call that failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failed {
    pub(crate) errno: c_int,
    /// What the library said besides, such as the message of a channel program that broke off.
    pub(crate) said: Option<String>,
}

/// What a call gave.
pub(crate) type Outcome<T = ()> = Result<T, Failed>;

/// `ENOENT`.
const NOT_FOUND: c_int = 2;
/// How many Lua instructions a program may take: the most that ZFS allows.
const INSTRUCTIONS: u64 = 100_000_000;
/// How many bytes of memory a program may take: the most that ZFS allows.
const MEMORY: u64 = 100 << 20;

/// The library, ready to be called.
#[derive(Clone, Copy)]
pub(crate) struct Calls(&'static LibZfsCore);

impl std::fmt::Debug for Calls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Calls")
    }
}

impl From<c_int> for Failed {
    fn from(errno: c_int) -> Self {
        Self { errno, said: None }
    }
}

fn done(errno: c_int) -> Outcome {
    if errno == 0 { Ok(()) } else { Err(errno.into()) }
}

/// An outcome with a list of what failed: the first of them is what matters.
fn done_all(errno: c_int, failed: &Map) -> Outcome {
    let first = failed.iter().find_map(|(name, value)| Some((name, c_int::try_from(value.number()?).ok()?)));
    match first {
        Some((name, errno)) if errno != 0 => Err(Failed { errno, said: Some(name.clone()) }),
        _ => done(errno),
    }
}

impl Calls {
    /// The library, opened where it is not yet.
    pub(crate) fn load() -> crab_core::Result<Self> {
        library::load().map(Self)
    }

    /// Makes a filesystem.
    pub(crate) fn create(self, name: &str, properties: &Map) -> Outcome {
        let (name, properties) = (text(name)?, NvList::of(self.0, properties)?);
        // SAFETY: name and list live through the call; there is no key.
        let errno =
            unsafe { self.0.lzc_create(name.as_ptr(), LZC_DATSET_TYPE_ZFS, properties.as_ptr(), ptr::null_mut(), 0) };
        done(errno)
    }

    /// Makes a filesystem from a snapshot.
    pub(crate) fn clone(self, name: &str, snapshot: &str, properties: &Map) -> Outcome {
        let (name, snapshot, properties) = (text(name)?, text(snapshot)?, NvList::of(self.0, properties)?);
        // SAFETY: names and list live through the call.
        done(unsafe { self.0.lzc_clone(name.as_ptr(), snapshot.as_ptr(), properties.as_ptr()) })
    }

    /// Renames a filesystem with all its snapshots, mounted or not.
    pub(crate) fn rename(self, from: &str, to: &str) -> Outcome {
        let (from, to) = (text(from)?, text(to)?);
        // SAFETY: both names live through the call.
        done(unsafe { self.0.lzc_rename(from.as_ptr(), to.as_ptr()) })
    }

    /// Destroys a filesystem that is not mounted and has no snapshots.
    pub(crate) fn destroy(self, name: &str) -> Outcome {
        let name = text(name)?;
        // SAFETY: the name lives through the call.
        done(unsafe { self.0.lzc_destroy(name.as_ptr()) })
    }

    /// Destroys snapshots of one pool; those that are held or cloned go with their last holder or clone. One that is
    /// not there is no error.
    pub(crate) fn destroy_snapshots<'a>(self, names: impl IntoIterator<Item = &'a str>) -> Outcome {
        let names = names.into_iter().map(|name| (name.to_owned(), Value::Flag)).collect();
        let names = NvList::of(self.0, &names)?;
        let mut failed = Returned::new(self.0);
        // SAFETY: the list lives through the call, and the library makes the other one.
        let errno = unsafe { self.0.lzc_destroy_snaps(names.as_ptr(), true.into(), failed.as_mut_ptr()) };
        done_all(errno, &failed.into_map())
    }

    /// Holds snapshots of one pool under a tag, until they are released.
    pub(crate) fn hold<'a>(self, names: impl IntoIterator<Item = &'a str>, tag: &str) -> Outcome {
        let holds = names.into_iter().map(|name| (name.to_owned(), Value::from(tag))).collect();
        let holds = NvList::of(self.0, &holds)?;
        let mut failed = Returned::new(self.0);
        // SAFETY: the list lives through the call, and the library makes the other one. -1: the hold stays when this
        // process ends.
        let errno = unsafe { self.0.lzc_hold(holds.as_ptr(), -1, failed.as_mut_ptr()) };
        done_all(errno, &failed.into_map())
    }

    /// Releases a hold. One that is not there is no error.
    pub(crate) fn release(self, snapshot: &str, tag: &str) -> Outcome {
        let tags = Map::from([(tag.to_owned(), Value::Flag)]);
        let holds = NvList::of(self.0, &Map::from([(snapshot.to_owned(), Value::Map(tags))]))?;
        let mut failed = Returned::new(self.0);
        // SAFETY: the list lives through the call, and the library makes the other one.
        let errno = unsafe { self.0.lzc_release(holds.as_ptr(), failed.as_mut_ptr()) };
        match done_all(errno, &failed.into_map()) {
            Err(failed) if failed.errno == NOT_FOUND || failed.errno == NO_HOLD => Ok(()),
            outcome => outcome,
        }
    }

    /// Whether a filesystem or snapshot of this name exists.
    pub(crate) fn exists(self, name: &str) -> Outcome<bool> {
        let name = text(name)?;
        // SAFETY: the name lives through the call.
        Ok(unsafe { self.0.lzc_exists(name.as_ptr()) } != 0)
    }

    /// Runs a channel program: Lua in the kernel, as one step of the pool, on the disk when this returns.
    pub(crate) fn program(self, pool: &str, program: &str, arguments: &Map) -> Outcome<Value> {
        self.run(pool, program, arguments, true)
    }

    /// Runs a channel program that changes nothing and waits for nothing.
    pub(crate) fn look(self, pool: &str, program: &str, arguments: &Map) -> Outcome<Value> {
        self.run(pool, program, arguments, false)
    }

    fn run(self, pool: &str, program: &str, arguments: &Map, changes: bool) -> Outcome<Value> {
        let (pool, program) = (text(pool)?, text(program)?);
        let arguments = NvList::of(self.0, arguments)?;
        let mut returned = Returned::new(self.0);
        let (pool, program, arguments, out) =
            (pool.as_ptr(), program.as_ptr(), arguments.as_ptr(), returned.as_mut_ptr());
        let errno = if changes {
            // SAFETY: names and list live through the call, and the library makes the other list.
            unsafe { self.0.lzc_channel_program(pool, program, INSTRUCTIONS, MEMORY, arguments, out) }
        } else {
            // SAFETY: as above.
            unsafe { self.0.lzc_channel_program_nosync(pool, program, INSTRUCTIONS, MEMORY, arguments, out) }
        };
        let mut returned = returned.into_map();
        if errno != 0 {
            let said = returned.get("error").and_then(Value::text).map(str::to_owned);
            return Err(Failed { errno, said });
        }
        Ok(returned.remove("return").unwrap_or(Value::Flag))
    }

    /// Writes a snapshot to a pipe as a stream: all of it, or what differs from an earlier one; all of that, or what
    /// comes from an object and an offset in it on. `raw`: its blocks as they are on the disk, encrypted.
    pub(crate) fn send(
        self,
        snapshot: &str,
        from: Option<&str>,
        into: BorrowedFd<'_>,
        raw: bool,
        (object, offset): (u64, u64),
    ) -> Outcome {
        let (snapshot, from) = (text(snapshot)?, from.map(text).transpose()?);
        let flags = LZC_SEND_FLAG_LARGE_BLOCK | LZC_SEND_FLAG_COMPRESS | if raw { LZC_SEND_FLAG_RAW } else { 0 };
        let from = from.as_ref().map_or(ptr::null(), |from| from.as_ptr());
        // SAFETY: names and descriptor live through the call. No object has the number 0, which stands for the beginning.
        done(unsafe { self.0.lzc_send_resume(snapshot.as_ptr(), from, into.as_raw_fd(), flags, object, offset) })
    }

    /// Makes a snapshot and its filesystem from a stream; one that holds only differences on top of `origin`. The
    /// filesystem must not exist, or be what an earlier stream of the snapshot that broke off has left; such a thing may
    /// stay where this fails.
    pub(crate) fn receive(
        self,
        snapshot: &str,
        properties: &Map,
        origin: Option<&str>,
        raw: bool,
        from: BorrowedFd<'_>,
    ) -> Outcome {
        let (snapshot, origin) = (text(snapshot)?, origin.map(text).transpose()?);
        let properties = NvList::of(self.0, properties)?;
        let origin = origin.as_ref().map_or(ptr::null(), |origin| origin.as_ptr());
        // SAFETY: names, list and descriptor live through the call.
        done(unsafe {
            self.0.lzc_receive_resumable(
                snapshot.as_ptr(),
                properties.as_ptr(),
                origin,
                false.into(),
                raw.into(),
                from.as_raw_fd(),
            )
        })
    }
}

/// `ESRCH`, by which a hold that is not there is told.
const NO_HOLD: c_int = 3;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_failure_of_many_is_told_by_its_name() {
        assert_eq!(done_all(0, &Map::new()), Ok(()));
        assert_eq!(done_all(5, &Map::new()).unwrap_err().errno, 5);
        let failed = Map::from([("pool/a@b".to_owned(), Value::I32(17)), ("pool/c@d".to_owned(), Value::I32(16))]);
        assert_eq!(done_all(5, &failed), Err(Failed { errno: 17, said: Some("pool/a@b".to_owned()) }));
    }
}
