//! An outcome as bytes: an entry's body in the spill, and how confirmed ends are remembered. Pure.
//!
//! Whole numbers are little-endian; a text, a list and bytes stand behind their count, an option behind a 0 or a 1; the fields
//! of a struct follow each other. What must stay true: what is made here is read back as it was, and nothing else is read.
//! Another order of fields is another version of the spill's format.

use std::time::Duration;

use bytes::Bytes;
use http::StatusCode;
use uuid::Uuid;

use crate::record::event::Event;
use crate::record::{
    Answer, Attempt, Fence, Fingerprint, KeptBody, Key, Operation, RecordId, Scope, Tenant,
    decode_headers, encode_headers,
};
use crate::store::{Completion, LateEnd, LateOutcome};

/// An outcome as bytes.
pub(in crate::gateway) fn encode(completion: &Completion, fingerprint: Fingerprint) -> Vec<u8> {
    let Completion { scope, fence, answer, retention, events } = completion;
    let mut out = Vec::new();
    fence.put(&mut out);
    scope.put(&mut out);
    fingerprint.put(&mut out);
    answer.put(&mut out);
    retention.put(&mut out);
    events.put(&mut out);
    out
}

/// The inverse of [`encode`]. `None`: it is not what `encode` makes.
pub(in crate::gateway) fn decode(bytes: &[u8]) -> Option<(Completion, Fingerprint)> {
    let from = &mut &*bytes;
    let (fence, scope, fingerprint) = (take(from)?, take(from)?, take(from)?);
    let (answer, retention, events) = (take(from)?, take(from)?, take(from)?);
    let completion = Completion { scope, fence, answer, retention, events };
    from.is_empty().then_some((completion, fingerprint))
}

/// That an attempt did not execute, as bytes. `gone_on`: its record had gone on already, so that this is only to be noted.
pub(super) fn encode_freed(freed: &LateOutcome, gone_on: bool) -> Vec<u8> {
    let LateOutcome { scope, fence, end } = freed;
    let mut out = Vec::new();
    fence.put(&mut out);
    scope.put(&mut out);
    gone_on.put(&mut out);
    end.put(&mut out);
    out
}

/// The inverse of [`encode_freed`]. `None`: it is not what that makes.
pub(super) fn decode_freed(bytes: &[u8]) -> Option<(LateOutcome, bool)> {
    let from = &mut &*bytes;
    let (fence, scope, gone_on, end) = (take(from)?, take(from)?, take(from)?, take(from)?);
    from.is_empty().then_some((LateOutcome { scope, fence, end }, gone_on))
}

/// What is written as bytes.
pub(super) trait Field: Sized {
    fn put(&self, out: &mut Vec<u8>);
    /// Reads it from the front, and goes on to what follows.
    fn take(from: &mut &[u8]) -> Option<Self>;
}

/// As [`Field::take`], for the type that is wanted.
pub(super) fn take<T: Field>(from: &mut &[u8]) -> Option<T> {
    T::take(from)
}

macro_rules! structs {
    ($($name:ident { $($field:ident),* })*) => { $(
        impl Field for $name {
            fn put(&self, out: &mut Vec<u8>) {
                let Self { $($field),* } = self;
                $($field.put(out);)*
            }
            fn take(from: &mut &[u8]) -> Option<Self> {
                $(let $field = take(from)?;)*
                Some(Self { $($field),* })
            }
        }
    )* };
}

structs! {
    Fence { id, attempt }
    Scope { tenant, operation, key }
    Fingerprint { canonical, raw, recipe }
    Event { id, key, kind, position, ordering_key, payload, sinks }
}

/// Types that another one stands for.
macro_rules! written_as {
    ($($name:ty as $other:ty: $to:expr, $back:expr;)*) => { $(
        impl Field for $name {
            fn put(&self, out: &mut Vec<u8>) {
                let to: fn(&Self) -> $other = $to;
                to(self).put(out);
            }
            fn take(from: &mut &[u8]) -> Option<Self> {
                let back: fn($other) -> Option<Self> = $back;
                back(take(from)?)
            }
        }
    )* };
}

