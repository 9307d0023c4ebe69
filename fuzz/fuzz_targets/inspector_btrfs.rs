//! Items of btrfs trees.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| crab_inspector::fuzzing::tree_items(data));
