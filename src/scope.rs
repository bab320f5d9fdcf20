//! Reads the scope of a request: its key and its tenant.
//!
//! The key comes from one header line, bare or as a quoted structured-field string; both spellings are the same key. Without
//! the header a route may derive a key from parts of the request. Each route has one source for the tenant.
//!
//! Invariants: an ambiguous key or tenant (two lines, a list, an empty value) is refused, and never treated as absent. A sent
//! key never equals a derived one, because a sent key must not begin with [`DERIVED`]. A network address is never part of the
//! scope. Credentials leave this module only as keyed digests. A tenant is read only from a token that was checked ([`jwt`]).

mod credential;
mod derive;
pub mod jwt;
mod key;
mod tenant;

use http::{HeaderMap, HeaderName, Method};

pub use self::credential::{DigestKey, bearer, caller, has_several_credentials};
pub use self::derive::{DERIVED, Derive, derive_key};
use self::jwt::{ClaimPath, Claims};
use self::key::parse_key;
use self::tenant::tenant;
use crate::record::{Key, Tenant};

/// The decoded parameters of the path, by the reading that matched the route.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Params(Vec<(String, String)>);

impl Params {
    /// From pairs of name and decoded value.
    #[must_use]
    pub fn new(pairs: Vec<(String, String)>) -> Self {
        Self(pairs)
    }

    /// The value of the parameter `name`.
    #[must_use]
    pub fn get(&self, name: &str) -> Option<&str> {
        self.iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    /// All of them, in the order of the template.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(name, value)| (name.as_str(), value.as_str()))
    }
}

/// The parts of a request that the scope needs.
#[derive(Clone, Copy, Debug)]
pub struct RequestHead<'a> {
    /// The method.
    pub method: &'a Method,
    /// The target as received: path and query.
    pub target: &'a str,
    /// The headers as received.
    pub headers: &'a HeaderMap,
    /// The path's parameters.
    pub params: &'a Params,
    /// The host of the request, with or without a port: from the target if it has one, or else from `Host`.
    pub host: Option<&'a str>,
    /// The checked token of the caller, if the tenant comes from a token.
    pub token: Option<&'a Claims>,
}

/// The sources of key and tenant of a route.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// The header that carries the key.
    pub key_header: HeaderName,
    /// Whether a request without a key is refused (`true`) or passes unprotected.
    pub key_required: bool,
    /// Whether the key's header is forwarded to the upstream.
    pub forward_key: bool,
    /// How a key is derived if the header is absent.
    pub derive_key: Option<Derive>,
    /// The source of the tenant.
    pub tenant: Source,
}

/// The source of the tenant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// One tenant for all.
    Fixed(Tenant),
    /// A request header.
    Header(HeaderName),
    /// A parameter of the route's path.
    Path(String),
    /// The host that the request names, lower-case, without its port.
    Host,
    /// The user of Basic credentials.
    BasicUser,
    /// A keyed digest of the Authorization header.
    Credential,
    /// A claim of a checked token.
    JwtClaim(ClaimPath),
}

/// Why a request has no scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The route requires a key, and the request has none.
    KeyMissing,
    /// The header of the key holds no valid key. The text follows "the idempotency key".
    KeyInvalid(&'static str),
    /// The source gives no valid tenant. The text is a sentence without its full stop.
    TenantMissing(&'static str),
    /// The tenant comes from a token, and the request has none.
    TokenMissing,
    /// The token is not valid. The text follows "the token".
    TokenInvalid(&'static str),
    /// The keys that check the token are not known at the moment.
    TokenUnverified,
}

/// Reads the key from its header. `None`: the header is absent, whether or not the route requires it.
///
/// # Errors
/// [`Refusal::KeyInvalid`] if the header is there and is not exactly one key.
pub fn read_key(recipe: &Recipe, headers: &HeaderMap) -> Result<Option<Key>, Refusal> {
    let mut lines = headers.get_all(&recipe.key_header).iter();
    let Some(line) = lines.next() else {
        return Ok(None);
    };
    if lines.next().is_some() {
        return Err(Refusal::KeyInvalid("comes in more than one header line"));
    }
    parse_key(line.as_bytes()).map(Some).map_err(Refusal::KeyInvalid)
}

/// Reads the tenant from the route's source.
///
/// # Errors
/// [`Refusal::TenantMissing`] if the source gives no value, several values, or an invalid tenant.
pub fn read_tenant(
    recipe: &Recipe,
    asked: &RequestHead<'_>,
    digest: &DigestKey,
) -> Result<Tenant, Refusal> {
    tenant(&recipe.tenant, asked, digest).map_err(Refusal::TenantMissing)
}

#[cfg(test)]
mod tests;
