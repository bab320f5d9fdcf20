//! Sends a reservation once, and says what was seen.
//!
//! The request goes out on a connection of its own. Nothing is ever sent again from here: whatever goes wrong
//! becomes [`Evidence`], and whether a byte was written is what the connection counted, not what an error looks like.

use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use http::header::{ACCEPT_ENCODING, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, response};
use http_body::Body as _;
use http_body_util::{BodyExt, Full};

use super::headers;
use super::reserve::{InFlight, Reservation};
use super::upstream::{self, SendError, Upstream};
use super::vary;
use crate::fault::{self, Point};
use crate::record::outcome::Failure;
use crate::telemetry::causes;

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

/// How an exchange is bounded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Bounds {
    /// How long the upstream may take before the outcome is unknown.
    pub(super) timeout: Duration,
    /// Most bytes of the answer's body that are kept.
    pub(super) body_max: usize,
}

/// An exchange that was given up, its connection still open: dropped only once the record says `unknown`.
pub(super) type OpenExchange = std::pin::Pin<Box<dyn Future<Output = Evidence> + Send>>;

/// Sends the reservation's request, once.
pub(super) async fn forward(
    reservation: Reservation,
    upstream: std::sync::Arc<Upstream>,
    request: Request<Full<Bytes>>,
    bounds: Bounds,
) -> (Box<InFlight>, Evidence, Option<OpenExchange>) {
    let in_flight = reservation.begin();
    let may_write = in_flight.may_write();
    let deadline = Instant::now() + bounds.timeout;
    let mut exchange: OpenExchange =
        Box::pin(async move { exchange(&upstream, request, may_write, bounds.body_max).await });
    match tokio::time::timeout_at(deadline.into(), &mut exchange).await {
        Ok(evidence) => (in_flight, evidence, None),
        Err(_) if in_flight.sent() => {
            (in_flight, Evidence::Failed(Failure::TimedOut), Some(exchange))
        }
        // Dropped at once: from here on it cannot send any more.
        Err(_) => {
            drop(exchange);
            let failure = if in_flight.sent() { Failure::TimedOut } else { Failure::NothingSent };
            (in_flight, Evidence::Failed(failure), None)
        }
    }
}

async fn exchange(
    upstream: &Upstream,
    request: Request<Full<Bytes>>,
    may_write: impl Fn() -> bool + Send + Sync + 'static,
    body_max: usize,
) -> Evidence {
    fault::point(Point::BeforeConnect).await;
    let connection = match upstream.dial().await {
        Ok(connection) => connection,
        Err(error) => {
            tracing::info!(error = %causes(&error), "the upstream cannot be reached");
            return Evidence::Failed(Failure::NothingSent);
        }
    };
    fault::point(Point::Connected).await;
    let unasked = !request.headers().contains_key(ACCEPT_ENCODING);
    let origin = vary::origin_of(request.headers());
    match connection.send(request, may_write).await {
        Ok(mut answer) => {
            if unasked {
                answer.extensions_mut().insert(Unasked);
            }
            if vary::depends_on_origin(answer.headers()) {
                answer.extensions_mut().insert(ForOrigin(origin));
            }
            fault::point(Point::AnswerHead).await;
            let evidence = receive(answer, body_max).await;
            fault::point(Point::AnswerBody).await;
            evidence
        }
        Err(SendError::NothingSent(cause)) => {
            tracing::info!(%cause, "the connection to the upstream ended before anything was sent");
            Evidence::Failed(Failure::NothingSent)
        }
        Err(SendError::Held) => Evidence::Failed(Failure::LeaseEnded),
        Err(SendError::Broken(cause)) => {
            tracing::warn!(%cause, "the upstream's answer is lost");
            Evidence::Failed(Failure::Broken)
        }
    }
}

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
