//! What makes two requests the same request: a SHA-256 over what counts, in one form for each meaning.
//!
//! Hashed, each with its length before it: a version, the method, the path as received, the query's pairs, the essence of
//! Content-Type, the headers that the route names, and the body in its canonical form. The body's tag says which form that is,
//! so that bytes that happen to look like a canonical form never equal it. A body that cannot be read in the form its type
//! asks for is hashed as it came: never an error, and never equal to another body.
//!
//! Beside the canonical hash stands one of the request as received. The recipe's id names version and settings: where it
//! differs between two requests, a deploy lies between them and the raw hash decides.
//!
//! A new form (a decoded content coding) is a new variant of `Form`, and a new `VERSION`.

pub mod form;
pub mod json;
pub(crate) mod multipart;
pub(crate) mod parameters;
pub mod xml;

use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, Method};
use serde_json_path::JsonPath;
use sha2::{Digest as _, Sha256};

use self::parameters::Parametered;
use crate::record::{Digest, Fingerprint, RecipeId};

/// Goes up whenever the canonical hash of any request changes.
const VERSION: &[u8] = b"oncegate-fingerprint-1";
const RAW_VERSION: &[u8] = b"oncegate-request-1";

/// A route's `fingerprint` settings as configured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// What of the body does not count: a JSONPath (`$...`), an XML path (`/...`), else the name of a form field.
    pub ignore: Vec<String>,
    /// What of an XML body does not count, as XML paths.
    pub ignore_xml: Vec<String>,
    /// The namespaces of prefixes in XML paths.
    pub xml_namespaces: xml::Given,
    /// Names of request headers that count too.
    pub headers: Vec<String>,
    /// Names of query pairs that do not count.
    pub ignore_query: Vec<String>,
}

/// Settings, compiled.
#[derive(Clone, Debug)]
pub struct Recipe {
    id: RecipeId,
    ignore_json: Vec<JsonPath>,
    ignore_form: Vec<String>,
    xml: xml::Selection,
    ignore_query: Vec<String>,
    headers: Vec<HeaderName>,
}

impl Recipe {
    /// Compiles settings.
    ///
    /// # Errors
    /// One sentence for each entry that cannot be used.
    pub fn compile(settings: &Settings) -> Result<Self, Vec<String>> {
        let mut errors = Vec::new();
        let (mut ignore_json, mut ignore_form, mut headers) = (Vec::new(), Vec::new(), Vec::new());
        for entry in &settings.ignore {
            match entry.chars().next() {
                Some('$') => match JsonPath::parse(entry) {
                    Ok(path) => ignore_json.push(path),
                    Err(error) => errors.push(format!("ignore: {entry:?} is no JSONPath: {error}")),
                },
                // Below, with those of `ignore_xml`.
                Some('/') => {}
                Some(_) => ignore_form.push(entry.clone()),
                None => errors.push("ignore: an entry is empty".to_owned()),
            }
        }
        let xml = ignored_xml(settings, &mut errors);
        for name in &settings.headers {
            match HeaderName::from_bytes(name.as_bytes()) {
                Ok(name) => headers.push(name),
                Err(_) => errors.push(format!("headers: {name:?} is no header name")),
            }
        }
        if !errors.is_empty() {
            return Err(errors);
        }
        headers.sort_by(|a, b| a.as_str().cmp(b.as_str()));
        headers.dedup();
        let ignore_query = settings.ignore_query.clone();
        let id = recipe_id(&settings.ignore, &xml, &headers, &ignore_query);
        Ok(Self { id, ignore_json, ignore_form, xml, ignore_query, headers })
    }

    /// Names version and settings: the order of entries does not matter.
    #[must_use]
    pub fn id(&self) -> RecipeId {
        self.id
    }
}

fn ignored_xml(settings: &Settings, errors: &mut Vec<String>) -> xml::Selection {
    let here = settings.ignore.iter().filter(|entry| entry.starts_with('/'));
    let here = here.map(|entry| ("ignore", entry));
    let own = settings.ignore_xml.iter().map(|entry| ("ignore_xml", entry));
    let mut selection = xml::Selection::default();
    for (list, entry) in here.chain(own) {
        match xml::Path::parse(entry, &settings.xml_namespaces) {
            Ok(path) => selection.ignore.push(path),
            Err(error) => errors.push(format!("{list}: {error}")),
        }
    }
    selection
}

