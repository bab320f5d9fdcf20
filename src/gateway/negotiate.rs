//! What a caller takes, and a stored answer in that form (RFC 9110, 12.5.3).
//!
//! An answer was made for its first caller. A later one may take other content codings: then the body is decoded for it, and
//! what the headers said of the coded bytes is corrected. Whoever asks as the first caller did gets the same bytes.
//!
//! What must stay true: no caller that says what it takes gets a coding that it does not take. A body that cannot be
//! decoded (an unknown coding, malformed, longer than the bound, `no-transform`) is refused then, with what it takes to get
//! it; never cut, never passed on undecoded. Bodies are decoded off the threads that serve connections, within a permit that
//! was taken before.

use bytes::Bytes;
use http::header::{
    ACCEPT_ENCODING, CACHE_CONTROL, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_RANGE, ETAG, TE, VARY,
};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Version};

use super::budget::{AnswerPermit, Permit};
use super::headers::{has_body, members};
use super::notes;
use super::problem::{Name, Problem};
use super::vary;
use crate::fingerprint::coding::{self, Coding};
use crate::record::{Answer, KeptBody};

/// How much longer than what is kept of an answer its decoded body may be.
const EXPANSION_MAX: usize = 16;

/// What is said of the coded bytes, and of no others.
const OF_THE_BYTES: [HeaderName; 4] = [
    HeaderName::from_static("content-md5"),
    HeaderName::from_static("digest"),
    HeaderName::from_static("content-digest"),
    HeaderName::from_static("repr-digest"),
];

/// The registered content codings. Other names (`utf-8`, `none`) code nothing, whatever their senders mean by them.
const CODINGS: [&str; 13] = [
    "aes128gcm",
    "br",
    "compress",
    "dcb",
    "dcz",
    "deflate",
    "exi",
    "gzip",
    "identity",
    "pack200-gzip",
    "x-compress",
    "x-gzip",
    "zstd",
];

/// What a caller takes of an answer.
#[derive(Clone, Debug, Default)]
pub(super) struct Accepts {
    /// Codings by name, and whether they are taken. None: the caller does not say.
    codings: Option<Vec<(String, bool)>>,
    /// Whether it reads trailers, and can be sent any.
    pub(super) trailers: bool,
    /// The page that asks, where a browser says so.
    pub(super) origin: Option<HeaderValue>,
}

impl Accepts {
    /// As a request says, before what it says to this hop is removed.
    pub(super) fn of<B>(request: &Request<B>) -> Self {
        let chunked = request.version() >= Version::HTTP_11;
        let headers = request.headers();
        let reads = members(headers, &TE).any(|member| member.eq_ignore_ascii_case("trailers"));
        let origin = vary::origin_of(headers);
        Self { codings: codings(headers), trailers: reads && chunked, origin }
    }

    fn coding(&self, coding: &str) -> bool {
        let Some(codings) = &self.codings else { return true };
        let named = |name: &str| {
            let mut named = codings.iter().filter(|(known, _)| known == name).peekable();
            named.peek().is_some().then(|| named.all(|(_, taken)| *taken))
        };
        named(coding).or_else(|| named("*")).unwrap_or(false)
    }
}

/// The caller's codings: `x-gzip` is `gzip`. A weight that is none does not count as a yes.
fn codings(headers: &HeaderMap) -> Option<Vec<(String, bool)>> {
    headers.get(ACCEPT_ENCODING)?;
    let read = |member: &str| {
        let mut parts = member.split(';');
        let name = plain(parts.next().unwrap_or_default());
        let weight = parts.find_map(|part| {
            let (name, value) = part.split_once('=')?;
            name.trim().eq_ignore_ascii_case("q").then(|| value.trim().parse::<f32>())
        });
        (name, weight.is_none_or(|weight| weight.is_ok_and(|weight| weight > 0.0)))
    };
    Some(members(headers, &ACCEPT_ENCODING).map(read).collect())
}

fn plain(name: &str) -> String {
    let name = name.trim().to_ascii_lowercase();
    match name.strip_prefix("x-") {
        Some(known @ ("gzip" | "compress")) => known.to_owned(),
        Some(_) | None => name,
    }
}

