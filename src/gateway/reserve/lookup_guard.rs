//! Look-ups of attempts whose end nobody knows: who may ask, and what "not found" leads to.
//!
//! Whoever asks holds the record as whoever executes it does, under the very attempt that is in doubt. So what still comes of
//! that attempt (a late answer, an outcome in a spill, the application's own completion) completes the record while the
//! look-up is under way, and whoever asked finds that out when it acts on its answer. What must stay true:
//!
//! - An attempt under a look-up is never sent and never released: the attempt may have executed. Dropped, it is unknown again.
//! - Only "not found" makes a reservation of a guard ([`SingleFlight::raise`]): the next attempt, written by one statement that
//!   needs the record to be held as it was before the API was asked. Nothing can have come in between.
//! - A raise of which nobody knows whether it was committed is taken back, and the scope's flight stays until then.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::acquisition::{Acquisition, Decision, POLL_FIRST};
use super::attempt::{HeldRecord, InFlight, Reservation};
use super::flight::{Leader, Role};
use super::retrier::PendingWrite;
use super::single_flight::SingleFlight;
use super::undo::{Statement, Undo};
use super::vocabulary::{KeyedRequest, Readers};
use crate::record::event::RecordContext;
use crate::record::{Fence, RecordId};
use crate::route::{Lookup, OnUnknown};
use crate::store::{Changed, DueLookup, Error, LookupTrigger, Proposal, Takeover};
use crate::telemetry::causes;

/// The right to ask the upstream about an attempt that is unknown.
pub(in crate::gateway) struct LookupGuard {
    in_flight: Box<InFlight>,
    lookup: Arc<Lookup>,
    /// What was kept of the request of that very attempt: a retry's may name something else.
    context: Option<Bytes>,
}

impl LookupGuard {
    /// How it is asked.
    pub(in crate::gateway) fn lookup(&self) -> &Lookup {
        &self.lookup
    }

    /// What is asked about.
    pub(in crate::gateway) fn about(&self) -> RecordContext<'_> {
        let InFlight { scope, fence, .. } = &*self.in_flight;
        RecordContext { record: fence.id, scope, context: self.context.as_deref() }
    }

    /// What was kept of the request, for the events of what is found.
    pub(in crate::gateway) fn context(&self) -> Option<Bytes> {
        self.context.clone()
    }

    /// The attempt, to be completed with what was found, or lost again.
    pub(in crate::gateway) fn attempt(self) -> Box<InFlight> {
        self.in_flight
    }
}

/// What came of "not found".
pub(in crate::gateway) enum Raised {
    /// The next attempt may be sent.
    Held(Reservation),
    /// Nothing was changed: somebody else has the record, or has completed it, or this process has its late answer; or nothing
    /// new is reserved now.
    Not(LookupGuard),
    /// Nobody knows; nothing is sent, and it is taken back.
    Doubt(RecordId),
}

impl SingleFlight {
    /// Takes an unknown record, to ask the upstream about it; `None`: somebody works on it, or may not be asked yet.
    pub(in crate::gateway) async fn hold_for_lookup(
        &self,
        due: &DueLookup,
        lookup: &Arc<Lookup>,
    ) -> Option<LookupGuard> {
        let request = KeyedRequest {
            scope: due.scope.clone(),
            fingerprint: due.fingerprint,
            caller: due.caller.clone(),
            readers: Readers::Scope,
            context: None,
            on_unknown: OnUnknown::Hold,
            // What the row says stays.
            retention: Duration::ZERO,
            // A look-up begins nothing.
            emits_events: false,
        };
        let Role::Leader(mut leader) = self.join(&request.scope) else { return None };
        let from = Takeover::Lookup(due.fence, lookup.delay, LookupTrigger::Gateway);
        let decision =
            Acquisition::new(self, &request, &mut leader).take_over(from, due.fingerprint).await;
        match decision {
            Decision::Held(held) => {
                Some(self.lookup_guard(held, &request, leader, lookup, due.context.clone()))
            }
            Decision::Doubt(undo) => {
                self.retrier.submit(PendingWrite::Undo(undo), move |ending| leader.end(ending));
                None
            }
            Decision::LookUp { .. }
            | Decision::Replay(_)
            | Decision::Unknown(..)
            | Decision::Refuse(_)
            | Decision::Again
            | Decision::Wait(_) => None,
        }
    }

    /// The guard of a record that is held for a look-up.
    pub(super) fn lookup_guard(
        &self,
        held: HeldRecord,
        request: &KeyedRequest,
        leader: Leader,
        lookup: &Arc<Lookup>,
        context: Option<Bytes>,
    ) -> LookupGuard {
        let in_flight = Reservation::new(self, &held, request, leader).in_doubt();
        LookupGuard { in_flight, lookup: Arc::clone(lookup), context }
    }

    /// The upstream knows nothing of the attempt that was asked about: goes on to the next one for this retry, if the record
    /// is still held as it was when the API was asked.
    pub(in crate::gateway) async fn raise(
        &self,
        mut guard: LookupGuard,
        request: &KeyedRequest,
    ) -> Raised {
        let in_flight = &mut guard.in_flight;
        let answered = |leader: &Leader| leader.flight.answered.load(Ordering::SeqCst);
        if in_flight.leader.as_ref().is_none_or(answered) || self.refuse_if_full(request).is_some()
        {
            return Raised::Not(guard);
        }
        let (fence, owner, scope) = (in_flight.fence, in_flight.owner, in_flight.scope.clone());
        let row = request.proposal(fence.id, owner);
        let proposal = Proposal { fingerprint: in_flight.fingerprint, ..row };
        let (window, of) = (self.settings.doubt_window, Statement::Raise { owner });
        in_flight.raise = Some(Undo { scope, fence, window, of });
        match self.write_raise(&proposal, fence).await {
            Some(true) => Raised::Held(guard.in_flight.raised(Arc::new(proposal))),
            Some(false) => {
                in_flight.raise = None;
                Raised::Not(guard)
            }
            None => Raised::Doubt(fence.id),
        }
    }

    /// Whether it is written; `None`: nobody knows.
    async fn write_raise(&self, proposal: &Proposal, fence: Fence) -> Option<bool> {
        let deadline = Instant::now() + self.settings.reserve_timeout;
        let mut doubt = false;
        loop {
            let error = match self.store.raise(proposal.clone(), fence).await {
                Ok(Changed::Yes) => return Some(true),
                Ok(Changed::No) => return (!doubt).then_some(false),
                // The application may be completing the attempt right now.
                Ok(Changed::Locked) => None,
                Err(error) => Some(error),
            };
            doubt |= matches!(error, Some(Error::InDoubt(_)));
            if let Some(error) = &error {
                tracing::warn!(error = %causes(error), doubt, "the next attempt could not be written");
            }
            let over = Instant::now() >= deadline;
            if over || (error.is_some() && !doubt) {
                return (!doubt).then_some(false);
            }
            // The same again, until the lost one holds the row no more: what it finds then is the truth.
            tokio::time::sleep(POLL_FIRST).await;
        }
    }
}
