//! A leader's talk with the store: propose, and decide on the record that stands in the way.
//!
//! Every answer of the store leads to one [`Decision`]. A record of another owner is judged only by its lease, and only where
//! this replica may judge; a record of this process's own that has no flight here is `unknown`. A statement whose
//! end is not known is never taken for undone.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::attempt::HeldRecord;
use super::cache::Replay;
use super::flight::{Leader, Progress, SingleFlight, Undo};
use super::retrier::PendingWrite;
use super::vocabulary::{KeyedRequest, Refusal, Unreserved};
use crate::backoff::Backoff;
use crate::gateway::settle::Stored;
use crate::record::{Attempt, Caller, Fence, Fingerprint, OwnerId, Record, RecordId, State};
use crate::route::{Lookup, OnUnknown};
use crate::store::{Changed, Error, LookupTrigger, Proposal, Reserved, Takeover};
use crate::telemetry::{self, causes};

/// Pauses between looks at a record that another replica works on.
pub(super) const POLLS: Backoff = Backoff::new(POLL_FIRST, Duration::from_millis(500));
pub(super) const POLL_FIRST: Duration = Duration::from_millis(20);

/// A record in progress that stands in the way.
struct RunningRecord {
    fence: Fence,
    fingerprint: Fingerprint,
    caller: Option<Caller>,
    /// Whether it is another caller's, where that counts.
    other_caller: bool,
}

/// What the leader does next.
pub(super) enum Decision {
    /// It holds the reservation.
    Held(HeldRecord),
    /// It holds the record, to ask the upstream about it; with what was kept of the request.
    LookUp { held: HeldRecord, lookup: Arc<Lookup>, context: Option<Bytes> },
    /// What it asked the store for may or may not have been committed: how that is undone.
    Doubt(Box<PendingWrite>),
    /// There is an answer.
    Replay(Arc<Replay>),
    /// Nobody knows how the record ended; when more may be known.
    Unknown(RecordId, Option<Duration>),
    /// It tells its caller no.
    Refuse(Refusal),
    /// The row moved on: propose again.
    Again,
    /// Another replica works on the record: look again after a while.
    Wait(RecordId),
}

