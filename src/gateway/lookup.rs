//! Asks the upstream what became of an attempt whose end nobody knows.
//!
//! The question reads; it executes nothing, so it needs no reservation. But only whoever holds the record asks: the store
//! lets one at a time, over all replicas. What must stay true: an answer counts only if it came whole and in time;
//! everything else is [`LookupResult::Failed`], and leaves the record as unknown as it was.
//!
//! When the process dies here, the record is in progress under a dead owner: it is unknown again, and is asked about later.

use bytes::Bytes;
use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING};
use http::{HeaderValue, Request};
use http_body_util::Full;

use super::forward::{self, Evidence};
use super::headers;
use super::upstream::Upstream;
use crate::record::event::RecordContext;
use crate::record::lookup::LookupResult;
use crate::record::{Answer, KeptBody, Spelling};
use crate::route::{Lookup, Route};
use crate::telemetry::{LookupEnd, Metrics, causes};

/// Asks, once, and says what the answer means.
pub(super) async fn ask(
    route: &Route,
    lookup: &Lookup,
    upstream: &Upstream,
    about: &RecordContext<'_>,
    metrics: &Metrics,
) -> LookupResult {
    let body_max = route.policy.response_body_max;
    let result = match lookup.template.request(about) {
        Err(error) => LookupResult::Failed(error),
        Ok(question) => {
            let exchange = exchange(upstream, question, body_max);
            match tokio::time::timeout(lookup.timeout, exchange).await {
                Ok(Ok(reply)) => lookup.template.interpret(about, &reply),
                Ok(Err(error)) => LookupResult::Failed(error),
                Err(_) => LookupResult::Failed("no answer in time".to_owned()),
            }
        }
    };
    let (operation, record) = (route.operation.as_str(), about.record);
    let asked = match &result {
        LookupResult::Found(answer) => {
            tracing::info!(%record, operation, status = answer.status.as_u16(), "a look-up found the outcome");
            LookupEnd::Found
        }
        LookupResult::NotFound => {
            tracing::info!(%record, operation, "a look-up found nothing");
            LookupEnd::NotFound
        }
        LookupResult::Failed(why) => {
            tracing::warn!(%record, operation, %why, "a look-up failed; the outcome stays unknown");
            LookupEnd::Failed
        }
    };
    metrics.asked(operation, asked);
    result
}

async fn exchange(
    upstream: &Upstream,
    question: Request<()>,
    body_max: usize,
) -> Result<Answer, String> {
    let mut question = question.map(|()| Full::<Bytes>::default());
    question.headers_mut().entry(ACCEPT_ENCODING).or_insert(HeaderValue::from_static("identity"));
    let connection = upstream.dial().await.map_err(|error| causes(&error))?;
    // It reads only, so it may go out under any lease.
    let answer = connection.send(question, || true).await.map_err(|error| causes(&error))?;
    match forward::receive(answer, body_max).await {
        Evidence::Answered { head, body, .. } => {
            if head.headers.contains_key(CONTENT_ENCODING) {
                return Err("the answer is encoded, which was not asked for".to_owned());
            }
            let headers = headers::kept(&head.headers, &[]);
            let spelling = Spelling::default();
            Ok(Answer { status: head.status, headers, spelling, body: KeptBody::Whole(body) })
        }
        Evidence::Large { .. } => Err("the answer is larger than max_response_body".to_owned()),
        Evidence::Failed(_) => Err("the answer broke off".to_owned()),
    }
}
