//! A route's fingerprint settings, compiled to a recipe, and the recipe's id.

use http::HeaderName;
use serde_json_path::JsonPath;

use super::{Hash, VERSION, form, json, xml};
use crate::record::RecipeId;

/// The default limit of a decoded body, in bytes.
pub(super) const DECODED_MAX: usize = 8 << 20;

/// A route's `fingerprint` settings as configured.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Settings {
    /// The parts of the body that count, if they match any. Entries as in `ignore`.
    pub only: Vec<String>,
    /// Parts of the body that do not count: a JSONPath (`$...`), an XML path (`/...`), or the name of a form field.
    pub ignore: Vec<String>,
    /// Parts of an XML body that do not count: XML paths, or `ws-security` for the parts that a signer adds.
    pub ignore_xml: Vec<String>,
    /// The namespaces of prefixes in XML paths.
    pub xml_namespaces: xml::Given,
    /// Names of request headers that count too.
    pub headers: Vec<String>,
    /// Names of query pairs that do not count.
    pub ignore_query: Vec<String>,
    /// The limit of a decoded body, in bytes. A larger body counts as received.
    pub decoded_max: Option<usize>,
}

/// Settings, compiled.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub(super) id: RecipeId,
    pub(super) json: json::Selection,
    pub(super) form: form::Selection,
    pub(super) xml: xml::Selection,
    pub(super) query: form::Selection,
    pub(super) headers: Vec<HeaderName>,
    pub(super) decoded_max: usize,
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
            match xml::named(entry) {
                Some(paths) => ignore.xml.extend(paths),
                None => ignore.read_xml("ignore_xml", entry, given, &mut errors),
            }
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

    /// Whether it selects parts of bodies by path.
    #[must_use]
    pub fn looks_into_bodies(&self) -> bool {
        !(self.json.only.is_empty() && self.json.ignore.is_empty())
    }

    /// The id of version and settings. The order of entries does not matter.
    #[must_use]
    pub fn id(&self) -> RecipeId {
        self.id
    }
}

/// The entries of `only` or `ignore`, by kind of body.
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
            Err(error) if entry.starts_with('/') => errors.push(format!("{name}: {error}")),
            Err(error) => {
                errors.push(format!("{name}: {error}; or write the name {:?}", xml::WS_SECURITY));
            }
        }
    }
}

/// The number of descents (`..`) in a JSONPath and its filters, without the text between quotes.
pub(super) fn descents(path: &str) -> usize {
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
    // XML paths are compared by the namespaces of their prefixes.
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
