//! What the programs and the library both know: the library's side of `bpf/shared.h`.
#![allow(unsafe_code)]

/// Sandboxes that can be watched at once.
pub(crate) const MOST_SANDBOXES: u32 = 1024;
/// Intervals of a sandbox that the programs keep apart.
pub(crate) const SLOTS: u64 = 8;
/// Different depths of cgroups under which sandboxes lie.
pub(crate) const MOST_LEVELS: u32 = 4;
/// Words of the filter that pipes are noted in.
pub(crate) const PIPE_WORDS: usize = 128;
const MOST_DESTINATIONS: usize = 4;

/// In place of a sandbox: several share the number of their root, or its device.
pub(crate) const SHARED_ROOT: u32 = u32::MAX;

/// Which counter counts changes by others than sandboxes: to btrfs, to devices that several sandboxes share.
pub(crate) const OUTSIDE_BTRFS: u32 = 0;
pub(crate) const OUTSIDE_DEVICES: u32 = 1;

/// What stays behind of a task that is gone.
pub(crate) mod left {
    pub(crate) const KERNEL: u32 = 1;
    pub(crate) const INET: u32 = 1 << 2;
    pub(crate) const UNIX: u32 = 1 << 3;
    pub(crate) const DEVICE: u32 = 1 << 4;
    pub(crate) const COMPAT: u32 = 1 << 5;
    pub(crate) const SENT_OVERFLOW: u32 = 1 << 7;
    pub(crate) const UNREADABLE: u32 = 1 << 8;
    pub(crate) const FILES: u32 = 1 << 9;
    pub(crate) const MAPPED: u32 = 1 << 10;
    pub(crate) const ASYNC: u32 = 1 << 11;
}

/// The start time that stands for nobody.
pub(crate) const NOBODY: u64 = u64::MAX;

/// The bits of the filter that stand for a pipe.
pub(crate) fn pipe_bits(inode: u64) -> [usize; 3] {
    let mixed = inode.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    // Each below 8,192.
    [51, 38, 25].map(|shift| (mixed >> shift) as usize % (PIPE_WORDS * 64))
}

#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub(crate) struct Destination {
    pub(crate) address: [u8; 16],
    pub(crate) port: u16,
    pub(crate) family: u16,
}

/// What happened in one interval.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Slot {
    pub(crate) epoch: u64,
    pub(crate) begin: u64,
    pub(crate) oldest_actor: u64,
    pub(crate) oldest_runner: u64,
    pub(crate) cpu: u64,
    pub(crate) tasks: u64,
    pub(crate) actor: u32,
    pub(crate) act: i32,
    pub(crate) left_act: i32,
    pub(crate) left: u32,
    pub(crate) destination_count: u32,
    pub(crate) files_act: i32,
    pub(crate) pipes: [u64; PIPE_WORDS],
    pub(crate) destinations: [Destination; MOST_DESTINATIONS],
}

impl Slot {
    /// An interval in which nothing happened yet.
    pub(crate) fn empty(epoch: u64, begin: u64) -> Self {
        Self {
            epoch,
            begin,
            oldest_actor: NOBODY,
            oldest_runner: NOBODY,
            cpu: 0,
            tasks: 0,
            actor: 0,
            act: 0,
            left_act: 0,
            left: 0,
            destination_count: 0,
            files_act: 0,
            pipes: [0; PIPE_WORDS],
            destinations: [Destination::default(); MOST_DESTINATIONS],
        }
    }
}

/// What a CPU runs.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OnCpu {
    /// 0: nothing of a sandbox; all ones: not known yet; else the index plus one.
    pub(crate) sandbox: u32,
    pad: u32,
    pub(crate) since: u64,
    pub(crate) started: u64,
    /// Where the kernel counts this CPU's switches, and how many there were with the last that was reported.
    queue: u64,
    switches: u64,
    /// How often switches were found that had not been reported.
    pub(crate) unreported: u64,
}

impl OnCpu {
    pub(crate) const UNKNOWN: Self =
        Self { sandbox: u32::MAX, pad: 0, since: 0, started: 0, queue: 0, switches: 0, unreported: 0 };
}

// The sizes that the C compiler gave: a difference would be a difference in layout.
const _: () = assert!(size_of::<Slot>() == 1176 && size_of::<OnCpu>() == 48);

// SAFETY: integers and arrays of them without padding (asserted by the size), valid for all bytes.
unsafe impl aya::Pod for Slot {}
// SAFETY: as above.
unsafe impl aya::Pod for OnCpu {}

/// The object, aligned as its reader wants it.
#[repr(C, align(32))]
pub(super) struct Aligned<T: ?Sized>(pub(super) T);
