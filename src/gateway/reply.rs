//! What callers get: first answers, replays, and every answer of the gateway itself, in one place.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, TRAILER};
use http::{HeaderMap, HeaderValue, Response};
use http_body::Frame;
use http_body_util::BodyExt;

use super::first::{FirstAnswer, FirstBody};
use super::headers::own::{BYPASSED, EXPIRES, RECORD, REPLAYED, STORED, name_expiry, name_record};
use super::headers::{self, has_body, without_hops};
use super::negotiate::Accepts;
use super::notes::{self, Notes};
use super::pass;
use super::prefixed::Prefixed;
use super::problem::{Name, Problem};
use super::reserve::{Refusal, Replay, Shared, SharedAnswer};
use super::rights::Grant;
use super::spelling;
use super::upstream::{self, Body, BodyError, whole};
use super::vary;
use crate::record::outcome::Failure;
use crate::record::{Answer, Attempt, Fence, KeptBody, Operation};
use crate::route::{OnUnknown, Policy};
use crate::telemetry::Reply;

/// Notes with an answer how its request was counted, so that the request is timed under the same name at its end.
pub(super) fn counted_as(reply: Reply, mut response: Response<Body>) -> Response<Body> {
    response.extensions_mut().insert(reply);
    response
}

/// Lets pages of other origins read what the gateway itself says with an answer, where the answer is for them.
pub(super) fn expose_own(headers: &mut HeaderMap) {
    vary::expose(headers, &[REPLAYED, RECORD, EXPIRES, STORED, BYPASSED]);
}

/// When a caller comes again where too many events are undelivered: no sooner than that is counted anew.
const DRAINED_AFTER: Duration = Duration::from_secs(5);

/// When a caller comes again for an outcome that the gateway itself asks about.
const ASK_AGAIN: Duration = Duration::from_secs(5);

/// A refusal of a keyed request as a problem, under the route's policy.
pub(super) fn refusal(refusal: Refusal, policy: &Policy) -> Problem {
    match refusal {
        Refusal::Mismatch { record } => {
            Problem::new(Name::RequestMismatch).status(policy.mismatch_status).record(record)
        }
        Refusal::Forbidden { record } => Problem::new(Name::ReplayForbidden).record(record),
        Refusal::InProgress { record } => Problem::new(Name::InProgress).record(record),
        Refusal::OutcomeUnknown { record, again } => {
            let problem = Problem::new(Name::OutcomeUnknown).record(record);
            match policy.on_unknown {
                OnUnknown::Hold | OnUnknown::Retry => problem,
                OnUnknown::Lookup(_) => problem.after(again.unwrap_or(ASK_AGAIN)).detail(
                    "An execution under this key began and its end is not known yet. The service is asked what became of it. Send the request again with the same key after the time in Retry-After.",
                ),
            }
        }
        Refusal::StoreUnavailable(_) => Problem::new(Name::StoreUnavailable),
        Refusal::NotStorable => Problem::new(Name::RequestNotStorable),
        Refusal::BacklogFull => Problem::new(Name::Overloaded).after(DRAINED_AFTER).detail(
            "Too many events of earlier requests wait to be delivered. Nothing was reserved or forwarded. Send it again with the same key after the time in Retry-After.",
        ),
    }
}

/// A failed forward as a problem. What is freed of a later attempt goes back to `unknown`: the earlier one may have executed.
pub(super) fn failure(fence: Fence, failure: Failure) -> Problem {
    let name = match failure {
        Failure::NothingSent => Name::UpstreamUnreachable,
        Failure::LeaseEnded => Name::StoreUnavailable,
        Failure::Broken => Name::UpstreamFailed,
        Failure::TimedOut => Name::UpstreamTimeout,
    };
    let problem = Problem::new(name).record(fence.id);
    if failure == Failure::NothingSent && fence.attempt > Attempt::FIRST {
        return problem.detail(
            "Nothing was sent to the service this time. Whether an earlier attempt under this key was executed is still not known.",
        );
    }
    problem
}

/// A request that was forwarded unprotected, and failed, as a problem.
pub(super) fn bypass_failed(failure: Failure) -> Problem {
    let (name, detail) = match failure {
        Failure::NothingSent | Failure::LeaseEnded => (
            Name::UpstreamUnreachable,
            "Nothing was sent to the service. Send it again with the same key.",
        ),
        Failure::Broken | Failure::TimedOut => (
            if failure == Failure::Broken { Name::UpstreamFailed } else { Name::UpstreamTimeout },
            "The request was forwarded without protection and no complete answer came back: it may have been executed, and nothing remembers it. Find out from the service itself before you send it again.",
        ),
    };
    Problem::new(name).detail(detail)
}

