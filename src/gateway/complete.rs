//! From evidence to a durable end: the answer and its events in one transaction, or a release, or `unknown`.
//!
//! The end is durable before the caller gets a byte of the answer. Where the database does not take it in time, the
//! settler goes on trying and the caller is told ([`Finish::NotStored`]). Waiters are woken with what the store took.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, StatusCode, response};
use tokio::sync::Notify;

use super::forward::{Evidence, GivenUp};
use super::headers;
use super::reserve::{
    Debt, Desk, Ending, Replay, Shared, SharedAnswer, Underway, replay_of, replay_of_completion,
};
use super::upstream;
use crate::record::event::{Event, Origin};
use crate::record::outcome::{Class, Failure};
use crate::record::{Answer, Attempt, Fence, KeptBody, Record, RecordId, State};
use crate::route::Route;
use crate::store::{Changed, Completion, Error, Settled, Store};
use crate::telemetry::{Metrics, Step, causes};

/// A body on its way to the first caller.
pub(super) enum FirstBody {
    /// All of it.
    Whole(Bytes),
    /// What was read before it turned out too large to keep, and the rest.
    Streamed { begun: Vec<Bytes>, rest: upstream::Answer },
}

/// The upstream's answer on its way to the first caller.
pub(super) struct First {
    pub(super) record: RecordId,
    pub(super) head: response::Parts,
    pub(super) body: FirstBody,
}

/// How an attempt ended, for the caller that started it.
pub(super) enum Finish {
    /// Kept until then.
    Kept { first: First, expires_at: SystemTime },
    /// The upstream answered, and the store has not taken it (yet).
    NotStored { first: First },
    /// Somebody else completed the record meanwhile: this is what stands.
    Overtaken(Arc<Replay>),
    /// The upstream was asked, and it had executed an earlier attempt: this is kept.
    Found(Arc<Replay>),
    /// The upstream was asked and did not say, or the store has not taken what it said.
    StillUnknown { record: RecordId },
    /// Known not to have executed: passed on.
    Released { first: First },
    /// Perhaps executed: passed on.
    Unknown { first: First },
    /// No answer.
    Failed { fence: Fence, failure: Failure },
}

/// What completing needs besides the attempt.
pub(super) struct Closing<'a> {
    pub(super) desk: &'a Desk,
    pub(super) store: &'a dyn Store,
    pub(super) metrics: &'a Metrics,
    /// Wakes the relay.
    pub(super) wake: &'a Notify,
    pub(super) route: &'a Route,
    /// What the events need of the request.
    pub(super) context: Option<&'a [u8]>,
    /// How long the caller waits for the database.
    pub(super) timeout: Duration,
}

