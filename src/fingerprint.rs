//! What makes two requests the same request.
pub mod form;
pub mod json;

use http::{HeaderMap, Method};

use crate::record::{Fingerprint, RecipeId};

/// A route's `fingerprint` settings as configured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// What of the body does not count.
    pub ignore: Vec<String>,
    /// Names of request headers that count too.
    pub headers: Vec<String>,
    /// Names of query pairs that do not count.
    pub ignore_query: Vec<String>,
}

/// Settings, compiled.
#[derive(Clone, Debug)]
pub struct Recipe {
    id: RecipeId,
}

impl Recipe {
    /// Compiles settings.
    ///
    /// # Errors
    /// One sentence for each entry that cannot be used.
    pub fn compile(_settings: &Settings) -> Result<Self, Vec<String>> {
        Ok(Self { id: [0; 8] })
    }

    /// Names version and settings.
    #[must_use]
    pub fn id(&self) -> RecipeId {
        self.id
    }
}

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
#[must_use]
pub fn fingerprint(recipe: &Recipe, _parts: &Parts<'_>) -> Fingerprint {
    Fingerprint { canonical: [0; 32], raw: [0; 32], recipe: recipe.id }
}
