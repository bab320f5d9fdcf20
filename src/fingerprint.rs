//! What makes two requests the same request: a SHA-256 over what counts, in one form for each meaning.
//!
//! Hashed, each with its length before it: a version, the method, the path as received, the query's pairs, the essence of
//! Content-Type, the headers that the route names, and the body, decoded, in its canonical form. The body's tag says which
//! form that is, so that bytes that happen to look like a canonical form never equal it. A body that cannot be read in the
//! form its type asks for is hashed as it is, and one that cannot be decoded as it came: never an error, and never equal to
//! another body.
//!
//! Beside the canonical hash stands one of the request as received. The recipe's id names version and settings: where it
//! differs between two requests, a deploy lies between them and the raw hash decides. So `RAW_VERSION` never changes: records
//! of every version of this program are recognised by it.
//!
//! Bytes are hashed as seldom as can be. A body without a form of its own counts by the hash of the request as received, but
//! without its query, which counts as pairs; and where there is no query, that is the raw hash itself.
//!
//! A new form is a new variant of `Form`, and a new `VERSION`.

pub mod coding;
pub mod form;
pub mod json;
pub(crate) mod multipart;
pub(crate) mod parameters;
pub mod show;
pub mod xml;

use std::borrow::Cow;

use http::header::{CONTENT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, Method};
use serde_json_path::JsonPath;
use sha2::{Digest as _, Sha256};

use self::parameters::Parametered;
use crate::record::{Digest, Fingerprint, RecipeId};

/// Goes up whenever the canonical hash of any request changes.
const VERSION: &[u8] = b"oncegate-fingerprint-3";
/// Names what the raw hash is made of, for ever.
const RAW_VERSION: &[u8] = b"oncegate-request-1";

/// How many bytes a body may decode to, if nothing else is said.
const DECODED_MAX: usize = 8 << 20;

/// A route's `fingerprint` settings as configured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// What of the body counts, where it names anything that is there: entries as of `ignore`.
    pub only: Vec<String>,
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
    /// How many bytes a body may decode to; one that is larger counts as it came.
    pub decoded_max: Option<usize>,
}

/// Settings, compiled.
#[derive(Clone, Debug)]
pub struct Recipe {
    id: RecipeId,
    json: json::Selection,
    form: form::Selection,
    xml: xml::Selection,
    query: form::Selection,
    headers: Vec<HeaderName>,
    decoded_max: usize,
}

impl Recipe {
    /// Compiles settings.
    ///
    /// # Errors
    /// One sentence for each entry that cannot be used.
    pub fn compile(settings: &Settings) -> Result<Self, Vec<String>> {
        let mut errors = Vec::new();
        let given = &settings.xml_namespaces;
        let only = Entries::parse("only", &settings.only, given, &mut errors);
        let mut ignore = Entries::parse("ignore", &settings.ignore, given, &mut errors);
        for entry in &settings.ignore_xml {
            ignore.read_xml("ignore_xml", entry, given, &mut errors);
        }
        let xml = xml::Selection { only: only.xml, ignore: ignore.xml };
        let mut headers = Vec::new();
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
        let decoded_max = settings.decoded_max.unwrap_or(DECODED_MAX);
        let ignore_query = settings.ignore_query.clone();
        Ok(Self {
            id: recipe_id(settings, &xml, &headers, decoded_max),
            json: json::Selection { only: only.json, ignore: ignore.json },
            form: form::Selection { only: only.fields, ignore: ignore.fields },
            xml,
            query: form::Selection { only: Vec::new(), ignore: ignore_query },
            headers,
            decoded_max,
        })
    }

    /// Whether it picks or leaves out parts of bodies by path.
    #[must_use]
    pub fn looks_into_bodies(&self) -> bool {
        !(self.json.only.is_empty() && self.json.ignore.is_empty())
    }

