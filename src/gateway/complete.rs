//! From evidence to a durable end: the answer and its events in one transaction, or a release, or `unknown`.
//!
//! What must stay true:
//!
//! - The end is durable before the caller gets a byte of the answer. Where the database does not take an outcome in time
//!   (it has died since the upstream answered, say), the outcome goes to the spill, and the caller gets its answer
//!   ([`Finish::Spilled`]). The retrier goes on trying; should this process die, the next one reads the spill before anything
//!   of this one is marked `unknown`. Where the spill takes it neither, the answer says so ([`Finish::NotStored`]).
//! - Followers get what the store took, and not before it did.
//! - An end that changes no row found its record gone on: completed, at another attempt, or gone. The answer that the record
//!   has now counts for the caller; what the attempt itself came to goes to the audit table, so that it is never dropped.
//! - After a time-out the record is `unknown` before the caller gets its 504. The exchange goes on as a [`LateExchange`];
//!   `late` ends what it brings.
//!
//! An application on the same database may complete the record in its own transaction. Then its answer counts, also where
//! all that was seen from here is a connection that broke.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use tokio::sync::Notify;

use super::evidence::Evidence;
use super::first::{FirstAnswer, FirstBody};
use super::forward::OpenExchange;
use super::reserve::{
    Detached, FlightEnd, InFlight, PendingWrite, Replay, SettledEnd, Shared, SharedAnswer,
    SingleFlight,
};
use super::settle::{End, NotExecuted, Unsettled};
use super::spill::Keeping;
use crate::backoff::Backoff;
use crate::record::outcome::{Class, Failure};
use crate::record::{Attempt, Fence, RecordId};
use crate::route::Route;
use crate::store::{Error, LateEnd};
use crate::telemetry::{Drained, Metrics, Reply, Step, causes};

/// Pauses before a record is looked at again that a transaction of the application holds.
const LOOKS: Backoff = Backoff::new(Duration::from_millis(20), Duration::from_millis(200));

/// How an attempt ended, for the caller that started it.
pub(super) enum Finish {
    /// Kept until then.
    Kept { first: FirstAnswer, expires_at: SystemTime },
    /// Kept in the spill until the store takes it.
    Spilled { first: FirstAnswer },
    /// The upstream answered, and the store has not taken it (yet), or the record had gone on.
    NotStored { first: FirstAnswer, counted: Reply },
    /// The application completed this very attempt itself: this is its answer.
    Recorded(Arc<Replay>),
    /// Somebody else completed the record meanwhile: this is its answer.
    Overtaken(Arc<Replay>),
    /// The upstream was asked, and it had executed an earlier attempt: this is kept.
    Found(Arc<Replay>),
    /// The upstream was asked and did not say, or the store has not taken what it said.
    StillUnknown { record: RecordId },
    /// Known not to have executed: passed on.
    Released { first: FirstAnswer },
    /// Perhaps executed: passed on.
    Unknown { first: FirstAnswer },
    /// No answer.
    Failed { fence: Fence, failure: Failure },
}

/// An attempt that timed out, whose record says so, and the exchange that goes on. Dropping it closes the connection.
pub(super) struct LateExchange {
    pub(super) detached: Detached,
    pub(super) exchange: OpenExchange,
}

/// What completing needs besides the attempt.
pub(super) struct Completer<'a> {
    pub(super) single_flight: &'a SingleFlight,
    pub(super) metrics: &'a Metrics,
    /// Wakes the relay.
    pub(super) wake: &'a Notify,
    pub(super) route: &'a Route,
    /// What the events need of the request.
    pub(super) context: Option<&'a [u8]>,
    /// How long the caller waits for the database.
    pub(super) timeout: Duration,
}