fn recipe_id(
    ignore: &[String],
    xml: &xml::Selection,
    headers: &[HeaderName],
    ignore_query: &[String],
) -> RecipeId {
    let mut hash = Hash::new(VERSION);
    let ignore = ignore.iter().filter(|entry| !entry.starts_with('/')).cloned();
    let headers = headers.iter().map(HeaderName::as_str).collect();
    // What a prefix stands for counts, not the prefix.
    let paths = xml.ignore.iter().map(xml::Path::spelled).collect::<Vec<_>>();
    let ignore = ignore.collect::<Vec<_>>();
    for list in [texts(&ignore), texts(&paths), headers, texts(ignore_query)] {
        hash.part(list.len().to_string().as_bytes());
        for entry in list {
            hash.part(entry.as_bytes());
        }
    }
    let mut id = RecipeId::default();
    for (to, from) in id.iter_mut().zip(hash.finish()) {
        *to = from;
    }
    id
}

fn texts(list: &[String]) -> Vec<&str> {
    let mut texts = list.iter().map(String::as_str).collect::<Vec<_>>();
    texts.sort_unstable();
    texts.dedup();
    texts
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

/// In which form a body is hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Form {
    Json,
    UrlEncoded,
    Multipart,
    Xml,
    Raw,
}

impl Form {
    fn of(essence: &[u8], headers: &HeaderMap) -> Self {
        let one_type = headers.get_all(CONTENT_TYPE).iter().count() == 1;
        if !one_type || headers.contains_key(CONTENT_ENCODING) {
            return Self::Raw;
        }
        if essence == b"application/json" || essence.ends_with(b"+json") {
            Self::Json
        } else if essence == b"application/x-www-form-urlencoded" {
            Self::UrlEncoded
        } else if essence.starts_with(b"multipart/") {
            Self::Multipart
        } else if essence == b"application/xhtml+xml" {
            // Blanks between its elements are text.
            Self::Raw
        } else if matches!(essence, b"application/xml" | b"text/xml") || essence.ends_with(b"+xml")
        {
            Self::Xml
        } else {
            Self::Raw
        }
    }
}

/// The fingerprint of a request.
#[must_use]
pub fn fingerprint(recipe: &Recipe, parts: &Parts<'_>) -> Fingerprint {
    let essence = essence(parts.headers);
    let (path, query) = parts.target.split_once('?').unwrap_or((parts.target, ""));
    let mut hash = Hash::new(VERSION);
    hash.part(parts.method.as_str().as_bytes());
    hash.part(path.as_bytes());
    let mut buffer = Vec::with_capacity(parts.body.len() + 64);
    if form::write(query.as_bytes(), &recipe.ignore_query, &mut buffer) {
        hash.tagged(b"pairs", &buffer);
    } else {
        hash.tagged(b"raw", query.as_bytes());
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
    buffer.clear();
    canonical_body(recipe, parts, &essence, &mut buffer, &mut hash);
    Fingerprint { canonical: hash.finish(), raw: raw(parts, &essence), recipe: recipe.id }
}

fn canonical_body(
    recipe: &Recipe,
    parts: &Parts<'_>,
    essence: &[u8],
    buffer: &mut Vec<u8>,
    hash: &mut Hash,
) {
    if let Some(form) = write_body(recipe, parts, essence, buffer) {
        return hash.tagged(form.as_bytes(), buffer);
    }
    for coding in parts.headers.get_all(CONTENT_ENCODING) {
        hash.tagged(b"coding", coding.as_bytes());
    }
    hash.tagged(b"raw", parts.body);
}

/// The canonical form of a body, and its name. `None`: it is compared byte by byte.
#[must_use]
pub fn canonical(recipe: &Recipe, parts: &Parts<'_>) -> Option<(&'static str, Vec<u8>)> {
    let mut form = Vec::new();
    let name = write_body(recipe, parts, &essence(parts.headers), &mut form)?;
    Some((name, form))
}

/// Writes the canonical form of a body; `None`: there is none, and nothing was written.
fn write_body(
    recipe: &Recipe,
    parts: &Parts<'_>,
    essence: &[u8],
    out: &mut Vec<u8>,
) -> Option<&'static str> {
    let kind = || parts.headers.get(CONTENT_TYPE).map(http::HeaderValue::as_bytes);
    match Form::of(essence, parts.headers) {
        Form::Json => {
            json::Tree::parse(parts.body)?.write(&recipe.ignore_json, out);
            Some("json")
        }
        Form::UrlEncoded => form::write(parts.body, &recipe.ignore_form, out).then_some("form"),
        Form::Multipart => {
            multipart::write(kind()?, parts.body, &recipe.ignore_form, out).then_some("multipart")
        }
        Form::Xml => {
            let kind = Parametered::parse(kind()?)?;
            xml::write(parts.body, &kind, &recipe.xml, out).then_some("xml")
        }
        Form::Raw => None,
    }
}