written_as! {
    u8 as [u8; 1]: |n| n.to_le_bytes(), |bytes| Some(Self::from_le_bytes(bytes));
    u16 as [u8; 2]: |n| n.to_le_bytes(), |bytes| Some(Self::from_le_bytes(bytes));
    u32 as [u8; 4]: |n| n.to_le_bytes(), |bytes| Some(Self::from_le_bytes(bytes));
    u64 as [u8; 8]: |n| n.to_le_bytes(), |bytes| Some(Self::from_le_bytes(bytes));
    bool as u8: |yes| u8::from(*yes), |byte| (byte <= 1).then_some(byte == 1);
    Uuid as [u8; 16]: |id| id.into_bytes(), |bytes| Some(Self::from_bytes(bytes));
    RecordId as Uuid: |id| (*id).into(), |id| Some(id.into());
    Attempt as u32: |attempt| attempt.number(), |number| Some(Self::from_number(number));
    StatusCode as u16: |status| status.as_u16(), |status| Self::from_u16(status).ok();
    Tenant as String: |text| text.as_str().to_owned(), |text| Some(Self::stored(&text));
    Operation as String: |text| text.as_str().to_owned(), |text| Some(Self::stored(&text));
    Key as String: |text| text.as_str().to_owned(), |text| Some(Self::stored(&text));
    LateEnd as Option<Answer>: |end| match end {
        Self::Released { answer } | Self::Completed { answer, .. } => Some(answer.clone()),
        Self::NotSent => None,
    }, |answer| Some(answer.map_or(Self::NotSent, |answer| Self::Released { answer }));
    KeptBody as Option<Bytes>: |body| match body {
        Self::Whole(body) => Some(body.clone()),
        Self::NotRetained => None,
    }, |body| Some(body.map_or(Self::NotRetained, Self::Whole));
}

impl Field for String {
    fn put(&self, out: &mut Vec<u8>) {
        put_bytes(self.as_bytes(), out);
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        std::str::from_utf8(take_bytes(from)?).ok().map(str::to_owned)
    }
}

impl Field for Bytes {
    fn put(&self, out: &mut Vec<u8>) {
        put_bytes(self, out);
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        take_bytes(from).map(Self::copy_from_slice)
    }
}

impl Field for Duration {
    fn put(&self, out: &mut Vec<u8>) {
        self.as_secs().put(out);
        self.subsec_nanos().put(out);
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        let seconds = Self::from_secs(take(from)?);
        seconds.checked_add(Self::from_nanos(take::<u32>(from)?.into()))
    }
}

impl Field for Answer {
    fn put(&self, out: &mut Vec<u8>) {
        let Self { status, headers, spelling, body } = self;
        status.put(out);
        put_bytes(&encode_headers(headers, spelling), out);
        body.put(out);
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        let status = take(from)?;
        let (headers, spelling) = decode_headers(take_bytes(from)?).ok()?;
        Some(Self { status, headers, spelling, body: take(from)? })
    }
}

impl<const N: usize> Field for [u8; N] {
    fn put(&self, out: &mut Vec<u8>) {
        out.extend(self);
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        let (taken, rest) = from.split_first_chunk()?;
        *from = rest;
        Some(*taken)
    }
}

impl<T: Field> Field for Option<T> {
    fn put(&self, out: &mut Vec<u8>) {
        self.is_some().put(out);
        if let Some(some) = self {
            some.put(out);
        }
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        Some(if take(from)? { Some(take(from)?) } else { None })
    }
}

impl<T: Field> Field for Vec<T> {
    fn put(&self, out: &mut Vec<u8>) {
        count(self.len()).put(out);
        self.iter().for_each(|one| one.put(out));
    }
    fn take(from: &mut &[u8]) -> Option<Self> {
        let count: u32 = take(from)?;
        (0..count).map(|_| take(from)).collect()
    }
}

/// A count as it is written. One that does not fit makes a body that is refused for its length.
fn count(count: usize) -> u32 {
    u32::try_from(count).unwrap_or(u32::MAX)
}

fn put_bytes(bytes: &[u8], out: &mut Vec<u8>) {
    count(bytes.len()).put(out);
    out.extend(bytes);
}

