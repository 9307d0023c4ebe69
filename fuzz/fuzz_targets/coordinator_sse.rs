//! An event stream that arrives in pieces.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| crab_coordinator::fuzzing::sse(data));
