//! What of a stored answer holds for its first caller alone, as the answer itself says with `Vary`.
//!
//! The body is kept and stays: a retry gets the same answer. But some headers are an answer to another header of the
//! request, which a retry need not repeat: a browser at another origin must not learn what the first one may do. One function
//! says which headers these are (`depends`). It does not name what describes the kept body (its type, its language), nor
//! content codings ([`super::negotiate`]).
//!
//! What must stay true: a caller that sends what the first one sent gets the headers as they were; any other gets none that
//! was made for the first.

use http::header::{ACCESS_CONTROL_ALLOW_ORIGIN, ACCESS_CONTROL_EXPOSE_HEADERS, ORIGIN, VARY};
use http::{HeaderMap, HeaderName, HeaderValue};

use super::headers::members;

/// The headers of an answer that are an answer to `Origin`, by the beginning of their names (Fetch, 3.3).
const ACCESS_CONTROL: &str = "access-control-";

/// One more (Resource Timing, 4.5). It says by itself whom it is for, as `Access-Control-Allow-Origin` does.
const TIMING_ALLOW_ORIGIN: HeaderName = HeaderName::from_static("timing-allow-origin");

/// What a browser says of the page that asks; none: it is no browser, or a page of the API's own.
pub(super) fn origin_of(headers: &HeaderMap) -> Option<HeaderValue> {
    headers.get(ORIGIN).cloned()
}

/// Whether an answer has headers that depend on the `Origin` of its request, by what it says itself.
pub(super) fn depends_on_origin(headers: &HeaderMap) -> bool {
    let varies =
        || members(headers, &VARY).any(|name| name == "*" || name.eq_ignore_ascii_case("origin"));
    headers.keys().any(depends) && varies()
}

fn depends(name: &HeaderName) -> bool {
    name == TIMING_ALLOW_ORIGIN || name.as_str().starts_with(ACCESS_CONTROL)
}

/// Takes out of an answer's headers what was made for another origin than `asks`. `first`: the origin of the first caller,
/// where that was noted.
pub(super) fn without_others(
    headers: &mut HeaderMap,
    first: Option<Option<HeaderValue>>,
    asks: Option<&HeaderValue>,
) {
    if !depends_on_origin(headers) {
        return;
    }
    let same = first.is_some_and(|first| first.as_ref() == asks);
    // An answer that says whom it is for needs no note: one from before there were any, say.
    let allowed = headers.get(ACCESS_CONTROL_ALLOW_ORIGIN);
    let this = allowed.is_some_and(|allowed| Some(allowed) == asks);
    if same || this {
        return;
    }
    let all = allowed.is_some_and(|allowed| allowed == "*");
    let timing = members(headers, &TIMING_ALLOW_ORIGIN).any(|origin| {
        origin == "*" || asks.is_some_and(|asks| origin.as_bytes() == asks.as_bytes())
    });
    let stays = |name: &HeaderName| if name == TIMING_ALLOW_ORIGIN { timing } else { all };
    let others: Vec<_> =
        headers.keys().filter(|name| depends(name) && !stays(name)).cloned().collect();
    for name in others {
        headers.remove(name);
    }
}

