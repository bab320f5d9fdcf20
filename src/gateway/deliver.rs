//! From what became of a request to what its caller gets: grant, form and permit of a stored answer, and how it counts.
//!
//! What must stay true: a stored answer leaves only with a [`Grant`], or to the caller whose own request it answers. Dying
//! here loses nothing: the answer is stored, and the retry gets it.

use std::sync::Arc;

use http::Response;

use super::Gateway;
use super::budget::Exhausted;
use super::complete::Finish;
use super::intake::Keyed;
use super::negotiate::{self, Accepts, Decoded};
use super::problem::{Name, Problem};
use super::reply::{self, Kept};
use super::reserve::{Admission, Refusal, Replay, Shared, SharedAnswer};
use super::rights::{Grant, Rights};
use super::upstream::Body;
use crate::record::outcome::Failure;
use crate::record::{Answer, KeptBody, Operation, RecordId};
use crate::telemetry::Reply;

/// What a request gets that is not executed by itself.
enum Granted {
    /// A stored answer that this caller may read.
    Replay(Arc<Replay>, Grant),
    /// The answer of an attempt that was not kept.
    Share(Arc<Shared>),
}

impl Granted {
    /// The stored or shared answer that it is answered with.
    fn answer(&self) -> Option<&Answer> {
        match self {
            Self::Replay(replay, _) => Some(&replay.answer),
            Self::Share(shared) => match &shared.answer {
                SharedAnswer::Released(answer) => Some(answer),
                SharedAnswer::Unreachable => None,
            },
        }
    }

    /// The record that it is answered from.
    fn record(&self) -> RecordId {
        match self {
            Self::Replay(replay, _) => replay.fence.id,
            Self::Share(shared) => shared.record,
        }
    }
}

impl Gateway {
    /// Answers a request that is not executed by itself. `replayed`: how a stored answer counts.
    pub(super) async fn reply(
        &self,
        keyed: &mut Keyed,
        admission: Admission,
        replayed: Reply,
    ) -> Response<Body> {
        let route = Arc::clone(&keyed.route);
        let admission = match admission {
            Admission::Replay(replay) => match self.rights.check(keyed, &replay).await {
                Ok(grant) => Granted::Replay(replay, grant),
                Err(problem) => return self.refuse(&route, problem),
            },
            Admission::Share(shared) => Granted::Share(shared),
            Admission::Refuse(refusal) => {
                return self.refuse(&route, reply::refusal(refusal, &route.policy));
            }
            // Only a leader executes or asks, in `work`. Dropping the reservation releases it.
            Admission::Execute(_) | Admission::LookUp(_) => {
                return self.refuse(&route, Problem::new(Name::StoreUnavailable));
            }
        };
        let stored = admission.answer();
        let decoded = match self.fit(keyed, stored, Some(admission.record())).await {
            Ok(decoded) => decoded,
            Err(problem) => return self.refuse(&route, problem),
        };
        let (decoded, held) = decoded.map(|it| (it.answer, it.held)).unzip();
        let bytes = decoded.as_ref().or(stored).map_or(0, body_bytes);
        // A stored answer that gets no permit is still stored: the caller comes again for it.
        let held = match (held, bytes) {
            (None, 0) => None,
            (Some(held), _) => Some(held),
            (None, bytes) => match keyed.permit.answer(bytes) {
                Ok(held) => Some(held),
                Err(Exhausted) => return self.overloaded(&route),
            },
        };
        let (operation, accepts) = (&route.operation, &keyed.accepts);
        let response = match admission {
            Granted::Replay(replay, grant) => {
                self.metrics.replied(operation.as_str(), replayed);
                let sent = decoded.as_ref().unwrap_or(&replay.answer);
                let response = reply::replay(&replay, sent, accepts, operation, grant);
                reply::counted_as(replayed, response)
            }
            Granted::Share(shared) => {
                self.metrics.replied(operation.as_str(), Reply::Released);
                let response = reply::shared(&shared, decoded.as_ref(), accepts, operation);
                reply::counted_as(Reply::Released, response)
            }
        };
        match held {
            Some(held) => response.map(|body| held.carry(body, bytes)),
            None => response,
        }
    }

