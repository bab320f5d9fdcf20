//! Identifies callers by their credentials. Only user names, tokens to be checked, and keyed digests leave this file.

use std::fmt;

use base64::Engine as _;
use base64::engine::DecodePaddingMode;
use base64::engine::general_purpose::{GeneralPurpose, GeneralPurposeConfig};
use http::HeaderMap;
use http::header::AUTHORIZATION;
use ring::hmac;

use super::jwt::Claims;
use crate::record::{Caller, hex};

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

pub(super) fn credential(headers: &HeaderMap) -> Result<Option<&[u8]>, &'static str> {
    let mut lines = headers.get_all(AUTHORIZATION).iter();
    let line = lines.next();
    if lines.next().is_some() {
        return Err("the request has more than one Authorization header");
    }
    Ok(line.map(|line| line.as_bytes().trim_ascii()).filter(|line| !line.is_empty()))
}

pub(super) fn basic_user(headers: &HeaderMap) -> Result<String, &'static str> {
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
/// There are several, or they are of another kind. The text follows "the token".
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

/// Whether the request has more than one credential. The upstream may use another one than the gateway.
#[must_use]
pub fn has_several_credentials(headers: &HeaderMap) -> bool {
    credential(headers).is_err()
}

/// The caller: the subject of a checked token, or else a keyed digest of all credentials. `None`: there is no credential.
#[must_use]
pub fn caller(headers: &HeaderMap, token: Option<&Claims>, digest: &DigestKey) -> Option<Caller> {
    if let Some(subject) = token.and_then(Claims::subject) {
        return Some(Caller::stored(subject));
    }
    let lines = headers.get_all(AUTHORIZATION).iter().map(|line| line.as_bytes().trim_ascii());
    let lines: Vec<&[u8]> = lines.filter(|line| !line.is_empty()).collect();
    (!lines.is_empty()).then(|| Caller::stored(&digest.digest(&lines.join(&b'\n'))))
}
