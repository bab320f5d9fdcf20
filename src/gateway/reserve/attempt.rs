//! The life of an attempt, as the only values by which it can be acted on: a [`Reservation`] is used up by sending, what is
//! [`InFlight`] must be settled, and one that has [`Detached`] has an answer that may still come.

use std::collections::hash_map;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::flight::{Leader, Progress, Sending, SingleFlight};
use super::retrier::{PendingWrite, Retrier};
use super::vocabulary::{FlightEnd, KeyedRequest};
use crate::gateway::budget::AnswerPermit;
use crate::gateway::settle::{End, NotExecuted};
use crate::record::{Caller, Fence, Fingerprint, LeaseView, OwnerId, Scope};
use crate::store::Proposal;

/// A row that is this process's own.
#[derive(Clone, Copy)]
pub(super) struct HeldRecord {
    pub(super) fence: Fence,
    pub(super) fingerprint: Fingerprint,
    pub(super) owner: OwnerId,
}

/// A committed reservation: the right to send one request. Made in this folder only, used up by sending.
pub(in crate::gateway) struct Reservation(Box<InFlight>);

/// An attempt whose record says `unknown`, or will: its flight is over, and its answer may still come.
pub(in crate::gateway) struct Detached(Box<InFlight>);

impl Reservation {
    /// Of a record that is held for this request, under the leader of its scope.
    pub(super) fn new(
        held: &HeldRecord,
        request: &KeyedRequest,
        leader: Leader,
        lease: LeaseView,
        retrier: Arc<Retrier>,
    ) -> Self {
        leader.running(held.fence.id, held.fingerprint, request.caller.clone());
        let row = Arc::new(Proposal {
            id: held.fence.id,
            scope: request.scope.clone(),
            fingerprint: held.fingerprint,
            owner: held.owner,
            caller: request.caller.as_ref().map(ToString::to_string),
            context: request.context.clone(),
            retention: request.retention,
        });
        leader.executes(held.fence, Some(&row));
        Self(Box::new(InFlight {
            row: Some(row),
            scope: request.scope.clone(),
            fence: held.fence,
            fingerprint: held.fingerprint,
            caller: request.caller.clone(),
            owner: held.owner,
            lease,
            sending: leader.sending(),
            known: None,
            raising: None,
            timing: Timing::InTime,
            leader: Some(leader),
            retrier,
        }))
    }

    /// What holds the record for a look-up: as good as sent, since an earlier process may have done so under this attempt.
    pub(super) fn in_doubt(self) -> Box<InFlight> {
        let mut in_flight = self.0;
        in_flight.sending.may_begin();
        in_flight.set_row(None);
        in_flight
    }

    pub(in crate::gateway) fn fence(&self) -> Fence {
        self.0.fence
    }

    /// Uses the reservation up: the holder of what comes back sends the request, once.
    pub(in crate::gateway) fn begin(self) -> Box<InFlight> {
        self.0
    }
}

impl Detached {
    pub(in crate::gateway) fn fence(&self) -> Fence {
        self.0.fence
    }

    /// The attempt whose late answer has come.
    pub(super) fn answered(self) -> Box<InFlight> {
        self.0
    }
}

/// When an attempt is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Timing {
    /// While its record is in progress for it.
    InTime,
    /// After its record was given up.
    Late,
}

/// An attempt whose request has been handed to the network. It must be settled; see [`Retrier`].
pub(in crate::gateway) struct InFlight {
    pub(in crate::gateway) scope: Scope,
    pub(in crate::gateway) fence: Fence,
    pub(in crate::gateway) fingerprint: Fingerprint,
    pub(in crate::gateway) caller: Option<Caller>,
    pub(super) owner: OwnerId,
    lease: LeaseView,
    sending: Sending,
    /// The end that is known, and that the store is being asked to take: a pending write, should this be dropped meanwhile.
    known: Option<(End, FlightEnd)>,
    /// The next attempt is being written in its place; for how long a lost session may still commit that.
    raising: Option<Duration>,
    timing: Timing,
    /// What its row says, for the case that the database forgets it. None: it is asked about, and others made its row.
    row: Option<Arc<Proposal>>,
    /// None: it is detached, and somebody else works on its scope.
    leader: Option<Leader>,
    retrier: Arc<Retrier>,
}