    /// A stored answer in the form that this caller takes; `None`: as it is stored.
    async fn fit(
        &self,
        keyed: &Keyed,
        stored: Option<&Answer>,
        record: Option<RecordId>,
    ) -> Result<Option<Decoded>, Problem> {
        let Some(stored) = stored else { return Ok(None) };
        let kept_max = keyed.route.policy.response_body_max;
        let fitted = negotiate::fit(&keyed.accepts, stored, kept_max, &keyed.permit).await;
        fitted.map_err(|unfit| unfit.problem(stored).record(record))
    }

    /// A stored answer for the caller whose request was executed, or was to be. `write`: as what it is sent.
    async fn found(
        &self,
        keyed: &Keyed,
        replay: &Replay,
        counted: Reply,
        write: impl FnOnce(&Replay, &Answer, &Accepts, &Operation) -> Response<Body>,
    ) -> Response<Body> {
        let operation = &keyed.route.operation;
        match self.fit(keyed, Some(&replay.answer), Some(replay.fence.id)).await {
            Ok(decoded) => {
                self.metrics.replied(operation.as_str(), counted);
                let (decoded, held) = decoded.map(|it| (it.answer, it.held)).unzip();
                let sent = decoded.as_ref().unwrap_or(&replay.answer);
                let response = write(replay, sent, &keyed.accepts, operation);
                let response = reply::counted_as(counted, response);
                match held {
                    Some(held) => response.map(|body| held.carry(body, body_bytes(sent))),
                    None => response,
                }
            }
            Err(problem) => self.refuse(&keyed.route, problem),
        }
    }

    /// The answer of another attempt than this caller's, where it may read that.
    async fn other(&self, keyed: &Keyed, replay: &Replay, counted: Reply) -> Response<Body> {
        match Rights::of_executor(keyed, replay) {
            Ok(grant) => {
                let write = |replay: &Replay, sent: &Answer, accepts: &Accepts, of: &Operation| {
                    reply::replay(replay, sent, accepts, of, grant)
                };
                self.found(keyed, replay, counted, write).await
            }
            Err(problem) => self.refuse(&keyed.route, problem),
        }
    }

    /// The answer for the caller whose request was executed, or was to be.
    pub(super) async fn finished(&self, keyed: &Keyed, finish: Finish) -> Response<Body> {
        let (route, accepts) = (&keyed.route, &keyed.accepts);
        let (reply, response) = match finish {
            Finish::Kept { first, expires_at } => {
                (Reply::Executed, reply::first(first, Kept::Until(expires_at), accepts))
            }
            Finish::Spilled { first } => {
                (Reply::Executed, reply::first(first, Kept::Spilled, accepts))
            }
            Finish::NotStored { first, counted } => {
                (counted, reply::first(first, Kept::NotYet, accepts))
            }
            Finish::Recorded(replay) => {
                return self.found(keyed, &replay, Reply::Executed, reply::recorded).await;
            }
            Finish::Overtaken(replay) => return self.other(keyed, &replay, Reply::Executed).await,
            Finish::Found(replay) => return self.other(keyed, &replay, Reply::Replayed).await,
            Finish::StillUnknown { record } => {
                let refusal = Refusal::OutcomeUnknown { record, again: None };
                return self.refuse(route, reply::refusal(refusal, &route.policy));
            }
            Finish::Released { first } => (Reply::Released, reply::first(first, Kept::No, accepts)),
            Finish::Unknown { first } => (Reply::Unknown, reply::first(first, Kept::No, accepts)),
            Finish::Failed { fence, failure } => {
                let counted = match failure {
                    Failure::NothingSent | Failure::LeaseEnded => Reply::Released,
                    Failure::Broken | Failure::TimedOut => Reply::Unknown,
                };
                let problem = reply::failure(fence, failure);
                (counted, problem.into_response(Some(&route.operation)))
            }
        };
        self.metrics.replied(route.operation.as_str(), reply);
        reply::counted_as(reply, response)
    }
}

/// The bytes of an answer's kept body.
fn body_bytes(answer: &Answer) -> usize {
    match &answer.body {
        KeptBody::Whole(body) => body.len(),
        KeptBody::NotRetained => 0,
    }
}
