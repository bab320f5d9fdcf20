//! Finds the first difference of two canonical forms: a path into the body if its form has parts, or else a place in its
//! bytes.

use std::collections::HashMap;
use std::fmt::Write as _;

use serde::Serialize;

use super::Canonical;
use super::text::{self, Pair};

/// How much of a value is shown, in bytes.
const VALUE_MAX: usize = 200;
/// How many bytes before a difference are shown, in a body without parts.
const BEFORE: usize = 20;

/// The first difference.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// Where: `$.items[2].price`, `field "amount"`, `query "a"`, `header x-currency`, `method`.
    pub place: String,
    /// What the first has there; `None`: nothing.
    pub first: Option<String>,
    /// What the second has there.
    pub second: Option<String>,
}

impl Difference {
    fn at(place: impl Into<String>, first: Option<&[u8]>, second: Option<&[u8]>) -> Self {
        let shown = |bytes: &[u8]| {
            let start = bytes.get(..VALUE_MAX).unwrap_or(bytes);
            let text = String::from_utf8_lossy(start);
            if start.len() < bytes.len() { format!("{text}...") } else { text.into_owned() }
        };
        Self { place: place.into(), first: first.map(shown), second: second.map(shown) }
    }
}

/// The first difference of the parts that count; `None`: there is none.
#[must_use]
pub fn difference(a: &Canonical, b: &Canonical) -> Option<Difference> {
    let texts = [
        ("method", &a.method, &b.method),
        ("path", &a.path, &b.path),
        ("content-type", &a.content_type, &b.content_type),
    ];
    let text = texts.into_iter().find(|(_, a, b)| a != b);
    if let Some((place, a, b)) = text {
        return Some(Difference::at(place, Some(a.as_bytes()), Some(b.as_bytes())));
    }
    query(a, b).or_else(|| headers(a, b)).or_else(|| body(a, b))
}

fn query(a: &Canonical, b: &Canonical) -> Option<Difference> {
    match (&a.query, &b.query) {
        (Ok(a), Ok(b)) => pairs("query", a, b),
        (Err(a), Err(b)) if a == b => None,
        (a, b) => {
            let text = |query: &Result<_, String>| match query {
                Ok(_) => "pairs".to_owned(),
                Err(query) => query.clone(),
            };
            let (a, b) = (text(a), text(b));
            Some(Difference::at("query", Some(a.as_bytes()), Some(b.as_bytes())))
        }
    }
}

fn headers(a: &Canonical, b: &Canonical) -> Option<Difference> {
    // Two requests of one route have the same header names. Requests of two routes differ in their operation.
    let differing = a.headers.iter().zip(&b.headers).find(|(a, b)| a != b);
    let ((name, a), (_, b)) = differing?;
    let line = |values: &Vec<Vec<u8>>| values.join(&b", "[..]);
    let (first, second) = (line(a), line(b));
    let there = |values: &Vec<Vec<u8>>, line| (!values.is_empty()).then_some(line);
    let (first, second) = (there(a, first.as_slice()), there(b, second.as_slice()));
    Some(Difference::at(format!("header {name}"), first, second))
}

fn body(a: &Canonical, b: &Canonical) -> Option<Difference> {
    if a.form != b.form {
        let form = |of: &Canonical| match of.form {
            Some(form) => format!("read as {form}"),
            None => "compared byte by byte".to_owned(),
        };
        let (first, second) = (form(a), form(b));
        return Some(Difference::at("body", Some(first.as_bytes()), Some(second.as_bytes())));
    }
    if a.body == b.body {
        return None;
    }
    let form = a.form.unwrap_or_default();
    let texts = || Some((std::str::from_utf8(&a.body).ok()?, std::str::from_utf8(&b.body).ok()?));
    let found = if form.starts_with("json") {
        texts().and_then(|(a, b)| json(a, b))
    } else if form.starts_with("form") {
        text::pairs(&a.body).zip(text::pairs(&b.body)).and_then(|(a, b)| pairs("field", &a, &b))
    } else if form.starts_with("xml") {
        texts().and_then(|(a, b)| xml(a, b))
    } else if form.starts_with("multipart") {
        multipart(&a.body, &b.body)
    } else {
        None
    };
    found.or_else(|| Some(bytes("byte", &a.body, &b.body)))
}

