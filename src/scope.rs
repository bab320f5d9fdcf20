//! Where a request belongs: whose it is, and under which key.
//!
//! The key comes from one header line, bare or as a quoted structured-field string; both spellings are one key. Where the
//! header is absent a route may derive a key from parts of the request. The tenant comes from one source for each route.
//!
//! What must stay true: what is ambiguous is refused, never guessed and never treated as absent (two lines, a list, an empty
//! value). A sent key never equals a derived one: what is sent may not begin with [`DERIVED`]. An address is never part of the
//! scope. Credentials leave this module only as keyed digests. A tenant out of a token is read only from one that was checked
//! ([`jwt`]).

pub mod jwt;

use std::fmt;

use base64::Engine as _;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use http::header::AUTHORIZATION;
use http::{HeaderMap, HeaderName, Method};
use ring::hmac;
use serde_json_path::JsonPath;
use sha2::{Digest as _, Sha256};

use self::jwt::{ClaimPath, Claims};
use crate::fingerprint::form;
use crate::fingerprint::json::{Scalar, Tree};
use crate::record::{Caller, KEY_MAX, Key, Tenant, hex};

/// How every derived key begins, and no sent one.
pub const DERIVED: &str = "derived:";

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
pub struct RequestHead<'a> {
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
    /// The caller's token, checked; only where the tenant's source is one.
    pub token: Option<&'a Claims>,
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
    /// A claim of a checked token.
    JwtClaim(ClaimPath),
}

/// The parts of a derived key, compiled.
#[derive(Clone, Debug)]
pub struct Derive(Vec<Part>);

#[derive(Clone, Debug)]
enum Part {
    Json(JsonPath),
    Header(HeaderName),
    Path(String),
    Query(String),
}

impl Derive {
    /// Compiles the parts of `derive_key`: `$.a.b` (a JSONPath to one value), `header:NAME`, `path:NAME` and `query:NAME`.
    ///
    /// # Errors
    /// What is wrong with the first part that cannot be used.
    pub fn parse(parts: &[String]) -> Result<Self, String> {
        if parts.is_empty() {
            return Err("derive_key has no parts".to_owned());
        }
        parts.iter().map(|part| Part::parse(part)).collect::<Result<_, _>>().map(Self)
    }

    /// Whether any part stands in the body.
    #[must_use]
    pub fn reads_body(&self) -> bool {
        self.0.iter().any(|part| matches!(part, Part::Json(_)))
    }
}

impl Part {
    fn parse(text: &str) -> Result<Self, String> {
        if text.starts_with('$') {
            if names_several(text) {
                return Err(format!("derive_key: {text:?} may name several values"));
            }
            let path = JsonPath::parse(text);
            return path
                .map(Self::Json)
                .map_err(|error| format!("derive_key: {text:?} is no JSONPath: {error}"));
        }
        match text.split_once(':') {
            Some(("header", name)) => HeaderName::from_bytes(name.as_bytes())
                .map(Self::Header)
                .map_err(|_| format!("derive_key: {name:?} is no header name")),
            Some(("path", name)) if !name.is_empty() => Ok(Self::Path(name.to_owned())),
            Some(("query", name)) if !name.is_empty() => Ok(Self::Query(name.to_owned())),
            _ => Err(format!(
                "derive_key: {text:?} begins with none of \"$\", \"header:\", \"path:\", \"query:\""
            )),
        }
    }

