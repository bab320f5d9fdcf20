//! How a leader acquires the record of its scope: it proposes one, and decides on the one that exists.
//!
//! Every answer of the store leads to one [`Decision`]. What must stay true:
//!
//! - A record of another owner counts as lost only once its lease has run out, and only where this replica may say so. One of
//!   this process's own that has no flight here is lost, too. Lost means `unknown`: the request may have been sent.
//! - A statement whose end is not known is never taken for undone: [`Decision::Doubt`].
//! - An `unknown` record is taken over for another attempt or for a look-up only where its route says so (`takeover`).

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::attempt::HeldRecord;
use super::cache::Replay;
use super::flight::{Leader, Progress};
use super::single_flight::SingleFlight;
use super::undo::{Statement, Undo};
use super::vocabulary::{KeyedRequest, Refusal, Unreserved};
use crate::backoff::Backoff;
use crate::gateway::settle::Stored;
use crate::record::{Attempt, Caller, Fence, Fingerprint, OwnerId, Record, RecordId, State};
use crate::route::Lookup;
use crate::store::{Changed, Error, Reserved, Takeover};
use crate::telemetry;

/// Pauses between looks at a record that another replica works on.
pub(super) const POLLS: Backoff = Backoff::new(POLL_FIRST, Duration::from_millis(500));
pub(super) const POLL_FIRST: Duration = Duration::from_millis(20);

/// What the leader does next.
pub(super) enum Decision {
    /// It holds the reservation.
    Held(HeldRecord),
    /// It holds the record, to ask the upstream about it; with what was kept of the request.
    LookUp { held: HeldRecord, lookup: Arc<Lookup>, context: Option<Bytes> },
    /// What it asked the store for may or may not have been committed: how that is undone.
    Doubt(Undo),
    /// There is an answer.
    Replay(Arc<Replay>),
    /// Nobody knows how the record ended; when more may be known.
    Unknown(RecordId, Option<Duration>),
    /// Its caller is refused.
    Refuse(Refusal),
    /// The row moved on: propose again.
    Again,
    /// Another replica works on the record: look again after a while.
    Wait(RecordId),
}

/// A leader's way to the record.
pub(super) struct Acquisition<'a> {
    pub(super) single_flight: &'a SingleFlight,
    pub(super) request: &'a KeyedRequest,
    pub(super) leader: &'a mut Leader,
    /// Whether this request has seen the record in progress: then it does not start the next attempt itself.
    pub(super) saw_running: bool,
    /// Whether a record was seen under the scope: then the request is not one that nobody has sent before.
    saw_record: bool,
}

impl<'a> Acquisition<'a> {
    pub(super) fn new(
        single_flight: &'a SingleFlight,
        request: &'a KeyedRequest,
        leader: &'a mut Leader,
    ) -> Self {
        Self { single_flight, request, leader, saw_running: false, saw_record: false }
    }

    /// Proposes a reservation, and decides on the record that exists in its place.
    pub(super) async fn propose(&mut self) -> Decision {
        if self.single_flight.is_full(self.request) {
            return self.find_only().await;
        }
        let started = Instant::now();
        let owner = self.single_flight.lease.current().owner;
        let proposal = self.request.proposal(RecordId::fresh(), owner);
        let fence = Fence { id: proposal.id, attempt: Attempt::FIRST };
        let deadline = started + self.single_flight.settings.reserve_timeout;
        self.leader.undo = Some(self.undo(fence, Statement::Reservation));
        let reserved = self.single_flight.store.reserve(proposal, deadline).await;
        self.leader.undo = None;
        self.single_flight.metrics.took(telemetry::Step::Reserve, started.elapsed());
        let error = match reserved {
            Ok(Reserved::Held) => {
                let fingerprint = self.request.fingerprint;
                return Decision::Held(HeldRecord { fence, fingerprint, owner });
            }
            Ok(Reserved::Exists(record)) => return self.decide(*record).await,
            Ok(Reserved::Vanished) => return Decision::Again,
            Ok(Reserved::LeaseEnded) => return self.await_lease(owner, deadline).await,
            Err(error) => error,
        };
        match &error {
            Error::InDoubt(cause) => {
                if let Some(left_out) = self.single_flight.unreserved.due() {
                    tracing::warn!(%cause, left_out, "a reservation is in doubt");
                }
                Decision::Doubt(self.undo(fence, Statement::Reservation))
            }
            Error::Refused(cause) => {
                Decision::Refuse(self.single_flight.not_storable(self.request, &**cause))
            }
            Error::Unavailable(_) | Error::Unreadable(_) | Error::Late => self.not_reserved(&error),
        }
    }

    /// Decides on the record that exists, and makes none, since nothing new may be begun.
    async fn find_only(&mut self) -> Decision {
        match self.single_flight.store.find(&self.request.scope).await {
            Ok(Some(record)) => self.decide(record).await,
            Ok(None) => {
                let refusal = self.single_flight.refuse_if_full(self.request);
                refusal.map_or(Decision::Again, Decision::Refuse)
            }
            Err(error) => self.not_reserved(&error),
        }
    }

