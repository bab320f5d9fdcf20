//! The tenant of a request, by its source.

use http::{HeaderMap, HeaderName};

use super::credential::{DigestKey, basic_user, credential};
use super::{RequestHead, Source};
use crate::record::Tenant;

/// Reads the tenant. The error's text is a sentence without its full stop.
pub(super) fn tenant(
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
pub(super) fn one<'h>(
    headers: &'h HeaderMap,
    name: &HeaderName,
) -> Result<Option<&'h str>, &'static str> {
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
