//! The messages of CRIU's RPC that this crate uses, and of some of its images. Only the fields that are used are
//! declared: protobuf readers skip what they do not know. Written by hand, with the field numbers of CRIU's
//! `rpc.proto`, `stats.proto`, `pagemap.proto` and `inventory.proto`.

use prost::Message;

/// `criu_req_type`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, prost::Enumeration)]
#[repr(i32)]
pub(crate) enum Kind {
    Empty = 0,
    Dump = 1,
    Restore = 2,
    Notify = 6,
    Version = 10,
}

/// `criu_cg_mode`: tasks stay in the cgroup that CRIU itself is in.
pub(crate) const CGROUPS_IGNORE: i32 = 0;
/// `criu_network_lock_method`: the network is not locked; the tasks are stopped, and packets wait in the kernel.
pub(crate) const NETWORK_LOCK_SKIP: i32 = 3;

/// `inherit_fd`: a descriptor of the `criu swrk` process in place of something external.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct InheritFd {
    #[prost(string, required, tag = "1")]
    pub(crate) key: String,
    #[prost(int32, required, tag = "2")]
    pub(crate) fd: i32,
}

/// `criu_opts`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Options {
    #[prost(int32, required, tag = "1")]
    pub(crate) images_dir_fd: i32,
    #[prost(int32, optional, tag = "2")]
    pub(crate) pid: Option<i32>,
    #[prost(bool, optional, tag = "3")]
    pub(crate) leave_running: Option<bool>,
    #[prost(bool, optional, tag = "5")]
    pub(crate) tcp_established: Option<bool>,
    #[prost(bool, optional, tag = "8")]
    pub(crate) file_locks: Option<bool>,
    #[prost(int32, optional, tag = "9")]
    pub(crate) log_level: Option<i32>,
    #[prost(string, optional, tag = "10")]
    pub(crate) log_file: Option<String>,
    #[prost(bool, optional, tag = "12")]
    pub(crate) notify_scripts: Option<bool>,
    #[prost(string, optional, tag = "13")]
    pub(crate) root: Option<String>,
    #[prost(string, optional, tag = "14")]
    pub(crate) parent_img: Option<String>,
    #[prost(bool, optional, tag = "15")]
    pub(crate) track_mem: Option<bool>,
    #[prost(bool, optional, tag = "16")]
    pub(crate) auto_dedup: Option<bool>,
    #[prost(int32, optional, tag = "17")]
    pub(crate) work_dir_fd: Option<i32>,
    #[prost(bool, optional, tag = "26")]
    pub(crate) rst_sibling: Option<bool>,
    #[prost(message, repeated, tag = "27")]
    pub(crate) inherit_fd: Vec<InheritFd>,
    #[prost(int32, optional, tag = "34")]
    pub(crate) manage_cgroups_mode: Option<i32>,
    #[prost(uint32, optional, tag = "35")]
    pub(crate) ghost_limit: Option<u32>,
    #[prost(string, repeated, tag = "37")]
    pub(crate) external: Vec<String>,
    #[prost(string, optional, tag = "44")]
    pub(crate) freeze_cgroup: Option<String>,
    #[prost(uint32, optional, tag = "45")]
    pub(crate) timeout: Option<u32>,
    #[prost(bool, optional, tag = "46")]
    pub(crate) tcp_skip_in_flight: Option<bool>,
    #[prost(bool, optional, tag = "52")]
    pub(crate) tcp_close: Option<bool>,
    #[prost(int32, optional, tag = "64")]
    pub(crate) network_lock: Option<i32>,
}

/// `criu_req`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Request {
    #[prost(enumeration = "Kind", required, tag = "1")]
    pub(crate) kind: i32,
    #[prost(message, optional, tag = "2")]
    pub(crate) opts: Option<Options>,
    #[prost(bool, optional, tag = "3")]
    pub(crate) notify_success: Option<bool>,
}

/// `criu_restore_resp`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct RestoreResponse {
    #[prost(int32, required, tag = "1")]
    pub(crate) pid: i32,
}

