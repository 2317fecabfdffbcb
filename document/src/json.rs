//! JSON text, looked at but never built into a tree.
//!
//! Every store asks whether a body is JSON, and every sub-document operation has to step over the values it does not
//! want. Both are the same loop: one pass over the text, with one bit per open container instead of a call stack, so
//! a megabyte of `[` costs memory for bits and nothing else.

/// Whether `text` is one JSON text (RFC 8259: any value, scalars too, white space around it allowed). Numbers may have
/// any length, strings must be UTF-8 and their escapes well formed; nesting is not limited.
pub fn is_json(text: &[u8]) -> bool {
    match value(text, skip_space(text, 0), usize::MAX) {
        Ok(scanned) => skip_space(text, scanned.end) == text.len(),
        Err(_) => false,
    }
}

/// Where a value ends and how many containers deep it is: 0 for a scalar, 1 for `[]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scanned {
    pub end: usize,
    pub levels: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Syntax,
    TooDeep,
}

/// Steps over the value that begins at `at`, which may be at most `levels_max` containers deep.
pub(crate) fn value(text: &[u8], mut at: usize, levels_max: usize) -> Result<Scanned, Fault> {
    let mut open = Containers::default();
    let mut levels = 0;
    loop {
        at = match text.get(at) {
            Some(b'"') => string(text, at + 1)?,
            Some(&bracket @ (b'{' | b'[')) => {
                if open.len == levels_max {
                    return Err(Fault::TooDeep);
                }
                open.push(bracket == b'{');
                levels = levels.max(open.len);
                let inside = skip_space(text, at + 1);
                if text.get(inside) == Some(&(bracket + 2)) {
                    open.pop();
                    inside + 1
                } else {
                    at = if bracket == b'{' { key(text, inside)?.1 } else { inside };
                    continue;
                }
            }
            Some(b'-' | b'0'..=b'9') => number(text, at)?,
            Some(b't') => literal(text, at, b"true")?,
            Some(b'f') => literal(text, at, b"false")?,
            Some(b'n') => literal(text, at, b"null")?,
            _ => return Err(Fault::Syntax),
        };
        loop {
            let Some(object) = open.top() else { return Ok(Scanned { end: at, levels }) };
            at = skip_space(text, at);
            match (text.get(at), object) {
                (Some(b','), false) => {
                    at = skip_space(text, at + 1);
                    break;
                }
                (Some(b','), true) => {
                    at = key(text, skip_space(text, at + 1))?.1;
                    break;
                }
                (Some(b']'), false) | (Some(b'}'), true) => {
                    open.pop();
                    at += 1;
                }
                _ => return Err(Fault::Syntax),
            }
        }
    }
}

/// The key at `at` and its colon: where the closing quote is, and where the member's value begins.
pub(crate) fn key(text: &[u8], at: usize) -> Result<(usize, usize), Fault> {
    if text.get(at) != Some(&b'"') {
        return Err(Fault::Syntax);
    }
    let end = string(text, at + 1)?;
    let colon = skip_space(text, end);
    if text.get(colon) != Some(&b':') {
        return Err(Fault::Syntax);
    }
    Ok((end - 1, skip_space(text, colon + 1)))
}

pub(crate) fn skip_space(text: &[u8], mut at: usize) -> usize {
    while matches!(text.get(at), Some(b' ' | b'\t' | b'\n' | b'\r')) {
        at += 1;
    }
    at
}

/// Whether `raw` may stand between the quotes of a JSON string.
pub(crate) fn is_string_content(raw: &[u8]) -> bool {
    let mut quoted = Vec::with_capacity(raw.len() + 1);
    quoted.extend_from_slice(raw);
    quoted.push(b'"');
    string(&quoted, 0) == Ok(quoted.len())
}

/// Appends `raw`, any UTF-8, as a JSON string with its quotes.
pub(crate) fn push_string(out: &mut Vec<u8>, raw: &[u8]) {
    out.push(b'"');
    for &byte in raw {
        match byte {
            b'"' | b'\\' => out.extend_from_slice(&[b'\\', byte]),
            0..0x20 => out.extend_from_slice(format!("\\u{byte:04x}").as_bytes()),
            _ => out.push(byte),
        }
    }
    out.push(b'"');
}

const fn repeat(byte: u8) -> u64 {
    u64::from_le_bytes([byte; 8])
}

/// Marks (in the top bit of each byte) the bytes of `word` that are below `bound`, which is at most 0x80. Exact for
/// the lowest marked byte; above it there may be false marks.
const fn below(word: u64, bound: u8) -> u64 {
    word.wrapping_sub(repeat(bound)) & !word & repeat(0x80)
}

/// Steps over a string from behind its opening quote to behind its closing one, eight bytes at a time where nothing
/// needs a look: no quote, no backslash, no control character.
fn string(text: &[u8], mut at: usize) -> Result<usize, Fault> {
    let start = at;
    let mut ascii = true;
    loop {
        while let Some(bytes) = text.get(at..).and_then(|rest| rest.first_chunk::<8>()) {
            let word = u64::from_le_bytes(*bytes);
            ascii &= word & repeat(0x80) == 0;
            let special = below(word ^ repeat(b'"'), 1) | below(word ^ repeat(b'\\'), 1) | below(word, 0x20);
            if special != 0 {
                at += special.trailing_zeros() as usize / 8;
                break;
            }
            at += 8;
        }
        match text.get(at) {
            Some(b'"') => {
                let utf8 = ascii || std::str::from_utf8(&text[start..at]).is_ok();
                return if utf8 { Ok(at + 1) } else { Err(Fault::Syntax) };
            }
            Some(b'\\') => at = escape(text, at + 1)?,
            None | Some(0..0x20) => return Err(Fault::Syntax),
            Some(&byte) => {
                ascii &= byte < 0x80;
                at += 1;
            }
        }
    }
}

