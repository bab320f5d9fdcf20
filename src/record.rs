//! What is remembered of a request: its scope, its fingerprint, who works on it and how it ended.
//!
//! A record lives in the store under its scope `(tenant, operation, key)`. Everything that changes it
//! names its [`Fence`], so that a late or woken process changes nothing that is no longer its own.
//!
//! ```text
//!                    released (attempt 1): the row is gone
//!                  ^
//!   reserved ->  in_progress --completed--> completed --expired, or released by an operator--> gone
//!                  |     ^  \                  ^
//!                  | lost|   released          | late outcome of the same attempt,
//!                  v     |   (attempt > 1)     | or an operator's completion
//!                unknown <--/ -----------------+
//!                  |  retried: attempt + 1, back to in_progress; asked about: the same attempt, for the time of the look-up
//!                  +--released by an operator--> gone
//! ```
//!
//! This module and its children are pure: no clock, no runtime, no SQL and no log.

pub mod event;
mod lease;
pub mod lookup;
pub mod outcome;

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode};
use uuid::Uuid;

pub use self::lease::{Lease, LeaseView};

/// Longest key, in characters (all ASCII, so bytes too).
pub const KEY_MAX: usize = 255;
/// Longest tenant, in bytes of UTF-8.
pub const TENANT_MAX: usize = 255;

/// The id of a record, made by the gateway that reserves it. A row that is taken over after expiry gets a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RecordId(Uuid);

impl RecordId {
    /// A new id. Version 7, only so that neighbours in time are neighbours in the index; nothing reads the time in it. Its
    /// random part is the system's: whoever may call the functions of a shared database must not be able to guess it.
    #[must_use]
    pub fn fresh() -> Self {
        Self(Uuid::now_v7())
    }
}

/// A random id that a process takes at its start, and anew whenever its lease has run out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OwnerId(Uuid);

impl OwnerId {
    /// A new random owner.
    #[must_use]
    pub fn fresh() -> Self {
        Self(Uuid::new_v4())
    }
}

macro_rules! uuid_newtype {
    ($name:ident) => {
        impl From<Uuid> for $name {
            fn from(id: Uuid) -> Self {
                Self(id)
            }
        }
        impl From<$name> for Uuid {
            fn from(id: $name) -> Self {
                id.0
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }
        impl std::str::FromStr for $name {
            type Err = uuid::Error;
            fn from_str(text: &str) -> Result<Self, uuid::Error> {
                text.parse().map(Self)
            }
        }
    };
}
uuid_newtype!(RecordId);
uuid_newtype!(OwnerId);

/// Which execution of a record: counts from 1 within one id and never goes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Attempt(u32);

impl Attempt {
    /// The attempt that makes the record.
    pub const FIRST: Self = Self(1);

    /// The attempt after this one.
    #[must_use]
    pub fn next(self) -> Self {
        Self(self.0.saturating_add(1))
    }

    /// The number as stored.
    #[must_use]
    pub fn number(self) -> u32 {
        self.0
    }

    /// From the number as stored.
    #[must_use]
    pub fn from_number(number: u32) -> Self {
        Self(number)
    }
}

/// What every change of a record must name: an id and an attempt that are still the current ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Fence {
    /// The record.
    pub id: RecordId,
    /// The attempt within it.
    pub attempt: Attempt,
}

macro_rules! text_newtype {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub struct $name(Arc<str>);

        impl $name {
            /// The text.
            #[must_use]
            pub fn as_str(&self) -> &str {
                &self.0
            }

            /// From a store's row, which holds only what was checked before it was written.
            #[must_use]
            pub fn stored(text: &str) -> Self {
                Self(text.into())
            }
        }
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }
    };
}
text_newtype!(
    /// Whose key it is: 1 to 255 bytes of visible UTF-8.
    Tenant
);
text_newtype!(
    /// The route's operation name, or `METHOD path-template`.
    Operation
);
text_newtype!(
    /// The idempotency key: 1 to 255 characters of visible ASCII and space.
    Key
);

text_newtype!(
    /// Who asked: the verified subject, or a keyed digest of the credential.
    Caller
);

impl Tenant {
    /// Checks a tenant that comes from outside. `None`: empty, longer than 255 bytes, or with characters that cannot be seen.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let visible = |c: char| !c.is_control() && (!c.is_whitespace() || c == ' ');
        let fits = (1..=TENANT_MAX).contains(&text.len());
        let blank = text.trim().is_empty();
        (fits && !blank && text.chars().all(visible)).then(|| Self(text.into()))
    }
}

