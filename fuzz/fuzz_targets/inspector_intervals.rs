//! What the BPF programs note, in any order.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| crab_inspector::fuzzing::intervals(data));
