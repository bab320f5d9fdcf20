//! The upstream's answer on its way to the first caller, and what is kept or shared of it.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, response};

use super::evidence::{ForOrigin, Unasked};
use super::reserve::{Shared, SharedAnswer};
use super::{headers, notes, upstream};
use crate::record::{Answer, Caller, KeptBody, RecordId, Spelling};

/// A body as far as it is in memory.
pub(super) enum FirstBody {
    /// All of it, and what came behind it.
    Whole { body: Bytes, trailers: HeaderMap },
    /// What was read before it turned out too large to keep, and the rest.
    Streamed { begun: Vec<Bytes>, rest: upstream::Answer },
}

/// The upstream's answer on its way to the first caller.
pub(super) struct FirstAnswer {
    pub(super) record: RecordId,
    pub(super) head: response::Parts,
    pub(super) body: FirstBody,
}

impl FirstAnswer {
    /// The answer as far as a route keeps it that leaves out `drop`.
    pub(super) fn kept(&self, drop: &[HeaderName]) -> Answer {
        let mut headers = headers::kept(&self.head.headers, drop);
        let body = match &self.body {
            FirstBody::Whole { body, trailers } => {
                self.note(&mut headers, &headers::kept(trailers, drop));
                KeptBody::Whole(body.clone())
            }
            FirstBody::Streamed { .. } => KeptBody::NotRetained,
        };
        self.answer(headers, body)
    }

    /// An answer that is not kept, for those who waited for it; a stream cannot be shared. Like a replay it leaves `drop`
    /// out: a session that was opened for the first caller is nobody else's.
    pub(super) fn shared(&self, caller: Option<Caller>, drop: &[HeaderName]) -> Option<Shared> {
        let FirstBody::Whole { body, trailers } = &self.body else { return None };
        let without = |mut headers: HeaderMap| {
            for name in drop {
                headers.remove(name);
            }
            headers
        };
        let mut headers = without(headers::without_hops(self.head.headers.clone()));
        self.note(&mut headers, &without(trailers.clone()));
        let answer = self.answer(headers, KeptBody::Whole(body.clone()));
        Some(Shared { record: self.record, caller, answer: SharedAnswer::Released(answer) })
    }

    /// With these of its headers, spelled as the upstream spelled them.
    fn answer(&self, headers: HeaderMap, body: KeptBody) -> Answer {
        let sent = self.head.extensions.get::<upstream::SentNames>();
        let spelling =
            sent.map_or_else(Spelling::default, |sent| Spelling::of(&headers, sent.names()));
        Answer { status: self.head.status, headers, spelling, body }
    }

    /// Notes among the headers that are kept what a replay needs besides.
    fn note(&self, headers: &mut HeaderMap, trailers: &HeaderMap) {
        notes::keep_trailers(headers, trailers);
        if self.head.extensions.get::<Unasked>().is_some() {
            notes::keep_unasked(headers);
        }
        if let Some(ForOrigin(origin)) = self.head.extensions.get() {
            notes::keep_origin(headers, origin.as_ref());
        }
    }
}