/// The first difference of two lists that are sorted by name.
fn pairs(what: &str, a: &[Pair], b: &[Pair]) -> Option<Difference> {
    let at = a.iter().zip(b).position(|(a, b)| a != b).unwrap_or(a.len().min(b.len()));
    let (one, other) = (a.get(at), b.get(at));
    let (name, first, second) = match (one, other) {
        (None, None) => return None,
        (Some((name, first)), Some((same, second))) if name == same => {
            (name, Some(first), Some(second))
        }
        (Some((name, first)), Some((later, _))) if name < later => (name, Some(first), None),
        (Some((name, first)), None) => (name, Some(first), None),
        (Some(_) | None, Some((name, second))) => (name, None, Some(second)),
    };
    let list = if first.is_some() { a } else { b };
    let before = list.get(..at)?.iter().filter(|(known, _)| known == name).count();
    let mut place = format!("{what} {:?}", String::from_utf8_lossy(name));
    if before > 0 {
        // Writing to a string cannot fail.
        let _ok = write!(place, " ({})", before + 1);
    }
    Some(Difference::at(place, first.map(Vec::as_slice), second.map(Vec::as_slice)))
}

/// A segment of a path into a JSON text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PathSegment<'t> {
    /// A name as it is spelt, without quotes.
    Name(&'t str),
    Index(usize),
}

impl PathSegment<'_> {
    fn push(self, path: &mut String) {
        let plain = |name: &str| {
            name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
                && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_')
        };
        // Writing to a string cannot fail.
        let _ok = match self {
            Self::Name(name) if plain(name) => write!(path, ".{name}"),
            Self::Name(name) => write!(path, "[\"{name}\"]"),
            Self::Index(index) => write!(path, "[{index}]"),
        };
    }
}

/// The first difference of two canonical JSON texts, or of the parts that were picked from them. Reads each level once.
fn json(mut a: &str, mut b: &str) -> Option<Difference> {
    let mut path = "$".to_owned();
    while let (Some(ours), Some(theirs)) = (entries(a), entries(b)) {
        if a.get(..1) != b.get(..1) {
            break;
        }
        let at = ours.iter().zip(&theirs).position(|(a, b)| a != b);
        let at = at.unwrap_or(ours.len().min(theirs.len()));
        match (ours.get(at), theirs.get(at)) {
            (Some((segment, inner)), Some((same, other))) if segment == same => {
                segment.push(&mut path);
                (a, b) = (inner, other);
            }
            (Some((segment, inner)), other)
                if comes_first(*segment, other.map(|(segment, _)| *segment)) =>
            {
                segment.push(&mut path);
                return Some(Difference::at(path, Some(inner.as_bytes()), None));
            }
            (_, Some((segment, other))) => {
                segment.push(&mut path);
                return Some(Difference::at(path, None, Some(other.as_bytes())));
            }
            (Some(_), None) | (None, None) => return None,
        }
    }
    Some(Difference::at(path, Some(a.as_bytes()), Some(b.as_bytes())))
}

fn comes_first(segment: PathSegment<'_>, other: Option<PathSegment<'_>>) -> bool {
    match (segment, other) {
        (_, None) => true,
        (PathSegment::Name(a), Some(PathSegment::Name(b))) => a < b,
        (PathSegment::Index(a), Some(PathSegment::Index(b))) => a < b,
        (PathSegment::Name(_), Some(PathSegment::Index(_)))
        | (PathSegment::Index(_), Some(PathSegment::Name(_))) => false,
    }
}

/// The parts of an array or object; `None`: the value is neither.
fn entries(text: &str) -> Option<Vec<(PathSegment<'_>, &str)>> {
    let is_object = text.starts_with('{');
    if !is_object && !text.starts_with('[') {
        return None;
    }
    let mut rest = text.get(1..text.len().checked_sub(1)?)?;
    let mut entries = Vec::new();
    while !rest.is_empty() {
        let segment;
        if is_object {
            let end = value_end(rest)?;
            segment = PathSegment::Name(rest.get(1..end.checked_sub(1)?)?);
            rest = rest.get(end..)?.strip_prefix(':')?;
        } else {
            let digits = rest.bytes().take_while(u8::is_ascii_digit).count();
            let named = rest.get(digits..)?.strip_prefix(':').filter(|_| digits > 0);
            let index = named.and_then(|_| rest.get(..digits)?.parse().ok());
            segment = PathSegment::Index(index.unwrap_or(entries.len()));
            rest = named.unwrap_or(rest);
        }
        let end = value_end(rest)?;
        entries.push((segment, rest.get(..end)?));
        rest = rest.get(end..)?;
        rest = rest.strip_prefix(',').unwrap_or(rest);
    }
    Some(entries)
}

/// The end of the value at the start of a text.
fn value_end(text: &str) -> Option<usize> {
    let (mut depth, mut quoted, mut escaped) = (0_usize, false, false);
    for (at, byte) in text.bytes().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if quoted => escaped = true,
            b'"' => quoted = !quoted,
            _ if quoted => continue,
            b'{' | b'[' => depth += 1,
            b'}' | b']' => depth = depth.checked_sub(1)?,
            b',' | b':' if depth == 0 => return Some(at),
            _ => continue,
        }
        if depth == 0 && !quoted && matches!(byte, b'"' | b'}' | b']') {
            return Some(at + 1);
        }
    }
    (depth == 0 && !quoted).then_some(text.len())
}