    /// Names version and settings: the order of entries does not matter.
    #[must_use]
    pub fn id(&self) -> RecipeId {
        self.id
    }
}

/// Entries of `only` or `ignore`, each for the kind of body that it speaks of.
#[derive(Debug, Default)]
struct Entries {
    json: Vec<JsonPath>,
    fields: Vec<String>,
    xml: Vec<xml::Path>,
}

impl Entries {
    fn parse(name: &str, entries: &[String], given: &xml::Given, errors: &mut Vec<String>) -> Self {
        let mut read = Self::default();
        for entry in entries {
            match entry.chars().next() {
                Some('$') if descents(entry) > 1 => errors.push(format!(
                    "{name}: {entry:?} descends (\"..\") more than once, which takes more than linear time; name the \
                     levels between"
                )),
                Some('$') => match JsonPath::parse(entry) {
                    Ok(path) => read.json.push(path),
                    Err(error) => errors.push(format!("{name}: {entry:?} is no JSONPath: {error}")),
                },
                Some('/') => read.read_xml(name, entry, given, errors),
                Some(_) => read.fields.push(entry.clone()),
                None => errors.push(format!("{name}: an entry is empty")),
            }
        }
        read
    }

    fn read_xml(&mut self, name: &str, entry: &str, given: &xml::Given, errors: &mut Vec<String>) {
        match xml::Path::parse(entry, given) {
            Ok(path) => self.xml.push(path),
            Err(error) => errors.push(format!("{name}: {error}")),
        }
    }
}

/// How often a JSONPath descends, in its filters too; what stands between quotes does not count.
fn descents(path: &str) -> usize {
    let (mut count, mut quoted, mut before) = (0, None, ' ');
    let mut letters = path.chars();
    while let Some(letter) = letters.next() {
        match (quoted, letter) {
            (Some(_), '\\') => drop(letters.next()),
            (Some(quote), letter) if letter == quote => quoted = None,
            (Some(_), _) => {}
            (None, '\'' | '"') => quoted = Some(letter),
            (None, '.') if before == '.' => count += 1,
            (None, _) => {}
        }
        before = letter;
    }
    count
}

