//! The body of a request in the form in which it is compared.
//!
//! A new form needs a new variant of [`Form`] and a new `VERSION` of the fingerprint.

use std::borrow::Cow;

use http::HeaderMap;
use http::header::CONTENT_TYPE;

use super::parameters::ParameterizedValue;
use super::{Parts, Recipe, coding, form, json, multipart, xml};

/// The form in which a body is hashed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Form {
    Json,
    UrlEncoded,
    Multipart,
    Xml,
    Raw,
}

impl Form {
    pub(super) fn of(essence: &[u8]) -> Self {
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
pub(super) enum Content<'a> {
    /// As received: it had none.
    Plain(&'a [u8]),
    Decoded(Vec<u8>),
    /// As received: its codings cannot be decoded.
    Encoded(&'a [u8]),
}

impl<'a> Content<'a> {
    pub(super) fn of(headers: &HeaderMap, body: &'a [u8], decoded_max: usize) -> Self {
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

/// The decoded body, or the body as received if it cannot be decoded within the recipe's limit.
#[must_use]
pub fn plain<'a>(recipe: &Recipe, headers: &HeaderMap, body: &'a [u8]) -> Cow<'a, [u8]> {
    match Content::of(headers, body, recipe.decoded_max) {
        Content::Plain(body) | Content::Encoded(body) => Cow::Borrowed(body),
        Content::Decoded(body) => Cow::Owned(body),
    }
}

/// The canonical form of a body, and its name. `None`: it is compared byte by byte.
#[must_use]
pub fn canonical(recipe: &Recipe, parts: &Parts<'_>) -> Option<(&'static [u8], Vec<u8>)> {
    let content = Content::of(parts.headers, parts.body, recipe.decoded_max);
    canonical_body(recipe, &essence(parts.headers), parts.headers, &content)
}

/// The form that the type asks for, and its tag. `None`: the bytes count as they are.
pub(super) fn canonical_body(
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
            json::Selected::Whole => b"json",
            json::Selected::Picked => b"json-only",
        },
        Form::UrlEncoded => match form::write(body, &recipe.form, &mut text)? {
            form::Selected::Whole => b"form",
            form::Selected::Picked => b"form-only",
        },
        Form::Multipart => {
            match multipart::write(kind.as_bytes(), body, &recipe.form, &mut text)? {
                form::Selected::Whole => b"multipart",
                form::Selected::Picked => b"multipart-only",
            }
        }
        Form::Xml => {
            let kind = ParameterizedValue::parse(kind.as_bytes())?;
            match xml::write(body, &kind, &recipe.xml, &mut text)? {
                xml::Selected::Whole => b"xml",
                xml::Selected::Picked => b"xml-only",
            }
        }
        Form::Raw => return None,
    };
    Some((tag, text))
}

/// The media type without parameters, in lower case. With several header lines it has all of them, so that none is ignored.
pub(super) fn essence(headers: &HeaderMap) -> Vec<u8> {
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