/// The first difference of two canonical XML texts: an element with an attribute or a text.
fn xml(a: &str, b: &str) -> Option<Difference> {
    let at = parting(a.as_bytes(), b.as_bytes());
    let (path, from) = element(a, at)?;
    let token = |text: &str| -> Option<String> {
        let rest = text.get(from..)?;
        let end = if rest.starts_with('<') { tag_end(rest) } else { rest.find('<') };
        let token = rest.get(..end.unwrap_or(rest.len()))?;
        (!token.is_empty()).then(|| token.to_owned())
    };
    let (first, second) = (token(a), token(b));
    let bytes = |token: &'_ Option<String>| token.as_ref().map(|text| text.clone().into_bytes());
    let (first, second) = (bytes(&first), bytes(&second));
    Some(Difference::at(path, first.as_deref(), second.as_deref()))
}

/// An open element: its name, and how many children of each name it has so far.
type Named<'t> = (String, HashMap<&'t str, usize>);

/// The path of the element at a place of an XML text, and the start of the tag or text at that place.
fn element(text: &str, place: usize) -> Option<(String, usize)> {
    // Names with their number among those of the same name, and the names of their children so far.
    let mut open: Vec<Named<'_>> = vec![(String::new(), HashMap::new())];
    let mut at = 0;
    let path = |open: &[Named<'_>]| {
        open.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>().join("/")
    };
    while at < text.len() {
        let rest = text.get(at..)?;
        let end = at
            + if rest.starts_with('<') {
                tag_end(rest)?
            } else {
                rest.find('<').unwrap_or(rest.len())
            };
        let tag = text.get(at..end)?;
        let within = place < end;
        if let Some(name) = tag.strip_prefix('<').filter(|tag| !tag.starts_with(['/', '?', '!'])) {
            let name = name.split([' ', '>', '/']).next().unwrap_or_default();
            let number = open.last_mut()?.1.entry(name).or_insert(0);
            *number += 1;
            let named = if *number > 1 { format!("{name}[{number}]") } else { name.to_owned() };
            open.push((named, HashMap::new()));
            if within {
                let attribute =
                    attribute(text.get(at..place)?).filter(|_| place > at + name.len() + 1);
                let path = path(&open);
                return Some((
                    attribute.map_or(path.clone(), |name| format!("{path}/@{name}")),
                    at,
                ));
            }
            if tag.ends_with("/>") {
                open.pop();
            }
        } else if within {
            break;
        } else if tag.starts_with("</") {
            open.pop();
        }
        at = end;
    }
    let path = path(&open);
    Some((if path.is_empty() { "/".to_owned() } else { path }, at))
}

/// The end of a tag. A `>` within quotes does not end it.
fn tag_end(tag: &str) -> Option<usize> {
    let mut quote = None;
    for (at, byte) in tag.bytes().enumerate() {
        match (quote, byte) {
            (None, b'"' | b'\'') => quote = Some(byte),
            (None, b'>') => return Some(at + 1),
            (Some(open), _) if open == byte => quote = None,
            (None | Some(_), _) => {}
        }
    }
    None
}

/// The last attribute in this start of a tag.
fn attribute(start: &str) -> Option<&str> {
    let (before, _) = start.rsplit_once("=\"")?;
    before.rsplit(' ').next().filter(|name| !name.is_empty())
}

/// The first difference of two multipart forms: the name of a part, which the form holds with its length.
fn multipart(a: &[u8], b: &[u8]) -> Option<Difference> {
    const NAME: &[u8] = b"\x04name";
    let at = parting(a, b);
    let before = a.get(..at)?;
    let found = before.windows(NAME.len()).rposition(|window| window == NAME)?;
    let (length, rest) = a.get(found + NAME.len()..)?.split_first()?;
    let name = rest.get(..usize::from(*length))?;
    let place = format!("part {:?}, byte", String::from_utf8_lossy(name));
    Some(bytes(&place, a, b))
}

/// How many bytes two texts have in common at their start.
fn parting(a: &[u8], b: &[u8]) -> usize {
    a.iter().zip(b).position(|(a, b)| a != b).unwrap_or(a.len().min(b.len()))
}