/// The hash of the request as received.
fn raw(parts: &Parts<'_>, essence: &[u8]) -> Digest {
    let mut hash = Hash::new(RAW_VERSION);
    hash.part(parts.method.as_str().as_bytes());
    hash.part(parts.target.as_bytes());
    hash.part(essence);
    hash.part(parts.body);
    hash.finish()
}

/// The media type without its parameters, lower-case; of several header lines all, so that none is overlooked.
fn essence(headers: &HeaderMap) -> Vec<u8> {
    let mut essence = Vec::with_capacity(32);
    for (index, value) in headers.get_all(CONTENT_TYPE).iter().enumerate() {
        if index > 0 {
            essence.push(b'\n');
        }
        let kind = value.as_bytes().split(|b| *b == b';').next().unwrap_or_default();
        essence.extend(kind.trim_ascii().iter().map(u8::to_ascii_lowercase));
    }
    essence
}

/// A SHA-256 of parts that cannot run together.
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
mod tests {
    use base64::Engine as _;
    use http::HeaderValue;
    use serde_json::Value;

    use super::*;

    /// Pairs whose forms come later: until then they are compared byte by byte.
    const LATER: [&str; 1] = ["gzip of one text at two times"];

    fn strings(case: &Value, name: &str) -> Vec<String> {
        let list = case.get(name).and_then(Value::as_array).into_iter().flatten();
        list.map(|entry| entry.as_str().unwrap().to_owned()).collect()
    }

    fn of_case(case: &Value, side: &str) -> Fingerprint {
        let settings = Settings {
            ignore: strings(case, "ignore"),
            ignore_xml: strings(case, "ignore_xml"),
            xml_namespaces: xml::Given::new(),
            headers: strings(case, "headers"),
            ignore_query: strings(case, "ignore_query"),
        };
        let request = &case[side];
        let text = |name: &str| request.get(name).and_then(Value::as_str);
        let mut headers = HeaderMap::new();
        let kind = text("type").unwrap_or("application/json");
        headers.insert(CONTENT_TYPE, kind.parse().unwrap());
        for (name, value) in request["headers"].as_object().into_iter().flatten() {
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            headers.insert(name, HeaderValue::from_str(value.as_str().unwrap()).unwrap());
        }
        let body = text("body").unwrap();
        let body = match request.get("base64") {
            Some(_) => base64::engine::general_purpose::STANDARD.decode(body).unwrap(),
            None => body.as_bytes().to_vec(),
        };
        let target = text("path").unwrap_or("/orders");
        let parts = Parts { method: &Method::POST, target, headers: &headers, body: &body };
        fingerprint(&Recipe::compile(&settings).unwrap(), &parts)
    }

    #[test]
    fn the_pairs_of_the_contract() {
        let cases = include_str!("../tests/cases/fingerprint.json");
        let cases = serde_json::from_str::<Value>(cases).unwrap();
        let mut missed = Vec::new();
        for case in cases["cases"].as_array().unwrap() {
            let (a, b) = (of_case(case, "a"), of_case(case, "b"));
            let name = case["name"].as_str().unwrap();
            if a.same_request(&b) != case["same"].as_bool().unwrap() {
                missed.push(name);
            }
        }
        assert_eq!(missed, LATER);
    }

