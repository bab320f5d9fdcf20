//! From evidence to a durable end: the answer and its events in one transaction, or a release, or `unknown`.
//!
//! The end is durable before the caller gets a byte of the answer. Where the database does not take an outcome in time,
//! the spill does ([`Finish::Spilled`]) and the settler goes on trying; where the spill cannot either, the caller is told
//! ([`Finish::NotStored`]). Waiters are woken with what the store took.
//!
//! An end that changes no row found its record gone on: completed, at another attempt, or gone. What stands is read and
//! counts for the caller; what the attempt itself came to goes to the audit table, so that it is never dropped.
//!
//! After a time-out the record is `unknown` and the caller is told; the exchange goes on as a [`Late`] one, and what it
//! brings comes back here ([`Closing::close_late`]).
//!
//! An application on the same database may complete the record in its own transaction. Then its answer is what counts,
//! also where all that was seen from here is a connection that broke.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use bytes::Bytes;
use http::{HeaderMap, HeaderName, StatusCode, response};
use tokio::sync::Notify;

use super::forward::{Evidence, ForOrigin, GivenUp, Unasked};
use super::headers;
use super::notes;
use super::reserve::{
    Debt, Desk, Ending, Known, Parted, Replay, Shared, SharedAnswer, Standing, Underway,
    replay_of_completion,
};
use super::spill::Keeping;
use super::upstream;
use crate::record::event::{Event, Origin};
use crate::record::outcome::{Class, Failure};
use crate::record::{Answer, Attempt, Caller, Fence, KeptBody, RecordId, Spelling};
use crate::route::Route;
use crate::store::{
    Changed, Completion, Error, LateEnd, LateOutcome, Settled, Store, Written,
    complete_in_some_form,
};
use crate::telemetry::{LateAnswer, Metrics, Reply, Step, causes};

/// First pause before a record is looked at again that a transaction of the application holds; it doubles up to
/// [`LOOK_MAX`].
const LOOK_FIRST: Duration = Duration::from_millis(20);
const LOOK_MAX: Duration = Duration::from_millis(200);

/// What became of an attempt whose outcome was not seen.
enum Lost {
    /// It is `unknown`, or will be.
    Parted(Parted),
    /// There is an answer in the store.
    Stands(Parted, Arc<Replay>),
}

/// A body on its way to the first caller.
pub(super) enum FirstBody {
    /// All of it, and what came behind it.
    Whole { body: Bytes, trailers: HeaderMap },
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
    /// Kept in the spill until the store takes it.
    Spilled { first: First },
    /// The upstream answered, and the store has not taken it (yet), or the record had gone on.
    NotStored { first: First, counted: Reply },
    /// The application completed this very attempt itself: this is its answer.
    Recorded(Arc<Replay>),
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

/// An attempt that timed out, whose record says so, and the exchange that goes on. Dropping it closes the connection.
pub(super) struct Late {
    pub(super) parted: Parted,
    pub(super) exchange: GivenUp,
}

/// What became of an attempt that is to be freed.
enum Freed {
    /// It is free, or will be: the settler has it.
    Done,
    /// Its record is completed: this is what counts.
    Over(Box<Finish>),
    /// Its record had gone on, and has no answer.
    Moved,
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
    /// Brings an attempt to its end. With it comes the exchange that may still bring an answer.
    pub(super) async fn close(
        &self,
        underway: Box<Underway>,
        evidence: Evidence,
        given_up: Option<GivenUp>,
    ) -> (Finish, Option<Late>) {
        match self.classify(underway.fence.id, evidence) {
            Ok((Class::Stored, first)) => (self.keep(underway, first).await, None),
            Ok((Class::Released, first)) => (self.free(underway, first).await, None),
            Ok((Class::Unknown, first)) => {
                let fence = underway.fence;
                let finish = match self.lose(underway).await {
                    Lost::Stands(_, replay) => self.found(fence, replay),
                    Lost::Parted(_) => Finish::Unknown { first },
                };
                (finish, None)
            }
            Err(failure) => self.fail(underway, failure, given_up).await,
        }
    }

