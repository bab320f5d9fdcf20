//! Writes that the store has not taken yet: ends of attempts, and what undoes a reservation in doubt.
//!
//! A pending write is repeated with back-off until the store answers. Meanwhile its scope's flight goes on, so that
//! duplicates on this replica meet it before the database. Outcomes are in the spill as well, for the next process;
//! the others live in memory. Their number is bounded by the requests in flight and the late answers awaited, since nothing
//! new can be reserved while the database takes nothing.
//!
//! The end of the process waits for a last try, and then leaves what is pending to the next one: in the spill, or, where it
//! says nothing but that nobody knows, by the end of the owner's lease, after which the record is found as `unknown`. Only an
//! outcome for which the spill has no room is tried on, for as long as the grace lasts.
//!
//! An outcome whose record has gone on is pending as well, until it stands in the audit table.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use futures_util::FutureExt as _;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::cache::{Cache, Replay};
use super::confirmed::ConfirmedEnds;
use super::vocabulary::FlightEnd;
use crate::backoff::Backoff;
use crate::fault::{self, Point};
use crate::gateway::settle::{End, Executed, Settlement, Unsettled, look, settle};
use crate::gateway::spill::{Keeping, Spill};
use crate::record::{
    Attempt, Fence, Fingerprint, LeaseView, OwnerId, Record, RecordId, Scope, State,
};
use crate::store::{Changed, Completion, Error, LateEnd, LateOutcome, Proposal, Reinstated, Store};
use crate::telemetry::{Drained, Metrics, WentBack, causes};

/// Pauses between tries of a pending write. The first that the store takes wakes all others.
const PAUSES: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_millis(500));

/// How often a reservation that may still be committed is looked for.
const WITHDRAW_EVERY: Duration = Duration::from_secs(2);

/// A reservation whose outcome is kept for less is not brought back.
const BROUGHT_BACK: Duration = Duration::from_secs(3600);

/// How long one try of a completion may take.
const TRY: Duration = Duration::from_secs(10);

/// How long the end of the process waits for the store to take what is pending, where that can be left to the next one.
const LAST_TRY: Duration = Duration::from_secs(1);

/// Of an outcome whose record has gone on: nothing is compared with it any more.
const NOBODYS: Fingerprint = Fingerprint { canonical: [0; 32], raw: [0; 32], recipe: [0; 8] };

/// What has to be written.
pub(crate) enum PendingWrite {
    /// The end of an attempt. `ending`: for those who waited, where it is released. `keeping`: where it is until then, besides
    /// in memory; none of an end that says nothing to the next process.
    End { end: Box<End>, ending: FlightEnd, keeping: Option<Keeping> },
    /// A reservation that may still be committed by a backend that was lost: deleted, again and again, until
    /// that backend cannot commit any more.
    Withdraw { scope: Scope, fence: Fence, window: Duration },
    /// A takeover for a look-up that may still be committed in the same way: unknown again. The attempt itself may have
    /// executed, so it is never deleted.
    EndLookup { scope: Scope, fence: Fence, window: Duration },
    /// The next attempt, of which nothing was sent, and that this owner may still write in the place of its look-up of
    /// the attempt of the fence: unknown again, whichever stands.
    UndoRaise { scope: Scope, fence: Fence, owner: OwnerId, window: Duration },
}

/// What an end came to, for this process.
pub(crate) struct SettledEnd {
    /// How the flight of its scope ends.
    pub(crate) ending: FlightEnd,
    /// What the store made of it.
    pub(crate) how: Drained,
    /// What is still to be noted.
    pub(crate) late: Option<LateOutcome>,
}

impl PendingWrite {
    /// An end that nothing but memory keeps.
    pub(crate) fn of(end: End) -> Self {
        Self::End { end: Box::new(end), ending: FlightEnd::LookAgain, keeping: None }
    }
}