/// In which form an answer is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Form {
    AsStored,
    /// Decoded, from these codings, in the order in which they were applied. `else_as_stored`: where that fails.
    Decoded {
        codings: Vec<Coding>,
        else_as_stored: bool,
    },
    /// In none that this caller takes.
    Refused,
}

fn form(accepts: &Accepts, answer: &Answer) -> Form {
    let headers = &answer.headers;
    let mut names: Vec<String> = members(headers, &CONTENT_ENCODING).map(plain).collect();
    names.retain(|name| name != "identity");
    let empty = !matches!(&answer.body, KeptBody::Whole(body) if !body.is_empty());
    if names.is_empty() || empty || !has_body(answer.status) {
        return Form::AsStored;
    }
    let registered = names.iter().all(|name| CODINGS.contains(&name.as_str()));
    let all_taken = names.iter().all(|name| accepts.coding(name));
    // Who says nothing takes everything; what was coded for somebody who did say is better decoded for it.
    let silent = accepts.codings.is_none();
    if !registered || all_taken && (!silent || notes::is_unasked(headers)) {
        return Form::AsStored;
    }
    let fixed = headers.contains_key(CONTENT_RANGE)
        || members(headers, &CACHE_CONTROL).any(|word| word.eq_ignore_ascii_case("no-transform"));
    match (coding::codings(headers), silent) {
        (Ok(codings), else_as_stored) if !fixed => Form::Decoded { codings, else_as_stored },
        (Ok(_) | Err(_), true) => Form::AsStored,
        (Ok(_) | Err(_), false) => Form::Refused,
    }
}

/// Why a caller does not get a stored answer now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Unfit {
    /// It takes no form in which the answer can be sent.
    NotTaken,
    /// The budget to decode it is used up.
    Exhausted,
}

impl Unfit {
    /// As a problem, about an answer with these headers.
    pub(super) fn problem(self, answer: &Answer) -> Problem {
        match self {
            Self::NotTaken => {
                let coding = members(&answer.headers, &CONTENT_ENCODING).collect::<Vec<_>>();
                Problem::new(Name::NotAcceptable).detail(format!(
                    "The first request under this key was executed. Its answer is kept in a content coding that this request does not accept, and cannot be sent without. Send the request again with the same key and `Accept-Encoding: {}`.",
                    coding.join(", ")
                ))
            }
            Self::Exhausted => Problem::new(Name::Overloaded).detail(
                "The first request under this key was executed. Its answer has to be decoded for this request, and a limit of the gateway is reached. Send it again with the same key.",
            ),
        }
    }
}

/// A decoded answer, with the permit for its body.
pub(super) struct Decoded {
    pub(super) answer: Answer,
    pub(super) held: AnswerPermit,
}

/// An answer in the form that a caller takes; `None`: as it is stored. `kept_max`: how long a kept body may be.
pub(super) async fn fit(
    accepts: &Accepts,
    answer: &Answer,
    kept_max: usize,
    permit: &Permit,
) -> Result<Option<Decoded>, Unfit> {
    let (codings, else_as_stored) = match form(accepts, answer) {
        Form::AsStored => return Ok(None),
        Form::Refused => return Err(Unfit::NotTaken),
        Form::Decoded { codings, else_as_stored } => (codings, else_as_stored),
    };
    let KeptBody::Whole(body) = answer.body.clone() else { return Ok(None) };
    let (max, scratch) = permit.scratch(kept_max, kept_max.saturating_mul(EXPANSION_MAX));
    let scratch = scratch.map_err(|_| Unfit::Exhausted)?;
    // The permit stays with the work, which goes on where the caller hangs up.
    let decoding = tokio::task::spawn_blocking(move || {
        let decoded = coding::decode(&codings, &body, max).ok()?;
        let held = scratch.cut(decoded.len());
        Some((decoded, held))
    });
    match decoding.await {
        Ok(Some((body, held))) => {
            Ok(Some(Decoded { answer: without_coding(answer, body.into()), held }))
        }
        Ok(None) | Err(_) if else_as_stored => Ok(None),
        Ok(None) | Err(_) => Err(Unfit::NotTaken),
    }
}

