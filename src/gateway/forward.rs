//! Sends a reservation once, and says what was seen.
//!
//! The request goes out on a connection of its own. Nothing is ever sent again from here: whatever goes wrong
//! becomes [`Evidence`], and whether a byte was written is what the connection counted, not what an error looks like.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::Request;
use http::header::ACCEPT_ENCODING;
use http_body_util::Full;

use super::evidence::{Evidence, ForOrigin, Unasked, receive};
use super::reserve::{InFlight, Reservation};
use super::upstream::{SendError, Upstream};
use super::vary;
use crate::fault::{self, Point};
use crate::record::outcome::Failure;
use crate::telemetry::causes;

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
    upstream: Arc<Upstream>,
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
