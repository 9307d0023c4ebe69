//! A request's head: which requests are turns, which headers go on.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| crab_coordinator::fuzzing::head(data));