/// `criu_notify`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Notify {
    #[prost(string, optional, tag = "1")]
    pub(crate) script: Option<String>,
    #[prost(int32, optional, tag = "2")]
    pub(crate) pid: Option<i32>,
}

/// `criu_version`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct VersionResponse {
    #[prost(int32, required, tag = "1")]
    pub(crate) major: i32,
    #[prost(int32, required, tag = "2")]
    pub(crate) minor: i32,
    #[prost(int32, optional, tag = "4")]
    pub(crate) sublevel: Option<i32>,
}

/// `criu_resp`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Response {
    #[prost(enumeration = "Kind", required, tag = "1")]
    pub(crate) kind: i32,
    #[prost(bool, required, tag = "2")]
    pub(crate) success: bool,
    #[prost(message, optional, tag = "4")]
    pub(crate) restore: Option<RestoreResponse>,
    #[prost(message, optional, tag = "5")]
    pub(crate) notify: Option<Notify>,
    #[prost(int32, optional, tag = "7")]
    pub(crate) cr_errno: Option<i32>,
    #[prost(string, optional, tag = "9")]
    pub(crate) cr_errmsg: Option<String>,
    #[prost(message, optional, tag = "10")]
    pub(crate) version: Option<VersionResponse>,
}

/// `dump_stats_entry`, times in microseconds.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct DumpStats {
    #[prost(uint32, required, tag = "1")]
    pub(crate) freezing_time: u32,
    #[prost(uint32, required, tag = "2")]
    pub(crate) frozen_time: u32,
}

/// `stats_entry`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Stats {
    #[prost(message, optional, tag = "1")]
    pub(crate) dump: Option<DumpStats>,
}

/// `pagemap_head`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct PagemapHead {
    #[prost(uint32, required, tag = "1")]
    pub(crate) pages_id: u32,
}

/// The pages are in the parent's images.
pub(crate) const PAGES_IN_PARENT: u32 = 1;
/// The pages are in this dump's images.
pub(crate) const PAGES_PRESENT: u32 = 4;

/// `pagemap_entry`: pages that lie one after another in memory.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct PagemapEntry {
    #[prost(uint64, required, tag = "1")]
    pub(crate) vaddr: u64,
    /// `nr_pages` until CRIU 4.1, and since then of no meaning where the other is there.
    #[prost(uint32, required, tag = "2")]
    pub(crate) compat_nr_pages: u32,
    #[prost(bool, optional, tag = "3")]
    pub(crate) in_parent: Option<bool>,
    #[prost(uint32, optional, tag = "4")]
    pub(crate) flags: Option<u32>,
    #[prost(uint64, optional, tag = "5")]
    pub(crate) nr_pages: Option<u64>,
}

/// `inventory_entry`.
#[derive(Clone, PartialEq, Message)]
pub(crate) struct Inventory {
    #[prost(uint32, required, tag = "1")]
    pub(crate) img_version: u32,
    /// Microseconds since the host started.
    #[prost(uint64, optional, tag = "8")]
    pub(crate) dump_uptime: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_has_the_bytes_that_criu_expects() {
        let request = Request {
            kind: Kind::Dump.into(),
            opts: Some(Options {
                images_dir_fd: 5,
                pid: Some(300),
                network_lock: Some(NETWORK_LOCK_SKIP),
                ..Options::default()
            }),
            notify_success: None,
        };
        // 1: DUMP; 2: {1: 5, 2: 300, 64: 3}
        assert_eq!(request.encode_to_vec(), [8, 1, 18, 8, 8, 5, 16, 0xac, 2, 0x80, 4, 3]);
    }

    #[test]
    fn fields_of_newer_versions_are_skipped() {
        // 1: NOTIFY, 2: true, 5: {1: "x"}, and an unknown field 90: "y".
        let bytes = [8, 6, 16, 1, 42, 3, 10, 1, b'x', 0xd2, 5, 1, b'y'];
        let response = Response::decode(&bytes[..]).unwrap();
        assert_eq!(response.kind(), Kind::Notify);
        assert_eq!(response.notify.unwrap().script.as_deref(), Some("x"));
    }
}