/// The same answer with its body decoded.
fn without_coding(answer: &Answer, body: Bytes) -> Answer {
    let mut decoded = Answer { body: KeptBody::Whole(body), ..answer.clone() };
    let headers = &mut decoded.headers;
    headers.remove(CONTENT_ENCODING);
    headers.remove(CONTENT_LENGTH);
    for name in OF_THE_BYTES {
        headers.remove(name);
    }
    if !members(&answer.headers, &VARY).any(|name| name == "*" || name == ACCEPT_ENCODING) {
        headers.append(VARY, HeaderValue::from_name(ACCEPT_ENCODING));
    }
    // The same content in other bytes: no longer the one that a strong tag names.
    if let Some(tag) = headers.get(ETAG).filter(|tag| tag.as_bytes().starts_with(b"\"")) {
        match HeaderValue::from_bytes(&[b"W/", tag.as_bytes()].concat()) {
            Ok(weak) => drop(headers.insert(ETAG, weak)),
            Err(_) => drop(headers.remove(ETAG)),
        }
    }
    decoded
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use futures_util::FutureExt as _;
    use http::StatusCode;

    use super::*;
    use crate::gateway::budget::Budget;
    use crate::record::Spelling;

    fn accepting(accepts: Option<&str>) -> Accepts {
        let mut request = Request::new(());
        for line in accepts.into_iter().flat_map(|lines| lines.split('\n')) {
            request.headers_mut().append(ACCEPT_ENCODING, line.parse().unwrap());
        }
        Accepts::of(&request)
    }

    fn stored(coding: &str, more: &[(&'static str, &str)], body: &'static [u8]) -> Answer {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_ENCODING, coding.parse().unwrap());
        for (name, value) in more {
            headers.append(*name, value.parse().unwrap());
        }
        let body = KeptBody::Whole(Bytes::from_static(body));
        Answer { status: StatusCode::OK, headers, spelling: Spelling::default(), body }
    }

    fn formed(accepts: Option<&str>, answer: &Answer) -> &'static str {
        match form(&accepting(accepts), answer) {
            Form::AsStored => "stored",
            Form::Decoded { else_as_stored: false, .. } => "decoded",
            Form::Decoded { else_as_stored: true, .. } => "decoded, or stored",
            Form::Refused => "refused",
        }
    }

    #[test]
    fn what_a_caller_says_of_codings_decides() {
        let gzip = stored("gzip", &[], b"x");
        for (accepts, expected) in [
            (Some("gzip"), "stored"),
            (Some("br, GZip;q=0.001"), "stored"),
            (Some("x-gzip"), "stored"),
            (Some("*"), "stored"),
            (Some("br\ngzip"), "stored"),
            (Some("gzip;q=0"), "decoded"),
            (Some("gzip; q=0.000"), "decoded"),
            (Some("gzip;q=zz"), "decoded"),
            (Some("*, gzip;q=0"), "decoded"),
            (Some("gzip, gzip;q=0"), "decoded"),
            (Some("*;q=0"), "decoded"),
            (Some("br"), "decoded"),
            (Some(""), "decoded"),
            (Some("identity"), "decoded"),
            (Some("identity;q=0"), "decoded"),
            (None, "decoded, or stored"),
        ] {
            assert_eq!(formed(accepts, &gzip), expected, "{accepts:?}");
        }
        assert_eq!(formed(Some("gzip"), &stored("gzip, br", &[], b"x")), "decoded");
        assert_eq!(formed(Some("br, gzip"), &stored("gzip, br", &[], b"x")), "stored");
    }

    #[test]
    fn what_needs_no_decoding_or_bears_none_stays_as_it_is() {
        for (accepts, answer, expected) in [
            (Some("br"), stored("identity", &[], b"x"), "stored"),
            (Some("gzip"), stored("utf-8", &[], b"x"), "stored"),
            (Some("gzip"), stored("compress", &[], b"x"), "refused"),
            (Some("x-compress"), stored("compress", &[], b"x"), "stored"),
            (None, stored("compress", &[], b"x"), "stored"),
            (Some("br"), stored("gzip", &[], b""), "stored"),
            (None, stored("gzip", &[("oncegate-coding-unasked", "true")], b"x"), "stored"),
            (Some("br"), stored("gzip", &[("oncegate-coding-unasked", "true")], b"x"), "decoded"),
            (Some("br"), stored("gzip", &[("cache-control", "no-transform")], b"x"), "refused"),
            (None, stored("gzip", &[("cache-control", "private, No-Transform")], b"x"), "stored"),
            (Some("br"), stored("gzip", &[("content-range", "bytes 0-0/9")], b"x"), "refused"),
        ] {
            assert_eq!(formed(accepts, &answer), expected, "{accepts:?} {answer:?}");
        }
        let not_modified = Answer { status: StatusCode::NOT_MODIFIED, ..stored("gzip", &[], b"x") };
        assert_eq!(formed(Some("br"), &not_modified), "stored");
    }

    #[test]
    fn what_the_headers_said_of_the_coded_bytes_is_corrected() {
        let said = [
            ("etag", "\"a\""),
            ("vary", "Origin"),
            ("content-md5", "x"),
            ("digest", "x"),
            ("content-digest", "x"),
            ("repr-digest", "x"),
            ("x-kept", "y"),
        ];
        let decoded = without_coding(&stored("gzip", &said, b"x"), Bytes::from_static(b"y"));
        let mut lines: Vec<String> = decoded
            .headers
            .iter()
            .map(|(name, value)| format!("{name}: {}", value.to_str().unwrap()))
            .collect();
        lines.sort();
        assert_eq!(lines, ["etag: W/\"a\"", "vary: Origin", "vary: accept-encoding", "x-kept: y"]);
        let again = [("etag", "W/\"a\""), ("vary", "Accept-Encoding")];
        let decoded = without_coding(&stored("gzip", &again, b"x"), Bytes::new());
        assert_eq!(decoded.headers.get(ETAG).unwrap(), "W/\"a\"");
        assert_eq!(decoded.headers.get_all(VARY).iter().count(), 1);
    }

    #[test]
    fn trailers_are_for_those_who_read_them() {
        let of = |version: Version, te: &'static str| {
            let mut request = Request::new(());
            *request.version_mut() = version;
            request.headers_mut().insert(TE, HeaderValue::from_static(te));
            Accepts::of(&request).trailers
        };
        assert!(of(Version::HTTP_11, "gzip, Trailers"));
        assert!(!of(Version::HTTP_11, "gzip"));
        assert!(!of(Version::HTTP_10, "trailers"));
    }

    #[test]
    fn the_permit_of_a_body_that_is_decoded_for_nobody_any_more_is_kept_until_it_is_decoded() {
        const KIB: usize = 1024;
        let mut runtime = tokio::runtime::Builder::new_current_thread();
        let runtime = runtime.enable_all().max_blocking_threads(1).build().unwrap();
        runtime.block_on(async {
            let (go, goes) = mpsc::channel::<()>();
            // The only thread is taken: decoding waits.
            let before = tokio::task::spawn_blocking(move || goes.recv().ok());
            let budget = Budget::new(10, 10, 80 * KIB);
            let permit = budget.admit(1, 1).unwrap();
            let answer = stored("gzip", &[], b"no gzip");
            let accepts = accepting(Some("identity"));
            let mut fitting = Box::pin(fit(&accepts, &answer, 40 * KIB, &permit));
            assert!(fitting.as_mut().now_or_never().is_none());
            drop(fitting);
            assert!(budget.admit(40 * KIB, 1).is_err(), "the work goes on, and has its permit");
            drop(go);
            before.await.unwrap();
            // Behind it on the same thread.
            tokio::task::spawn_blocking(|| ()).await.unwrap();
            assert!(budget.admit(40 * KIB, 1).is_ok());
        });
    }
}
