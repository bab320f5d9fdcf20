//! The upstream's answer on its way to the first caller.

use bytes::Bytes;
use http::{HeaderMap, response};

use super::upstream;
use crate::record::RecordId;

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
