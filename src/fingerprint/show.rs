//! Shows the parts of a fingerprint. It uses the functions that make the fingerprint.

use http::{HeaderMap, HeaderName};

use super::body::{Content, canonical_body, essence, plain};
use super::{Parts, Recipe, form};

impl Recipe {
    /// The headers that count, sorted by name.
    #[must_use]
    pub fn headers(&self) -> &[HeaderName] {
        &self.headers
    }
}

/// The canonical form of a body, and its name. `None`: the bytes count as they are; see [`bytes()`].
#[must_use]
pub fn canonical(recipe: &Recipe, parts: &Parts<'_>) -> Option<(&'static str, Vec<u8>)> {
    let content = Content::of(parts.headers, parts.body, recipe.decoded_max);
    let (tag, text) = canonical_body(recipe, &essence(parts.headers), parts.headers, &content)?;
    Some((std::str::from_utf8(tag).ok()?, text))
}

/// The bytes of a body that has no canonical form: decoded, where it can be.
#[must_use]
pub fn bytes(recipe: &Recipe, parts: &Parts<'_>) -> Vec<u8> {
    plain(recipe, parts.headers, parts.body).into_owned()
}

/// The canonical form of a query: pairs, each half with its length. `None`: it counts as received.
#[must_use]
pub fn query(recipe: &Recipe, query: &str) -> Option<Vec<u8>> {
    let mut pairs = Vec::new();
    form::write(query.as_bytes(), &recipe.query, &mut pairs)?;
    Some(pairs)
}

/// The media type as it counts.
#[must_use]
pub fn content_type(headers: &HeaderMap) -> String {
    String::from_utf8_lossy(&essence(headers)).into_owned()
}