/// Repeats pending writes. Clones are one retrier.
#[derive(Clone)]
pub(crate) struct Retrier {
    store: Arc<dyn Store>,
    lease: LeaseView,
    cache: Cache,
    confirmed: ConfirmedEnds,
    spill: Spill,
    metrics: Arc<Metrics>,
    tasks: TaskTracker,
    /// Outcomes that are known and neither stored nor in the spill yet.
    known: TaskTracker,
    /// The store took one after others had failed: it is back.
    back: Arc<Notify>,
    /// The process is about to end: what can be left to the next one waits for the database no more.
    leaving: CancellationToken,
    /// The process ends: nothing waits for the database any more.
    ending: CancellationToken,
}

impl Retrier {
    pub(super) fn new(
        store: Arc<dyn Store>,
        lease: LeaseView,
        (cache, confirmed): (Cache, ConfirmedEnds),
        spill: Spill,
        metrics: Arc<Metrics>,
    ) -> Self {
        let (tasks, known) = (TaskTracker::new(), TaskTracker::new());
        let (back, leaving) = (Arc::default(), CancellationToken::new());
        let ending = CancellationToken::new();
        Self { store, lease, cache, confirmed, spill, metrics, tasks, known, back, leaving, ending }
    }

    /// Where outcomes are kept that the store does not take.
    pub(crate) fn spill(&self) -> &Spill {
        &self.spill
    }

    /// An outcome is known: until the guard is dropped, the end of the process waits for it a little.
    pub(crate) fn known(&self) -> TaskTrackerToken {
        self.known.token()
    }

    /// Runs what asks the store for an outcome's sake; in doubt once the process ends.
    pub(crate) async fn until_shutdown<T, E: From<Error>>(
        &self,
        asking: impl Future<Output = Result<T, E>>,
    ) -> Result<T, E> {
        let asked = self.ending.run_until_cancelled(asking).await;
        asked.unwrap_or_else(|| Err(Error::InDoubt("the process ends".into()).into()))
    }

    /// Waits until nothing is pending any more that needs this process: what the store does not take in a last try, and the
    /// next process can do, is left to it.
    pub(crate) async fn settled_or_left(&self) {
        if tokio::time::timeout(LAST_TRY, self.idle()).await.is_err() {
            self.leaving.cancel();
            self.idle().await;
        }
    }

    /// The process ends: what is known and neither stored nor in the spill goes there. Returns when that is done.
    pub(crate) async fn leave(&self) {
        self.leaving.cancel();
        self.ending.cancel();
        self.known.close();
        self.known.wait().await;
        self.idle().await;
    }

    /// Takes a pending write over, and tells its end.
    pub(super) fn submit(
        &self,
        pending: PendingWrite,
        tell: impl FnOnce(FlightEnd) + Send + 'static,
    ) {
        // Outside a runtime there is nobody to pay: the process is ending, and the lease will tell.
        if tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        let (retrier, guard) = (self.clone(), self.metrics.settling());
        self.tasks.spawn(async move {
            let ending = retrier.repeat(pending).await;
            tell(ending);
            drop(guard);
        });
    }

