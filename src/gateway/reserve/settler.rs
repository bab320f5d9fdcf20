//! What is owed to the store: ends of attempts that it has not taken yet.
//!
//! A debt is repeated with backoff until the store answers. Meanwhile the scope's entry stays at the desk, so that
//! duplicates on this replica meet it before the database. Debts live in memory: what is left when the process ends
//! is found as `unknown` once the owner's lease has run out. Their number is bounded by the requests in flight,
//! since nothing new can be reserved while the database takes nothing.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio_util::task::TaskTracker;

use super::cache::Cache;
use super::{Ending, Lead, Replay};
use crate::record::{Fence, Fingerprint, Record, Scope, State};
use crate::store::{Changed, Completion, Error, Settled, Store};
use crate::telemetry::{Metrics, causes};

const PAUSE_FIRST: Duration = Duration::from_millis(50);
const PAUSE_MAX: Duration = Duration::from_secs(2);

/// How long one try of a completion may take.
const TRY: Duration = Duration::from_secs(10);

/// The end of an attempt, as it has to be written.
#[derive(Debug)]
pub(crate) enum Debt {
    /// The outcome is known.
    Complete { completion: Box<Completion>, fingerprint: Fingerprint },
    /// Nobody knows what the upstream did.
    Unknown { scope: Scope, fence: Fence },
    /// It is known not to have executed; those who waited get this ending.
    Release { scope: Scope, fence: Fence, ending: Ending },
    /// A reservation that may still be committed by a backend that was lost: deleted, again and again, until
    /// that backend cannot commit any more.
    Withdraw { scope: Scope, fence: Fence, window: Duration },
    /// A takeover for a question that may still be committed in the same way: unknown again. The attempt itself may have
    /// executed, so it is never deleted.
    Unask { scope: Scope, fence: Fence, window: Duration },
}

/// Pays debts. Clones are one settler.
#[derive(Clone)]
pub(crate) struct Settler {
    store: Arc<dyn Store>,
    cache: Cache,
    metrics: Arc<Metrics>,
    tasks: TaskTracker,
}

impl Settler {
    pub(super) fn new(store: Arc<dyn Store>, cache: Cache, metrics: Arc<Metrics>) -> Self {
        Self { store, cache, metrics, tasks: TaskTracker::new() }
    }

    /// Takes a debt over, with the entry of its scope.
    pub(super) fn owe(&self, debt: Debt, lead: Lead) {
        // Outside a runtime there is nobody to pay: the process is ending, and the lease will tell.
        if tokio::runtime::Handle::try_current().is_err() {
            return;
        }
        let (settler, guard) = (self.clone(), self.metrics.settling());
        self.tasks.spawn(async move {
            let ending = settler.pay(debt).await;
            lead.end(ending);
            drop(guard);
        });
    }

    /// Waits until nothing is owed any more.
    pub(crate) async fn idle(&self) {
        self.tasks.close();
        self.tasks.wait().await;
        self.tasks.reopen();
    }

    async fn pay(&self, debt: Debt) -> Ending {
        let mut pause = PAUSE_FIRST;
        loop {
            let error = match self.try_pay(&debt).await {
                Ok(ending) => return ending,
                Err(error) => error,
            };
            if let Error::Refused(_) = error {
                tracing::error!(error = %causes(&error), "the database refuses an outcome");
                return Ending::LookAgain;
            }
            tracing::debug!(error = %causes(&error), "an outcome is still owed to the database");
            tokio::time::sleep(pause.mul_f64(0.5 + fastrand::f64() / 2.0)).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    async fn try_pay(&self, debt: &Debt) -> Result<Ending, Error> {
        match debt {
            Debt::Complete { completion, fingerprint } => {
                self.complete(completion, *fingerprint).await
            }
            Debt::Unknown { scope, fence } => {
                self.store.mark_unknown(scope, *fence).await?;
                Ok(Ending::Unknown(fence.id))
            }
            Debt::Release { scope, fence, ending } => {
                let released = self.store.release(scope, *fence).await?;
                Ok(if released == Changed::Yes { ending.clone() } else { Ending::LookAgain })
            }
            Debt::Withdraw { scope, fence, window } => {
                self.undo(*window, || self.store.release(scope, *fence)).await
            }
            Debt::Unask { scope, fence, window } => {
                self.undo(*window, || self.store.mark_unknown(scope, *fence)).await
            }
        }
    }

    /// Undoes what may still be committed, again and again.
    async fn undo<F>(&self, window: Duration, undo: impl Fn() -> F) -> Result<Ending, Error>
    where
        F: Future<Output = Result<Changed, Error>>,
    {
        let until = Instant::now() + window;
        loop {
            // Found and undone: it had been committed, and cannot be once more.
            let found = undo().await? == Changed::Yes;
            if found || Instant::now() >= until {
                return Ok(Ending::LookAgain);
            }
            tokio::time::sleep(PAUSE_MAX.min(window)).await;
        }
    }

    async fn complete(
        &self,
        completion: &Completion,
        fingerprint: Fingerprint,
    ) -> Result<Ending, Error> {
        let begun = Instant::now();
        let settled = self.store.complete(completion.clone(), begun + TRY).await?;
        let replay = match settled {
            Settled::Done { expires_at } => {
                let ends = begun + completion.retention;
                let answer = completion.answer.clone();
                Replay::new(completion.fence.id, fingerprint, answer, expires_at, ends)
            }
            Settled::Fenced => match self.store.find(&completion.scope).await? {
                Some(Record { fence, fingerprint, state: State::Completed(completed) })
                    if fence.id == completion.fence.id =>
                {
                    super::replay_of(fence, fingerprint, *completed)
                }
                Some(_) | None => {
                    tracing::warn!(record = %completion.fence.id, "a late outcome found its record taken over");
                    return Ok(Ending::LookAgain);
                }
            },
        };
        let replay = Arc::new(replay);
        self.cache.put(&completion.scope, &replay);
        Ok(Ending::Kept(replay))
    }
}
