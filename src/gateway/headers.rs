//! What may cross the gateway in a message's head, and what may not.
//!
//! A request is checked once, by [`check_framing`], before anything reads it: where two parsers could disagree on where
//! it ends or whom it is for, it is refused. Then [`strip_hop_by_hop`], and only then are key and tenant read: a caller
//! that names the tenant header in `Connection` has taken it away from the upstream, so it must be gone for us too.
//!
//! What must stay true: a header that decides on scope is seen by the gateway if and only if the upstream sees it; a
//! name that belongs to the gateway (`Oncegate-*`, `Idempotent-Replayed`, and the forwarding headers of an untrusted
//! caller) never carries somebody else's value; all lines of a repeated header are treated alike.
//!
//! Everything here is a function of its arguments: no state, no clock, nothing to lose when the process dies.

mod forwarding;
pub(super) mod own;
mod upgrade;

use std::net::IpAddr;

use http::header;
use http::uri::{PathAndQuery, Scheme};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, StatusCode, Uri, Version};

use self::forwarding::is_forwarding;
pub use self::forwarding::{Forwarding, Hop, HostPolicy, Network, forward};
pub use self::upgrade::Offer;

/// Meant for one hop only, named by `Connection` or not (RFC 9110, 7.6.1, and what older senders expect).
const HOP_BY_HOP: [HeaderName; 9] = [
    header::CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    header::PROXY_AUTHENTICATE,
    header::PROXY_AUTHORIZATION,
    header::TE,
    header::TRANSFER_ENCODING,
    header::UPGRADE,
    HeaderName::from_static("http2-settings"),
];

/// Headers that hand out or ask for credentials: never part of a stored answer.
const CREDENTIALS: [HeaderName; 3] = [
    header::AUTHORIZATION,
    header::WWW_AUTHENTICATE,
    HeaderName::from_static("proxy-authentication-info"),
];

/// What frames or routes a message, says what its body is, or hands out credentials comes before the body (RFC 9110, 6.5.1).
const NEVER_TRAILERS: [HeaderName; 11] = [
    header::AUTHORIZATION,
    header::CACHE_CONTROL,
    header::CONTENT_ENCODING,
    header::CONTENT_LENGTH,
    header::CONTENT_RANGE,
    header::CONTENT_TYPE,
    header::EXPECT,
    header::HOST,
    header::MAX_FORWARDS,
    header::SET_COOKIE,
    header::TRAILER,
];

const VIA_US: HeaderValue = HeaderValue::from_static("1.1 oncegate");

/// A request that is refused before anything else looks at it. Answer so, and close the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// 400, 417 or 501.
    pub status: StatusCode,
    /// What is wrong, for the problem document.
    pub detail: &'static str,
}

const fn bad(detail: &'static str) -> Refused {
    Refused { status: StatusCode::BAD_REQUEST, detail }
}

const fn unsupported(detail: &'static str) -> Refused {
    Refused { status: StatusCode::NOT_IMPLEMENTED, detail }
}

/// Refuses what two parsers could read in two ways: framing, Host, target form, CONNECT and unknown expectations.
///
/// `Content-Length` beside `Transfer-Encoding` is not seen here: the server has dropped the length, reads by chunks and
/// closes the connection after the answer, which RFC 9112, 6.3 allows.
pub fn check_framing<B>(request: &Request<B>) -> Result<(), Refused> {
    if request.method() == Method::CONNECT {
        return Err(unsupported("CONNECT is not served here"));
    }
    let old = request.version() < Version::HTTP_11;
    check_transfer_encoding(request.headers(), old)?;
    check_target(request.method(), request.uri())?;
    check_host(request.headers(), old)?;
    let expectations = request.headers().get_all(header::EXPECT);
    if expectations.iter().any(|value| !value.as_bytes().eq_ignore_ascii_case(b"100-continue")) {
        let detail = "the only expectation that can be met is 100-continue";
        return Err(Refused { status: StatusCode::EXPECTATION_FAILED, detail });
    }
    Ok(())
}

fn check_transfer_encoding(headers: &HeaderMap, old: bool) -> Result<(), Refused> {
    let mut lines = headers.get_all(header::TRANSFER_ENCODING).iter();
    let Some(first) = lines.next() else { return Ok(()) };
    if old {
        return Err(bad("HTTP/1.0 has no Transfer-Encoding"));
    }
    if lines.next().is_some() || !is_chunked(first) {
        return Err(unsupported("the only transfer coding that is understood is chunked, once"));
    }
    Ok(())
}

