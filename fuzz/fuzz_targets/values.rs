//! What clients store: text that claims to be JSON, and values with an xattr section.
#![no_main]

libfuzzer_sys::fuzz_target!(|data: &[u8]| {
    document::fuzz_json(data);
    document::fuzz_xattr(data);
});
