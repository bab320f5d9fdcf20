//! `store.on_unavailable = "bypass"`: what is forwarded although no reservation could be made.
//!
//! It is for those to whom a doubled write is less harm than a refused one. What must stay true: a request that may be
//! reserved, or whose record was seen, never comes here; a request goes out once, on a connection of its own; the answer says
//! that nothing protects it, and nothing of it is kept.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{HeaderValue, Request, Response};
use http_body_util::{BodyExt, Full};
use parking_lot::Mutex;

use super::headers::own::BYPASSED;
use super::pass;
use super::upstream::{Body, SendError, Upstream};
use crate::record::outcome::Failure;
use crate::telemetry::causes;

/// How often the log says that requests are forwarded unprotected.
const WARN_EVERY: Duration = Duration::from_secs(10);

/// Sends a request once and streams its answer; `timeout` is for the head of the answer.
pub(super) async fn forward(
    upstream: &Upstream,
    request: Request<Full<Bytes>>,
    timeout: Duration,
) -> Result<Response<Body>, Failure> {
    let exchange = async {
        let connection = upstream.dial().await.map_err(|error| {
            tracing::info!(error = %causes(&error), "the upstream cannot be reached");
            Failure::NothingSent
        })?;
        connection.send(request, || true).await.map_err(|error| {
            tracing::warn!(error = %causes(&error), "the upstream's answer is lost");
            match error {
                SendError::NothingSent(_) | SendError::Held => Failure::NothingSent,
                SendError::Broken(_) => Failure::Broken,
            }
        })
    };
    let answer = tokio::time::timeout(timeout, exchange).await.unwrap_or(Err(Failure::TimedOut))?;
    let mut answer = answer.map(|body| pass::without_hop_trailers(body.streamed().boxed_unsync()));
    pass::clean_answer(answer.headers_mut());
    Ok(answer)
}

/// Says on the answer that nothing protected its request.
pub(super) fn mark(answer: &mut Response<Body>) {
    answer.headers_mut().insert(BYPASSED, HeaderValue::from_static("true"));
}

/// Warns of bypassed requests, at most once in [`WARN_EVERY`].
#[derive(Default)]
pub(super) struct Alarm(Mutex<Quiet>);

#[derive(Default)]
struct Quiet {
    since: Option<Instant>,
    count: u64,
}

impl Alarm {
    /// One more request is bypassed.
    pub(super) fn raise(&self) {
        if let Some(requests) = self.due(Instant::now()) {
            tracing::warn!(
                requests,
                "the store is away: keyed requests are forwarded unprotected (store.on_unavailable = \"bypass\")"
            );
        }
    }

    /// How many there were since the last warning, where it is time for one.
    fn due(&self, now: Instant) -> Option<u64> {
        let mut quiet = self.0.lock();
        quiet.count += 1;
        if quiet.since.is_some_and(|since| now.duration_since(since) < WARN_EVERY) {
            return None;
        }
        quiet.since = Some(now);
        Some(std::mem::take(&mut quiet.count))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_is_warned_at_most_once_per_interval_and_counts_all() {
        let (alarm, begun) = (Alarm::default(), Instant::now());
        assert_eq!(alarm.due(begun), Some(1));
        assert_eq!(alarm.due(begun + WARN_EVERY / 2), None);
        assert_eq!(alarm.due(begun + WARN_EVERY), Some(2));
    }
}