/// A leader's talk with the store.
pub(super) struct Acquisition<'a> {
    single_flight: &'a SingleFlight,
    request: &'a KeyedRequest,
    leader: &'a mut Leader,
    /// Whether this request has seen the record in progress: then it does not start the next attempt itself.
    saw_running: bool,
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

    /// Proposes a reservation, and decides on what stands in its place.
    pub(super) async fn propose(&mut self) -> Decision {
        if self.single_flight.retrier.spill().is_full()
            || self.single_flight.backlog_is_full(self.request)
        {
            return self.find_only().await;
        }
        let started = Instant::now();
        let proposal = self.proposal();
        let fence = Fence { id: proposal.id, attempt: Attempt::FIRST };
        let owner = proposal.owner;
        let deadline = started + self.single_flight.settings.reserve_timeout;
        self.leader.undo = Some(self.withdrawal(fence));
        let reserved = self.single_flight.store.reserve(proposal, deadline).await;
        self.leader.undo = None;
        self.single_flight.metrics.took(telemetry::Step::Reserve, started.elapsed());
        match reserved {
            Ok(Reserved::Held) => self.held(fence, owner, self.request.fingerprint),
            Ok(Reserved::Exists(record)) => self.decide(*record).await,
            Ok(Reserved::Vanished) => Decision::Again,
            Ok(Reserved::LeaseEnded) => self.await_lease(owner, deadline).await,
            Err(Error::InDoubt(cause)) => {
                if let Some(left_out) = self.single_flight.unreserved.due() {
                    tracing::warn!(%cause, left_out, "a reservation is in doubt");
                }
                self.doubt(self.withdrawal(fence))
            }
            Err(Error::Refused(cause)) => self.not_storable(&*cause),
            Err(error) => self.not_reserved(&error),
        }
    }

    /// Decides on a record that stands, and makes none: while the spill is full, what a new one comes to might be lost, and
    /// while too many events are undelivered it would add to them.
    async fn find_only(&mut self) -> Decision {
        match self.single_flight.store.find(&self.request.scope).await {
            Ok(Some(record)) => self.decide(record).await,
            Ok(None) => self.refusal_now().unwrap_or(Decision::Again),
            Err(error) => self.not_reserved(&error),
        }
    }

    /// The refusal of what may not be begun now. The store is there: this is no reason to go past it.
    fn refusal_now(&self) -> Option<Decision> {
        if self.single_flight.retrier.spill().is_full() {
            tracing::warn!("no reservation is made while the spill is full or cannot be written");
            self.single_flight.retrier.spill().refused();
            return Some(Decision::Refuse(Refusal::StoreUnavailable(Unreserved::Perhaps)));
        }
        if self.single_flight.backlog_is_full(self.request) {
            self.single_flight.metrics.outbox_refused();
            return Some(Decision::Refuse(Refusal::BacklogFull));
        }
        None
    }

    /// The same, for a record that is taken over as it stands. A look-up begins nothing: what it finds is of an attempt that
    /// was begun long ago.
    fn refusal_of(&self, from: Takeover) -> Option<Decision> {
        match from {
            Takeover::Lookup(..) if !self.single_flight.retrier.spill().is_full() => None,
            Takeover::Expired(_) | Takeover::Unknown(_) | Takeover::Lookup(..) => {
                self.refusal_now()
            }
        }
    }

    /// The store did not take the proposal, and never will.
    fn not_reserved(&self, error: &Error) -> Decision {
        let away = matches!(error, Error::Unavailable(_) | Error::Late);
        let unreserved =
            if away && !self.saw_record { Unreserved::Certainly } else { Unreserved::Perhaps };
        self.unavailable(error, unreserved)
    }

    fn unavailable(&self, error: &Error, unreserved: Unreserved) -> Decision {
        if let Some(left_out) = self.single_flight.unreserved.due() {
            tracing::warn!(error = %causes(error), left_out, "no reservation could be made");
        }
        Decision::Refuse(Refusal::StoreUnavailable(unreserved))
    }

    /// The database refuses the data: it never holds them, whoever sends them again.
    fn not_storable(&self, cause: &(dyn std::error::Error + 'static)) -> Decision {
        if let Some(left_out) = self.single_flight.unreserved.due() {
            let (operation, error) = (&self.request.scope.operation, causes(cause));
            tracing::warn!(%operation, error, left_out, "the database refuses to hold a request");
        }
        Decision::Refuse(Refusal::NotStorable)
    }

    /// Looks at the record that another replica works on.
    pub(super) async fn recheck(&mut self) -> Decision {
        match self.single_flight.store.find(&self.request.scope).await {
            Ok(Some(record)) => self.decide(record).await,
            Ok(None) => Decision::Again,
            // The wait goes on: a database that is away for a moment ends no attempt.
            Err(_) => self.running_record().map_or(Decision::Again, Decision::Wait),
        }
    }

    fn running_record(&self) -> Option<RecordId> {
        match *self.leader.flight.progress.borrow() {
            Progress::Running { record, .. } => Some(record),
            Progress::Proposed | Progress::Ended(_) => None,
        }
    }

    fn proposal(&self) -> Proposal {
        Proposal {
            id: RecordId::fresh(),
            scope: self.request.scope.clone(),
            fingerprint: self.request.fingerprint,
            owner: self.single_flight.lease.current().owner,
            caller: self.request.caller.as_ref().map(ToString::to_string),
            context: self.request.context.clone(),
            retention: self.request.retention,
        }
    }

    fn held(&self, fence: Fence, owner: OwnerId, fingerprint: Fingerprint) -> Decision {
        Decision::Held(HeldRecord { fence, fingerprint, owner })
    }

    fn withdrawal(&self, fence: Fence) -> Undo {
        Undo::Withdraw { fence, window: self.single_flight.settings.doubt_window }
    }

    /// How a takeover that may have been committed is undone.
    fn undo_of(&self, from: Takeover, taken: Fence) -> Undo {
        match from {
            Takeover::Expired(_) | Takeover::Unknown(_) => self.withdrawal(taken),
            Takeover::Lookup(fence, ..) => {
                Undo::EndLookup { fence, window: self.single_flight.settings.doubt_window }
            }
        }
    }

    /// What may have been committed is undone by a pending write.
    fn doubt(&self, undo: Undo) -> Decision {
        Decision::Doubt(Box::new(undo.of(self.request.scope.clone())))
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

    /// Decides on a record that stands under the scope.
    async fn decide(&mut self, record: Record) -> Decision {
        self.saw_record = true;
        let fence = record.fence;
        match &record.state {
            State::Completed(_) => self.single_flight.unfinished.forget(&self.request.scope),
            State::InProgress { .. } | State::Unknown => {
                self.single_flight.unfinished.note(&self.request.scope)
            }
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
                let running = RunningRecord { fence, fingerprint, caller, other_caller };
                self.decide_running(running, owner, owner_lives).await
            }
            State::Completed(_) | State::Unknown if other_caller => {
                Decision::Refuse(Refusal::Forbidden { record: fence.id })
            }
            State::Completed(completed) => {
                let completed = *completed;
                Decision::Replay(Arc::new(Replay::from(Stored {
                    fence,
                    fingerprint,
                    caller,
                    completed,
                })))
            }
            State::Unknown => self.decide_unknown(fence, fingerprint).await,
        }
    }

    async fn decide_unknown(&mut self, fence: Fence, fingerprint: Fingerprint) -> Decision {
        if self.saw_running {
            return Decision::Unknown(fence.id, None);
        }
        match &self.request.on_unknown {
            OnUnknown::Hold => Decision::Unknown(fence.id, None),
            OnUnknown::Retry => self.take_over(Takeover::Unknown(fence), fingerprint).await,
            OnUnknown::Lookup(lookup) => self.hold_for_lookup(fence, fingerprint, lookup).await,
        }
    }

    /// Takes the record to ask the upstream about it, once it has been left alone for long enough.
    async fn hold_for_lookup(
        &mut self,
        fence: Fence,
        fingerprint: Fingerprint,
        lookup: &Arc<Lookup>,
    ) -> Decision {
        let delay = lookup.delay;
        let doubt = match self.single_flight.store.unresolved(fence.id).await {
            Ok(Some(doubt)) => doubt,
            Ok(None) => return Decision::Unknown(fence.id, Some(delay.after_lease)),
            Err(error) => return self.unavailable(&error, Unreserved::Perhaps),
        };
        let left = if doubt.orphaned { delay.after_lease } else { delay.after_loss };
        let left = left.saturating_sub(doubt.age);
        if !left.is_zero() {
            return Decision::Unknown(fence.id, Some(left));
        }
        let from = Takeover::Lookup(fence, delay, LookupTrigger::Retry);
        let decision = self.take_over(from, fingerprint).await;
        let Decision::Held(held) = decision else { return decision };
        // What was kept belongs to this attempt, since the record is held under it.
        Decision::LookUp { held, lookup: Arc::clone(lookup), context: doubt.context }
    }

    async fn decide_running(
        &mut self,
        running: RunningRecord,
        owner: OwnerId,
        owner_lives: bool,
    ) -> Decision {
        let RunningRecord { fence, fingerprint, caller, other_caller } = running;
        let scope = &self.request.scope;
        let own = owner == self.single_flight.lease.current().owner;
        if own && self.single_flight.confirmed.completed_it(fence) {
            // The database went back behind it, and it is about to be completed again.
            return Decision::Wait(fence.id);
        }
        let marked = if own {
            // A row of this process without a flight: nobody here knows how far it came.
            self.single_flight.store.mark_unknown(scope, fence).await
        } else if !owner_lives && (self.single_flight.may_judge)() {
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
            Err(error) => self.unavailable(&error, Unreserved::Perhaps),
        }
    }

    pub(super) async fn take_over(&mut self, from: Takeover, fingerprint: Fingerprint) -> Decision {
        if let Some(refused) = self.refusal_of(from) {
            return refused;
        }
        let decision = self.take(from, fingerprint).await;
        self.leader.undo = None;
        decision
    }

    async fn take(&mut self, from: Takeover, fingerprint: Fingerprint) -> Decision {
        let proposal = self.proposal();
        let owner = proposal.owner;
        let taken = match from {
            Takeover::Expired(_) => Fence { id: proposal.id, attempt: Attempt::FIRST },
            Takeover::Unknown(fence) => Fence { id: fence.id, attempt: fence.attempt.next() },
            Takeover::Lookup(fence, ..) => fence,
        };
        let deadline = Instant::now() + self.single_flight.settings.reserve_timeout;
        self.leader.undo = Some(self.undo_of(from, taken));
        let mut doubt = false;
        loop {
            let error = match self.single_flight.store.take_over(proposal.clone(), from).await {
                Ok(Changed::Yes) => return self.held(taken, owner, fingerprint),
                Ok(Changed::No) if doubt => {
                    let held = HeldRecord { fence: taken, fingerprint, owner };
                    return self
                        .read_back(held)
                        .await
                        .unwrap_or_else(|| self.doubt(self.undo_of(from, taken)));
                }
                Ok(Changed::No) => return Decision::Again,
                // The application may be completing it right now.
                Ok(Changed::Locked) if !doubt => return Decision::Wait(taken.id),
                Ok(Changed::Locked) => None,
                Err(error) => Some(error),
            };
            if let Some(Error::InDoubt(cause)) = &error {
                tracing::warn!(%cause, "a takeover is in doubt");
                doubt = true;
            }
            if let Some(error) = error.filter(|_| !doubt) {
                return self.not_taken(from, &error);
            }
            if Instant::now() >= deadline {
                return self.doubt(self.undo_of(from, taken));
            }
            // The same again, until the lost one holds the row no more: what it finds then is the truth.
            tokio::time::sleep(POLL_FIRST).await;
        }
    }

    /// A takeover that the store did not make, for certain.
    fn not_taken(&self, from: Takeover, error: &Error) -> Decision {
        match (error, from) {
            (Error::Refused(cause), Takeover::Expired(_)) => self.not_storable(&**cause),
            (Error::Refused(_), Takeover::Unknown(fence) | Takeover::Lookup(fence, ..)) => {
                // No other attempt can be made, and what became of the one before is as open as it was.
                tracing::warn!(error = %causes(error), "the database refuses to hold another attempt");
                Decision::Unknown(fence.id, None)
            }
            _ => self.unavailable(error, Unreserved::Perhaps),
        }
    }

    /// Whether the takeover that changed nothing did so because it had been committed before; `None`: nobody knows.
    async fn read_back(&self, taken: HeldRecord) -> Option<Decision> {
        match self.single_flight.store.find(&self.request.scope).await {
            Ok(Some(Record { fence, state: State::InProgress { owner: by, .. }, .. }))
                if fence == taken.fence && by == taken.owner =>
            {
                Some(Decision::Held(taken))
            }
            Ok(_) => Some(Decision::Again),
            Err(_) => None,
        }
    }
}
