//! What was seen of one exchange with the upstream, and how its answer is read, up to a bound.

use bytes::{Bytes, BytesMut};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Response, StatusCode, response};
use http_body::Body as _;
use http_body_util::BodyExt;

use super::{headers, upstream};
use crate::record::outcome::Failure;

/// What was seen of one forward.
pub(super) enum Evidence {
    /// A complete answer, its body within the bound, and what came behind the body.
    Answered { head: response::Parts, body: Bytes, trailers: HeaderMap },
    /// A complete head whose body is larger than is kept, or a stream: what was read of it, and the rest.
    Large { head: response::Parts, begun: Vec<Bytes>, rest: upstream::Answer },
    /// No complete answer.
    Failed(Failure),
}

impl Evidence {
    /// The bytes of the answer's body that are in memory.
    pub(super) fn bytes(&self) -> usize {
        match self {
            Self::Answered { body, .. } => body.len(),
            Self::Large { begun, .. } => begun.iter().map(Bytes::len).sum(),
            Self::Failed(_) => 0,
        }
    }
}

/// An extension of an answer: its caller named no content coding that it takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct Unasked;

/// An extension of an answer whose headers depend on what its caller sent as `Origin`: that.
#[derive(Clone, Debug)]
pub(super) struct ForOrigin(pub(super) Option<HeaderValue>);

/// Reads an answer's body up to the bound. A body that breaks off is no answer.
pub(super) async fn receive(answer: Response<upstream::Answer>, body_max: usize) -> Evidence {
    let (head, mut body) = answer.into_parts();
    if head.status == StatusCode::SWITCHING_PROTOCOLS {
        return Evidence::Failed(Failure::Broken);
    }
    let bound = u64::try_from(body_max).unwrap_or(u64::MAX);
    if body.size_hint().lower() > bound || is_stream(&head.headers) {
        return Evidence::Large { head, begun: Vec::new(), rest: body.streamed() };
    }
    let mut read: Vec<Bytes> = Vec::new();
    let mut total = 0_usize;
    let mut trailers = HeaderMap::new();
    while let Some(frame) = body.frame().await {
        let data = match frame.map(http_body::Frame::into_data) {
            Ok(Ok(data)) => data,
            Ok(Err(other)) => {
                trailers = other.into_trailers().unwrap_or_default();
                continue;
            }
            Err(error) => {
                tracing::warn!(%error, "the upstream's answer broke off");
                return Evidence::Failed(Failure::Broken);
            }
        };
        total = total.saturating_add(data.len());
        read.push(data);
        if total > body_max {
            return Evidence::Large { head, begun: read, rest: body.streamed() };
        }
    }
    headers::clean_trailers(&mut trailers);
    Evidence::Answered { head, body: join(read, total), trailers }
}

/// A stream of events has no end that could be waited for.
fn is_stream(headers: &HeaderMap) -> bool {
    let Some(Ok(value)) = headers.get(CONTENT_TYPE).map(HeaderValue::to_str) else {
        return false;
    };
    let essence = value.split(';').next().unwrap_or_default().trim();
    essence.eq_ignore_ascii_case("text/event-stream")
}

/// One buffer of the pieces; the usual single piece is not copied.
fn join(mut pieces: Vec<Bytes>, total: usize) -> Bytes {
    if pieces.len() <= 1 {
        return pieces.pop().unwrap_or_default();
    }
    let mut whole = BytesMut::with_capacity(total);
    for piece in pieces {
        whole.extend_from_slice(&piece);
    }
    whole.freeze()
}
