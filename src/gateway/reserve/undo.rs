//! How a statement is undone that a lost backend may still commit, so that nobody takes what it wrote for an attempt that was
//! sent.

use std::time::{Duration, Instant};

use crate::gateway::settle::{End, Settlement, Unsettled, look};
use crate::record::{Fence, OwnerId, Record, Scope, State};
use crate::store::{Changed, Records};

/// How often what may still be committed is looked for.
const LOOK_EVERY: Duration = Duration::from_secs(2);

/// A statement to be undone, again and again, until its backend cannot commit it any more.
pub(crate) struct Undo {
    pub(super) scope: Scope,
    pub(super) fence: Fence,
    /// For how long the backend may still commit it.
    pub(super) window: Duration,
    pub(super) of: Statement,
}

/// What may have been committed.
#[derive(Clone, Copy)]
pub(crate) enum Statement {
    /// A reservation, or a takeover of an expired record or for a retry: released.
    Reservation,
    /// A takeover for a look-up: unknown again. The attempt itself may have executed, so it is never released.
    Lookup,
    /// The next attempt after the fence's, which this owner wrote in the place of its look-up and did not send: unknown
    /// again, whichever of the two is found.
    Raise { owner: OwnerId },
}

impl Undo {
    /// The end of the attempt where nobody knows it.
    pub(super) fn unknown(&self) -> End {
        End::Unknown { scope: self.scope.clone(), fence: self.fence, row: None }
    }

    /// Undoes it. With what became of the attempt, where that is known.
    pub(super) async fn write(&self, store: &dyn Records) -> Result<Option<Settlement>, Unsettled> {
        if let Statement::Raise { owner } = self.of {
            return self.undo_raise(store, owner).await.map(Some);
        }
        let until = Instant::now() + self.window;
        loop {
            let undone = match self.of {
                Statement::Lookup => store.mark_unknown(&self.scope, self.fence).await?,
                Statement::Reservation | Statement::Raise { .. } => {
                    store.release(&self.scope, self.fence).await?
                }
            };
            // Found and undone: it had been committed, and cannot be once more.
            if undone == Changed::Yes || Instant::now() >= until {
                return Ok(None);
            }
            tokio::time::sleep(LOOK_EVERY.min(self.window)).await;
        }
    }

    /// The record is read before anything is changed: others may be at the next attempt by now, if this process seemed to be
    /// dead, and that one is not this process's.
    async fn undo_raise(
        &self,
        store: &dyn Records,
        owner: OwnerId,
    ) -> Result<Settlement, Unsettled> {
        let Self { scope, fence, window, .. } = self;
        let until = Instant::now() + *window;
        let raised = Fence { attempt: fence.attempt.next(), ..*fence };
        loop {
            let over = Instant::now() >= until;
            let found = store.find(scope).await?;
            let own = found.as_ref().map(|record| (record.fence, is_held_by(record, owner)));
            let undone = match own {
                // It had been committed, and cannot be once more.
                Some((at, true)) if at == raised => store.release(scope, raised).await?,
                Some((at, true)) if at == *fence && over => {
                    store.mark_unknown(scope, *fence).await?
                }
                Some((at, _)) if at == *fence && !over && !is_completed(found.as_ref()) => {
                    tokio::time::sleep(LOOK_EVERY.min(*window)).await;
                    continue;
                }
                Some(_) | None => Changed::No,
            };
            return match undone {
                Changed::Yes => {
                    Ok(Settlement::Unknown { record: fence.id, marked: false, late: None })
                }
                // Somebody else ended the doubt: what is found counts.
                Changed::No => look(store, &self.unknown()).await,
                Changed::Locked => Err(Unsettled::Locked),
            };
        }
    }
}

fn is_held_by(record: &Record, by: OwnerId) -> bool {
    matches!(record.state, State::InProgress { owner, .. } if owner == by)
}

fn is_completed(record: Option<&Record>) -> bool {
    record.is_some_and(|record| matches!(record.state, State::Completed(_)))
}
