//! Entry points for fuzzers: any bytes in, no panic out. What must hold of the results is asserted here, so a fuzzer
//! finds wrong answers and not only crashes.

use types::{Cas, Datatype, Seqno};

use crate::subdoc::{self, DocFlags, DocView, Existence, Features};
use crate::{json, xattr};

const FEATURES: Features = Features { xattr: true, replica_read: true };

/// The first bytes choose flags and a cut; then come a value and the specs of a multi-path request.
pub fn fuzz_subdoc(data: &[u8]) {
    let Some((&[choice, doc_flags, cut_high, cut_low], rest)) = data.split_first_chunk::<4>() else { return };
    let cut = usize::from(u16::from_be_bytes([cut_high, cut_low]));
    let (value, specs) = rest.split_at(cut.min(rest.len()));
    let xattr_bit = if choice & 1 != 0 && xattr::validate(value).is_ok() { Datatype::XATTR } else { Datatype::RAW };
    let Ok(body) = xattr::body(value, xattr_bit) else { return };
    let existence = match choice & 6 {
        0 if value.is_empty() => Existence::Missing,
        2 if body.is_empty() => Existence::Tombstone,
        _ => Existence::Live,
    };
    let json_bit = if json::is_json(body) { Datatype::JSON } else { Datatype::RAW };
    let view = DocView { value, datatype: xattr_bit | json_bit, existence, ..DocView::default() };
    let lying = DocView { datatype: Datatype(choice >> 3).without(Datatype::SNAPPY), ..view };

    if let Ok((specs, _)) = subdoc::parse_lookup_specs(specs, doc_flags, FEATURES) {
        let _ = subdoc::lookup(&lying, &specs);
        for answer in subdoc::lookup(&view, &specs).expect("the section was checked") {
            assert!(answer.is_err() || view.existence != Existence::Missing || !specs.is_empty());
        }
    }
    if let Ok((specs, flags)) = subdoc::parse_mutation_specs(specs, doc_flags, false, FEATURES) {
        let _ = subdoc::mutate(&lying, &specs, flags);
        check_mutation(&view, &specs, flags);
    }
}

fn check_mutation(view: &DocView<'_>, specs: &[subdoc::MutationSpec<'_>], flags: DocFlags) {
    let Ok(mut mutation) = subdoc::mutate(view, specs, flags) else { return };
    let len = mutation.value.len();
    mutation.patch(Cas(0x0123_4567_89ab_cdef), Seqno(42));
    assert_eq!(mutation.value.len(), len, "gaps have the width of what fills them");
    let body = xattr::body(&mutation.value, mutation.datatype).expect("the new section is well formed");
    assert_eq!(mutation.datatype.has(Datatype::JSON), json::is_json(body), "the JSON bit tells the truth");
    assert!(body.is_empty() || !mutation.deleted, "the dead have no body");
    if mutation.datatype.has(Datatype::XATTR) {
        assert_eq!(xattr::validate(&mutation.value), Ok(()));
    }
    assert_eq!(mutation.sizes.system_bytes + mutation.sizes.user_bytes, len);
}

/// Any bytes as JSON text.
pub fn fuzz_json(data: &[u8]) {
    let _ = json::is_json(data);
}

/// Any bytes as a value with an xattr section: what passes the check can be taken apart and put together again.
pub fn fuzz_xattr(data: &[u8]) {
    if xattr::validate(data).is_ok() {
        let (section, _) = xattr::split(data, Datatype::XATTR).expect("checked");
        let rebuilt = xattr::Xattrs::parse(section).expect("checked").to_section();
        assert!(rebuilt == section || section == [0; 4]);
    }
}
