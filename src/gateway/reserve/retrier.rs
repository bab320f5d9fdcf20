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
//! An outcome whose record has gone on is pending as well, until it is in the audit table.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::cache::Cache;
use super::confirmed::ConfirmedEnds;
use super::undo::{Statement, Undo};
use super::vocabulary::FlightEnd;
use crate::backoff::Backoff;
use crate::fault::{self, Point};
use crate::gateway::settle::{End, Executed, Unsettled};
use crate::gateway::spill::{Keeping, Spill};
use crate::record::{Attempt, Fingerprint, LeaseView};
use crate::store::{Error, LateEnd, LateOutcome, Store};
use crate::telemetry::{Drained, Metrics, causes};

/// Pauses between tries of a pending write. The first that the store takes wakes all others.
const PAUSES: Backoff = Backoff::new(Duration::from_millis(50), Duration::from_millis(500));

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
    /// What a lost backend may still commit, to be undone.
    Undo(Undo),
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
    pub(super) store: Arc<dyn Store>,
    pub(super) lease: LeaseView,
    pub(super) cache: Cache,
    pub(super) confirmed: ConfirmedEnds,
    spill: Spill,
    pub(super) metrics: Arc<Metrics>,
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

    /// Takes a pending write over; its end goes to `ended`.
    pub(super) fn submit(
        &self,
        pending: PendingWrite,
        ended: impl FnOnce(FlightEnd) + Send + 'static,
    ) {
        // Outside a runtime nothing can be repeated: the process is ending, and the record is `unknown` with its lease.
        if tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        let (retrier, guard) = (self.clone(), self.metrics.settling());
        self.tasks.spawn(async move {
            ended(retrier.repeat(pending).await);
            drop(guard);
        });
    }

    /// Waits until nothing is pending any more.
    pub(crate) async fn idle(&self) {
        self.tasks.close();
        self.tasks.wait().await;
        self.tasks.reopen();
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
                    log_lost(&left);
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
            PendingWrite::Undo(Undo { scope, fence, of: Statement::Reservation, .. })
                if fence.attempt == Attempt::FIRST =>
            {
                let unsent = LateOutcome { scope, fence, end: LateEnd::NotSent };
                drop(self.spill.keep_freed(&unsent, false).await);
                return None;
            }
            // Unknown with the end of the lease, as it is to be.
            PendingWrite::Undo(_) => return None,
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
        let (end, ending) = match pending {
            PendingWrite::End { end, ending, .. } => (end, ending),
            PendingWrite::Undo(undo) => {
                let began = Instant::now();
                let found = undo.write(&*self.store).await?;
                return Ok(self.undone(&undo.unknown(), found, began));
            }
        };
        let settled = self.settle(end, ending, Instant::now() + TRY, || false).await?;
        if let Some(late) = &settled.late {
            // It is pending until this is written: what is in the spill stays there until then.
            self.store.note_late_outcome(late).await?;
            // Of an end that is nothing else the log has said so already.
            if !matches!(**end, End::Late(_)) {
                self.log_late(late);
            }
        }
        Ok(settled)
    }
}

/// The process ends with an outcome that is nowhere else.
fn log_lost(pending: &PendingWrite) {
    let PendingWrite::End { end, .. } = pending else { return };
    let record = end.fence().id;
    if let End::Late(late) = &**end {
        let outcome = late.summary();
        tracing::error!(%record, outcome, "the process ends, and the audit table has not got a late outcome");
    } else {
        tracing::error!(%record, "the process ends with an outcome that is neither in the database nor in the spill: its record becomes unknown");
    }
}
