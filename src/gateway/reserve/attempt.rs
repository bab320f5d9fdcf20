//! The life of an attempt, as the only values by which it can be acted on: a [`Reservation`] is used up by sending, and what
//! is [`InFlight`] must be settled. One whose answer may still come after its record was given up is in `detached`.
//!
//! Why a request cannot be sent twice:
//!
//! - A [`Reservation`] is made here only: of a row that is committed for this request ([`Reservation::new`]), or of the
//!   next attempt's, which is ([`InFlight::raised`]). It cannot be copied, and [`Reservation::begin`] takes it by value.
//! - Before the first byte the connection asks [`InFlight::may_write`]: a process whose lease has run out sends nothing, since
//!   others may have marked the record `unknown` by then.
//! - Whatever drops the attempt (an error, a panic, the end of the process) leaves a pending write behind: it is released where
//!   not one byte was written, else `unknown`. Nothing here sends it again.

use std::sync::Arc;
use std::time::Instant;

use super::flight::{Leader, Sending};
use super::retrier::{PendingWrite, Retrier};
use super::single_flight::SingleFlight;
use super::undo::Undo;
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

impl Reservation {
    /// Of a record that is held for this request, under the leader of its scope.
    pub(super) fn new(
        single_flight: &SingleFlight,
        held: &HeldRecord,
        request: &KeyedRequest,
        leader: Leader,
    ) -> Self {
        leader.running(held.fence.id, held.fingerprint, request.caller.clone());
        let row = request.proposal(held.fence.id, held.owner);
        let row = Arc::new(Proposal { fingerprint: held.fingerprint, ..row });
        leader.executes(held.fence, Some(&row));
        Self(Box::new(InFlight {
            row: Some(row),
            scope: request.scope.clone(),
            fence: held.fence,
            fingerprint: held.fingerprint,
            caller: request.caller.clone(),
            owner: held.owner,
            lease: single_flight.lease.clone(),
            sending: leader.sending(),
            known: None,
            raise: None,
            timing: Timing::InTime,
            leader: Some(leader),
            retrier: Arc::clone(&single_flight.retrier),
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

/// When an attempt is answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Timing {
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
    /// The next attempt is being written in its place: how that is undone, should this be dropped meanwhile.
    pub(super) raise: Option<Undo>,
    pub(super) timing: Timing,
    /// What its row says, for the case that the database forgets it. None: it is asked about, and others made its row.
    row: Option<Arc<Proposal>>,
    /// None: it is detached, and somebody else works on its scope.
    pub(super) leader: Option<Leader>,
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

    /// The record is at the next attempt, of which nothing has been sent, and says this now.
    pub(super) fn raised(mut self: Box<Self>, row: Arc<Proposal>) -> Reservation {
        self.fence.attempt = self.fence.attempt.next();
        self.raise = None;
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

    pub(super) fn hand_over(&mut self, pending: PendingWrite) {
        let leader = self.leader.take();
        self.retrier.submit(pending, move |ending| {
            if let Some(leader) = leader {
                leader.end(ending);
            }
        });
    }
}

impl Drop for InFlight {
    fn drop(&mut self) {
        if !self.sent() {
            self.begin_release();
        }
        if self.leader.is_some() {
            let (scope, fence) = (self.scope.clone(), self.fence);
            let release = |scope| NotExecuted { scope, fence, late: None, tried: false };
            let pending = if let Some((end, ending)) = self.known.take() {
                let keeping =
                    matches!(end, End::Complete(_)).then(|| self.retrier.spill().in_memory());
                PendingWrite::End { end: Box::new(end), ending, keeping }
            } else if let Some(undo) = self.raise.take() {
                PendingWrite::Undo(undo)
            } else if self.sent() {
                PendingWrite::of(End::Unknown { scope, fence, row: self.row().cloned() })
            } else {
                PendingWrite::of(End::Release(release(scope)))
            };
            self.hand_over(pending);
        }
    }
}
