//! What a fingerprint is made of, to be shown: by the functions that make it.

use http::{HeaderMap, HeaderName};

use super::{Form, Parts, Recipe, essence, form, json};

impl Recipe {
    /// The headers that count, sorted by name.
    #[must_use]
    pub fn headers(&self) -> &[HeaderName] {
        &self.headers
    }
}

/// The canonical form of a body, and its name. `None`: the bytes count as they are; see [`bytes`].
#[must_use]
pub fn canonical(recipe: &Recipe, parts: &Parts<'_>) -> Option<(&'static str, Vec<u8>)> {
    let mut out = Vec::new();
    match Form::of(&essence(parts.headers), parts.headers) {
        Form::Json => {
            json::Tree::parse(parts.body)?.write(&recipe.ignore_json, &mut out);
            let mut text = Vec::with_capacity(out.len());
            let mut rest = out.as_slice();
            // Nothing at all is left where the root is ignored.
            let whole = rest.is_empty() || json_text(&mut rest, &mut text).is_some();
            Some(("json", if whole { text } else { out }))
        }
        Form::UrlEncoded => {
            form::write(parts.body, &recipe.ignore_form, &mut out).then_some(("form", out))
        }
        Form::Raw => None,
    }
}

/// The bytes of a body that has no canonical form: decoded, where it can be.
#[must_use]
pub fn bytes(recipe: &Recipe, parts: &Parts<'_>) -> Vec<u8> {
    let _ = recipe;
    parts.body.to_vec()
}

/// The canonical form of a query: pairs, each half with its length. `None`: it counts as it came.
#[must_use]
pub fn query(recipe: &Recipe, query: &str) -> Option<Vec<u8>> {
    let mut pairs = Vec::new();
    form::write(query.as_bytes(), &recipe.ignore_query, &mut pairs).then_some(pairs)
}

/// The media type as it counts.
#[must_use]
pub fn content_type(headers: &HeaderMap) -> String {
    String::from_utf8_lossy(&essence(headers)).into_owned()
}

/// The canonical form of a document as JSON text: without blanks, members sorted.
fn json_text(form: &mut &[u8], out: &mut Vec<u8>) -> Option<()> {
    let (tag, rest) = form.split_first()?;
    *form = rest;
    match tag {
        b'z' => out.extend_from_slice(b"null"),
        b't' => out.extend_from_slice(b"true"),
        b'f' => out.extend_from_slice(b"false"),
        b'+' | b'-' => {
            let digits = piece(form)?;
            let (exponent, rest) = form.split_first_chunk::<8>()?;
            *form = rest;
            if *tag == b'-' {
                out.push(b'-');
            }
            out.extend_from_slice(if digits.is_empty() { b"0" } else { digits });
            match i64::from_be_bytes(*exponent) {
                0 => {}
                exponent => out.extend_from_slice(format!("e{exponent}").as_bytes()),
            }
        }
        b's' => string(piece(form)?, out),
        b'a' => {
            let count = length(form)?;
            out.push(b'[');
            for index in 0..count {
                comma(index, out);
                json_text(form, out)?;
            }
            out.push(b']');
        }
        b'o' => {
            let count = length(form)?;
            out.push(b'{');
            for index in 0..count {
                comma(index, out);
                string(piece(form)?, out);
                out.push(b':');
                json_text(form, out)?;
            }
            out.push(b'}');
        }
        _ => return None,
    }
    Some(())
}

fn comma(index: usize, out: &mut Vec<u8>) {
    if index > 0 {
        out.push(b',');
    }
}

fn string(text: &[u8], out: &mut Vec<u8>) {
    let text = serde_json::Value::from(String::from_utf8_lossy(text)).to_string();
    out.extend_from_slice(text.as_bytes());
}

fn piece<'f>(form: &mut &'f [u8]) -> Option<&'f [u8]> {
    let length = length(form)?;
    let (piece, rest) = form.split_at_checked(length)?;
    *form = rest;
    Some(piece)
}

fn length(form: &mut &[u8]) -> Option<usize> {
    let (mut length, mut shift) = (0_usize, 0_u32);
    loop {
        let (byte, rest) = form.split_first()?;
        *form = rest;
        length |= usize::from(byte & 0x7f).checked_shl(shift)?;
        if byte & 0x80 == 0 {
            return Some(length);
        }
        shift += 7;
    }
}
