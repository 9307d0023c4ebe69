//! A request's body.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| crab_coordinator::fuzzing::digest(data));
