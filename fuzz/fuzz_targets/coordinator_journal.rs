//! The journal's files.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| crab_coordinator::fuzzing::journal(data));