fn take_bytes<'a>(from: &mut &'a [u8]) -> Option<&'a [u8]> {
    let count = usize::try_from(take::<u32>(from)?).ok()?;
    let (taken, rest) = from.split_at_checked(count)?;
    *from = rest;
    Some(taken)
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, HeaderValue};
    use sha2::{Digest as _, Sha256};

    use super::*;
    use crate::record::Spelling;

    fn fingerprint() -> Fingerprint {
        Fingerprint { canonical: [1; 32], raw: [2; 32], recipe: [3; 8] }
    }

    fn completion(key: &str, body: KeptBody) -> Completion {
        let mut headers = HeaderMap::new();
        headers.append("link", HeaderValue::from_static("a"));
        headers.append("link", HeaderValue::from_bytes(&[0x80, 0xff]).unwrap());
        let spelling = Spelling::of(&headers, ["Link", "LINK"]);
        let event = |n: u16, ordering_key: Option<&str>, sinks: &[&str]| Event {
            id: Uuid::from_u128(n.into()),
            key: format!("{key}/{n}"),
            kind: "order.created".to_owned(),
            position: n,
            ordering_key: ordering_key.map(str::to_owned),
            payload: Bytes::from(vec![0, 1, 255]),
            sinks: sinks.iter().map(|&sink| sink.to_owned()).collect(),
        };
        Completion {
            scope: Scope {
                tenant: Tenant::stored("ténant"),
                operation: Operation::stored("orders.create"),
                key: Key::stored(key),
            },
            fence: Fence { id: RecordId::fresh(), attempt: Attempt::from_number(7) },
            answer: Answer { status: StatusCode::CREATED, headers, spelling, body },
            retention: Duration::from_millis(86_400_001),
            events: vec![event(0, Some("k"), &["main", "audit"]), event(1, None, &[])],
        }
    }

    #[test]
    fn an_outcome_comes_back_as_it_was_kept() {
        for body in [
            KeptBody::Whole(Bytes::from((0..=255).collect::<Vec<u8>>())),
            KeptBody::Whole(Bytes::new()),
            KeptBody::NotRetained,
        ] {
            let completion = completion("k", body);
            let encoded = encode(&completion, fingerprint());
            let (back, print) = decode(&encoded).unwrap();
            assert_eq!(format!("{back:?}"), format!("{completion:?}"));
            assert_eq!(print, fingerprint());
            for length in 0..encoded.len() {
                assert!(decode(&encoded[..length]).is_none(), "{length}");
            }
            let longer = [encoded.as_slice(), &[0]].concat();
            assert!(decode(&longer).is_none());
        }
    }

    #[test]
    fn an_attempt_that_did_not_execute_comes_back_as_it_was_kept() {
        let Completion { scope, fence, answer, .. } =
            completion("k", KeptBody::Whole(Bytes::from_static(b"later")));
        for (end, gone_on) in [
            (LateEnd::Released { answer }, false),
            (LateEnd::NotSent, false),
            (LateEnd::NotSent, true),
        ] {
            let freed = LateOutcome { scope: scope.clone(), fence, end };
            let encoded = encode_freed(&freed, gone_on);
            assert_eq!(decode_freed(&encoded), Some((freed, gone_on)));
            for length in 0..encoded.len() {
                assert!(decode_freed(&encoded[..length]).is_none(), "{length}");
            }
            assert!(decode_freed(&[encoded.as_slice(), &[0]].concat()).is_none());
        }
    }

    /// What a process left is read by a later program of the same version of the format.
    #[test]
    fn the_bytes_of_a_body_stay_what_they_were() {
        let mut of = completion("k", KeptBody::Whole(Bytes::from_static(b"later")));
        of.fence.id = Uuid::from_u128(9).into();
        let freed = |end, gone_on| {
            encode_freed(&LateOutcome { scope: of.scope.clone(), fence: of.fence, end }, gone_on)
        };
        let bodies = [
            encode(&of, fingerprint()),
            freed(LateEnd::Released { answer: of.answer.clone() }, false),
            freed(LateEnd::NotSent, true),
        ];
        let checks = bodies.map(|body| {
            let check = Sha256::digest(&body);
            (body.len(), u64::from_be_bytes(*check.first_chunk().unwrap()))
        });
        let made_by_the_first = [
            (306, 4_357_437_793_678_256_274),
            (90, 7_853_385_553_886_736_641),
            (55, 15_273_097_294_314_416_722),
        ];
        assert_eq!(checks, made_by_the_first);
    }
}
