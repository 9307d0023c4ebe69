//! What the host does for itself, told apart from what it does to sandboxes.

use std::ffi::CStr;

/// The name that a thread bears while it [keeps house](keep_house). The kernel shows it to who watches.
pub const HOUSEKEEPER: &CStr = c"crab-housework";

/// Does work that changes no file of any sandbox's root: writes to a store, a journal, a log.
///
/// Which subvolume or directory a change of metadata is for cannot be told when the kernel reports it, so an observer
/// takes every change by a task of the host for one of each sandbox's files, and has to look at them. This says
/// that there is no need: the thread is named [`HOUSEKEEPER`] meanwhile. On a host with many sandboxes that is most of
/// what there would be to look at. Orchestrators that write to the file system on which their sandboxes lie may use it
/// too. **Never** where the work may reach a root: such a change is then lost to the next checkpoint.
///
/// Threads and processes that are made by the work inherit the name, programs that are started do not. Two
/// system calls, some hundred nanoseconds. Where the name cannot be set the work is done all the same.
///
/// ```
/// # let directory = std::env::temp_dir();
/// # let path = directory.join(format!("crab-core-housekeeping-{}", std::process::id()));
/// crab_core::keep_house(|| std::fs::write(&path, "a record of the host"))?;
/// # std::fs::remove_file(path)?;
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn keep_house<T>(work: impl FnOnce() -> T) -> T {
    let _named = Named::begin();
    work()
}

/// A thread that bears another name while this lives.
struct Named {
    #[cfg(target_os = "linux")]
    before: Option<std::ffi::CString>,
}

#[cfg(target_os = "linux")]
impl Named {
    fn begin() -> Self {
        let before = rustix::thread::name().ok().filter(|before| before.as_c_str() != HOUSEKEEPER);
        if before.is_some() {
            let _ = rustix::thread::set_name(HOUSEKEEPER);
        }
        Self { before }
    }
}

#[cfg(target_os = "linux")]
impl Drop for Named {
    fn drop(&mut self) {
        if let Some(before) = &self.before {
            let _ = rustix::thread::set_name(before);
        }
    }
}

#[cfg(not(target_os = "linux"))]
impl Named {
    fn begin() -> Self {
        Self {}
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]
    use super::*;

    fn name() -> String {
        std::fs::read_to_string("/proc/thread-self/comm").unwrap().trim_end().to_owned()
    }

    #[test]
    fn a_thread_bears_the_name_for_as_long_as_the_work_takes_also_where_that_panics() {
        let before = name();
        let within = keep_house(|| (keep_house(name), name()));
        let housekeeper = HOUSEKEEPER.to_str().unwrap();
        assert_eq!(within, (housekeeper.to_owned(), housekeeper.to_owned()));
        assert_eq!(name(), before);
        assert!(std::panic::catch_unwind(|| keep_house(|| panic!("the work fails"))).is_err());
        assert_eq!(name(), before);
    }
}
