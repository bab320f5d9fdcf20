//! From the bytes of an XML body to UTF-8 text: byte order mark, declaration, charset.
//!
//! A byte order mark decides, and then the charset of Content-Type and the declaration, which must agree if it matters.
//! Without all of these the text is UTF-8. Supported are UTF-8, UTF-16 with its mark, and ISO-8859-1 and Windows-1252 for
//! the bytes that both read alike. A text of ASCII alone is the same in all known encodings. Other encodings and
//! contradictions are not read.

use std::borrow::Cow;

/// An encoding, as far as it matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Encoding {
    Utf8,
    Utf16,
    /// ISO-8859-1 or Windows-1252.
    Western,
    /// A superset of ASCII.
    Ascii,
}

impl Encoding {
    fn named(label: &[u8]) -> Option<Self> {
        let label = label.to_ascii_lowercase();
        match label.as_slice() {
            b"utf-8" | b"utf8" => Some(Self::Utf8),
            b"utf-16" => Some(Self::Utf16),
            b"iso-8859-1" | b"latin1" | b"windows-1252" => Some(Self::Western),
            b"us-ascii" | b"ascii" => Some(Self::Ascii),
            other if other.starts_with(b"iso-8859-") => Some(Self::Ascii),
            other if other.starts_with(b"windows-125") => Some(Self::Ascii),
            _ => None,
        }
    }
}

/// The text of a body after its declaration. `None`: its encoding is not certain.
pub(super) fn decode<'a>(body: &'a [u8], charset: Option<&[u8]>) -> Option<Cow<'a, str>> {
    let (body, mark) = unmarked(body)?;
    let (declared, start) = declaration(&body)?;
    let labels = [charset, declared].into_iter().flatten();
    let named = labels.map(Encoding::named).collect::<Option<Vec<_>>>()?;
    let encoding = match mark {
        Some(mark) => named.iter().all(|named| *named == mark).then_some(Encoding::Utf8)?,
        None if named.contains(&Encoding::Utf16) => return None,
        None if body.is_ascii() => Encoding::Utf8,
        None => {
            let first = named.first().copied().unwrap_or(Encoding::Utf8);
            named.iter().all(|named| *named == first).then_some(first)?
        }
    };
    match encoding {
        Encoding::Utf8 => match body {
            Cow::Borrowed(body) => Some(std::str::from_utf8(body.get(start..)?).ok()?.into()),
            Cow::Owned(body) => {
                Some(std::str::from_utf8(body.get(start..)?).ok()?.to_owned().into())
            }
        },
        Encoding::Western => western(body.get(start..)?).map(Cow::Owned),
        Encoding::Utf16 | Encoding::Ascii => None,
    }
}

/// The body without its mark; UTF-16 is converted to UTF-8.
fn unmarked(body: &[u8]) -> Option<(Cow<'_, [u8]>, Option<Encoding>)> {
    let wide = |units: &[u8], read: fn([u8; 2]) -> u16| {
        let (pairs, []) = units.as_chunks::<2>() else { return None };
        let text = char::decode_utf16(pairs.iter().map(|pair| read(*pair)));
        let text = text.collect::<Result<String, _>>().ok()?;
        Some((Cow::Owned(text.into_bytes()), Some(Encoding::Utf16)))
    };
    match body {
        [0xef, 0xbb, 0xbf, text @ ..] => Some((text.into(), Some(Encoding::Utf8))),
        [0xfe, 0xff, units @ ..] => wide(units, u16::from_be_bytes),
        [0xff, 0xfe, units @ ..] => wide(units, u16::from_le_bytes),
        text => Some((text.into(), None)),
    }
}

/// The bytes that both encodings read alike: all but 0x80 to 0x9f.
fn western(bytes: &[u8]) -> Option<String> {
    let alike = bytes.iter().all(|b| !(0x80..0xa0).contains(b));
    alike.then(|| bytes.iter().map(|b| char::from(*b)).collect())
}

/// The encoding of the XML declaration, and the end of the declaration; 0 without one.
fn declaration(text: &[u8]) -> Option<(Option<&[u8]>, usize)> {
    let Some(rest) = text.strip_prefix(b"<?xml") else { return Some((None, 0)) };
    if !matches!(rest, [b' ' | b'\t' | b'\n' | b'\r', ..]) {
        // Another processing instruction, or a text that is not well-formed. The reader finds that out.
        return Some((None, 0));
    }
    let (version, mut rest) = pseudo_attribute(rest, b"version")?;
    // XML 1.1 has other line ends and characters.
    if version != b"1.0" {
        return None;
    }
    let mut declared = None;
    if let Some((label, after)) = pseudo_attribute(rest, b"encoding") {
        declared = Some(label);
        rest = after;
    }
    if let Some((standalone, after)) = pseudo_attribute(rest, b"standalone") {
        if !matches!(standalone, b"yes" | b"no") {
            return None;
        }
        rest = after;
    }
    let rest = rest.trim_ascii_start().strip_prefix(b"?>")?;
    let end = text.len() - rest.len();
    // A form feed is white space in ASCII and not in XML.
    (!text.get(..end)?.contains(&0x0c)).then_some((declared, end))
}