    fn of(settings: &Settings, target: &str, kind: &str, body: &[u8]) -> Fingerprint {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, kind.parse().unwrap());
        let parts = Parts { method: &Method::POST, target, headers: &headers, body };
        fingerprint(&Recipe::compile(settings).unwrap(), &parts)
    }

    #[test]
    fn c02_the_query_counts_as_pairs_and_the_path_as_received() {
        let plain = |target: &str| of(&Settings::default(), target, "text/plain", b"").canonical;
        assert_ne!(plain("/pay?dry=1"), plain("/pay"));
        assert_eq!(plain("/pay?a=x+y&b=1"), plain("/pay?b=1&a=x%20y"));
        assert_ne!(plain("/a%2Fb"), plain("/a/b"));
        assert_ne!(plain("/p?a=%zz"), plain("/p?a=%25zz"));
        assert_ne!(plain("/p?a=%ff"), plain("/p?a=%fe"));
    }

    #[test]
    fn c07_type_and_coding_count() {
        let settings = Settings::default();
        let typed = |kind: &str| of(&settings, "/", kind, b"{}").canonical;
        assert_ne!(typed("application/json"), typed("text/plain"));
        assert_ne!(typed("application/json"), typed("application/x+json"));
        assert_eq!(typed("application/json"), typed("Application/JSON ; charset=utf-8"));
        let coded = |coding: Option<&'static str>| {
            let mut headers = HeaderMap::new();
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
            headers.extend(coding.map(|coding| (CONTENT_ENCODING, coding.parse().unwrap())));
            let parts =
                Parts { method: &Method::POST, target: "/", headers: &headers, body: b"{}" };
            fingerprint(&Recipe::compile(&settings).unwrap(), &parts).canonical
        };
        assert_ne!(coded(None), coded(Some("gzip")));
        assert_ne!(coded(Some("br")), coded(Some("gzip")));
    }

    #[test]
    fn a_raw_body_never_equals_a_canonical_one() {
        let mut form = Vec::new();
        json::Tree::parse(b"[1]").unwrap().write(&[], &mut form);
        let json = |body: &[u8]| of(&Settings::default(), "/", "application/json", body).canonical;
        assert_ne!(json(b"[1]"), json(&form));
    }

    #[test]
    fn c15_the_raw_hash_decides_across_a_change_of_recipe() {
        let new = Settings { ignore: vec!["$.t".to_owned()], ..Settings::default() };
        let old = of(&Settings::default(), "/", "application/json", b"{\"t\":1}");
        assert!(old.same_request(&of(&new, "/", "application/json", b"{\"t\":1}")));
        assert!(!old.same_request(&of(&new, "/", "application/json", b"{\"t\":2}")));
        assert_ne!(old.recipe, Recipe::compile(&new).unwrap().id());
    }

    #[test]
    fn the_recipes_id_is_stable() {
        let recipe = |headers: &[&str], ignore: &[&str]| {
            let own = |list: &[&str]| list.iter().map(|entry| (*entry).to_owned()).collect();
            let settings =
                Settings { headers: own(headers), ignore: own(ignore), ..Settings::default() };
            Recipe::compile(&settings).unwrap().id()
        };
        assert_eq!(recipe(&["A", "b"], &["$.x", "$.y"]), recipe(&["B", "a"], &["$.y", "$.x"]));
        assert_ne!(recipe(&["a"], &[]), recipe(&[], &["a"]));
    }

    #[test]
    fn form_fields_are_ignored_by_name() {
        let settings = Settings { ignore: vec!["ts".to_owned()], ..Settings::default() };
        let form =
            |body: &[u8]| of(&settings, "/", "application/x-www-form-urlencoded", body).canonical;
        assert_eq!(form(b"a=1&ts=1"), form(b"ts=2&a=1"));
        assert_ne!(form(b"a=1&ts=1"), form(b"ts=1&a=2"));
    }

    #[test]
    fn every_bad_setting_is_named() {
        let settings = Settings {
            ignore: vec!["$[".to_owned(), "/a[1]".to_owned(), String::new()],
            ignore_xml: vec!["Security".to_owned(), "//wsse:Security".to_owned()],
            headers: vec!["a b".to_owned()],
            ..Settings::default()
        };
        assert_eq!(Recipe::compile(&settings).unwrap_err().len(), 5);
    }
}
