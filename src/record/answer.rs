//! An answer as it is kept, and the form in which its headers are stored.

use std::sync::Arc;

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};

/// A response's body as far as it is kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeptBody {
    /// All of its bytes.
    Whole(Bytes),
    /// It was larger than the route keeps, or a stream: the execution is remembered, the body is not.
    NotRetained,
}

/// A response as kept for replay: end-to-end headers only, in their order among equal names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Answer {
    /// The upstream's status.
    pub status: StatusCode,
    /// The headers that are kept.
    pub headers: HeaderMap,
    /// How their names were spelled.
    pub spelling: Spelling,
    /// The body, byte for byte.
    pub body: KeptBody,
}

/// How the names of headers were spelled by their sender, line by line in the order of the map; HTTP/1.1 callers that read
/// names by their letters get them so again. Empty where all of them are lower-case.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Spelling(Option<Arc<str>>);

impl Spelling {
    /// The spelling of these headers, out of the names of all lines that were sent, in their order.
    #[must_use]
    pub fn of<'n>(headers: &HeaderMap, sent: impl IntoIterator<Item = &'n str>) -> Self {
        let mut sent: Vec<&str> = sent.into_iter().collect();
        let mut lines = String::with_capacity(sent.iter().map(|name| name.len() + 1).sum());
        for (name, _) in headers {
            let own = sent.iter().position(|sent| sent.eq_ignore_ascii_case(name.as_str()));
            lines.push_str(own.map_or(name.as_str(), |at| sent.remove(at)));
            lines.push('\n');
        }
        let spelled = lines.bytes().any(|byte| byte.is_ascii_uppercase());
        Self(spelled.then(|| lines.into()))
    }

    /// Whether all names are lower-case.
    #[must_use]
    pub fn is_plain(&self) -> bool {
        self.0.is_none()
    }

    /// Headers with their names as they were spelled, in the order of the map.
    fn spelled<'h>(
        &'h self,
        headers: &'h HeaderMap,
    ) -> impl Iterator<Item = (&'h str, &'h HeaderValue)> {
        let mut own = self.0.iter().flat_map(|lines| lines.lines());
        headers.iter().map(move |(name, value)| {
            let own = own.next().filter(|own| own.eq_ignore_ascii_case(name.as_str()));
            (own.unwrap_or(name.as_str()), value)
        })
    }
}

/// The column `response_headers` holds something that is not a header block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the stored response headers are not a header block")]
pub struct NotHeaders;

/// Headers as the column `response_headers` holds them: `Name: value` lines ended by CRLF, values as raw bytes.
#[must_use]
pub fn encode_headers(headers: &HeaderMap, spelling: &Spelling) -> Vec<u8> {
    let mut block = Vec::with_capacity(encoded_length(headers));
    append_headers(&mut block, headers, spelling);
    block
}

/// How long the block of these headers is.
#[must_use]
pub fn encoded_length(headers: &HeaderMap) -> usize {
    headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum()
}

/// As [`encode_headers`], behind what is there.
pub fn append_headers(block: &mut Vec<u8>, headers: &HeaderMap, spelling: &Spelling) {
    for (name, value) in spelling.spelled(headers) {
        block.extend_from_slice(name.as_bytes());
        block.extend_from_slice(b": ");
        block.extend_from_slice(value.as_bytes());
        block.extend_from_slice(b"\r\n");
    }
}

/// The inverse of [`encode_headers`].
///
/// # Errors
/// [`NotHeaders`] where a line has no colon, or a name or value that no header can have.
pub fn decode_headers(block: &[u8]) -> Result<(HeaderMap, Spelling), NotHeaders> {
    let mut headers = HeaderMap::new();
    let mut names = Vec::new();
    for line in block.split(|b| *b == b'\n').filter(|line| !line.is_empty()) {
        let line = line.strip_suffix(b"\r").ok_or(NotHeaders)?;
        let colon = line.iter().position(|b| *b == b':').ok_or(NotHeaders)?;
        let (name, value) = line.split_at(colon);
        names.push(std::str::from_utf8(name).map_err(|_| NotHeaders)?);
        let name = HeaderName::from_bytes(name).map_err(|_| NotHeaders)?;
        let value = value.strip_prefix(b": ").ok_or(NotHeaders)?;
        headers.append(name, HeaderValue::from_bytes(value).map_err(|_| NotHeaders)?);
    }
    let spelling = Spelling::of(&headers, names);
    Ok((headers, spelling))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_blocks_round_trip_with_order_repetition_and_raw_bytes() {
        let mut headers = HeaderMap::new();
        headers.append(
            "set-cookie",
            HeaderValue::from_static("a=1; Expires=Wed, 01 Jan 2031 00:00:00 GMT"),
        );
        headers.append("x-empty", HeaderValue::from_static(""));
        headers.append("set-cookie", HeaderValue::from_static("b=2"));
        headers.append("x-raw", HeaderValue::from_bytes(b"caf\xe9: x").unwrap());
        let plain = Spelling::default();
        assert_eq!(decode_headers(&encode_headers(&headers, &plain)).unwrap(), (headers, plain));
    }

    #[test]
    fn header_blocks_round_trip_with_the_spelling_of_each_line() {
        let sent = ["X-A", "ETag", "Set-Cookie", "x-a", "X-a", "x-plain"];
        let mut headers = HeaderMap::new();
        for (name, value) in [
            ("etag", "1"),
            ("x-a", "1"),
            ("set-cookie", "1"),
            ("x-a", "2"),
            ("x-plain", "1"),
            ("x-a", "3"),
        ] {
            headers.append(name, HeaderValue::from_static(value));
        }
        headers.remove("set-cookie");
        let spelling = Spelling::of(&headers, sent);
        let block = encode_headers(&headers, &spelling);
        let text = String::from_utf8(block.clone()).unwrap();
        for line in ["ETag: 1\r\n", "X-A: 1\r\n", "x-a: 2\r\n", "X-a: 3\r\n", "x-plain: 1\r\n"] {
            assert!(text.contains(line), "{text}");
        }
        assert_eq!(decode_headers(&block).unwrap(), (headers.clone(), spelling));
        assert!(Spelling::of(&headers, []).is_plain());
    }
}