/// Blanks, the name, `=` and a quoted value, and what follows.
fn pseudo_attribute<'a>(text: &'a [u8], name: &[u8]) -> Option<(&'a [u8], &'a [u8])> {
    let spaced = text.trim_ascii_start();
    let rest = spaced.strip_prefix(name).filter(|_| spaced.len() < text.len())?;
    let rest = rest.trim_ascii_start().strip_prefix(b"=")?.trim_ascii_start();
    let (quote, rest) = rest.split_first().filter(|(quote, _)| matches!(quote, b'"' | b'\''))?;
    let end = rest.iter().position(|b| b == quote)?;
    let (value, rest) = rest.split_at_checked(end)?;
    Some((value, rest.get(1..)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &[u8], charset: Option<&str>) -> Option<String> {
        decode(body, charset.map(str::as_bytes)).map(Cow::into_owned)
    }

    fn utf16(text: &str, bytes: fn(u16) -> [u8; 2]) -> Vec<u8> {
        "\u{feff}".encode_utf16().chain(text.encode_utf16()).flat_map(bytes).collect()
    }

    #[test]
    fn one_text_in_several_encodings_is_one_text() {
        let text = "<a>\u{e9}</a>";
        let same = Some(text.to_owned());
        assert_eq!(read(text.as_bytes(), None), same);
        assert_eq!(read(text.as_bytes(), Some("UTF-8")), same);
        assert_eq!(read(format!("\u{feff}{text}").as_bytes(), None), same);
        assert_eq!(read(&utf16(text, u16::to_be_bytes), None), same);
        let declared =
            format!("<?xml version='1.0'\tencoding = 'UTF-16' standalone='yes' ?>{text}");
        assert_eq!(read(&utf16(&declared, u16::to_le_bytes), Some("utf-16")), same);
        let western = b"<?xml version=\"1.0\" encoding=\"ISO-8859-1\"?><a>\xe9</a>";
        assert_eq!(read(western, None), same);
        assert_eq!(read(b"<a>\xe9</a>", Some("windows-1252")), same);
    }

    #[test]
    fn what_readers_may_decode_differently_is_not_read() {
        let declared = |label: &str, text: &[u8]| {
            let mut body = format!("<?xml version=\"1.0\" encoding=\"{label}\"?>").into_bytes();
            body.extend_from_slice(text);
            body
        };
        let wide = "\u{feff}<a/>".encode_utf16().flat_map(u16::to_be_bytes).collect::<Vec<_>>();
        for (body, charset) in [
            (declared("iso-8859-1", b"<a>\x80</a>"), None),
            (declared("iso-8859-1", "<a>\u{e9}</a>".as_bytes()), Some("utf-8")),
            (declared("iso-8859-2", b"<a>\xe9</a>"), None),
            (declared("utf-8", b"<a>\xe9</a>"), None),
            (declared("utf-16", b"<a/>"), None),
            (declared("utf-7", b"<a/>"), None),
            (b"<?xml version=\"1.1\"?><a/>".to_vec(), None),
            (b"<?xml version=\"1.0\" encoding=\"utf-8\"><a/>".to_vec(), None),
            (b"<?xml \x0cversion=\"1.0\"?><a/>".to_vec(), None),
            (b"<?xml encoding=\"utf-8\"?><a/>".to_vec(), None),
            (b"<?xml version=\"1.0\" standalone=\"maybe\"?><a/>".to_vec(), None),
            (b"<?xml version=\"1.0\"encoding=\"utf-8\"?><a/>".to_vec(), None),
            (b"\xef\xbb\xbf<a/>".to_vec(), Some("utf-16")),
            (wide.clone(), Some("utf-8")),
            (wide.get(..wide.len() - 1).unwrap().to_vec(), None),
            (b"\xfe\xff\xd8\x00\x00<".to_vec(), None),
            (b"<a>\xe9</a>".to_vec(), None),
            (b"<a>\xe9</a>".to_vec(), Some("us-ascii")),
        ] {
            assert_eq!(
                read(&body, charset),
                None,
                "{:?} {charset:?}",
                String::from_utf8_lossy(&body)
            );
        }
        assert!(read(&declared("windows-1251", b"<a/>"), Some("us-ascii")).is_some());
    }
}
