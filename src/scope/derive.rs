//! Keys that a route derives from parts of a request without one.

use http::HeaderName;
use serde_json_path::JsonPath;
use sha2::{Digest as _, Sha256};

use super::tenant::one;
use super::{Recipe, RequestHead};
use crate::fingerprint::form;
use crate::fingerprint::json::{Scalar, Tree};
use crate::record::{Key, hex};

/// The prefix of every derived key. A sent key must not have it.
pub const DERIVED: &str = "derived:";

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

    /// Whether any part comes from the body.
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

    /// The value of the part as JSON text; `None` if it is absent, blank or repeated.
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

/// Makes a key from the parts that the route names. Used only if the header is absent.
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
