//! The value of a key's header: bare, or a quoted string of RFC 9651. Both spellings are one key.

use super::DERIVED;
use crate::record::{KEY_MAX, Key};

/// Reads a key. The error's text follows "the idempotency key".
pub(super) fn parse_key(line: &[u8]) -> Result<Key, &'static str> {
    const ODD: &str = "holds characters other than visible ASCII and space";
    let line = line.trim_ascii();
    if !line.iter().all(|b| *b == b' ' || b.is_ascii_graphic()) {
        return Err(ODD);
    }
    let line = std::str::from_utf8(line).map_err(|_| ODD)?;
    let text = if line.starts_with('"') { unquote(line)? } else { bare(line)?.to_owned() };
    if text.trim().is_empty() {
        return Err("is empty");
    }
    if text.len() > KEY_MAX {
        return Err("is longer than 255 characters");
    }
    if text.starts_with(DERIVED) {
        return Err("begins with \"derived:\", which is reserved");
    }
    Key::parse(&text).ok_or(ODD)
}

fn bare(line: &str) -> Result<&str, &'static str> {
    if line.contains(',') {
        return Err("holds a comma, which only a quoted key may");
    }
    let base64 = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'+' | b'/' | b'=');
    match line.strip_prefix(':').and_then(|rest| rest.strip_suffix(':')) {
        Some(inner) if inner.bytes().all(base64) => Err("is a byte sequence, not a string"),
        Some(_) | None => Ok(line),
    }
}

/// Reads a string of RFC 9651: quoted, with a backslash only before a quote or a backslash.
fn unquote(line: &str) -> Result<String, &'static str> {
    let mut text = String::with_capacity(line.len());
    let mut letters = line.chars().skip(1);
    loop {
        match letters.next() {
            Some('"') => break,
            Some('\\') => match letters.next() {
                Some(escaped @ ('"' | '\\')) => text.push(escaped),
                Some(_) | None => return Err("holds a bad escape"),
            },
            Some(letter) => text.push(letter),
            None => return Err("has an opening quote and no closing one"),
        }
    }
    match letters.find(|letter| *letter != ' ') {
        None => Ok(text),
        Some(';') => Err("carries parameters, which mean nothing here"),
        Some(',') => Err("is a list"),
        Some(_) => Err("goes on after its closing quote"),
    }
}
