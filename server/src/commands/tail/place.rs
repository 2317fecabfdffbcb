//! Where a tail is: one place a vBucket, and all of them as a word that can be pasted.

use std::collections::BTreeMap;

use anyhow::{Result, bail};
use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD as BASE64;
use types::{Seqno, VbId, VbUuid};

/// The first byte of a token: what follows is of this form.
const FORM: u8 = 1;

/// How far a vBucket was told, in which history, and within which snapshot.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    pub uuid: VbUuid,
    pub seqno: Seqno,
    pub snap_start: Seqno,
    pub snap_end: Seqno,
}

impl Place {
    /// All up to here, and nothing of a snapshot.
    pub fn at(uuid: VbUuid, seqno: Seqno) -> Place {
        Place { uuid, seqno, snap_start: seqno, snap_end: seqno }
    }
}

pub type Places = BTreeMap<VbId, Place>;

/// vBuckets at their beginning are left out: they are found there without being told.
pub fn token(places: &Places) -> String {
    let mut bytes = vec![FORM];
    let mut next = 0;
    for (vb, place) in places.iter().filter(|(_, place)| place.seqno.0 > 0) {
        push(&mut bytes, u64::from(vb.0) - next);
        next = u64::from(vb.0) + 1;
        push(&mut bytes, place.uuid.0);
        push(&mut bytes, place.seqno.0);
        push(&mut bytes, place.seqno.0 - place.snap_start.0);
        push(&mut bytes, place.snap_end.0 - place.seqno.0);
    }
    BASE64.encode(bytes)
}

/// Reads a token.
pub fn parse(token: &str) -> Result<Places> {
    let Ok(bytes) = BASE64.decode(token.trim()) else { return unreadable() };
    let Some((&FORM, mut rest)) = bytes.split_first() else { return unreadable() };
    let (mut places, mut next) = (Places::new(), 0u64);
    while !rest.is_empty() {
        let mut number = || pull(&mut rest);
        let numbers = (|| Some((number()?, number()?, number()?, number()?, number()?)))();
        let place = numbers.and_then(|(skipped, uuid, seqno, behind, ahead)| {
            let vb = u16::try_from(next.checked_add(skipped)?).ok()?;
            let snap_start = Seqno(seqno.checked_sub(behind)?);
            let snap_end = Seqno(seqno.checked_add(ahead)?);
            Some((VbId(vb), Place { uuid: VbUuid(uuid), seqno: Seqno(seqno), snap_start, snap_end }))
        });
        let Some((vb, place)) = place else { return unreadable() };
        next = u64::from(vb.0) + 1;
        places.insert(vb, place);
    }
    Ok(places)
}

fn unreadable<T>() -> Result<T> {
    bail!(
        "--from takes now, beginning, or a token that an earlier tail printed; this is none of them, or only part of one"
    )
}

/// Seven bits a byte, the lowest first.
fn push(bytes: &mut Vec<u8>, mut n: u64) {
    while n >= 0x80 {
        bytes.push(n as u8 | 0x80);
        n >>= 7;
    }
    bytes.push(n as u8);
}

fn pull(bytes: &mut &[u8]) -> Option<u64> {
    let mut n = 0u64;
    for shift in (0..64).step_by(7) {
        let (&byte, rest) = bytes.split_first()?;
        *bytes = rest;
        n |= u64::from(byte & 0x7f) << shift;
        if byte & 0x80 == 0 {
            return Some(n);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_read_back_is_where_it_was_taken() {
        let mut places = Places::new();
        places.insert(VbId(0), Place::at(VbUuid(0xaabb_ccdd_eeff), Seqno(300)));
        places.insert(VbId(7), Place { snap_end: Seqno(9), ..Place::at(VbUuid(5), Seqno(4)) });
        places.insert(VbId(1023), Place::at(VbUuid(u64::MAX >> 16), Seqno(1 << 47)));
        assert_eq!(parse(&token(&places)).unwrap(), places);
        places.insert(VbId(8), Place::default());
        assert!(!parse(&token(&places)).unwrap().contains_key(&VbId(8)));
        assert_eq!(parse(&token(&Places::new())).unwrap(), Places::new());
    }

    #[test]
    fn what_is_no_token_is_refused_and_no_cut_of_one_is_read_as_another_place() {
        let places = Places::from([(VbId(3), Place::at(VbUuid(1 << 40), Seqno(1 << 20)))]);
        let whole = token(&places);
        for wrong in ["", "yesterday", "AA", "Agg", &whole[..whole.len() - 3], &whole[1..]] {
            assert!(parse(wrong).is_err(), "{wrong:?}");
        }
        assert_eq!(parse(&format!(" {whole}\n")).unwrap(), places);
    }
}
