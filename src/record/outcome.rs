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
    /// All statuses that begin with this digit, but for those that a list names by themselves.
    Hundred(u16),
}

impl Code {
    fn names(self, status: StatusCode, retry_after: bool) -> bool {
        match self {
            Self::Always(code) => code == status,
            Self::WithRetryAfter(code) => code == status && retry_after,
            Self::WithoutRetryAfter(code) => code == status && !retry_after,
            Self::Hundred(_) => false,
        }
    }

    fn covers(self, status: StatusCode) -> bool {
        match self {
            Self::Hundred(digit) => status.as_u16() / 100 == digit,
            Self::Always(_) | Self::WithRetryAfter(_) | Self::WithoutRetryAfter(_) => false,
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
    /// The class of an answer, by its status and headers. A status that is named by itself counts before one that is
    /// named by its first digit, and `release_on` before `unknown_on`.
    #[must_use]
    pub fn class(&self, status: StatusCode, headers: &HeaderMap) -> Class {
        let retry_after = headers.contains_key(RETRY_AFTER);
        let named = |list: &[Code]| list.iter().any(|code| code.names(status, retry_after));
        let covered = |list: &[Code]| list.iter().any(|code| code.covers(status));
        if named(&self.release_on) {
            Class::Released
        } else if named(&self.unknown_on) {
            Class::Unknown
        } else if covered(&self.release_on) {
            Class::Released
        } else if covered(&self.unknown_on) {
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
    fn a_status_by_itself_counts_before_its_first_digit() {
        let code = |code| StatusCode::from_u16(code).unwrap();
        let lists = Lists {
            release_on: vec![Code::Hundred(4), Code::WithRetryAfter(code(503))],
            unknown_on: vec![Code::Hundred(5), Code::Always(code(409))],
        };
        let mut again = HeaderMap::new();
        again.insert(RETRY_AFTER, "5".parse().unwrap());
        for (status, headers, class) in [
            (400, HeaderMap::new(), Class::Released),
            (499, HeaderMap::new(), Class::Released),
            (409, HeaderMap::new(), Class::Unknown),
            (500, HeaderMap::new(), Class::Unknown),
            (503, HeaderMap::new(), Class::Unknown),
            (503, again, Class::Released),
            (201, HeaderMap::new(), Class::Stored),
        ] {
            assert_eq!(lists.class(code(status), &headers), class, "{status}");
        }
    }

    #[test]
    fn only_positive_knowledge_releases() {
        assert_eq!(Failure::NothingSent.class(), Class::Released);
        assert_eq!(Failure::LeaseEnded.class(), Class::Released);
        assert_eq!(Failure::Broken.class(), Class::Unknown);
        assert_eq!(Failure::TimedOut.class(), Class::Unknown);
    }
}
