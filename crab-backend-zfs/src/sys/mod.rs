//! `libzfs_core`, opened at run time: everything else in the crate is free of `unsafe` and builds without ZFS.
//!
//! [`bindings`](self) are bindgen's output, which `ffi/regenerate.sh` writes anew. The functions named there are an
//! allow-list: a library that lacks one is refused when it is opened. `libnvpair` comes with the library.

#[allow(
    unsafe_code,
    dead_code,
    unused_imports,
    missing_docs,
    non_camel_case_types,
    non_snake_case,
    non_upper_case_globals,
    unreachable_pub,
    clippy::all,
    clippy::undocumented_unsafe_blocks,
    reason = "generated"
)]
#[rustfmt::skip]
mod bindings;
mod calls;
mod library;
mod nvlist;

pub(crate) use calls::{Calls, Failed};
#[cfg(test)]
pub(crate) use library::load;
pub(crate) use nvlist::{Map, Value};