impl Operation {
    /// Checks an operation name of the configuration, by the same rule as a tenant.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Tenant::parse(text).map(|checked| Self(checked.0))
    }
}

impl Key {
    /// Checks a key that comes from outside. `None`: empty or blank, longer than 255 characters, or other than visible
    /// ASCII and space.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let visible = |b: u8| b == b' ' || b.is_ascii_graphic();
        let fits = (1..=KEY_MAX).contains(&text.len());
        let blank = text.trim().is_empty();
        (fits && !blank && text.bytes().all(visible)).then(|| Self(text.into()))
    }
}

/// Where a record is looked up, replayed, listed and swept: never by the key alone.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Scope {
    /// Whose key.
    pub tenant: Tenant,
    /// For which operation.
    pub operation: Operation,
    /// The key itself.
    pub key: Key,
}

/// A SHA-256.
pub type Digest = [u8; 32];

/// Names the way in which a canonical hash was made: format version and the route's settings.
pub type RecipeId = [u8; 8];

/// Bytes in lower-case hexadecimal digits.
#[must_use]
pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// What makes two requests the same request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// Hash of the canonical request, by the recipe.
    pub canonical: Digest,
    /// Hash of the request as received: decides where the recipes differ.
    pub raw: Digest,
    /// Which recipe made `canonical`.
    pub recipe: RecipeId,
}

impl Fingerprint {
    /// Whether both are the same request. Under one recipe the canonical hash decides; across a change of recipe the raw hash.
    #[must_use]
    pub fn same_request(&self, other: &Self) -> bool {
        if self.recipe == other.recipe {
            self.canonical == other.canonical
        } else {
            self.raw == other.raw
        }
    }
}

/// The column `status`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Status {
    /// Reserved by an owner that has not settled it yet.
    InProgress,
    /// Executed, or not: nobody knows.
    Unknown,
    /// Executed; the answer is kept until it expires.
    Completed,
}

impl Status {
    /// All of them, for lists and filters.
    pub const ALL: [Self; 3] = [Self::InProgress, Self::Unknown, Self::Completed];

    /// The value of the column.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::InProgress => "in_progress",
            Self::Unknown => "unknown",
            Self::Completed => "completed",
        }
    }

    /// From the value of the column.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|status| status.as_str() == text)
    }
}

/// How long the upstream is left alone before it is asked what became of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LookupDelay {
    /// Counted from the moment in which the outcome was lost.
    pub after_loss: Duration,
    /// Counted from the end of a dead owner's lease, until which it may have been sending.
    pub after_lease: Duration,
}

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

/// A completed record's answer with the end of its retention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Completed {
    /// What is replayed.
    pub answer: Answer,
    /// When the retention ends, by the database's clock; told to callers.
    pub expires_at: SystemTime,
    /// What was left of the retention when the row was read, by the database's clock; zero: it has expired.
    pub time_left: Duration,
}

/// How a record stands, as the gateway reads it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// Somebody works on it.
    InProgress {
        /// Who.
        owner: OwnerId,
        /// Whether the owner's lease had not run out when the row was read, by the database's clock.
        owner_lives: bool,
    },
    /// Nobody knows what the attempt did.
    Unknown,
    /// It ended.
    Completed(Box<Completed>),
}

/// A record as the gateway reads it when it meets a duplicate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Its id and current attempt.
    pub fence: Fence,
    /// The request that made it.
    pub fingerprint: Fingerprint,
    /// Who asked for its current attempt.
    pub caller: Option<Caller>,
    /// How it stands.
    pub state: State,
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

    #[test]
    fn keys_and_tenants_are_visible_text_of_bounded_length() {
        for (text, key, tenant) in [
            ("k", true, true),
            ("a b", true, true),
            (" ", false, false),
            ("", false, false),
            ("é", false, true),
            ("a\tb", false, false),
            ("a\u{0}b", false, false),
            ("a\u{2028}b", false, false),
        ] {
            assert_eq!(Key::parse(text).is_some(), key, "{text:?}");
            assert_eq!(Tenant::parse(text).is_some(), tenant, "{text:?}");
        }
        assert!(Key::parse(&"x".repeat(255)).is_some());
        assert!(Key::parse(&"x".repeat(256)).is_none());
    }
}
