//! How a leader takes over a record that exists: one that has expired, one that is `unknown` for the next attempt, or one
//! that is `unknown` for a look-up.
//!
//! A takeover names the fence that was read, so of several processes one succeeds. One whose end is not known is repeated
//! until the lost statement cannot hold the row any more; then the record is read, and what it says is the truth.

use std::sync::Arc;
use std::time::Instant;

use super::acquisition::{Acquisition, Decision, POLL_FIRST};
use super::attempt::HeldRecord;
use super::undo::Statement;
use super::vocabulary::Unreserved;
use crate::record::{Attempt, Fence, Fingerprint, Record, RecordId, State};
use crate::route::{Lookup, OnUnknown};
use crate::store::{Changed, Error, LookupTrigger, Takeover};
use crate::telemetry::causes;

impl Acquisition<'_> {
    /// Decides on a record whose outcome nobody knows, by the route's `on_unknown`.
    pub(super) async fn decide_unknown(
        &mut self,
        fence: Fence,
        fingerprint: Fingerprint,
    ) -> Decision {
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
            Err(error) => {
                return Decision::Refuse(
                    self.single_flight.unavailable(&error, Unreserved::Perhaps),
                );
            }
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

    /// Takes the record over, from the state and fence that were read.
    pub(super) async fn take_over(&mut self, from: Takeover, fingerprint: Fingerprint) -> Decision {
        // A look-up begins nothing: what it finds is of an attempt that was begun long ago. It needs the spill only.
        let begins =
            !matches!(from, Takeover::Lookup(..)) || self.single_flight.retrier.spill().is_full();
        if begins && let Some(refusal) = self.single_flight.refuse_if_full(self.request) {
            return Decision::Refuse(refusal);
        }
        let decision = self.take(from, fingerprint).await;
        self.leader.undo = None;
        decision
    }

    async fn take(&mut self, from: Takeover, fingerprint: Fingerprint) -> Decision {
        let owner = self.single_flight.lease.current().owner;
        let proposal = self.request.proposal(RecordId::fresh(), owner);
        let taken = match from {
            Takeover::Expired(_) => Fence { id: proposal.id, attempt: Attempt::FIRST },
            Takeover::Unknown(fence) => Fence { id: fence.id, attempt: fence.attempt.next() },
            Takeover::Lookup(fence, ..) => fence,
        };
        let deadline = Instant::now() + self.single_flight.settings.reserve_timeout;
        let statement = match from {
            Takeover::Expired(_) | Takeover::Unknown(_) => Statement::Reservation,
            Takeover::Lookup(..) => Statement::Lookup,
        };
        let held = HeldRecord { fence: taken, fingerprint, owner };
        self.leader.undo = Some(self.undo(taken, statement));
        let mut doubt = false;
        loop {
            let error = match self.single_flight.store.take_over(proposal.clone(), from).await {
                Ok(Changed::Yes) => return Decision::Held(held),
                Ok(Changed::No) if doubt => {
                    let found = self.read_back(held).await;
                    return found.unwrap_or_else(|| Decision::Doubt(self.undo(taken, statement)));
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
                return Decision::Doubt(self.undo(taken, statement));
            }
            // The same again, until the lost one holds the row no more: what it finds then is the truth.
            tokio::time::sleep(POLL_FIRST).await;
        }
    }

    /// A takeover that the store did not make, for certain.
    fn not_taken(&self, from: Takeover, error: &Error) -> Decision {
        match (error, from) {
            (Error::Refused(cause), Takeover::Expired(_)) => {
                Decision::Refuse(self.single_flight.not_storable(self.request, &**cause))
            }
            (Error::Refused(_), Takeover::Unknown(fence) | Takeover::Lookup(fence, ..)) => {
                // No other attempt can be made, and what became of the one before is as open as it was.
                tracing::warn!(error = %causes(error), "the database refuses to hold another attempt");
                Decision::Unknown(fence.id, None)
            }
            _ => Decision::Refuse(self.single_flight.unavailable(error, Unreserved::Perhaps)),
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