impl InFlight {
    /// The check before the first byte: this process's lease is certain. From a "yes" on, the attempt counts as sent.
    pub(in crate::gateway) fn may_write(&self) -> impl Fn() -> bool + Send + Sync + 'static {
        let (lease, owner, sending) = (self.lease.clone(), self.owner, self.sending.clone());
        move || {
            let held = lease.holds(owner, Instant::now());
            if held {
                sending.may_begin();
            }
            held
        }
    }

    /// Keeps the answer's permit until the store has taken the end.
    pub(in crate::gateway) fn hold(&mut self, answer_permit: Option<AnswerPermit>) {
        if let Some(leader) = &mut self.leader {
            leader.answer_permit = answer_permit;
        }
    }

    /// Whether nobody but the application itself can have completed this very attempt: its record was in the hands of this
    /// process all the while. Else somebody may have asked the upstream about it.
    pub(in crate::gateway) fn was_held(&self) -> bool {
        self.timing == Timing::InTime && self.lease.holds(self.owner, Instant::now())
    }

    /// What its row says, while it is in progress for this attempt as far as this process knows.
    pub(in crate::gateway) fn row(&self) -> Option<&Arc<Proposal>> {
        self.row.as_ref().filter(|_| self.timing == Timing::InTime)
    }

    /// It is about to be freed: from here on its row may be gone, and is not brought back.
    pub(in crate::gateway) fn begin_release(&mut self) {
        if self.timing == Timing::Late {
            // That nobody knew how it ended is remembered.
            self.retrier.forget(self.fence.id);
        }
        self.set_row(None);
    }

    fn set_row(&mut self, row: Option<Arc<Proposal>>) {
        if let Some(leader) = &self.leader {
            leader.executes(self.fence, row.as_ref());
        }
        self.row = row;
    }

    /// It leads its scope again.
    pub(super) fn leads(&mut self, leader: Leader) {
        self.leader = Some(leader);
    }

    /// Whether a late answer of this attempt, or of one before it, has come to this process meanwhile.
    pub(super) fn is_answered(&self) -> bool {
        self.leader.as_ref().is_none_or(|leader| leader.flight.answered.load(Ordering::SeqCst))
    }

    /// The next attempt is about to be written in this one's place: dropped from here on, that is taken back.
    /// `window`: for how long a lost session may still commit it.
    pub(super) fn raise(&mut self, window: Duration) {
        self.raising = Some(window);
    }

    /// The next attempt was not written.
    pub(super) fn not_raised(&mut self) {
        self.raising = None;
    }

    /// The record is at the next attempt, of which nothing has been sent, and says this now.
    pub(super) fn raised(mut self: Box<Self>, row: Arc<Proposal>) -> Reservation {
        self.fence.attempt = self.fence.attempt.next();
        self.raising = None;
        self.set_row(Some(row));
        self.sending = Sending::default();
        Reservation(self)
    }

    /// Whether the first byte may have been written.
    pub(in crate::gateway) fn sent(&self) -> bool {
        self.sending.has_begun()
    }

    /// The end is known, with what those who wait get where it is released. Until it is settled or
    /// pending, dropping this makes it a pending write.
    pub(in crate::gateway) fn set_known_end(&mut self, end: End, ending: FlightEnd) {
        self.known = Some((end.again(), ending));
    }

    /// The store has taken the end: the flight is over, its followers learn the end.
    pub(in crate::gateway) fn settled(mut self: Box<Self>, ending: FlightEnd) {
        if let Some(leader) = self.leader.take() {
            leader.end(ending);
        }
    }

    /// The store did not take the end yet: the retrier goes on trying, and the flight lasts until it has.
    pub(in crate::gateway) fn leave_pending(mut self: Box<Self>, pending: PendingWrite) {
        self.hand_over(pending);
    }

    fn hand_over(&mut self, pending: PendingWrite) {
        let leader = self.leader.take();
        self.retrier.submit(pending, move |ending| {
            if let Some(leader) = leader {
                leader.end(ending);
            }
        });
    }

    /// As [`InFlight::settled`]; the attempt lives on without a flight.
    pub(in crate::gateway) fn detach(mut self: Box<Self>, ending: FlightEnd) -> Detached {
        if let Some(leader) = self.leader.take() {
            leader.end(ending);
        }
        self.timing = Timing::Late;
        Detached(self)
    }

    /// As [`InFlight::leave_pending`]; the attempt lives on without a flight.
    pub(in crate::gateway) fn detach_pending(
        mut self: Box<Self>,
        pending: PendingWrite,
    ) -> Detached {
        self.hand_over(pending);
        self.timing = Timing::Late;
        Detached(self)
    }
}

impl SingleFlight {
    /// A late answer has come. Where nobody here works on the scope by now, the attempt leads again: duplicates on this
    /// replica wait for what the answer comes to. Whoever works on it is told, lest it sends the next attempt while the answer
    /// is on its way to the store.
    pub(in crate::gateway) fn resume(&self, detached: Detached) -> Box<InFlight> {
        let mut in_flight = detached.answered();
        let mut flights = self.flights.lock();
        match flights.entry(in_flight.scope.clone()) {
            hash_map::Entry::Vacant(vacant) => {
                let (record, fingerprint) = (in_flight.fence.id, in_flight.fingerprint);
                let caller = in_flight.caller.clone();
                let progress = Progress::Running { record, fingerprint, caller };
                in_flight.leads(self.begin_flight(vacant, progress));
            }
            hash_map::Entry::Occupied(flight) => {
                flight.get().answered.store(true, Ordering::SeqCst)
            }
        }
        drop(flights);
        in_flight
    }

    /// Of a record that is held.
    pub(super) fn reservation(
        &self,
        held: &HeldRecord,
        request: &KeyedRequest,
        leader: Leader,
    ) -> Reservation {
        Reservation::new(held, request, leader, self.lease.clone(), self.retrier.clone())
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if !self.sent() {
            self.begin_release();
        }
        if self.leader.is_some() {
            let (scope, fence) = (self.scope.clone(), self.fence);
            let pending = if let Some((end, ending)) = self.known.take() {
                let keeping =
                    matches!(end, End::Complete(_)).then(|| self.retrier.spill().in_memory());
                PendingWrite::End { end: Box::new(end), ending, keeping }
            } else if let Some(window) = self.raising {
                PendingWrite::UndoRaise { scope, fence, owner: self.owner, window }
            } else if self.sent() {
                PendingWrite::of(End::Unknown { scope, fence, row: self.row().cloned() })
            } else {
                PendingWrite::of(End::Release(NotExecuted {
                    scope,
                    fence,
                    late: None,
                    tried: false,
                }))
            };
            self.hand_over(pending);
        }
    }
}