/// Lets pages of other origins read the gateway's own headers where the answer lets them read it at all.
pub(super) fn expose(headers: &mut HeaderMap, own: &[HeaderName]) {
    if !headers.contains_key(ACCESS_CONTROL_ALLOW_ORIGIN) {
        return;
    }
    for name in own.iter().filter(|name| headers.contains_key(*name)).cloned().collect::<Vec<_>>() {
        headers.append(ACCESS_CONTROL_EXPOSE_HEADERS, HeaderValue::from_name(name));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_static(value));
        }
        headers
    }

    fn left(
        lines: &[(&'static str, &'static str)],
        first: Option<Option<&'static str>>,
        asks: Option<&'static str>,
    ) -> usize {
        let mut headers = headers(lines);
        let value = |text: Option<&'static str>| text.map(HeaderValue::from_static);
        without_others(&mut headers, first.map(value), value(asks).as_ref());
        headers.len()
    }

    const A: Option<&str> = Some("https://a.example");
    const B: Option<&str> = Some("https://b.example");

    #[test]
    fn what_was_made_for_an_origin_is_for_that_origin() {
        let full = [
            ("vary", "Accept-Encoding, ORIGIN"),
            ("access-control-allow-origin", "https://a.example"),
            ("access-control-allow-credentials", "true"),
            ("access-control-expose-headers", "location"),
            ("timing-allow-origin", "https://a.example"),
            ("content-type", "text/plain"),
        ];
        for (first, asks, expected) in [
            (Some(A), A, 6),
            (Some(A), B, 2),
            (Some(A), None, 2),
            (Some(A), Some("null"), 2),
            // Nothing was noted: the answer itself names whom it is for.
            (None, A, 6),
            (None, B, 2),
            (None, None, 2),
            // What one caller got, the same one gets again, whatever it is.
            (Some(B), B, 6),
            (Some(None), None, 6),
            (Some(None), B, 2),
        ] {
            assert_eq!(left(&full, first, asks), expected, "{first:?} {asks:?}");
        }
    }

    #[test]
    fn what_depends_on_no_origin_stays() {
        let allowed = ("access-control-allow-origin", "https://a.example");
        assert_eq!(left(&[allowed], None, B), 1, "it does not say that it depends");
        assert_eq!(left(&[("vary", "accept"), allowed], Some(A), B), 2);
        assert_eq!(left(&[("vary", "*"), allowed], Some(A), B), 1, "on anything");
        let any = ("access-control-allow-origin", "*");
        assert_eq!(left(&[("vary", "origin"), any], Some(A), B), 2, "it is for everybody");
        assert_eq!(left(&[("vary", "origin"), ("content-language", "de")], Some(A), B), 2);
        assert!(!depends_on_origin(&headers(&[("vary", "origin")])), "nothing to note");
    }

    #[test]
    fn whom_the_timing_is_for_is_judged_by_itself() {
        let (vary, any) = (("vary", "origin"), ("access-control-allow-origin", "*"));
        let timing = |value| ("timing-allow-origin", value);
        let (a, b) = ("https://a.example", "https://b.example");
        let both = "https://a.example, https://b.example";
        for (lines, first, asks, expected) in [
            // Everybody may read the answer, and only the first one its timing.
            (vec![vary, any, timing(a)], Some(A), B, 2),
            (vec![vary, any, timing(a)], None, B, 2),
            (vec![vary, any, timing(a)], Some(A), None, 2),
            (vec![vary, any, timing(a)], Some(B), A, 3),
            (vec![vary, any, timing("*")], Some(A), B, 3),
            (vec![vary, any, timing(both)], Some(A), B, 3),
            // The timing is all that it says of origins.
            (vec![vary, timing(a)], Some(A), B, 1),
            (vec![vary, timing(a)], None, A, 2),
            (vec![vary, timing(b)], Some(A), A, 2),
            // The answer was for one page, and the timing is for all.
            (vec![vary, ("access-control-allow-origin", a), timing("*")], Some(A), B, 2),
            // It says nothing of depending.
            (vec![any, timing(a)], Some(A), B, 2),
        ] {
            assert_eq!(left(&lines, first, asks), expected, "{lines:?} {first:?} {asks:?}");
        }
    }

    #[test]
    fn own_headers_are_exposed_where_the_answer_is_read_by_pages_and_they_are_there() {
        let own = ["idempotent-replayed", "oncegate-record", "oncegate-stored"]
            .map(HeaderName::from_static);
        let mut seen = headers(&[
            ("access-control-allow-origin", "https://a.example"),
            ("access-control-expose-headers", "location"),
            ("idempotent-replayed", "true"),
            ("oncegate-record", "1"),
        ]);
        expose(&mut seen, &own);
        let exposed: Vec<_> = members(&seen, &ACCESS_CONTROL_EXPOSE_HEADERS).collect();
        assert_eq!(exposed, ["location", "idempotent-replayed", "oncegate-record"]);
        let mut unseen = headers(&[("idempotent-replayed", "true")]);
        expose(&mut unseen, &own);
        assert_eq!(unseen.len(), 1);
    }
}