/// The upstream's answer for the caller that started it. `expires_at`: where it is kept.
pub(super) fn first(first: FirstAnswer, kept: Kept, accepts: &Accepts) -> Response<Body> {
    let FirstAnswer { record, mut head, body } = first;
    let mut headers = without_hops(head.headers);
    let body = match body {
        FirstBody::Whole { body, trailers } => trailed(body, trailers, &mut headers, accepts),
        FirstBody::Streamed { begun, rest } => {
            // A trailer carries the gateway's names as little as a header does.
            pass::without_hop_trailers(Prefixed::new(begun, rest).boxed_unsync())
        }
    };
    let mut response = Response::new(body);
    *response.status_mut() = head.status;
    *response.headers_mut() = headers;
    // Carries the spelling of header names and the reason phrase, and no bytes of the answer.
    head.extensions.remove::<upstream::SentNames>();
    *response.extensions_mut() = head.extensions;
    let headers = response.headers_mut();
    headers::add_via(headers);
    name_record(headers, record);
    match kept {
        Kept::Until(expires_at) => name_expiry(headers, expires_at),
        Kept::NotYet => {
            headers.insert(STORED, HeaderValue::from_static("false"));
        }
        Kept::Spilled | Kept::No => {}
    }
    response
}

/// Whether a first answer is kept.
#[derive(Clone, Copy, Debug)]
pub(super) enum Kept {
    /// Durable, until then.
    Until(SystemTime),
    /// Durable in the spill. When it expires only the store will say.
    Spilled,
    /// It should be, and neither store nor spill has taken it yet; or the record had gone on, and it is in the audit
    /// table.
    NotYet,
    /// It is not to be kept.
    No,
}

/// A stored answer, sent again, to one who may read it. `sent`: in the form that the caller takes.
pub(super) fn replay(
    replay: &Replay,
    sent: &Answer,
    accepts: &Accepts,
    operation: &Operation,
    _: Grant,
) -> Response<Body> {
    let mut response = recorded(replay, sent, accepts, operation);
    if matches!(replay.answer.body, KeptBody::Whole(_)) {
        response.headers_mut().insert(REPLAYED, HeaderValue::from_static("true"));
    }
    response
}

/// A stored answer that nobody has got before: the application kept it by itself, for this very execution.
pub(super) fn recorded(
    replay: &Replay,
    sent: &Answer,
    accepts: &Accepts,
    operation: &Operation,
) -> Response<Body> {
    let mut response = match kept_answer(sent, accepts) {
        Some(mut response) => {
            *response.extensions_mut() = replay.spelled();
            response
        }
        None => {
            let status = replay.answer.status.as_u16();
            let detail = format!(
                "The first request under this key was executed and answered with status {status}. Its answer was too large to keep. Read the result from the API itself."
            );
            let problem = Problem::new(Name::ResponseNotRetained).detail(detail);
            problem.record(replay.fence.id).into_response(Some(operation))
        }
    };
    name_record(response.headers_mut(), replay.fence.id);
    name_expiry(response.headers_mut(), replay.expires_at);
    response
}

/// The answer of an attempt that was not kept, for one that waited for it: no replay, and not marked as one.
pub(super) fn shared(
    shared: &Shared,
    sent: Option<&Answer>,
    accepts: &Accepts,
    operation: &Operation,
) -> Response<Body> {
    let unreachable = || {
        let problem = Problem::new(Name::UpstreamUnreachable).record(shared.record);
        problem.into_response(Some(operation))
    };
    let mut response = match &shared.answer {
        SharedAnswer::Released(answer) => match kept_answer(sent.unwrap_or(answer), accepts) {
            Some(mut response) => {
                *response.extensions_mut() = spelling::extensions(answer);
                response
            }
            None => unreachable(),
        },
        SharedAnswer::Unreachable => unreachable(),
    };
    name_record(response.headers_mut(), shared.record);
    response
}

fn kept_answer(answer: &Answer, accepts: &Accepts) -> Option<Response<Body>> {
    let KeptBody::Whole(body) = &answer.body else { return None };
    let body = if has_body(answer.status) { body.clone() } else { Bytes::new() };
    let mut headers = answer.headers.clone();
    let Notes { trailers, origin, .. } = notes::take(&mut headers);
    vary::without_others(&mut headers, origin, accepts.origin.as_ref());
    // Of a body that may be decoded since: the one that is sent is counted.
    headers.remove(CONTENT_LENGTH);
    let body = if has_body(answer.status) {
        trailed(body, trailers, &mut headers, accepts)
    } else {
        whole(body)
    };
    let mut response = Response::new(body);
    *response.status_mut() = answer.status;
    *response.headers_mut() = headers;
    headers::add_via(response.headers_mut());
    Some(response)
}

/// A body with trailers behind it, announced, for a caller that reads them; for any other one without.
fn trailed(body: Bytes, trailers: HeaderMap, headers: &mut HeaderMap, accepts: &Accepts) -> Body {
    headers.remove(TRAILER);
    if !accepts.trailers || trailers.is_empty() {
        return whole(body);
    }
    for name in trailers.keys() {
        headers.append(TRAILER, HeaderValue::from_name(name.clone()));
    }
    // Trailers come behind chunks only.
    headers.remove(CONTENT_LENGTH);
    Trailed { body: Some(body), trailers: Some(trailers) }.boxed_unsync()
}

/// Bytes with trailers. Its length is not sent, so it goes out in chunks.
struct Trailed {
    body: Option<Bytes>,
    trailers: Option<HeaderMap>,
}

impl http_body::Body for Trailed {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let body = self.body.take().filter(|body| !body.is_empty()).map(Frame::data);
        Poll::Ready(body.or_else(|| self.trailers.take().map(Frame::trailers)).map(Ok))
    }

    fn is_end_stream(&self) -> bool {
        self.trailers.is_none()
    }
}