impl Closing<'_> {
    /// Brings an attempt to its end.
    pub(super) async fn close(
        &self,
        underway: Box<Underway>,
        evidence: Evidence,
        given_up: Option<GivenUp>,
    ) -> Finish {
        let fence = underway.fence;
        let record = fence.id;
        let (head, body) = match evidence {
            Evidence::Answered { head, body } => (head, FirstBody::Whole(body)),
            Evidence::Large { head, begun, rest } => (head, FirstBody::Streamed { begun, rest }),
            Evidence::Failed(failure) => {
                self.fail(underway, failure).await;
                // Only now: the record says what happened before the connection is cut.
                drop(given_up);
                return Finish::Failed { fence, failure };
            }
        };
        let class = self.route.outcome.class(head.status, &head.headers);
        let first = First { record, head, body };
        match class {
            Class::Stored => self.keep(underway, first).await,
            Class::Released => {
                let share = shared(&first, &self.route.policy.replay_drop).map(Arc::new);
                let ending = share.map_or(Ending::LookAgain, Ending::Shared);
                self.release(underway, ending).await;
                Finish::Released { first }
            }
            Class::Unknown => {
                self.lose(underway).await;
                Finish::Unknown { first }
            }
        }
    }

    async fn fail(&self, underway: Box<Underway>, failure: Failure) {
        let Fence { id: record, attempt } = underway.fence;
        let operation = &self.route.operation;
        tracing::warn!(%record, %operation, ?failure, "an attempt ended without an answer");
        let ending = match failure {
            Failure::Broken | Failure::TimedOut => return self.lose(underway).await,
            // What is freed of a later attempt is unknown again, and no waiter starts the next one.
            Failure::NothingSent | Failure::LeaseEnded if attempt > Attempt::FIRST => {
                Ending::Unknown(record)
            }
            Failure::NothingSent => {
                Ending::Shared(Arc::new(Shared { record, answer: SharedAnswer::Unreachable }))
            }
            Failure::LeaseEnded => Ending::LookAgain,
        };
        self.release(underway, ending).await;
    }

    /// Frees the attempt; those who waited for it get this ending.
    async fn release(&self, underway: Box<Underway>, ending: Ending) {
        match self.store.release(&underway.scope, underway.fence).await {
            Ok(Changed::Yes) => underway.settled(ending),
            Ok(Changed::No) => underway.settled(Ending::LookAgain),
            Err(error) => {
                owed(&error);
                let (scope, fence) = (underway.scope.clone(), underway.fence);
                underway.owe(Debt::Release { scope, fence, ending });
            }
        }
    }

    /// Keeps what a question found, with the events, under the fence that was held for it.
    pub(super) async fn adopt(&self, underway: Box<Underway>, answer: Answer) -> Finish {
        let begun = Instant::now();
        let (record, fingerprint) = (underway.fence.id, underway.fingerprint);
        let completion = self.completion_of(&underway, answer);
        let replay = match self.complete(completion.clone(), begun + self.timeout).await {
            Ok(Settled::Done { expires_at }) => {
                let ends = begun + completion.retention;
                replay_of_completion(&underway, completion.answer, expires_at, ends)
            }
            Ok(Settled::Fenced) => match self.store.find(&completion.scope).await {
                Ok(Some(Record { fence, fingerprint, state: State::Completed(completed) }))
                    if fence.id == record =>
                {
                    replay_of(fence, fingerprint, *completed)
                }
                Ok(_) | Err(_) => {
                    underway.settled(Ending::LookAgain);
                    return Finish::StillUnknown { record };
                }
            },
            Err(error) => {
                owed(&error);
                underway.owe(Debt::Complete { completion: Box::new(completion), fingerprint });
                return Finish::StillUnknown { record };
            }
        };
        let replay = Arc::new(replay);
        self.desk.remember(&completion.scope, &replay);
        underway.settled(Ending::Kept(Arc::clone(&replay)));
        self.wake.notify_one();
        Finish::Found(replay)
    }

    /// Frees an attempt that was not sent, because asking about the one before it failed: unknown again.
    pub(super) async fn hold_back(&self, underway: Box<Underway>) -> Finish {
        let record = underway.fence.id;
        self.release(underway, Ending::Unknown(record)).await;
        Finish::StillUnknown { record }
    }

    /// Marks the record `unknown`.
    pub(super) async fn lose(&self, underway: Box<Underway>) {
        let record = underway.fence.id;
        match self.store.mark_unknown(&underway.scope, underway.fence).await {
            Ok(Changed::Yes | Changed::No) => underway.settled(Ending::Unknown(record)),
            Err(error) => {
                owed(&error);
                let (scope, fence) = (underway.scope.clone(), underway.fence);
                underway.owe(Debt::Unknown { scope, fence });
            }
        }
    }

    /// Keeps the answer with its events.
    async fn keep(&self, underway: Box<Underway>, first: First) -> Finish {
        let begun = Instant::now();
        let completion = self.completion(&underway, &first);
        let settled = self.complete(completion.clone(), begun + self.timeout).await;
        self.metrics.took(Step::Complete, begun.elapsed());
        match settled {
            Ok(Settled::Done { expires_at }) => {
                let ends = begun + completion.retention;
                let replay =
                    Arc::new(replay_of_completion(&underway, completion.answer, expires_at, ends));
                self.desk.remember(&completion.scope, &replay);
                underway.settled(Ending::Kept(replay));
                self.wake.notify_one();
                Finish::Kept { first, expires_at }
            }
            Ok(Settled::Fenced) => self.overtaken(underway, completion, first).await,
            Err(error) => {
                owed(&error);
                let fingerprint = underway.fingerprint;
                underway.owe(Debt::Complete { completion: Box::new(completion), fingerprint });
                Finish::NotStored { first }
            }
        }
    }

    /// Writes a completion. Events that the database refuses to hold lose their ordering key, never the outcome.
    async fn complete(&self, completion: Completion, deadline: Instant) -> Result<Settled, Error> {
        let mut plain = completion.clone();
        match self.store.complete(completion, deadline).await {
            Err(Error::Refused(cause)) => {
                tracing::error!(%cause, "the database refused a completion; again without ordering keys");
                for event in &mut plain.events {
                    event.ordering_key = None;
                }
                self.store.complete(plain, deadline).await
            }
            other => other,
        }
    }

    /// The record is no longer at this attempt, or is completed already: what stands is what counts.
    async fn overtaken(
        &self,
        underway: Box<Underway>,
        completion: Completion,
        first: First,
    ) -> Finish {
        match self.store.find(&completion.scope).await {
            Ok(Some(record)) if record.fence.id == completion.fence.id => {
                let State::Completed(completed) = record.state else {
                    underway.settled(Ending::LookAgain);
                    return Finish::NotStored { first };
                };
                // What was committed and not confirmed is found as a record of this attempt with this very answer.
                let own = record.fence == completion.fence && completed.answer == completion.answer;
                let replay = Arc::new(replay_of(record.fence, record.fingerprint, *completed));
                self.desk.remember(&completion.scope, &replay);
                underway.settled(Ending::Kept(Arc::clone(&replay)));
                self.wake.notify_one();
                if own {
                    return Finish::Kept { first, expires_at: replay.expires_at };
                }
                Finish::Overtaken(replay)
            }
            Ok(Some(_) | None) => {
                tracing::warn!(record = %completion.fence.id, "a late outcome found its record taken over");
                underway.settled(Ending::LookAgain);
                Finish::NotStored { first }
            }
            Err(error) => {
                owed(&error);
                let fingerprint = underway.fingerprint;
                underway.owe(Debt::Complete { completion: Box::new(completion), fingerprint });
                Finish::NotStored { first }
            }
        }
    }

    fn completion(&self, underway: &Underway, first: &First) -> Completion {
        let body = match &first.body {
            FirstBody::Whole(body) => KeptBody::Whole(body.clone()),
            FirstBody::Streamed { .. } => KeptBody::NotRetained,
        };
        let kept = headers::kept(&first.head.headers, &self.route.policy.replay_drop);
        self.completion_of(underway, Answer { status: first.head.status, headers: kept, body })
    }

    fn completion_of(&self, underway: &Underway, answer: Answer) -> Completion {
        let events = self.events(underway, &answer);
        Completion {
            scope: underway.scope.clone(),
            fence: underway.fence,
            answer,
            retention: self.route.policy.retention,
            events,
        }
    }

    fn events(&self, underway: &Underway, answer: &Answer) -> Vec<Event> {
        let rendered = self.route.events.render(&Origin {
            record: underway.fence.id,
            scope: &underway.scope,
            attempt: underway.fence.attempt,
            at: now(),
            context: self.context,
            answer,
        });
        if rendered.failed > 0 {
            tracing::warn!(record = %underway.fence.id, failed = rendered.failed, "event templates failed");
            self.metrics.event_errors(rendered.failed);
        }
        rendered.events
    }
}