fn escape(text: &[u8], at: usize) -> Result<usize, Fault> {
    match text.get(at) {
        Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => Ok(at + 1),
        Some(b'u') => match text.get(at + 1..at + 5) {
            Some(hex) if hex.iter().all(u8::is_ascii_hexdigit) => Ok(at + 5),
            _ => Err(Fault::Syntax),
        },
        _ => Err(Fault::Syntax),
    }
}

fn literal(text: &[u8], at: usize, word: &[u8]) -> Result<usize, Fault> {
    if text[at..].starts_with(word) { Ok(at + word.len()) } else { Err(Fault::Syntax) }
}

fn number(text: &[u8], mut at: usize) -> Result<usize, Fault> {
    if text.get(at) == Some(&b'-') {
        at += 1;
    }
    at = if text.get(at) == Some(&b'0') { at + 1 } else { digits(text, at)? };
    if text.get(at) == Some(&b'.') {
        at = digits(text, at + 1)?;
    }
    if matches!(text.get(at), Some(b'e' | b'E')) {
        at += 1;
        if matches!(text.get(at), Some(b'+' | b'-')) {
            at += 1;
        }
        at = digits(text, at)?;
    }
    Ok(at)
}

fn digits(text: &[u8], start: usize) -> Result<usize, Fault> {
    let mut at = start;
    while matches!(text.get(at), Some(b'0'..=b'9')) {
        at += 1;
    }
    if at > start { Ok(at) } else { Err(Fault::Syntax) }
}

const WORD: usize = u64::BITS as usize;

/// The containers that are open, innermost last: one bit each, set for an object. The first 128 need no allocation.
#[derive(Default)]
struct Containers {
    len: usize,
    near: [u64; 2],
    far: Vec<u64>,
}

impl Containers {
    fn word(&mut self, depth: usize) -> &mut u64 {
        let word = depth / WORD;
        match word.checked_sub(self.near.len()) {
            None => &mut self.near[word],
            Some(far) => {
                if far >= self.far.len() {
                    self.far.resize(far + 1, 0);
                }
                &mut self.far[far]
            }
        }
    }

    fn push(&mut self, object: bool) {
        let depth = self.len;
        let mask = 1 << (depth % WORD);
        let word = self.word(depth);
        *word = if object { *word | mask } else { *word & !mask };
        self.len += 1;
    }

    fn pop(&mut self) {
        self.len -= 1;
    }

    fn top(&mut self) -> Option<bool> {
        let depth = self.len.checked_sub(1)?;
        Some(*self.word(depth) & (1 << (depth % WORD)) != 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_is_told_from_what_only_looks_like_it() {
        for yes in [
            "0",
            "-0",
            "1.5e+10",
            " [1 , 2]\n",
            "\"\"",
            "\"\\u00e9\\n\"",
            "true",
            "null",
            "{}",
            "{\"a\":{\"b\":[{}]}}",
            "\"a string of more than eight bytes, \\\"quoted\\\"\"",
            "123456789012345678901234567890.5",
            "\"\\ud800\"",
            "\"héllo wörld\"",
            "{\"\":1}",
            "{\"a\":1,\"a\":2}",
            "\"\u{7f}\"",
        ] {
            assert!(is_json(yes.as_bytes()), "{yes}");
        }
        for no in [
            "",
            " ",
            "01",
            "-",
            "1.",
            ".5",
            "1e",
            "+1",
            "tru",
            "truex",
            "[1,]",
            "[,1]",
            "{\"a\"}",
            "{\"a\":}",
            "{a:1}",
            "{\"a\":1,}",
            "\"",
            "\"\\x\"",
            "\"\\u12g4\"",
            "\"tab\there\"",
            "[1}",
            "{\"a\":1]",
            "1 2",
            "[",
            "]",
            "nul",
            "\"unfinished and long",
            "\"\\",
            "\"\\u12",
            "\u{feff}1",
            "'a'",
            "{\"a\":1 \"b\":2}",
        ] {
            assert!(!is_json(no.as_bytes()), "{no}");
        }
        assert!(!is_json(b"\"\xff\""), "strings are UTF-8");
        assert!(!is_json(b"\"seven b\xc3\""));
    }

    #[test]
    fn nesting_costs_neither_stack_nor_correctness() {
        let deep = 3_000_000;
        let mut text = vec![b'['; deep];
        assert!(!is_json(&text));
        text.extend(vec![b']'; deep]);
        assert!(is_json(&text));
        let mixed = "[{\"a\":".repeat(5000) + "1" + &"}]".repeat(5000);
        assert!(is_json(mixed.as_bytes()));
        assert!(!is_json(mixed.replace("1}]}]", "1}]]}").as_bytes()));
    }

    #[test]
    fn a_value_too_deep_is_told_from_a_broken_one() {
        assert_eq!(value(b"[[1]]", 0, 2), Ok(Scanned { end: 5, levels: 2 }));
        assert_eq!(value(b"[[1]]", 0, 1), Err(Fault::TooDeep));
        assert_eq!(value(b"[[1]", 0, 2), Err(Fault::Syntax));
        assert_eq!(value(b"7,", 0, 0), Ok(Scanned { end: 1, levels: 0 }));
    }
}