    /// Brings in what came of an exchange after its time-out. The record is `unknown` by now, or has gone on.
    pub(super) async fn close_late(&self, parted: Parted, evidence: Evidence) -> LateAnswer {
        let Fence { id: record, attempt } = parted.fence();
        let finish = match self.classify(record, evidence) {
            Ok((Class::Stored, first)) => self.keep(self.desk.resume(parted), first).await,
            Ok((Class::Released, first)) => self.free(self.desk.resume(parted), first).await,
            Ok((Class::Unknown, _)) => return LateAnswer::Unknown,
            Err(failure) if failure.class() == Class::Released => {
                self.fail(self.desk.resume(parted), failure, None).await.0
            }
            Err(_) => return LateAnswer::Missed,
        };
        let result = match finish {
            Finish::Kept { .. } | Finish::Recorded(_) => LateAnswer::Completed,
            Finish::Released { .. } | Finish::Failed { .. } => LateAnswer::Released,
            // In the spill it is kept, and not in the database yet.
            Finish::Spilled { .. }
            | Finish::NotStored { .. }
            | Finish::Overtaken(_)
            | Finish::Found(_) => LateAnswer::NotStored,
            Finish::Unknown { .. } | Finish::StillUnknown { .. } => LateAnswer::Unknown,
        };
        let attempt = attempt.number();
        tracing::info!(%record, attempt, result = result.as_str(), "a late answer came");
        result
    }

    /// An answer with its class, or why there is none.
    fn classify(&self, record: RecordId, evidence: Evidence) -> Result<(Class, First), Failure> {
        let (head, body) = match evidence {
            Evidence::Answered { head, body, trailers } => {
                (head, FirstBody::Whole { body, trailers })
            }
            Evidence::Large { head, begun, rest } => (head, FirstBody::Streamed { begun, rest }),
            Evidence::Failed(failure) => return Err(failure),
        };
        let class = self.route.outcome.class(head.status, &head.headers);
        Ok((class, First { record, head, body }))
    }

    async fn fail(
        &self,
        underway: Box<Underway>,
        failure: Failure,
        given_up: Option<GivenUp>,
    ) -> (Finish, Option<Late>) {
        let fence = underway.fence;
        let Fence { id: record, attempt } = fence;
        let caller = underway.caller.clone();
        let operation = &self.route.operation;
        tracing::warn!(%record, %operation, ?failure, "an attempt ended without an answer");
        let ending = match failure {
            Failure::Broken | Failure::TimedOut => {
                let (parted, finish) = match self.lose(underway).await {
                    Lost::Parted(parted) => (parted, Finish::Failed { fence, failure }),
                    Lost::Stands(parted, replay) => (parted, self.found(fence, replay)),
                };
                // Only now may the connection be cut: the record says what happened. What the application kept by itself
                // is this attempt's answer, so nothing else is awaited.
                let awaited = !self.route.policy.late_answer.is_zero()
                    && !matches!(finish, Finish::Recorded(_));
                let late = given_up.filter(|_| awaited).map(|exchange| Late { parted, exchange });
                return (finish, late);
            }
            // What is freed of a later attempt is unknown again, and no waiter starts the next one.
            Failure::NothingSent | Failure::LeaseEnded if attempt > Attempt::FIRST => {
                Ending::Unknown(record)
            }
            Failure::NothingSent => {
                let answer = SharedAnswer::Unreachable;
                Ending::Shared(Arc::new(Shared { record, caller, answer }))
            }
            Failure::LeaseEnded => Ending::LookAgain,
        };
        let finish = match self.release(underway, ending, LateEnd::NotSent).await {
            Freed::Over(finish) => *finish,
            Freed::Done | Freed::Moved => Finish::Failed { fence, failure },
        };
        (finish, None)
    }

    /// The upstream did not execute: passes its answer on.
    async fn free(&self, underway: Box<Underway>, first: First) -> Finish {
        let caller = underway.caller.clone();
        let share = shared(&first, caller, &self.route.policy.replay_drop).map(Arc::new);
        let ending = share.map_or(Ending::LookAgain, Ending::Shared);
        let answer = self.answer(&first);
        match self.release(underway, ending, LateEnd::Released { answer }).await {
            Freed::Done => Finish::Released { first },
            Freed::Over(finish) => *finish,
            Freed::Moved => Finish::NotStored { first, counted: Reply::Released },
        }
    }

