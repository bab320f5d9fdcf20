//! The end of an attempt as a value, and the one way in which it is written to the store.
//!
//! A request tries this once, under its caller's deadline; the retrying task repeats it while the process lives; the next
//! process does it for what it finds in the spill. All of them get the same decision, [`settle`]'s:
//!
//! | end | a row fits | no row fits, and the scope has | so the end is |
//! | --- | --- | --- | --- |
//! | complete | completed | this attempt, with this status and body | already done |
//! | complete | | anything else, or nothing | fenced off, and noted as late |
//! | unkept | unknown, and noted | as for complete | as for complete |
//! | release | released | nothing of this record, and an earlier try may have released it | already done |
//! | release | | anything else, or nothing | fenced off, and noted as late |
//! | unknown | unknown | an answer | fenced off: that answer counts |
//! | unknown | | anything else, or nothing | unknown |
//! | late | | (it is not looked at) | fenced off, and noted as late |
//!
//! What must stay true:
//!
//! - A change names the attempt's fence. "No row fits" is read back before anything is concluded from it.
//! - A row that somebody's transaction holds says nothing yet: the end stays pending ([`Unsettled::Locked`]).
//! - What an attempt came to is in its record or in the audit table. [`Settlement::late`] is still to be noted, and the end
//!   is pending until it is. Two things are not noted: the answer to a look-up (nothing was executed for it), and
//!   what the API says in time of an attempt that it has completed itself ([`Settlement::of_own_attempt`]).
//! - What the database refuses, or cannot read back, is pending no more: [`End::refused`] says what is left to be written.

mod unsettled;

use std::sync::Arc;
use std::time::{Instant, SystemTime};

pub(super) use self::unsettled::Unsettled;
use crate::record::{Caller, Completed, Fence, Fingerprint, Record, RecordId, Scope, State};
use crate::store::{
    Changed, Completion, LateEnd, LateOutcome, Proposal, Records, Settled, complete_in_some_form,
};
use crate::telemetry::Drained;

/// The end of an attempt, as it has to be written.
#[derive(Clone)]
pub(super) enum End {
    /// It executed: its answer is kept, with its events.
    Complete(Executed),
    /// It executed, and the database refuses to hold its answer: the record becomes unknown, and the outcome goes to the
    /// audit table.
    Unkept(Executed),
    /// It is known not to have executed: its key is free.
    Release(NotExecuted),
    /// Nobody knows what the API did.
    Unknown {
        scope: Scope,
        fence: Fence,
        /// What the row says, while it is in progress here.
        row: Option<Arc<Proposal>>,
    },
    /// Its record has gone on: what it came to is noted.
    Late(Box<LateOutcome>),
}

/// What is known of an attempt that executed.
#[derive(Clone)]
pub(super) struct Executed {
    pub(super) completion: Arc<Completion>,
    pub(super) fingerprint: Fingerprint,
    pub(super) caller: Option<Caller>,
    /// What the row says, while it is in progress here.
    pub(super) row: Option<Arc<Proposal>>,
    /// Whether the answer was found by a look-up: then nothing is noted where the record has gone on.
    pub(super) found: bool,
}

/// What is known of an attempt that did not execute.
#[derive(Clone)]
pub(super) struct NotExecuted {
    pub(super) scope: Scope,
    pub(super) fence: Fence,
    /// What is noted where its record has gone on; none: nothing of it was ever promised to anybody.
    pub(super) late: Option<LateEnd>,
    /// Whether an earlier try of this release may have been committed: then a record that is gone was released by it.
    pub(super) tried: bool,
}

/// What became of an end: it is not pending any more, once [`Settlement::late`] is noted.
pub(super) enum Settlement {
    /// The answer is kept, in this form, until then.
    Completed { written: Arc<Completion>, expires_at: SystemTime },
    /// The key is free.
    Released,
    /// The record is unknown. `marked`: it was in progress until now.
    Unknown { record: RecordId, marked: bool, late: Option<LateOutcome> },
    /// This very end had been written before, or by the application: with this answer, where it executed.
    Already(Option<Box<Stored>>),
    /// The record has gone on: this answer counts, where there is one.
    FencedOff { answer: Option<Box<Stored>>, late: Option<LateOutcome> },
}

/// A completed record.
pub(super) struct Stored {
    pub(super) fence: Fence,
    pub(super) fingerprint: Fingerprint,
    pub(super) caller: Option<Caller>,
    pub(super) completed: Completed,
}

/// What the scope has now, where an end found no row.
enum Current {
    Completed(Box<Stored>),
    /// Its record, in progress or unknown: at another attempt, or at this one.
    Open,
    /// Its record is gone, or the scope has another one.
    Gone,
}

impl End {
    /// Of which attempt.
    pub(super) fn fence(&self) -> Fence {
        match self {
            Self::Complete(executed) | Self::Unkept(executed) => executed.completion.fence,
            Self::Release(not) => not.fence,
            Self::Unknown { fence, .. } => *fence,
            Self::Late(late) => late.fence,
        }
    }

    /// What the row says that the database has forgotten, if no row fits: the attempt was in progress here.
    pub(super) fn row(&self) -> Option<&Arc<Proposal>> {
        match self {
            Self::Complete(executed) => executed.row.as_ref(),
            Self::Unknown { row, .. } => row.as_ref(),
            // What is freed may rightly be gone.
            Self::Unkept(_) | Self::Release(_) | Self::Late(_) => None,
        }
    }

    /// The same after a try that may have been committed.
    pub(super) fn again(mut self) -> Self {
        if let Self::Release(not) = &mut self {
            not.tried = true;
        }
        self
    }

