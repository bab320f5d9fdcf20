//! Header values with parameters, `value; name=text; name="text"`: of the request's Content-Type, and within multipart.
//!
//! Case of names, quotes, blanks and the order of different names do not count. The text between quotes counts with its
//! backslashes, because parsers differ on them: some clients send Windows paths unescaped. A value that does not have this
//! form, or has a parameter twice, is not read.

/// A value and its parameters.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ParameterizedValue<'a> {
    /// The text before the first `;`, without blanks around it.
    pub(crate) value: &'a [u8],
    /// Sorted by their names, which are in lower case.
    pub(crate) parameters: Vec<(Vec<u8>, &'a [u8])>,
}

impl<'a> ParameterizedValue<'a> {
    /// Reads a header's value.
    pub(crate) fn parse(text: &'a [u8]) -> Option<Self> {
        let end = text.iter().position(|b| *b == b';').unwrap_or(text.len());
        let (value, mut rest) = text.split_at_checked(end)?;
        if value.iter().any(|b| *b == b'"' || b.is_ascii_control() && *b != b'\t') {
            return None;
        }
        let mut parameters = Vec::new();
        while let [b';', after @ ..] = rest {
            rest = trim_start(after);
            if matches!(rest, [] | [b';', ..]) {
                continue;
            }
            let (parameter, after) = parameter(rest)?;
            parameters.push(parameter);
            rest = trim_start(after);
        }
        parameters.sort_by(|(a, _), (b, _)| a.cmp(b));
        let distinct = parameters.is_sorted_by(|(a, _), (b, _)| a < b);
        (rest.is_empty() && distinct).then_some(Self { value: trim(value), parameters })
    }

    /// Whether a parameter is given in pieces or in another encoding (RFC 2231: `name*`, `name*0`), which only some parsers
    /// read.
    pub(crate) fn is_continued(&self, name: &str) -> bool {
        let continues = |known: &[u8]| known.strip_prefix(name.as_bytes())?.first().copied();
        self.parameters.iter().any(|(known, _)| continues(known) == Some(b'*'))
    }

    /// The parameter of this name.
    pub(crate) fn get(&self, name: &str) -> Option<&'a [u8]> {
        let found = self.parameters.iter().find(|(known, _)| known == name.as_bytes());
        found.map(|(_, text)| *text)
    }
}

type Parameter<'a> = (Vec<u8>, &'a [u8]);

/// The parameter that the text begins with, and what follows it.
fn parameter(text: &[u8]) -> Option<(Parameter<'_>, &[u8])> {
    let equals = text.iter().position(|b| *b == b'=')?;
    let (name, rest) = text.split_at_checked(equals)?;
    if name.is_empty() || !name.iter().all(|b| is_token(*b)) {
        return None;
    }
    let name = name.to_ascii_lowercase();
    let rest = rest.get(1..)?;
    if let [b'"', quoted @ ..] = rest {
        let end = closing_quote(quoted)?;
        return Some(((name, quoted.get(..end)?), quoted.get(end + 1..)?));
    }
    // Bytes beyond ASCII: file names are sent so.
    let end = rest.iter().position(|b| !is_token(*b) && b.is_ascii()).unwrap_or(rest.len());
    let (text, rest) = rest.split_at_checked(end)?;
    (!text.is_empty()).then_some(((name, text), rest))
}

fn closing_quote(text: &[u8]) -> Option<usize> {
    let mut escaped = false;
    for (at, byte) in text.iter().enumerate() {
        match byte {
            _ if escaped => escaped = false,
            b'\\' => escaped = true,
            b'"' => return Some(at),
            b'\t' => {}
            byte if byte.is_ascii_control() => return None,
            _ => {}
        }
    }
    None
}

/// Removes the blanks of HTTP and mail around a text, and no others.
pub(crate) fn trim(text: &[u8]) -> &[u8] {
    let text = trim_start(text);
    let kept = text.iter().rposition(|b| !is_blank(*b)).map_or(0, |last| last + 1);
    text.get(..kept).unwrap_or_default()
}

fn trim_start(text: &[u8]) -> &[u8] {
    let blanks = text.iter().take_while(|b| is_blank(**b)).count();
    text.get(blanks..).unwrap_or_default()
}

fn is_blank(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

/// A `tchar` of RFC 9110, section 5.6.2.
pub(crate) fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spelling_does_not_matter_and_text_does() {
        let read = |text: &'static str| ParameterizedValue::parse(text.as_bytes());
        let plain = read("form-data; name=a; filename=b.txt");
        assert!(plain.is_some());
        for same in [
            "form-data;name=\"a\";filename=\"b.txt\"",
            " form-data ; Name=a ;\tFILENAME=b.txt ; ",
            "form-data; filename=b.txt; name=a;;",
        ] {
            assert_eq!(plain, read(same), "{same}");
        }
        for other in [
            "form-data; name=A; filename=b.txt",
            "form-data; name=\"a \"; filename=b.txt",
            "form-data",
        ] {
            assert_ne!(plain, read(other), "{other}");
        }
        assert_ne!(read(r#"a; b="c\d""#), read(r#"a; b="cd""#));
        assert_ne!(read(r#"a; b="c\"d""#), read(r#"a; b="c"; d="""#));
        assert_eq!(read("a; b=\"\u{e9}\""), read("a; b=\u{e9}"));
        for wrong in [
            "a; b",
            "a; b=",
            "a; =c",
            "a; b=\"c",
            "a; b=c d",
            "a; b=\"c\"d",
            "a; b=c; B=d",
            "a; b =c",
            "a; b=\"c\\\"",
            "a\"b",
            "a; b=\"\n\"",
            "a; \u{c}b=c",
            "a; b=c\u{c}",
        ] {
            assert_eq!(read(wrong), None, "{wrong}");
        }
    }
}
