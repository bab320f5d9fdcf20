//! Decides who is an operator: a client that sends the token. Without a configured token, a client that calls this machine by
//! a local name and from no page of another origin.

use axum::extract::{Request, State as Extract};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use http::header::{AUTHORIZATION, CACHE_CONTROL, HOST, ORIGIN};
use http::{HeaderMap, HeaderValue, Uri};

use super::answer::Problem;
use super::state::{State, Token};

/// Refuses every request that is not an operator's.
pub(super) async fn guard(
    Extract(state): Extract<State>,
    request: Request,
    next: Next,
) -> Response {
    match no_operator(&state, request.uri(), request.headers()) {
        Some(problem) => problem.into_response(),
        None => next.run(request).await,
    }
}

/// Why a request is not an operator's; `None`: it is.
pub(super) fn no_operator(state: &State, uri: &Uri, headers: &HeaderMap) -> Option<Problem> {
    match &state.token {
        Some(token) if !bears(token, headers) => Some(Problem::Unauthorized),
        None if !names_this_machine(uri, headers) => Some(Problem::ForeignHost),
        None if is_foreign(headers) => Some(Problem::ForeignHost),
        Some(_) | None => None,
    }
}

fn bears(token: &Token, headers: &HeaderMap) -> bool {
    let mut lines = headers.get_all(AUTHORIZATION).iter();
    let (Some(line), None) = (lines.next(), lines.next()) else { return false };
    let Some((scheme, sent)) = line.as_bytes().split_at_checked(7) else { return false };
    scheme.eq_ignore_ascii_case(b"bearer ") && token.is(sent.trim_ascii())
}

fn names_this_machine(uri: &Uri, headers: &HeaderMap) -> bool {
    let mut lines = headers.get_all(HOST).iter();
    let (Some(line), None) = (lines.next(), lines.next()) else { return false };
    let Ok(named) = line.to_str() else { return false };
    // A target in absolute form also has a host, and programs differ in which of the two they use. Both must fit.
    is_loopback(named) && uri.authority().is_none_or(|authority| is_loopback(authority.as_str()))
}

/// Whether a browser sends this request for a page of another machine.
fn is_foreign(headers: &HeaderMap) -> bool {
    let ours = |origin: &HeaderValue| {
        let (_, authority) = origin.to_str().ok()?.split_once("://")?;
        Some(is_loopback(authority))
    };
    !headers.get_all(ORIGIN).iter().all(|origin| ours(origin).unwrap_or(false))
}

fn is_loopback(authority: &str) -> bool {
    let is_port = |port: &str| !port.is_empty() && port.bytes().all(|b| b.is_ascii_digit());
    ["localhost", "127.0.0.1", "[::1]"].into_iter().any(|name| {
        let Some((host, rest)) = authority.split_at_checked(name.len()) else { return false };
        let port_fits = rest.is_empty() || rest.strip_prefix(':').is_some_and(is_port);
        host.eq_ignore_ascii_case(name) && port_fits
    })
}

/// Headers of every answer: browsers must not guess its type, and caches must not keep it.
pub(super) async fn harden(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}