impl Completer<'_> {
    /// Brings an attempt to its end. With it comes the exchange that may still bring an answer.
    pub(super) async fn close(
        &self,
        in_flight: Box<InFlight>,
        evidence: Evidence,
        open_exchange: Option<OpenExchange>,
    ) -> (Finish, Option<LateExchange>) {
        match self.classify(in_flight.fence.id, evidence) {
            Ok((Class::Stored, first)) => (self.complete(in_flight, first).await, None),
            Ok((Class::Released, first)) => (self.release_answered(in_flight, first).await, None),
            Ok((Class::Unknown, first)) => {
                let fence = in_flight.fence;
                let (_, found) = self.mark_unknown(in_flight).await;
                let finish = found.map(|replay| self.finish_stored(fence, replay));
                (finish.unwrap_or(Finish::Unknown { first }), None)
            }
            Err(failure) => self.fail(in_flight, failure, open_exchange).await,
        }
    }

    /// An answer with its class, or why there is none.
    pub(super) fn classify(
        &self,
        record: RecordId,
        evidence: Evidence,
    ) -> Result<(Class, FirstAnswer), Failure> {
        let (head, body) = match evidence {
            Evidence::Answered { head, body, trailers } => {
                (head, FirstBody::Whole { body, trailers })
            }
            Evidence::Large { head, begun, rest } => (head, FirstBody::Streamed { begun, rest }),
            Evidence::Failed(failure) => return Err(failure),
        };
        let class = self.route.outcome.class(head.status, &head.headers);
        Ok((class, FirstAnswer { record, head, body }))
    }

    /// Keeps the answer with its events.
    pub(super) async fn complete(
        &self,
        mut in_flight: Box<InFlight>,
        first: FirstAnswer,
    ) -> Finish {
        let begun = Instant::now();
        let retrier = self.single_flight.retrier();
        let _known = retrier.known();
        let executed = self.executed(&in_flight, first.kept(&self.route.policy.replay_drop), false);
        let end = End::Complete(executed.clone());
        in_flight.set_known_end(end.clone(), FlightEnd::LookAgain);
        let settling = self.settle(&in_flight, &end, &FlightEnd::LookAgain);
        let settled = retrier.until_shutdown(settling).await;
        self.metrics.took(Step::Complete, begun.elapsed());
        let not_stored = |first| Finish::NotStored { first, counted: Reply::Executed };
        match settled {
            Ok(settled) => match self.conclude(in_flight, settled).await {
                (Drained::Completed, Some(replay)) => {
                    Finish::Kept { first, expires_at: replay.expires_at }
                }
                // What was committed and not confirmed is found as a record of this attempt with this very answer.
                (Drained::Already, Some(replay)) if replay.answer == executed.completion.answer => {
                    Finish::Kept { first, expires_at: replay.expires_at }
                }
                (how, Some(found)) => instead(how, found),
                (_, None) => not_stored(first),
            },
            Err(error) => {
                let spilled =
                    self.hand_to_retrier(in_flight, end, FlightEnd::LookAgain, &error).await;
                if spilled && is_promised(&error) {
                    return Finish::Spilled { first };
                }
                not_stored(first)
            }
        }
    }

    /// No complete answer came: the key is free where not one byte was sent, else the record is `unknown`.
    pub(super) async fn fail(
        &self,
        in_flight: Box<InFlight>,
        failure: Failure,
        open_exchange: Option<OpenExchange>,
    ) -> (Finish, Option<LateExchange>) {
        let fence = in_flight.fence;
        let Fence { id: record, attempt } = fence;
        let caller = in_flight.caller.clone();
        let operation = &self.route.operation;
        tracing::warn!(%record, %operation, ?failure, "an attempt ended without an answer");
        let ending = match failure {
            Failure::Broken | Failure::TimedOut => {
                let (detached, found) = self.mark_unknown(in_flight).await;
                let finish = found.map(|replay| self.finish_stored(fence, replay));
                let finish = finish.unwrap_or(Finish::Failed { fence, failure });
                // Only now may the connection be cut: the record says what happened. What the application kept by itself
                // is this attempt's answer, so nothing else is awaited.
                let awaited = !self.route.policy.late_answer.is_zero()
                    && !matches!(finish, Finish::Recorded(_));
                let late = open_exchange
                    .filter(|_| awaited)
                    .map(|exchange| LateExchange { detached, exchange });
                return (finish, late);
            }
            // What is freed of a later attempt is unknown again, and no waiter starts the next one.
            Failure::NothingSent | Failure::LeaseEnded if attempt > Attempt::FIRST => {
                FlightEnd::Unknown(record)
            }
            Failure::NothingSent => {
                let answer = SharedAnswer::Unreachable;
                FlightEnd::Shared(Arc::new(Shared { record, caller, answer }))
            }
            Failure::LeaseEnded => FlightEnd::LookAgain,
        };
        let (how, found) = self.release(in_flight, ending, LateEnd::NotSent).await;
        (found.map_or(Finish::Failed { fence, failure }, |found| instead(how, found)), None)
    }

    /// The upstream did not execute: passes its answer on.
    pub(super) async fn release_answered(
        &self,
        in_flight: Box<InFlight>,
        first: FirstAnswer,
    ) -> Finish {
        let caller = in_flight.caller.clone();
        let share = first.shared(caller, &self.route.policy.replay_drop).map(Arc::new);
        let ending = share.map_or(FlightEnd::LookAgain, FlightEnd::Shared);
        let answer = first.kept(&self.route.policy.replay_drop);
        match self.release(in_flight, ending, LateEnd::Released { answer }).await {
            (how, Some(found)) => instead(how, found),
            (Drained::FencedOff, None) => Finish::NotStored { first, counted: Reply::Released },
            (_, None) => Finish::Released { first },
        }
    }

    /// Frees the attempt; those who waited for it get this ending. With the answer that was found in its place, if any.
    async fn release(
        &self,
        mut in_flight: Box<InFlight>,
        ending: FlightEnd,
        late: LateEnd,
    ) -> (Drained, Option<Arc<Replay>>) {
        in_flight.begin_release();
        let (scope, fence) = (in_flight.scope.clone(), in_flight.fence);
        let retrier = self.single_flight.retrier();
        let _known = retrier.known();
        let end = End::Release(NotExecuted { scope, fence, late: Some(late), tried: false });
        in_flight.set_known_end(end.clone(), ending.clone());
        match retrier.until_shutdown(self.settle(&in_flight, &end, &ending)).await {
            Ok(settled) => self.conclude(in_flight, settled).await,
            Err(error) => {
                // Before the caller is answered: what is known not to have executed is known after a crash, too.
                self.hand_to_retrier(in_flight, end, ending, &error).await;
                (Drained::Released, None)
            }
        }
    }

    /// Marks the record `unknown`: what comes now is late. With the answer, where somebody has completed it already.
    pub(super) async fn mark_unknown(
        &self,
        in_flight: Box<InFlight>,
    ) -> (Detached, Option<Arc<Replay>>) {
        let (scope, fence) = (in_flight.scope.clone(), in_flight.fence);
        let end = End::Unknown { scope, fence, row: in_flight.row().cloned() };
        match self.once_unlocked(&in_flight, &end).await {
            Ok(SettledEnd { ending, .. }) => {
                let replay = ending.kept();
                (in_flight.detach(ending), replay)
            }
            Err(error) => {
                log_pending(&error);
                (in_flight.detach_pending(PendingWrite::of(end)), None)
            }
        }
    }

    /// Settles an end once no transaction of the application holds its record any more, for as long as the caller waits.
    async fn once_unlocked(
        &self,
        in_flight: &InFlight,
        end: &End,
    ) -> Result<SettledEnd, Unsettled> {
        let begun = Instant::now();
        let mut looks = LOOKS;
        loop {
            match self.settle(in_flight, end, &FlightEnd::LookAgain).await {
                Err(Unsettled::Locked) if begun.elapsed() + looks.longest() < self.timeout => {}
                settled => return settled,
            }
            tokio::time::sleep(looks.pause()).await;
        }
    }

    /// The first try to write the end of an attempt, for as long as the caller waits.
    pub(super) async fn settle(
        &self,
        in_flight: &InFlight,
        end: &End,
        ending: &FlightEnd,
    ) -> Result<SettledEnd, Unsettled> {
        let deadline = Instant::now() + self.timeout;
        self.single_flight.retrier().settle(end, ending, deadline, || in_flight.was_held()).await
    }

    /// An end is settled: the flight is over, and what is late is noted. With the answer that counts.
    pub(super) async fn conclude(
        &self,
        in_flight: Box<InFlight>,
        SettledEnd { ending, how, late }: SettledEnd,
    ) -> (Drained, Option<Arc<Replay>>) {
        let replay = ending.kept();
        in_flight.settled(ending);
        if let Some(late) = late {
            self.single_flight.retrier().note(late).await;
        }
        if how != Drained::Released {
            self.wake.notify_one();
        }
        (how, replay)
    }

    /// The store has not taken an end: what is known goes to the spill, a synced file, before the caller is answered. The
    /// retrier writes it to the store later, or the next process does (`spill::drain`). Whether it is durable now.
    pub(super) async fn hand_to_retrier(
        &self,
        in_flight: Box<InFlight>,
        end: End,
        ending: FlightEnd,
        error: &Unsettled,
    ) -> bool {
        log_pending(error);
        let keeping = self.single_flight.retrier().keep(&end).await;
        let spilled = matches!(keeping, Some(Keeping::Spilled(_)));
        in_flight.leave_pending(PendingWrite::End { end: Box::new(end.again()), ending, keeping });
        spilled
    }

    /// The answer of a record that somebody else completed.
    fn finish_stored(&self, attempt: Fence, replay: Arc<Replay>) -> Finish {
        self.wake.notify_one();
        if replay.fence == attempt { Finish::Recorded(replay) } else { Finish::Overtaken(replay) }
    }
}

/// For the caller of an attempt in whose place this answer was found.
fn instead(how: Drained, found: Arc<Replay>) -> Finish {
    match how {
        Drained::Already => Finish::Recorded(found),
        Drained::Completed | Drained::Released | Drained::FencedOff | Drained::Refused => {
            Finish::Overtaken(found)
        }
    }
}

/// Whether an outcome that is in the spill will be the record's. Not so where somebody's transaction is about to complete its
/// record, or has done so perhaps; and what is refused in every form becomes unknown.
fn is_promised(error: &Unsettled) -> bool {
    matches!(error, Unsettled::Untaken(error) if !matches!(error, Error::Refused(_)))
}

fn log_pending(error: &Unsettled) {
    tracing::warn!(error = %causes(error), "the database did not take an end; the retrier goes on");
}
