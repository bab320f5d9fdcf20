//! The fingerprint decides whether two requests are the same request. It has two SHA-256 hashes.
//!
//! The canonical hash covers, each with its length before it: a version, the method, the path as received, the pairs of the
//! query, the media type of Content-Type, the headers that the route names, and the decoded body in its canonical form. A tag
//! names the form, so that bytes that look like a canonical form never equal it. A body that cannot be read in the form of its
//! type is hashed as it is; a body that cannot be decoded is hashed as received. Neither is an error.
//!
//! The raw hash covers the request as received. The recipe's id names version and settings. If it differs between two
//! requests, the settings or the program changed between them, and the raw hash decides. So `RAW_VERSION` never changes: every
//! version of this program recognises old records by the raw hash.
//!
//! To save time, a body without a canonical form counts by the hash of the request as received without its query, which counts
//! as pairs. Without a query that is the raw hash.

mod body;
pub mod coding;
pub mod form;
pub mod json;
pub(crate) mod multipart;
pub(crate) mod parameters;
mod recipe;
pub mod show;
pub mod xml;

use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, Method};
use sha2::{Digest as _, Sha256};

use self::body::{Content, Form, canonical_body, essence};
pub use self::body::{canonical, plain};
pub use self::recipe::{Recipe, Settings};
use crate::record::{Digest, Fingerprint};

/// Must grow whenever the canonical hash of any request changes.
const VERSION: &[u8] = b"oncegate-fingerprint-3";
/// The version of the raw hash. It never changes.
const RAW_VERSION: &[u8] = b"oncegate-request-1";

/// A request as received.
#[derive(Clone, Copy, Debug)]
pub struct Parts<'a> {
    /// Its method.
    pub method: &'a Method,
    /// Its target, `path?query`, as received.
    pub target: &'a str,
    /// Its headers.
    pub headers: &'a HeaderMap,
    /// Its whole body, as received.
    pub body: &'a [u8],
}

/// The fingerprint of a request.
///
/// The time is linear in the size of the decoded body.
#[must_use]
pub fn fingerprint(recipe: &Recipe, parts: &Parts<'_>) -> Fingerprint {
    let essence = essence(parts.headers);
    let raw = received(parts, parts.target, &essence, parts.body);
    let (path, query) = parts.target.split_once('?').unwrap_or((parts.target, ""));
    let mut hash = Hash::new(VERSION);
    hash.part(parts.method.as_str().as_bytes());
    hash.part(path.as_bytes());
    let mut pairs = Vec::new();
    match form::write(query.as_bytes(), &recipe.query, &mut pairs) {
        Some(_) => hash.tagged(b"pairs", &pairs),
        None => hash.tagged(b"raw", query.as_bytes()),
    }
    hash.part(&essence);
    for name in &recipe.headers {
        let values = parts.headers.get_all(name);
        hash.part(name.as_str().as_bytes());
        hash.part(values.iter().count().to_string().as_bytes());
        for value in values {
            hash.part(value.as_bytes());
        }
    }
    let content = Content::of(parts.headers, parts.body, recipe.decoded_max);
    if let Some((tag, text)) = canonical_body(recipe, &essence, parts.headers, &content) {
        hash.tagged(tag, &text);
        return Fingerprint { canonical: hash.finish(), raw, recipe: recipe.id };
    }
    if matches!(Form::of(&essence), Form::Xml | Form::Multipart) {
        // The meaning of the bytes depends on the parameters: charset, boundary, action.
        for kind in parts.headers.get_all(CONTENT_TYPE) {
            hash.tagged(b"type", kind.as_bytes());
        }
    }
    let body = match &content {
        Content::Plain(body) => *body,
        Content::Decoded(body) => body.as_slice(),
        Content::Encoded(body) => {
            for coding in parts.headers.get_all(CONTENT_ENCODING) {
                hash.tagged(b"coding", coding.as_bytes());
            }
            *body
        }
    };
    let as_received = !matches!(content, Content::Decoded(_)) && path.len() == parts.target.len();
    let digest = if as_received { raw } else { received(parts, path, &essence, body) };
    hash.tagged(b"raw", &digest);
    Fingerprint { canonical: hash.finish(), raw, recipe: recipe.id }
}

/// The hash of a request as received, under a target.
fn received(parts: &Parts<'_>, target: &str, essence: &[u8], body: &[u8]) -> Digest {
    let mut hash = Hash::new(RAW_VERSION);
    hash.part(parts.method.as_str().as_bytes());
    hash.part(target.as_bytes());
    hash.part(essence);
    hash.part(body);
    hash.finish()
}

/// A SHA-256 of parts, each with its length, so that no part runs into the next.
struct Hash(Sha256);

impl Hash {
    fn new(version: &[u8]) -> Self {
        let mut hash = Self(Sha256::new());
        hash.part(version);
        hash
    }

    fn part(&mut self, part: &[u8]) {
        let mut length = [0; 8];
        for (to, from) in length.iter_mut().rev().zip(part.len().to_le_bytes()) {
            *to = from;
        }
        self.0.update(length);
        self.0.update(part);
    }

    fn tagged(&mut self, tag: &[u8], part: &[u8]) {
        self.part(tag);
        self.part(part);
    }

    fn finish(self) -> Digest {
        self.0.finalize().into()
    }
}

#[cfg(test)]
mod tests;
