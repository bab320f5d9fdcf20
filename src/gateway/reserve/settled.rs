//! What this process makes of an end that the store took: the answer in memory for replays, what is remembered for the case
//! that the database loses it, and what its followers get.
//!
//! An attempt in progress here that the database has forgotten (it went back in a fail-over) is brought back before its end
//! is written.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::cache::Replay;
use super::retrier::{PendingWrite, Retrier, SettledEnd};
use super::vocabulary::FlightEnd;
use crate::gateway::settle::{End, Executed, Settlement, Unsettled, settle};
use crate::record::{Fence, RecordId, Scope};
use crate::store::{Completion, Error, LateOutcome, Proposal, Reinstated};
use crate::telemetry::{Drained, WentBack, causes};

/// A reservation whose outcome is kept for less is not brought back.
const BROUGHT_BACK: Duration = Duration::from_secs(3600);

impl Retrier {
    /// Tries once to settle an end, and remembers what the database confirms. An attempt that it has forgotten meanwhile is
    /// brought back for that. `ending`: for those who waited for an attempt that is released. `held`: whether its record has
    /// been in the hands of this process all the while.
    pub(crate) async fn settle(
        &self,
        end: &End,
        ending: &FlightEnd,
        deadline: Instant,
        held: impl Fn() -> bool,
    ) -> Result<SettledEnd, Unsettled> {
        let begun = Instant::now();
        let mut settlement = settle(&*self.store, end, deadline).await?;
        if let Some(row) = end.row().filter(|_| settlement.found_nothing()) {
            // Also where it was there: whoever looks after this process's records may have brought it back in between.
            self.reinstate(row, end.fence()).await?;
            settlement = settle(&*self.store, end, deadline).await?;
        }
        if held() {
            settlement = settlement.of_own_attempt(end.fence());
        }
        Ok(self.settled_end(end, settlement, ending, begun))
    }

    /// What this process makes of a settlement. `begun`: a moment before it.
    pub(super) fn settled_end(
        &self,
        end: &End,
        settlement: Settlement,
        ending: &FlightEnd,
        begun: Instant,
    ) -> SettledEnd {
        let (how, late) = (settlement.result(), settlement.late().cloned());
        let ending = match (settlement, end) {
            (Settlement::Completed { written, expires_at }, End::Complete(executed)) => {
                self.completed(executed, &written, expires_at, begun)
            }
            (
                Settlement::Already(Some(stored))
                | Settlement::FencedOff { answer: Some(stored), .. },
                _,
            ) => self.kept(end.scope(), Arc::new((*stored).into())),
            (Settlement::Unknown { record, marked, .. }, _) => {
                if let Some(row) = end.row().filter(|_| marked && !self.confirmed.was_freed(record))
                {
                    self.confirmed.unknown(end.fence(), row);
                }
                FlightEnd::Unknown(record)
            }
            (Settlement::Released | Settlement::Already(None), _) => ending.clone(),
            (Settlement::FencedOff { answer: None, .. } | Settlement::Completed { .. }, _) => {
                FlightEnd::LookAgain
            }
        };
        SettledEnd { ending, how, late }
    }

    /// What this process makes of a statement that was undone. `begun`: a moment before it.
    pub(super) fn undone(
        &self,
        unknown: &End,
        found: Option<Settlement>,
        begun: Instant,
    ) -> SettledEnd {
        let look_again = FlightEnd::LookAgain;
        match found {
            Some(found) => {
                let SettledEnd { ending, .. } =
                    self.settled_end(unknown, found, &look_again, begun);
                SettledEnd { ending, how: Drained::Completed, late: None }
            }
            None => SettledEnd { ending: look_again, how: Drained::Completed, late: None },
        }
    }

    fn completed(
        &self,
        executed: &Executed,
        written: &Completion,
        expires_at: SystemTime,
        begun: Instant,
    ) -> FlightEnd {
        let Executed { fingerprint, caller, row, .. } = executed;
        let ends = begun + written.retention;
        self.confirmed.completed(written, (*fingerprint, caller.as_ref()), ends, row.as_ref());
        let Completion { scope, fence, answer, .. } = written;
        let replay =
            Replay::new(*fence, *fingerprint, caller.clone(), answer.clone(), expires_at, ends);
        self.kept(scope, Arc::new(replay))
    }

    /// Writes an outcome down that found its record gone on; what the database does not take at once is pending.
    pub(crate) async fn note(&self, late: LateOutcome) {
        self.log_late(&late);
        if let Err(error) = self.until_shutdown(self.store.note_late_outcome(&late)).await {
            tracing::warn!(error = %causes(&error), "the database did not take a late outcome; the retrier goes on");
            self.submit(PendingWrite::of(End::Late(Box::new(late))), drop);
        }
    }

    pub(super) fn log_late(&self, late: &LateOutcome) {
        let (record, outcome) = (late.fence.id, late.summary());
        tracing::warn!(%record, outcome, "a late outcome is kept in the audit table");
        self.metrics.late_outcome();
    }

    /// The row of this record is about to go, rightly.
    pub(super) fn forget(&self, record: RecordId) {
        self.confirmed.forget(record);
    }

    /// Puts the row of an attempt that is in progress here back, where the database has forgotten it. Whether it was gone.
    pub(crate) async fn reinstate(&self, row: &Proposal, fence: Fence) -> Result<bool, Error> {
        // Somebody else may have completed it while this process slept, and what was kept so briefly may be over since.
        if row.retention < BROUGHT_BACK || self.confirmed.was_freed(fence.id) {
            return Ok(false);
        }
        let proposal = Proposal { owner: self.lease.current().owner, ..row.clone() };
        match self.store.reinstate(proposal, fence.attempt).await? {
            Reinstated::Yes => {
                tracing::error!(record = %fence.id, attempt = fence.attempt.number(),
                    "the database has forgotten a reservation that it had confirmed: it is written back");
                self.metrics.store_went_back(WentBack::Reservation);
                Ok(true)
            }
            Reinstated::No | Reinstated::ActedOn => Ok(false),
            Reinstated::LeaseEnded => Err(Error::Unavailable("this process has no lease".into())),
        }
    }

    /// Keeps a stored answer in memory for replay.
    pub(super) fn remember(&self, scope: &Scope, replay: &Replay) {
        self.cache.put(scope, replay);
        self.metrics.cached_bytes(self.cache.bytes());
    }

    fn kept(&self, scope: &Scope, replay: Arc<Replay>) -> FlightEnd {
        self.remember(scope, &replay);
        FlightEnd::Kept(replay)
    }
}
