#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| catalyst_transport::fuzzing::ring_catalyst(data));
