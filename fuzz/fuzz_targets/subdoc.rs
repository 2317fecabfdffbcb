//! A stored value and the operations of a multi-path request on it.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| document::fuzz_subdoc(data));