    /// Frees the attempt; those who waited for it get this ending.
    async fn release(&self, mut underway: Box<Underway>, ending: Ending, end: LateEnd) -> Freed {
        underway.frees();
        let (scope, fence) = (underway.scope.clone(), underway.fence);
        let late = LateOutcome { scope: scope.clone(), fence, end };
        underway.knows(Known::Released(ending.clone()));
        let released = self.store.release(&scope, fence).await;
        underway.answered_for();
        let error = match released {
            Ok(Changed::Yes) => {
                underway.settled(ending);
                return Freed::Done;
            }
            Ok(Changed::No) => match self.desk.standing(&scope, fence.id).await {
                Ok(standing) => {
                    let overtaken = self.overtaken(underway, standing, late).await;
                    return overtaken.map_or(Freed::Moved, |finish| Freed::Over(Box::new(finish)));
                }
                Err(error) => error,
            },
            Ok(Changed::Locked) => locked(),
            Err(error) => error,
        };
        owed(&error);
        // Before the caller is told: what is known not to have executed is known after a crash, too.
        let keeping = self.desk.settler().spill().keep_freed(&late, false).await;
        underway.owe(Debt::Release { scope, fence, ending, late: Some((Box::new(late), keeping)) });
        Freed::Done
    }

    /// Keeps what a question found, with the events, under the fence that was held for it.
    pub(super) async fn adopt(&self, underway: Box<Underway>, answer: Answer) -> Finish {
        let begun = Instant::now();
        let record = underway.fence.id;
        let completion = Arc::new(self.completion_of(&underway, answer));
        let completing = complete_in_some_form(self.store, &completion, begun + self.timeout);
        let error = match completing.await {
            Ok(Written { settled: Settled::Done { expires_at }, completion: written }) => {
                let ends = begun + completion.retention;
                self.desk.completed(&underway, &written, ends);
                drop(completion);
                let answer = Arc::unwrap_or_clone(written).answer;
                let replay = replay_of_completion(&underway, answer, expires_at, ends);
                return self.learnt(underway, Arc::new(replay));
            }
            Ok(Written { settled: Settled::Fenced, .. }) => {
                match self.desk.standing(&completion.scope, record).await {
                    Ok(Standing::Completed(replay)) => return self.learnt(underway, replay),
                    // It was somebody's question, not an execution: there is nothing to note.
                    Ok(Standing::Open | Standing::Gone) => {
                        underway.settled(Ending::LookAgain);
                        return Finish::StillUnknown { record };
                    }
                    Err(error) => error,
                }
            }
            Ok(Written { settled: Settled::Locked, .. }) => locked(),
            Err(error) => error,
        };
        self.spill(underway, completion, &error).await;
        Finish::StillUnknown { record }
    }

    fn learnt(&self, underway: Box<Underway>, replay: Arc<Replay>) -> Finish {
        self.desk.remember(&underway.scope, &replay);
        underway.settled(Ending::Kept(Arc::clone(&replay)));
        self.wake.notify_one();
        Finish::Found(replay)
    }

    /// Ends a question that brought nothing: unknown again, unless the attempt was completed meanwhile.
    pub(super) async fn put_back(&self, underway: Box<Underway>) -> Finish {
        let record = underway.fence.id;
        match self.lose(underway).await {
            Lost::Parted(_) => Finish::StillUnknown { record },
            Lost::Stands(_, replay) => Finish::Found(replay),
        }
    }

    /// Marks the record `unknown`: what comes now is late, unless it is completed already, whoever did it.
    async fn lose(&self, underway: Box<Underway>) -> Lost {
        let (scope, fence) = (underway.scope.clone(), underway.fence);
        let error = match self.mark_unknown(&underway).await {
            Ok(Changed::Yes) => return Lost::Parted(underway.part(Ending::Unknown(fence.id))),
            Ok(Changed::No) => {
                let Ok(Standing::Completed(replay)) = self.desk.standing(&scope, fence.id).await
                else {
                    return Lost::Parted(underway.part(Ending::Unknown(fence.id)));
                };
                self.desk.remember(&scope, &replay);
                let parted = underway.part(Ending::Kept(Arc::clone(&replay)));
                return Lost::Stands(parted, replay);
            }
            Ok(Changed::Locked) => locked(),
            Err(error) => error,
        };
        owed(&error);
        let open = underway.open().cloned();
        Lost::Parted(underway.part_owing(Debt::Unknown { scope, fence, open }))
    }

