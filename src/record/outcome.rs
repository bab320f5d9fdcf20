//! From the evidence of a forward to what it means: the table of outcome classes, pure.
//!
//! The rule behind every row: only what is *known* not to have executed frees the key; only a complete answer is
//! kept; everything else is unknown.

use http::header::RETRY_AFTER;
use http::{HeaderMap, StatusCode};

/// Which statuses of the upstream mean something other than "this is the result".
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lists {
    /// The upstream did not execute: the key is free again.
    pub release_on: Vec<Code>,
    /// The upstream may or may not have executed.
    pub unknown_on: Vec<Code>,
}

/// A status in a list, with its condition where it has one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Code {
    /// Whenever it comes.
    Always(StatusCode),
    /// Only with a `Retry-After` header: the upstream asks to come again.
    WithRetryAfter(StatusCode),
    /// Only without one.
    WithoutRetryAfter(StatusCode),
}

impl Code {
    fn fits(self, status: StatusCode, retry_after: bool) -> bool {
        match self {
            Self::Always(code) => code == status,
            Self::WithRetryAfter(code) => code == status && retry_after,
            Self::WithoutRetryAfter(code) => code == status && !retry_after,
        }
    }
}

impl Default for Lists {
    fn default() -> Self {
        let always = |codes: &[u16]| {
            codes
                .iter()
                .filter_map(|code| StatusCode::from_u16(*code).ok())
                .map(Code::Always)
                .collect::<Vec<_>>()
        };
        let mut release_on = always(&[401, 403, 407, 408, 421, 425, 429]);
        release_on.push(Code::WithRetryAfter(StatusCode::SERVICE_UNAVAILABLE));
        let mut unknown_on = always(&[502, 504]);
        unknown_on.push(Code::WithoutRetryAfter(StatusCode::SERVICE_UNAVAILABLE));
        Self { release_on, unknown_on }
    }
}

/// What a complete head of an answer means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// The result: kept and replayed.
    Stored,
    /// Not executed: passed on, the key is free again.
    Released,
    /// Perhaps executed: passed on, the record is unknown.
    Unknown,
}

impl Lists {
    /// The class of an answer, by its status and headers. `release_on` is asked first.
    #[must_use]
    pub fn class(&self, status: StatusCode, headers: &HeaderMap) -> Class {
        let retry_after = headers.contains_key(RETRY_AFTER);
        let listed = |list: &[Code]| list.iter().any(|code| code.fits(status, retry_after));
        if listed(&self.release_on) {
            Class::Released
        } else if listed(&self.unknown_on) {
            Class::Unknown
        } else {
            Class::Stored
        }
    }
}

/// Why no complete answer came, measured by the bytes that were written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Failure {
    /// Certainly not one byte was sent: refused, DNS, TLS handshake, reset before the first write.
    NothingSent,
    /// This process's lease was no longer certain just before the first write; not one byte was sent.
    LeaseEnded,
    /// The connection broke, or the answer was malformed or cut, after bytes were sent.
    Broken,
    /// No complete answer within the route's `timeout`, after bytes were sent.
    TimedOut,
}

impl Failure {
    /// The class of the attempt.
    #[must_use]
    pub fn class(self) -> Class {
        match self {
            Self::NothingSent | Self::LeaseEnded => Class::Released,
            Self::Broken | Self::TimedOut => Class::Unknown,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_default_lists_are_those_of_the_contract() {
        let plain = HeaderMap::new();
        let mut again = HeaderMap::new();
        again.insert(RETRY_AFTER, "5".parse().unwrap());
        let lists = Lists::default();
        let class = |code: u16, headers| lists.class(StatusCode::from_u16(code).unwrap(), headers);
        for code in [200, 201, 204, 299, 303, 304, 400, 404, 409, 422, 500, 501, 599] {
            assert_eq!(class(code, &plain), Class::Stored, "{code}");
        }
        for code in [401, 403, 407, 408, 421, 425, 429] {
            assert_eq!(class(code, &plain), Class::Released, "{code}");
        }
        for code in [502, 503, 504] {
            assert_eq!(class(code, &plain), Class::Unknown, "{code}");
        }
        assert_eq!(class(503, &again), Class::Released);
        assert_eq!(class(502, &again), Class::Unknown);
    }

    #[test]
    fn only_positive_knowledge_releases() {
        assert_eq!(Failure::NothingSent.class(), Class::Released);
        assert_eq!(Failure::LeaseEnded.class(), Class::Released);
        assert_eq!(Failure::Broken.class(), Class::Unknown);
        assert_eq!(Failure::TimedOut.class(), Class::Unknown);
    }
}
