//! Evidence from the kernel: the programs of `bpf/`, loaded and read.

mod kernel;
pub(crate) mod layout;

pub(crate) use kernel::{FileSystem, Kernel, Place, Registered, Tried, try_programs, unpin};
