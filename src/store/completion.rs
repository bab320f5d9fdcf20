//! An outcome to be kept, and the forms in which it is offered to a database that refuses some of it.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use super::{Error, Records};
use crate::record::event::Event;
use crate::record::{Answer, Fence, KeptBody, Scope, Spelling};

/// An outcome to be kept: the answer and its events, written in one transaction.
#[derive(Clone, Debug)]
pub struct Completion {
    /// The record's scope.
    pub scope: Scope,
    /// The attempt that got the answer.
    pub fence: Fence,
    /// What will be replayed.
    pub answer: Answer,
    /// How long, counted from the completion.
    pub retention: Duration,
    /// What is announced.
    pub events: Vec<Event>,
}

/// What became of a [`Completion`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Settled {
    /// It is durable.
    Done {
        /// When the answer's retention ends, by the database's clock.
        expires_at: SystemTime,
    },
    /// The record is no longer at this fence, or is completed already: nothing was written, no event either.
    Fenced,
    /// An open transaction of somebody else held the row until the deadline: nothing was written. It may be about to
    /// complete the record with another answer.
    Locked,
}

/// What became of a [`Completion`], and in which form it was written.
#[derive(Clone, Debug)]
pub struct Written {
    /// What became of it.
    pub settled: Settled,
    /// As it was written, where it is [`Settled::Done`].
    pub completion: Arc<Completion>,
}

/// Completes a record. Of an outcome that the database refuses to hold it leaves out what may be the reason: first the
/// ordering keys of its events, then headers and body of its answer. What was executed, and its events, are kept.
///
/// # Errors
/// As [`Records::complete`]; [`Error::Refused`] where the database refuses the last form, too.
pub async fn complete_in_some_form(
    store: &dyn Records,
    completion: &Arc<Completion>,
    deadline: Instant,
) -> Result<Written, Error> {
    let record = completion.fence.id;
    let mut completion = Arc::clone(completion);
    for (left_out, lessen) in LESSER_FORMS {
        match store.complete(Arc::clone(&completion), deadline).await {
            Ok(settled) => return Ok(Written { settled, completion }),
            Err(Error::Refused(cause)) => {
                tracing::error!(%record, %cause, "the database refused a completion; again without {left_out}");
                lessen(Arc::make_mut(&mut completion));
            }
            Err(error) => return Err(error),
        }
    }
    let settled = store.complete(Arc::clone(&completion), deadline).await?;
    Ok(Written { settled, completion })
}

/// What is left out, one after the other.
type Lessen = fn(&mut Completion);

const LESSER_FORMS: [(&str, Lessen); 2] = [
    ("ordering keys", |completion| {
        for event in &mut completion.events {
            event.ordering_key = None;
        }
    }),
    ("headers and body", |completion| {
        let Answer { headers, spelling, body, .. } = &mut completion.answer;
        headers.clear();
        *spelling = Spelling::default();
        *body = KeptBody::NotRetained;
    }),
];