    /// What is left to be written of an end that the database refuses; none: nothing of it.
    pub(super) fn refused(self) -> Option<Self> {
        match self {
            Self::Complete(executed) => Some(Self::Unkept(executed)),
            Self::Unkept(_) | Self::Release(_) | Self::Unknown { .. } | Self::Late(_) => None,
        }
    }

    /// What is noted where the record has gone on.
    pub(super) fn late(&self) -> Option<LateOutcome> {
        match self {
            Self::Complete(executed) | Self::Unkept(executed) => {
                (!executed.found).then(|| (&*executed.completion).into())
            }
            Self::Release(NotExecuted { scope, fence, late, .. }) => {
                let end = late.clone()?;
                Some(LateOutcome { scope: scope.clone(), fence: *fence, end })
            }
            Self::Unknown { .. } => None,
            Self::Late(late) => Some((**late).clone()),
        }
    }

    /// Under which scope.
    pub(super) fn scope(&self) -> &Scope {
        match self {
            Self::Complete(executed) | Self::Unkept(executed) => &executed.completion.scope,
            Self::Release(not) => &not.scope,
            Self::Unknown { scope, .. } => scope,
            Self::Late(late) => &late.scope,
        }
    }

    /// What the end is where no row fitted.
    fn overtaken(&self, current: Current) -> Settlement {
        let fence = self.fence();
        match (self, current) {
            (Self::Release(not), Current::Gone) if not.tried => Settlement::Already(None),
            (Self::Unknown { .. }, Current::Open | Current::Gone) => {
                Settlement::Unknown { record: fence.id, marked: false, late: None }
            }
            (_, Current::Open | Current::Gone) => {
                Settlement::FencedOff { answer: None, late: self.late() }
            }
            (_, Current::Completed(answer)) => {
                let late = self.late();
                let own = late.as_ref().is_none_or(|late| late.is(&answer.completed.answer));
                if own && answer.fence == fence {
                    return Settlement::Already(Some(answer));
                }
                Settlement::FencedOff { answer: Some(answer), late }
            }
        }
    }
}

impl Settlement {
    /// What is still to be noted in the audit table.
    pub(super) fn late(&self) -> Option<&LateOutcome> {
        match self {
            Self::Unknown { late, .. } | Self::FencedOff { late, .. } => late.as_ref(),
            Self::Completed { .. } | Self::Released | Self::Already(_) => None,
        }
    }

    /// As how it is counted.
    pub(super) fn result(&self) -> Drained {
        match self {
            Self::Completed { .. } => Drained::Completed,
            Self::Released => Drained::Released,
            Self::Already(_) => Drained::Already,
            Self::Unknown { .. } | Self::FencedOff { .. } => Drained::FencedOff,
        }
    }

    /// Whether no row fitted, and there is no answer: the database may have forgotten the row.
    pub(super) fn found_nothing(&self) -> bool {
        matches!(self, Self::Unknown { marked: false, .. } | Self::FencedOff { answer: None, .. })
    }

    /// The same where this attempt's record was in the hands of this process until after it was read: nobody but the
    /// application itself can have completed it then, whatever it says afterwards.
    pub(super) fn of_own_attempt(self, attempt: Fence) -> Self {
        match self {
            Self::FencedOff { answer: Some(answer), .. } if answer.fence == attempt => {
                Self::Already(Some(answer))
            }
            Self::Completed { .. }
            | Self::Released
            | Self::Unknown { .. }
            | Self::Already(_)
            | Self::FencedOff { .. } => self,
        }
    }
}

/// Tries once to write an end. `deadline`: up to when a completion waits for others.
///
/// # Errors
/// [`Unsettled`]: it is still pending.
pub(super) async fn settle(
    store: &dyn Records,
    end: &End,
    deadline: Instant,
) -> Result<Settlement, Unsettled> {
    let (scope, fence) = (end.scope(), end.fence());
    let changed = match end {
        End::Complete(executed) => {
            let written = complete_in_some_form(store, &executed.completion, deadline).await?;
            match written.settled {
                Settled::Done { expires_at } => {
                    return Ok(Settlement::Completed { written: written.completion, expires_at });
                }
                Settled::Fenced => Changed::No,
                Settled::Locked => Changed::Locked,
            }
        }
        End::Release(_) => store.release(scope, fence).await?,
        End::Unknown { .. } | End::Unkept(_) => store.mark_unknown(scope, fence).await?,
        End::Late(_) => return Ok(end.overtaken(Current::Open)),
    };
    match changed {
        Changed::Yes if matches!(end, End::Release(_)) => Ok(Settlement::Released),
        Changed::Yes => {
            Ok(Settlement::Unknown { record: fence.id, marked: true, late: end.late() })
        }
        Changed::Locked => Err(Unsettled::Locked),
        Changed::No => look(store, end).await,
    }
}

/// What an end is that found no row, by what the scope has now. Nothing is changed.
///
/// # Errors
/// [`Unsettled::Unread`].
pub(super) async fn look(store: &dyn Records, end: &End) -> Result<Settlement, Unsettled> {
    let found = store.find(end.scope()).await.map_err(Unsettled::Unread)?;
    Ok(end.overtaken(current(found, end.fence().id)))
}

/// What the scope of the record `id` has now.
fn current(found: Option<Record>, id: RecordId) -> Current {
    match found {
        Some(Record { fence, fingerprint, caller, state }) if fence.id == id => match state {
            State::Completed(completed) => {
                let completed = *completed;
                Current::Completed(Box::new(Stored { fence, fingerprint, caller, completed }))
            }
            State::InProgress { .. } | State::Unknown => Current::Open,
        },
        Some(_) | None => Current::Gone,
    }
}

#[cfg(test)]
mod tests;
