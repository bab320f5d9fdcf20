//! Reads the scope of a request: its key and its tenant.
//!
//! The key comes from one header line, bare or as a quoted structured-field string; both spellings are the same key. Without
//! the header a route may derive a key from parts of the request. Each route has one source for the tenant.
//!
//! Invariants: an ambiguous key or tenant (two lines, a list, an empty value) is refused, and never treated as absent. A sent
//! key
//! never equals a derived one, because a sent key must not begin with [`DERIVED`]. A network address is never part of the
//! scope.
//! Credentials leave this module only as keyed digests. A tenant is read only from a token that was checked ([`jwt`]).

mod credential;
mod derive;
pub mod jwt;

use http::{HeaderMap, HeaderName, Method};

pub use self::credential::{DigestKey, bearer, caller, has_several_credentials};
use self::credential::{basic_user, credential};
pub use self::derive::{DERIVED, Derive, derive_key};
use self::jwt::{ClaimPath, Claims};
use crate::record::{KEY_MAX, Key, Tenant};

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

fn parse_key(line: &[u8]) -> Result<Key, &'static str> {
    const ODD: &str = "holds characters other than visible ASCII and space";
    let line = line.trim_ascii();
    if !line.iter().all(|b| *b == b' ' || b.is_ascii_graphic()) {
        return Err(ODD);
    }
    let line = std::str::from_utf8(line).map_err(|_| ODD)?;
    let text = if line.starts_with('"') { unquote(line)? } else { bare(line)?.to_owned() };
    if text.trim().is_empty() {
        return Err("is empty");
    }
    if text.len() > KEY_MAX {
        return Err("is longer than 255 characters");
    }
    if text.starts_with(DERIVED) {
        return Err("begins with \"derived:\", which is reserved");
    }
    Key::parse(&text).ok_or(ODD)
}

fn bare(line: &str) -> Result<&str, &'static str> {
    if line.contains(',') {
        return Err("holds a comma, which only a quoted key may");
    }
    let base64 = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'/' | b'=');
    match line.strip_prefix(':').and_then(|rest| rest.strip_suffix(':')) {
        Some(inner) if inner.bytes().all(base64) => Err("is a byte sequence, not a string"),
        Some(_) | None => Ok(line),
    }
}

/// Reads a string of RFC 9651: quoted, with a backslash only before a quote or a backslash.
fn unquote(line: &str) -> Result<String, &'static str> {
    let mut text = String::with_capacity(line.len());
    let mut letters = line.chars().skip(1);
    loop {
        match letters.next() {
            Some('"') => break,
            Some('\\') => match letters.next() {
                Some(escaped @ ('"' | '\\')) => text.push(escaped),
                Some(_) | None => return Err("holds a bad escape"),
            },
            Some(letter) => text.push(letter),
            None => return Err("has an opening quote and no closing one"),
        }
    }
    match letters.find(|letter| *letter != ' ') {
        None => Ok(text),
        Some(';') => Err("carries parameters, which mean nothing here"),
        Some(',') => Err("is a list"),
        Some(_) => Err("goes on after its closing quote"),
    }
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

fn tenant(
    source: &Source,
    asked: &RequestHead<'_>,
    digest: &DigestKey,
) -> Result<Tenant, &'static str> {
    const INVALID: &str = "the tenant is not 1 to 255 bytes of visible UTF-8";
    let text = match source {
        Source::Fixed(tenant) => return Ok(tenant.clone()),
        Source::Header(name) => match one(asked.headers, name)? {
            Some(text) => text.to_owned(),
            None => return Err("the request has no tenant header"),
        },
        Source::Path(name) => {
            asked.params.get(name).ok_or("the path holds no readable tenant")?.to_owned()
        }
        Source::Host => host(asked.host.ok_or("the request names no host")?),
        Source::BasicUser => basic_user(asked.headers)?,
        Source::Credential => {
            digest.digest(credential(asked.headers)?.ok_or("the request has no credential")?)
        }
        Source::JwtClaim(path) => asked.token.ok_or("the token was not checked")?.text(path)?,
    };
    Tenant::parse(&text).ok_or(INVALID)
}

/// The one value of a header, without blanks around it.
fn one<'h>(headers: &'h HeaderMap, name: &HeaderName) -> Result<Option<&'h str>, &'static str> {
    let mut lines = headers.get_all(name).iter();
    let Some(line) = lines.next() else {
        return Ok(None);
    };
    if lines.next().is_some() {
        return Err("the tenant header comes in more than one line");
    }
    let text = std::str::from_utf8(line.as_bytes()).map_err(|_| "the tenant is not UTF-8")?;
    Ok(Some(text.trim()))
}

/// A host in one spelling: lower case, without port and without a final dot.
fn host(authority: &str) -> String {
    let bracketed = authority.find(']').and_then(|end| authority.split_at_checked(end + 1));
    let name = match bracketed {
        Some((address, _)) => address,
        None => authority.split(':').next().unwrap_or_default(),
    };
    name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase()
}

#[cfg(test)]
mod tests;