fn is_chunked(value: &HeaderValue) -> bool {
    trim_blanks(value.as_bytes()).eq_ignore_ascii_case(b"chunked")
}

/// Without the blanks and tabs around; nothing else counts as white space in a header.
fn trim_blanks(text: &[u8]) -> &[u8] {
    let blank = |byte: &u8| *byte == b' ' || *byte == b'\t';
    let Some(start) = text.iter().position(|byte| !blank(byte)) else { return &[] };
    let end = text.iter().rposition(|byte| !blank(byte)).map_or(start, |last| last + 1);
    text.get(start..end).unwrap_or_default()
}

fn check_target(method: &Method, uri: &Uri) -> Result<(), Refused> {
    match (uri.scheme(), uri.authority()) {
        (None, None) => {}
        (Some(scheme), Some(authority)) => {
            if *scheme != Scheme::HTTP && *scheme != Scheme::HTTPS {
                return Err(bad("the scheme of the target must be http or https"));
            }
            if !is_host(authority.as_str().as_bytes()) {
                return Err(bad("the authority of the target must be a host and a port"));
            }
        }
        (None, Some(_)) | (Some(_), None) => {
            return Err(bad("the target must be a path, an http URL, or * with OPTIONS"));
        }
    }
    let path = uri.path();
    if path.starts_with('/') || (path == "*" && method == Method::OPTIONS) {
        return Ok(());
    }
    Err(bad("the target must be a path, an http URL, or * with OPTIONS"))
}

fn check_host(headers: &HeaderMap, old: bool) -> Result<(), Refused> {
    let mut lines = headers.get_all(header::HOST).iter();
    match (lines.next(), lines.next()) {
        (None, _) if old => Ok(()),
        (None, _) => Err(bad("the request has no Host")),
        (Some(_), Some(_)) => Err(bad("the request has several Host lines")),
        (Some(host), None) if is_host(host.as_bytes()) => Ok(()),
        (Some(_), None) => Err(bad("Host is not a host name and a port")),
    }
}

/// `uri-host [":" port]` of RFC 9110, 7.2, and not empty.
fn is_host(text: &[u8]) -> bool {
    let (host, port) = match text.strip_prefix(b"[") {
        Some(rest) => {
            let mut halves = rest.splitn(2, |byte| *byte == b']');
            let literal = halves.next().unwrap_or_default();
            let Some(after) = halves.next() else { return false };
            let address = std::str::from_utf8(literal).ok().and_then(|t| t.parse().ok());
            let Some(IpAddr::V6(_)) = address else { return false };
            match (after.is_empty(), after.strip_prefix(b":")) {
                (true, _) => (literal, None),
                (false, Some(port)) => (literal, Some(port)),
                (false, None) => return false,
            }
        }
        None => {
            let mut halves = text.splitn(2, |byte| *byte == b':');
            let host = halves.next().unwrap_or_default();
            if !host.iter().all(|byte| is_name_byte(*byte)) {
                return false;
            }
            (host, halves.next())
        }
    };
    let port_is_fine = port.is_none_or(|p| p.len() <= 5 && p.iter().all(u8::is_ascii_digit));
    !host.is_empty() && port_is_fine
}

/// `reg-name`: unreserved, percent-encoded and sub-delimiters.
fn is_name_byte(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~%!$&'()*+,;=".contains(&byte)
}

/// Turns an absolute-form target into origin-form; its authority replaces Host (RFC 9112, 3.2.2).
///
/// After [`check_framing`] only. The bytes of path and query stay as they came.
pub fn to_origin_form<B>(request: &mut Request<B>) {
    let Some(authority) = request.uri().authority() else { return };
    let host = HeaderValue::from_str(authority.as_str());
    let target = match (request.uri().path(), request.uri().query()) {
        (path, Some(query)) => format!("{path}?{query}"),
        (path, None) => path.to_owned(),
    };
    // Both were parsed out of a valid URI, so neither can fail; if one did, the request would go on as it came.
    if let (Ok(host), Ok(target)) = (host, PathAndQuery::try_from(target)) {
        request.headers_mut().insert(header::HOST, host);
        *request.uri_mut() = Uri::from(target);
    }
}