    /// The part's value as JSON text; `None` where it is absent, blank, or there several times.
    fn value(&self, asked: &RequestHead<'_>, body: Option<&Body>) -> Option<String> {
        let text = match self {
            Self::Json(path) => {
                let body = body?;
                let located = path.query_located(&body.value);
                let id = body.tree.find(located.first()?.location().iter())?;
                match body.tree.scalar(id)? {
                    Scalar::Text(text) => text,
                    Scalar::Number(number) => return Some(number),
                    Scalar::Bool(truth) => return Some(truth.to_string()),
                }
            }
            Self::Header(name) => one(asked.headers, name).ok()??.to_owned(),
            Self::Path(name) => asked.params.get(name)?.to_owned(),
            Self::Query(name) => {
                let (_, query) = asked.target.split_once('?')?;
                let pairs = form::pairs(query.as_bytes())?;
                let mut named = pairs.iter().filter(|(known, _)| known.as_ref() == name.as_bytes());
                let (_, value) = named.next()?;
                if named.next().is_some() {
                    return None;
                }
                std::str::from_utf8(value).ok()?.to_owned()
            }
        };
        let blank = text.trim().is_empty();
        (!blank).then(|| serde_json::Value::from(text).to_string())
    }
}

/// A body that is JSON, as it is and as JSONPath reads it.
struct Body {
    tree: Tree,
    value: serde_json::Value,
}

/// Whether a JSONPath holds, outside of quotes, anything that may select more than one node.
fn names_several(path: &str) -> bool {
    let mut quote = None;
    let mut escaped = false;
    let mut last = ' ';
    for letter in path.chars() {
        match quote {
            Some(_) if escaped => escaped = false,
            Some(_) if letter == '\\' => escaped = true,
            Some(open) => quote = (open != letter).then_some(open),
            None if matches!(letter, '"' | '\'') => quote = Some(letter),
            None if matches!(letter, '*' | '?' | ',' | ':') => return true,
            None if letter == '.' && last == '.' => return true,
            None => {}
        }
        last = letter;
    }
    false
}

/// The key of this installation's digests. Two installations with different keys give different digests.
#[derive(Clone)]
pub struct DigestKey(hmac::Key);

impl fmt::Debug for DigestKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("DigestKey")
    }
}

impl DigestKey {
    /// From secret bytes.
    #[must_use]
    pub fn from_bytes(secret: &[u8]) -> Self {
        Self(hmac::Key::new(hmac::HMAC_SHA256, secret))
    }

    /// The digest of a text: the first half of its HMAC-SHA256 (RFC 2104), as 32 hexadecimal digits.
    #[must_use]
    pub fn digest(&self, text: &[u8]) -> String {
        let whole = hex(hmac::sign(&self.0, text).as_ref());
        whole.chars().take(32).collect()
    }
}