    /// Waits until nothing is pending any more.
    pub(crate) async fn idle(&self) {
        self.tasks.close();
        self.tasks.wait().await;
        self.tasks.reopen();
    }

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
    fn settled_end(
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
                | Settlement::FencedOff { stands: Some(stored), .. },
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
            (Settlement::FencedOff { stands: None, .. } | Settlement::Completed { .. }, _) => {
                FlightEnd::LookAgain
            }
        };
        SettledEnd { ending, how, late }
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
        self.noted(&late);
        if let Err(error) = self.until_shutdown(self.store.note_late_outcome(&late)).await {
            tracing::warn!(error = %causes(&error), "the database did not take a late outcome; the retrier goes on");
            self.submit(PendingWrite::of(End::Late(Box::new(late))), drop);
        }
    }

    fn noted(&self, late: &LateOutcome) {
        let (record, outcome) = (late.fence.id, late.summary());
        tracing::warn!(%record, outcome, "a late outcome is kept in the audit table");
        self.metrics.late_outcome();
    }

    async fn repeat(&self, mut pending: PendingWrite) -> FlightEnd {
        let mut pauses = PAUSES;
        // What cannot be left to the next process is tried until the end.
        let mut until = &self.leaving;
        loop {
            // Registered before the try: a success of another one in the middle of it counts.
            let back = self.back.notified();
            let tried = async {
                fault::point(Point::Settling).await;
                let tried = until.run_until_cancelled(self.try_once(&pending)).await;
                tried.unwrap_or_else(|| Err(Error::InDoubt("the process ends".into()).into()))
            };
            // A panic costs a try, never the write.
            let tried = AssertUnwindSafe(tried).catch_unwind().await;
            let tried = tried.unwrap_or_else(|_| Err(Error::InDoubt("it panicked".into()).into()));
            let error = match tried {
                Ok(SettledEnd { ending, how, .. }) => {
                    if let PendingWrite::End { keeping: Some(keeping), .. } = pending {
                        keeping.paid(how);
                    }
                    self.back.notify_waiters();
                    return ending;
                }
                Err(error) => error,
            };
            if !error.may_pass() {
                tracing::error!(error = %causes(&error), "the database refuses an outcome");
                // One that is in the spill stays there: the next process tries again, and sets it aside.
                let PendingWrite::End { end, ending, keeping } = pending else {
                    return FlightEnd::LookAgain;
                };
                let Some(end) = end.refused().map(Box::new) else { return FlightEnd::LookAgain };
                pending = PendingWrite::End { end, ending, keeping };
                continue;
            }
            tracing::debug!(error = %causes(&error), "an outcome is still pending");
            let pausing = tokio::time::timeout(pauses.pause(), back);
            if until.run_until_cancelled(pausing).await.is_none() {
                let Some(left) = self.hand_over(pending).await else { return FlightEnd::LookAgain };
                if self.ending.is_cancelled() {
                    tell_lost(&left);
                    return FlightEnd::LookAgain;
                }
                (pending, until) = (left, &self.ending);
            }
        }
    }

    /// Leaves a pending write to the next process: an end in the spill, where it was not there yet. What is given back has no
    /// room there, and cannot be left.
    async fn hand_over(&self, pending: PendingWrite) -> Option<PendingWrite> {
        let (end, ending) = match pending {
            PendingWrite::End { keeping: Some(Keeping::Spilled(_)), .. } => return None,
            PendingWrite::End { end, ending, .. } => (end, ending),
            // Where it was never committed, the next process finds nothing to free.
            PendingWrite::Withdraw { scope, fence, .. } if fence.attempt == Attempt::FIRST => {
                let unsent = LateOutcome { scope, fence, end: LateEnd::NotSent };
                drop(self.spill.keep_freed(&unsent, false).await);
                return None;
            }
            // Unknown with the end of the lease, as it is to be.
            PendingWrite::Withdraw { .. }
            | PendingWrite::EndLookup { .. }
            | PendingWrite::UndoRaise { .. } => return None,
        };
        match self.keep(&end).await {
            Some(keeping @ Keeping::Memory(_)) => {
                Some(PendingWrite::End { end, ending, keeping: Some(keeping) })
            }
            Some(Keeping::Spilled(_)) | None => None,
        }
    }

    /// Keeps an end in the spill until the store has taken it; none: it is one that says nothing to the next process.
    pub(crate) async fn keep(&self, end: &End) -> Option<Keeping> {
        match end {
            End::Complete(Executed { completion, fingerprint, .. })
            | End::Unkept(Executed { completion, fingerprint, .. }) => {
                Some(self.spill.keep(completion, *fingerprint).await)
            }
            End::Release(_) => Some(self.spill.keep_freed(&end.late()?, false).await),
            // The next process finds its record gone on, as this one did.
            End::Late(late) => Some(match late.completion() {
                Some(completion) => self.spill.keep(&completion, NOBODYS).await,
                None => self.spill.keep_freed(late, true).await,
            }),
            End::Unknown { .. } => None,
        }
    }

    async fn try_once(&self, pending: &PendingWrite) -> Result<SettledEnd, Unsettled> {
        let ending = match pending {
            PendingWrite::End { end, ending, .. } => {
                let settled = self.settle(end, ending, Instant::now() + TRY, || false).await?;
                if let Some(late) = &settled.late {
                    // It is pending until this is written: what is in the spill stays there until then.
                    self.store.note_late_outcome(late).await?;
                    // Of one that is nothing else the log has told already.
                    if !matches!(**end, End::Late(_)) {
                        self.noted(late);
                    }
                }
                return Ok(settled);
            }
            PendingWrite::Withdraw { scope, fence, window } => {
                self.undo(*window, || self.store.release(scope, *fence)).await?
            }
            PendingWrite::EndLookup { scope, fence, window } => {
                self.undo(*window, || self.store.mark_unknown(scope, *fence)).await?
            }
            PendingWrite::UndoRaise { scope, fence, owner, window } => {
                self.undo_raise(scope, *fence, *owner, *window).await?
            }
        };
        Ok(SettledEnd { ending, how: Drained::Completed, late: None })
    }

    /// Undoes what may still be committed, again and again.
    async fn undo<F>(&self, window: Duration, undo: impl Fn() -> F) -> Result<FlightEnd, Error>
    where
        F: Future<Output = Result<Changed, Error>>,
    {
        let until = Instant::now() + window;
        loop {
            // Found and undone: it had been committed, and cannot be once more.
            let found = undo().await? == Changed::Yes;
            if found || Instant::now() >= until {
                return Ok(FlightEnd::LookAgain);
            }
            tokio::time::sleep(WITHDRAW_EVERY.min(window)).await;
        }
    }

    /// Takes back a raise that may still be committed. It is looked at before anything is changed: others may be at the next
    /// attempt by now, if this process seemed to be dead, and theirs is none of ours.
    async fn undo_raise(
        &self,
        scope: &Scope,
        fence: Fence,
        owner: OwnerId,
        window: Duration,
    ) -> Result<FlightEnd, Unsettled> {
        let until = Instant::now() + window;
        let raised = Fence { attempt: fence.attempt.next(), ..fence };
        loop {
            let over = Instant::now() >= until;
            let found = self.store.find(scope).await?;
            let own = found.as_ref().map(|record| (record.fence, holds(record, owner)));
            let undone = match own {
                // It had been committed, and cannot be once more.
                Some((at, true)) if at == raised => self.store.release(scope, raised).await?,
                Some((at, true)) if at == fence && over => {
                    self.store.mark_unknown(scope, fence).await?
                }
                Some((at, _)) if at == fence && !over && !is_completed(found.as_ref()) => {
                    tokio::time::sleep(WITHDRAW_EVERY.min(window)).await;
                    continue;
                }
                Some(_) | None => Changed::No,
            };
            return match undone {
                Changed::Yes => Ok(FlightEnd::Unknown(fence.id)),
                // Whoever ended the doubt: what stands is told.
                Changed::No => {
                    let unknown = End::Unknown { scope: scope.clone(), fence, row: None };
                    let settlement = look(&*self.store, &unknown).await?;
                    Ok(self.settled_end(&unknown, settlement, &FlightEnd::LookAgain, until).ending)
                }
                Changed::Locked => Err(Unsettled::Locked),
            };
        }
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

/// The process ends with an outcome that is nowhere else.
fn tell_lost(pending: &PendingWrite) {
    let PendingWrite::End { end, .. } = pending else { return };
    let record = end.fence().id;
    if let End::Late(late) = &**end {
        let outcome = late.summary();
        tracing::error!(%record, outcome, "the process ends, and the audit table has not got a late outcome");
    } else {
        tracing::error!(%record, "the process ends with an outcome that is neither in the database nor in the spill: its record becomes unknown");
    }
}

fn holds(record: &Record, by: OwnerId) -> bool {
    matches!(record.state, State::InProgress { owner, .. } if owner == by)
}

fn is_completed(record: Option<&Record>) -> bool {
    record.is_some_and(|record| matches!(record.state, State::Completed(_)))
}
