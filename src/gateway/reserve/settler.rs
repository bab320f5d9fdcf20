//! What is owed to the store: ends of attempts that it has not taken yet.
//!
//! A debt is repeated with backoff until the store answers. Meanwhile the scope's entry stays at the desk, so that
//! duplicates on this replica meet it before the database. Outcomes are in the spill as well, for the next process;
//! the other debts live in memory, and what is left of them when the process ends is found as `unknown` once the owner's
//! lease has run out. Their number is bounded by the requests in flight and the late answers awaited, since nothing new
//! can be reserved while the database takes nothing.
//!
//! An outcome whose record has gone on is a debt as well, until it stands in the audit table.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::cache::Cache;
use super::ends::Ends;
use super::{Ending, Lead, Replay};
use crate::fault::{self, Point};
use crate::gateway::spill::{Keeping, Spill};
use crate::record::{
    Caller, Fence, Fingerprint, LeaseView, OwnerId, Record, RecordId, Scope, State,
};
use crate::store::{
    self, Changed, Completion, Error, LateOutcome, Proposal, Reinstated, Settled, Store, Written,
};
use crate::telemetry::{Drained, Metrics, WentBack, causes};

/// First pause between two tries of a debt; it doubles. The first debt that is paid wakes all others.
const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_millis(500);

/// How often a reservation that may still be committed is looked for.
const WITHDRAW_EVERY: Duration = Duration::from_secs(2);

/// A reservation whose outcome is kept for less is not brought back.
const BROUGHT_BACK: Duration = Duration::from_secs(3600);

/// How long one try of a completion may take.
const TRY: Duration = Duration::from_secs(10);

/// Of an outcome whose record has gone on: nothing is compared with it any more.
const NOBODYS: Fingerprint = Fingerprint { canonical: [0; 32], raw: [0; 32], recipe: [0; 8] };

/// The end of an attempt, as it has to be written.
pub(crate) enum Debt {
    /// The outcome is known. `open`: what the row says, where it was in progress here.
    Complete {
        completion: Arc<Completion>,
        fingerprint: Fingerprint,
        caller: Option<Caller>,
        open: Option<Arc<Proposal>>,
        keeping: Keeping,
    },
    /// The outcome is known, and the database refuses to hold it: its record becomes unknown, and the audit table tells the
    /// outcome.
    Unkept { completion: Arc<Completion>, fingerprint: Fingerprint, keeping: Keeping },
    /// Nobody knows what the upstream did.
    Unknown { scope: Scope, fence: Fence, open: Option<Arc<Proposal>> },
    /// It is known not to have executed; those who waited get this ending. `late`: what is noted where another attempt
    /// is found in its place, and where it is kept until then.
    Release {
        scope: Scope,
        fence: Fence,
        ending: Ending,
        late: Option<(Box<LateOutcome>, Keeping)>,
    },
    /// A reservation that may still be committed by a backend that was lost: deleted, again and again, until
    /// that backend cannot commit any more.
    Withdraw { scope: Scope, fence: Fence, window: Duration },
    /// A takeover for a question that may still be committed in the same way: unknown again. The attempt itself may have
    /// executed, so it is never deleted.
    Unask { scope: Scope, fence: Fence, window: Duration },
    /// The next attempt, of which nothing was sent, and that this owner may still write in the place of its question about
    /// the attempt of the fence: unknown again, whichever stands.
    Unraise { scope: Scope, fence: Fence, owner: OwnerId, window: Duration },
    /// An outcome whose record has gone on.
    Late(Box<LateOutcome>),
}

/// What stands in the place of an attempt whose end changed no row.
pub(crate) enum Standing {
    /// Its record is completed.
    Completed(Arc<Replay>),
    /// Its record is at another attempt.
    Open,
    /// Its record is gone, or another one stands under the scope.
    Gone,
}

/// A debt that is owed no more.
struct Paid {
    /// How the entry of its scope ends.
    ending: Ending,
    /// What the store made of it.
    how: Drained,
}

impl Paid {
    /// The store has taken it.
    fn taken(ending: Ending) -> Self {
        Self { ending, how: Drained::Completed }
    }
}