fn bytes(place: &str, a: &[u8], b: &[u8]) -> Difference {
    let at = parting(a, b);
    let start = at.saturating_sub(BEFORE);
    let context = |text: &[u8]| text.get(start..(at + BEFORE).min(text.len())).map(<[u8]>::to_vec);
    let (first, second) = (context(a), context(b));
    Difference::at(format!("{place} {at}"), first.as_deref(), second.as_deref())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(found: Option<Difference>) -> String {
        let Some(found) = found else { return "none".to_owned() };
        let side = |side: Option<String>| side.unwrap_or_else(|| "nothing".to_owned());
        format!("{}: {} / {}", found.place, side(found.first), side(found.second))
    }

    #[test]
    fn the_first_difference_of_two_documents_is_a_path() {
        for (a, b, expected) in [
            (
                r#"{"items":[{"p":1},{"p":2}]}"#,
                r#"{"items":[{"p":1},{"p":3}]}"#,
                "$.items[1].p: 2 / 3",
            ),
            (r#"{"a":1}"#, r#"{"a":1,"b":2}"#, "$.b: nothing / 2"),
            (r#"{"a":1,"c":1}"#, r#"{"b":1,"c":1}"#, "$.a: 1 / nothing"),
            (r#"{"b":1,"c":1}"#, r#"{"a":1,"c":1}"#, "$.a: nothing / 1"),
            ("[1,2]", "[1]", "$[1]: 2 / nothing"),
            ("[]", "[[]]", "$[0]: nothing / []"),
            (r#"{"a":[]}"#, r#"{"a":{}}"#, "$.a: [] / {}"),
            ("1", "\"1\"", "$: 1 / \"1\""),
            (r#"{"a b":"x,\"}"}"#, r#"{"a b":"x,\"]"}"#, "$[\"a b\"]: \"x,\\\"}\" / \"x,\\\"]\""),
            (r#"{"a":{"b":null}}"#, r#"{"a":{"b":true}}"#, "$.a.b: null / true"),
            // As parts are picked.
            (r#"{"a":[1:{"b":1,},],}"#, r#"{"a":[2:{"b":1,},],}"#, "$.a[1]: {\"b\":1,} / nothing"),
            (r#"{"a":[1:{"b":1,},],}"#, r#"{"a":[1:{"b":2,},],}"#, "$.a[1].b: 1 / 2"),
        ] {
            assert_eq!(told(json(a, b)), expected, "{a} {b}");
        }
    }

    #[test]
    fn pairs_are_told_by_their_name_and_how_often_it_stood_before() {
        let list = |text: &str| -> Vec<(Vec<u8>, Vec<u8>)> {
            let pair = |pair: &str| pair.split_once('=').map(|(n, v)| (n.into(), v.into()));
            text.split('&').filter_map(pair).collect()
        };
        for (a, b, expected) in [
            ("a=1&b=2", "a=1&b=3", "field \"b\": 2 / 3"),
            ("a=1&a=2", "a=1&a=3", "field \"a\" (2): 2 / 3"),
            ("a=1", "a=1&b=2", "field \"b\": nothing / 2"),
            ("a=1&c=1", "b=1&c=1", "field \"a\": 1 / nothing"),
            ("", "a=1", "field \"a\": nothing / 1"),
            ("a=1", "a=1", "none"),
        ] {
            assert_eq!(told(pairs("field", &list(a), &list(b))), expected, "{a} {b}");
        }
    }

    #[test]
    fn xml_is_told_by_element_and_attribute() {
        for (a, b, expected) in [
            ("<a><b>1</b></a>", "<a><b>2</b></a>", "/a/b: 1 / 2"),
            ("<a><b>1</b><b>1</b></a>", "<a><b>1</b><b>2</b></a>", "/a/b[2]: 1 / 2"),
            (
                "<a><b x=\"&gt;>\" y=\"1\"></b></a>",
                "<a><b x=\"&gt;>\" y=\"2\"></b></a>",
                "/a/b/@y: <b x=\"&gt;>\" y=\"1\"> / <b x=\"&gt;>\" y=\"2\">",
            ),
            ("<a><b></b></a>", "<a><c></c></a>", "/a/b: <b> / <c>"),
            ("<a><b></b><c></c></a>", "<a><b></b></a>", "/a/c: <c> / </a>"),
        ] {
            assert_eq!(told(xml(a, b)), expected, "{a} {b}");
        }
    }

    #[test]
    fn what_has_no_parts_is_told_by_its_bytes() {
        let long = "x".repeat(100);
        let found = bytes("byte", format!("{long}1").as_bytes(), format!("{long}2").as_bytes());
        let before = "x".repeat(20);
        assert_eq!(told(Some(found)), format!("byte 100: {before}1 / {before}2"));
        assert_eq!(told(Some(bytes("byte", b"a", b""))), "byte 0: a / ");
        let part = |content: &str| {
            let mut part =
                b"\x01\x13content-disposition\x09form-data\x01\x04name\x04file\x01".to_vec();
            part.extend_from_slice(content.as_bytes());
            part
        };
        let found = told(multipart(&part("1"), &part("2")));
        assert!(found.starts_with("part \"file\", byte"), "{found}");
    }
}
