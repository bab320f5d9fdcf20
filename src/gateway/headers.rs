//! (signatures)

use std::net::IpAddr;

use http::{HeaderMap, HeaderName, HeaderValue, Request, StatusCode};

/// A request that is refused before anything else looks at it. Answer with it and close the connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// 400, 417 or 501.
    pub status: StatusCode,
    /// What is wrong, for the problem document.
    pub detail: &'static str,
}

/// Networks whose word about the caller counts: `10.0.0.0/8`, `::1`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Network {
    address: IpAddr,
    prefix: u8,
}

impl std::str::FromStr for Network {
    type Err = String;
    fn from_str(_text: &str) -> Result<Self, String> {
        unimplemented!()
    }
}

/// What the upstream gets as Host.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum HostPolicy {
    /// The caller's.
    #[default]
    Keep,
    /// The upstream's own authority.
    Upstream,
}

/// How forwarding headers are made.
#[derive(Clone, Debug, Default)]
pub struct Forwarding {
    /// Trusted peers.
    pub trusted: Vec<Network>,
    /// Host.
    pub host: HostPolicy,
}

/// Where a request came from.
#[derive(Clone, Debug)]
pub struct Hop {
    /// None: a unix socket.
    pub peer: Option<IpAddr>,
    /// The caller's Host.
    pub host: Option<HeaderValue>,
    /// Over TLS.
    pub https: bool,
}

/// The framing gate.
pub fn check_framing<B>(_request: &Request<B>) -> Result<(), Refused> {
    unimplemented!()
}
/// Absolute-form: the authority replaces Host, and origin-form stays.
pub fn to_origin_form<B>(_request: &mut Request<B>) {
    unimplemented!()
}
/// Hop-by-hop headers.
pub fn strip_hop_by_hop(_headers: &mut HeaderMap) {
    unimplemented!()
}
/// `Oncegate-*`, `Idempotent-Replayed` and their twins with `_`.
pub fn drop_own(_headers: &mut HeaderMap) {
    unimplemented!()
}
/// Drops `X_Tenant_Id` where `X-Tenant-Id` is one of `names`.
pub fn drop_twins(_headers: &mut HeaderMap, _names: &[&HeaderName]) {
    unimplemented!()
}
/// X-Forwarded-*, Forwarded, Via on a request.
pub fn forward(_forwarding: &Forwarding, _hop: &Hop, _headers: &mut HeaderMap) {
    unimplemented!()
}
/// Via on an answer.
pub fn add_via(_headers: &mut HeaderMap) {
    unimplemented!()
}
/// What of an answer is stored for replay.
pub fn kept(_headers: &HeaderMap, _drop: &[HeaderName]) -> HeaderMap {
    unimplemented!()
}