    /// The store did not take the proposal, and never will.
    fn not_reserved(&self, error: &Error) -> Decision {
        let away = matches!(error, Error::Unavailable(_) | Error::Late);
        let certain = away && !self.saw_record;
        let unreserved = if certain { Unreserved::Certainly } else { Unreserved::Perhaps };
        Decision::Refuse(self.single_flight.unavailable(error, unreserved))
    }

    /// Looks at the record that another replica works on.
    pub(super) async fn recheck(&mut self) -> Decision {
        match self.single_flight.store.find(&self.request.scope).await {
            Ok(Some(record)) => self.decide(record).await,
            Ok(None) => Decision::Again,
            // The wait goes on: a database that is away for a moment ends no attempt.
            Err(_) => match *self.leader.flight.progress.borrow() {
                Progress::Running { record, .. } => Decision::Wait(record),
                Progress::Proposed | Progress::Ended(_) => Decision::Again,
            },
        }
    }

    /// How a statement of this leader is undone, should it be lost.
    pub(super) fn undo(&self, fence: Fence, of: Statement) -> Undo {
        let window = self.single_flight.settings.doubt_window;
        Undo { scope: self.request.scope.clone(), fence, window, of }
    }

    /// The database has not seen this process's heartbeat in time: waits for the next lease, under a new owner id.
    async fn await_lease(&self, ended: OwnerId, deadline: Instant) -> Decision {
        while self.single_flight.lease.current().owner == ended {
            if Instant::now() >= deadline {
                tracing::warn!(
                    "this replica has no lease: the database does not see its heartbeat"
                );
                return Decision::Refuse(Refusal::StoreUnavailable(Unreserved::Perhaps));
            }
            tokio::time::sleep(POLL_FIRST).await;
        }
        Decision::Again
    }

    /// Decides on the record of the scope.
    async fn decide(&mut self, record: Record) -> Decision {
        self.saw_record = true;
        let fence = record.fence;
        let unfinished = &self.single_flight.flights.unfinished;
        match &record.state {
            State::Completed(_) => unfinished.forget(&self.request.scope),
            State::InProgress { .. } | State::Unknown => unfinished.note(&self.request.scope),
        }
        if let State::Completed(completed) = &record.state
            && completed.time_left.is_zero()
        {
            return self.take_over(Takeover::Expired(fence), self.request.fingerprint).await;
        }
        let other_caller = self.request.is_other_caller(record.caller.as_ref());
        if !other_caller && !record.fingerprint.same_request(&self.request.fingerprint) {
            return Decision::Refuse(Refusal::Mismatch { record: fence.id });
        }
        let (fingerprint, caller) = (record.fingerprint, record.caller);
        match record.state {
            // Running, it may still be released, and then the key is free for everybody.
            State::InProgress { owner, owner_lives } => {
                let owned = (owner, owner_lives);
                self.decide_running(fence, (fingerprint, caller), other_caller, owned).await
            }
            State::Completed(_) | State::Unknown if other_caller => {
                Decision::Refuse(Refusal::Forbidden { record: fence.id })
            }
            State::Completed(completed) => {
                let stored = Stored { fence, fingerprint, caller, completed: *completed };
                Decision::Replay(Arc::new(Replay::from(stored)))
            }
            State::Unknown => self.decide_unknown(fence, fingerprint).await,
        }
    }

    /// Decides on a record in progress: waits for it, or marks it `unknown` where nobody works on it any more.
    async fn decide_running(
        &mut self,
        fence: Fence,
        (fingerprint, caller): (Fingerprint, Option<Caller>),
        other_caller: bool,
        (owner, owner_lives): (OwnerId, bool),
    ) -> Decision {
        let scope = &self.request.scope;
        let own = owner == self.single_flight.lease.current().owner;
        if own && self.single_flight.confirmed.completed_it(fence) {
            // The database went back behind it, and it is about to be completed again.
            return Decision::Wait(fence.id);
        }
        let marked = if own {
            // A row of this process without a flight: nobody here knows how far it came.
            self.single_flight.store.mark_unknown(scope, fence).await
        } else if !owner_lives && (self.single_flight.may_mark_dead)() {
            let marked = self.single_flight.store.mark_dead(Some((scope, fence)), 1).await;
            // It moved on, or somebody's transaction holds it: both are seen after a while.
            marked.map(|marked| if marked > 0 { Changed::Yes } else { Changed::Locked })
        } else {
            self.saw_running = true;
            self.leader.running(fence.id, fingerprint, caller);
            return Decision::Wait(fence.id);
        };
        match marked {
            Ok(Changed::Yes) if other_caller => {
                Decision::Refuse(Refusal::Forbidden { record: fence.id })
            }
            Ok(Changed::Yes) => self.decide_unknown(fence, fingerprint).await,
            Ok(Changed::No) => Decision::Again,
            Ok(Changed::Locked) => Decision::Wait(fence.id),
            Err(error) => {
                Decision::Refuse(self.single_flight.unavailable(&error, Unreserved::Perhaps))
            }
        }
    }
}