    /// Marks the record once no transaction of the application holds it any more, for as long as the caller waits.
    async fn mark_unknown(&self, underway: &Underway) -> Result<Changed, Error> {
        let begun = Instant::now();
        let mut pause = LOOK_FIRST;
        loop {
            match self.desk.settler().lose(&underway.scope, underway.fence, underway.open()).await?
            {
                Changed::Locked if begun.elapsed() + pause < self.timeout => {}
                changed @ (Changed::Yes | Changed::No | Changed::Locked) => return Ok(changed),
            }
            tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
            pause = (pause * 2).min(LOOK_MAX);
        }
    }

    /// The answer that stands for an attempt that did not write it from here.
    fn found(&self, attempt: Fence, replay: Arc<Replay>) -> Finish {
        self.wake.notify_one();
        if replay.fence == attempt { Finish::Recorded(replay) } else { Finish::Overtaken(replay) }
    }

    /// Keeps the answer with its events.
    async fn keep(&self, mut underway: Box<Underway>, first: First) -> Finish {
        let begun = Instant::now();
        let settler = self.desk.settler();
        let _known = settler.known();
        let completion = Arc::new(self.completion_of(&underway, self.answer(&first)));
        underway.knows(Known::Executed(Arc::clone(&completion)));
        let completing = settler.write(&completion, underway.open(), begun + self.timeout);
        let settled = settler.before_the_end(completing).await;
        underway.answered_for();
        self.metrics.took(Step::Complete, begun.elapsed());
        let error = match settled {
            Ok(Written { settled: Settled::Done { expires_at }, completion: written }) => {
                let ends = begun + completion.retention;
                self.desk.completed(&underway, &written, ends);
                drop(completion);
                let Completion { scope, answer, .. } = Arc::unwrap_or_clone(written);
                let replay = replay_of_completion(&underway, answer, expires_at, ends);
                let replay = Arc::new(replay);
                self.desk.remember(&scope, &replay);
                underway.settled(Ending::Kept(replay));
                self.wake.notify_one();
                return Finish::Kept { first, expires_at };
            }
            Ok(Written { settled: Settled::Fenced, .. }) => {
                let standing = self.desk.standing(&completion.scope, completion.fence.id);
                match settler.before_the_end(standing).await {
                    Ok(standing) => {
                        return self.stands(underway, standing, completion, first).await;
                    }
                    // Perhaps it is stored already, perhaps somebody else has the record: neither is promised.
                    Err(error) => {
                        self.spill(underway, completion, &error).await;
                        return Finish::NotStored { first, counted: Reply::Executed };
                    }
                }
            }
            // What that transaction commits will be the answer, so this one is not promised.
            Ok(Written { settled: Settled::Locked, .. }) => {
                self.spill(underway, completion, &locked()).await;
                return Finish::NotStored { first, counted: Reply::Executed };
            }
            Err(error) => error,
        };
        let spilled = self.spill(underway, completion, &error).await;
        // What is refused in every form becomes unknown, with its answer in the audit table: nothing is promised of it.
        if spilled && !matches!(error, Error::Refused(_)) {
            return Finish::Spilled { first };
        }
        Finish::NotStored { first, counted: Reply::Executed }
    }

    /// Keeps an outcome that the store did not take: in the spill before the caller is answered, and as a debt. Whether
    /// it is durable now.
    async fn spill(
        &self,
        underway: Box<Underway>,
        completion: Arc<Completion>,
        error: &Error,
    ) -> bool {
        owed(error);
        let (fingerprint, caller) = (underway.fingerprint, underway.caller.clone());
        let keeping = self.desk.settler().spill().keep(&completion, fingerprint).await;
        let spilled = matches!(keeping, Keeping::Spilled(_));
        let open = underway.open().cloned();
        underway.owe(Debt::Complete { completion, fingerprint, caller, open, keeping });
        spilled
    }

