//! Form pairs, of a query or of a body: decoded bytes, sorted by name.
//!
//! The order of different names does not matter, that of equal names does. Values are compared as decoded bytes, never as
//! repaired text: two different broken UTF-8 sequences stay different. A `%` that begins no escape makes the whole text
//! unreadable (`None`), because upstreams disagree on it; it is then compared byte by byte.

use std::borrow::Cow;

use percent_encoding::percent_decode;

use super::json::write_length;

/// A pair as decoded.
pub(crate) type Pair<'a> = (Cow<'a, [u8]>, Cow<'a, [u8]>);

/// Reads pairs in the order in which they stand. `None`: a `%` that begins no escape.
pub(crate) fn pairs(text: &[u8]) -> Option<Vec<Pair<'_>>> {
    let mut pairs = Vec::new();
    for piece in text.split(|b| *b == b'&').filter(|piece| !piece.is_empty()) {
        let mut halves = piece.splitn(2, |b| *b == b'=');
        let name = decode(halves.next().unwrap_or_default())?;
        let value = decode(halves.next().unwrap_or_default())?;
        pairs.push((name, value));
    }
    Some(pairs)
}

fn decode(text: &[u8]) -> Option<Cow<'_, [u8]>> {
    if !text.iter().any(|b| *b == b'%' || *b == b'+') {
        return Some(Cow::Borrowed(text));
    }
    let mut escapes = text.split(|b| *b == b'%').skip(1);
    let whole = |rest: &[u8]| rest.get(..2).is_some_and(|d| d.iter().all(u8::is_ascii_hexdigit));
    if !escapes.all(whole) {
        return None;
    }
    let spaced = text.iter().map(|b| if *b == b'+' { b' ' } else { *b }).collect::<Vec<_>>();
    Some(Cow::Owned(percent_decode(&spaced).collect()))
}

/// Writes the pairs in canonical order, without those that `ignore` names. `false`: nothing was written.
pub(crate) fn write(text: &[u8], ignore: &[String], out: &mut Vec<u8>) -> bool {
    let Some(mut pairs) = pairs(text) else {
        return false;
    };
    pairs.retain(|(name, _)| !ignore.iter().any(|ignored| ignored.as_bytes() == name.as_ref()));
    pairs.sort_by(|(a, _), (b, _)| a.cmp(b));
    write_length(out, pairs.len());
    for half in pairs.iter().flat_map(|(name, value)| [name, value]) {
        write_length(out, half.len());
        out.extend_from_slice(half);
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    fn form(text: &[u8]) -> Option<Vec<u8>> {
        let mut out = Vec::new();
        write(text, &["ts".to_owned()], &mut out).then_some(out)
    }

    #[test]
    fn decoded_pairs_decide() {
        assert_eq!(form(b"a=x+y&b=2"), form(b"b=%32&&a=x%20y&ts=5"));
        assert_eq!(form(b""), form(b"ts=1"));
        for (a, b) in [
            (&b"a=1&a=2"[..], &b"a=2&a=1"[..]),
            (b"a=1%26b=2", b"a=1&b=2"),
            (b"a=%FF", b"a=%FE"),
            (b"a=%FF", b"a=%EF%BF%BD"),
            (b"ab=c", b"a=bc"),
            (b"a=+", b"a=%2B"),
        ] {
            assert_ne!(form(a), form(b), "{a:?}");
        }
        assert_eq!(form(b"a=%zz"), None);
        assert_eq!(form(b"a=%4"), None);
    }
}