/// Why a request has no scope.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The route requires a key, and the request has none.
    KeyMissing,
    /// There is a key's header, but it holds no key: what is wrong, to stand after "the idempotency key".
    KeyInvalid(&'static str),
    /// The tenant's source yields nothing that can be a tenant: what is wrong, as a sentence without its end.
    TenantMissing(&'static str),
    /// The tenant is read from a token, and the request has none.
    TokenMissing,
    /// The token is no good: what is wrong, to stand after "the token".
    TokenInvalid(&'static str),
    /// The keys that the token is checked with are not known at the moment.
    TokenUnverified,
}

/// Reads the key from its header. `None`: the header is absent, whether or not the route requires it.
///
/// # Errors
/// [`Refusal::KeyInvalid`] where the header is there but is not exactly one key.
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

/// Reads a string of RFC 9651: within quotes, a backslash stands only before a quote or a backslash.
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

/// Makes a key from the parts that the route names. RequestHead only where the header is absent.
/// `None`: a part is absent, and the request counts as having no key.
#[must_use]
pub fn derive_key(recipe: &Recipe, asked: &RequestHead<'_>, body: &[u8]) -> Option<Key> {
    let derive @ Derive(parts) = recipe.derive_key.as_ref()?;
    let body = if derive.reads_body() { Tree::parse(body) } else { None };
    let body = body.map(|tree| Body { value: tree.to_value(), tree });
    let values = parts.iter().map(|part| part.value(asked, body.as_ref()));
    let list = format!("[{}]", values.collect::<Option<Vec<_>>>()?.join(","));
    let plain = format!("{DERIVED}{list}");
    Key::parse(&plain).or_else(|| {
        let hash = hex(&Sha256::digest(list.as_bytes()));
        Key::parse(&format!("{DERIVED}sha256:{hash}"))
    })
}

/// Reads the tenant from the route's source.
///
/// # Errors
/// [`Refusal::TenantMissing`] where the source yields nothing, several values, or what cannot be a tenant.
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

/// A host as every caller that means it spells it: lower-case, without port and without a dot at its end.
fn host(authority: &str) -> String {
    let bracketed = authority.find(']').and_then(|end| authority.split_at_checked(end + 1));
    let name = match bracketed {
        Some((address, _)) => address,
        None => authority.split(':').next().unwrap_or_default(),
    };
    name.strip_suffix('.').unwrap_or(name).to_ascii_lowercase()
}

fn credential(headers: &HeaderMap) -> Result<Option<&[u8]>, &'static str> {
    let mut lines = headers.get_all(AUTHORIZATION).iter();
    let line = lines.next();
    if lines.next().is_some() {
        return Err("the request has more than one Authorization header");
    }
    Ok(line.map(|line| line.as_bytes().trim_ascii()).filter(|line| !line.is_empty()))
}

fn basic_user(headers: &HeaderMap) -> Result<String, &'static str> {
    const MALFORMED: &str = "the Basic credentials are malformed";
    const BASE64: GeneralPurpose = GeneralPurpose::new(
        &base64::alphabet::STANDARD,
        GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent),
    );
    let credential = credential(headers)?.ok_or("the request has no Authorization header")?;
    let credential = std::str::from_utf8(credential).map_err(|_| MALFORMED)?;
    let (scheme, token) = credential.split_once(' ').ok_or(MALFORMED)?;
    if !scheme.eq_ignore_ascii_case("basic") {
        return Err("the credentials are not of the Basic scheme");
    }
    let pair = BASE64.decode(token.trim()).map_err(|_| MALFORMED)?;
    let pair = String::from_utf8(pair).map_err(|_| MALFORMED)?;
    let (user, _) = pair.split_once(':').ok_or(MALFORMED)?;
    Ok(user.to_owned())
}

/// The token of Bearer credentials (RFC 6750). `None`: the request has no Authorization header.
///
/// # Errors
/// There are several, or they are of another kind: what is wrong, to stand after "the token".
pub fn bearer(headers: &HeaderMap) -> Result<Option<&str>, &'static str> {
    const NONE: &str = "is not one of the Bearer scheme";
    let credential = credential(headers).map_err(|_| "stands beside another credential")?;
    let Some(credential) = credential else { return Ok(None) };
    let credential = std::str::from_utf8(credential).map_err(|_| NONE)?;
    let (scheme, token) = credential.split_once(' ').ok_or(NONE)?;
    let token = token.trim_start_matches(' ');
    let fits = scheme.eq_ignore_ascii_case("bearer") && !token.contains([' ', ',']);
    if fits && !token.is_empty() { Ok(Some(token)) } else { Err(NONE) }
}

/// Whether the request carries more than one credential: another one may count for the upstream than for us.
#[must_use]
pub fn has_several_credentials(headers: &HeaderMap) -> bool {
    credential(headers).is_err()
}

/// Who asks: the subject of a checked token, else a keyed digest of the credential, of all of them where there are several.
/// `None`: there is none.
#[must_use]
pub fn caller(headers: &HeaderMap, token: Option<&Claims>, digest: &DigestKey) -> Option<Caller> {
    if let Some(subject) = token.and_then(Claims::subject) {
        return Some(Caller::stored(subject));
    }
    let lines = headers.get_all(AUTHORIZATION).iter().map(|line| line.as_bytes().trim_ascii());
    let lines: Vec<&[u8]> = lines.filter(|line| !line.is_empty()).collect();
    (!lines.is_empty()).then(|| Caller::stored(&digest.digest(&lines.join(&b'\n'))))
}

#[cfg(test)]
mod tests;