    /// The completion changed no row: what stands is what counts.
    async fn stands(
        &self,
        underway: Box<Underway>,
        standing: Standing,
        completion: Arc<Completion>,
        first: First,
    ) -> Finish {
        let late = LateOutcome::from(&*completion);
        let Some(finish) = self.overtaken(underway, standing, late).await else {
            return Finish::NotStored { first, counted: Reply::Executed };
        };
        // What was committed and not confirmed is found as a record of this attempt with this very answer.
        if let Finish::Recorded(replay) = &finish
            && replay.answer == completion.answer
        {
            return Finish::Kept { first, expires_at: replay.expires_at };
        }
        finish
    }

    /// The record is no longer at this attempt, or is completed: how it ends for the caller, where there is an answer. What
    /// the attempt itself came to is noted, unless that is what stands.
    async fn overtaken(
        &self,
        underway: Box<Underway>,
        standing: Standing,
        late: LateOutcome,
    ) -> Option<Finish> {
        let was_held = underway.was_held();
        let replay = match standing {
            Standing::Completed(replay) => {
                self.desk.remember(&late.scope, &replay);
                underway.settled(Ending::Kept(Arc::clone(&replay)));
                Some(replay)
            }
            Standing::Open | Standing::Gone => {
                underway.settled(Ending::LookAgain);
                None
            }
        };
        // The application's own answer is this attempt's, whatever it says afterwards in time. A look-up's is not.
        let stands = replay.as_ref().filter(|replay| replay.fence == late.fence);
        if stands.is_some_and(|replay| was_held || late.is(&replay.answer)) {
            self.wake.notify_one();
            return replay.map(Finish::Recorded);
        }
        self.desk.settler().note(late).await;
        self.wake.notify_one();
        replay.map(Finish::Overtaken)
    }

    /// The answer as far as the route keeps it.
    fn answer(&self, first: &First) -> Answer {
        let drop = &self.route.policy.replay_drop;
        let mut headers = headers::kept(&first.head.headers, drop);
        let body = match &first.body {
            FirstBody::Whole { body, trailers } => {
                note(&mut headers, first, &headers::kept(trailers, drop));
                KeptBody::Whole(body.clone())
            }
            FirstBody::Streamed { .. } => KeptBody::NotRetained,
        };
        let spelling = spelling_of(&headers, &first.head);
        Answer { status: first.head.status, headers, spelling, body }
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

/// Somebody's transaction holds the record.
fn locked() -> Error {
    Error::Unavailable("another transaction holds the record".into())
}

fn owed(error: &Error) {
    tracing::warn!(error = %causes(error), "the database did not take an end; the settler goes on");
}

/// An answer that is not kept, for those who waited for it; a stream cannot be shared. Like a replay it leaves `drop`
/// out: a session that was opened for the first caller is nobody else's.
fn shared(first: &First, caller: Option<Caller>, drop: &[HeaderName]) -> Option<Shared> {
    let FirstBody::Whole { body, trailers } = &first.body else { return None };
    let without = |mut headers: HeaderMap| {
        for name in drop {
            headers.remove(name);
        }
        headers
    };
    let mut headers = without(without_hops(first.head.headers.clone()));
    note(&mut headers, first, &without(trailers.clone()));
    let (status, spelling) = (first.head.status, spelling_of(&headers, &first.head));
    let answer = Answer { status, headers, spelling, body: KeptBody::Whole(body.clone()) };
    Some(Shared { record: first.record, caller, answer: SharedAnswer::Released(answer) })
}

/// Notes among the headers that are kept what a replay needs besides.
fn note(headers: &mut HeaderMap, first: &First, trailers: &HeaderMap) {
    notes::keep_trailers(headers, trailers);
    if first.head.extensions.get::<Unasked>().is_some() {
        notes::keep_unasked(headers);
    }
    if let Some(ForOrigin(origin)) = first.head.extensions.get() {
        notes::keep_origin(headers, origin.as_ref());
    }
}

/// How the upstream spelled these headers of its answer.
fn spelling_of(headers: &HeaderMap, head: &response::Parts) -> Spelling {
    let sent = head.extensions.get::<upstream::SentNames>();
    sent.map_or_else(Spelling::default, |sent| Spelling::of(headers, sent.names()))
}

/// Of an answer's headers those that go on to a caller.
pub(super) fn without_hops(mut headers: HeaderMap) -> HeaderMap {
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
