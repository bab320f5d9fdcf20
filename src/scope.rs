//! Where a request belongs.
use http::{HeaderMap, HeaderName, Method};

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

/// What is asked, as far as the scope needs it.
#[derive(Clone, Copy, Debug)]
pub struct Asked<'a> {
    /// The method.
    pub method: &'a Method,
    /// The target as received: path and query.
    pub target: &'a str,
    /// The headers as received.
    pub headers: &'a HeaderMap,
    /// The path's parameters.
    pub params: &'a Params,
    /// The host the caller named, with or without a port: from the target where it has one, else from `Host`.
    pub host: Option<&'a str>,
}

/// How a route finds key and tenant.
#[derive(Clone, Debug)]
pub struct Recipe {
    /// The header that carries the key.
    pub key_header: HeaderName,
    /// Whether a request without a key is refused (`true`) or passes unprotected.
    pub key_required: bool,
    /// Whether the key's header goes on to the upstream.
    pub forward_key: bool,
    /// How a key is made where the header is absent.
    pub derive_key: Option<Derive>,
    /// Where the tenant comes from.
    pub tenant: Source,
}

/// Where the tenant comes from.
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
}

/// The parts of a derived key, compiled.
#[derive(Clone, Debug)]
pub struct Derive(());

impl Derive {
    /// Compiles the parts of `derive_key`.
    ///
    /// # Errors
    /// What is wrong with the first part that cannot be used.
    pub fn parse(_parts: &[String]) -> Result<Self, String> {
        Ok(Self(()))
    }
}

/// The key of this installation's digests.
#[derive(Clone)]
pub struct DigestKey(());

impl DigestKey {
    /// From secret bytes.
    #[must_use]
    pub fn from_bytes(_secret: &[u8]) -> Self {
        Self(())
    }

    /// The digest of a text.
    #[must_use]
    pub fn digest(&self, _text: &[u8]) -> String {
        String::new()
    }
}

/// Why a request has no scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The route requires a key.
    KeyMissing,
    /// There is a key, but it cannot be one.
    KeyInvalid(&'static str),
    /// The tenant's source yields nothing that can be a tenant.
    TenantMissing(&'static str),
}

/// Reads the key from its header.
///
/// # Errors
/// [`Refusal::KeyInvalid`]
pub fn read_key(_recipe: &Recipe, _headers: &HeaderMap) -> Result<Option<Key>, Refusal> {
    Ok(None)
}

/// Makes a key.
#[must_use]
pub fn derive_key(_recipe: &Recipe, _asked: &Asked<'_>, _body: &[u8]) -> Option<Key> {
    None
}

/// Reads the tenant.
///
/// # Errors
/// [`Refusal::TenantMissing`]
pub fn read_tenant(
    _recipe: &Recipe,
    _asked: &Asked<'_>,
    _digest: &DigestKey,
) -> Result<Tenant, Refusal> {
    Err(Refusal::TenantMissing(""))
}

/// A keyed digest of Authorization.
#[must_use]
pub fn caller(_headers: &HeaderMap, _digest: &DigestKey) -> Option<String> {
    None
}
