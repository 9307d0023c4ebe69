//! Files of /proc as the inspector reads them.

#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| crab_inspector::fuzzing::proc_files(data));