/// The time that a message tells. It orders nothing and expires nothing: those are the database's.
#[expect(clippy::disallowed_methods, reason = "only shown in messages; nothing is decided by it")]
fn now() -> SystemTime {
    SystemTime::now()
}

fn owed(error: &Error) {
    tracing::warn!(error = %causes(error), "the database did not take an end; the settler goes on");
}

/// An answer that is not kept, for those who waited for it; a stream cannot be shared. Like a replay it leaves `drop`
/// out: a session that was opened for the first caller is nobody else's.
fn shared(first: &First, drop: &[HeaderName]) -> Option<Shared> {
    let FirstBody::Whole(body) = &first.body else { return None };
    let mut headers = end_to_end(&first.head.headers);
    for name in drop {
        headers.remove(name);
    }
    let answer = Answer { status: first.head.status, headers, body: KeptBody::Whole(body.clone()) };
    Some(Shared { record: first.record, answer: SharedAnswer::Released(answer) })
}

/// The headers that go on to a caller.
pub(super) fn end_to_end(headers: &HeaderMap) -> HeaderMap {
    let mut headers = headers.clone();
    headers::strip_hop_by_hop(&mut headers);
    headers::drop_own(&mut headers);
    headers
}

/// Whether an answer's status can have a body at all (RFC 9110, 6.4.1).
pub(super) fn has_body(status: StatusCode) -> bool {
    !status.is_informational()
        && status != StatusCode::NO_CONTENT
        && status != StatusCode::NOT_MODIFIED
}