impl Debt {
    /// It is owed no more.
    fn paid(self, how: Drained) {
        match self {
            Self::Complete { keeping, .. }
            | Self::Unkept { keeping, .. }
            | Self::Release { late: Some((_, keeping)), .. } => {
                keeping.paid(how);
            }
            Self::Unknown { .. }
            | Self::Release { late: None, .. }
            | Self::Withdraw { .. }
            | Self::Unask { .. }
            | Self::Unraise { .. }
            | Self::Late(_) => {}
        }
    }
}

/// Pays debts. Clones are one settler.
#[derive(Clone)]
pub(crate) struct Settler {
    store: Arc<dyn Store>,
    lease: LeaseView,
    cache: Cache,
    ends: Ends,
    spill: Spill,
    metrics: Arc<Metrics>,
    tasks: TaskTracker,
    /// Outcomes that are known and neither stored nor in the spill yet.
    known: TaskTracker,
    /// The store took a debt after others had failed: it is back.
    back: Arc<Notify>,
    /// The process ends: nothing waits for the database any more.
    ending: CancellationToken,
}

impl Settler {
    pub(super) fn new(
        store: Arc<dyn Store>,
        lease: LeaseView,
        (cache, ends): (Cache, Ends),
        spill: Spill,
        metrics: Arc<Metrics>,
    ) -> Self {
        let (tasks, known) = (TaskTracker::new(), TaskTracker::new());
        let (back, ending) = (Arc::default(), CancellationToken::new());
        Self { store, lease, cache, ends, spill, metrics, tasks, known, back, ending }
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
    pub(crate) async fn before_the_end<T>(
        &self,
        asking: impl Future<Output = Result<T, Error>>,
    ) -> Result<T, Error> {
        let asked = self.ending.run_until_cancelled(asking).await;
        asked.unwrap_or_else(|| Err(Error::InDoubt("the process ends".into())))
    }

    /// The process ends: what is known and neither stored nor in the spill goes there. Returns when that is done.
    pub(crate) async fn leave(&self) {
        self.ending.cancel();
        self.known.close();
        self.known.wait().await;
        self.idle().await;
    }

    /// Takes a debt over, with the entry of its scope where the debt has one.
    pub(super) fn owe(&self, debt: Debt, lead: Option<Lead>) {
        // Outside a runtime there is nobody to pay: the process is ending, and the lease will tell.
        if tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        let (settler, guard) = (self.clone(), self.metrics.settling());
        self.tasks.spawn(async move {
            let ending = settler.pay(debt).await;
            if let Some(lead) = lead {
                lead.end(ending);
            }
            drop(guard);
        });
    }

    /// Waits until nothing is owed any more.
    pub(crate) async fn idle(&self) {
        self.tasks.close();
        self.tasks.wait().await;
        self.tasks.reopen();
    }

    /// What stands under a scope where the record `id` was.
    pub(super) async fn standing(&self, scope: &Scope, id: RecordId) -> Result<Standing, Error> {
        Ok(match self.store.find(scope).await? {
            Some(Record { fence, fingerprint, caller, state }) if fence.id == id => match state {
                State::Completed(completed) => {
                    let replay = super::replay_of(fence, fingerprint, caller, *completed);
                    Standing::Completed(Arc::new(replay))
                }
                State::InProgress { .. } | State::Unknown => Standing::Open,
            },
            Some(_) | None => Standing::Gone,
        })
    }

    /// Writes an outcome down that found its record gone on; what the database does not take at once stays owed.
    pub(crate) async fn note(&self, late: LateOutcome) {
        self.noted(&late);
        if let Err(error) = self.before_the_end(self.store.note_late_outcome(&late)).await {
            tracing::warn!(error = %causes(&error), "the database did not take a late outcome; the settler goes on");
            self.owe(Debt::Late(Box::new(late)), None);
        }
    }

    fn noted(&self, late: &LateOutcome) {
        let (record, outcome) = (late.fence.id, late.summary());
        tracing::warn!(%record, outcome, "a late outcome is kept in the audit table");
        self.metrics.late_outcome();
    }

    async fn pay(&self, mut debt: Debt) -> Ending {
        let mut pause = PAUSE_FIRST;
        loop {
            // Registered before the try: a success of another debt in the middle of it counts.
            let back = self.back.notified();
            let tried = async {
                fault::point(Point::Settling).await;
                self.before_the_end(self.try_pay(&debt)).await
            };
            // A panic costs a try, never the debt.
            let tried = AssertUnwindSafe(tried).catch_unwind().await;
            let tried = tried.unwrap_or_else(|_| Err(Error::InDoubt("it panicked".into())));
            let error = match tried {
                Ok(Paid { ending, how }) => {
                    debt.paid(how);
                    self.back.notify_waiters();
                    return ending;
                }
                Err(error) => error,
            };
            if let Error::Refused(_) | Error::Unreadable(_) = error {
                tracing::error!(error = %causes(&error), "the database refuses an outcome");
                debt = match debt {
                    Debt::Complete { completion, fingerprint, keeping, .. } => {
                        Debt::Unkept { completion, fingerprint, keeping }
                    }
                    // One that is in the spill stays there: the next process tries again, and sets it aside.
                    Debt::Unkept { .. }
                    | Debt::Unknown { .. }
                    | Debt::Release { .. }
                    | Debt::Withdraw { .. }
                    | Debt::Unask { .. }
                    | Debt::Unraise { .. }
                    | Debt::Late(_) => return Ending::LookAgain,
                };
                continue;
            }
            tracing::debug!(error = %causes(&error), "an outcome is still owed to the database");
            let pausing = tokio::time::timeout(pause.mul_f64(0.5 + fastrand::f64() / 2.0), back);
            if self.ending.run_until_cancelled(pausing).await.is_none() {
                return self.hand_over(debt).await;
            }
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Leaves a debt to the next process: an outcome in the spill, where it was not there yet.
    async fn hand_over(&self, debt: Debt) -> Ending {
        match &debt {
            Debt::Complete { completion, fingerprint, keeping: Keeping::Memory(_), .. }
            | Debt::Unkept { completion, fingerprint, keeping: Keeping::Memory(_) } => {
                // Where there is still no room, the record becomes unknown.
                drop(self.spill.keep(completion, *fingerprint).await);
            }
            Debt::Release { late: Some((late, Keeping::Memory(_))), .. } => {
                drop(self.spill.keep_freed(late, false).await);
            }
            Debt::Late(late) => self.hand_over_late(late).await,
            Debt::Complete { keeping: Keeping::Spilled(_), .. }
            | Debt::Unkept { keeping: Keeping::Spilled(_), .. }
            | Debt::Unknown { .. }
            | Debt::Release { .. }
            | Debt::Withdraw { .. }
            | Debt::Unask { .. }
            | Debt::Unraise { .. } => {}
        }
        Ending::LookAgain
    }

    /// The next process notes it: it finds its record gone on, as this one did.
    async fn hand_over_late(&self, late: &LateOutcome) {
        let kept = match late.completion() {
            Some(completion) => self.spill.keep(&completion, NOBODYS).await,
            None => self.spill.keep_freed(late, true).await,
        };
        if !matches!(kept, Keeping::Spilled(_)) {
            let (record, outcome) = (late.fence.id, late.summary());
            tracing::error!(%record, outcome, "the process ends, and the audit table has not got a late outcome");
        }
    }

    async fn try_pay(&self, debt: &Debt) -> Result<Paid, Error> {
        match debt {
            Debt::Complete { completion, fingerprint, caller, open, .. } => {
                self.complete(completion, (*fingerprint, caller.as_ref()), open.as_ref()).await
            }
            Debt::Unknown { scope, fence, open } => {
                match self.lose(scope, *fence, open.as_ref()).await? {
                    Changed::Yes => Ok(Paid::taken(Ending::Unknown(fence.id))),
                    Changed::Locked => Err(locked()),
                    Changed::No => self.in_its_place(scope, fence.id).await,
                }
            }
            Debt::Unkept { completion, .. } => self.unkept(completion).await,
            Debt::Release { scope, fence, ending, late } => {
                let freed = || Ok(Paid { ending: ending.clone(), how: Drained::Released });
                match self.store.release(scope, *fence).await? {
                    Changed::Yes => return freed(),
                    Changed::Locked => return Err(locked()),
                    Changed::No => {}
                }
                let standing = self.standing(scope, fence.id).await?;
                // Gone by the first try of this very release, most likely, of which no word came.
                if matches!(standing, Standing::Gone) {
                    return freed();
                }
                let late = late.as_ref().map(|(late, _)| (**late).clone());
                self.stands(standing, scope, *fence, late).await
            }
            Debt::Late(late) => {
                self.store.note_late_outcome(late).await?;
                Ok(Paid::taken(Ending::LookAgain))
            }
            Debt::Withdraw { scope, fence, window } => {
                self.undo(*window, || self.store.release(scope, *fence)).await
            }
            Debt::Unask { scope, fence, window } => {
                self.undo(*window, || self.store.mark_unknown(scope, *fence)).await
            }
            Debt::Unraise { scope, fence, owner, window } => {
                self.unraise(scope, *fence, *owner, *window).await
            }
        }
    }

    /// What a doubt has become that is none any more, whoever ended it.
    async fn in_its_place(&self, scope: &Scope, id: RecordId) -> Result<Paid, Error> {
        Ok(Paid::taken(match self.standing(scope, id).await? {
            Standing::Completed(replay) => self.kept(scope, replay),
            Standing::Open | Standing::Gone => Ending::Unknown(id),
        }))
    }

    /// Undoes what may still be committed, again and again.
    async fn undo<F>(&self, window: Duration, undo: impl Fn() -> F) -> Result<Paid, Error>
    where
        F: Future<Output = Result<Changed, Error>>,
    {
        let until = Instant::now() + window;
        loop {
            // Found and undone: it had been committed, and cannot be once more.
            let found = undo().await? == Changed::Yes;
            if found || Instant::now() >= until {
                return Ok(Paid::taken(Ending::LookAgain));
            }
            tokio::time::sleep(WITHDRAW_EVERY.min(window)).await;
        }
    }

    /// Takes back a raise that may still be committed. It is looked at before anything is changed: others may be at the next
    /// attempt by now, if this process seemed to be dead, and theirs is none of ours.
    async fn unraise(
        &self,
        scope: &Scope,
        fence: Fence,
        owner: OwnerId,
        window: Duration,
    ) -> Result<Paid, Error> {
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
                Changed::Yes => Ok(Paid::taken(Ending::Unknown(fence.id))),
                Changed::No => self.in_its_place(scope, fence.id).await,
                Changed::Locked => Err(locked()),
            };
        }
    }

    async fn complete(
        &self,
        completion: &Arc<Completion>,
        (fingerprint, caller): (Fingerprint, Option<&Caller>),
        open: Option<&Arc<Proposal>>,
    ) -> Result<Paid, Error> {
        let begun = Instant::now();
        let written = self.write(completion, open, begun + TRY).await?;
        match written.settled {
            Settled::Done { expires_at } => {
                let ends = begun + completion.retention;
                self.ends.completed(&written.completion, (fingerprint, caller), ends, open);
                let (fence, caller) = (completion.fence, caller.cloned());
                let answer = written.completion.answer.clone();
                let replay = Replay::new(fence, fingerprint, caller, answer, expires_at, ends);
                Ok(Paid::taken(self.kept(&completion.scope, Arc::new(replay))))
            }
            Settled::Fenced => {
                let Completion { scope, fence, .. } = &**completion;
                let standing = self.standing(scope, fence.id).await?;
                self.stands(standing, scope, *fence, Some((&**completion).into())).await
            }
            Settled::Locked => Err(locked()),
        }
    }

    /// Completes a record. One that the database has forgotten meanwhile is brought back for it.
    pub(crate) async fn write(
        &self,
        completion: &Arc<Completion>,
        open: Option<&Arc<Proposal>>,
        deadline: Instant,
    ) -> Result<Written, Error> {
        let written = store::complete_in_some_form(&*self.store, completion, deadline).await?;
        match open {
            Some(open) if written.settled == Settled::Fenced => {
                // Also where it was there: whoever looks after this process's records may have brought it back in between.
                self.bring_back(open, completion.fence).await?;
                store::complete_in_some_form(&*self.store, completion, deadline).await
            }
            Some(_) | None => Ok(written),
        }
    }

    /// Marks an attempt unknown. One that the database has forgotten meanwhile is brought back for it.
    pub(crate) async fn lose(
        &self,
        scope: &Scope,
        fence: Fence,
        open: Option<&Arc<Proposal>>,
    ) -> Result<Changed, Error> {
        let mut marked = self.store.mark_unknown(scope, fence).await?;
        let Some(open) = open else { return Ok(marked) };
        if marked == Changed::No {
            // As above.
            self.bring_back(open, fence).await?;
            marked = self.store.mark_unknown(scope, fence).await?;
        }
        if marked == Changed::Yes && !self.ends.was_freed(fence.id) {
            self.ends.unknown(fence, open);
        }
        Ok(marked)
    }

    /// The row of this record is about to go, rightly.
    pub(super) fn forget(&self, record: RecordId) {
        self.ends.forget(record);
    }

    /// Puts the row of an attempt that is in progress here back, where the database has forgotten it. Whether it was gone.
    pub(crate) async fn bring_back(&self, open: &Proposal, fence: Fence) -> Result<bool, Error> {
        // Somebody else may have completed it while this process slept, and what was kept so briefly may be over since.
        if open.retention < BROUGHT_BACK || self.ends.was_freed(fence.id) {
            return Ok(false);
        }
        let proposal = Proposal { owner: self.lease.current().owner, ..open.clone() };
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

    /// Says of a record whose outcome the database refuses to hold what can be said: that it is unknown, and in the audit
    /// table what is known of it.
    async fn unkept(&self, completion: &Completion) -> Result<Paid, Error> {
        let Completion { scope, fence, .. } = completion;
        let late = LateOutcome::from(completion);
        match self.store.mark_unknown(scope, *fence).await? {
            Changed::Locked => return Err(locked()),
            Changed::Yes => {}
            // It is unknown already, or has gone on.
            Changed::No => {
                let standing = self.standing(scope, fence.id).await?;
                return self.stands(standing, scope, *fence, Some(late)).await;
            }
        }
        self.store.note_late_outcome(&late).await?;
        self.noted(&late);
        Ok(Paid { ending: Ending::Unknown(fence.id), how: Drained::FencedOff })
    }

    fn kept(&self, scope: &Scope, replay: Arc<Replay>) -> Ending {
        self.cache.put(scope, &replay);
        Ending::Kept(replay)
    }

    /// How an entry ends whose attempt was overtaken; what the attempt came to is noted, unless that very answer stands. One
    /// of the same attempt that differs is a look-up's or the application's.
    async fn stands(
        &self,
        standing: Standing,
        scope: &Scope,
        fence: Fence,
        late: Option<LateOutcome>,
    ) -> Result<Paid, Error> {
        let (ending, own) = match standing {
            Standing::Completed(replay) => {
                let own = replay.fence == fence
                    && late.as_ref().is_none_or(|late| late.is(&replay.answer));
                (self.kept(scope, replay), own)
            }
            Standing::Open | Standing::Gone => (Ending::LookAgain, false),
        };
        if let Some(late) = late.filter(|_| !own) {
            // The debt is paid when this is written, and not before: what is in the spill stays there until then.
            self.store.note_late_outcome(&late).await?;
            self.noted(&late);
        }
        let how = if own { Drained::Already } else { Drained::FencedOff };
        Ok(Paid { ending, how })
    }
}

fn holds(record: &Record, by: OwnerId) -> bool {
    matches!(record.state, State::InProgress { owner, .. } if owner == by)
}

fn is_completed(record: Option<&Record>) -> bool {
    record.is_some_and(|record| matches!(record.state, State::Completed(_)))
}

/// Somebody's transaction holds the record: what is owed is owed on.
fn locked() -> Error {
    Error::Unavailable("another transaction holds the record".into())
}