/// Removes what is meant for this hop only: all that any `Connection` line names, then the fixed list.
///
/// For requests, answers and trailers. What says where a message ends, whom it is for, or through whom it came cannot
/// be taken away by naming it in `Connection`.
pub fn strip_hop_by_hop(headers: &mut HeaderMap) {
    for name in named_by_connection(headers) {
        let protected = name == header::HOST
            || name == header::CONTENT_LENGTH
            || name == header::VIA
            || is_forwarding(&name);
        if !protected {
            headers.remove(name);
        }
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
}

/// The options of all `Connection` lines: reading only the first one lets the rest through.
fn named_by_connection(headers: &HeaderMap) -> Vec<HeaderName> {
    headers
        .get_all(header::CONNECTION)
        .iter()
        .flat_map(|line| line.as_bytes().split(|byte| *byte == b','))
        .filter_map(|option| HeaderName::from_bytes(trim_blanks(option)).ok())
        .collect()
}

/// Of an answer's headers those that go on to a caller.
pub(super) fn without_hops(mut headers: HeaderMap) -> HeaderMap {
    strip_hop_by_hop(&mut headers);
    drop_own(&mut headers);
    headers
}

/// Whether an answer's status can have a body at all (RFC 9110, 6.4.1).
pub(super) fn has_body(status: StatusCode) -> bool {
    !status.is_informational()
        && status != StatusCode::NO_CONTENT
        && status != StatusCode::NOT_MODIFIED
}

/// The members of a list header, of all its lines.
pub(super) fn members<'h>(
    headers: &'h HeaderMap,
    name: &HeaderName,
) -> impl Iterator<Item = &'h str> {
    let lines = headers.get_all(name).into_iter().filter_map(|line| line.to_str().ok());
    lines.flat_map(|line| line.split(',')).map(str::trim).filter(|member| !member.is_empty())
}

/// Removes the names that only the gateway may use, in any spelling that an upstream may take for them.
pub fn drop_own(headers: &mut HeaderMap) {
    remove_where(headers, |name| {
        let ours = |ours: &str| name.bytes().map(hyphened).take(ours.len()).eq(ours.bytes());
        ours("oncegate-")
            || (ours("idempotent-replayed") && name.len() == "idempotent-replayed".len())
    });
}

/// As CGI and WSGI upstreams see it.
fn hyphened(byte: u8) -> u8 {
    if byte == b'_' { b'-' } else { byte }
}

/// Removes look-alikes: `X_Tenant_Id` where `X-Tenant-Id` is one of `names`.
///
/// CGI and WSGI upstreams take both for the same header, so a twin would say something else to them than to us.
pub fn drop_twins(headers: &mut HeaderMap, names: &[&HeaderName]) {
    remove_where(headers, |name| {
        name.contains('_') && names.iter().any(|ours| is_twin(name, ours.as_str()))
    });
}

fn is_twin(name: &str, ours: &str) -> bool {
    name != ours && name.bytes().map(hyphened).eq(ours.bytes().map(hyphened))
}

fn remove_where(headers: &mut HeaderMap, unwanted: impl Fn(&str) -> bool) {
    let names: Vec<_> = headers.keys().filter(|name| unwanted(name.as_str())).cloned().collect();
    for name in names {
        headers.remove(name);
    }
}

/// Notes on a message that it passed here (RFC 9110, 7.6.3).
pub fn add_via(headers: &mut HeaderMap) {
    headers.append(header::VIA, VIA_US);
}

/// What of an answer's head is stored for replay: end-to-end headers only, in their order and repetition.
///
/// Left out are hop-by-hop headers, the gateway's own, those that frame the message (a replay frames its own body anew,
/// and a 204 or 304 has no length to repeat), those that hand out credentials, and `drop`. `Date` stays: it says when the
/// upstream made the answer.
#[must_use]
pub fn kept(headers: &HeaderMap, drop: &[HeaderName]) -> HeaderMap {
    let mut kept = headers.clone();
    strip_hop_by_hop(&mut kept);
    drop_own(&mut kept);
    let framing = [header::CONTENT_LENGTH, header::TRAILER];
    for name in framing.iter().chain(&CREDENTIALS).chain(drop) {
        kept.remove(name);
    }
    kept
}

/// Makes trailers fit to go on. hyper filters them on the way out only, and silently.
pub fn clean_trailers(trailers: &mut HeaderMap) {
    strip_hop_by_hop(trailers);
    drop_own(trailers);
    for name in NEVER_TRAILERS {
        trailers.remove(name);
    }
}

#[cfg(test)]
mod tests;