fn recipe_id(
    settings: &Settings,
    xml: &xml::Selection,
    headers: &[HeaderName],
    decoded_max: usize,
) -> RecipeId {
    let mut hash = Hash::new(VERSION);
    let headers = headers.iter().map(HeaderName::as_str).collect();
    // XML paths count by the namespaces that their prefixes stand for.
    let others = |list: &[String]| {
        list.iter().filter(|entry| !entry.starts_with('/')).cloned().collect::<Vec<_>>()
    };
    let spelled = |paths: &[xml::Path]| paths.iter().map(xml::Path::spelled).collect::<Vec<_>>();
    let (only, ignore) = (others(&settings.only), others(&settings.ignore));
    let (only_xml, ignore_xml) = (spelled(&xml.only), spelled(&xml.ignore));
    let query = texts(&settings.ignore_query);
    let lists =
        [texts(&only), texts(&ignore), headers, query, texts(&only_xml), texts(&ignore_xml)];
    for list in lists {
        hash.part(list.len().to_string().as_bytes());
        for entry in list {
            hash.part(entry.as_bytes());
        }
    }
    hash.part(decoded_max.to_string().as_bytes());
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
    fn of(essence: &[u8]) -> Self {
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

/// A body without its content codings.
#[derive(Debug)]
enum Content<'a> {
    /// As received: it had none.
    Plain(&'a [u8]),
    Decoded(Vec<u8>),
    /// As received: they cannot be taken off.
    Encoded(&'a [u8]),
}

impl<'a> Content<'a> {
    fn of(headers: &HeaderMap, body: &'a [u8], decoded_max: usize) -> Self {
        let codings = coding::codings(headers);
        if codings.as_ref().is_ok_and(Vec::is_empty) {
            return Self::Plain(body);
        }
        match codings.and_then(|codings| coding::decode(&codings, body, decoded_max)) {
            Ok(body) => Self::Decoded(body),
            Err(_) => Self::Encoded(body),
        }
    }
}

/// A body without its content codings, where they can be taken off within the recipe's bound; else as it came.
#[must_use]
pub fn plain<'a>(recipe: &Recipe, headers: &HeaderMap, body: &'a [u8]) -> Cow<'a, [u8]> {
    match Content::of(headers, body, recipe.decoded_max) {
        Content::Plain(body) | Content::Encoded(body) => Cow::Borrowed(body),
        Content::Decoded(body) => Cow::Owned(body),
    }
}

/// The fingerprint of a request.
///
/// Takes time in proportion to the body, and for a body with a content coding to what it decodes to.
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
        // What the bytes say depends on the parameters: charset, boundary, action.
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

/// The canonical form of a body, and its name. `None`: it is compared byte by byte.
#[must_use]
pub fn canonical(recipe: &Recipe, parts: &Parts<'_>) -> Option<(&'static [u8], Vec<u8>)> {
    let content = Content::of(parts.headers, parts.body, recipe.decoded_max);
    canonical_body(recipe, &essence(parts.headers), parts.headers, &content)
}

/// The form that the type asks for, and its tag. `None`: the bytes count as they are.
fn canonical_body(
    recipe: &Recipe,
    essence: &[u8],
    headers: &HeaderMap,
    content: &Content<'_>,
) -> Option<(&'static [u8], Vec<u8>)> {
    let body = match content {
        Content::Plain(body) => *body,
        Content::Decoded(body) => body.as_slice(),
        Content::Encoded(_) => return None,
    };
    let mut kinds = headers.get_all(CONTENT_TYPE).iter();
    let (Some(kind), None) = (kinds.next(), kinds.next()) else { return None };
    let mut text = Vec::new();
    let tag: &[u8] = match Form::of(essence) {
        Form::Json => match json::write(body, &recipe.json, &mut text)? {
            json::Kept::Whole => b"json",
            json::Kept::Picked => b"json-only",
        },
        Form::UrlEncoded => match form::write(body, &recipe.form, &mut text)? {
            form::Kept::Whole => b"form",
            form::Kept::Picked => b"form-only",
        },
        Form::Multipart => {
            match multipart::write(kind.as_bytes(), body, &recipe.form, &mut text)? {
                form::Kept::Whole => b"multipart",
                form::Kept::Picked => b"multipart-only",
            }
        }
        Form::Xml => {
            let kind = Parametered::parse(kind.as_bytes())?;
            match xml::write(body, &kind, &recipe.xml, &mut text)? {
                xml::Kept::Whole => b"xml",
                xml::Kept::Picked => b"xml-only",
            }
        }
        Form::Raw => return None,
    };
    Some((tag, text))
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

    fn sent(kind: &str, body: &[u8]) -> Fingerprint {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_str(kind).unwrap());
        let recipe = Recipe::compile(&Settings::default()).unwrap();
        fingerprint(&recipe, &Parts { method: &Method::POST, target: "/", headers: &headers, body })
    }

    #[test]
    fn where_xml_or_multipart_counts_by_its_bytes_its_parameters_count_too() {
        let dtd = "<!DOCTYPE a><a>\u{e9}</a>".as_bytes();
        let soap = b"<a/>";
        for (one, other, body) in [
            ("text/xml; charset=utf-8", "text/xml; charset=iso-8859-1", dtd),
            (
                "application/soap+xml; action=x; action=y",
                "application/soap+xml; action=y; action=x",
                soap,
            ),
            (
                "multipart/related; boundary=B; start=1; start=2",
                "multipart/related; boundary=B; start=2; start=1",
                b"--B--",
            ),
        ] {
            assert_ne!(sent(one, body).canonical, sent(other, body).canonical, "{one}");
            assert_eq!(sent(one, body), sent(one, body));
        }
    }

    #[test]
    fn a_comment_beside_a_text_counts_and_one_between_elements_does_not() {
        let same = |a: &str, b: &str| {
            sent("text/xml", a.as_bytes()).canonical == sent("text/xml", b.as_bytes()).canonical
        };
        for (with, without) in [
            ("<o><a><!--9-->5</a></o>", "<o><a>5</a></o>"),
            ("<o><a>5<!--9--></a></o>", "<o><a>5</a></o>"),
            ("<o>1<b/><!--x-->2</o>", "<o>1<b/>2</o>"),
            ("<o><!--x--><![CDATA[5]]></o>", "<o>5</o>"),
            ("<o>5<!--x--><b/></o>", "<o>5<b/></o>"),
        ] {
            assert!(!same(with, without), "{with}");
        }
        assert!(same("<o><!--x--><b/> <!--y--> <c/><!--z--></o>", "<o><b/><c/></o>"));
        assert!(
            same("<o><a><!--9-->5</a></o>", "<o><a><!--10-->5</a></o>"),
            "what it says does not count"
        );
    }

    #[test]
    fn a_path_descends_once() {
        for (path, count) in [
            ("$.a.b", 0),
            ("$..a", 1),
            ("$..a..b", 2),
            ("$..a[?@..b]", 2),
            ("$['a..b']..c", 1),
            (r#"$["a\"..b"]..c"#, 1),
        ] {
            assert_eq!(descents(path), count, "{path}");
        }
        let twice = Settings { ignore: vec!["$..a..b".to_owned()], ..Settings::default() };
        assert!(Recipe::compile(&twice).unwrap_err()[0].contains("descends"));
    }

    fn strings(case: &Value, name: &str) -> Vec<String> {
        let list = case.get(name).and_then(Value::as_array).into_iter().flatten();
        list.map(|entry| entry.as_str().unwrap().to_owned()).collect()
    }

    fn of_case(case: &Value, side: &str) -> Fingerprint {
        let settings = Settings {
            ignore: strings(case, "ignore"),
            ignore_xml: strings(case, "ignore_xml"),
            headers: strings(case, "headers"),
            ignore_query: strings(case, "ignore_query"),
            ..Settings::default()
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
        assert_eq!(missed, Vec::<&str>::new());
    }

    fn of(settings: &Settings, target: &str, kind: &str, body: &[u8]) -> Fingerprint {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, kind.parse().unwrap());
        let parts = Parts { method: &Method::POST, target, headers: &headers, body };
        fingerprint(&Recipe::compile(settings).unwrap(), &parts)
    }

    fn of_coded(
        settings: &Settings,
        target: &str,
        coding: Option<&'static str>,
        body: &[u8],
    ) -> Fingerprint {
        let mut headers = HeaderMap::new();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        headers.extend(coding.map(|coding| (CONTENT_ENCODING, coding.parse().unwrap())));
        let parts = Parts { method: &Method::POST, target, headers: &headers, body };
        fingerprint(&Recipe::compile(settings).unwrap(), &parts)
    }

    fn gzip(text: &[u8], level: u32) -> Vec<u8> {
        let mut coder = flate2::read::GzEncoder::new(text, flate2::Compression::new(level));
        let mut bytes = Vec::new();
        std::io::Read::read_to_end(&mut coder, &mut bytes).unwrap();
        bytes
    }

    #[test]
    fn c07_a_body_counts_without_its_content_coding() {
        let of = |coding: Option<&'static str>, body: &[u8]| {
            let settings = Settings { decoded_max: Some(1000), ..Settings::default() };
            of_coded(&settings, "/?b=1&a=2", coding, body)
        };
        let (plain, other) = (&b"{\"a\":1,\"b\":2}"[..], &b"{\"b\": 2.0, \"a\": 1}"[..]);
        assert_eq!(of(None, plain).canonical, of(Some("gzip"), &gzip(plain, 9)).canonical);
        assert_eq!(of(None, plain).canonical, of(Some("x-gzip"), &gzip(other, 0)).canonical);
        assert_ne!(of(None, plain).raw, of(Some("gzip"), &gzip(plain, 9)).raw);
        let twice = gzip(&gzip(plain, 9), 9);
        assert_eq!(of(None, plain).canonical, of(Some("gzip, gzip"), &twice).canonical);
        // What cannot be decoded equals itself alone, not what it would be without its coding.
        let long = format!("{{\"a\":{:>1000}}}", 1);
        for bytes in [&gzip(plain, 9)[1..], &gzip(long.as_bytes(), 9), plain, b""] {
            assert_eq!(of(Some("gzip"), bytes), of(Some("gzip"), bytes));
            assert_ne!(of(Some("gzip"), bytes).canonical, of(None, bytes).canonical);
            assert_ne!(of(Some("gzip"), bytes).canonical, of(Some("x-gzip"), bytes).canonical);
        }
        assert_ne!(
            of(Some("gzip"), &gzip(long.as_bytes(), 9)).canonical,
            of(None, long.as_bytes()).canonical
        );
        // No JSON, decoded or not: the content's bytes count.
        assert_eq!(of(None, b"oops").canonical, of(Some("gzip"), &gzip(b"oops", 9)).canonical);
        assert_ne!(of(None, b"oops").canonical, of(Some("gzip"), &gzip(b"oops ", 9)).canonical);
    }

    #[test]
    fn a_body_without_a_form_counts_beside_the_query_not_with_it() {
        let settings = Settings { ignore_query: vec!["ts".to_owned()], ..Settings::default() };
        let text = |target: &str, body: &[u8]| of(&settings, target, "text/plain", body).canonical;
        assert_eq!(text("/p?a=1&b=2", b"x"), text("/p?b=2&a=1", b"x"));
        assert_eq!(text("/p?ts=1", b"x"), text("/p", b"x"));
        assert_eq!(text("/p?", b"x"), text("/p", b"x"));
        assert_ne!(text("/p?a=1", b"x"), text("/p", b"x"));
        assert_ne!(text("/p?a=1", b"x"), text("/p?a=1", b"y"));
        assert_ne!(text("/p", b"x"), text("/p", b"y"));
        assert_ne!(text("/p", b"x"), text("/q", b"x"));
    }

    #[test]
    fn only_applies_to_the_kind_of_body_that_it_names() {
        let settings = Settings {
            only: vec!["$.id".to_owned(), "id".to_owned()],
            ignore: vec!["$.id.t".to_owned()],
            ..Settings::default()
        };
        let json = |body: &str| of(&settings, "/", "application/json", body.as_bytes()).canonical;
        let form = "application/x-www-form-urlencoded";
        let form = |body: &str| of(&settings, "/", form, body.as_bytes()).canonical;
        let text = |body: &str| of(&settings, "/", "text/plain", body.as_bytes()).canonical;
        assert_eq!(json(r#"{"id":1,"at":1}"#), json(r#"{"at":2,"id":1}"#));
        assert_ne!(json(r#"{"id":1,"at":1}"#), json(r#"{"id":2,"at":1}"#));
        assert_eq!(json(r#"{"id":{"v":1,"t":1}}"#), json(r#"{"id":{"t":2,"v":1.0}}"#));
        assert_eq!(form("id=1&at=1"), form("at=2&id=1"));
        assert_ne!(form("id=1&at=1"), form("id=2&at=1"));
        // Nothing that is named is there: all of it counts.
        assert_ne!(json(r#"{"at":1}"#), json(r#"{"at":2}"#));
        assert_ne!(form("at=1"), form("at=2"));
        assert_ne!(text("id=1&at=1"), text("at=1&id=1"));
        // A name for one kind says nothing of the other.
        let settings = Settings { only: vec!["id".to_owned()], ..Settings::default() };
        let json = |body: &str| of(&settings, "/", "application/json", body.as_bytes()).canonical;
        assert_ne!(json(r#"{"id":1,"at":1}"#), json(r#"{"id":1,"at":2}"#));
    }

    #[test]
    fn c15_a_record_of_the_first_version_is_recognised_by_its_raw_hash() {
        // As version 1 made it, of `POST /orders?x=1` with `{"a":1}` as `application/json`.
        let hex = "617d7d674b7d99960826befa410f2710467fffd5effb300c81677eb05bdcecd9";
        let raw = of(&Settings::default(), "/orders?x=1", "application/json", b"{\"a\":1}").raw;
        assert_eq!(raw.map(|byte| format!("{byte:02x}")).concat(), hex);
        let of = |body: &[u8]| of(&Settings::default(), "/orders?x=1", "application/json", body);
        let old = Fingerprint { canonical: [7; 32], recipe: [1; 8], raw };
        assert!(old.same_request(&of(b"{\"a\":1}")));
        assert!(!old.same_request(&of(b"{\"a\": 1}")));
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
        // An unknown coding counts with the bytes.
        let coded =
            |coding: Option<&'static str>| of_coded(&settings, "/", coding, b"{}").canonical;
        assert_ne!(coded(None), coded(Some("compress")));
        assert_ne!(coded(Some("compress")), coded(Some("pack200-gzip")));
        assert_eq!(coded(None), coded(Some("identity")));
    }

    #[test]
    fn a_raw_body_never_equals_a_canonical_one() {
        let settings = Settings { only: vec!["$.a".to_owned()], ..Settings::default() };
        let json = |body: &[u8]| of(&settings, "/", "application/json", body).canonical;
        // What is hashed of a document, as a body that is no JSON and as one that is.
        for (document, form) in [(&b"[ 1 ]"[..], &b"[1]"[..]), (b"{\"a\":1}", b"{\"a\":1,}")] {
            let text = of(&settings, "/", "text/plain", form).canonical;
            assert_ne!(json(document), text);
        }
        assert_ne!(json(b"{\"a\":1}"), json(b"{\"a\":1,}"));
        let raw = of(&settings, "/", "text/plain", b"x").raw;
        let text = |body: &[u8]| of(&settings, "/", "text/plain", body).canonical;
        assert_ne!(text(b"x"), text(&raw));
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
        let of = |settings: Settings| Recipe::compile(&settings).unwrap().id();
        let a = || vec!["$.a".to_owned()];
        let ids = [
            of(Settings::default()),
            of(Settings { only: a(), ..Settings::default() }),
            of(Settings { ignore: a(), ..Settings::default() }),
            of(Settings { ignore_query: a(), ..Settings::default() }),
            of(Settings { only: vec!["/a".to_owned()], ..Settings::default() }),
            of(Settings { ignore: vec!["/a".to_owned()], ..Settings::default() }),
            of(Settings { decoded_max: Some(1), ..Settings::default() }),
        ];
        assert!(ids.iter().enumerate().all(|(n, id)| !ids[..n].contains(id)));
        let written_out = Settings { decoded_max: Some(DECODED_MAX), ..Settings::default() };
        assert_eq!(ids[0], of(written_out));
        // One path in two lists, and by two prefixes.
        let ignore = Settings { ignore: vec!["//soap:a".to_owned()], ..Settings::default() };
        let ignore_xml =
            Settings { ignore_xml: vec!["//soapenv:a".to_owned()], ..Settings::default() };
        assert_eq!(of(ignore), of(ignore_xml));
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
            only: vec!["$.".to_owned(), "//unknown:a".to_owned(), "/a".to_owned()],
            ..Settings::default()
        };
        assert_eq!(Recipe::compile(&settings).unwrap_err().len(), 7);
    }
}
