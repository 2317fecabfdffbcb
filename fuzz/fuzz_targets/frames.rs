//! Any bytes, read as a stream of frames from either end.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| wire::fuzz_frames(data));
