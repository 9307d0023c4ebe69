//! Everything that is read from the kernel or from `/proc`, with any bytes in its place. For fuzzers.

use crate::bpf::layout::{Destination, NOBODY, Slot};
use crate::history::{History, Interval};
use crate::{btrfs, folder, holdings, inspector, mounts, tasks};

/// Files of `/proc`.
pub fn proc_files(data: &[u8]) {
    mounts::read_any(data);
    folder::read_any(data);
    holdings::read_any(data);
    tasks::read_any(data);
}

/// Items of btrfs trees.
pub fn tree_items(data: &[u8]) {
    btrfs::read_any(data);
}

/// What the programs noted: intervals in any order, with any content.
pub fn intervals(data: &[u8]) {
    let mut history = History::default();
    for (at, chunk) in data.chunks(24).enumerate() {
        let byte = |i: usize| chunk.get(i).copied().unwrap_or(0);
        let word = |i: usize| u64::from_le_bytes(std::array::from_fn(|k| byte(i + k)));
        let mut slot = Slot::empty(u64::from(byte(0)), word(1));
        slot.oldest_actor = word(2);
        slot.oldest_runner = if byte(3) == 0 { NOBODY } else { word(4) };
        slot.cpu = word(5);
        slot.tasks = word(6);
        slot.left = u32::from(byte(7)) << (byte(8) % 24);
        slot.destination_count = u32::from(byte(9));
        slot.pipes[usize::from(byte(10)) % slot.pipes.len()] = word(11);
        slot.destinations[0] =
            Destination { address: std::array::from_fn(byte), port: u16::from(byte(12)), family: u16::from(byte(13)) };
        history.add(Interval::from(&slot));
        if at % 7 == 6 {
            history.forget_before(u64::from(byte(14)));
        }
        let since = history.since(u64::from(byte(15)));
        for to in &since.destinations {
            inspector::address(to);
        }
        let _ = (since.pipes.may_hold(word(16)), history.is_whole_since(word(16)));
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn any_bytes_are_read_without_panic(data in proptest::collection::vec(any::<u8>(), 0..2000)) {
            super::proc_files(&data);
            super::tree_items(&data);
            super::intervals(&data);
        }
    }
}
