//! What a stored answer remembers besides status, headers and body: notes of ours among its headers.
//!
//! They have names that begin with `oncegate-`, which no upstream can bring in ([`super::headers::drop_own`]), so they
//! cannot be forged; and in the same column, so that both stores, the spill and every version of the program keep them.
//! [`take`] reads them and takes them out: no caller sees them as headers.

use http::header::CONTENT_ENCODING;
use http::{HeaderMap, HeaderName, HeaderValue};

/// One line for each trailer: `name: value`.
const TRAILER: HeaderName = HeaderName::from_static("oncegate-trailer");
/// The answer's coding was the upstream's own choice: its caller had not said what it takes.
const UNASKED: HeaderName = HeaderName::from_static("oncegate-coding-unasked");

/// What the first caller sent as `Origin`, where the answer depends on it; empty: nothing.
const FOR_ORIGIN: HeaderName = HeaderName::from_static("oncegate-for-origin");

/// What was noted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Notes {
    /// What came behind the body.
    pub(super) trailers: HeaderMap,
    /// Whether the first caller got a content coding without having named any.
    pub(super) unasked: bool,
    /// What the first caller sent as `Origin`; `None`: it was not noted, because the answer does not depend on it, or was
    /// kept before this was noted.
    pub(super) origin: Option<Option<HeaderValue>>,
}

/// Keeps trailers.
pub(super) fn keep_trailers(kept: &mut HeaderMap, trailers: &HeaderMap) {
    for (name, value) in trailers {
        let line = [name.as_str().as_bytes(), b": ", value.as_bytes()].concat();
        if let Ok(line) = HeaderValue::from_bytes(&line) {
            kept.append(TRAILER, line);
        }
    }
}

/// Keeps that the caller had not said what it takes, where that matters.
pub(super) fn keep_unasked(kept: &mut HeaderMap) {
    if kept.contains_key(CONTENT_ENCODING) {
        kept.insert(UNASKED, HeaderValue::from_static("true"));
    }
}

/// Whether it was noted that the first caller had not said what it takes.
pub(super) fn is_unasked(kept: &HeaderMap) -> bool {
    kept.contains_key(UNASKED)
}

/// Keeps for which page an answer was made.
pub(super) fn keep_origin(kept: &mut HeaderMap, origin: Option<&HeaderValue>) {
    let origin = origin.cloned().unwrap_or_else(|| HeaderValue::from_static(""));
    kept.insert(FOR_ORIGIN, origin);
}

/// Takes the notes out of stored headers.
pub(super) fn take(kept: &mut HeaderMap) -> Notes {
    let unasked = kept.remove(UNASKED).is_some();
    let mut trailers = HeaderMap::new();
    for line in kept.get_all(TRAILER) {
        if let Some((name, value)) = trailer(line) {
            trailers.append(name, value);
        }
    }
    kept.remove(TRAILER);
    let origin = kept.remove(FOR_ORIGIN).map(|noted| Some(noted).filter(|noted| !noted.is_empty()));
    Notes { trailers, unasked, origin }
}

fn trailer(line: &HeaderValue) -> Option<(HeaderName, HeaderValue)> {
    let line = line.as_bytes();
    let colon = line.iter().position(|byte| *byte == b':')?;
    let name = HeaderName::from_bytes(line.get(..colon)?).ok()?;
    let value = line.get(colon..)?.strip_prefix(b": ")?;
    Some((name, HeaderValue::from_bytes(value).ok()?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn trailers_come_back_in_their_order_and_repetition() {
        let mut trailers = HeaderMap::new();
        for (name, value) in
            [("x-sum", &b"a: b"[..]), ("x-n", b"1"), ("x-sum", b"caf\xe9"), ("x-e", b"")]
        {
            let name = HeaderName::from_static(name);
            trailers.append(name, HeaderValue::from_bytes(value).unwrap());
        }
        let mut kept = HeaderMap::new();
        keep_trailers(&mut kept, &trailers);
        keep_unasked(&mut kept);
        assert_eq!(take(&mut kept), Notes { trailers, unasked: false, origin: None });
        assert!(kept.is_empty());
    }

    #[test]
    fn an_origin_comes_back_and_so_does_that_there_was_none() {
        let origin = HeaderValue::from_static("https://a.example");
        for noted in [None, Some(origin)] {
            let mut kept = HeaderMap::new();
            keep_origin(&mut kept, noted.as_ref());
            assert_eq!(take(&mut kept).origin, Some(noted));
            assert!(kept.is_empty());
        }
        assert_eq!(take(&mut HeaderMap::new()).origin, None);
    }
}
