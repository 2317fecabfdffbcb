//! Any bytes, opened as a vBucket file. Files to start from: `couchstore/tests/fixtures`.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| couchstore::fuzz_open(data));
